"""How far a score in [0, 1] can be read as a chance to be right."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from reef_harness.evaluation.intervals import wilson

BINS = 10
_Pair = tuple[float, float, Hashable]  # score, 1 or 0 for right or wrong, item


@dataclass(frozen=True, slots=True)
class Bin:
    """Scores from low to high: how many of how many items, their mean, the share right and its interval."""

    low: float
    high: float
    count: int
    items: int
    mean_score: float
    share_right: float
    share_low: float
    share_high: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """Brier score and its parts, expected calibration error and the bins behind both.

    ``brier`` is the mean squared distance of the score from 0 or 1. Murphy's parts, over bins of scores:
    ``brier = reliability - resolution + uncertainty + within``; ``within`` is what the scores vary inside their bins
    (0 where every bin holds one value): the within-bin variance less twice the within-bin covariance.
    """

    pairs: int
    brier: float
    reliability: float
    resolution: float
    uncertainty: float
    within: float
    calibration_error: float
    bins: tuple[Bin, ...]


def calibration(
    scores: Sequence[float],
    right: Sequence[bool],
    bins: int = BINS,
    *,
    equal_counts: bool = False,
    items: Sequence[Hashable] | None = None,
) -> Calibration:
    """Judge ``scores`` by whether each answer was right, over ``bins`` bins of equal width; empty ones are left out.

    With ``equal_counts`` bins hold as many scores each, as near as equal scores allow: for scores that lie close.
    ``items`` says which item each answer is to (None: each to one of its own). Answers to one item are not independent:
    a bin's interval is Wilson's, with as many trials as its answers are worth where those to one item are all alike.
    The variance of their mean is then p (1 - p) (sum of n²) / (sum of n)², n being the answers to an item, and the
    trials are (sum of n)² / (sum of n²). Nothing varies more, so it is rather too wide.

    Sources: G. W. Brier, Monthly Weather Review 78 (1950) 1; A. H. Murphy, J. Appl. Meteorology 12 (1973) 595; the
    within-bin term: Stephenson et al., Weather and Forecasting 23 (2008) 752; expected calibration error: Naeini et
    al., AAAI (2015); the number of trials, as an effective size: L. Kish, Survey Sampling (1965). Raises ValueError
    for a score outside [0, 1], for no pairs, or for sides of different length.
    """
    of = range(len(scores)) if items is None else items
    if not len(scores) == len(right) == len(of) or not scores:
        raise ValueError(f"calibration needs pairs of score and outcome, got {len(scores)} and {len(right)}")
    if bins < 1:
        raise ValueError(f"calibration needs at least one bin, got {bins}")
    for position, score in enumerate(scores):
        if not 0.0 <= score <= 1.0:  # false for NaN, too
            raise ValueError(f"a score must be within [0, 1] to be read as a chance, got {score} (pair {position + 1})")
    total = len(scores)
    pairs = [(score, float(hit), item) for score, hit, item in zip(scores, right, of, strict=True)]
    edges = _equal_counts(scores, bins) if equal_counts else [number / bins for number in range(bins + 1)]
    filled = [_bin(group, *ends) for ends, group in _grouped(pairs, edges)]
    base = sum(hit for _, hit, _ in pairs) / total
    brier = math.fsum((score - hit) ** 2 for score, hit, _ in pairs) / total
    reliability = math.fsum(each.count * (each.mean_score - each.share_right) ** 2 for each in filled) / total
    resolution = math.fsum(each.count * (each.share_right - base) ** 2 for each in filled) / total
    uncertainty = base * (1 - base)
    error = math.fsum(each.count * abs(each.mean_score - each.share_right) for each in filled) / total
    within = brier - reliability + resolution - uncertainty
    return Calibration(total, brier, reliability, resolution, uncertainty, within, error, tuple(filled))


def mean_logprob_chance(logprob_sum: float, tokens: int) -> float:
    """The mean log-probability of an answer's tokens as a number in (0, 1]: exp(sum / tokens), a geometric mean.

    It says how sure the model was of its words, which need not be how often it is right: that is what a calibration
    shows. Raises ValueError for no tokens or a sum above 0.
    """
    if tokens < 1 or not logprob_sum <= 0:
        raise ValueError(f"expected tokens >= 1 and a log-probability <= 0, got {tokens} and {logprob_sum}")
    return math.exp(logprob_sum / tokens)


def _equal_counts(scores: Sequence[float], bins: int) -> list[float]:
    """Edges between which lie as many scores each; equal scores are never parted."""
    ordered = sorted(scores)
    inner = {ordered[len(ordered) * number // bins] for number in range(1, bins)}
    return sorted({ordered[0], *inner, ordered[-1]})


def _grouped(pairs: Sequence[_Pair], edges: Sequence[float]) -> list[tuple[tuple[float, float], list[_Pair]]]:
    """The pairs by bin, with its ends: a score on an edge is in the bin above it, one on the last edge in the last."""
    groups: dict[int, list[_Pair]] = {}
    last = max(len(edges) - 2, 0)
    for pair in pairs:
        groups.setdefault(min(bisect_right(edges, pair[0]) - 1, last), []).append(pair)
    return [((edges[i], edges[min(i + 1, len(edges) - 1)]), group) for i, group in sorted(groups.items())]


def _bin(group: Sequence[_Pair], low: float, high: float) -> Bin:
    share = sum(hit for _, hit, _ in group) / len(group)
    mean = math.fsum(score for score, _, _ in group) / len(group)
    answers = Counter(item for _, _, item in group)
    trials = len(group) ** 2 / sum(count * count for count in answers.values())
    return Bin(low, high, len(group), len(answers), mean, share, *wilson(share * trials, trials))
