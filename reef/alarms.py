"""Alarms: a held-out metric falls while the reward rises, so what is rewarded is not what is wanted.

An alarm marks a release. It ends no training and no serving: that is the gate's work.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from reef.config import AlarmSection
from reef.evaluation import Figure, is_number, plain, read_figures

LEVEL = 0.025  # of one side of a 95% interval
_SIZES = ("n", "graded")  # a result's number of problems, by the names that are read
_NORMAL = NormalDist()
_Z_95 = _NORMAL.inv_cdf(1 - LEVEL)


@dataclass(frozen=True, slots=True)
class Link:
    """A release and what is known of it: the mean reward of the batch that made it, its held-out results."""

    release_id: str
    step: int
    reward: float | None
    results: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Mark:
    """An alarm that a release rings. Figures are differences to `since`, an earlier release.

    `drop` is how far the metric fell, `least_drop` how far at least (the near end of the difference's interval, wider
    the more releases were compared); `reward_rise` is how far the reward rose between the two.
    """

    metric: str
    since: str
    drop: float
    least_drop: float
    reward_rise: float
    message: str


def judge(alarms: Iterable[AlarmSection], path: Sequence[Link]) -> tuple[Mark, ...]:
    """The alarms that the last of `path` rings: releases along its ancestry, oldest first.

    Each earlier one with a figure of the metric, at most `window` steps before, is compared with it. It rings where the
    metric fell by more than `drop` and the reward rose by `reward-rise` at least since one of them; the mark names
    the one since which it surely fell most.
    """
    marks = (_judge(alarm, path) for alarm in alarms)
    return tuple(mark for mark in marks if mark is not None)


def _judge(alarm: AlarmSection, path: Sequence[Link]) -> Mark | None:
    now = _figure(alarm.metric, path[-1].results)
    if now is None:
        return None
    first = path[-1].step - alarm.window
    earlier = [
        (index, figure)
        for index, link in enumerate(path[:-1])
        if link.step >= first and (figure := _figure(alarm.metric, link.results)) is not None
    ]
    found = []
    for index, figure in earlier:
        least, rise = _least_drop(figure, now, len(earlier)), _rise(path[index:])
        if least > alarm.drop and rise is not None and rise >= alarm.reward_rise:
            found.append(_mark(alarm, path[index], path[-1], figure.value - now.value, least, rise))
    return max(found, key=lambda mark: mark.least_drop, default=None)


def _least_drop(before: Figure, now: Figure, comparisons: int) -> float:
    """The lower end of before - now, from the ends of both that face each other (Newcombe's interval of a difference).

    The more comparisons were made the wider it is (Bonferroni), so that all of them together are wrong in 2.5%.
    Source: R. G. Newcombe, Statistics in Medicine 17 (1998) 873, method 10.
    """
    wider = _NORMAL.inv_cdf(1 - LEVEL / comparisons) / _Z_95
    below, above = max(0.0, before.value - before.low), max(0.0, now.high - now.value)
    return before.value - now.value - wider * math.hypot(below, above)


def _rise(stretch: Sequence[Link]) -> float | None:
    """The mean reward of the later half of a stretch minus that of the earlier half; None: fewer than two are known."""
    rewards = [link.reward for link in stretch if link.reward is not None]
    if len(rewards) < 2:
        return None
    half = len(rewards) // 2
    return sum(rewards[half:]) / (len(rewards) - half) - sum(rewards[:half]) / half


def _figure(metric: str, results: Sequence[Mapping[str, Any]]) -> Figure | None:
    """The metric's newest figure; a share without an interval gets Wilson's where its result says of how many."""
    figure = read_figures(results).get(plain(metric))
    if figure is None or figure.low != figure.high or not 0 <= figure.value <= 1:
        return figure
    size = _size(plain(metric), results)
    return figure if size is None else _wilson(figure.value, size)


def _size(metric: str, results: Sequence[Mapping[str, Any]]) -> float | None:
    """How many problems the newest result with this metric is of; None: it does not say."""
    for result in reversed(results):
        nested = result.get("metrics")
        for values in (nested if isinstance(nested, Mapping) else {}, result):
            if metric in map(plain, values):
                sizes = [values.get(name, result.get(name)) for name in _SIZES]
                return next((size for size in sizes if is_number(size) and size >= 1), None)
    return None


def _wilson(share: float, size: float) -> Figure:
    """Wilson's 95% interval of a share. Source: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927) 209."""
    square = _Z_95 * _Z_95
    scale = 1 + square / size
    centre = (share + square / (2 * size)) / scale
    spread = _Z_95 * math.sqrt(share * (1 - share) / size + square / (4 * size * size)) / scale
    return Figure(share, max(0.0, centre - spread), min(1.0, centre + spread))


def _mark(alarm: AlarmSection, since: Link, now: Link, drop: float, least: float, rise: float) -> Mark:
    steps = now.step - since.step
    message = (
        f"{alarm.metric} fell by {drop:.4g} (95%: by {least:.4g} at least) since {since.release_id}, "
        f"{steps} step{'' if steps == 1 else 's'} before, while the reward rose by {rise:.4g}"
    )
    return Mark(alarm.metric, since.release_id, drop, least, rise, message)
