"""What a method is: the four decisions that turn graded samples into an update.

    pending reports --select--> batch --advantages, token_weights--> [T] per sample --token_loss--> gradient

A method knows nothing of engines, ranks or optimizers. `build` makes one from a batch's own settings, so that a replay
repeats the original step whatever serve.yaml says by then. Shape letters: T tokens of one sequence; `...` any shape.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from reef.config import GrpoConfig
from reef.errors import ConfigError
from reef.types import Candidate, Floats, Sample, Selection

if TYPE_CHECKING:  # the service selects batches and needs no torch for that
    import torch


class Method(Protocol):
    """One way to learn from reports."""

    def select(self, candidates: Sequence[Candidate], staleness: Mapping[str, int | None], now: float) -> Selection:
        """Decide which pending reports make the next batch, and which never will.

        Args:
            candidates: pending reports in order of arrival.
            staleness: by report id, the policy updates between the release of its oldest sampled token and the served
                one; None where that release lies on a branch that was rolled away.
            now: seconds since the epoch.
        """

    def advantages(self, samples: Sequence[Sample]) -> list[Floats]:
        """How much better than expected each token of each sample was: [T] per sample, 0 where its mask is False."""

    def token_weights(self, samples: Sequence[Sample]) -> list[Floats]:
        """How much each token counts: [T] per sample, so that the step's loss is sum(weight * token_loss).

        Computed over the whole batch, so the sum is the same however samples are split into microbatches or ranks.
        Weights are 0 where the mask is False and for samples that do not train.
        """

    def token_loss(
        self, logprobs: "torch.Tensor", old_logprobs: "torch.Tensor", advantages: "torch.Tensor", mask: "torch.Tensor"
    ) -> tuple["torch.Tensor", dict[str, "torch.Tensor"]]:
        """The loss of each token, to be minimised, and values to average over the step's trained tokens.

        Args:
            logprobs: [...] the trainer's, with gradient.
            old_logprobs: [...] the engine's, at the same temperature.
            advantages: [...] from `advantages`.
            mask: [...] bool; elsewhere loss and gradient are exactly 0, whatever the other arrays hold.

        Returns:
            The loss [...], and metrics by name, each [...] and detached.
        """

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Figures about the batch that need no forward pass (rewards, lengths, informative groups)."""


def build(settings: Mapping[str, Any]) -> Method:
    """Make the method that `settings` ({"name": "grpo", ...its config}) describe.

    Raises:
        ConfigError: the name is not a method's.
    """
    from reef.methods.grpo import Grpo  # here, because grpo.py implements what this file defines

    values = dict(settings)
    name = values.pop("name", None)
    if name != "grpo":
        raise ConfigError(f"unknown method {name!r}: expected 'grpo'", param="recipe.implementation")
    return Grpo(GrpoConfig.model_validate(values))
