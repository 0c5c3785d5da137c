"""How much each token counts in a step's loss. Shape letters: T tokens of one sequence."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import numpy as np

from reef.types import Bools, Floats, Sample

Aggregation = Literal["rollout-mean", "token-mean", "token-sum", "sequence-mean"]


def trained_masks(samples: Sequence[Sample], overlong_filter: bool = False) -> list[Bools]:
    """The tokens that count, [T] per sample: the sampled ones of samples that train.

    With `overlong_filter` (DAPO, 2503.14476) rollouts that length cut train no token: their reward says where they
    stopped, not how good they were, and that holds for every sequence and turn of them. In their group they still
    count in the mean, as stale ones do.
    """
    cut = {(s.group, s.report_id) for s in samples if s.truncated} if overlong_filter else set()
    return [
        sample.mask if sample.trains and (sample.group, sample.report_id) not in cut else np.zeros_like(sample.mask)
        for sample in samples
    ]


def token_weights(
    samples: Sequence[Sample],
    aggregation: Aggregation,
    *,
    aggregation_tokens: int | None = None,
    overlong_filter: bool = False,
) -> list[Floats]:
    """Weights [T] per sample that make sum(weight * loss) the mean asked for.

    rollout-mean: over the tokens of a rollout, then over the rollouts of a group, then over groups. A rollout is one
    report: the samples of one report share one denominator, all of their tokens. token-mean: over all tokens.
    token-sum (Dr.GRPO, 2503.20783): over rollouts, of the sum over a rollout's tokens divided by a constant; each
    token weighs 1 / (number of rollouts * aggregation_tokens). sequence-mean: over the tokens of a sample, then over
    samples.

    Only tokens of `trained_masks` count; a rollout, sequence or group without any is in no denominator. Tokens that a
    loss rejects are in them: they count, with a loss of 0.

    Raises:
        ValueError: token-sum without `aggregation_tokens`.
    """
    masks = trained_masks(samples, overlong_filter)
    sizes = [int(mask.sum()) for mask in masks]
    num_tokens: dict[tuple[str, str], int] = defaultdict(int)  # by rollout: (group, report)
    for sample, size in zip(samples, sizes, strict=True):
        if size:
            num_tokens[sample.group, sample.report_id] += size
    num_rollouts: dict[str, int] = defaultdict(int)
    for group, _ in num_tokens:
        num_rollouts[group] += 1
    num_sequences, total = sum(size > 0 for size in sizes), sum(sizes)

    def weight(sample: Sample, size: int) -> float:
        if aggregation == "token-mean":
            return 1.0 / total
        if aggregation == "sequence-mean":
            return 1.0 / (num_sequences * size)
        if aggregation == "token-sum":
            if aggregation_tokens is None:
                raise ValueError("token-sum: expected aggregation_tokens, the constant that divides")
            return 1.0 / (len(num_tokens) * aggregation_tokens)
        tokens = num_tokens[sample.group, sample.report_id]
        return 1.0 / (len(num_rollouts) * num_rollouts[sample.group] * tokens)

    return [
        np.where(mask, np.float32(weight(sample, size) if size else 0.0), np.float32(0.0))
        for sample, mask, size in zip(samples, masks, sizes, strict=True)
    ]
