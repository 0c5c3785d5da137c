"""The models beside the policy: the body of a critic, and a frozen reference. Each is built as the policy is."""

from collections.abc import Mapping
from pathlib import Path

from reef.errors import ConfigError
from reef.methods.base import Method
from reef.training.architecture import Architecture, read_architecture
from reef.training.tensors import check_weights


def paths_beside(method: Method) -> Mapping[str, Path]:
    """The model directories that a method names, by the setting that does."""
    named = {
        "recipe.config.critic-path": method.critic.critic_path if method.critic is not None else None,
        "recipe.config.kl-reference": method.reference_path if method.uses_reference else None,
    }
    return {setting: path for setting, path in named.items() if path is not None}


def check_beside(method: Method, policy: Architecture) -> None:
    """Raises ConfigError where a model beside the policy is not there, damaged, or built otherwise."""
    for setting, path in paths_beside(method).items():
        try:
            _check_like(path, policy)
        except ConfigError as error:  # which takes every model for the one that is trained
            raise ConfigError(f"{setting}: {error.message}", param=setting) from None


def _check_like(path: Path, policy: Architecture) -> None:
    found = read_architecture(path)
    if found != policy:
        raise ConfigError(f"{path} is not built as the policy is: {_difference(found, policy)}")
    check_weights(path, found)


def _difference(found: Architecture, policy: Architecture) -> str:
    names = [name for name in policy.__dataclass_fields__ if getattr(found, name) != getattr(policy, name)]
    return "; ".join(f"{name} is {getattr(found, name)}, expected {getattr(policy, name)}" for name in names)
