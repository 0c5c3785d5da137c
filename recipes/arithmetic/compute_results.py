"""What `recipes.arithmetic.compute` measured: the closed forms beside it, the tables, the figure, the page in docs/."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from reef_harness.compute import Row, knee, rows_table
from reef_harness.compute.closed_forms import coverage, mean_coverage, precision_ceiling, verified_best_of
from reef_harness.evaluation.intervals import Figure
from reef_harness.evaluation.pass_at_k import pass_at_k
from reef_harness.evaluation.table import table

from recipes.arithmetic.demo import short
from recipes.arithmetic.service import ROOT
from recipes.arithmetic.verifier import Noisy

SAMPLES = 8  # answers that the budget holds
BANK = 64  # other answers to each problem, for the closed forms
KS = (1, 2, 4, 8, 16, 32, 64)
NOISY = Noisy(t=0.9, f=0.2)
PAGE = ROOT / "docs" / "test-time-compute.md"
BEGIN, END = "<!-- begin: written by python -m recipes.arithmetic.compute --docs -->", "<!-- end -->"


@dataclass(frozen=True, slots=True)
class Setting:
    """Problems of ``steps`` steps; ``budget`` sampled tokens an item; no answer is shorter than ``shortest`` tokens."""

    steps: int
    budget: int
    shortest: int

    @property
    def title(self) -> str:
        return f"{self.steps} steps, at most {self.budget} sampled tokens a problem"


SETTINGS = (Setting(4, 256, 22), Setting(8, 512, 44))


@dataclass(frozen=True, slots=True)
class Chances:
    """What the bank says of each problem: the share of right answers, and of those without a fault in any line.

    ``right[i]`` of ``BANK`` answers to problem i have the right value; ``sound[i]`` have no wrong line either.
    """

    right: tuple[int, ...]
    sound: tuple[int, ...]
    mean_tokens: float

    @property
    def ps(self) -> list[float]:
        """The chance that an answer is right, by problem."""
        return [count / BANK for count in self.right]

    def rates(self, t: float, f: float) -> list[tuple[float, float, float]]:
        """(p, t, f) by problem, of a verifier that accepts sound answers with chance t and all others with f.

        A right value reached over a wrong line is among the others, so t of right answers is a little lower.
        """
        found = []
        for right, sound in zip(self.right, self.sound, strict=True):
            of_right = (sound * t + (right - sound) * f) / right if right else 0.0
            found.append((right / BANK, of_right, f))
        return found


@dataclass(frozen=True, slots=True)
class Result:
    """All that was measured in one setting."""

    setting: Setting
    rows: list[Row]
    chances: Chances
    revisions: dict[str, tuple[int, int, int]]  # method -> right to wrong, wrong to right, items
    seconds: float


def expectations(chances: Chances) -> dict[str, float]:
    """What the closed forms say of the methods that have one, from the bank."""
    return {
        "one sample": fmean(chances.ps),
        f"best of {SAMPLES}, exact verifier": fmean(
            verified_best_of(*rates, SAMPLES) for rates in chances.rates(1.0, 0.0)
        ),
        f"best of {SAMPLES}, noisy verifier": fmean(
            verified_best_of(*rates, SAMPLES) for rates in chances.rates(NOISY.t, NOISY.f)
        ),
    }


def text_of(results: Sequence[Result]) -> str:
    """The tables, as Markdown."""
    parts = []
    for result in results:
        parts += [
            f"### {result.setting.title}\n\n{rows_table(result.rows)}",
            _forms(result.chances),
            _revisions(result),
        ]
    return "\n".join(parts)


def _forms(chances: Chances) -> str:
    p, rates = fmean(chances.ps), chances.rates(NOISY.t, NOISY.f)
    rows = [
        ("one of k right, measured (unbiased)", *(f"{value:.3f}" for value in measured_coverage(chances, KS))),
        ("mean of 1 - (1 - p_i)^k", *(f"{mean_coverage(chances.ps, k):.3f}" for k in KS)),
        ("1 - (1 - p)^k, p the mean", *(f"{coverage(p, k):.3f}" for k in KS)),
        ("best of k, noisy verifier", *(f"{fmean(verified_best_of(*each, k) for each in rates):.3f}" for k in KS)),
    ]
    return (
        f"From a bank of {BANK} answers to each problem (mean {chances.mean_tokens:.1f} tokens, p = {p:.3f}):\n\n"
        + table(("k", *map(str, KS)), rows)
        + f"\nThe noisy verifier (t = {NOISY.t}, f = {NOISY.f}) has its ceiling at "
        f"{fmean(precision_ceiling(*each) for each in rates):.3f}; taken for all problems at once, "
        f"p t / (p t + (1 - p) f) would be {precision_ceiling(p, NOISY.t, NOISY.f):.3f}. "
        f"The knee of the measured curve is at k = {knee_of(chances)}.\n"
    )


def measured_coverage(chances: Chances, ks: Sequence[int]) -> list[float]:
    """Unbiased pass@k of the bank."""
    return [fmean(pass_at_k(BANK, right, k) for right in chances.right) for k in ks]


def knee_of(chances: Chances) -> int | None:
    """The number of answers after which more bring little."""
    ks = range(1, BANK + 1)
    at = knee(ks, measured_coverage(chances, ks))
    return None if at is None else ks[at]


def _revisions(result: Result) -> str:
    rows = [(name, str(lost), str(won), str(count)) for name, (lost, won, count) in result.revisions.items()]
    return table(("", "right to wrong", "wrong to right", "of"), rows)


def draw(path: Path, results: Sequence[Result]) -> None:
    """Above, accuracy by method beside the closed forms; below, the coverage curves with their knees."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        2, len(results), figsize=(7.5 * len(results), 10), dpi=120, layout="constrained", squeeze=False
    )
    for column, result in enumerate(results):
        _draw_methods(axes[0][column], result, labels=column == 0)
        _draw_coverage(axes[1][column], result)
    figure.savefig(path)
    plt.close(figure)


