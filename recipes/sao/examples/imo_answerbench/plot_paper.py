"""The paper's table beside what was measured here: DIR/paper.png. Beside, not against: see the words in the figure.

``python -m recipes.sao.examples.imo_answerbench.plot_paper DIR``, where evaluate.py measured releases. The paper's
numbers (2607.07508; in per cent, point estimates, no intervals and no seeds given) are of Qwen3-30B-A3B with a Python
tool, 128k tokens and about 1000 steps of 128 rollouts; ours are of whatever model, items and lengths DIR is of.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from matplotlib.figure import Figure
from reef_harness.errors import HarnessError

from recipes.sao.examples.imo_answerbench.plot_curve import Measured, read

BENCHMARKS = ("AIME25", "BeyondAIME", "HMMT Nov25", "IMO-AnswerBench")
PAPER: dict[str, tuple[float, float, float, float]] = {
    "untuned, with tool": (14.6, 10.5, 17.3, 7.8),
    "untuned, no tool": (85.0, 63.0, 76.7, 55.3),
    "SFT (where RL starts)": (80.4, 53.3, 75.2, 53.3),
    "GRPO (before collapse)": (84.2, 54.8, 76.0, 55.8),
    "GRPO + DIS": (93.5, 70.8, 84.0, 70.0),
    "SAO, DIS only": (94.2, 71.5, 86.7, 71.3),
    "SAO": (97.3, 74.8, 88.3, 74.0),
}
COLOURS = ("0.8", "0.65", "0.5", "tab:cyan", "tab:green", "tab:purple", "tab:blue")


def draw(path: Path, found: Sequence[Measured], what: str) -> None:
    """The paper's bars on the left, ours with intervals on the right; scales alike, nothing else is."""
    figure = Figure(figsize=(11, 5.4), dpi=150, layout="constrained")
    paper, ours = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    width = 0.8 / len(PAPER)
    for place, ((name, values), colour) in enumerate(zip(PAPER.items(), COLOURS, strict=True)):
        lefts = [number + place * width for number in range(len(BENCHMARKS))]
        paper.bar(lefts, values, width=width, label=name, color=colour)
    paper.set_xticks([number + 0.4 - width / 2 for number in range(len(BENCHMARKS))], BENCHMARKS)
    paper.set_ylabel("accuracy (%)")
    paper.set_title(
        "The paper: Qwen3-30B-A3B, Python tool unless said, 128k tokens\npoint estimates, no intervals given"
    )
    figure.legend(*paper.get_legend_handles_labels(), fontsize=8, ncols=4, loc="outside lower center")
    ends = [found[0], found[-1]] if len(found) > 1 else [found[0]]
    heights = [100 * each.accuracy for each in ends]
    errors = [[100 * (e.accuracy - e.low) for e in ends], [100 * (e.high - e.accuracy) for e in ends]]
    names = [f"release {each.number}" for each in ends]
    ours.bar(names, heights, yerr=errors, capsize=4, color=["0.65", "tab:orange"][: len(ends)], width=0.6)
    ours.set_title(
        "\n".join(wrap(f"Here: {what}", 28)) + f"\n{ends[-1].items} items x {ends[-1].samples}, 95% intervals"
    )
    for axes in (paper, ours):
        axes.set_ylim(0, 105)
        axes.grid(axis="y", alpha=0.3)
    figure.suptitle("NOT COMPARABLE: other model, items, lengths, steps, no tool here (README.md)", fontweight="bold")
    figure.savefig(path)


def table(found: Sequence[Measured], what: str) -> str:
    """The same as text."""
    lines = [f"{'':<26}" + "".join(f"{name:>17}" for name in BENCHMARKS)]
    lines += [f"{name:<26}" + "".join(f"{value:>17.1f}" for value in values) for name, values in PAPER.items()]
    lines.append("(the paper: per cent, point estimates, Qwen3-30B-A3B with a Python tool unless said)")
    for each in dict.fromkeys((found[0], found[-1])):
        figures = f"{100 * each.accuracy:.1f} [{100 * each.low:.1f}, {100 * each.high:.1f}]"
        lines.append(f"here, release {each.number}: {figures} on {what}, {each.items} items x {each.samples}")
    return "\n".join([*lines, "Not comparable: other model, items, lengths and steps, and no tool here."])


def main(argv: Sequence[str] | None = None) -> int:
    """Draw and print."""
    parser = argparse.ArgumentParser(prog="plot_paper.py", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, metavar="DIR", help="of evaluate.py")
    parser.add_argument("--what", default="our held-out items", help="what was measured, for the title")
    arguments = parser.parse_args(argv)
    try:
        found = read(arguments.directory)
    except (HarnessError, OSError, ValueError, KeyError) as error:
        print(f"plot_paper.py: {error}", file=sys.stderr)
        return 1
    draw(arguments.directory / "paper.png", found, arguments.what)
    print(table(found, arguments.what))
    print(arguments.directory / "paper.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
