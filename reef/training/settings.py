"""From serve.yaml to `Batch.settings`: everything that decides a step, as JSON values, stored with the batch.

A step takes method, optimizer and threads from its batch, so that a replay repeats it under a changed serve.yaml. What
workers are built with is their own: dtype and seed must be as they were, and under another layout a replay's bits may
differ (see `reef.recovery`). Recomputing activations is the workers' own too, and changes no number.
The models beside the policy (a critic, a reference) are built once: where a batch needs one, it must be as it was.

A batch of an earlier Reef lacks the settings that came later: they had their defaults then.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reef.config import Config, Layout, RecipeSection, recipe_of
from reef.methods.base import build
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
        **models_beside(settings["method"]),
    }


def models_beside(method: Mapping[str, Any]) -> dict[str, str]:
    """The models that a stored method needs beside the policy, by the setting that says which; empty: none."""
    made = build(method)
    found = {}
    if made.critic is not None:
        found["recipe.config.critic-path"] = _model(made.critic.critic_path)
        found["recipe.config.critic-freeze"] = made.critic.critic_freeze
    if made.uses_reference:
        found["recipe.config.kl-reference"] = _model(made.reference_path)
    return found


def _model(path: Path | None) -> str:
    return "the base model" if path is None else str(path)


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
