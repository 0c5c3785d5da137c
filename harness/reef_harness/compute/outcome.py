"""What a method comes to: the answer it chose, what led to it, and what that cost."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from reef_harness.types import Json

StoppedBy = Literal["samples", "budget", "decided", "agreed", "accepted", "complete", "rounds", "error"]


@dataclass(frozen=True, slots=True)
class Spent:
    """What was asked for and what came: requests, answers or parts of answers (``samples``), tokens.

    ``prompt_tokens`` are counted once for a request, however many answers it asks for; ``failed`` requests brought
    nothing, and what the service did for them is not known.
    """

    requests: int = 0
    samples: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    failed: int = 0

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(
            self.requests + other.requests,
            self.samples + other.samples,
            self.prompt_tokens + other.prompt_tokens,
            self.sampled_tokens + other.sampled_tokens,
            self.failed + other.failed,
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """An answer that could be chosen. ``answer`` is what it says, None where it cannot be read.

    ``num_tokens`` of its tokens were sampled; ``score`` is what a scorer or verifier gave it, None where none did.
    ``receipts`` and ``releases`` are of the requests that it came from, in order: one, or one for each of its parts.
    """

    text: str
    finish_reason: str
    answer: str | None
    num_tokens: int
    score: float | None = None
    note: str = ""  # for people: what a checker found
    receipts: tuple[str, ...] = ()
    releases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a method answered one item.

    ``chosen`` is one candidate; several where a vote ended in a tie, each the first that says one of the tied answers;
    none where nothing could be chosen. ``trace`` holds every candidate in the order in which it came.

    ``stopped_by``: ``samples`` (as many as were asked for), ``budget`` (no further request fits), ``decided`` (the rest
    could not have changed the vote), ``agreed`` (routing: the first samples say the same, and get no more),
    ``accepted`` (a verifier or checker said yes), ``complete`` (no beam is left to go on), ``rounds`` (as many as were
    allowed), ``error`` (``error`` says which).
    """

    item: str
    chosen: tuple[Candidate, ...]
    spent: Spent
    stopped_by: StoppedBy
    trace: tuple[Candidate, ...] = ()
    error: str | None = None

    @property
    def text(self) -> str | None:
        """The chosen answer; None where there is none, or a tie."""
        return self.chosen[0].text if len(self.chosen) == 1 else None

    @property
    def answer(self) -> str | None:
        """What the chosen answer says."""
        return self.chosen[0].answer if len(self.chosen) == 1 else None

    def json(self) -> Json:
        """A line of a file of outcomes."""
        return {**asdict(self), "answer": self.answer}


def releases_of(outcomes: Sequence[Outcome]) -> Counter[str]:
    """How many candidates each release answered, in whole or in part."""
    return Counter(release for outcome in outcomes for each in outcome.trace for release in set(each.releases))


def total(outcomes: Sequence[Outcome]) -> Spent:
    """What all of them cost together."""
    return sum((outcome.spent for outcome in outcomes), Spent())
