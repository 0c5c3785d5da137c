"""Whether two measurements of the same items differ: paired bootstrap and McNemar's exact test."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from reef_harness.evaluation.intervals import FEW, RESAMPLES, Z_95, Figure, bootstrap


@dataclass(frozen=True, slots=True)
class McNemar:
    """Items that only one of the two got right, and the exact two-sided p-value."""

    only_first: int
    only_second: int
    p: float


def paired_difference(
    first: Sequence[float], second: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES
) -> Figure:
    """The mean of ``second - first`` over items, with a 95% interval over items.

    It is a percentile bootstrap; of scores within [0, 1] whose differences are all the same but for fewer than ``FEW``
    items it is :func:`tango`'s, since a bootstrap draws only from what was seen. Position i of both is the same item.
    Raises ValueError for different lengths or no items.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"a paired difference needs the same items on both sides, got {len(first)} and {len(second)}")
    differences = [after - before for before, after in zip(first, second, strict=True)]
    [(_, frequent)] = Counter(round(difference, 9) for difference in differences).most_common(1)  # 0.3 - 0.2 is 0.1
    if len(differences) - frequent < FEW and all(0 <= score <= 1 for score in (*first, *second)):
        gained = math.fsum(each for each in differences if each > 0)
        lost = -math.fsum(each for each in differences if each < 0)
        low, high = tango(gained, lost, len(differences))
    else:
        [(low, high)] = bootstrap([(difference,) for difference in differences], seed=seed, resamples=resamples)
    return Figure(math.fsum(differences) / len(differences), low, high, len(differences))


def tango(gained: float, lost: float, items: int, z: float = Z_95) -> tuple[float, float]:
    """The score interval of a paired difference of shares: (low, high), within -1 and 1, 95% by default.

    Of ``items`` pairs ``gained`` are right on the second side only, ``lost`` on the first only. It holds each
    difference d at which |gained - lost - items d| <= z sqrt(items (2 q + d (1 - d))), where q is the likeliest share
    of lost pairs if d is true; without any gained or lost it is ± z² / (items + z²). d = 0 is outside where
    (gained - lost)² > z² (gained + lost): McNemar's test. Source: T. Tango, Statistics in Medicine 17 (1998) 891.

    Of scores within [0, 1] ``gained`` and ``lost`` are the sums of what items gain and lose, and need not be whole. No
    differences with these sums vary more than those of -1, 0 and 1 do, so the interval is then rather too wide.
    """
    return -_farthest(lost, gained, items, z), _farthest(gained, lost, items, z)


def _farthest(gained: float, lost: float, items: int, z: float) -> float:
    """The upper end, by bisection between the difference that was seen and 1."""

    def inside(d: float) -> bool:
        linear = (2 * items - gained + lost) * d - gained - lost  # of 2 n q² + linear q = lost d (1 - d)
        root = math.sqrt(max(0.0, linear * linear + 8 * items * lost * d * (1 - d)))
        q = (root - linear) / (4 * items)
        return (gained - lost - items * d) ** 2 <= z * z * items * (2 * q + d * (1 - d))

    low, high = (gained - lost) / items, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) else (low, middle)
    return high


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
