"""Several answers to one instruction: sampled at once, each graded and reported as it comes, and one of them picked.

    instruction -> chat -> judge -> report      for each rollout, a few at a time
    all of them -> pick                         by what the answers say, never by the gold answer

A failure is a rollout with an ``error``; the others go on.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from reef_harness.client import Client
from reef_harness.drivers.rollout import GRADABLE, check_choices, no_grade
from reef_harness.errors import EngineFailed, Unreachable
from reef_harness.graders import Grader, Verdict
from reef_harness.types import Completion, Item, Json, ReportState
from reef_harness.wire import Asking


@dataclass(frozen=True, slots=True)
class Rollout:
    """One answer and what became of it. ``error`` is set where it was not sampled, not graded or not reported.

    Prompt ids [P], sampled ids [N] and their log-probabilities [N] are as the service recorded them.
    """

    index: int
    error: str | None = None
    receipt: str | None = None
    release: str | None = None  # that answered
    finish_reason: str | None = None
    text: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_token_ids: tuple[int, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    verdict: Verdict | None = None
    report: ReportState | None = None

    @property
    def whole(self) -> bool:
        """Whether it is an answer at all: sampled, and not cut off by an abort."""
        return self.text is not None and self.finish_reason in GRADABLE

    @property
    def scored(self) -> bool:
        """Whether the service holds a grade of it that can train."""
        return self.report is not None and self.verdict is not None and self.verdict.graded

    def line(self) -> Json:
        """As a line of ``rollouts.jsonl``: without ids and log-probabilities, which the receipt has."""
        verdict, report = self.verdict, self.report
        return {
            "index": self.index,
            "error": self.error,
            "receipt": self.receipt,
            "release": self.release,
            "finish_reason": self.finish_reason,
            "completion_tokens": self.completion_tokens,
            "score": verdict.score if verdict else None,
            "outcome": verdict.outcome if verdict else None,
            "reason_code": verdict.reason_code if verdict else None,
            "grader": f"{verdict.grader}/{verdict.version}" if verdict else None,
            "report": report.id if report else None,
            "state": report.state if report else None,
        }


class Rollouts:
    """Asks for answers to ``item`` and reports them; ``asking`` goes with every request, ``metadata`` with reports.

    Without a grader, or without gold, nothing is graded and nothing reported. With ``group`` the reports name it, so
    that their scores are compared with each other. :attr:`done` holds what has ended, also while :meth:`run` runs.
    """

    def __init__(
        self,
        client: Client,
        item: Item,
        grader: Grader | None,
        *,
        asking: Asking,
        group: str | None,
        metadata: Mapping[str, str],
        retries: int = 2,
        pause_s: float = 1.0,
    ) -> None:
        self._client, self._item = client, item
        self._grader = grader if item.gold is not None else None
        self._asking, self._group, self._metadata, self._retries = asking, group, metadata, retries
        self._pause_s = pause_s
        self.done: list[Rollout] = []

    async def run(self, rollouts: int, concurrency: int) -> list[Rollout]:
        """All of them, by index; never raises for one that fails."""
        room = asyncio.Semaphore(concurrency)

        async def one(index: int) -> None:
            async with room:
                self.done.append(await self._rollout(index))

        async with asyncio.TaskGroup() as tasks:
            for index in range(rollouts):
                tasks.create_task(one(index))
        return sorted(self.done, key=lambda each: each.index)

    async def _rollout(self, index: int) -> Rollout:
        try:
            answer = await self._ask()
        except Exception as error:  # noqa: BLE001 - a supervisor: whatever ends one rollout, the others go on
            return Rollout(index, error=_told(error))
        sampled = _sampled(index, answer)
        if not sampled.whole:
            return replace(sampled, error=f"not a whole answer: finish_reason {sampled.finish_reason!r}")
        if self._grader is None or self._item.gold is None:
            return sampled
        return await self._report(await self._grade(self._grader, sampled))

    async def _ask(self) -> Completion:
        """One answer. Where an engine failed or the connection broke, it is asked anew: nothing refers to the first."""
        for _ in range(self._retries):
            try:
                return await self._ask_once()
            except (EngineFailed, Unreachable):
                await asyncio.sleep(self._pause_s)
        return await self._ask_once()

    async def _ask_once(self) -> Completion:
        answer = await self._client.chat(self._item.messages, **self._asking)
        check_choices(answer, 1)
        return answer

    async def _grade(self, grader: Grader, sampled: Rollout) -> Rollout:
        try:
            verdict = await grader.judge(self._item, sampled.text or "", sampled.finish_reason or "")
        except Exception as error:  # noqa: BLE001 - as above: graders are users' code as well
            return replace(sampled, error=f"not graded: {_told(error)}")
        if none := no_grade(verdict):
            return replace(sampled, error=none[1])
        return replace(sampled, verdict=verdict)

    async def _report(self, graded: Rollout) -> Rollout:
        verdict, receipt = graded.verdict, graded.receipt
        if verdict is None or receipt is None:
            return graded
        try:
            state = await self._client.report(
                receipt,
                verdict.score,
                outcome=verdict.outcome,
                reason_code=verdict.reason_code,
                group=self._group,
                grader=(verdict.grader, verdict.version),
                truncated=graded.finish_reason == "length",
                metadata={**self._metadata, "rollout": graded.index},
                report_id=f"harbor-{receipt}",
            )
        except Exception as error:  # noqa: BLE001 - as above
            return replace(graded, error=f"not reported: {_told(error)}")
        return replace(graded, report=state)


def pick(rollouts: Sequence[Rollout], grader: Grader | None) -> Rollout | None:
    """The answer to hand in: the first of those that most answers agree with; None where there is no answer.

    Only answers that the model ended itself vote, by what the grader reads in them. Where nothing can be read, it is
    the first that the model ended, else the first that length cut. The gold answer plays no part: picking by it would
    hand in the verifier's secret.
    """
    ended = [each for each in rollouts if each.whole and each.finish_reason == "stop"]
    read = {each.index: read_by(grader, each.text or "") for each in ended}
    votes = Counter(answer for answer in read.values() if answer is not None)  # ties: the one that came first
    if votes:
        winner = votes.most_common(1)[0][0]
        return next(each for each in ended if read[each.index] == winner)
    return next(iter([*ended, *(each for each in rollouts if each.whole)]), None)


def read_by(grader: Grader | None, text: str) -> str | None:
    """What the grader reads in an answer; None where there is no grader, or it cannot, or fails at it."""
    try:
        return grader.read(text) if grader else None
    except Exception:  # noqa: BLE001 - as above: an answer that cannot be read does not vote
        return None


def references(rollouts: Sequence[Rollout], picked: Rollout | None) -> list[str]:
    """What a verdict on the whole trial refers to.

    Where rollouts were graded one by one, all of them: the service keeps the verdict beside their own grades. Otherwise
    only the answer that was handed in, for the verifier saw no other.
    """
    if any(each.scored for each in rollouts):
        return [each.receipt for each in rollouts if each.whole and each.receipt]
    return [picked.receipt] if picked and picked.receipt else []


def _sampled(index: int, answer: Completion) -> Rollout:
    choice = answer.choices[0]
    return Rollout(
        index,
        receipt=choice.receipt,
        release=answer.release or None,
        finish_reason=choice.finish_reason,
        text=choice.text,
        prompt_tokens=answer.prompt_tokens,
        completion_tokens=answer.completion_tokens,
        prompt_token_ids=answer.prompt_token_ids,
        token_ids=choice.token_ids,
        logprobs=choice.logprobs,
    )


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
