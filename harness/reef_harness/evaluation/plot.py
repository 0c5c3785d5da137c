"""Figures (extra ``plot``: matplotlib). Drawn without a display."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure as MplFigure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from reef_harness.evaluation.calibration import Calibration
from reef_harness.evaluation.intervals import Figure
from reef_harness.evaluation.table import short


def learning_curve(
    path: Path, rewards: Sequence[tuple[int, float]], held_out: Sequence[tuple[int, float, float, float]], title: str
) -> None:
    """Draw training reward (step, mean) and held-out accuracy (step, share, low, high) against the release's step."""
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes.plot(
        [step for step, _ in rewards],
        [reward for _, reward in rewards],
        color="tab:blue",
        alpha=0.55,
        linewidth=1.2,
        label="training reward (mean of the rollouts each release gave)",
    )
    steps = [step for step, *_ in held_out]
    shares = [share for _, share, _, _ in held_out]
    below = [share - low for _, share, low, _ in held_out]
    above = [high - share for _, share, _, high in held_out]
    axes.errorbar(
        steps,
        shares,
        yerr=[below, above],
        color="tab:orange",
        marker="o",
        markersize=5,
        capsize=3,
        linewidth=1.8,
        label="held-out accuracy (95% Wilson interval)",
    )
    axes.set(title=title, xlabel="release (optimizer step)", ylabel="share correct", ylim=(0, 1.02))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path)
    plt.close(figure)


def pass_at_k_curves(path: Path, curves: Mapping[str, Mapping[int, Figure]], title: str) -> None:
    """Draw pass@k against k, a line with its 95% interval for each name: two releases, or several sets."""
    figure, axes = _axes()
    for (name, curve), colour in zip(curves.items(), _COLOURS * len(curves), strict=False):
        ks = list(curve)
        found = list(curve.values())
        axes.plot(ks, [each.value for each in found], color=colour, marker="o", markersize=4, linewidth=1.8, label=name)
        axes.fill_between(ks, [each.low for each in found], [each.high for each in found], color=colour, alpha=0.15)
    axes.set(title=title, xlabel="k (answers to an item)", ylabel="pass@k", ylim=(0, 1.02))
    axes.set_xscale("log", base=2)
    every_k = sorted({k for curve in curves.values() for k in curve})
    axes.set_xticks(every_k, [str(k) for k in every_k])
    axes.xaxis.minorticks_off()
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    _legend(axes)
    _save(figure, path)


def accuracy_by_slice(path: Path, rows: Sequence[tuple[str, Figure, bool]], title: str) -> None:
    """Draw a point with its 95% interval for each (label, accuracy, whether of a whole set), from top to bottom."""
    figure, axes = plt.subplots(figsize=(8, 1.6 + 0.3 * len(rows)), dpi=150, layout="constrained")
    for place, (_, each, whole) in enumerate(rows):
        ends = [[each.value - each.low], [each.high - each.value]]
        colour, size = (_COLOURS[0], 6) if whole else (_COLOURS[1], 4)
        axes.errorbar([each.value], [place], xerr=ends, fmt="o", color=colour, markersize=size, capsize=3)
        if whole and place:
            axes.axhline(place - 0.5, color="grey", linewidth=0.6)
    labels = [f"{short(label)}  (n = {each.items})" for label, each, _ in rows]
    for text, (*_, whole) in zip(axes.set_yticks(range(len(rows)), labels), rows, strict=True):
        text.label1.set_fontweight("bold" if whole else "normal")
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set(title=title, xlabel="share correct (95% interval)", xlim=(-0.02, 1.02))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(alpha=0.3, axis="x")
    _save(figure, path)


def reliability_diagram(path: Path, found: Calibration, title: str) -> None:
    """Draw how often answers are right against the score they got, above how many got it."""
    figure, (axes, below) = plt.subplots(
        2, 1, figsize=(6, 6.5), dpi=150, layout="constrained", sharex=True, height_ratios=(3, 1)
    )
    axes.plot((0, 1), (0, 1), color="grey", linestyle="--", linewidth=1, label="a perfect score")
    lowest, highest = min(each.low for each in found.bins), max(each.high for each in found.bins)
    margin = 0.02 * (highest - lowest or 1)
    shares = [each.share_right for each in found.bins]
    axes.errorbar(
        [each.mean_score for each in found.bins],
        shares,
        yerr=[
            [each.share_right - each.share_low for each in found.bins],
            [each.share_high - each.share_right for each in found.bins],
        ],
        fmt="o",
        color=_COLOURS[0],
        capsize=3,
        linewidth=1.6,
        label=f"measured (Brier {found.brier:.3f}, calibration error {found.calibration_error:.3f})",
    )
    axes.set(title=title, ylabel="share right (95% interval over items)", ylim=(-0.02, 1.02))
    axes.set_xlim(lowest - margin, highest + margin)  # scores may all be near 1
    _legend(axes)
    axes.grid(alpha=0.3)
    widths = [each.high - each.low for each in found.bins]
    alike = max(widths) <= 1.001 * min(widths)
    heights = [each.count / (1 if alike else max(width, 1e-9)) for each, width in zip(found.bins, widths, strict=True)]
    middles = [(each.low + each.high) / 2 for each in found.bins]
    edge = "white" if alike and widths[0] else _COLOURS[0]  # a narrow bar has nothing but edges
    below.bar(middles, heights, width=widths, color=_COLOURS[0], edgecolor=edge, alpha=0.6)
    below.set(xlabel="score", ylabel="answers")
    if not alike:  # a density, which may differ by powers of ten
        below.set(ylabel="answers / width", yscale="log")
    below.grid(alpha=0.3)
    _save(figure, path)


def length_histogram(path: Path, whole: Sequence[int], cut: Sequence[int], title: str) -> None:
    """Draw how long answers are, in tokens: those that ended by themselves, and on top those cut by the limit."""
    figure, axes = _axes()
    longest = max([*whole, *cut], default=1)
    shortest = min([*whole, *cut], default=0)
    width = max(1, -(-(longest - shortest + 1) // 40))
    edges = [shortest - 0.5 + width * i for i in range((longest - shortest) // width + 2)]
    kinds = [("ended by itself", whole, _COLOURS[0]), ("cut at the limit", cut, _COLOURS[1])]
    there = [(f"{name}: {len(lengths)}", lengths, colour) for name, lengths, colour in kinds if lengths]
    axes.hist(
        [lengths for _, lengths, _ in there],
        bins=edges,
        stacked=True,
        color=[colour for *_, colour in there],
        label=[name for name, *_ in there],
    )
    axes.set(title=title, xlabel="tokens of the answer", ylabel="answers")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes)
    _save(figure, path)


_COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")


def _axes() -> tuple[MplFigure, Axes]:
    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes.grid(alpha=0.3)
    return figure, axes


def _legend(axes: Axes) -> None:
    axes.legend(loc="best", fontsize=9)


def _save(figure: MplFigure, path: Path) -> None:
    figure.savefig(path)
    plt.close(figure)
