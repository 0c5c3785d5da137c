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
from reef_harness.drivers.records import Rollout as DriversRollout
from reef_harness.drivers.rollout import GRADABLE, check_choices, graded, report, sampled, told
from reef_harness.errors import EngineFailed, Unreachable
from reef_harness.graders import Grader
from reef_harness.types import Completion, Item, Json, ReportState
from reef_harness.wire import Asking

ROLLOUTS = 6  # where nothing else is asked for
_LINE = ("index", "error", "receipt", "release", "finish_reason", "num_tokens", "score", "outcome", "reason_code")


@dataclass(frozen=True, slots=True)
class Rollout(DriversRollout):
    """A driver's rollout, with the answer as it came (ids and log-probabilities too) and what became of its report."""

    answer: Completion | None = None
    state: ReportState | None = None

    @property
    def whole(self) -> bool:
        """Whether it is an answer at all: sampled, and not cut off by an abort."""
        return self.text is not None and self.finish_reason in GRADABLE

    @property
    def scored(self) -> bool:
        """Whether the service holds a grade of it that can train."""
        return self.state is not None and self.score is not None

    def line(self) -> Json:
        """As a line of ``rollouts.jsonl``: without ids and log-probabilities, which the receipt has."""
        return {
            **{name: getattr(self, name) for name in _LINE},
            "grader": f"{self.grader}/{self.version}" if self.grader else None,
            "report": self.state.id if self.state else None,
            "state": self.state.state if self.state else None,
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
        rollout = Rollout(self._item.id, 0, index, self._group)
        try:
            answer = await self._ask()
            rollout = replace(sampled(rollout, answer, answer.choices[0]), answer=answer)
            if self._grader is not None:
                rollout = await graded(rollout, self._item, self._grader, f"harbor-{rollout.receipt}")
            if rollout.report is None:
                return rollout
            state = await report(self._client, rollout, {**self._metadata, "rollout": index})
            return replace(rollout, state=state)
        except Exception as error:  # noqa: BLE001 - a supervisor: whatever ends one rollout, the others go on
            return replace(rollout, error=told(error))

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
