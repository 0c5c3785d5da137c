"""Advantages from rewards: of rollouts within their group, against a running mean, and scaled over a batch.

Shape letters: G rollouts of a group, T tokens of one sequence. Everything is float64 until it is handed to the trainer.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from reef.types import Bools, Doubles

# Added to the variance that divides, as slime and veRL do. Only advantages far below 1e-4 would notice.
SCALE_EPS = 1e-8


def tied(rewards: Sequence[float], tolerance: float) -> bool:
    """True where the rewards say nothing about which rollout was better: one alone, or all within `tolerance`."""
    spread = max(rewards) - min(rewards)
    return spread == 0.0 or spread < tolerance


def group_advantages(
    rewards: Sequence[float], *, std: Literal["population", "unbiased"], eps: float, tie_tolerance: float
) -> Doubles:
    """GRPO's advantages of one group (2402.03300): distance from the group's mean in units of its deviation.

    population: (r - mean) / sqrt(variance + eps). unbiased: (r - mean) / (std + eps), std over n - 1. Tied rewards
    give exactly 0, so that rounding noise is never blown up to an update.

    Args:
        rewards: one per rollout, not empty.

    Returns:
        One advantage per rollout.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if tied(rewards, tie_tolerance):
        return np.zeros_like(values)
    scale = np.sqrt(values.var() + eps) if std == "population" else values.std(ddof=1) + eps
    return np.asarray((values - values.mean()) / scale)


def centred_advantages(rewards: Sequence[float], *, tie_tolerance: float) -> Doubles:
    """Dr.GRPO's advantages of one group (2503.20783): r - mean, [G]. Tied rewards and one alone give exactly 0."""
    values = np.asarray(rewards, dtype=np.float64)
    if tied(rewards, tie_tolerance):
        return np.zeros_like(values)
    return np.asarray(values - values.mean())


def leave_one_out_advantages(rewards: Sequence[float], *, tie_tolerance: float) -> Doubles:
    """RLOO's advantages of one group (2402.14740): r minus the mean of the others, G / (G - 1) (r - mean), [G].

    Tied rewards and one alone give exactly 0 (veRL's loop leaves one alone its reward: it would push without a
    comparison).
    """
    centred = centred_advantages(rewards, tie_tolerance=tie_tolerance)
    return centred * (len(rewards) / (len(rewards) - 1)) if len(rewards) > 1 else centred


def maxrl_advantages(rewards: Sequence[float], *, tie_tolerance: float) -> Doubles:
    """MaxRL's advantages of one group: (r - mean) / mean, [G]; exactly 0 for all where the mean is not above 0.

    For rewards 0 and 1, where it weighs prompts by how rarely they are solved (as prime-rl has it).
    """
    centred = centred_advantages(rewards, tie_tolerance=tie_tolerance)
    mean = float(np.mean(rewards))
    return centred / mean if mean > 0.0 else np.zeros_like(centred)


def running_mean_advantages(rewards: Sequence[float], earlier: Sequence[Sequence[float]]) -> Doubles:
    """Each rollout's reward minus the mean of its prompt's earlier rewards, one per rollout.

    A prompt that was never seen is compared with the mean of the batch's other rollouts: like its own past, they know
    nothing of the tokens that were sampled here, so that the gradient stays unbiased, and a pass over prompts that are
    all new still learns. (A baseline of 0 would push up every answer that earns anything.) Alone in its batch it has
    nothing to be compared with and gets 0.

    Args:
        rewards: one per rollout.
        earlier: per rollout, the rewards of its prompt in earlier batches; empty: none.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if len(values) < 2:
        others = values
    else:
        others = (values.sum() - values) / (len(values) - 1)
    baselines = [np.mean(past) if len(past) else other for past, other in zip(earlier, others, strict=True)]
    return np.asarray(values - np.array(baselines, dtype=np.float64))


def whiten(advantages: Sequence[Doubles], counted: Sequence[Bools]) -> list[Doubles]:
    """Advantages of mean 0 and deviation 1 over a batch's tokens: (x - mean) / sqrt(variance + 1e-8), [T] per sample.

    The variance is the unbiased one. With fewer than two tokens that count there is none, and all become 0.

    Args:
        advantages: [T] per sample.
        counted: [T] per sample, the tokens that mean and variance are over. All tokens are moved and scaled.
    """
    seen = _flat(advantages, counted)
    if len(seen) < 2:
        return [np.zeros_like(a) for a in advantages]
    mean, scale = seen.mean(), np.sqrt(seen.var(ddof=1) + SCALE_EPS)
    return [(a - mean) / scale for a in advantages]


def by_rms(advantages: Sequence[Doubles], counted: Sequence[Bools]) -> list[Doubles]:
    """Advantages divided by their root mean square over a batch's tokens, sqrt(mean square + 1e-8): signs stay.

    Arguments and result as of `whiten`.
    """
    seen = _flat(advantages, counted)
    if len(seen) == 0:
        return [np.zeros_like(a) for a in advantages]
    scale = np.sqrt(np.mean(seen**2) + SCALE_EPS)
    return [a / scale for a in advantages]


def _flat(advantages: Sequence[Doubles], counted: Sequence[Bools]) -> Doubles:
    parts = [a[mask] for a, mask in zip(advantages, counted, strict=True)]
    return np.concatenate(parts) if parts else np.zeros(0)
