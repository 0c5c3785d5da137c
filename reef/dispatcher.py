"""The one loop: reserve a batch, step, commit the release, serve it.

    pending reports -> reserve -> step -> publish -> commit -> load -> (next batch)
                                                          `-> held by the gate -> load | roll back

Serving goes on meanwhile. Each arrow's work is in its own room; this file decides their order. Rollback, promotion and
checkpoints that somebody asks for take their turn between two steps.
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

from reef.chain import Chain, check_rollback
from reef.config import Config
from reef.delivery import Delivery
from reef.engines.pool import Engines
from reef.errors import (
    BusyError,
    ConfigError,
    ConflictError,
    DamagedError,
    GoneError,
    OwnershipLostError,
    ReefError,
    StepFailedError,
    UnavailableError,
    WorkersLostError,
)
from reef.faults import reach
from reef.gate import Gate
from reef.ledger import batches, releases, reports, scenarios
from reef.ledger.ledger import Ledger
from reef.methods.base import build
from reef.observe import Metrics, log
from reef.pace import Pace
from reef.progress import Progress
from reef.recovery import Recovery
from reef.storage import Storage
from reef.training import packing
from reef.training.cluster import Trainer
from reef.training.settings import models_beside, settings, taken_again
from reef.types import Batch, Drop, Operation, Release, ReleaseState, Selection
from reef.wandb_log import WandbLog

T = TypeVar("T")
SETTLE_S = 0.01  # reports come in bursts: one look at the queue for all that come within it
MAX_COMMANDS = 16  # rollbacks, promotions and checkpoints that wait for their turn
MAX_LOST = 5  # times that workers are lost outside a step, with no release in between, before training ends
MAX_WAIT_S = 600  # for one of them
RETRY_S = 5  # after which to ask again
SAVE_LOOK_S = 0.05  # between looks at a checkpoint that is being written while there is nothing else to do
SHARED_LOOK_S = 1.0  # between looks at a queue that other services fill too


@dataclass(slots=True, eq=False)
class _Command:
    """What a route asked for, to be done between two steps."""

    work: Callable[[], Awaitable[Any]]
    done: asyncio.Future[Any]
    leaves: bool  # what is being trained is not wanted any more
    begun: bool = False


class Dispatcher:
    """Turns the training scenario's reports into releases, one batch at a time."""

    def __init__(
        self, config: Config, ledger: Ledger, engines: Engines, trainer: Trainer, storage: Storage, metrics: Metrics
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._trainer = trainer
        self._storage = storage
        self._metrics = metrics
        self._settings = settings(config)
        self._taken_again = partial(taken_again, now=self._settings)
        self._method = build(self._settings["method"])
        self._split = partial(
            packing.split,
            budget_tokens=config.training.micro_batch_tokens,
            data_ranks=config.training.layout.data,
        )
        self.progress = Progress()
        self._until_stored = self.progress.until_stored
        recovery = Recovery(ledger, trainer, storage, self._settings, self._until_stored)
        self.gate = Gate(config, ledger, engines, storage, self._until_stored, metrics)
        self._delivery = Delivery(config, ledger, engines, trainer, storage, self._until_stored)
        self.chain = Chain(
            config, ledger, engines, trainer, storage, recovery, self._delivery, self.gate, self.progress
        )
        self._engines = engines
        self._pace = Pace(lambda: engines.closed_s)
        self._wake = asyncio.Event()
        engines.need_files = self._wake.set
        self._update_asked = False
        self._commands: list[_Command] = []
        self._num_lost = 0  # times that workers were lost outside a step since the last release
        self._at_head = False  # `run` ended in order, so the trainer's state is that of the head
        self._timer: asyncio.TimerHandle | None = None  # wakes at the next deadline of a group
        self._wandb = WandbLog(config, ledger)
        self._falling_back: asyncio.Task[None] | None = None  # engines to what is on disk, where training has ended

    def notify(self) -> None:
        """A report or a held-out result came in, or a scenario was created."""
        self._wake.set()

    def update_now(self) -> None:
        """Train once more in manual mode, as soon as a batch is complete."""
        self._update_asked = True
        self._wake.set()

    async def rollback(self, release_id: str) -> Release:
        """Weights, trainer and queue back to an earlier release, as a new link of the chain; gives a step in work up.

        Raises:
            NotFoundError: there is no such release.
            ConflictError: it cannot be restored whole; nothing has changed.
        """
        scenario = self._require_chain()
        head = await self._ledger.read(releases.head, scenario)
        assert head is not None  # the base at least
        check_rollback(await self._ledger.read(releases.get, scenario, release_id), head)  # before a step is given up
        return await self._ask(partial(self.chain.rollback, release_id), leaves=True)

    async def promote(self, release_id: str, force: bool = False) -> Release:
        """Let a release be served: a held one at once, a quarantined head if it loads by now, another as a new link.

        Raises:
            NotFoundError: there is no such release.
            ConflictError: it failed its gate and `force` is not given, or it cannot be restored whole.
        """
        return await self._ask(partial(self.chain.promote, release_id, force))

    async def checkpoint(self) -> None:
        """Returns once a checkpoint of the head is durable."""
        await self._ask(self.chain.checkpoint)

    def stop(self) -> None:
        """End `run` after the step in work."""
        self.progress.stopping = True
        self._wake.set()

    async def start(self) -> None:
        """Start the trainer, with the base's weights. Raises ReefError; `close` ends what was started."""
        await asyncio.to_thread(self._trainer.start)
        self._storage.set_base_probe(await asyncio.to_thread(self._trainer.probe))

    async def recover(self) -> None:
        """Bring the trainer to the head, once `start` is through."""
        self.progress.phase = "recovering"
        self.chain.scenario = await self._ledger.read(scenarios.training)
        if self.chain.scenario is not None:
            try:
                await self.chain.come_home(fresh=True)
            except WorkersLostError as error:
                log.warning("recovery begins again: %s", error.message)
                await self.chain.revive()

    async def run(self) -> None:
        """The loop. Ends after `stop`; an error that it cannot mend ends it too and is shown in status."""
        progress = self.progress
        self._pace.begin()
        try:
            await self._take_over()
            while not progress.stopping:
                try:
                    await self._turn()
                except WorkersLostError as error:
                    log.warning("%s", error.message)
                    self._num_lost += 1
                    if self._num_lost > MAX_LOST:
                        raise
                    await self.chain.revive()
            self._at_head = not self.chain.astray
        except UnavailableError as error:  # not before `stop`: until then it is tried again
            log.warning("stopped with something not stored: %s", error.message)
        except OwnershipLostError as error:
            progress.error = error.message
            log.error("stopped training: %s", error.message)
        finally:
            self._refuse_commands()
            if progress.stopping:
                await self._lay_down()
            else:
                self._write_no_more()
            await self.gate.let_go()
            await self._wandb.close()

    async def _turn(self) -> None:
        """One thing, the most urgent one first."""
        await self.chain.follow_save()
        if self.chain.astray:  # nothing may be done to a trainer that is not at the head
            await self.chain.come_home()
        elif self.chain.unserved:
            await self.chain.serve_head()
        elif self._engines.lack_files:
            await self.chain.write()
        elif self._commands:
            await self._obey(self._commands.pop(0))
        elif self.progress.paused:
            await self._wait()
        elif self.gate.held is not None:
            await self._judge()
        elif (batch := await self._until_stored(self._next_batch)) is not None:
            await self._train(batch)
        else:
            await self._wait()

    def _write_no_more(self) -> None:
        """Training has ended though serving goes on: engines that need files get a release that has them."""

        def fall_back() -> None:
            if self._falling_back is None or self._falling_back.done():
                self._falling_back = asyncio.create_task(self.chain.fall_back(), name="fall-back")

        self._engines.need_files = fall_back
        if self._engines.lack_files:
            fall_back()

    async def _lay_down(self) -> None:
        """A batch that is reserved at an orderly end has not failed: the next owner counts no attempt of it."""
        if self.chain.scenario is not None:
            with contextlib.suppress(UnavailableError, OwnershipLostError):  # then it counts one
                await self._ledger.write_owned(batches.lay_down, self.chain.scenario)

    async def close(self) -> None:
        """After `run` ended: a checkpoint of the head, so that the next start replays nothing; then no more trainer."""
        self._refuse_commands()
        if self._falling_back is not None:
            self._falling_back.cancel()
            await asyncio.wait({self._falling_back})
        try:
            if self._at_head:
                await self.chain.checkpoint()
                await self.chain.write()
            else:
                await self.chain.finish_save()
        except ReefError as error:
            log.warning("no checkpoint at the end, the next start replays: %s", error.message)
        finally:
            await asyncio.to_thread(self._trainer.stop)

    def worker_pids(self) -> list[int]:
        """Process ids of the training workers."""
        return self._trainer.worker_pids()

    async def _take_over(self) -> None:
        """What the last owner of this chain left half done.

        A batch left reserved by one that was killed counts one failed attempt; only here, right before it is taken
        again: a start-up that fails or is interrupted is no attempt.
        """
        if self.chain.scenario is None:
            return
        self._wandb.write(self.chain.scenario)
        head = await self.chain.head()
        if head.state is ReleaseState.PENDING and not self.gate.holds:
            await self.chain.release(head, "no gate is configured any more")
        elif head.state is ReleaseState.PENDING:
            await self.chain.hold(head, self.notify)
        elif head.state is ReleaseState.QUARANTINED:
            self.progress.pause(f"release {head.id} is quarantined: {head.reason}")
        elif not head.restorable:  # the engines started with what is on disk
            self.chain.unserved = True
        killed_in = await self._until_stored(self._ledger.read, batches.killed_in, self.chain.scenario)
        if killed_in is not None:
            batch_id, attempt = killed_in
            await self._again(batch_id, attempt, "the service ended during the step")

    async def _next_batch(self) -> Batch | None:
        """The batch reserved before, else a new one where enough reports are pending."""
        self.progress.phase = "reserving"
        self.chain.scenario = self.chain.scenario or await self._ledger.read(scenarios.training)
        if self.chain.scenario is None:
            return None
        left = await self._ledger.read(batches.reserved, self.chain.scenario)
        if left is not None:
            await self._ledger.write_owned(batches.begin, left, self._taken_again)
            return await self._load_left(left)
        scenario = await self._ledger.read(scenarios.get, self.chain.scenario)
        if scenario.mode == "manual" and not self._update_asked:
            return None
        return await self._reserve(scenario.name)

    async def _reserve(self, scenario: str) -> Batch | None:
        started = time.perf_counter()
        pending = await self._ledger.read(reports.candidates, scenario)
        head = await self._ledger.read(releases.head, scenario)
        if not pending or head is None:
            return None
        produced = {release_id for candidate in pending for release_id in candidate.releases}
        behind = await self._ledger.read(releases.staleness, scenario, produced)
        now = time.time()
        staleness = {candidate.report_id: _oldest(behind, candidate.releases) for candidate in pending}
        selection = self._method.select(pending, staleness, now)
        if not selection.picks:
            if selection.drops:
                await self._ledger.write_owned(reports.drop, selection.drops, now)
            self._count_drops(selection)
            self._wake_at(selection.next_deadline_at)
            return None
        try:
            reserved = await self._ledger.write_owned(
                batches.reserve,
                scenario,
                f"bat_{uuid.uuid4().hex}",
                selection,
                head.id,
                self._settings,
                self._split,
                now,
                self._method.history_window,
            )
        except (ConflictError, GoneError) as error:  # receipts were deleted since we looked: look again
            log.info("not reserved: %s", error.message)
            self._wake.set()
            return None
        except DamagedError as error:
            await self._drop_damaged(error)
            return None
        reach("batch.reserved")
        self._count_drops(selection)
        asked, self._update_asked = self._update_asked, False
        batch = await self._load(reserved)
        self._update_asked = asked and batch is None
        seconds = time.perf_counter() - started
        self._pace.reserved(seconds)
        self._metrics.step_seconds.labels("reserve").observe(seconds)
        return batch

    async def _load_left(self, batch_id: str) -> Batch | None:
        """A batch that was reserved under another recipe, for models that the workers have not, is given up."""
        batch = await self._load(batch_id)
        if batch is None:
            return None
        ours = models_beside(self._settings["method"])
        try:
            theirs = models_beside(batch.settings["method"])
        except ConfigError as error:  # a class that is no longer there, or takes other settings
            theirs, why = {"recipe.implementation": "?"}, error.message
        else:
            why = "its models beside the policy are not those of the workers"
        if all(ours.get(setting) == value for setting, value in theirs.items()):
            return batch
        log.warning("batch %s of another recipe is given up, its reports come again: %s", batch_id, why)
        await self._ledger.write_owned(batches.abort, str(self.chain.scenario), time.time())
        self._wake.set()
        return None

    async def _load(self, batch_id: str) -> Batch | None:
        """A reserved batch. None: a receipt of it is damaged; it is given up, and its other reports come again."""
        try:
            return await self._ledger.read(batches.load, batch_id)
        except DamagedError as error:
            await self._ledger.write_owned(batches.abort, str(self.chain.scenario), time.time())
            await self._drop_damaged(error)
            return None

    async def _drop_damaged(self, error: DamagedError) -> None:
        """The reports of a receipt that cannot be read any more do not train; the others do, at the next look."""
        self.progress.error = error.message
        log.error("%s", error.message)
        names = await self._ledger.read(reports.reports_of, error.receipt_id)
        await self._ledger.write_owned(reports.drop, [Drop(name, "damaged") for name in names], time.time())
        self._count_dropped("damaged", len(names))
        self._wake.set()

    async def _train(self, batch: Batch) -> None:
        """One batch: step, commit, then serve the release, or hold it."""
        started = time.perf_counter()
        self.progress.phase = "stepping"
        await asyncio.to_thread(self._trainer.ping)  # workers that died since the last step cost this batch nothing
        release = await self._step(batch)
        if release is None:
            return
        seconds = time.perf_counter() - started
        if release.state is ReleaseState.PENDING:
            await self.chain.hold(release, self.notify)
        elif self._is_served(release):
            self._engines.call_also(release.id)
        else:
            await self.chain.serve(release)
        await self.chain.keep(release, seconds)

    def _is_served(self, release: Release) -> bool:
        """Whether the engines hold these weights already, under the name of a link before, with files to restart by."""
        return release.operation is Operation.CRITIC_ONLY and release.verified_at is not None

    async def _step(self, batch: Batch) -> Release | None:
        """Step, publish, commit. None: the attempt failed, and the ledger says what becomes of the batch."""
        self.progress.phase, self.progress.batch = "stepping", batch
        started = time.perf_counter()
        try:
            result = await asyncio.to_thread(self._trainer.step, batch)
            self.chain.astray = True
            stepped = time.perf_counter()
            if any(command.leaves and not command.done.cancelled() for command in self._commands):
                return None
            head = await self.chain.head()  # after the step: an owner no more publishes nothing
            release_id = self._storage.release_id(head.number + 1)
            published = await self._delivery.publish(release_id, self._delivery.writes(head.number + 1))
        except StepFailedError as error:
            self.chain.astray = error.moved
            await self._again(batch.id, batch.attempt, error.message)
            return None
        except WorkersLostError as error:
            await self.chain.revive()  # first: where this fails too, the next owner counts the attempt
            await self._again(batch.id, batch.attempt, error.message)
            return None
        finally:
            self.progress.batch = None
        published_at = time.perf_counter()
        self._count_dropped("stale", len({s.report_id for s in batch.samples if not s.trains}))
        num_tokens = sum(int(s.mask.sum()) for s in batch.samples if s.trains)
        # In bfloat16 the base comes out rounded, so that even a step of the critic alone may change what is published.
        unchanged = not result.trained_policy and await self._is_held(batch.scenario, published.content_id)
        release = Release(
            id=release_id,
            scenario=batch.scenario,
            number=head.number + 1,
            parent=head.id,
            content_id=published.content_id,
            operation=Operation.TRAIN if result.trained_policy else Operation.CRITIC_ONLY,
            policy_version=head.policy_version + result.trained_policy,
            step=result.step,
            batch_id=batch.id,
            path=published.path,
            checkpoint=None,
            restorable=published.on_disk,
            created_at=time.time(),
            metrics={
                **result.metrics,
                **{f"seconds/{name}": value for name, value in result.seconds.items()},
                "seconds/publish": published_at - stepped,
                **self._pace.figures(num_tokens, stepped - started),
            },
            verified_at=time.time() if unchanged else None,
            state=ReleaseState.PENDING if self.gate.holds and not unchanged else ReleaseState.RELEASED,
        )
        self.progress.phase = "committing"
        reach("commit.before")
        await self._until_stored(self._ledger.write_owned, batches.commit, batch.id, release, release.created_at)
        reach("commit.after")
        self.chain.astray = False
        self._num_lost = 0
        self._metrics.releases.inc()
        self._metrics.step_seconds.labels("step").observe(stepped - started)
        self._metrics.step_seconds.labels("publish").observe(published_at - stepped)
        seconds = time.perf_counter() - published_at
        self._metrics.step_seconds.labels("commit").observe(seconds)
        self._pace.committed(seconds)
        self._show(release)
        return release

    async def _is_held(self, scenario: str, content_id: str) -> bool:
        """Whether what engines hold has this content, and files to restart by."""
        served = self._engines.served
        if served is None:
            return False
        held = await self._until_stored(self._ledger.read, releases.get, scenario, served)
        return bool(held.restorable and held.content_id == content_id)

    async def _again(self, batch_id: str, attempt: int, error: str) -> None:
        """Attempt number `attempt` has failed: once more, or the batch ends."""
        if await self._until_stored(self._ledger.write_owned, batches.again, batch_id, attempt, error, time.time()):
            log.warning("batch %s failed and is taken once more: %s", batch_id, error)
            return
        self._metrics.failed_batches.inc()
        self.progress.error = f"batch {batch_id} failed twice, its samples are dropped: {error}"
        log.error(self.progress.error)

    async def _judge(self) -> None:
        """Serve the held release where it has passed, roll it back where it failed, wait where results are missing."""
        held = self.gate.held
        assert held is not None
        verdict = await self.gate.decide()
        if verdict.failed:
            await self.chain.reject(held, "; ".join(verdict.failed))
        elif verdict.passed:
            await self.chain.release(held, "passed the gate")
        else:
            await self._wait()

    def _require_chain(self) -> str:
        if self.progress.phase == "stopped":
            raise ConflictError(f"training has stopped: {self.progress.error}", code="training_stopped")
        if self.chain.scenario is None:
            raise ConflictError("nothing trains yet: no scenario was created", code="not_training")
        return self.chain.scenario

    async def _ask(self, work: Callable[[], Awaitable[T]], leaves: bool = False) -> T:
        """Have something done by the loop, between two steps; what it returned or raised."""
        self._require_chain()
        if len(self._commands) >= MAX_COMMANDS:
            raise BusyError(f"{MAX_COMMANDS} changes of the chain wait for their turn already", retry_after_s=RETRY_S)
        command = _Command(work, asyncio.get_running_loop().create_future(), leaves)
        self._commands.append(command)
        self._wake.set()
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                return cast("T", await command.done)
        except TimeoutError:
            outcome = "it goes on: see /reef/status" if command.begun else "nothing was done"
            message = f"not done within {MAX_WAIT_S} s, training is {self.progress.phase}; {outcome}"
            raise UnavailableError(message, retry_after_s=RETRY_S) from None
        except asyncio.CancelledError:
            if self.progress.phase == "stopped":  # by `run`; else it is the asker that went away
                raise UnavailableError("the service is stopping; nothing was done") from None
            raise

    def _refuse_commands(self) -> None:
        self.progress.phase = "stopped"
        for command in self._commands:
            command.done.cancel()

    async def _obey(self, command: _Command) -> None:
        try:
            if command.done.cancelled():  # nobody waits for it any more
                return
            command.begun = True
            result = await command.work()
        except Exception as error:
            if not command.done.cancelled():
                command.done.set_exception(error)
            if not isinstance(error, ReefError) or isinstance(error, OwnershipLostError | WorkersLostError):
                raise
        else:
            if not command.done.cancelled():
                command.done.set_result(result)

    async def _wait(self) -> None:
        saving = self.chain.saving
        self.progress.phase = "holding" if self.gate.held is not None else "storing" if saving else "waiting"
        limit_s = SAVE_LOOK_S if saving else SHARED_LOOK_S if self._ledger.shared else None
        for_reports = self.gate.held is None and self.progress.paused is None
        with self._pace.waiting() if for_reports else contextlib.nullcontext():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._wake.wait()
            await asyncio.sleep(SETTLE_S)
        self._wake.clear()

    def _count_drops(self, selection: Selection) -> None:
        for item in selection.drops:
            self._count_dropped(item.reason)

    def _count_dropped(self, reason: str, count: int = 1) -> None:
        self._metrics.drops.labels(reason).inc(count)
        if count:
            self._pace.dropped(reason, count)

    def _wake_at(self, when: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if when is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, when - time.time()), self._wake.set)

    def _show(self, release: Release) -> None:
        self.progress.error = None
        self._metrics.step_metrics.clear()
        for name, value in release.metrics.items():
            self._metrics.step_metrics.labels(name).set(value)
        self._wandb.write(release.scenario)


def _oldest(behind: Mapping[str, int | None], produced: Sequence[str]) -> int | None:
    """Policy updates since the oldest of the releases that produced a sample; None where any was rolled away."""
    ages = [age for release_id in produced if (age := behind[release_id]) is not None]
    return max(ages) if len(ages) == len(produced) else None
