"""From serve.yaml to `Batch.settings`: everything that decides a step, as JSON values, stored with the batch.

A step takes method, optimizer and threads from its batch, so that a replay repeats it under a changed serve.yaml. What
workers are built with is their own: dtype and seed must be as they were, and under another layout a replay's bits may
differ (see `reef.recovery`). Recomputing activations is the workers' own too, and changes no number.

A batch of an earlier Reef lacks the settings that came later: they had their defaults then.
"""

from collections.abc import Mapping
from typing import Any

from reef.config import Config, Layout, OptimizerOptions

WORKERS_OWN = ("layout", "dtype", "seed")
BUILT_WITH = ("use_distributed_optimizer", "overlap_grad_reduce")  # options that change the order of sums


def settings(config: Config) -> dict[str, Any]:
    """The settings of a batch reserved now."""
    training = config.training
    return {
        "method": {"name": config.recipe.implementation, **config.recipe.config.model_dump(mode="json")},
        "optimizer": training.options.model_dump(mode="json"),
        "layout": training.layout.model_dump(mode="json"),
        "dtype": training.dtype,
        "seed": training.seed,
        "threads": training.threads,
    }


def layout_of(settings: Mapping[str, Any]) -> Layout:
    """How the model is spread over the workers of these settings."""
    return Layout.model_validate(settings["layout"])


def options_of(settings: Mapping[str, Any]) -> OptimizerOptions:
    """Optimizer and schedule of these settings."""
    return OptimizerOptions.model_validate(settings["optimizer"])


def built_with(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the workers of these settings are built with, and no batch can change: values by the setting's name."""
    layout, options = layout_of(settings).model_dump(by_alias=True), options_of(settings)
    return {
        **{f"training.layout.{name}": value for name, value in layout.items()},
        **{f"training.options.{name.replace('_', '-')}": getattr(options, name) for name in BUILT_WITH},
        "training.dtype": settings["dtype"],
        "training.seed": settings["seed"],
    }


def taken_again(stored: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a batch that was reserved before workers of the settings `now` train it.

    They have no say in what they are built with, so that is stored as it is: a replay goes by it.
    """
    built = {name: now["optimizer"][name] for name in BUILT_WITH}
    return {
        **stored,
        **{name: now[name] for name in WORKERS_OWN},
        "optimizer": {**stored["optimizer"], **built},
    }
