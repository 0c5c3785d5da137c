"""Correlations of two series. Standard library only."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Correlation:
    """How two figures go together over ``n`` pairs: Pearson's r, and Spearman's, which is r of the ranks.

    None where there is none: fewer than three pairs, or one of the two is constant.
    """

    pearson: float | None
    spearman: float | None
    n: int


def correlation(pairs: Sequence[tuple[float, float]]) -> Correlation:
    """Both coefficients. Pairs with a number that is not finite are left out, and not counted in ``n``."""
    kept = [pair for pair in pairs if all(map(math.isfinite, pair))]
    xs, ys = [x for x, _ in kept], [y for _, y in kept]
    return Correlation(pearson(xs, ys), pearson(ranks(xs), ranks(ys)), len(kept))


def pearson(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Pearson's r, within -1 and 1; None for fewer than three pairs, or where a series is constant."""
    if len(xs) < 3 or min(xs) == max(xs) or min(ys) == max(ys):
        return None
    mean_x, mean_y = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    dx, dy = [x - mean_x for x in xs], [y - mean_y for y in ys]
    norm = math.sqrt(math.fsum(d * d for d in dx)) * math.sqrt(math.fsum(d * d for d in dy))
    if norm == 0:  # the differences are too small to be squared
        return None
    return max(-1.0, min(1.0, math.fsum(a * b for a, b in zip(dx, dy, strict=True)) / norm))


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for position in order[start : end + 1]:
            found[position] = (start + end) / 2 + 1
        start = end + 1
    return found
