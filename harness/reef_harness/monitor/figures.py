"""Figures of a release: those of its step, of its held-out results, and of the rollouts that it answered."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from reef_harness.drivers.records import Rollout
from reef_harness.monitor.statistics import Correlation, correlation
from reef_harness.types import Json, Release


@dataclass(frozen=True, slots=True)
class Reading:
    """A value, with its 95% interval where one is known."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def near_low(self) -> float:
        """What must reach a lower limit."""
        return self.value if self.low is None else self.low

    @property
    def near_high(self) -> float:
        """What must not exceed an upper limit."""
        return self.value if self.high is None else self.high

    def __str__(self) -> str:
        known = self.low is not None and self.high is not None
        return number(self.value) + (f" [{number(self.low or 0)}, {number(self.high or 0)}]" if known else "")


def number(value: float) -> str:
    """A number for people: four digits that say something."""
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.3e}"


def name_of(name: str) -> str:
    """Names are compared with ``_`` for ``-``, as the service's gate does."""
    return name.replace("-", "_")


def of_step(release: Release) -> dict[str, Reading]:
    """The numbers in the release's metrics, but ``informative_group_rate`` is of all groups that came to the step.

    The service's own is of the groups in the batch, and 1 where those that tied were dropped before; they are counted
    in ``dropped/tied``, in reports.
    """
    found = {name_of(name): Reading(float(value)) for name, value in release.metrics.items() if is_number(value)}
    rate, tied = found.get("informative_group_rate"), found.get("dropped/tied")
    kept = found.get("num_rollouts") or found.get("num_samples")  # an older service tells sequences only
    if rate and tied and kept and tied.value > 0 and kept.value > 0:
        found["informative_group_rate"] = Reading(rate.value * kept.value / (kept.value + tied.value))
    return found


def held_out(release: Release) -> dict[str, Reading]:
    """The figures of its held-out results; of a figure that several hold, the last one counts.

    They are read as the service's gate reads them: numbers, and objects {value, low, high}, at the top and under
    ``metrics``; ``accuracy`` beside ``low`` and ``high`` has that interval.
    """
    found: dict[str, Reading] = {}
    for result in release.raw.get("evaluations") or ():
        if isinstance(result, Mapping):
            found |= _figures(result)
    return found


def _figures(result: Mapping[str, object]) -> dict[str, Reading]:
    found = {}
    inner = result.get("metrics")
    for source in (result, inner if isinstance(inner, Mapping) else {}):
        for name, value in source.items():
            if (reading := _reading(value)) is not None and name not in ("low", "high"):
                found[name_of(name)] = reading
    low, high = result.get("low"), result.get("high")
    if "accuracy" in result and "accuracy" in found and is_number(low) and is_number(high):
        found["accuracy"] = Reading(found["accuracy"].value, float(low), float(high))  # type: ignore[arg-type]
    return found


def _reading(value: object) -> Reading | None:
    if isinstance(value, Mapping):
        whole = value.get("value")
        low, high = value.get("low"), value.get("high")
        if is_number(whole):
            return Reading(float(whole), *(float(end) if is_number(end) else None for end in (low, high)))  # type: ignore[arg-type]
        return None
    return Reading(float(value)) if is_number(value) else None  # type: ignore[arg-type]


def is_number(value: object) -> bool:
    """Whether it is a finite number that a float can hold: JSON and TOML have integers of any length."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def alarms(release: Release) -> list[Json]:
    """The alarms that the release rings."""
    return list(release.raw.get("alarms") or ())


def of_method(readings: Mapping[str, Reading], name: str) -> Reading | None:
    """A figure that stands under the method's name: ``policy_lag_mean`` is ``grpo/policy_lag_mean``.

    A part of the reward has its full name only: ``reward/accuracy`` is paid in training, and no held-out accuracy.
    """
    if name in readings:
        return readings[name]
    parts = (key for key in readings if not key.startswith("reward/"))
    return next((readings[key] for key in parts if key.endswith(f"/{name}")), None)


# ---- of rollouts


@dataclass(frozen=True, slots=True)
class Answers:
    """What the rollouts say that one release answered (or all releases).

    ``unique_rate`` is the mean, over groups (prompts answered several times at once), of different texts by texts; None
    where there is no group of two. ``length_reward`` is over the rollouts that have a score; lengths are characters,
    since of several answers to one request only the mean of the tokens is known.
    """

    rollouts: int
    failed: int
    unique_rate: float | None
    length_reward: Correlation


def answers(rollouts: Sequence[Rollout]) -> Answers:
    """Sum up rollouts."""
    groups: dict[tuple[str, str, int], list[str]] = defaultdict(list)
    for each in rollouts:
        if each.text is not None and each.group is not None:  # its name holds the run: runs share items
            groups[each.group, each.item, each.occurrence].append(each.text)
    rates = [len(set(texts)) / len(texts) for texts in groups.values() if len(texts) > 1]
    return Answers(
        len(rollouts),
        sum(each.error is not None for each in rollouts),
        fmean(rates) if rates else None,
        correlation(lengths_and_scores(rollouts)),
    )


def lengths_and_scores(rollouts: Sequence[Rollout]) -> list[tuple[float, float]]:
    """(characters, score) of every rollout that has both."""
    return [
        (float(len(each.text)), each.score) for each in rollouts if each.text is not None and each.score is not None
    ]


def binned(pairs: Sequence[tuple[float, float]], bins: int = 12) -> list[tuple[float, float, int]]:
    """(mean x, mean y, how many) of the pairs in each of ``bins`` equal spans of x; empty ones are left out."""
    low, high = min(x for x, _ in pairs), max(x for x, _ in pairs)
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for x, y in pairs:
        found[min(bins - 1, int(bins * (x - low) / (high - low))) if high > low else 0].append((x, y))
    return [(fmean(x for x, _ in each), fmean(y for _, y in each), len(each)) for _, each in sorted(found.items())]


def mean_score(rollouts: Iterable[Rollout]) -> float | None:
    """Of those that have a score; None where none has."""
    scores = [each.score for each in rollouts if each.score is not None]
    return fmean(scores) if scores else None


def by_release(rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    """Rollouts by the release that answered them."""
    found: dict[str, list[Rollout]] = defaultdict(list)
    for each in rollouts:
        if each.release is not None:
            found[each.release].append(each)
    return dict(found)


def readings(release: Release, rollouts: Sequence[Rollout]) -> dict[str, Reading]:
    """All figures of a release that a gate can name.

    Those of its step, of its held-out results (they win where both have one name), ``alarms`` (how many it rings), and,
    of ``rollouts`` that it answered, ``unique_answer_rate`` and ``length_reward_correlation`` (Pearson's).
    """
    found = of_step(release) | held_out(release) | {"alarms": Reading(float(len(alarms(release))))}
    if rollouts:
        told = answers(rollouts)
        if told.unique_rate is not None:
            found["unique_answer_rate"] = Reading(told.unique_rate)
        if told.length_reward.pearson is not None:
            found["length_reward_correlation"] = Reading(told.length_reward.pearson)
    return found
