"""The chain's head: bringing trainer and engines to it, and moving it to older content and back.

    serve(release)      engines load it; where none does, it is quarantined and what was verified before serves on
    rollback, promote   a new link with an older release's weights, trainer state and queue
    keep(release)       checkpoints and pruning; follow_save() completes what was begun
    revive()            fresh workers at the head

Called by the dispatcher's loop only, between its steps.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial

from reef.config import Config
from reef.delivery import Delivery
from reef.engines.pool import Engines
from reef.errors import (
    ConflictError,
    LoadFailedError,
    OwnershipLostError,
    ReefError,
    UnavailableError,
    WorkersLostError,
)
from reef.faults import reach
from reef.gate import Gate
from reef.ledger import batches, releases
from reef.ledger.ledger import Ledger
from reef.observe import log
from reef.progress import Progress
from reef.recovery import Recovery
from reef.storage import Storage
from reef.training.cluster import Trainer
from reef.types import Operation, Release, ReleaseState

MAX_RESTARTS = 5  # of the workers in a row, before training ends
RESTART_RETRY_S = 2.0  # before each of them but the first


class Chain:
    """The training scenario's chain, as its owner moves it."""

    def __init__(
        self,
        config: Config,
        ledger: Ledger,
        engines: Engines,
        trainer: Trainer,
        storage: Storage,
        recovery: Recovery,
        delivery: Delivery,
        gate: Gate,
        progress: Progress,
    ) -> None:
        self._config = config.training
        self._ledger = ledger
        self._engines = engines
        self._trainer = trainer
        self._storage = storage
        self._recovery = recovery
        self._delivery = delivery
        self._gate = gate
        self._progress = progress
        self._read = partial(progress.until_stored, ledger.read)
        self._write = partial(progress.until_stored, ledger.write_owned)
        self.scenario: str | None = None
        self.astray = False  # the trainer is not at the head: a step is not committed, or a rollback was given up
        self.unserved = False  # the engines were not given the head as it is: workers were lost before they had it

    async def head(self) -> Release:
        """The newest link, as its owner sees it. The scenario has been created, and so has its base.

        Raises:
            OwnershipLostError: another service may have moved it: what is done here must not be named by it.
        """
        head: Release | None = await self._write(releases.head, self.scenario)
        assert head is not None
        return head

    async def come_home(self, fresh: bool = False) -> None:
        """Bring the trainer to the head. `fresh`: its workers have just started. Raises what `Recovery.bring` does.

        Where a checkpoint on the way could not be used, a new one is written: deletions rely on those that are named.
        """
        if not fresh:
            await self.finish_save()
        head = await self.head()
        self._delivery.forget()
        all_whole = await self._recovery.bring(head, fresh, is_head=True)
        self.unserved |= (await self.head()).content_id != head.content_id  # engines hold what it was
        if not all_whole and head.operation is not Operation.BASE:
            await self._recovery.save(head)
        self.astray = False

    async def write(self) -> None:
        """The head's files, for engines that cannot start without, and for the next start of the service."""
        if self.scenario is None:
            return
        head = await self.head()
        if head.restorable and not self._engines.lack_files:
            return
        try:
            await self._delivery.mend(head)
            self._engines.provide(self._storage.published(head))
        except LoadFailedError as error:
            await self.quarantine(head, error.message)

    async def serve(self, release: Release) -> None:
        """Have the engines load the head; where none does, quarantine it and serve what was verified before.

        Raises:
            WorkersLostError: it was to be written for the engines, and could not; what was verified before is served.
        """
        self._progress.phase = "loading"
        self.unserved = True
        try:
            await self._delivery.load(release)
        except LoadFailedError as error:
            await self.quarantine(release, error.message)
            self.unserved = False
            await self._go_back(release)
            return
        except WorkersLostError:  # they were to write what no engine took; fresh ones may take long to be there
            await self._go_back(release)
            raise
        self.unserved = False
        await self._write(releases.set_verified, release.id, time.time())
        self._progress.paused = self._progress.error = None

    async def serve_head(self) -> None:
        """Have the engines load the head, where they were not given it; from its files, which are written first."""
        self.unserved = (await self.head()).state is ReleaseState.RELEASED
        if self.unserved:
            await self.write()
            await self.serve(await self.head())

    async def fall_back(self) -> None:
        """Have the engines load the newest release that is on disk, for nobody writes the head any more."""
        try:
            served: Release = await self._read(releases.served, self.scenario)  # the base at least
            await self._engines.load(self._storage.published(served))
        except ReefError as error:
            log.error("nothing is served: %s", error.message)
        else:
            log.warning("%s is served: the head was in the trainer alone, which is gone", served.id)

    async def hold(self, release: Release, wake: Callable[[], None]) -> None:
        """Have the gate hold the head; where no engine loads it, quarantine it."""
        self._progress.phase = "holding"
        try:
            await self._gate.hold(release, wake)
        except LoadFailedError as error:
            await self.quarantine(release, error.message)

    async def quarantine(self, release: Release, reason: str) -> None:
        """No engine loads it: train no further until a promotion or a rollback."""
        await self._set_state(release, ReleaseState.QUARANTINED, reason)
        self._progress.pause(f"release {release.id} is quarantined: {reason}")

    async def release(self, held: Release, reason: str) -> None:
        """The held head is served from now on."""
        await self._set_state(held, ReleaseState.RELEASED, reason)
        await self._gate.let_go()
        self._progress.paused = None
        await self.serve(held)

    async def reject(self, held: Release, reason: str) -> None:
        """The held head has failed its gate: back to what is served."""
        log.warning("release %s failed the gate: %s", held.id, reason)
        served = await self._read(releases.served, held.scenario)
        try:
            await self._jump(Operation.ROLLBACK, served, held, f"failed the gate: {reason}")
        except ConflictError as error:
            self._progress.pause(f"{held.id} failed the gate ({reason}), and {error.message}")

    async def rollback(self, release_id: str) -> Release:
        """Back to an earlier release, which was served once. Raises NotFoundError, ConflictError."""
        head, target = await self.head(), await self._find(release_id)
        check_rollback(target, head)
        return await self._jump(Operation.ROLLBACK, target, head)

    async def promote(self, release_id: str, force: bool) -> Release:
        """Serve a release; `force`: though its gate rejected it. Raises NotFoundError, ConflictError."""
        head, target = await self.head(), await self._find(release_id)
        if target.id == head.id and head.state is ReleaseState.PENDING:
            await self.release(head, "promoted by hand")
            promoted = await self.head()
            if promoted.state is ReleaseState.QUARANTINED:
                raise ConflictError(f"{head.id} does not load: {promoted.reason}", code="load_failed")
            return promoted
        if target.id == head.id and head.state is ReleaseState.QUARANTINED:
            return await self._load_again(head)
        if target.state is ReleaseState.QUARANTINED:
            raise ConflictError(f"{target.id} is quarantined: {target.reason}", code="release_quarantined")
        if target.state is ReleaseState.REJECTED and not force:
            raise ConflictError(
                f"{target.id} was rejected: {target.reason}; `force` (--force) serves it all the same",
                code="gate_failed",
            )
        _refuse_current(target, head)
        return await self._jump(Operation.PROMOTE, target, head)

    async def keep(self, release: Release, seconds: float) -> None:
        """After a step of so many seconds: a checkpoint every N releases or seconds, and no more than storage keeps.

        It is written while training goes on; `follow_save` completes it.
        """
        self._progress.phase = "storing"
        self._recovery.replay_s += seconds
        await self._mended(self._begin_save(release))
        await self._prune(release.scenario)

    async def _begin_save(self, release: Release) -> None:
        every = release.number % self._config.checkpoint_every == 0
        if every or self._recovery.replay_s >= self._config.max_replay_s:
            await self._recovery.finish_save()  # which may be all that was wanted
            if every or self._recovery.replay_s >= self._config.max_replay_s:
                await self._recovery.begin_save(release)

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._recovery.saving is not None

    async def follow_save(self) -> None:
        """Complete the checkpoint that is being written, once that takes no waiting."""
        if self.saving:
            await self._mended(self._follow_save())

    async def _follow_save(self) -> None:
        if await self._recovery.save_done():
            await self.finish_save()

    async def finish_save(self) -> None:
        """Wait for the checkpoint that is being written, if one is. Raises WorkersLostError."""
        if self._recovery.saving is not None:
            scenario = self._recovery.saving.release.scenario
            await self._recovery.finish_save()
            await self._prune(scenario)

    async def checkpoint(self) -> None:
        """A checkpoint of the head, where it has none. Raises WorkersLostError."""
        if self.scenario is None:
            return
        await self._mended(self.finish_save())
        head = await self.head()
        if head.checkpoint is None and head.operation is not Operation.BASE:
            await self._save(head)
            await self._prune(head.scenario)

    async def _prune(self, scenario: str) -> None:
        saving = self._recovery.saving
        also = {held for held in (self._engines.served, self._engines.lent) if held is not None}  # to restart with
        if saving is not None:
            also.add(saving.release.id)
        await self._progress.until_stored(self._storage.prune, scenario, also)

    async def revive(self) -> None:
        """Fresh workers at the head; again, up to MAX_RESTARTS times, where they are lost on the way there.

        Where they were lost over a checkpoint, the head gets one in its place.

        Raises:
            ReefError: they are lost each time; training cannot go on.
        """
        self._progress.phase = "recovering"
        self.astray = True  # also where coming home fails otherwise than by losing them once more
        unsaved = False
        for restart in range(1, MAX_RESTARTS + 1):
            try:
                unsaved |= await self._recovery.forget_save()
                await asyncio.to_thread(self._trainer.restart)
                await self.come_home(fresh=True)
                if unsaved:
                    await self._recovery.save(await self.head())
                return
            except WorkersLostError as error:
                self._progress.error = error.message
                log.warning("restart %d of the workers failed: %s", restart, error.message)
                if self._progress.stopping or restart == MAX_RESTARTS:
                    message = f"the workers were lost and cannot be replaced: {error.message}"
                    raise ReefError(message, code="workers_lost") from error
            await asyncio.sleep(RESTART_RETRY_S)

    async def _find(self, release_id: str) -> Release:
        found: Release = await self._read(releases.get, self.scenario, release_id)
        return found

    async def _set_state(self, release: Release, state: ReleaseState, reason: str) -> None:
        await self._write(releases.set_state, release.id, state, reason, time.time())

    async def _go_back(self, release: Release) -> None:
        """Serve what was verified last before `release`."""
        verified = await self._read(releases.verified_before, release)
        try:
            await self._delivery.load(verified)
        except LoadFailedError as error:
            log.error("nothing is served: %s", error.message)

    async def _load_again(self, head: Release) -> Release:
        self._progress.phase = "loading"
        try:
            await self._delivery.mend(head)
            await self._delivery.load(head)
        except LoadFailedError as error:
            await self._go_back(head)
            raise ConflictError(f"{head.id} still does not load: {error.message}", code="load_failed") from error
        await self._set_state(head, ReleaseState.RELEASED, "promoted by hand")
        await self._write(releases.set_verified, head.id, time.time())
        self._progress.paused = self._progress.error = None
        return await self.head()

    async def _jump(self, operation: Operation, target: Release, head: Release, reason: str | None = None) -> Release:
        """A new head with `target`'s weights, trainer state and queue.

        Raises:
            ConflictError: `target` cannot be restored whole; nothing has changed, but the trainer may be `astray`.
        """
        self._progress.phase = "restoring"
        reach("rollback.before")
        await self._mended(self.finish_save())
        head = await self.head()
        if head.checkpoint is None and head.operation is not Operation.BASE:
            await self._save(head)  # should this fail, the trainer is back at once
        release_id = self._storage.release_id(head.number + 1)
        self.astray = True
        try:
            self._delivery.forget()
            await self._recovery.bring(target)
            published = await self._delivery.publish(release_id)
            if published.content_id != target.content_id:
                raise ReefError(f"it came out as {published.content_id} instead of {target.content_id}")
        except (OwnershipLostError, UnavailableError):
            raise
        except ReefError as error:
            if isinstance(error, WorkersLostError):
                await self.revive()
            raise ConflictError(f"{target.id} cannot be restored: {error.message}", code="unrestorable") from error
        now = time.time()
        release = Release(
            id=release_id,
            scenario=head.scenario,
            number=head.number + 1,
            parent=head.id,
            content_id=target.content_id,
            operation=operation,
            policy_version=target.policy_version,
            step=target.step,
            batch_id=None,
            path=published.path,
            checkpoint=None,
            restorable=True,
            created_at=now,
            source=target.id,
            reason=reason,
        )
        await self._write(batches.jump, release, now)
        reach("rollback.committed")
        self.astray = False
        await self._gate.let_go()
        self._progress.paused = self._progress.error = None
        log.warning("%s to %s: %s follows %s", operation, target.id, release.id, head.id)
        await self.serve(release)
        await self._save(release)  # so that a crash need not go the whole way to the old release again
        await self._prune(release.scenario)
        return await self.head()

    async def _save(self, head: Release) -> None:
        await self._mended(self._recovery.save(head))

    async def _mended(self, saving: Awaitable[None]) -> None:
        """Some work on a checkpoint; where the workers are lost over it, fresh ones make one of the head."""
        try:
            await saving
        except WorkersLostError as error:
            log.warning("a checkpoint is written again: %s", error.message)
            await self.revive()


def check_rollback(target: Release, head: Release) -> None:
    """Raises ConflictError where `target` is the head's content already, or may not be served again."""
    _refuse_current(target, head)
    if target.state is not ReleaseState.RELEASED:  # nor pending: that is the head only
        raise ConflictError(f"{target.id} is {target.state}: {target.reason}", code=f"release_{target.state}")


def _refuse_current(target: Release, head: Release) -> None:
    if target.id == head.id:
        raise ConflictError(f"{target.id} is the head already", code="already_current")
    if target.id == head.source:
        raise ConflictError(f"{target.id} is what the head {head.id} holds already", code="already_current")
