"""Advantages of whole rollouts, from the rewards of their group."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray


def tied(rewards: Sequence[float], tolerance: float) -> bool:
    """True where the rewards say nothing about which rollout was better: one alone, or all within `tolerance`."""
    spread = max(rewards) - min(rewards)
    return spread == 0.0 or spread < tolerance


def group_advantages(
    rewards: Sequence[float], *, std: Literal["population", "unbiased"], eps: float, tie_tolerance: float
) -> NDArray[np.float64]:
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
