"""Held-out accuracy of releases, with 95% intervals over the items: DIR/curve.png.

``python -m recipes.sao.examples.imo_answerbench.plot_curve DIR``, where evaluate.py measured them. Figures of one DIR
are of the same items and seeds, so two points that go up and down together do so for the items' sake: whether the last
differs from the first is what DIR/before-after says.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from reef_harness.errors import HarnessError

from recipes.sao.examples.imo_answerbench import chain
from recipes.sao.examples.imo_answerbench.evaluate import SET, directory_of


@dataclass(frozen=True, slots=True)
class Measured:
    """A release's accuracy with its interval, over ``items`` items with ``samples`` answers each."""

    number: int
    release: str
    accuracy: float
    low: float
    high: float
    items: int
    samples: int


def read(directory: Path) -> list[Measured]:
    """The releases that are measured, oldest first. Raises HarnessError where there is none."""
    found = []
    for link in chain.load(directory / "chain.json"):
        path = directory_of(directory, link) / "summary.json"
        if path.exists():
            series = json.loads(path.read_text(encoding="utf-8"))["sets"][SET]["series"][0]
            if accuracy := series["accuracy"]:
                figures = (accuracy["value"], accuracy["low"], accuracy["high"])
                found.append(Measured(link.number, link.id, *figures, series["items"], series["samples"]))
    if not found:
        raise HarnessError(f"no release is measured in {directory}: evaluate.py does it")
    return found


def draw(path: Path, found: Sequence[Measured]) -> None:
    """A point with its interval for each release."""
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    values = [each.accuracy for each in found]
    below = [each.accuracy - each.low for each in found]
    above = [each.high - each.accuracy for each in found]
    numbers = [each.number for each in found]
    axes.errorbar(numbers, values, yerr=[below, above], color="tab:orange", marker="o", capsize=3, linewidth=1.8)
    items, samples = found[-1].items, found[-1].samples
    axes.set_title(f"Held-out accuracy, {items} items, mean of {samples} answers each (95% intervals over items)")
    axes.set_xlabel("release (its place in the chain)")
    axes.set_ylabel("accuracy")
    axes.set_ylim(0, 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw it, and print the points."""
    parser = argparse.ArgumentParser(prog="plot_curve.py", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, metavar="DIR", help="of evaluate.py")
    arguments = parser.parse_args(argv)
    try:
        found = read(arguments.directory)
    except (HarnessError, OSError, ValueError, KeyError) as error:
        print(f"plot_curve.py: {error}", file=sys.stderr)
        return 1
    for each in found:
        interval = f"{each.accuracy:.3f} [{each.low:.3f}, {each.high:.3f}]"
        print(f"release {each.number} ({each.release}): {interval}, {each.items} items x {each.samples}")
    draw(arguments.directory / "curve.png", found)
    print(arguments.directory / "curve.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
