"""Compare the methods by the results that lie in recipes/*/results: a table, and a figure.

    python -m recipes.arithmetic.compare      # prints the table, writes recipes/results.md and recipes/results.png

Methods answered the same held-out problems with the same seeds, so their differences are taken problem by problem.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from recipes.arithmetic.demo import short
from recipes.arithmetic.service import ROOT

METHODS = ("sao", "grpo", "grpo-dis")
COLOURS = {"sao": "tab:blue", "grpo": "tab:orange", "grpo-dis": "tab:green"}
Z = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Result:
    """One run, as `experiment` wrote it."""

    method: str
    seed: int
    setting: tuple[int, int]  # steps of each problem, releases that rollouts waited
    curve: list[tuple[int, float]]  # rollouts, accuracy
    correct: list[bool]  # of the last measurement, by problem
    clipped: float  # share of tokens that the ratio clipped or rejected, over the last ten releases
    explained: float | None  # the critic's explained variance, over the last ten releases
    summary: dict[str, float]


def load(directory: Path) -> Result:
    """Read one run."""
    summary = json.loads((directory / "summary.json").read_text())
    records = [json.loads(line) for line in (directory / "records.jsonl").read_text().splitlines()]
    measured = [record for record in records if "held_out" in record]
    steps = [record for record in records if record.get("operation") == "train"][-10:]
    explained = [record["critic/explained_variance"] for record in steps if "critic/explained_variance" in record]
    count = summary["held_out_problems"]
    bits = f"{int(measured[-1]['correct'], 16):0{count}b}"
    return Result(
        method=summary["method"],
        seed=summary["seed"],
        setting=(summary["problem_steps"], summary["stale"]),
        curve=[(point["rollouts"], point["held_out"]) for point in measured],
        correct=[bit == "1" for bit in bits],
        clipped=fmean(record["pg_clipfrac"] for record in steps),
        explained=fmean(explained) if explained else None,
        summary=summary,
    )


def difference(ours: Sequence[Result], others: Sequence[Result]) -> tuple[float, float, float]:
    """Mean difference in accuracy of runs of the same seeds, with its 95% interval over the held-out problems.

    Of each problem the seeds' differences are averaged first: they are no independent problems.
    """
    by_seed = {result.seed: result for result in others}
    pairs = [(result.correct, by_seed[result.seed].correct) for result in ours if result.seed in by_seed]
    each = [fmean(a - b for a, b in zip(mine, theirs, strict=True)) for mine, theirs in _by_problem(pairs)]
    mean = fmean(each)
    half = Z * stdev(each) / math.sqrt(len(each))
    return mean, mean - half, mean + half


def _by_problem(pairs: Sequence[tuple[list[bool], list[bool]]]) -> Iterator[tuple[list[bool], list[bool]]]:
    for position in range(len(pairs[0][0])):
        yield [mine[position] for mine, _ in pairs], [theirs[position] for _, theirs in pairs]


def table(results: Sequence[Result]) -> str:
    """Markdown: a section for each setting."""
    lines = []
    for setting in sorted({result.setting for result in results}):
        here = {m: sorted(_of(results, setting, m), key=lambda result: result.seed) for m in METHODS}
        lines += [f"\n### {title(setting)}\n", _HEAD]
        for method, runs in here.items():
            if runs:
                lines.append(_row(method, runs))
        for other in ("grpo", "grpo-dis"):
            if here["sao"] and here[other]:
                mean, low, high = difference(here["sao"], here[other])
                lines.append(f"\nsao minus {other} at equal rollouts: {mean:+.3f} [{low:+.3f}, {high:+.3f}]")
    return "\n".join(lines) + "\n"


_PAGE = """# What the methods learned

Written by `python -m recipes.arithmetic.compare` from `recipes/*/results`; do not edit. How to read it, and what it
says: [recipes/sao](sao/README.md#what-it-learned-here).

![Held-out accuracy against rollouts](results.png)
"""

_HEAD = (
    "| Method | Seeds | Rollouts | Before | After, by seed | Mean gain | Tokens clipped or rejected "
    "| Explained variance |\n|---|---|---|---|---|---|---|---|"
)


def _row(method: str, runs: Sequence[Result]) -> str:
    after = " / ".join(f"{run.summary['accuracy_after']:.3f}" for run in runs)
    explained = [run.explained for run in runs if run.explained is not None]
    return (
        f"| {method} | {', '.join(str(run.seed) for run in runs)} | {runs[0].summary['rollouts']} "
        f"| {fmean(run.summary['accuracy_before'] for run in runs):.3f} | {after} "
        f"| {fmean(run.summary['gain'] for run in runs):+.3f} | {fmean(run.clipped for run in runs):.2%} "
        f"| {f'{fmean(explained):.2f}' if explained else ''} |"
    )


def title(setting: tuple[int, int]) -> str:
    """A setting in words."""
    steps, stale = setting
    return f"{steps} steps" + (f", rollouts {stale} releases old" if stale else "")


def _of(results: Sequence[Result], setting: tuple[int, int], method: str) -> list[Result]:
    return [result for result in results if (result.setting, result.method) == (setting, method)]


def draw(path: Path, results: Sequence[Result]) -> None:
    """Held-out accuracy against rollouts: a panel for each setting; thin lines are seeds, the thick one their mean."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    settings = sorted({result.setting for result in results})
    figure, axes = plt.subplots(
        1, len(settings), figsize=(5 * len(settings), 4), dpi=130, layout="constrained", squeeze=False, sharey=True
    )
    for axis, setting in zip(axes[0], settings, strict=True):
        for method in METHODS:
            runs = _of(results, setting, method)
            for run in runs:
                axis.plot(*zip(*run.curve, strict=True), color=COLOURS[method], alpha=0.3, linewidth=1)
            if runs:
                mean = [
                    (points[0][0], fmean(share for _, share in points))
                    for points in zip(*(run.curve for run in runs), strict=True)
                ]
                axis.plot(*zip(*mean, strict=True), color=COLOURS[method], marker="o", markersize=4, label=method)
        axis.set(title=title(setting), xlabel="rollouts (a critic's warm-up included)", ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("held-out accuracy, 1,000 problems, T=1")
    axes[0][0].legend(loc="lower right")
    figure.savefig(path)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and write it with the figure."""
    parser = argparse.ArgumentParser(prog="python -m recipes.arithmetic.compare", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "recipes", help="where results.md and results.png go")
    args = parser.parse_args(argv)
    results = [load(path.parent) for path in sorted((ROOT / "recipes").glob("*/results/*/summary.json"))]
    if not results:
        print("there are no results: run `python -m recipes.arithmetic.experiment sao` first", file=sys.stderr)
        return 1
    text = table(results)
    (args.out / "results.md").write_text(_PAGE + text)
    draw(args.out / "results.png", results)
    print(text + f"\nwritten: {short(args.out / 'results.md')}, {short(args.out / 'results.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
