"""Figures (extra ``plot``: matplotlib). Drawn without a display."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator, PercentFormatter


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
