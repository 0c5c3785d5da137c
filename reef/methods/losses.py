"""Token losses and the weights that add them up. Shapes: `...` any; T tokens of one sequence."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from reef.types import Floats, Sample

# exp() of more than this is no longer a correction but a fault; beyond it a token keeps its loss and gets no gradient.
MAX_LOG_RATIO = 20.0


def ppo_clip(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped loss per token: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logprobs - old).

    Schulman et al. 2017 (1707.06347); two bounds as in DAPO (2503.14476). Arrays are [...] and of one shape. Where
    `mask` is False the log-ratio is replaced before exp(), so that loss and gradient are 0 there even if it is huge.
    """
    log_ratio = torch.where(mask, logprobs - old_logprobs, torch.zeros_like(logprobs))
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    gains = torch.where(mask, advantages, torch.zeros_like(advantages))
    plain = -ratio * gains
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * gains
    loss = torch.maximum(plain, clipped)
    metrics = {"pg_clipfrac": (clipped > plain).float(), "ratio": ratio.detach()}
    return loss, metrics


def token_weights(samples: Sequence[Sample], aggregation: Literal["rollout-mean", "token-mean"]) -> list[Floats]:
    """Weights [T] per sample that make sum(weight * loss) the mean asked for.

    rollout-mean: over the tokens of a rollout, then over the rollouts of a group, then over groups. A rollout is one
    report: the samples of one report share one denominator, all of their tokens. token-mean: over all tokens.

    Only tokens of samples that train count; a rollout or group without such tokens is in no denominator.
    """
    num_tokens: dict[tuple[str, str], int] = defaultdict(int)  # by rollout: (group, report)
    for sample in samples:
        if sample.trains:
            num_tokens[sample.group, sample.report_id] += int(sample.mask.sum())
    counted = {rollout: n for rollout, n in num_tokens.items() if n > 0}
    num_rollouts: dict[str, int] = defaultdict(int)
    for group, _ in counted:
        num_rollouts[group] += 1
    total = sum(counted.values())

    weights: list[Floats] = []
    for sample in samples:
        tokens = counted.get((sample.group, sample.report_id), 0) if sample.trains else 0
        if tokens == 0:
            weight = 0.0
        elif aggregation == "token-mean":
            weight = 1.0 / total
        else:
            weight = 1.0 / (len(num_rollouts) * num_rollouts[sample.group] * tokens)
        weights.append(np.where(sample.mask, np.float32(weight), np.float32(0.0)))
    return weights