def _draw_methods(axes: Any, result: Result, labels: bool) -> None:
    beside = {"va": "center", "ha": "left", "fontsize": 9, "transform": axes.get_yaxis_transform()}
    for position, row in enumerate(result.rows):
        if row.accuracy is not None:
            _draw_row(axes, position, row, row.accuracy)
        axes.text(1.02, position, f"{row.spent.sampled_tokens / row.items:.0f}", **beside)
    axes.text(1.02, -0.95, "tokens", **beside)
    axes.set_yticks(range(len(result.rows)), [row.method for row in result.rows] if labels else [])
    axes.set(title=result.setting.title, xlabel="accuracy on held-out problems", xlim=(0, 1))
    axes.set_ylim(len(result.rows) - 0.4, -0.6)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def _draw_row(axes: Any, position: int, row: Row, figure: Figure) -> None:
    spread = [[max(0.0, figure.value - figure.low)], [max(0.0, figure.high - figure.value)]]
    label = "measured, 95% interval" if position == 0 else None
    axes.errorbar(figure.value, position, xerr=spread, fmt="o", color="tab:blue", capsize=3, label=label)
    if row.expected is not None:
        label = "closed form" if row.method == "one sample" else None
        axes.plot(row.expected, position, "D", color="tab:orange", markersize=9, fillstyle="none", label=label)


def _draw_coverage(axes: Any, result: Result) -> None:
    chances, ks = result.chances, range(1, BANK + 1)
    p, rates = fmean(chances.ps), chances.rates(NOISY.t, NOISY.f)
    measured, at = measured_coverage(chances, ks), knee_of(chances)
    verified = [fmean(verified_best_of(*each, k) for each in rates) for k in ks]
    ceiling = fmean(precision_ceiling(*each) for each in rates)
    axes.plot(ks, [coverage(p, k) for k in ks], ":", color="tab:gray", label="1 - (1 - p)^k, p the mean chance")
    axes.plot(ks, measured, color="tab:blue", label="one of k is right, measured")
    axes.plot(ks, verified, color="tab:orange", label="best of k by the noisy verifier, closed form")
    axes.axhline(ceiling, color="tab:orange", linestyle="--", linewidth=1, label="its precision ceiling")
    if at is not None:
        axes.plot(at, measured[at - 1], "o", color="tab:red", markersize=8, label=f"knee, k = {at}")
    axes.set(xscale="log", xlabel="answers k to a problem", ylabel="share of problems", ylim=(0, 1.02))
    axes.set_xticks(KS, [str(k) for k in KS])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def write_page(text: str) -> None:
    """Put the tables into the page, between its markers. Raises ValueError where it has none."""
    page = PAGE.read_text()
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{short(PAGE)} has no lines {BEGIN} and {END}")
    PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")
