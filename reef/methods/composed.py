"""What `grpo` and `sao` share: every part of the shelf (`recipe.config`) but the choice of batches and the baseline."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from reef.methods.advantages import by_rms, whiten
from reef.methods.base import Method, Tokens
from reef.methods.rewards import num_sampled, rollouts
from reef.methods.weights import token_weights, trained_masks
from reef.shelf import ShelfConfig
from reef.types import Doubles, Floats, Sample

if TYPE_CHECKING:
    import torch


class Composed(Method):
    """A method out of the shelf's parts: ratio, correction, KL, normalisation, aggregation and overlong shaping."""

    config: ShelfConfig

    def __init__(self, config: ShelfConfig) -> None:
        self.config = config
        self.uses_reference = config.kl != "none"
        self.reference_path = config.kl_reference

    def token_weights(self, samples: Sequence[Sample]) -> list[Floats]:
        """Weights [T] per sample for the configured `aggregation`; see `weights.token_weights`."""
        return token_weights(
            samples,
            self.config.aggregation,
            aggregation_tokens=self.config.aggregation_tokens,
            overlong_filter=self.config.overlong_filter,
        )

    def token_loss(self, tokens: Tokens) -> tuple["torch.Tensor", dict[str, "torch.Tensor"]]:
        """The loss of each token by the configured ratio, correction and KL; see `policy_loss.policy_loss`."""
        from reef.methods.policy_loss import policy_loss  # here: who only selects has no need of torch

        return policy_loss(self.config, tokens)

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Over rollouts, those that do not train included: scores, sampled tokens, the share that length cut."""
        found = list(rollouts(samples).values())
        rewards = np.array([members[-1].reward for members in found])
        lengths = [num_sampled(members) for members in found]
        return {
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "response_length_mean": float(np.mean(lengths)),
            "response_length_max": float(max(lengths)),
            "truncation_rate": float(np.mean([any(s.truncated for s in members) for members in found])),
        }

    def scaled(self, advantages: Sequence[Doubles], samples: Sequence[Sample], *, whitened: bool) -> list[Floats]:
        """The advantages as they go to the trainer: normalised over the batch's trained tokens, float32, masked.

        Args:
            advantages: [T] per sample.
            whitened: whether the advantage itself is defined with whitening, whatever `normalize` says.
        """
        values = list(advantages)
        if whitened or self.config.normalize == "whiten":
            values = whiten(values, trained_masks(samples, self.config.overlong_filter))
        elif self.config.normalize == "rms":
            values = by_rms(values, trained_masks(samples, self.config.overlong_filter))
        return [np.where(s.mask, v, 0.0).astype(np.float32) for s, v in zip(samples, values, strict=True)]
