"""The policy on Megatron-Core: one rank's GPTModel, its DDP wrapper, its optimizer and its learning-rate schedule."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from reef.config import Layout, OptimizerOptions
from reef.errors import StepFailedError
from reef.training import convert, device
from reef.training.architecture import Architecture
from reef.training.attention import FusedCausalAttention
from reef.training.weights import WeightFiles

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Policy:
    """One rank's share of the trained model."""

    architecture: Architecture
    module: Any  # GPTModel
    model: Any  # DDP around it
    optimizer: Any  # Megatron's ChainedOptimizer
    first_layer: int  # number of this stage's first layer in the whole model


def join_ranks(rank: int, world_size: int, layout: Layout, rendezvous: Path, seed: int) -> None:
    """Make the process groups of this rank. They meet over a file, so that no port is opened for it."""
    device.install()
    store = torch._C._distributed_c10d.FileStore(str(rendezvous), world_size)
    dist.init_process_group(device.backend(), store=store, rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline)
    torch.manual_seed(seed)  # Megatron seeds the device alone; checkpoints hold the CPU's random numbers too
    with device.megatron_calls():
        model_parallel_cuda_manual_seed(seed)


def leave_ranks() -> None:
    """End what `join_ranks` made; the process can join others afterwards."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build(architecture: Architecture, layout: Layout, dtype: str, weights: WeightFiles) -> Policy:
    """Build this rank's model with its part of `weights`, and an optimizer for it. Call after `join_ranks`."""
    with device.megatron_calls():
        config = _model_config(architecture, layout, DTYPES[dtype])
        module = GPTModel(
            config=config,
            transformer_layer_spec=_layer_spec(config),
            vocab_size=architecture.vocab_size,
            max_sequence_length=architecture.context_length,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            position_embedding_type="rope",
            rotary_base=architecture.rope_theta,
            share_embeddings_and_output_weights=architecture.tied,
        )
        first_layer = module.decoder.layers[0].layer_number - 1
        _read(module, architecture, first_layer, weights)
        module.to(device.current())
        wrapped = module if config.params_dtype is torch.float32 else Float16Module(config, module)
        model = DistributedDataParallel(
            config=config,
            ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            module=wrapped,
        )
        optimizer = _build_optimizer(model, config.params_dtype)
    config.finalize_model_grads_func = _finalize
    config.grad_scale_func = None
    return Policy(architecture, module, model, optimizer, first_layer)


def _read(module: Any, architecture: Architecture, first_layer: int, weights: WeightFiles) -> None:
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    convert.load(module, architecture, first_layer, weights.read, rank, size)


def load_weights(policy: Policy, weights: WeightFiles) -> None:
    """Replace this rank's weights, and with them the float32 copies that a bfloat16 optimizer steps; nothing else."""
    _read(policy.module, policy.architecture, policy.first_layer, weights)
    with device.megatron_calls():
        policy.optimizer.reload_model_params()


def _layer_spec(config: TransformerConfig) -> Any:
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    spec.submodules.self_attention.submodules.core_attention = FusedCausalAttention
    return spec


def _model_config(architecture: Architecture, layout: Layout, dtype: torch.dtype) -> TransformerConfig:
    return TransformerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_size,
        num_attention_heads=architecture.num_heads,
        num_query_groups=architecture.num_kv_heads,
        kv_channels=architecture.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=architecture.norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=architecture.qkv_bias,
        qk_layernorm=architecture.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Weights are loaded at once. Megatron's initialisation must still pass over them, since it also marks which
        # are cut over tensor ranks; without the marks the gradient norm would miss all ranks but the first.
        perform_initialization=True,
        use_cpu_initialization=True,
        init_method=_leave_as_it_is,
        output_layer_init_method=_leave_as_it_is,
        calculate_per_token_loss=True,  # gradients are summed over microbatches and ranks; see `_finalize`
        # Microbatches differ in length, so that stages must tell each other the shape.
        variable_seq_lengths=layout.pipeline > 1,
        moe_token_dispatcher_type="alltoall",  # no experts here, but variable lengths insist on it
        # Fused kernels come with Transformer Engine and Apex; the local spec has none.
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
        persist_layer_norm=False,
    )


def _leave_as_it_is(weight: torch.Tensor) -> None:
    """An initialisation that draws nothing."""


def _finalize(model: list[Any], num_tokens: torch.Tensor | None = None, **kwargs: Any) -> None:
    """Add up gradients over ranks and leave them a sum: a method's token weights are the whole batch's already."""
    finalize_model_grads(model, None, **kwargs)


def _build_optimizer(model: Any, dtype: torch.dtype) -> Any:
    defaults = OptimizerOptions()  # overwritten by `apply_options` before each step
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=defaults.lr,
            min_lr=defaults.min_lr,
            weight_decay=defaults.weight_decay,
            clip_grad=defaults.clip_grad,
            adam_beta1=defaults.adam_beta1,
            adam_beta2=defaults.adam_beta2,
            adam_eps=defaults.adam_eps,
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
        ),
        [model],
    )
    # Moments exist from the start, so that a checkpoint before the first step looks like any other.
    for part in optimizer.chained_optimizers:
        part.init_state_fn(part.optimizer, part.config)
    set_optimizer_steps(optimizer, 0)
    return optimizer


def set_optimizer_steps(optimizer: Any, steps: int) -> None:
    """Give each parameter its own count of steps (AdamW's bias correction); a load leaves it missing or shared."""
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            state["step"] = torch.tensor(float(steps))


def forget_steps(optimizer: Any) -> None:
    """Back to an optimizer that has taken no step."""
    for part in optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()
    set_optimizer_steps(optimizer, 0)


def apply_options(optimizer: Any, options: OptimizerOptions, steps_done: int) -> float:
    """Set the optimizer up for the step after `steps_done` others; return its learning rate.

    The schedule is Megatron's and a function of the count alone: with warm-up, the first step has a rate of 0.
    """
    optimizer.config.clip_grad = options.clip_grad
    for group in optimizer.param_groups:
        group.update(
            max_lr=options.lr,
            min_lr=options.min_lr,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_eps,
        )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=options.lr_warmup_steps,
        lr_decay_steps=max(options.lr_decay_steps, options.lr_warmup_steps + 1),
        lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    scheduler.step(steps_done)
    return float(optimizer.param_groups[0]["lr"])


def zero_gradients(policy: Policy) -> None:
    """Forget the gradients of the last step."""
    with device.megatron_calls():
        policy.model.zero_grad_buffer()
        policy.optimizer.zero_grad()


def update(policy: Policy) -> float:
    """Clip the gathered gradients and step the optimizer; return the gradient norm before clipping.

    Raises:
        StepFailedError: the norm is not finite. Every rank sees the same norm; no weight or moment has moved.
    """
    optimizer = policy.optimizer
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
