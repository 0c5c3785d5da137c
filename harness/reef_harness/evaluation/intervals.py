"""Intervals of shares and means. Standard library only.

Several answers to one item are not independent trials: what is drawn at random is the item. So intervals over more
than one answer an item are bootstrapped by item; Wilson's is for one yes or no an item, and for too few items.
"""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate

RESAMPLES = 2000
Z_95 = 1.959963984540054  # normal quantile of 0.975
# Items that must differ from the most frequent value before a bootstrap is believed. It draws only from what was seen:
# items that are all equal have no width, however few they are. Of ten items the spread of its means is sqrt(9 / 10) of
# the true one and 1.96 of them are taken for Student's 2.26, which is 0.82 of the width; of fewer it is worse.
FEW = 10


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value with the ends of its 95% interval, and how many items it is over."""

    value: float
    low: float
    high: float
    items: int

    def json(self) -> dict[str, float]:
        """As it is stored: a gate of the service reads ``value``, ``low`` and ``high``."""
        return asdict(self)


def wilson(successes: float, trials: float, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval of a proportion, 95% by default: (low, high), within 0 and 1.

    Neither need be whole. The trials may be shares in [0, 1]: of these the interval is too wide rather than
    too narrow, since no values in [0, 1] with a mean of m vary more than m (1 - m), which is what it takes them for.

    Source: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927) 209. Raises ValueError unless 0 <= successes <= trials >= 1.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"wilson needs 0 <= successes <= trials and trials >= 1, got {successes} of {trials}")
    share = successes / trials
    scale = 1 + z * z / trials
    centre = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    low = 0.0 if successes == 0 else (centre - spread) / scale
    high = 1.0 if successes == trials else (centre + spread) / scale
    return low, high


def by_item(values: Sequence[float], *, most: float = 1.0, seed: int = 0) -> Figure | None:
    """The mean of one value per item, each between 0 and ``most``. None: no items.

    The interval is Wilson's where each value is 0 or ``most``, and where fewer than ``FEW`` items differ from the most
    frequent value: there it is wider than need be. Else it is a bootstrap, as it is of values that lie outside.
    """
    return columns_by_item([(value,) for value in values], most=most, seed=seed)[0] if values else None


def columns_by_item(rows: Sequence[Sequence[float]], *, most: float = 1.0, seed: int = 0) -> list[Figure]:
    """:func:`by_item` of each column; ``rows`` holds one row per item. Raises ValueError for no rows."""
    if not rows:
        raise ValueError("no items, no figures")
    columns = list(zip(*rows, strict=True))
    drawn = [i for i, column in enumerate(columns) if not _as_trials(column, most)]
    ends = {i: _bounded(column, most) for i, column in enumerate(columns) if i not in drawn}
    if drawn:
        ends |= zip(drawn, bootstrap([[row[i] for i in drawn] for row in rows], seed=seed), strict=True)
    return [Figure(math.fsum(column) / len(rows), *ends[i], len(rows)) for i, column in enumerate(columns)]


def _as_trials(column: Sequence[float], most: float) -> bool:
    """Whether the values are yes or no, or too few of them differ for a bootstrap; of bounded values only."""
    if not all(0 <= value <= most for value in column):
        return False
    [(_, frequent)] = Counter(column).most_common(1)
    return len(column) - frequent < FEW or all(value in (0, most) for value in column)


def _bounded(column: Sequence[float], most: float) -> tuple[float, float]:
    low, high = wilson(min(math.fsum(column) / most, len(column)), len(column))
    return low * most, high * most


def bootstrap(
    rows: Sequence[Sequence[float]], *, seed: int = 0, resamples: int = RESAMPLES, level: float = 0.95
) -> list[tuple[float, float]]:
    """Percentile bootstrap of the means of the columns; ``rows`` holds one row per item, items are drawn with return.

    The columns of a resample are of the same items, and the same ``seed`` draws the same resamples. Equal rows are
    drawn as one with their weight, so that thousands of items with few different values cost little. Source: Efron
    and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13. Raises ValueError for no rows.
    """
    if not rows:
        raise ValueError("a bootstrap needs at least one item")
    kinds = Counter(tuple(row) for row in rows)
    distinct, weights = list(kinds), list(accumulate(kinds.values()))
    rng = random.Random(seed)
    means: list[list[float]] = [[] for _ in rows[0]]
    for _ in range(resamples):
        drawn = Counter(rng.choices(range(len(distinct)), cum_weights=weights, k=len(rows)))
        for column, found in enumerate(means):
            found.append(sum(distinct[kind][column] * times for kind, times in drawn.items()) / len(rows))
    return [(quantile(sorted(found), (1 - level) / 2), quantile(sorted(found), (1 + level) / 2)) for found in means]


def quantile(ordered: Sequence[float], share: float) -> float:
    """The quantile of ascending values, linear between neighbours. Raises ValueError for none."""
    if not ordered:
        raise ValueError("no values, no quantile")
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
