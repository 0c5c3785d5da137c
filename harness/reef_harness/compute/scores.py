"""Scores of whole answers, without the right one: by the model's own probability, a verifier, or a judge."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from reef_harness.compute.asker import Sample
from reef_harness.errors import HarnessError
from reef_harness.graders import Grader
from reef_harness.types import Item

Scorer = Callable[[Item, Sample], Awaitable[float | None]]
"""Higher is better; None: it could not be scored, and cannot be chosen."""


def finite(score: float, item: Item) -> float:
    """The same score. Raises HarnessError for one that is no finite number: NaN is neither above nor below another."""
    if not math.isfinite(score):
        raise HarnessError(f"an answer to item {item.id!r} got the score {score}: expected a finite number")
    return score


@dataclass(frozen=True, slots=True)
class SequenceScore:
    """Log-probability of an answer under the model that sampled it, in nats."""

    sum: float
    num_tokens: int

    @property
    def mean(self) -> float:
        """By token. Raises ValueError for an answer without tokens: it has no mean."""
        if self.num_tokens == 0:
            raise ValueError("an answer without tokens has no mean log-probability")
        return self.sum / self.num_tokens


def sequence_score(logprobs: Sequence[float]) -> SequenceScore:
    """The score of tokens with these log-probabilities [N]; of none it is a sum of 0."""
    return SequenceScore(math.fsum(logprobs), len(logprobs))


async def by_logprob_sum(item: Item, sample: Sample) -> float | None:
    """The probability of the whole answer: it prefers short ones."""
    return _sequence(sample).sum


async def by_logprob_mean(item: Item, sample: Sample) -> float | None:
    """The mean log-probability of a token: the sum, made up for length. None for an answer without tokens."""
    score = _sequence(sample)
    return score.mean if score.num_tokens else None


def by_verifier(verify: Callable[[Item, Sample], float | None]) -> Scorer:
    """A function of ours that looks at the answer."""

    async def score(item: Item, sample: Sample) -> float | None:
        return verify(item, sample)

    return score


def by_judge(judge: Grader) -> Scorer:
    """The score of a grader that judges without a right answer (a model with a rubric). It is not shown the gold.

    Its own failures, and answers that it leaves to a person, have no score; so has every answer under a grader that
    needs the gold.
    """

    async def score(item: Item, sample: Sample) -> float | None:
        return (await judge.judge(replace(item, gold=None), sample.text, sample.finish_reason)).score

    return score


def _sequence(sample: Sample) -> SequenceScore:
    if sample.logprobs is None:
        raise HarnessError("log-probabilities are needed for this score: make the Asker with logprobs=True")
    return sequence_score(sample.logprobs)
