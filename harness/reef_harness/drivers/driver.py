"""What both drivers do: keep units in flight, at the pace of the releases; take up what an earlier life left.

    items -> units (a group of rollouts, or one) -> sampled and reported -> open until the service used them

A unit is *open* from its report until the service trained, recorded or dropped it. No more units are open or in flight
than the driver may be ahead of the releases, so samples stay fresh. What failed is recorded, and the others go on.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict

from reef_harness.client import Client
from reef_harness.drivers.following import Following, Open, Standstill, standstill
from reef_harness.drivers.records import Key, Records, Rollout
from reef_harness.drivers.rollout import Done, Sampler
from reef_harness.errors import HarnessError, Stalled
from reef_harness.graders import Grader
from reef_harness.types import Item
from reef_harness.wire import Asking

MAX_WAITING = 8192  # rollouts open where nothing else bounds them: the service looks at no more when it takes a batch
MAX_RELEASES = 10_000  # whose rewards are kept
MAX_UNGRADABLE = 10_000  # items in a row that nothing can grade: of an endless supply no other will come
_SWEEP_EVERY = 20  # polls: the oldest unit is looked at each time, some of the others only so often
_REST = 10  # polls in which nothing has to happen before the service is asked whether anything will


class Options(TypedDict, total=False):
    """What either driver takes, beside its own. All of it may be left out."""

    in_flight: int  # units being sampled at once; 16
    temperature: float  # 1.0
    max_tokens: int  # of each answer; 64
    tags: Mapping[str, str] | None  # x-reef-tag-NAME
    extra: Mapping[str, Any] | None  # further fields of each request
    records: Path | None  # the JSONL file by which a later run goes on where this one ended
    progress: "Callable[[Progress], None] | None"  # called whenever something ended
    poll_s: float  # 0.1
    stall_timeout_s: float  # 300: without any movement for so long, Stalled is raised
    held_timeout_s: float  # 4200: the same while the gate holds a release and may still decide by itself
    max_failed: int  # 8: so many units in a row may fail, beside as many as are in flight


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a driver stands. ``units`` are groups, or rollouts where it has none.

    ``reward``, ``length`` (tokens) and ``staleness`` are means over the last batch of rollouts, None until they are
    known; reward and length begin with the last batch of an earlier life. Staleness counts the updates between the
    release that answered and the one that was trained from when the service used the answer (0: the step came right
    after).
    """

    units: int
    rollouts: int  # ended, over all lives of the driver's records
    failed: int  # of them, in this life: not reported
    releases: int  # that our reports trained, over all lives
    release: str | None  # the last of them
    answered_by: str | None  # the release that answered last, of what was reported
    reward: float | None
    length: float | None
    staleness: float | None
    in_flight: int  # units
    waiting: int  # units reported and not yet used by the service
    reported: int  # rollouts, in this life
    owed: int  # reports that the service has not acknowledged: the next life sends them
    failures: Mapping[str, tuple[int, str]]  # of this life, by reason: how many, and the error of the last
    error: str | None  # of the last that failed, in this life
    standstill: str | None  # why the service uses nothing of what waits now, where it does not and says so


@dataclass(frozen=True, slots=True)
class Rewards:
    """The scores of answers: how many, and their sum."""

    count: int = 0
    total: float = 0.0

    @property
    def mean(self) -> float:
        """Of at least one score."""
        return self.total / self.count

    def with_one_more(self, score: float) -> "Rewards":
        """These and another."""
        return Rewards(self.count + 1, self.total + score)


