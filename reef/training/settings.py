"""From serve.yaml to `Batch.settings`: everything that decides a step, as JSON values, stored with the batch.

A step takes method, optimizer and threads from its batch, so that a replay repeats it under a changed serve.yaml. What
workers are built with is their own: dtype and seed must be as they were, and under another layout a replay's bits may
differ (see `reef.recovery`). Recomputing activations is the workers' own too, and changes no number.
A critic is built with its body and with what of it learns: where a batch needs one, both must be as they were.

A batch of an earlier Reef lacks the settings that came later: they had their defaults then.
"""

from collections.abc import Mapping
from typing import Any

from reef.config import Config, Layout, RecipeSection, recipe_of
from reef.options import OptimizerOptions

WORKERS_OWN = ("layout", "dtype", "seed")
BUILT_WITH = ("use_distributed_optimizer", "overlap_grad_reduce")  # options that change the order of sums


def settings(config: Config) -> dict[str, Any]:
    """The settings of a batch reserved now."""
    training = config.training
    return {
        "method": {**config.recipe.values, "name": config.recipe.implementation},
        "optimizer": training.options.model_dump(mode="json"),
        "layout": training.layout.model_dump(mode="json"),
        "dtype": training.dtype,
        "seed": training.seed,
        "threads": training.threads,
    }


def recipe_from(method: Mapping[str, Any]) -> RecipeSection:
    """The recipe that a batch's stored method was reserved by."""
    config = {name: value for name, value in method.items() if name != "name"}
    values = {"implementation": method["name"], "config": config}
    return recipe_of(values).model_validate(values)


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
        **_critic_built_with(settings["method"]),
    }


def _critic_built_with(method: Mapping[str, Any]) -> dict[str, Any]:
    if method.get("advantage") != "gae":
        return {}
    return {
        "recipe.config.critic-path": str(method["critic_path"] or "the base model"),
        "recipe.config.critic-freeze": method["critic_freeze"],
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
