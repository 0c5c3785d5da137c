"""Drivers: keep rollouts in flight, grade them, report them, at the pace of the training.

    prompt -> chat (G answers) -> grade each -> report each, with the group's name -> wait until the service has used it

A driver never runs further ahead of the releases than it is told to, so that samples stay fresh; a rollout that
fails is recorded and the others go on.
"""

import asyncio
import json
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from reef_harness.client import Client
from reef_harness.errors import HarnessError, Stalled
from reef_harness.graders import Grader, Verdict
from reef_harness.types import Choice, Item, ReportState

GRADABLE = frozenset({"stop", "length"})  # finish reasons of whole rollouts; others (an abort) say nothing of the model
_SWEEP_EVERY = 5  # polls: the oldest group is looked at each time, all of them only so often


@dataclass(frozen=True, slots=True)
class Rollout:
    """One answer and what became of it: a line of the records. ``error`` is set where it was not graded or reported."""

    group: str
    item: str
    index: int  # within the group
    error: str | None = None
    receipt: str | None = None
    release: str | None = None  # that answered
    finish_reason: str | None = None
    text: str | None = None
    score: float | None = None
    outcome: str | None = None
    reason_code: str | None = None
    report: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a driver stands. ``reward`` is the mean of the last batch of rollouts; ``release`` the last one trained."""

    groups: int
    rollouts: int
    failed: int
    releases: int
    release: str | None
    reward: float
    waiting_groups: int  # reported, not yet used by the service


@dataclass(slots=True)
class _Tally:
    groups: int = 0
    rollouts: int = 0
    failed: int = 0
    failed_groups_in_a_row: int = 0
    scores: list[float] = field(default_factory=list)
    releases: dict[str, int] = field(default_factory=dict)  # that our reports trained, and their steps


class GroupsDriver:
    """Prompts times G: each prompt is answered ``group_size`` times and each answer reported under its group's name.

    ``items`` may be endless. At most ``groups_per_batch * (1 + max_ahead)`` groups are open (sampled, or reported and
    not yet trained or dropped) and at most ``in_flight`` being sampled. ``one_request`` asks for a group as one request
    with ``n``; otherwise as G requests. ``records`` is a JSONL file to which every rollout is appended. After
    ``max_failed_groups`` groups in a row without a single reported rollout, :meth:`run` raises what the last one hit.
    """

    def __init__(
        self,
        client: Client,
        items: Iterator[Item],
        grader: Grader,
        *,
        group_size: int = 8,
        groups_per_batch: int = 8,
        max_ahead: int = 1,
        in_flight: int = 16,
        temperature: float = 1.0,
        max_tokens: int = 64,
        one_request: bool = True,
        records: Path | None = None,
        progress: Callable[[Progress], None] | None = None,
        poll_s: float = 0.1,
        stall_timeout_s: float = 300.0,
        max_failed_groups: int = 8,
    ) -> None:
        self._client, self._items, self._grader = client, items, grader
        self._group_size, self._one_request = group_size, one_request
        self._temperature, self._max_tokens = temperature, max_tokens
        self._max_open, self._in_flight = groups_per_batch * (1 + max_ahead), in_flight
        self._batch_rollouts = groups_per_batch * group_size
        self._progress, self._poll_s, self._stall_timeout_s = progress, poll_s, stall_timeout_s
        self._max_failed_groups = max_failed_groups
        self._records: TextIO | None = records.open("a") if records else None
        self._sampling: set[asyncio.Task[list[Rollout]]] = set()
        self._reported: dict[str, str] = {}  # group -> one of its reports, in the order reported
        self._tally = _Tally()
        self._stopping = False
        self.rewards: dict[str, list[float]] = {}  # scores by the release that answered

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._records:
            self._records.close()

    def stop(self) -> None:
        """Start no more groups; :meth:`run` returns once those in flight are reported."""
        self._stopping = True

    @property
    def stopping(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._stopping

    async def run(self, *, releases: int) -> Progress:
        """Drive until our reports have trained ``releases`` releases, counted over all runs of this driver.

        Returns earlier when stopped or when the items run out (then once every group is used). Groups that still wait
        at the end are remembered by the next run. Raises Stalled when nothing moves for ``stall_timeout_s``.
        """
        polls = 0
        try:
            moved_at = time.monotonic()
            while len(self._tally.releases) < releases and not self._stopping:
                self._fill()
                if not self._sampling and not self._reported:
                    break  # out of items, and every group is used
                moved = await self._collect(timeout_s=self._poll_s)
                polls += 1
                moved |= await self._settle(everything=polls % _SWEEP_EVERY == 0)
                if moved:
                    moved_at = time.monotonic()
                elif time.monotonic() - moved_at > self._stall_timeout_s:
                    raise Stalled(
                        f"no rollout ended and no report was used for {self._stall_timeout_s:.0f} s; "
                        f"{len(self._reported)} groups wait to be used by the service"
                    )
            while self._sampling:
                await self._collect(timeout_s=None)
        finally:
            for task in self._sampling:
                task.cancel()
            await asyncio.gather(*self._sampling, return_exceptions=True)
            self._sampling.clear()
        return self.snapshot()

    def snapshot(self) -> Progress:
        """Where the driver stands now."""
        tally = self._tally
        recent = tally.scores[-self._batch_rollouts :]
        return Progress(
            tally.groups,
            tally.rollouts,
            tally.failed,
            len(tally.releases),
            max(tally.releases, key=lambda release: tally.releases[release], default=None),
            sum(recent) / len(recent) if recent else 0.0,
            len(self._reported),
        )

    # ---- the loop's parts

    def _fill(self) -> None:
        """Start groups up to the bounds."""
        while (
            not self._stopping
            and len(self._sampling) < self._in_flight
            and len(self._sampling) + len(self._reported) < self._max_open
        ):
            item = next(self._items, None)
            if item is None:
                return
            self._sampling.add(asyncio.create_task(self._run_group(item)))

    async def _collect(self, timeout_s: float | None) -> bool:
        """Take in the groups that ended, waiting up to ``timeout_s`` for one; whether there was any."""
        if not self._sampling:
            await asyncio.sleep(timeout_s or 0)
            return False
        done, self._sampling = await asyncio.wait(
            self._sampling, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            self._take(task.result())
        return bool(done)

    def _take(self, rollouts: list[Rollout]) -> None:
        tally = self._tally
        reports = [rollout.report for rollout in rollouts if rollout.report]
        tally.groups += 1
        tally.rollouts += len(rollouts)
        tally.failed += len(rollouts) - len(reports)
        for rollout in rollouts:
            if rollout.score is not None and rollout.release is not None:
                tally.scores.append(rollout.score)
                self.rewards.setdefault(rollout.release, []).append(rollout.score)
            if self._records:
                self._records.write(json.dumps(asdict(rollout)) + "\n")
        if self._records:
            self._records.flush()
        if reports:
            self._reported[rollouts[0].group] = reports[-1]
            tally.failed_groups_in_a_row = 0
        else:
            tally.failed_groups_in_a_row += 1
            if tally.failed_groups_in_a_row >= self._max_failed_groups:
                raise HarnessError(
                    f"{tally.failed_groups_in_a_row} groups in a row failed; the last: {rollouts[-1].error}"
                )
        self._tell()

    async def _settle(self, *, everything: bool) -> bool:
        """Ask what became of the reported groups, oldest first, up to the first still in use; whether any was used."""
        used = 0
        for group, report in list(self._reported.items()):
            state = await self._client.report_state(report)
            if state.final:
                self._close(group, state)
                used += 1
            elif not everything:
                break
        if used:
            self._tell()
        return used > 0

    def _close(self, group: str, state: ReportState) -> None:
        del self._reported[group]
        if state.state == "trained" and state.release:
            self._tally.releases[state.release] = state.step or 0

    def _tell(self) -> None:
        if self._progress:
            self._progress(self.snapshot())

    # ---- one group

    async def _run_group(self, item: Item) -> list[Rollout]:
        """Sample, grade and report one group; failures come back as rollouts with an error."""
        group = f"{item.id}/{uuid.uuid4().hex[:12]}"
        if self._one_request:
            return await self._run_request(item, group, 0, self._group_size)
        parts = await asyncio.gather(*(self._run_request(item, group, i, 1) for i in range(self._group_size)))
        return [rollout for part in parts for rollout in part]

    async def _run_request(self, item: Item, group: str, first: int, n: int) -> list[Rollout]:
        try:
            answer = await self._client.chat(
                item.messages, n=n, temperature=self._temperature, max_tokens=self._max_tokens
            )
        except HarnessError as error:
            return [Rollout(group, item.id, first + i, f"{type(error).__name__}: {error}") for i in range(n)]
        return await asyncio.gather(
            *(self._report(item, group, first + choice.index, choice, answer.release) for choice in answer.choices)
        )

    async def _report(self, item: Item, group: str, index: int, choice: Choice, release: str) -> Rollout:
        def rollout(error: str | None, verdict: Verdict | None = None, report: str | None = None) -> Rollout:
            return Rollout(
                group,
                item.id,
                index,
                error,
                choice.receipt,
                release,
                choice.finish_reason,
                choice.text,
                verdict.score if verdict else None,
                verdict.outcome if verdict else None,
                verdict.reason_code if verdict else None,
                report,
            )

        if choice.finish_reason not in GRADABLE:
            return rollout(f"not a whole rollout: finish_reason {choice.finish_reason!r}")
        verdict = await self._grader.judge(item, choice.text, choice.finish_reason)
        try:
            state = await self._client.report(
                choice.receipt,
                verdict.score,
                outcome=verdict.outcome,
                reason_code=verdict.reason_code,
                group=group,
                grader=(verdict.grader, verdict.version),
                truncated=choice.finish_reason == "length",
            )
        except HarnessError as error:
            return rollout(f"{type(error).__name__}: {error}", verdict)
        return rollout(None, verdict, state.id)


@asynccontextmanager
async def finish_on_sigint(stop: Callable[[], None]) -> AsyncIterator[None]:
    """Within the block, the first Ctrl-C calls ``stop`` and the second raises KeyboardInterrupt at once, as usual."""
    loop = asyncio.get_running_loop()
    previous = signal.getsignal(signal.SIGINT)

    def restore() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, previous)

    def first() -> None:
        restore()
        stop()

    loop.add_signal_handler(signal.SIGINT, first)
    try:
        yield
    finally:
        restore()
