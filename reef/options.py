"""Megatron's optimizer and schedule, as settings: the policy's (`training.options`) and a critic's."""

from typing import Literal

from pydantic import Field, model_validator

from reef.section import Section


class OptimizerOptions(Section):
    """Megatron's optimizer, schedule and memory settings, by Megatron's names. Steps are counted from 0.

    Refuses settings that contradict each other, and those that need another one which is not there.
    """

    lr: float = Field(1e-4, gt=0, description="Peak learning rate.")
    min_lr: float = Field(0.0, ge=0, description="Learning rate at the end of the decay.")
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = Field(
        "constant", description="Shape of the decay; WSD: constant until the last `wsd-decay-steps` of it."
    )
    lr_decay_steps: int = Field(1000, gt=0, description="The step that ends the decay (constant ignores it).")
    lr_warmup_steps: int = Field(0, ge=0, description="Steps over which it rises from `lr-warmup-init`.")
    lr_warmup_init: float = Field(0.0, ge=0, description="Learning rate of the first step of a warm-up.")
    wsd_decay_steps: int | None = Field(None, gt=0, description="Steps of the decay that ends WSD; only for WSD.")
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = Field(
        "exponential", description="Shape of the decay that ends WSD."
    )
    weight_decay: float = Field(
        0.0, ge=0, description="AdamW weight decay of matrices and embeddings; norms and biases never decay."
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="How it moves from `start-weight-decay` to `end-weight-decay`; constant: `weight-decay`.",
    )
    start_weight_decay: float | None = Field(None, ge=0, description="Weight decay of the first step.")
    end_weight_decay: float | None = Field(None, ge=0, description="Weight decay after `wd-incr-steps`.")
    wd_incr_steps: int | None = Field(None, gt=0, description="Steps over which weight decay moves.")
    clip_grad: float = Field(1.0, ge=0, description="Largest gradient norm; 0: no clipping.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta 1.")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="AdamW beta 2.")
    adam_eps: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    use_distributed_optimizer: bool = Field(
        False, description="Each data rank keeps and steps its share of moments and float32 copies, not all of them."
    )
    overlap_grad_reduce: bool = Field(
        False, description="Add gradients up over data ranks while the last backward pass goes on."
    )
    recompute_granularity: Literal["full", "selective"] | None = Field(
        None, description="Activations computed again in the backward pass: layers, attention alone, or none."
    )
    recompute_method: Literal["uniform", "block"] | None = Field(
        None, description="With full: all layers in units, or the first ones of each stage."
    )
    recompute_num_layers: int | None = Field(
        None, gt=0, description="With full: layers of a unit (uniform), or of each stage (block)."
    )

    @model_validator(mode="after")
    def _schedule(self) -> "OptimizerOptions":
        if self.min_lr > self.lr:
            raise ValueError(f"training.options.min-lr is {self.min_lr}, above lr ({self.lr})")
        if self.lr_warmup_init > self.lr:
            raise ValueError(f"training.options.lr-warmup-init is {self.lr_warmup_init}, above lr ({self.lr})")
        if self.lr_warmup_init and not self.lr_warmup_steps:
            raise ValueError("training.options.lr-warmup-init starts a warm-up, and lr-warmup-steps is 0")
        if self.lr_decay_style != "constant" and self.lr_warmup_steps >= self.lr_decay_steps:
            raise ValueError(
                f"training.options.lr-warmup-steps is {self.lr_warmup_steps}; it must be below lr-decay-steps "
                f"({self.lr_decay_steps})"
            )
        return self

    @model_validator(mode="after")
    def _wsd(self) -> "OptimizerOptions":
        if (self.lr_decay_style == "WSD") != (self.wsd_decay_steps is not None):
            raise ValueError(
                f"training.options.wsd-decay-steps is {self.wsd_decay_steps} and lr-decay-style is "
                f"{self.lr_decay_style}: WSD needs it, and no other style has a use for it"
            )
        if self.wsd_decay_steps is not None and self.wsd_decay_steps > self.lr_decay_steps - self.lr_warmup_steps:
            raise ValueError(
                f"training.options.wsd-decay-steps is {self.wsd_decay_steps}, more than lr-decay-steps "
                f"({self.lr_decay_steps}) leaves after lr-warmup-steps ({self.lr_warmup_steps})"
            )
        return self

    @model_validator(mode="after")
    def _moving_weight_decay(self) -> "OptimizerOptions":
        moves = {
            "start-weight-decay": self.start_weight_decay,
            "end-weight-decay": self.end_weight_decay,
            "wd-incr-steps": self.wd_incr_steps,
        }
        constant = self.weight_decay_incr_style == "constant"
        for name, value in moves.items():
            if constant != (value is None):
                raise ValueError(
                    f"training.options.{name} is {value} and weight-decay-incr-style is "
                    f"{self.weight_decay_incr_style}: linear and cosine need it, and constant has no use for it"
                )
        if constant:
            return self
        if self.weight_decay:
            raise ValueError(
                f"training.options.weight-decay is {self.weight_decay}, but weight-decay-incr-style "
                f"{self.weight_decay_incr_style} moves it: leave it out"
            )
        if (self.start_weight_decay or 0.0) > (self.end_weight_decay or 0.0):
            raise ValueError(
                f"training.options.start-weight-decay is {self.start_weight_decay}, above end-weight-decay "
                f"({self.end_weight_decay})"
            )
        return self

    @model_validator(mode="after")
    def _recompute(self) -> "OptimizerOptions":
        full = self.recompute_granularity == "full"
        for name, value in (
            ("recompute-method", self.recompute_method),
            ("recompute-num-layers", self.recompute_num_layers),
        ):
            if full != (value is not None):
                raise ValueError(
                    f"training.options.{name} is {value} and recompute-granularity is {self.recompute_granularity}: "
                    "full needs it, and nothing else has a use for it"
                )
        return self