class Driver(ABC):
    """What :class:`StreamDriver` and :class:`GroupsDriver` share. :meth:`run` may be called several times.

    ``size`` rollouts make a unit. ``ahead`` bounds the units that are open or in flight, None: only MAX_WAITING does.
    """

    kind: str
    unit: str

    def __init__(
        self,
        client: Client,
        items: Iterator[Item],
        grader: Grader,
        *,
        size: int,
        batch_units: int,
        max_ahead: int | None,
        in_flight: int = 16,
        temperature: float = 1.0,
        max_tokens: int = 64,
        tags: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
        records: Path | None = None,
        progress: Callable[[Progress], None] | None = None,
        poll_s: float = 0.1,
        stall_timeout_s: float = 300.0,
        held_timeout_s: float = 4200.0,  # more than evaluation.command-timeout-s of the service, an hour
        max_failed: int = 8,
    ) -> None:
        _check(size=size, batch=batch_units, in_flight=in_flight)
        if in_flight > client.max_connections:
            raise ValueError(f"in_flight is {in_flight}, the Client's max_connections only {client.max_connections}")
        if max_ahead is not None and max_ahead < 0:
            raise ValueError(f"max_ahead: expected 0 or more, or None, got {max_ahead}")
        self._client, self._items = client, items
        self._size, self._in_flight, self._max_failed = size, in_flight, max_failed
        self._max_open = max(1, MAX_WAITING // size) if max_ahead is None else batch_units * (1 + max_ahead)
        self._progress, self._poll_s = progress, poll_s
        self._stall_timeout_s, self._held_timeout_s = stall_timeout_s, max(stall_timeout_s, held_timeout_s)
        self._records = Records(
            records,
            {
                "driver": self.kind,
                "scenario": client.scenario,
                "group_size": size,
                "temperature": temperature,
                "max_tokens": max_tokens,
                "grader": grader.id,
                "version": grader.version,
                "extra": dict(extra or {}),
            },
            latest=batch_units * size,
        )
        asking = Asking(temperature=temperature, max_tokens=max_tokens, tags=tags, extra=extra)
        self._sampler = Sampler(client, grader, self._records, asking)
        self._occurrences: Counter[str] = Counter()
        self._working: dict[asyncio.Task[list[Done]], Key] = {}
        self._owed = deque(key for key, past in self._records.past.items() if past.owed)
        self._following = Following(client, self._records, size, batch_units)
        self._num_units = self._num_failed = 0
        self._failed_in_a_row = self._ungradable_in_a_row = 0
        self._num_reported = self._num_before = self._records.num_reported
        self._last_error: str | None = None
        self._failures: dict[str, tuple[int, str]] = {}
        self._standstill: Standstill | None = None
        self._moved_at = 0.0  # a unit ended, or was used
        self._asked_at = 0.0  # the service, why it uses nothing
        self._scores: deque[float] = deque(maxlen=batch_units * size)
        self._lengths: deque[float] = deque(maxlen=batch_units * size)
        self._answered_by: str | None = None
        for rollout in self._records.latest:
            self._note(rollout)
        self._starved = self._stopping = False
        self.rewards: dict[str, Rewards] = {}  # of this life by the release that answered: the last MAX_RELEASES

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._records.close()

    def stop(self) -> None:
        """Start no more units; :meth:`run` returns once those in flight are reported."""
        self._stopping = True

    @property
    def stopping(self) -> bool:
        """Whether :meth:`stop` was called."""
        return self._stopping

    async def run(self, *, releases: int | None = None, rollouts: int | None = None) -> Progress:
        """Drive until our reports have trained ``releases`` releases, or ``rollouts`` of them are in, in all lives.

        Returns earlier when stopped, or when the items run out: then once every unit is used, or what waits is too
        little for another batch, or nothing is trained now (Progress.standstill). Units that still wait are remembered
        by the next run. Raises Stalled when nothing moves for ``stall_timeout_s``, or for ``held_timeout_s`` while the
        service's gate measures a release, HarnessError when too many units in a row fail, with what the last one hit.
        """
        polls = 0
        self._standstill = None
        try:
            self._moved_at = looked_at = time.monotonic()
            while not self._stopping and (releases is None or len(self._following.trained) < releases):
                self._fill(rollouts)
                if not self._working and not self._following.num_whole:
                    break
                moved = await self._collect(timeout_s=max(0.0, looked_at + self._poll_s - time.monotonic()))
                if time.monotonic() >= looked_at + self._poll_s:
                    looked_at, polls = time.monotonic(), polls + 1
                    if await self._following.settle(sweep=polls % _SWEEP_EVERY == 0):
                        moved, self._standstill = True, None
                        self._tell()
                if moved:
                    self._moved_at = time.monotonic()
                elif await self._rests():
                    break
            while self._working:
                await self._collect(timeout_s=None)
        finally:
            for task in self._working:
                task.cancel()
            await asyncio.gather(*self._working, return_exceptions=True)
            self._working.clear()
        return self.snapshot()

    def snapshot(self) -> Progress:
        """Where the driver stands now."""
        trained = self._following.trained
        return Progress(
            units=self._num_units,
            rollouts=self._num_reported + self._num_failed,
            failed=self._num_failed,
            releases=len(trained),
            release=max(trained, key=lambda release: trained[release], default=None),
            answered_by=self._answered_by,
            reward=_mean(self._scores),
            length=_mean(self._lengths),
            staleness=_mean(self._following.staleness),
            in_flight=len(self._working),
            waiting=len(self._following.open),
            reported=self._num_reported - self._num_before,
            owed=self._records.num_owed,
            failures=dict(self._failures),
            error=self._last_error,
            standstill=self._standstill.told if self._standstill else None,
        )

    @abstractmethod
    async def _sample(self, item: Item, key: Key, indexes: list[int]) -> list[Done]:
        """Sample, grade and report the rollouts of a unit that are not there yet."""

    # ---- starting

    def _fill(self, rollouts: int | None) -> None:
        """Start units up to the bounds: first the reports that an earlier life owes."""
        self._starved = False
        while not self._stopping and len(self._working) < self._in_flight:
            if self._owed:
                key = self._owed.popleft()
                self._start(key, self._report_owed(key))
                continue
            if len(self._working) + self._following.num_whole >= self._max_open:
                return
            coming = self._num_reported + self._size * len(self._working)
            unit = self._next_unit() if rollouts is None or coming < rollouts else None
            if unit is None:
                self._starved = True
                return
            item, key, indexes = unit
            self._start(key, self._sample(item, key, indexes))

    def _start(self, key: Key, work: Coroutine[Any, Any, list[Done]]) -> None:
        self._working[asyncio.create_task(work)] = key

    def _next_unit(self) -> tuple[Item, Key, list[int]] | None:
        """The next item that is not answered as often as it should be, and the indexes that are missing."""
        for item in self._items:
            key = (item.id, self._occurrences[item.id])
            self._occurrences[item.id] += 1
            past = self._records.past.get(key)
            if missing := [i for i in range(self._size) if past is None or i not in past.answered]:
                self._records.check_item(item, key)
                return item, key, missing
        return None

    async def _report_owed(self, key: Key) -> list[Done]:
        owed = self._records.past[key].owed
        return await asyncio.gather(*(self._sampler.report(rollout) for rollout in owed.values()))

    # ---- taking in

    async def _collect(self, timeout_s: float | None) -> bool:
        """Take in the units that ended, waiting up to ``timeout_s`` for one; whether there was any."""
        if not self._working:
            await asyncio.sleep(timeout_s or 0)
            return False
        done, _ = await asyncio.wait(self._working, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await self._take(self._working.pop(task), task.result())
        return bool(done)

    async def _take(self, key: Key, done: list[Done]) -> None:
        reported = [(each.rollout, each.state) for each in done if each.state is not None]
        scored = [(rollout, state) for rollout, state in reported if rollout.score is not None]
        self._num_units += 1
        self._num_reported += len(reported)
        self._num_failed += len(done) - len(reported)
        self._last_error = next((each.rollout.error for each in reversed(done) if each.state is None), self._last_error)
        for each in done:
            if each.state is None:
                count, _ = self._failures.get(each.reason, (0, ""))
                self._failures[each.reason] = (count + 1, each.rollout.error or "")
        for rollout, _ in reported:
            self._note(rollout)
            self._count_reward(rollout)
        past = self._records.past.get(key)
        if past is not None:
            past.num_scored += len(scored)
        num_scored = len(scored) if past is None else past.num_scored
        waiting = [rollout for rollout, state in scored if not state.final]
        if waiting and waiting[-1].report:
            self._following.add(key, Open(waiting[-1].report, waiting[-1].release, num_scored >= self._size))
        elif reported:
            await self._following.close(key, reported[-1][1], reported[-1][0].release)
        self._count_failure(done)
        self._standstill = None
        self._tell()

    def _note(self, rollout: Rollout) -> None:
        self._answered_by = rollout.release or self._answered_by
        if rollout.num_tokens is not None:
            self._lengths.append(rollout.num_tokens)
        if rollout.score is not None:
            self._scores.append(rollout.score)

    def _count_reward(self, rollout: Rollout) -> None:
        if rollout.score is not None and rollout.release is not None:
            self.rewards[rollout.release] = self.rewards.get(rollout.release, Rewards()).with_one_more(rollout.score)
            if len(self.rewards) > MAX_RELEASES:
                del self.rewards[next(iter(self.rewards))]  # that answered first

    def _count_failure(self, done: list[Done]) -> None:
        """Items that nothing can grade are no sign of a service that fails; an endless supply of them has no end."""
        if any(each.state is not None for each in done):
            self._failed_in_a_row = self._ungradable_in_a_row = 0
        elif all(each.ungradable for each in done):
            self._ungradable_in_a_row += 1
            if self._ungradable_in_a_row >= MAX_UNGRADABLE:
                raise HarnessError(
                    f"{self._ungradable_in_a_row} {self.unit}s in a row could not be graded; "
                    f"the last: {done[-1].rollout.error}"
                )
        else:
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= self._max_failed + self._in_flight:
                raise HarnessError(
                    f"{self._failed_in_a_row} {self.unit}s in a row failed; the last: {done[-1].rollout.error}"
                )

    # ---- ends

    async def _rests(self) -> bool:
        """Whether nothing more will be used: no more comes from us, and what waits is too little, or not wanted now.

        Raises Stalled where there is more to do, and nothing has moved for too long.
        """
        still_s = time.monotonic() - self._moved_at
        pause_s = min(_REST * self._poll_s, self._stall_timeout_s)
        if min(still_s, time.monotonic() - self._asked_at) < pause_s:
            return False
        if self._working and still_s <= self._stall_timeout_s:
            return False  # answers take their time
        self._asked_at = time.monotonic()
        queue = await self._client.queue()
        done = self._starved and not self._working
        if done and not queue["reserved"] and queue["pending"] < (await self._batch_size()):
            return not await self._following.settle_all()  # some may have been used while we asked
        before, self._standstill = self._standstill, await standstill(self._client, queue)
        self._tell()
        if before and before.passes and not self._standstill:
            self._moved_at = time.monotonic()  # the gate has decided: from now on a step takes its time
            return False
        passes = self._standstill is not None and self._standstill.passes
        if done and self._standstill and (not passes or still_s > self._stall_timeout_s):
            return True
        if still_s > (self._held_timeout_s if passes else self._stall_timeout_s):
            raise Stalled(
                f"no rollout ended and no report was used for {still_s:.0f} s; "
                f"{len(self._following.open)} {self.unit}s wait to be used by the service"
                + (f"; {self._standstill.told}" if self._standstill else "")
            )
        return False

    async def _batch_size(self) -> int:
        return int((await self._client.contract())["config"]["batch-size"])

    def _tell(self) -> None:
        if self._progress:
            self._progress(self.snapshot())


def _mean(values: deque[float] | deque[int]) -> float | None:
    return sum(values) / len(values) if values else None


def _check(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
