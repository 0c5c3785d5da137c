"""Whether two measurements of the same items differ: paired bootstrap and McNemar's exact test."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from reef_harness.evaluation.intervals import RESAMPLES, Figure, bootstrap


@dataclass(frozen=True, slots=True)
class McNemar:
    """Items that only one of the two got right, and the exact two-sided p-value."""

    only_first: int
    only_second: int
    p: float


def paired_difference(
    first: Sequence[float], second: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> Figure:
    """The mean of ``second - first`` over items, with a 95% percentile bootstrap over items.

    Position i of both is the same item. Raises ValueError for different lengths or no items.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"a paired difference needs the same items on both sides, got {len(first)} and {len(second)}")
    differences = [after - before for before, after in zip(first, second, strict=True)]
    [(low, high)] = bootstrap([(difference,) for difference in differences], seed=seed, resamples=resamples)
    return Figure(math.fsum(differences) / len(differences), low, high, len(differences))


def mcnemar(first: Sequence[bool], second: Sequence[bool]) -> McNemar:
    """McNemar's exact test on paired yes-or-no values: the binomial test of the discordant pairs against 1/2.

    p is min(1, 2 P(X <= min(b, c))) for X ~ Binomial(b + c, 1/2); without discordant pairs 1. Source: Q. McNemar,
    Psychometrika 12 (1947) 153. Raises ValueError for different lengths.
    """
    only_first = sum(before and not after for before, after in zip(first, second, strict=True))
    only_second = sum(after and not before for before, after in zip(first, second, strict=True))
    return McNemar(only_first, only_second, exact_p(only_first, only_second))


def exact_p(b: int, c: int) -> float:
    """The two-sided p-value of ``b`` and ``c`` discordant pairs."""
    total, tail, ways = b + c, 0, 1  # ways: of choosing k pairs
    for k in range(min(b, c) + 1):
        tail += ways
        ways = ways * (total - k) // (k + 1)
    return min(1.0, 2 * tail / (1 << total))  # integers divided at the end: no overflow, no rounding on the way
