"""Held-out evaluation: one answer to each item, graded, never trained on."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from reef_harness.client import Client
from reef_harness.drivers import GRADABLE
from reef_harness.errors import HarnessError
from reef_harness.evaluation.intervals import wilson
from reef_harness.graders import Grader, Verdict
from reef_harness.types import Completion, Item, Json


@dataclass(frozen=True, slots=True)
class Answer:
    """One item's answer. ``error`` is set where there was none; then there is no verdict either."""

    item: Item
    completion: Completion | None
    verdict: Verdict | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result. Shares are of the graded answers; ``low`` and ``high`` are the 95% Wilson interval of ``accuracy``.

    ``release`` is the one that gave most answers (all, unless the service trained meanwhile).
    """

    correct: int
    graded: int
    errors: int
    accuracy: float
    low: float
    high: float
    format_valid: float
    mean_tokens: float
    release: str
    answers: tuple[Answer, ...] = field(repr=False)

    def summary(self) -> Json:
        """The numbers, as JSON: what is stored on a release."""
        return {
            "accuracy": self.accuracy,
            "low": self.low,
            "high": self.high,
            "correct": self.correct,
            "graded": self.graded,
            "errors": self.errors,
            "format_valid": self.format_valid,
            "mean_tokens": self.mean_tokens,
            # Under the names that evaluation.gate is written with.
            "coverage": self.graded / (self.graded + self.errors),
            "invalid_rate": 1 - self.format_valid,
            "response_length": self.mean_tokens,
        }


async def evaluate(
    client: Client,
    items: Sequence[Item],
    grader: Grader,
    *,
    temperature: float = 1.0,
    max_tokens: int = 64,
    seed: int = 0,
    concurrency: int = 64,
    release: str | None = None,
    progress: Callable[[Answer], None] | None = None,
) -> Evaluation:
    """Answer every item once, ``concurrency`` at a time, and grade.

    Requests carry ``x-reef-purpose: eval`` and a seed of their own (``seed`` + position), so the same weights give the
    same result. With ``release`` only that one may answer: the one that is served, or the one that is held. A request
    that fails is counted under ``errors`` and left out of the shares; HarnessError is raised
    when nothing could be graded.
    """
    slots = asyncio.Semaphore(concurrency)

    async def answer(position: int, item: Item) -> Answer:
        async with slots:
            result = await _answer(client, item, grader, temperature, max_tokens, seed + position, release)
        if progress:
            progress(result)
        return result

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer(i, item)) for i, item in enumerate(items)]
    return _evaluation([task.result() for task in tasks])


async def _answer(
    client: Client, item: Item, grader: Grader, temperature: float, max_tokens: int, seed: int, release: str | None
) -> Answer:
    try:
        completion = await client.chat(
            item.messages, temperature=temperature, max_tokens=max_tokens, seed=seed, purpose="eval", release=release
        )
    except HarnessError as error:
        return Answer(item, None, None, f"{type(error).__name__}: {error}")
    choice = completion.choices[0]
    if choice.finish_reason not in GRADABLE:
        return Answer(item, completion, None, f"not a whole answer: finish_reason {choice.finish_reason!r}")
    return Answer(item, completion, await grader.judge(item, choice.text, choice.finish_reason))


def _evaluation(answers: list[Answer]) -> Evaluation:
    graded = [(a.completion, a.verdict) for a in answers if a.completion is not None and a.verdict is not None]
    if not graded:
        raise HarnessError(
            f"none of {len(answers)} items could be evaluated; the first said: "
            f"{answers[0].error if answers else 'there were no items'}"
        )
    correct = sum(verdict.correct for _, verdict in graded)
    low, high = wilson(correct, len(graded))
    return Evaluation(
        correct=correct,
        graded=len(graded),
        errors=len(answers) - len(graded),
        accuracy=correct / len(graded),
        low=low,
        high=high,
        format_valid=sum(verdict.format_valid for _, verdict in graded) / len(graded),
        mean_tokens=sum(completion.completion_tokens for completion, _ in graded) / len(graded),
        release=Counter(completion.release for completion, _ in graded).most_common(1)[0][0],
        answers=tuple(answers),
    )
