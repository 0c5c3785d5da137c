"""From serve.yaml to `Batch.settings`: everything that decides a step, as JSON values, stored with the batch.

A step takes method, optimizer and threads from its batch, so that a replay repeats it under a changed serve.yaml.
Layout, dtype and seed are the workers' own: where they were changed, the dispatcher refuses the replay and names the
setting.
"""

from typing import Any

from reef.config import Config, OptimizerOptions
from reef.errors import ConfigError


def settings(config: Config) -> dict[str, Any]:
    """The settings of a batch reserved now.

    Raises:
        ConfigError: the optimizer's settings contradict each other.
    """
    training = config.training
    check_options(training.options)
    return {
        "method": {"name": config.recipe.implementation, **config.recipe.config.model_dump(mode="json")},
        "optimizer": training.options.model_dump(mode="json"),
        "layout": training.layout.model_dump(mode="json"),
        "dtype": training.dtype,
        "seed": training.seed,
        "threads": training.threads,
    }


def check_options(options: OptimizerOptions) -> None:
    """Refuse a schedule that Megatron would only assert against.

    Raises:
        ConfigError: names the two settings that contradict each other.
    """
    if options.min_lr > options.lr:
        raise ConfigError(
            f"training.options.min-lr is {options.min_lr}, above lr ({options.lr})", param="training.options.min-lr"
        )
    if options.lr_decay_style != "constant" and options.lr_warmup_steps >= options.lr_decay_steps:
        raise ConfigError(
            f"training.options.lr-warmup-steps is {options.lr_warmup_steps}; it must be below lr-decay-steps "
            f"({options.lr_decay_steps})",
            param="training.options.lr-warmup-steps",
        )
