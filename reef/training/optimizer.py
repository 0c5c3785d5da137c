"""Megatron's optimizer and learning-rate schedule: built once, set up anew for each step."""

import math
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from reef.errors import StepFailedError
from reef.options import OptimizerOptions
from reef.training import device


def build(model: Any, dtype: torch.dtype, options: OptimizerOptions) -> Any:
    """An optimizer (Megatron's ChainedOptimizer) for a model in its DDP wrapper, with moments of 0 and no step taken.

    Only what `options` says of its construction counts here; `apply_options` sets the rest before each step.
    """
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            min_lr=options.min_lr,
            weight_decay=options.weight_decay,
            clip_grad=options.clip_grad,
            adam_beta1=options.adam_beta1,
            adam_beta2=options.adam_beta2,
            adam_eps=options.adam_eps,
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            use_distributed_optimizer=options.use_distributed_optimizer,
        ),
        [model],
    )
    # Moments exist from the start, so that a checkpoint before the first step looks like any other.
    for part in optimizer.chained_optimizers:
        part.init_state_fn(part.optimizer, part.config)
    set_steps(optimizer, 0)
    return optimizer


def set_steps(optimizer: Any, steps: int) -> None:
    """Give each parameter its own count of steps (AdamW's bias correction); a load leaves it missing or shared."""
    for part in optimizer.chained_optimizers:
        if isinstance(part.optimizer, torch.optim.AdamW):
            for state in part.optimizer.state.values():
                state["step"] = torch.tensor(float(steps))
        else:  # the fused one of Transformer Engine or Apex counts by group
            for group in part.optimizer.param_groups:
                group["step"] = steps


def forget_steps(optimizer: Any) -> None:
    """Back to an optimizer that has taken no step."""
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()
    set_steps(optimizer, 0)


def apply_options(optimizer: Any, options: OptimizerOptions, steps_done: int) -> float:
    """Set the optimizer up for the step after `steps_done` others; return its learning rate.

    The schedule is Megatron's and a function of the count alone: with a warm-up, the first step has `lr_warmup_init`.
    """
    optimizer.config.clip_grad = options.clip_grad
    for group in optimizer.param_groups:
        group.update(
            max_lr=options.lr,
            min_lr=options.min_lr,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_eps,
        )
    moves = options.weight_decay_incr_style != "constant"
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=options.lr_warmup_init,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=options.lr_warmup_steps,
        lr_decay_steps=max(options.lr_decay_steps, options.lr_warmup_steps + 1),
        lr_decay_style=options.lr_decay_style,
        start_wd=options.start_weight_decay if moves else options.weight_decay,
        end_wd=options.end_weight_decay if moves else options.weight_decay,
        wd_incr_steps=options.wd_incr_steps or 0,
        wd_incr_style=options.weight_decay_incr_style,
        wsd_decay_steps=options.wsd_decay_steps,
        lr_wsd_decay_style=options.lr_wsd_decay_style,
    )
    scheduler.step(steps_done)
    return float(optimizer.param_groups[0]["lr"])


def update(optimizer: Any) -> float:
    """Clip the gathered gradients and step; return the gradient norm before clipping.

    Raises:
        StepFailedError: the norm is not finite. Every rank sees the same norm; no weight or moment has moved.
    """
    with device.megatron_calls():
        optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        if not math.isfinite(norm):
            raise StepFailedError(f"the gradient norm is {norm}: the step was refused and nothing moved")
        for part in optimizer.chained_optimizers:
            if part.config.clip_grad > 0.0:
                clip_grad_by_total_norm_fp32(part.get_parameters(), part.config.clip_grad, norm)
        optimizer.step_with_ready_grads()
    return norm
