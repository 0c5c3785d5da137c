"""Reward, length, release and staleness over the rollouts of a stream, from its records: DIRECTORY/stream.png.

``python -m recipes.sao.examples.imo_answerbench.plot_stream DIRECTORY``, where stream.py left rollouts.jsonl and
chain.json. Staleness counts the updates of the policy between the release that answered and the one that was trained
from when the rollout was used; a rollout that never trained has none.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from reef_harness.drivers.records import Rollout, read_rollouts
from reef_harness.errors import HarnessError

from recipes.sao.examples.imo_answerbench import chain
from recipes.sao.examples.imo_answerbench.chain import Link

WINDOW = 64  # rollouts of a moving mean


@dataclass(frozen=True, slots=True)
class Point:
    """One rollout that was reported, in the order of the reports. ``version``: policy updates behind who answered."""

    reward: float | None
    length: float | None
    version: int | None
    staleness: int | None


def points(directory: Path) -> list[Point]:
    """The rollouts of a stream. Raises HarnessError for files that are missing or none of a stream's."""
    path = directory / "rollouts.jsonl"
    if not path.exists():
        raise HarnessError(f"{path} is not there: stream.py writes it")
    by_id = {link.id: link for link in chain.load(directory / "chain.json")}
    trained = _trained(path)
    return [_point(each, by_id, trained) for each in read_rollouts(path) if each.error is None]


def _trained(path: Path) -> dict[tuple[str, int], str]:
    """The release that each rollout trained, by item and occurrence."""
    found: dict[tuple[str, int], str] = {}
    for line in path.read_bytes().splitlines(keepends=True):
        event = json.loads(line) if line.endswith(b"\n") else {}
        if event.get("event") == "settled" and event["state"] == "trained":
            found[event["item"], event["occurrence"]] = event["release"]
    return found


def _point(rollout: Rollout, by_id: dict[str, Link], trained: dict[tuple[str, int], str]) -> Point:
    answered = by_id.get(rollout.release or "")
    made = by_id.get(trained.get(rollout.key, ""))
    base = by_id.get(made.parent or "") if made else None  # what the step began from
    staleness = base.version - answered.version if base and answered else None
    return Point(rollout.score, rollout.num_tokens, answered.version if answered else None, staleness)


def moving_mean(values: Sequence[float | None], window: int = WINDOW) -> list[float | None]:
    """The mean of the last ``window`` values at each place; None where there is none among them."""
    found: list[float | None] = []
    total, count = 0.0, 0
    for place, value in enumerate(values):
        leaving = values[place - window] if place >= window else None
        total += (value or 0.0) - (leaving or 0.0)
        count += (value is not None) - (leaving is not None)
        found.append(total / count if count else None)
    return found


def draw(path: Path, found: Sequence[Point], title: str) -> None:
    """Four panels over the same rollouts."""
    figure = Figure(figsize=(8, 8.5), dpi=150, layout="constrained")
    reward, length, release, staleness = figure.subplots(4, 1, sharex=True)
    places = list(range(1, len(found) + 1))
    for axes, values, name in (
        (reward, [each.reward for each in found], "reward"),
        (length, [each.length for each in found], "length (tokens)"),
    ):
        axes.plot(places, [_number(value) for value in values], ".", markersize=2, alpha=0.25, color="tab:blue")
        mean = [_number(value) for value in moving_mean(values)]
        axes.plot(places, mean, color="tab:orange", linewidth=1.8)
        axes.set_ylabel(name)
    reward.set_ylim(-0.05, 1.05)
    length.set_ylim(0, 1.08 * max([each.length or 0.0 for each in found]) or 1.0)
    for axes, whole, name in (
        (release, [each.version for each in found], "policy updates behind\nwho answered"),
        (staleness, [each.staleness for each in found], "staleness when trained\n(policy updates)"),
    ):
        axes.plot(places, [_number(value) for value in whole], ".", markersize=3, color="tab:green")
        axes.set_ylabel(name)
        axes.set_ylim(bottom=-0.3)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (reward, length, release, staleness):
        axes.grid(alpha=0.3)
    staleness.set_xlabel("rollout, in the order of the answers")
    figure.suptitle(f"{title}\neach rollout, and the mean of the last {WINDOW} (of fewer at the start)")
    figure.savefig(path)


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def main(argv: Sequence[str] | None = None) -> int:
    """Draw it, and say in numbers what it shows."""
    parser = argparse.ArgumentParser(prog="plot_stream.py", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="of stream.py")
    arguments = parser.parse_args(argv)
    try:
        found = points(arguments.directory)
    except (HarnessError, OSError, ValueError) as error:
        print(f"plot_stream.py: {error}", file=sys.stderr)
        return 1
    if not found:
        print(f"plot_stream.py: {arguments.directory} has no reported rollout", file=sys.stderr)
        return 1
    stale = [each.staleness for each in found if each.staleness is not None]
    path = arguments.directory / "stream.png"
    draw(path, found, f"{len(found)} rollouts, {len(stale)} of them trained")
    spread = f", staleness {min(stale)} to {max(stale)}" if stale else ""
    print(f"{path}: {len(found)} rollouts, {len(stale)} trained{spread}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
