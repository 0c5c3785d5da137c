"""Self-consistency: many answers, one vote; sampling stops as soon as the rest cannot change its outcome.

Source: Wang et al., Self-Consistency Improves Chain of Thought Reasoning in Language Models (2022). The stop is ours:
it is exact, so the outcome is that of the whole vote in every case, ties included.
"""

from collections.abc import Callable, Sequence

from reef_harness.compute.asker import Asker, Sample
from reef_harness.compute.outcome import Candidate, Outcome, StoppedBy
from reef_harness.compute.votes import Votes
from reef_harness.types import Item

Read = Callable[[str], str | None]
"""What an answer says; None where it cannot be read. A grader's ``read`` is one."""


async def self_consistency(
    asker: Asker, item: Item, read: Read, samples: int, *, early_stop: bool = True, drawn: Sequence[Candidate] = ()
) -> Outcome:
    """Draw up to ``samples`` answers in order, one at a time, and vote. ``drawn`` were drawn before and count.

    An answer that was cut (by its limit or by the budget) does not vote, whatever it says. Raises ValueError for
    ``samples`` below 1.
    """
    if samples < 1:
        raise ValueError(f"a vote needs at least 1 sample, got {samples}")
    trace = list(drawn)
    votes = Votes([candidate.answer for candidate in trace])
    stopped_by: StoppedBy = "samples"
    while len(trace) < samples:
        if early_stop and votes.decided(samples - len(trace)):
            stopped_by = "decided"
            break
        found = await asker.chat(item.messages)
        if not found:
            stopped_by = "budget"
            break
        trace.append(candidate_of(found[0], read))
        votes.add(trace[-1].answer)
    return Outcome(item.id, winners(trace, votes), asker.spent, stopped_by, tuple(trace))


def candidate_of(sample: Sample, read: Read, score: float | None = None) -> Candidate:
    """A whole answer as a candidate; one that was cut says nothing that could be relied on."""
    whole = sample.finish_reason == "stop"
    return Candidate(
        sample.text,
        sample.finish_reason,
        read(sample.text) if whole else None,
        sample.num_tokens,
        score,
        receipts=(sample.receipt,),
        releases=(sample.release,),
    )


def winners(trace: Sequence[Candidate], votes: Votes) -> tuple[Candidate, ...]:
    """The first candidate that says each of the leading answers."""
    return tuple(next(each for each in trace if each.answer == leader) for leader in votes.leaders)
