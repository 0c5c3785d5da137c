"""Revision: a checker says what it found, and the model answers again."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from reef_harness.compute.asker import Asker, Sample
from reef_harness.compute.consistency import Read, candidate_of
from reef_harness.compute.outcome import Candidate, Outcome, StoppedBy
from reef_harness.types import Item, Message

Check = Callable[[Item, Sample], str | None]
"""What is wrong with an answer, in words that the model is told; None: nothing was found."""


async def revise(asker: Asker, item: Item, read: Read, check: Check, rounds: int) -> Outcome:
    """Answer, and answer again up to ``rounds`` times, each time after what the checker found in the answer before.

    The model is shown the item, its last answer and the finding, so the prompt does not grow from round to round.
    Chosen is the answer in which nothing was found, whether it can be read or not, else the last that can be read,
    else the last. An answer that was cut is told to be unfinished. Raises ValueError for ``rounds`` below 0.
    """
    if rounds < 0:
        raise ValueError(f"rounds must be at least 0, got {rounds}")
    messages: list[Message] = list(item.messages)
    trace: list[Candidate] = []
    stopped_by: StoppedBy = "rounds"
    for _ in range(rounds + 1):
        found = await asker.chat(messages)
        if not found:
            stopped_by = "budget"
            break
        finding = _finding(check, item, found[0])
        trace.append(replace(candidate_of(found[0], read), note=finding or ""))
        if finding is None:
            stopped_by = "accepted"
            break
        messages = [
            *item.messages,
            {"role": "assistant", "content": found[0].text},
            {"role": "user", "content": finding},
        ]
    # What the checker accepted counts, read or not: the readable one before it is the one that it found fault with.
    readable = [] if stopped_by == "accepted" else [each for each in trace if each.answer is not None]
    return Outcome(item.id, tuple((readable or trace)[-1:]), asker.spent, stopped_by, tuple(trace))


def _finding(check: Check, item: Item, sample: Sample) -> str | None:
    return check(item, sample) if sample.finish_reason == "stop" else "The answer is not finished."


@dataclass(frozen=True, slots=True)
class Changes:
    """How many first answers were right or wrong, and what became of them."""

    right_to_right: int
    right_to_wrong: int
    wrong_to_right: int
    wrong_to_wrong: int


def changes(pairs: Iterable[tuple[bool, bool]]) -> Changes:
    """Count pairs of (the first answer is right, the chosen one is)."""
    counts = Counter(pairs)
    return Changes(counts[True, True], counts[True, False], counts[False, True], counts[False, False])
