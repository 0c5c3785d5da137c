"""Beam search over segments of an answer, led by a verifier of partial answers.

    prompt -> width * expansions first segments -> the best `width` -> `expansions` of each -> ... -> whole answers

A segment ends with ``boundary``, or with the answer. Each is continued by exactly the token ids that were sampled:
nothing is tokenized again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from reef_harness.compute.asker import Asker, Sample
from reef_harness.compute.best_of import best
from reef_harness.compute.consistency import Read
from reef_harness.compute.outcome import Candidate, Outcome, StoppedBy
from reef_harness.compute.scores import finite
from reef_harness.errors import UnexpectedAnswer
from reef_harness.types import Item, Json


@dataclass(frozen=True, slots=True)
class Partial:
    """An answer so far; ``whole`` where the model ended it. ``ids`` [N] are its sampled tokens.

    Its text may go on behind the last boundary: the token that holds the boundary can hold more than that.
    ``nonce`` differs between any two that were sampled apart, though they say the same.
    """

    text: str
    ids: tuple[int, ...]
    whole: bool
    nonce: tuple[int, ...] = ()
    score: float = 0.0
    receipts: tuple[str, ...] = ()  # of its parts, in order
    releases: tuple[str, ...] = ()  # that answered them


_START = Partial("", (), False)

Verify = Callable[[Item, Partial], float]
"""How promising an answer so far is: higher is better."""


@dataclass(frozen=True, slots=True)
class Beam:
    """How the search is done.

    Of equal scores the one sampled first stays. With ``floor``, candidates that score below it are dropped, and none of
    them is chosen; where that leaves nothing to go on with, the same answers are continued once more, and after
    ``patience`` such rounds in a row the search begins again at the prompt: a bad beginning need not show at once. A
    whole answer that scores ``accept`` ends the search. ``rounds`` limits how often the beams are continued. Raises
    ValueError for numbers below 1, and for an ``accept`` below the ``floor``.
    """

    boundary: str
    width: int = 2
    expansions: int = 2
    rounds: int = 64
    patience: int = 2
    floor: float | None = None
    accept: float | None = None

    def __post_init__(self) -> None:
        if not self.boundary or min(self.width, self.expansions, self.rounds, self.patience) < 1:
            raise ValueError(f"a beam needs a boundary, and numbers of at least 1: {self}")
        if self.floor is not None and self.accept is not None and not self.accept >= self.floor:
            raise ValueError(f"what is accepted must not be dropped: accept {self.accept} is below floor {self.floor}")

    def drops(self, score: float | None) -> bool:
        """Whether an answer, or part of one, with this score is dropped."""
        return self.floor is not None and score is not None and score < self.floor


async def beam_search(asker: Asker, item: Item, read: Read, verify: Verify, how: Beam) -> Outcome:
    """Search until a whole answer is accepted, no beam is left, or the budget is spent; the best whole answer counts.

    The asker must give log-probabilities: with them come the tokens' texts, which tell how a segment ended.
    """
    search = _Search(asker, item, read, verify, how)
    stopped_by = await search.run()
    trace = tuple(search.whole)
    kept = [each for each in trace if not how.drops(each.score)]
    return Outcome(item.id, best(kept), asker.spent, stopped_by, trace)


class _Search:
    def __init__(self, asker: Asker, item: Item, read: Read, verify: Verify, how: Beam) -> None:
        self._asker, self._item, self._read, self._verify, self._how = asker, item, read, verify, how
        self._prompt_ids: tuple[int, ...] = ()
        self.whole: list[Candidate] = []

    async def run(self) -> StoppedBy:
        beams, stuck = [_START], 0
        for _ in range(self._how.rounds):
            found: list[Partial] = []
            for beam in beams:
                samples = await self._continue(beam, self._how.expansions * (1 if beam.ids else self._how.width))
                if not samples:
                    return "budget"
                found += self._score(beam, samples)
                if self._accepted():
                    return "accepted"
            good = [each for each in found if not self._how.drops(each.score)]
            open_ = _distinct([each for each in good if not each.whole])
            if not open_ and any(each.whole for each in good):
                return "complete"
            if open_:
                beams, stuck = sorted(open_, key=lambda each: -each.score)[: self._how.width], 0
            elif self._how.floor is None:
                return "complete"  # every continuation was cut
            elif (stuck := stuck + 1) == self._how.patience:
                beams, stuck = [_START], 0
        return "rounds"

    async def _continue(self, beam: Partial, n: int) -> tuple[Sample, ...]:
        extra: Json = {"stop": [self._how.boundary]}
        if beam.ids:
            return await self._asker.go_on(self._prompt_ids + beam.ids, n=n, extra=extra)
        samples = await self._asker.chat(self._item.messages, n=n, token_ids=True, extra=extra)
        if samples:
            if samples[0].prompt_ids is None:
                raise UnexpectedAnswer("the service gave no prompt_token_ids: no answer can be continued")
            self._prompt_ids = samples[0].prompt_ids
        return samples

    def _score(self, beam: Partial, samples: tuple[Sample, ...]) -> list[Partial]:
        """The continuations that are there to go on with, or whole; those that were cut are not."""
        found = []
        for sample in samples:
            if sample.finish_reason != "stop":
                continue
            partial = _join(beam, sample, self._how.boundary)
            partial = replace(partial, score=finite(self._verify(self._item, partial), self._item))
            found.append(partial)
            if partial.whole:
                read = self._read(partial.text)
                self.whole.append(
                    Candidate(
                        partial.text,
                        "stop",
                        read,
                        len(partial.ids),
                        partial.score,
                        receipts=partial.receipts,
                        releases=partial.releases,
                    )
                )
        return found

    def _accepted(self) -> bool:
        accept = self._how.accept
        return accept is not None and any(each.score is not None and each.score >= accept for each in self.whole)


def _join(beam: Partial, sample: Sample, boundary: str) -> Partial:
    """The answer with one segment more.

    The service's text ends before the boundary, and the tokens hold it, perhaps with more behind it (", " is one token
    for a boundary of ","): that is text of the answer too, since it is continued by these tokens.
    """
    if sample.ids is None or sample.pieces is None or len(sample.pieces) != len(sample.ids):
        raise UnexpectedAnswer(
            "beam search needs the sampled tokens' ids and texts: ids came without texts, or neither"
        )
    tail = "".join(sample.pieces[-len(boundary) :])
    at = tail.find(boundary)
    text = beam.text + sample.text + (tail[at:] if at >= 0 else "")
    nonce = (*beam.nonce, sample.seed, sample.index)
    return Partial(
        text,
        beam.ids + sample.ids,
        at < 0,
        nonce,
        receipts=(*beam.receipts, sample.receipt),
        releases=(*beam.releases, sample.release),
    )


def _distinct(partials: list[Partial]) -> list[Partial]:
    """Without those that repeat the ids of one before: two beams of the same content search no further than one."""
    return list({each.ids: each for each in reversed(partials)}.values())[::-1]
