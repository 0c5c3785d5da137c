"""Verdicts on answers that are kept: now by one grader, later by another, without sampling again."""

import asyncio
from collections.abc import Mapping, Sequence

from reef_harness.evaluation.records import Graded, Response
from reef_harness.graders import Grader, Verdict
from reef_harness.together import together
from reef_harness.types import Item


async def grade(
    items: Mapping[str, Item], responses: Sequence[Response], grader: Grader, *, concurrency: int = 16
) -> list[Graded]:
    """The verdict on each response that is an answer, in their order; an error in place of an answer has none.

    One that was cut has a verdict and no ``answer``: it does not vote, whatever it says.

    ``items`` are by id. Judges that take time (a process, a model) are asked ``concurrency`` at a time.
    """
    if concurrency < 1:
        raise ValueError(f"at least one answer must be graded at a time, got {concurrency}")
    slots = asyncio.Semaphore(concurrency)

    async def one(response: Response) -> Graded:
        text = response.text or ""
        async with slots:
            verdict = await grader.judge(items[response.item], text, response.finish_reason or "")
        return graded(response, verdict, _read(grader, text) if response.finish_reason == "stop" else None)

    return await together(one(response) for response in responses if response.is_answer)


def _read(grader: Grader, text: str) -> str | None:
    try:
        return grader.read(text)
    except Exception:  # noqa: BLE001 - a supervisor: an answer that a grader fails to read has no vote, the others do
        return None


def graded(response: Response, verdict: Verdict, answer: str | None) -> Graded:
    """A verdict as a line beside its response."""
    return Graded(
        item=response.item,
        sample=response.sample,
        temperature=response.temperature,
        outcome=verdict.outcome,
        score=verdict.score,
        reason_code=verdict.reason_code,
        format_valid=verdict.format_valid,
        grader=verdict.grader,
        version=verdict.version,
        detail=verdict.detail,
        answer=answer,
    )
