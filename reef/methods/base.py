"""What a method is: the decisions that turn graded samples into an update.

    pending reports --select--> batch --advantages, token_weights--> [T] per sample --token_loss--> gradient

A method knows nothing of engines, ranks or optimizers. `build` makes one from a batch's own settings, so that a replay
repeats the original step whatever serve.yaml says by then. Shape letters: T tokens of one sequence; `...` any shape.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from reef.errors import ConfigError
from reef.shelf import SaoConfig
from reef.types import Candidate, Floats, Sample, Selection

if TYPE_CHECKING:  # the service selects batches and needs no torch for that
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """What models say of one sample before the step. None: the method has no use for that model."""

    values: Floats | None = None  # [T], the critic's after it has read tokens 0..t
    reference_logprobs: Floats | None = None  # [T], of each token under the frozen reference; 0 for the first


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """The sampled tokens of a microbatch as a loss sees them; every array is [...], of one shape."""

    logprobs: "torch.Tensor"  # the trainer's, with gradient
    engine_logprobs: "torch.Tensor"  # the engine's, at the same temperature
    advantages: "torch.Tensor"  # from `Method.advantages`
    mask: "torch.Tensor"  # bool; elsewhere loss and gradient are exactly 0, whatever the other arrays hold
    sequences: "torch.Tensor"  # int64: which of the microbatch's sequences the token belongs to, from 0
    num_sequences: int
    lags: "torch.Tensor"  # float32: policy updates between the release that sampled it and the one that is trained
    reference_logprobs: "torch.Tensor | None" = None  # the frozen reference's, at the same temperature


class Method(ABC):
    """One way to learn from reports. A class of your own inherits from this, or from `Grpo` or `Sao`.

    It is made anew for each batch with the batch's `recipe.config`, on each worker, and once for the service.
    """

    critic: SaoConfig | None = None  # the settings of the critic that is trained beside the policy; None: there is none
    uses_reference: bool = False  # whether losses or advantages need the frozen reference's log-probabilities
    reference_path: Path | None = None  # its model directory; None: the base model
    history_window: int = 0  # how many earlier rewards of its prompt each sample is given

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Take `recipe.config` and check it. A method without settings need not define this: it refuses any."""
        if config:
            raise ValueError(f"{type(self).__name__} has no settings, got {', '.join(map(str, config))}")

    @abstractmethod
    def select(self, candidates: Sequence[Candidate], staleness: Mapping[str, int | None], now: float) -> Selection:
        """Decide which pending reports make the next batch, and which never will.

        Args:
            candidates: pending reports in order of arrival.
            staleness: by report id, the policy updates between the release of its oldest sampled token and the served
                one; None where that release lies on a branch that was rolled away.
            now: seconds since the epoch.
        """

    @abstractmethod
    def advantages(
        self, samples: Sequence[Sample], views: Sequence[View], history: Mapping[str, Sequence[float]]
    ) -> list[Floats]:
        """How much better than expected each token of each sample was: [T] per sample, 0 where its mask is False.

        Args:
            views: one per sample.
            history: by report id, the rewards of its prompt in earlier batches, newest first, `history_window` at most.
        """

    def critic_targets(self, samples: Sequence[Sample], views: Sequence[View]) -> list[Floats]:
        """What the critic should have said before each token: [T] per sample. Asked only where there is a critic."""
        raise NotImplementedError(f"{type(self).__name__} has a critic and no critic_targets")

    @abstractmethod
    def token_weights(self, samples: Sequence[Sample]) -> list[Floats]:
        """How much each token counts: [T] per sample, so that the step's loss is sum(weight * token_loss).

        Computed over the whole batch, so the sum is the same however samples are split into microbatches or ranks.
        Weights are 0 where the mask is False and for samples that do not train.
        """

    @abstractmethod
    def token_loss(self, tokens: Tokens) -> tuple["torch.Tensor", dict[str, "torch.Tensor"]]:
        """The loss of each token, to be minimised, and values to average over the step's trained tokens.

        Returns:
            The loss [...], and metrics by name, each [...] and detached.
        """

    @abstractmethod
    def metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Figures about the batch that need no forward pass (rewards, lengths, informative groups)."""


def build(settings: Mapping[str, Any]) -> Method:
    """Make the method that `settings` ({"name": "grpo", ...its config}) describe.

    Raises:
        ConfigError: the name is no method's and no class's, or the class refuses its config.
    """
    from reef.methods.grpo import Grpo  # here, because these implement what this file defines
    from reef.methods.sao import Sao
    from reef.shelf import GrpoConfig

    values = dict(settings)
    name = str(values.pop("name", None))
    try:
        if name == "grpo":
            return Grpo(GrpoConfig.model_validate(values))
        if name == "sao":
            return Sao(SaoConfig.model_validate(values))
    except ValidationError as error:  # settings that an older Reef has stored
        raise ConfigError(f"the settings of {name} are not what it takes: {_lines(error)}", param=_PARAM) from None
    if ":" not in name:
        raise ConfigError(f"unknown method {name!r}: expected grpo, sao or my_pkg.file:Class", param=_PARAM)
    return _custom(name, values)


_PARAM = "recipe.implementation"


def _custom(path: str, config: Mapping[str, Any]) -> Method:
    module_name, _, class_name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:
        raise ConfigError(f"recipe.implementation {path} cannot be imported: {_said(error)}", param=_PARAM) from error
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise ConfigError(f"recipe.implementation {path} is no reef.methods.base.Method", param=_PARAM)
    try:
        method: Method = found(config)
    except ValidationError as error:
        raise ConfigError(f"recipe.implementation {path} refuses its config: {_lines(error)}", param=_PARAM) from None
    except Exception as error:
        raise ConfigError(f"recipe.implementation {path} refuses its config: {_said(error)}", param=_PARAM) from error
    if method.critic is not None and found.critic_targets is Method.critic_targets:
        raise ConfigError(f"recipe.implementation {path} has a critic and no critic_targets", param=_PARAM)
    return method


def _said(error: Exception) -> str:
    """What went wrong; of an error that says little by itself, also of which kind it is."""
    plain = isinstance(error, ImportError | AttributeError | TypeError | ValueError)
    return str(error) if plain else f"{type(error).__name__}: {error}"


def _lines(error: ValidationError) -> str:
    found = [(".".join(str(part) for part in each["loc"]), each["msg"]) for each in error.errors()]
    return "; ".join(f"{where}: {what}" if where else what for where, what in found)
