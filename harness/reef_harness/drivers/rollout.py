"""One request for answers to an item: sampled, graded, written down, reported.

    item -> chat (n answers) -> judge each -> records: answered -> report each -> records: reported

A failure is a rollout with an ``error``; the others go on.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from reef_harness.client import Client
from reef_harness.drivers.records import GOLDLESS, Key, Records, Rollout
from reef_harness.errors import HarnessError, UnexpectedAnswer
from reef_harness.graders import Grader, Verdict
from reef_harness.types import Choice, Completion, Item, ReportState
from reef_harness.wire import Asking

GRADABLE = frozenset({"stop", "length"})  # finish reasons of whole rollouts; others (an abort) say nothing of the model
_NO_GOLD = "no_gold"
_UNGRADABLE = GOLDLESS | {"bad_score"}  # reason codes: there is no grade to report
_R = TypeVar("_R", bound=Rollout)


@dataclass(frozen=True, slots=True)
class Done:
    """A rollout that ended, and what the service said to its report, if there was one."""

    rollout: Rollout
    state: ReportState | None = None
    ungradable: bool = False  # a failure that is the item's: it has no gold, or one that the grader cannot read

    @property
    def reason(self) -> str:
        """Why it failed, in short: the reason code of what cannot be graded, else what its error begins with."""
        return str(self.rollout.reason_code) if self.ungradable else (self.rollout.error or "").partition(":")[0]


class Sampler:
    """Asks, grades and reports. ``asking`` goes with every request."""

    def __init__(self, client: Client, grader: Grader, records: Records, asking: Asking) -> None:
        self._client, self._grader, self._records, self._asking = client, grader, records, asking
        self._needs_gold = False  # known once it said so: from then on items without one are not even sampled

    async def sample(self, item: Item, key: Key, group: str | None, indexes: Sequence[int]) -> list[Done]:
        """Answers number ``indexes`` of an item, out of one request: graded and reported as members of ``group``."""
        blank = Rollout(item.id, key[1], 0, group)
        known = self._records.goldless(item)
        if known is None and item.gold is None and self._needs_gold:
            known = _NO_GOLD, f"not graded: {_NO_GOLD}: item {item.id!r} has no gold answer"
        if known is not None:
            reason_code, why = known
            return self._failed(
                item, [replace(blank, index=index, error=why, reason_code=reason_code) for index in indexes]
            )
        asking = self._asking.copy()
        asking["n"] = len(indexes)
        try:
            answer = await self._client.chat(item.messages, **asking)
            check_choices(answer, len(indexes))
        except HarnessError as error:
            return self._failed(item, [replace(blank, index=index, error=told(error)) for index in indexes])
        rollouts = await asyncio.gather(
            *(
                self._grade(item, replace(blank, index=indexes[choice.index]), answer, choice)
                for choice in answer.choices
            )
        )
        self._records.answered(item, [each for each in rollouts if each.error is None])
        self._records.failed([each for each in rollouts if each.error is not None], item)
        return await asyncio.gather(*(self.report(each) for each in rollouts))

    async def report(self, rollout: Rollout) -> Done:
        """Report a graded rollout under its own id, once however often this is called; one with an error is not."""
        if rollout.error is not None or rollout.receipt is None:
            return Done(rollout, ungradable=_ungradable(rollout))
        try:
            state = await report(self._client, rollout)
        except HarnessError as error:
            failed = replace(rollout, error=told(error))
            self._records.failed([failed])
            return Done(failed)
        self._records.reported(rollout)
        return Done(rollout, state)

    def _failed(self, item: Item, rollouts: list[Rollout]) -> list[Done]:
        self._records.failed(rollouts, item)
        return [Done(each, ungradable=_ungradable(each)) for each in rollouts]

    async def _grade(self, item: Item, blank: Rollout, answer: Completion, choice: Choice) -> Rollout:
        report_id = self._records.report_id(choice.receipt)
        rollout = await graded(sampled(blank, answer, choice), item, self._grader, report_id)
        self._needs_gold |= rollout.reason_code == _NO_GOLD
        return rollout


def check_choices(answer: Completion, n: int) -> None:
    """Raise UnexpectedAnswer unless an answer has ``n`` choices, numbered from 0."""
    if sorted(choice.index for choice in answer.choices) != list(range(n)):
        indexes = [choice.index for choice in answer.choices]
        raise UnexpectedAnswer(f"{n} answers were asked for, those with the indexes {indexes} came")


def sampled(blank: _R, answer: Completion, choice: Choice) -> _R:
    """``blank`` with what a choice of an answer says; with an ``error`` where the choice is no whole rollout."""
    whole = choice.finish_reason in GRADABLE
    return replace(
        blank,
        receipt=choice.receipt,
        release=answer.release or None,
        finish_reason=choice.finish_reason,
        text=choice.text,
        num_tokens=answer.completion_tokens / len(answer.choices),
        error=None if whole else f"not a whole rollout: finish_reason {choice.finish_reason!r}",
    )


async def graded(rollout: _R, item: Item, grader: Grader, report_id: str) -> _R:
    """A sampled rollout with its verdict, to be reported as ``report_id``; with an ``error`` where it has no grade.

    One that has an error already is not judged.
    """
    if rollout.error is not None:
        return rollout
    verdict = await grader.judge(item, rollout.text or "", rollout.finish_reason or "")
    if none := _no_grade(verdict):
        reason_code, error = none
        return replace(rollout, error=error, reason_code=reason_code)
    return replace(
        rollout,
        score=verdict.score,
        outcome=verdict.outcome,
        reason_code=verdict.reason_code,
        grader=verdict.grader,
        version=verdict.version,
        report=report_id,
    )


async def report(client: Client, rollout: Rollout, metadata: Mapping[str, Any] | None = None) -> ReportState:
    """Post the grade of a graded rollout under its own id: once, however often this is called."""
    return await client.report(
        rollout.receipt or "",
        rollout.score,
        outcome=rollout.outcome,
        reason_code=rollout.reason_code,
        group=rollout.group,
        grader=(rollout.grader or "", rollout.version or ""),
        truncated=rollout.finish_reason == "length",
        metadata=metadata,
        report_id=rollout.report,
    )


def told(error: Exception) -> str:
    """An exception in a rollout's ``error``."""
    return f"{type(error).__name__}: {error}"


def _ungradable(rollout: Rollout) -> bool:
    return rollout.error is not None and rollout.reason_code in _UNGRADABLE


def _no_grade(verdict: Verdict) -> tuple[str, str] | None:
    """Why a verdict is nothing to report, as a reason code and in words; None where it is a grade of the answer."""
    if verdict.outcome == "error" and verdict.reason_code in _UNGRADABLE:
        return verdict.reason_code, f"not graded: {verdict.reason_code}: {verdict.detail}"
    if verdict.score is not None and not math.isfinite(verdict.score):
        return "bad_score", f"not graded: the score of {verdict.grader} {verdict.version} is {verdict.score}"
    return None
