"""Tables for people, in Markdown."""

from collections.abc import Iterable, Mapping, Sequence

from reef_harness.evaluation.intervals import Figure
from reef_harness.evaluation.summary import SMALL_SLICE, Series, Slice

MANY_CUT = 0.05  # of the answers: a share above it is said


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns are as wide as their widest cell: it reads as plain text, too."""
    cells = [[_cell(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def short(text: str, longest: int = 40) -> str:
    """The text in one line; of a longer one its beginning, and an ellipsis."""
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def first_of(ids: Sequence[str], shown: int = 3) -> str:
    """The first few ids, with an ellipsis where there are more."""
    return ", ".join([*map(short, ids[:shown]), *(["…"] if len(ids) > shown else [])])


def share(figure: Figure | None) -> str:
    """``0.700 [0.397, 0.892]``, or ``-``."""
    return "-" if figure is None else f"{figure.value:.3f} [{figure.low:.3f}, {figure.high:.3f}]"


def difference(figure: Figure) -> str:
    """The same with a sign; without an interval where it has no width, which says nothing of other items."""
    if figure.low == figure.high:
        return f"{figure.value:+.3f} [no interval]"
    return f"{figure.value:+.3f} [{figure.low:+.3f}, {figure.high:+.3f}]"


def counted(count: int, noun: str) -> str:
    """``1 answer``, ``2 answers``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def sets_table(found: Mapping[str, Sequence[Series]]) -> str:
    """One row per set and way of sampling; nothing is averaged over sets."""
    head = ("set", "answers", "items", "accuracy", "pass@k", "majority")
    return table(head, [_row(name, series) for name, all_series in found.items() for series in all_series])


def answers_table(found: Mapping[str, Sequence[Series]]) -> str:
    """What the answers are like, right or wrong: judged, readable, how long, cut."""
    head = ("set", "answers", "judged", "for review", "readable", "tokens: mean, median, 99%, longest", "cut")
    return table(head, [_answers_row(name, series) for name, all_series in found.items() for series in all_series])


def _row(name: str, series: Series) -> tuple[str, ...]:
    most = max(series.pass_at_k, default=0)
    return (
        name,
        f"{series.name}, {series.samples} each",
        str(series.items),
        share(series.accuracy),
        f"@{most} {share(series.pass_at_k[most])}" if most > 1 else "-",
        _votes(series),
    )


def _answers_row(name: str, series: Series) -> tuple[str, ...]:
    of = series.tokens
    return (
        name,
        series.name,
        f"{series.coverage.value:.3f}",
        f"{series.review_rate.value:.3f}",
        "-" if series.format_valid is None else f"{series.format_valid.value:.3f}",
        "-" if of is None else f"{of.mean.value:.1f}, {of.median:.0f}, {of.p99:.0f}, {of.longest}",
        "-" if series.truncated is None else f"{series.truncated.value:.3f}",
    )


def _votes(series: Series) -> str:
    if series.votes is None:
        return "-"
    ties = series.votes.outcomes["tie"]
    return f"{share(series.votes.right)}, {ties} {'tie' if ties == 1 else 'ties'}"


def slices_table(found: Mapping[str, Sequence[Series]]) -> str:
    """Accuracy by slice, for the sets that have any; empty where none has. Small ones are marked."""
    rows = [
        (name, series.name, f"{each.name} = {each.value}", _size(each), share(each.accuracy))
        for name, all_series in found.items()
        for series in all_series
        for each in series.slices
    ]
    return table(("set", "answers", "slice", "items", "accuracy"), rows) if rows else ""


def _size(each: Slice) -> str:
    return f"{each.items} (small)" if each.small else str(each.items)


def notes(found: Mapping[str, Sequence[Series]]) -> list[str]:
    """What a reader must know to read the numbers."""
    lines = []
    for name, all_series in found.items():
        for series in all_series:
            of, total = series.outcomes, series.samples * series.items
            left_out = [f"{of[kind]} {_words(kind, of[kind])}" for kind in _NOT_JUDGED if of[kind]]
            if left_out:
                lines.append(
                    f"{name}, {series.name}: of {total} answers {', '.join(left_out)}; none of these is in the "
                    f"accuracy. Were all of them wrong, it would be {series.at_least.value:.3f}."
                )
            lines += [
                f"{name}, {series.name}: {each.reason}: {counted(each.answers, 'answer')} "
                f"{_words(each.outcome, each.answers)}: {first_of(each.items)}"
                for each in series.not_judged
            ]
            if series.cut > MANY_CUT * (answered := sum(series.releases.values())):
                lines.append(
                    f"{name}, {series.name}: of {answered} answers {series.cut} {'was' if series.cut == 1 else 'were'} "
                    f"cut at the token limit, {series.cut_wrong} graded as wrong; a higher --max-tokens (with another "
                    "--out) leaves fewer."
                )
            fewer = [f"{f.items} for pass@{k}" for k, f in series.pass_at_k.items() if f.items < series.items]
            if series.votes is not None and series.votes.right.items < series.items:
                fewer.append(f"{series.votes.right.items} for majority")
            if fewer:
                lines.append(
                    f"{name}, {series.name}: not all {series.items} items have enough judged answers, only "
                    f"{', '.join(fewer)}; the others are left out there."
                )
    for name, all_series in found.items():
        if (items := all_series[0].items) < SMALL_SLICE:
            lines.append(f"{name}: of {items} items intervals are wide, and say little.")
    if any(each.small for all_series in found.values() for series in all_series for each in series.slices):
        lines.append(f"A slice of fewer than {SMALL_SLICE} items is small: its interval says little.")
    return lines


_NOT_JUDGED = {  # in words: of one answer, of several
    "failed": ("failed", "failed"),
    "review": ("waits for review", "wait for review"),
    "error": ("could not be judged", "could not be judged"),
}


def _words(outcome: str, answers: int) -> str:
    return _NOT_JUDGED[outcome][answers != 1]
