"""The one loop: reserve a batch, step, commit the release, load it; and what to do where one of these fails.

    pending reports -> reserve -> step -> publish -> commit -> load -> (next batch)

Serving goes on meanwhile. Each arrow's work is in its own room; this file decides their order, and after a crash or a
failure brings ledger, trainer and engine to the same release again.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from reef.config import Config
from reef.engines.pool import Engines
from reef.errors import (
    ConfigError,
    LoadFailedError,
    OwnershipLostError,
    ReefError,
    StepFailedError,
    UnavailableError,
    WorkersLostError,
)
from reef.ledger import batches, releases, reports, scenarios
from reef.ledger.ledger import Ledger
from reef.methods.base import build
from reef.observe import Metrics, WandbLog, log
from reef.storage import Storage
from reef.training import packing
from reef.training.cluster import Trainer
from reef.training.settings import settings
from reef.types import Batch, Operation, Release, Selection

T = TypeVar("T")
SETTLE_S = 0.01  # reports come in bursts: one look at the queue for all that come within it
STORE_RETRY_S = 1.0  # between tries of what disk or database refused; the stepped state is kept meanwhile
MAX_RESTARTS = 5  # of the workers in a row, before training ends
RESTART_RETRY_S = 2.0  # before each of them but the first


class Dispatcher:
    """Turns the training scenario's reports into releases, one batch at a time."""

    def __init__(
        self, config: Config, ledger: Ledger, engines: Engines, trainer: Trainer, storage: Storage, metrics: Metrics
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._engines = engines
        self._trainer = trainer
        self._storage = storage
        self._metrics = metrics
        self._settings = settings(config)
        self._method = build(self._settings["method"])
        self._split = partial(
            packing.split,
            budget_tokens=config.training.micro_batch_tokens,
            data_ranks=config.training.layout.data,
        )
        self._wake = asyncio.Event()
        self._stopping = False
        self._update_asked = False
        self._unloaded: Release | None = None  # committed, and no engine serves it yet
        self._at_head = False  # `run` ended in order, so the trainer's state is that of the head
        self._timer: asyncio.TimerHandle | None = None  # wakes at the next deadline of a group
        self._wandb: WandbLog | None = None
        self.scenario: str | None = None
        self.phase = "starting"  # starting | recovering | waiting | reserving | stepping | committing | loading | ...
        self.batch: Batch | None = None  # in work
        self.error: str | None = None
        self.paused: str | None = None  # why training stands still though reports come

    def notify(self) -> None:
        """A report came in, or a scenario was created."""
        self._wake.set()

    def update_now(self) -> None:
        """Train once more in manual mode, as soon as a batch is complete."""
        self._update_asked = True
        self._wake.set()

    def resume(self) -> None:
        """Go on after `paused`: the head is loaded once more, then training continues."""
        self.paused = None
        self._wake.set()

    def pause(self, release: Release, reason: str) -> None:
        """Train no further, because no engine loads `release`. `resume` lets it be tried once more."""
        self._unloaded = release
        self.paused = self.error = reason
        log.error("training pauses: %s", reason)

    def stop(self) -> None:
        """End `run` after the step in work."""
        self._stopping = True
        self._wake.set()

    async def start(self) -> None:
        """Start the trainer, with the base's weights. Raises ReefError; `close` ends what was started."""
        await asyncio.to_thread(self._trainer.start)
        self._storage.set_base_probe(await asyncio.to_thread(self._trainer.probe))

    async def recover(self) -> None:
        """Bring the trainer to the head: the newest checkpoint, then the releases after it again from the ledger."""
        self.phase = "recovering"
        self.scenario = await self._ledger.read(scenarios.training)
        if self.scenario is not None:
            await self._replay()

    async def run(self) -> None:
        """The loop. Ends after `stop`; an error that it cannot mend ends it too and is shown in status."""
        try:
            await self._take_over()
            while not self._stopping:
                if self._unloaded is not None and not self.paused:
                    await self._load(self._unloaded)
                batch = None if self.paused else await self._until_stored(self._next_batch)
                if batch is None:
                    await self._wait()
                    continue
                release = await self._step(batch)
                if release is not None:
                    await self._load(release)
                    await self._keep(release)
            self._at_head = True
        except OwnershipLostError as error:
            self.error = error.message
            log.error("stopped training: %s", error.message)
        finally:
            self.phase = "stopped"
            if self._wandb is not None:
                await asyncio.to_thread(self._wandb.close)

    async def close(self) -> None:
        """After `run` ended: a checkpoint of the head, so that the next start replays nothing; then no more trainer."""
        try:
            if self.scenario is not None and self._at_head:
                head = await self._ledger.read(releases.head, self.scenario)
                if head is not None and head.checkpoint is None and head.operation is not Operation.BASE:
                    await self._checkpoint(head)
                    await self._prune(head)
        except (UnavailableError, WorkersLostError) as error:
            log.warning("no checkpoint at the end, the next start replays: %s", error.message)
        finally:
            await asyncio.to_thread(self._trainer.stop)

    def worker_pids(self) -> list[int]:
        """Process ids of the training workers."""
        return self._trainer.worker_pids()

    async def _take_over(self) -> None:
        """A batch that the last owner of this run directory left reserved counts one failed attempt.

        Only here, right before it is taken again: a start-up that fails or is interrupted is no attempt.
        """
        if self.scenario is None:
            return
        left = await self._until_stored(self._ledger.read, batches.reserved, self.scenario)
        if left is not None:
            await self._again(left, "the service ended during the step")

    async def _next_batch(self) -> Batch | None:
        """The batch reserved before, else a new one where enough reports are pending."""
        self.phase = "reserving"
        self.scenario = self.scenario or await self._ledger.read(scenarios.training)
        if self.scenario is None:
            return None
        left = await self._ledger.read(batches.reserved, self.scenario)
        if left is not None:
            return await self._ledger.read(batches.load, left)
        scenario = await self._ledger.read(scenarios.get, self.scenario)
        if scenario.mode == "manual" and not self._update_asked:
            return None
        return await self._reserve(self.scenario)

    async def _reserve(self, scenario: str) -> Batch | None:
        started = time.perf_counter()
        pending = await self._ledger.read(reports.candidates, scenario)
        head = await self._ledger.read(releases.head, scenario)
        if not pending or head is None:
            return None
        window = self._config.recipe.config.max_staleness
        behind = await self._ledger.read(
            releases.staleness, scenario, {candidate.oldest_release for candidate in pending}, window
        )
        now = time.time()
        staleness = {candidate.report_id: behind[candidate.oldest_release] for candidate in pending}
        selection = self._method.select(pending, staleness, now)
        if not selection.picks:
            if selection.drops:
                await self._ledger.write(reports.drop, selection.drops, now)
            self._count_drops(selection)
            self._wake_at(selection.next_deadline_at)
            return None
        batch = await self._ledger.write(
            batches.reserve,
            scenario,
            f"bat_{uuid.uuid4().hex}",
            selection,
            head.id,
            self._settings,
            self._split,
            now,
        )
        self._update_asked = False
        self._count_drops(selection)
        self._metrics.step_seconds.labels("reserve").observe(time.perf_counter() - started)
        return batch

    async def _step(self, batch: Batch) -> Release | None:
        """Step, publish, commit. None: the attempt failed, and the ledger says what becomes of the batch."""
        self.phase, self.batch = "stepping", batch
        started = time.perf_counter()
        try:
            head = await self._until_stored(self._ledger.read, releases.head, batch.scenario)
            assert head is not None
            release_id = self._storage.release_id(head.number + 1)
            result = await asyncio.to_thread(self._trainer.step, batch)
            stepped = time.perf_counter()
            published = await self._until_stored(
                asyncio.to_thread, self._trainer.publish, release_id, self._storage.releases_dir
            )
        except StepFailedError as error:
            await self._again(batch.id, error.message)
            return None
        except WorkersLostError as error:
            await self._revive()  # first: where this fails too, the next owner counts the attempt
            await self._again(batch.id, error.message)
            return None
        finally:
            self.batch = None
        published_at = time.perf_counter()
        release = Release(
            id=release_id,
            scenario=batch.scenario,
            number=head.number + 1,
            parent=head.id,
            content_id=published.content_id,
            operation=Operation.TRAIN,
            policy_version=head.policy_version + 1,
            step=result.step,
            batch_id=batch.id,
            path=published.path,
            checkpoint=None,
            restorable=True,
            created_at=time.time(),
            metrics={
                **result.metrics,
                **{f"seconds/{name}": value for name, value in result.seconds.items()},
                "seconds/publish": published_at - stepped,
            },
        )
        self.phase = "committing"
        await self._until_stored(self._ledger.write, batches.commit, batch.id, release, release.created_at)
        self._metrics.releases.inc()
        self._metrics.drops.labels("stale").inc(len({s.report_id for s in batch.samples if not s.trains}))
        self._metrics.step_seconds.labels("step").observe(stepped - started)
        self._metrics.step_seconds.labels("publish").observe(published_at - stepped)
        self._metrics.step_seconds.labels("commit").observe(time.perf_counter() - published_at)
        await self._show(release)
        return release

    async def _load(self, release: Release) -> None:
        self.phase = "loading"
        self._unloaded = release
        try:
            await self._engines.load(self._storage.published(release))
            await self._until_stored(self._ledger.write, releases.set_verified, release.id, time.time())
            self._unloaded = self.error = None
        except LoadFailedError as error:
            self.pause(release, error.message)
            await self._go_back(release)

    async def _go_back(self, release: Release) -> None:
        """Serve what was verified last before `release`."""
        verified = await self._until_stored(self._ledger.read, releases.verified_before, release)
        assert verified is not None  # the base at least
        try:
            await self._engines.load(self._storage.published(verified))
        except LoadFailedError as error:
            log.error("nothing is served: %s", error.message)

    async def _keep(self, release: Release) -> None:
        """Checkpoint every N releases, then remove weights and checkpoints beyond what storage keeps."""
        self.phase = "storing"
        if release.number % self._config.training.checkpoint_every == 0:
            try:
                await self._checkpoint(release)
            except WorkersLostError as error:
                log.warning("no checkpoint of %s: %s", release.id, error.message)
                await self._revive()
        await self._prune(release)

    async def _prune(self, head: Release) -> None:
        if self._unloaded is None:  # else the weights that are served may be beyond what is kept
            await self._until_stored(self._storage.prune, head.scenario)

    async def _checkpoint(self, release: Release) -> None:
        path = self._storage.checkpoint_path(release.id)
        await self._until_stored(asyncio.to_thread, self._trainer.save, path)
        await self._until_stored(self._ledger.write, releases.set_checkpoint, release.id, str(path))

    async def _revive(self) -> None:
        """Fresh workers at the head; again, up to MAX_RESTARTS times, where they are lost on the way there."""
        self.phase = "recovering"
        for restart in range(1, MAX_RESTARTS + 1):
            try:
                await asyncio.to_thread(self._trainer.restart)
                await self._replay()
                return
            except WorkersLostError as error:
                self.error = error.message
                log.warning("restart %d of the workers failed: %s", restart, error.message)
                if self._stopping or restart == MAX_RESTARTS:
                    raise
            await asyncio.sleep(RESTART_RETRY_S)

    async def _replay(self) -> None:
        """From fresh workers at the base to the head's state; each replayed release must come out the same."""
        assert self.scenario is not None
        start = await self._until_stored(self._storage.newest_checkpoint, self.scenario)
        if start is not None:
            await asyncio.to_thread(self._trainer.restore, self._storage.checkpoint_path(start.id))
        since = start.number if start else 0
        for release in await self._until_stored(self._ledger.read, releases.since, self.scenario, since):
            assert release.batch_id is not None
            log.info("replaying %s", release.id)
            batch = await self._until_stored(self._ledger.read, batches.load, release.batch_id)
            self._check_settings(release, batch)
            await asyncio.to_thread(self._trainer.step, batch)
            published = await self._until_stored(
                asyncio.to_thread, self._trainer.publish, release.id, self._storage.replays_dir
            )
            await self._storage.discard(self._storage.replays_dir)
            if published.content_id != release.content_id:
                raise ReefError(
                    f"replay of {release.id} gave {published.content_id}, the release is {release.content_id}",
                    code="replay_diverged",
                )

    def _check_settings(self, release: Release, batch: Batch) -> None:
        """A step takes method and optimizer from its batch; what the workers are built with must be as it was.

        Raises:
            ConfigError: names the setting that was changed.
        """
        for key in ("layout", "dtype", "seed"):
            if batch.settings[key] != self._settings[key]:
                raise ConfigError(
                    f"training.{key} is {self._settings[key]}, but {release.id} was trained with {batch.settings[key]} "
                    "and must be trained again: start once with the old value and stop with Ctrl-C, then change it",
                    param=f"training.{key}",
                )

    async def _again(self, batch_id: str, error: str) -> None:
        if await self._until_stored(self._ledger.write, batches.again, batch_id, error, time.time()):
            log.warning("batch %s failed and is taken once more: %s", batch_id, error)
            return
        self._metrics.failed_batches.inc()
        self.error = f"batch {batch_id} failed twice, its samples are dropped: {error}"
        log.error(self.error)

    async def _until_stored(self, store: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Something that must not be lost: tried again until the disk and the database take it."""
        refused: str | None = None
        while True:
            try:
                stored = await store(*args)
            except UnavailableError as error:
                if self._stopping:
                    raise
                refused = self.error = error.message
                log.warning("not stored, trying again: %s", error.message)
                await asyncio.sleep(STORE_RETRY_S)
                continue
            if refused is not None and self.error == refused:
                self.error = None
            return stored

    async def _wait(self) -> None:
        self.phase = "waiting"
        await self._wake.wait()
        await asyncio.sleep(SETTLE_S)
        self._wake.clear()

    def _count_drops(self, selection: Selection) -> None:
        for item in selection.drops:
            self._metrics.drops.labels(item.reason).inc()

    def _wake_at(self, when: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if when is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, when - time.time()), self._wake.set)

    async def _show(self, release: Release) -> None:
        self.error = None
        for name, value in release.metrics.items():
            self._metrics.step_metrics.labels(name).set(value)
        if self._wandb is None:
            self._wandb = await asyncio.to_thread(WandbLog, self._config, release.scenario)
        self._wandb.write(release.step, release.metrics)
