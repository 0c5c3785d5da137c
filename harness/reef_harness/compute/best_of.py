"""Best of n: many answers, and a scorer that chooses one."""

from reef_harness.compute.asker import Asker
from reef_harness.compute.consistency import Read, candidate_of
from reef_harness.compute.outcome import Candidate, Outcome, StoppedBy
from reef_harness.compute.scores import Scorer, finite
from reef_harness.errors import HarnessError
from reef_harness.types import Item


async def best_of(
    asker: Asker, item: Item, read: Read, score: Scorer, samples: int, *, accept: float | None = None
) -> Outcome:
    """Draw up to ``samples`` answers in order; the first with the highest score is chosen.

    With ``accept``, the first answer that scores at least that ends the search: where it is the highest score that
    there can be, the choice is the same as without it, for less. Answers that were cut are not scored; where all were,
    nothing is chosen. Raises HarnessError where there are whole answers and none of them could be scored (the scorer
    fails, not the model) or one has a score that is no finite number, ValueError for ``samples`` below 1.
    """
    if samples < 1:
        raise ValueError(f"best of n needs at least 1 sample, got {samples}")
    trace: list[Candidate] = []
    stopped_by: StoppedBy = "samples"
    while len(trace) < samples:
        found = await asker.chat(item.messages)
        if not found:
            stopped_by = "budget"
            break
        sample = found[0]
        value = await score(item, sample) if sample.finish_reason == "stop" else None
        if value is not None:
            finite(value, item)
        trace.append(candidate_of(sample, read, value))
        if accept is not None and value is not None and value >= accept:
            stopped_by = "accepted"
            break
    whole = [each for each in trace if each.finish_reason == "stop"]
    if whole and all(each.score is None for each in whole):
        raise HarnessError(f"none of {len(whole)} answers to item {item.id!r} could be scored")
    return Outcome(item.id, best(trace), asker.spent, stopped_by, tuple(trace))


def best(trace: list[Candidate]) -> tuple[Candidate, ...]:
    """The first candidate with the highest score; nothing where none has one."""
    scored = [each for each in trace if each.score is not None]
    return (max(scored, key=lambda each: each.score or 0.0),) if scored else ()
