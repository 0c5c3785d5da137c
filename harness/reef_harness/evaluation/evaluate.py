"""Held-out evaluation in one call: one answer to each item, graded, never trained on.

What the command ``reef-harness evaluate`` does with several answers and a directory, for programs that want a number.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from reef_harness.client import Client
from reef_harness.errors import HarnessError
from reef_harness.evaluation.intervals import wilson
from reef_harness.evaluation.records import Response
from reef_harness.evaluation.sample import Ask, Settings, asks, sample
from reef_harness.graders import Grader, Verdict
from reef_harness.types import Item, Json


@dataclass(frozen=True, slots=True)
class Answer:
    """One item's answer. Where there was none, ``error`` says why, and there is no verdict either."""

    item: Item
    response: Response
    verdict: Verdict | None

    @property
    def error(self) -> str | None:
        """Why there is no whole answer."""
        return self.response.error


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result. Shares are of the graded answers; ``low`` and ``high`` are the 95% Wilson interval of ``accuracy``.

    ``releases`` says which release gave how many of the graded answers, ``release`` is the one that gave most: all,
    unless the service took up a new one meanwhile. Then the numbers are of none of them, and :meth:`summary` refuses.
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
    releases: Mapping[str, int]
    answers: tuple[Answer, ...] = field(repr=False)

    def summary(self) -> Json:
        """The numbers, as JSON: what is stored on a release.

        Raises HarnessError where several releases answered.
        """
        if len(self.releases) > 1:
            counts = ", ".join(f"{name}: {count}" for name, count in sorted(self.releases.items()))
            raise HarnessError(
                f"the answers are of {len(self.releases)} releases ({counts}), so they measure none of them: "
                "evaluate(..., release=...) has one of them answer"
            )
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
    that fails, or whose answer cannot be judged, is counted under ``errors`` and left out of the shares; HarnessError
    is raised where no request could succeed, or nothing could be graded.
    """
    settings = Settings(1, temperature, max_tokens=max_tokens, seed=seed)
    answers: dict[int, Answer] = {}  # by seed: each request has its own, and ids may be given twice

    async def keep(ask: Ask, response: Response) -> None:
        verdict = None
        if response.error is None:
            verdict = await grader.judge(ask.item, response.text or "", response.finish_reason or "")
        answers[ask.seed] = Answer(ask.item, response, verdict)
        if progress:
            progress(answers[ask.seed])

    wanted = list(asks(items, settings))
    await sample(client, wanted, settings, release=release, concurrency=concurrency, keep=keep)
    return _evaluation([answers[ask.seed] for ask in wanted])


def _evaluation(answers: list[Answer]) -> Evaluation:
    judged = [(answer.response, answer.verdict) for answer in answers if answer.verdict and answer.verdict.graded]
    if not judged:
        raise HarnessError(f"none of {len(answers)} items could be evaluated; the first said: {_first_word(answers)}")
    correct = sum(verdict.correct for _, verdict in judged)
    low, high = wilson(correct, len(judged))
    releases = Counter(response.release or "" for response, _ in judged)
    return Evaluation(
        correct=correct,
        graded=len(judged),
        errors=len(answers) - len(judged),
        accuracy=correct / len(judged),
        low=low,
        high=high,
        format_valid=sum(verdict.format_valid for _, verdict in judged) / len(judged),
        mean_tokens=sum(response.completion_tokens or 0 for response, _ in judged) / len(judged),
        release=releases.most_common(1)[0][0],
        releases=dict(releases),
        answers=tuple(answers),
    )


def _first_word(answers: Sequence[Answer]) -> str:
    if not answers:
        return "there were no items"
    verdict = answers[0].verdict
    return str(answers[0].error or (f"{verdict.outcome}: {verdict.reason_code} {verdict.detail}" if verdict else ""))
