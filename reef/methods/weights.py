"""How much each token counts in a step's loss. Shape letters: T tokens of one sequence."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import numpy as np

from reef.types import Floats, Sample


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
