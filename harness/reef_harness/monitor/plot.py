"""The report's figures (extra ``plot``: matplotlib). Drawn without a display; each says whether there was anything."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

from reef_harness.monitor.figures import binned, lengths_and_scores
from reef_harness.monitor.series import (
    REWARD,
    STEP_FIGURES,
    components,
    measured,
    numbered,
    phase_seconds,
    recorded,
    series,
)
from reef_harness.monitor.source import Run

X = "release (place in the chain)"


def reward(path: Path, run: Run) -> bool:
    """Reward with its spread and its parts, and held-out accuracy with its interval: two panels, one where one is."""
    paid, tested = series(run.releases, REWARD.name), measured(run.releases)
    panels = [each for each in (_draw_reward if paid else None, _draw_held_out if tested else None) if each]
    if not panels:
        return False
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(9, 3.4 * len(panels)), dpi=130, layout="constrained", squeeze=False, sharex=True
    )
    for draw, axis in zip(panels, axes[:, 0], strict=True):
        draw(axis, run)
        _mark_moves(axis, run)
    _finish(axes[-1][0])
    figure.savefig(path)
    plt.close(figure)
    return True


def _draw_reward(axes: Any, run: Run) -> None:
    spread = dict(series(run.releases, "reward_std"))
    paid = series(run.releases, REWARD.name)
    places, values = [place for place, _ in paid], [value for _, value in paid]
    axes.plot(places, values, color="tab:blue", marker=".", linewidth=1.5, label="rollouts trained from")
    if all(place in spread for place in places):
        scores = [each.score for each in run.rollouts or () if each.score is not None]
        smallest, largest = min(scores, default=-math.inf), max(scores, default=math.inf)  # without records: not known
        low = [min(value, max(smallest, value - spread[place])) for place, value in paid]
        high = [max(value, min(largest, value + spread[place])) for place, value in paid]
        axes.fill_between(places, low, high, color="tab:blue", alpha=0.12, label="one standard deviation")
    scored = recorded(run)
    if scored:
        axes.plot(
            *zip(*scored, strict=True), color="tab:gray", marker=".", linewidth=1.2, label="all recorded rollouts"
        )
    for name in components(run.releases)[:6]:
        axes.plot(*zip(*series(run.releases, f"reward/{name}"), strict=True), linewidth=1, label=name)
    axes.set(ylabel="reward, mean over rollouts" + ("" if scored else " trained from"))
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=8)


def _draw_held_out(axes: Any, run: Run) -> None:
    tested = measured(run.releases)
    low = [max(0.0, reading.value - reading.near_low) for _, _, reading in tested]
    high = [max(0.0, reading.near_high - reading.value) for _, _, reading in tested]
    places, values = [place for place, _, _ in tested], [reading.value for _, _, reading in tested]
    axes.errorbar(
        places, values, yerr=[low, high], color="tab:orange", marker="o", capsize=3, label="held-out accuracy"
    )
    rung = [(place, reading.value) for place, release, reading in tested if release.raw.get("alarms")]
    if rung:
        axes.plot(*zip(*rung, strict=True), "x", color="tab:red", markersize=11, markeredgewidth=2, label="alarm")
    axes.set(ylabel="held-out accuracy, 95% interval", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=8)


def steps(path: Path, run: Run) -> bool:
    """A small panel for each figure of the steps that there is."""
    shown = [(each, series(run.releases, each.name)) for each in STEP_FIGURES]
    shown = [(each, values) for each, values in shown if values]
    if not shown:
        return False
    rows = (len(shown) + 1) // 2
    last = len(shown) - 1
    places = [[2 * row, min(2 * row + 1, last)] for row in range(rows)]  # of an odd number the last has its whole row
    figure, axes = plt.subplot_mosaic(places, figsize=(11, 2.4 * rows), dpi=130, layout="constrained", sharex=True)
    for place, (each, values) in enumerate(shown):
        axis = axes[place]
        axis.plot(*zip(*values, strict=True), marker=".", linewidth=1.2)
        axis.set_title(each.title, fontsize=10)
        if all(value == values[0][1] for _, value in values):  # else the axis is about nothing, below 0 too
            axis.set_ylim(min(0.0, 1.1 * values[0][1]), max(0.1, 1.1 * values[0][1]))
        axis.grid(alpha=0.3)
        _mark_moves(axis, run)
    for place in set(places[-1]):
        _finish(axes[place])
    figure.savefig(path)
    plt.close(figure)
    return True


def time(path: Path, run: Run) -> bool:
    """Seconds of every phase, one on top of the other."""
    phases = phase_seconds(run.releases)
    places = sorted({place for values in phases.values() for place, _ in values})
    if not places:
        return False
    figure, axes = plt.subplots(figsize=(9, 3.6), dpi=130, layout="constrained")
    below = [0.0] * len(places)
    for phase, values in phases.items():
        known = dict(values)
        heights = [known.get(place, 0.0) for place in places]
        axes.bar(places, heights, bottom=below, width=0.8, label=phase.replace("_", " "))
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set(ylabel="seconds")
    axes.grid(alpha=0.3, axis="y")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    _finish(axes)
    figure.savefig(path)
    plt.close(figure)
    return True


def length(path: Path, run: Run) -> bool:
    """Reward against length: the mean score of rollouts of about one length, or, without records, of single steps."""
    pairs = lengths_and_scores(run.rollouts or ())
    x, y = "length of the answer (characters)", "mean score (size: how many rollouts)"
    if not pairs:
        lengths = dict(series(run.releases, "response_length_mean"))
        pairs = [(lengths[place], paid) for place, paid in series(run.releases, REWARD.name) if place in lengths]
        x, y = "length (sampled tokens, mean of a batch)", "reward (mean of a batch)"
    if len(pairs) < 3:
        return False
    points = binned(pairs) if run.rollouts else [(length, paid, 1) for length, paid in pairs]
    most = max(count for _, _, count in points)
    figure, axes = plt.subplots(figsize=(6, 4), dpi=130, layout="constrained")
    sizes = [30 + (270 * count / most if most > 1 else 0) for _, _, count in points]
    axes.scatter([at for at, _, _ in points], [paid for _, paid, _ in points], s=sizes, alpha=0.6)
    axes.set(xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    figure.savefig(path)
    plt.close(figure)
    return True


def _mark_moves(axes: Any, run: Run) -> None:
    """A line where the chain was rolled back or promoted."""
    for place, release in numbered(run.releases):
        if release.operation in ("rollback", "promote"):
            axes.axvline(place, color="tab:red", linestyle=":", linewidth=1)


def _finish(axes: Any) -> None:
    axes.set_xlabel(X)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


FIGURES: Sequence[tuple[str, Any]] = (("reward", reward), ("steps", steps), ("length", length), ("time", time))
"""Names of files, and who draws them: (path, run) -> whether there was anything to draw."""
