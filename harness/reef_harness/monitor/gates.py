"""Which checkpoints may be used: a release is eligible only where every gate passes.

    best = "accuracy"        # of the eligible releases the one with the highest of this is the best

    [gates]
    accuracy = {min = 0.5}
    truncation_rate = {max = 0.1}
    length_reward_correlation = {max = 0.5}

A figure that is not known does not pass. Where a figure has an interval its near end is compared, as by the gate of the
service: ``low`` must reach ``min``, ``high`` must not exceed ``max``.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from reef_harness.drivers.records import Rollout
from reef_harness.errors import HarnessError
from reef_harness.monitor.figures import Reading, by_release, is_number, name_of, number, of_method, readings
from reef_harness.monitor.source import Run
from reef_harness.types import Release

Result = Literal["passed", "failed", "not known"]


@dataclass(frozen=True, slots=True)
class Gate:
    """Limits of one figure; at least one of them is set."""

    figure: str
    min: float | None = None
    max: float | None = None

    def check(self, reading: Reading | None) -> Result:
        """Whether a release with this reading passes."""
        if reading is None:
            return "not known"
        low_enough = self.max is None or reading.near_high <= self.max
        high_enough = self.min is None or reading.near_low >= self.min
        return "passed" if low_enough and high_enough else "failed"

    def __str__(self) -> str:
        ends = (("at least", self.min), ("at most", self.max))
        return f"{self.figure} " + ", ".join(f"{word} {number(end)}" for word, end in ends if end is not None)


@dataclass(frozen=True, slots=True)
class Gates:
    """All gates, and the figure by which the best of the eligible releases is found."""

    gates: tuple[Gate, ...]
    best: str


DEFAULT = Gates(
    (
        Gate("accuracy", min=0.0),  # it was measured on held-out items
        Gate("alarms", max=0.0),
        Gate("truncation_rate", max=0.2),
        Gate("entropy", min=0.001),  # nats: below that every answer is the same
    ),
    "accuracy",
)


@dataclass(frozen=True, slots=True)
class Checked:
    """One release, gate by gate. ``unusable`` says why its weights cannot be used, None where they can."""

    release: Release
    results: tuple[tuple[Gate, Result, Reading | None], ...]
    unusable: str | None
    rank: float | None  # its value of the figure ``best``

    @property
    def eligible(self) -> bool:
        """Whether every gate passed, and its weights can be used."""
        return self.unusable is None and all(result == "passed" for _, result, _ in self.results)


def read_gates(path: Path) -> Gates:
    """The gates of a TOML file; they replace the default ones. Raises HarnessError, naming what is wrong."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise HarnessError(f"{path}: not TOML: {error}") from error
    if unknown := sorted(table.keys() - {"best", "gates"}):
        raise HarnessError(f"{path}: unknown key {unknown[0]!r}; there are best and gates")
    best, gates = table.get("best", DEFAULT.best), table.get("gates")
    if not isinstance(best, str):
        raise HarnessError(f"{path}: best must be the name of a figure, got {best!r}")
    if not isinstance(gates, dict) or not gates:
        raise HarnessError(f"{path}: expected a table [gates] with at least one gate, as in accuracy = {{min = 0.5}}")
    return Gates(tuple(_gate(path, name, limits) for name, limits in gates.items()), name_of(best))


def _gate(path: Path, name: str, limits: object) -> Gate:
    if not isinstance(limits, Mapping) or not limits or limits.keys() - {"min", "max"}:
        raise HarnessError(f"{path}: gates.{name} must be {{min = NUMBER}}, {{max = NUMBER}} or both, got {limits!r}")
    for end, value in limits.items():
        if not is_number(value):
            raise HarnessError(f"{path}: gates.{name}.{end} must be a finite number, got {value!r}")
    if limits.get("min", -math.inf) > limits.get("max", math.inf):
        raise HarnessError(
            f"{path}: gates.{name}: min {limits['min']} is above max {limits['max']}: nothing could pass"
        )
    return Gate(name_of(name), limits.get("min"), limits.get("max"))


def check(run: Run, gates: Gates) -> list[Checked]:
    """Every release whose weights are its own, oldest first.

    Rollbacks and promotions repeat the weights of another release, and steps of a critic alone change none: what they
    repeat is checked.
    """
    answered = by_release(run.rollouts or ())
    own = [release for release in run.releases if release.operation in ("base", "train")]
    return [_check(release, answered.get(release.id, ()), gates) for release in own]


def strangers(run: Run, gates: Gates) -> list[str]:
    """What ``gates`` name that no release has, a sentence each with the nearest name: it may be mistyped."""
    answered = by_release(run.rollouts or ())
    each = [readings(release, answered.get(release.id, ())) for release in run.releases]
    named = dict.fromkeys([*(gate.figure for gate in gates.gates), gates.best])
    absent = [name for name in named if not any(of_method(known, name) for known in each)]
    whole = {name for known in each for name in known}
    parts = {name for name in whole if name.startswith("reward/")}  # no figure of another kind is meant by them
    plain = whole - parts
    plain |= {name.rpartition("/")[2] for name in plain}
    near = {
        name: get_close_matches(name, sorted(plain | parts if name.startswith("reward/") else plain), n=1)
        for name in absent
    }
    return [
        f"no release has a figure {name}" + (f"; the nearest name is {found[0]}" if found else "")
        for name, found in near.items()
    ]


def _check(release: Release, rollouts: Sequence[Rollout], gates: Gates) -> Checked:
    known = readings(release, rollouts)
    results = []
    for gate in gates.gates:
        reading = of_method(known, gate.figure)
        results.append((gate, gate.check(reading), reading))
    rank = of_method(known, gates.best)
    return Checked(release, tuple(results), _unusable(release), rank.value if rank else None)


def _unusable(release: Release) -> str | None:
    if release.state not in (None, "released"):
        return str(release.state)
    if not release.restorable and release.checkpoint is None:
        return "weights are gone"
    return None


def best(checked: Sequence[Checked]) -> Checked | None:
    """The eligible release with the highest rank, of equals the newest; None where none is eligible."""
    eligible = [each for each in checked if each.eligible]
    return max(reversed(eligible), key=lambda each: -math.inf if each.rank is None else each.rank, default=None)
