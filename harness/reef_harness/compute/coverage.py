"""The coverage curve: how often at least one of k answers is right, and where more of them bring little."""

from collections.abc import Callable, Sequence

from reef_harness.compute.closed_forms import coverage
from reef_harness.compute.outcome import Outcome
from reef_harness.compute.routing import knee
from reef_harness.compute.run import judged, told_of, unjudged_of
from reef_harness.errors import HarnessError
from reef_harness.evaluation.pass_at_k import curve
from reef_harness.evaluation.table import share, table
from reef_harness.graders import Grader, Verdict
from reef_harness.types import Item

Counts = list[tuple[int, int]]  # of each item: answers, right ones


async def counts(
    items: Sequence[Item], outcomes: Sequence[Outcome], grader: Grader, *, say: Callable[[str], None] = lambda _: None
) -> Counts:
    """Judge every answer of every trace. Items of which an answer cannot be judged are left out, and ``say`` is told.

    Raises HarnessError where none is left, ValueError where a budget of tokens ended the draws of an item: how many
    answers it has then depends on how long they are, the last of them is cut, and no share of them is a fair one.
    """
    if any(outcome.stopped_by == "budget" for outcome in outcomes):
        raise ValueError("a coverage curve needs as many answers as were asked for: draw them without a budget")
    verdicts = [await judged(item, outcome.trace, grader) for item, outcome in zip(items, outcomes, strict=True)]
    for line in told_of(unjudged_of(zip(items, verdicts, strict=True))):
        say(line)
    found = [_count(each) for each in verdicts if each and all(verdict.graded for verdict in each)]
    if not found:
        raise HarnessError("no item has answers that could all be judged: there is no coverage")
    return found


def _count(verdicts: Sequence[Verdict]) -> tuple[int, int]:
    return len(verdicts), sum(verdict.correct for verdict in verdicts)


def text_of(found: Counts) -> str:
    """The curve, its knee, and what 1 - (1 - p)^k says of the mean chance p.

    An item with fewer than k answers is left out of that k, as in every pass@k; the table says how many are in.
    """
    least, most = min(n for n, _ in found), max(n for n, _ in found)
    p = sum(right / n for n, right in found) / len(found)
    points = curve(found, range(1, most + 1))
    at = knee(list(points), [figure.value for figure in points.values()]) if most > 1 else None
    rows = [
        (f"{k}{' (knee)' if position == at else ''}", share(figure), f"{coverage(p, k):.3f}", str(figure.items))
        for position, (k, figure) in enumerate(points.items())
    ]
    answers = f"{most} answers each" if least == most else f"{least} to {most} answers each"
    return f"{len(found)} items, {answers}, mean chance p = {p:.3f}\n\n" + table(
        ("k", "one of k is right", "1 - (1 - p)^k", "items"), rows
    )
