"""A method over many items: run, graded, summed up in a row of a table."""

import asyncio
import hashlib
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from reef_harness.compute.asker import Asker
from reef_harness.compute.outcome import Candidate, Outcome, Spent, releases_of, total
from reef_harness.errors import HarnessError
from reef_harness.evaluation.intervals import Figure, by_item
from reef_harness.evaluation.table import counted, first_of, share, table
from reef_harness.graders import Grader, Verdict
from reef_harness.together import together
from reef_harness.types import Item

Method = Callable[[Asker, Item], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class Row:
    """A method's result. Of a tie, an item counts with the chance that a random one of the tied answers is right.

    ``accuracy`` is over the items that were answered and graded, None where there is none; items in ``errors`` could
    not be asked or judged, and are left out. ``expected`` is what a closed form says, where there is one. ``releases``
    counts the candidates that each release answered: where there are several, the row is of none of them. ``unjudged``
    names the items whose answer could not be judged, by the verdict's reason (``no_gold``).
    """

    method: str
    accuracy: Figure | None
    spent: Spent
    items: int
    ties: int
    empty: int  # items without any chosen answer: they count as wrong
    errors: int
    stopped_by: dict[str, int]
    expected: float | None = None
    releases: dict[str, int] = field(default_factory=dict)
    unjudged: dict[str, list[str]] = field(default_factory=dict)


def seed_of(seed: int, item: Item) -> int:
    """The first seed of an item: the same for every method, so that methods are compared on the same random numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{item.id}".encode()).digest()[:4]) >> 1


def failed(item: Item, asker: Asker, error: HarnessError) -> Outcome:
    """The outcome of an item that could not be asked."""
    return Outcome(item.id, (), asker.spent, "error", (), f"{type(error).__name__}: {error}")


async def run_each(
    items: Sequence[Item],
    make: Callable[[Item], Asker],
    method: Method,
    *,
    concurrency: int = 64,
    progress: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """``method`` on every item with an asker of its own, ``concurrency`` items at a time.

    A request that fails ends its item with an ``error``, and the others go on. ``progress`` gets each outcome as it
    ends. Raises ValueError for a ``concurrency`` below 1, and what ``make``, ``method`` and ``progress`` raise.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, got {concurrency}")
    slots = asyncio.Semaphore(concurrency)

    async def one(item: Item, asker: Asker) -> Outcome:
        async with slots:
            try:
                outcome = await method(asker, item)
            except HarnessError as error:
                outcome = failed(item, asker, error)
        if progress:
            progress(outcome)
        return outcome

    askers = [make(item) for item in items]  # what means nothing is refused before any of them asks
    return await together(map(one, items, askers))


async def credit(item: Item, chosen: Sequence[Candidate], grader: Grader) -> float | None:
    """The chance that a random one of the chosen is right, 0 for none; None where one of them cannot be judged."""
    return _credit(await judged(item, chosen, grader))


async def judged(item: Item, candidates: Sequence[Candidate], grader: Grader) -> list[Verdict]:
    """A verdict of each candidate."""
    return [await grader.judge(item, each.text, each.finish_reason) for each in candidates]


def _credit(verdicts: Sequence[Verdict]) -> float | None:
    if not all(verdict.graded for verdict in verdicts):
        return None
    return sum(verdict.correct for verdict in verdicts) / len(verdicts) if verdicts else 0.0


def unjudged_of(pairs: Iterable[tuple[Item, Sequence[Verdict]]]) -> dict[str, list[str]]:
    """The items that have a verdict without a score, by the reason of the first of them."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for item, verdicts in pairs:
        if reason := next((verdict.reason_code for verdict in verdicts if not verdict.graded), None):
            found[reason].append(item.id)
    return dict(found)


async def summarize(
    name: str, items: Sequence[Item], outcomes: Sequence[Outcome], grader: Grader, expected: float | None = None
) -> Row:
    """Grade the chosen answers and sum up. Raises HarnessError where every item failed."""
    if outcomes and all(outcome.error for outcome in outcomes):
        raise HarnessError(f"{name}: none of {len(outcomes)} items could be answered; the first: {outcomes[0].error}")
    asked = [pair for pair in zip(items, outcomes, strict=True) if pair[1].error is None]
    verdicts = [await judged(item, outcome.chosen, grader) for item, outcome in asked]
    known = [value for each in verdicts if (value := _credit(each)) is not None]
    return Row(
        name,
        by_item(known) if known else None,
        total(outcomes),
        len(items),
        sum(len(outcome.chosen) > 1 for outcome in outcomes),
        sum(not outcome.chosen for _, outcome in asked),
        len(items) - len(known),
        dict(Counter(outcome.stopped_by for outcome in outcomes)),
        expected,
        dict(releases_of(outcomes)),
        unjudged_of(zip((item for item, _ in asked), verdicts, strict=True)),
    )


def told_of(unjudged: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each reason, for people: the first items, and how many there are."""
    return [
        f"{reason}: {counted(len(ids), 'item')} could not be judged: {first_of(ids)}"
        for reason, ids in sorted(unjudged.items())
    ]


HEAD = ("method", "accuracy", "expected", "sampled tokens", "prompt tokens", "requests", "ties", "none", "errors")


def rows_table(rows: Sequence[Row]) -> str:
    """Markdown, one row a method; tokens and requests are means over items."""
    return table(HEAD, map(_cells, rows))


def _cells(row: Row) -> tuple[str, ...]:
    per_item = max(1, row.items)
    return (
        row.method,
        share(row.accuracy),
        "" if row.expected is None else f"{row.expected:.3f}",
        f"{row.spent.sampled_tokens / per_item:.1f}",
        f"{row.spent.prompt_tokens / per_item:.1f}",
        f"{row.spent.requests / per_item:.1f}",
        str(row.ties),
        str(row.empty),
        str(row.errors),
    )
