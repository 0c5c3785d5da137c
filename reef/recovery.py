"""Brings the trainer to a release: from a checkpoint, or from the base, by training again what the ledger says.

    checkpoint (or base) -> batch of the next release -> step -> publish aside -> same content id? -> ... -> the release

After a crash, at a rollback and in `reef replay` it is this code that makes a release again.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reef.errors import ConfigError, LoadFailedError, ReefError
from reef.faults import reach
from reef.ledger import batches, releases
from reef.ledger.ledger import Ledger
from reef.observe import log
from reef.storage import Storage
from reef.training.cluster import Trainer
from reef.training.durable import partial
from reef.training.settings import built_with
from reef.types import Batch, Published, Release

# What a replay needs as it was.
BESIDE = ("recipe.config.critic-path", "recipe.config.critic-freeze", "recipe.config.kl-reference")
MUST_AGREE = frozenset(("training.dtype", "training.seed", *BESIDE))
Store = Callable[..., Awaitable[Any]]  # calls its first argument with the rest, until disk and database let it


async def replay(
    read: Store, trainer: Trainer, settings: Mapping[str, Any], steps: Sequence[Release], directory: Path, store: Store
) -> AsyncIterator["Replayed"]:
    """Train releases again, oldest first, from the state before the first; what each came out as, in `directory`.

    Args:
        read: calls a ledger query, as `Ledger.read` does.
        settings: those of the workers, see `reef.training.settings`.
        steps: releases made by training.

    Raises:
        ConfigError: the workers have another dtype or seed than those that trained a release.
        GoneError: receipts that a release was trained on were deleted.
        LedgerError: they are damaged.
    """
    for release in steps:
        assert release.batch_id is not None
        batch: Batch = await store(read, batches.load, release.batch_id)
        differs = check_settings(release, batch, settings)
        result = await asyncio.to_thread(trainer.step, batch)
        published: Published = await store(asyncio.to_thread, trainer.publish, release.id, directory)
        reach("recovery.replayed")
        yield Replayed(release, published, result.seconds.get("total", 0.0), differs)


@dataclass(frozen=True, slots=True)
class Replayed:
    """A release made again."""

    release: Release
    made: Published
    step_s: float
    changed: str  # what the workers were built with otherwise then, in words; empty: nothing, so bits should agree


def check_settings(release: Release, batch: Batch, settings: Mapping[str, Any]) -> str:
    """A step takes method and optimizer from its batch; dtype and seed of the workers must be as they were, and their
    critic where the step needs one.

    The layout need not: the step then sums in another order, and what it makes may differ in its last bits.

    Returns:
        what was otherwise then, in words.

    Raises:
        ConfigError: names the setting that was changed.
    """
    then, now = built_with(batch.settings), built_with(settings)
    changed = {name: now.get(name, "not there") for name, value in then.items() if now.get(name) != value}
    theirs, ours = batch.settings["method"]["name"], settings["method"]["name"]
    if theirs != ours and changed.keys() & set(BESIDE):
        raise ConfigError(
            f"recipe.implementation is {ours}, but {release.id} was trained by {theirs} with a model beside the "
            f"policy, and must be trained again: start with {theirs} once and stop it in order, then with {ours}",
            param="recipe.implementation",
        )
    for name in sorted(changed.keys() & MUST_AGREE):
        raise ConfigError(
            f"{name} is {changed[name]}, but {release.id} was trained with {then[name]} and must be trained again: "
            f"set it back, or begin another run directory from {release.path}",
            param=name,
        )
    return ", ".join(f"{name} was {then[name]} and is {value}" for name, value in changed.items())


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint being written."""

    release: Release
    replay_s: float  # of the seconds that a crash would have to make again: those before the release


class Recovery:
    """The trainer's way to any release of the chain."""

    def __init__(
        self, ledger: Ledger, trainer: Trainer, storage: Storage, settings: Mapping[str, Any], store: Store
    ) -> None:
        self._ledger = ledger
        self._trainer = trainer
        self._storage = storage
        self._settings = settings
        self._store = store
        self.replay_s = 0.0  # seconds of steps that a crash now would have to make again
        self.saving: Save | None = None

    async def bring(self, target: Release, fresh: bool = False, is_head: bool = False) -> bool:
        """Bring the trainer to `target`'s state: weights, moments, schedule, random numbers.

        `fresh`: its workers have just started, so it is at the base. Returns whether every checkpoint that was tried
        could be used.

        Where a release made again differs from the one that is there (another layout, or not on a CPU), its published
        weights are taken, the moments kept, and the release is marked `replay_diverged`. A head that was never written
        to disk (`training.sync.disk-every`) has no others: then it is what was made now.

        Raises:
            ReefError: it cannot be made again, with the reason; the trainer is at some other release then.
            WorkersLostError: the workers ended on the way.
        """
        reach("recovery.begin")
        start, all_whole = await self._restore(target, fresh)
        self.replay_s = 0.0
        steps = await self._store(self._ledger.read, releases.steps_to, target, start)
        aside = self._storage.replays_dir
        differs: str | None = None
        async for again in replay(self._ledger.read, self._trainer, self._settings, steps, aside, self._store):
            release, made = again.release, again.made
            log.info("replayed %s", release.id)
            self.replay_s += again.step_s
            await self._storage.discard(aside)
            differs = None
            if made.content_id != release.content_id:
                differs = f"replay of {release.id} gave {made.content_id}, the release is {release.content_id}"
                if again.changed:  # to be expected
                    differs = f"{differs}; {again.changed}"
                log.log(logging.WARNING if again.changed else logging.ERROR, "%s", differs)
                await self._store(self._ledger.write_owned, releases.set_diverged, release.id)
                if await self._take_published(release) is None:
                    differs = None
        if differs is not None and (gone := await self._take_published(target)) is not None:
            if target.restorable or not is_head:
                raise ReefError(f"{differs}, and its weights are gone: {gone}", code="replay_diverged")
            reason = f"made again after its trainer was lost; it was {target.content_id}, and on no disk"
            await self._store(self._ledger.write_owned, releases.adopt, target.id, made.content_id, reason)
        return all_whole

    async def save(self, release: Release) -> None:
        """A checkpoint of `release`, which the trainer is at, named once this returns. Raises WorkersLostError."""
        await self.begin_save(release)
        await self.finish_save()

    async def begin_save(self, release: Release) -> None:
        """Copy the state of `release`, which the trainer is at; it is written while training goes on.

        One at a time: waits for the one before. Raises WorkersLostError; until `forget_save`, `saving` tells of it.
        """
        await self.finish_save()
        self.saving = Save(release, self.replay_s)
        await asyncio.to_thread(self._trainer.save_begin, self._storage.checkpoint_path(release.id))

    async def save_done(self) -> bool:
        """Whether there is a checkpoint for `finish_save` to complete without waiting. Raises WorkersLostError."""
        return self.saving is not None and await asyncio.to_thread(self._trainer.save_done)

    async def finish_save(self) -> None:
        """Wait for the checkpoint that is being written, if one is, and name it in the ledger once it is complete.

        Raises:
            WorkersLostError: the workers ended over it.
            UnavailableError: the disk refuses it, and the service stops.
        """
        if (saving := self.saving) is None:
            return
        await self._store(asyncio.to_thread, self._trainer.save_finish)
        self.saving = None
        path = str(self._storage.checkpoint_path(saving.release.id))
        await self._store(self._ledger.write_owned, releases.set_checkpoint, saving.release.id, path)
        self.replay_s -= saving.replay_s

    async def forget_save(self) -> bool:
        """The workers have ended: what they were writing is a left-over. Returns whether there was such a thing."""
        if self.saving is None:
            return False
        path = self._storage.checkpoint_path(self.saving.release.id)
        self.saving = None
        for left in (path, partial(path)):
            await self._storage.discard(left)
        return True

    async def _restore(self, target: Release, fresh: bool) -> tuple[int, bool]:
        """From the newest checkpoint on the way to `target` that is whole, else the base.

        Returns the number of its release, and whether it is the first that was tried.
        """
        all_whole = True
        found: list[Release] = await self._store(self._ledger.read, releases.checkpoints_of, target)
        for release in found:
            try:
                steps = await asyncio.to_thread(self._trainer.restore, self._storage.checkpoint_of(release))
                if steps != release.step:
                    raise LoadFailedError(f"it holds step {steps}, the release is step {release.step}")
            except LoadFailedError as error:
                log.error("checkpoint of %s is not used, the one before it is: %s", release.id, error.message)
                fresh = all_whole = False
                continue
            reach("recovery.restored")
            return release.number, all_whole
        if not fresh:
            await asyncio.to_thread(self._trainer.reset)
        return 0, all_whole

    async def _take_published(self, release: Release) -> str | None:
        """Put a release's weights into the trainer; why not, where they are not whole on disk."""
        try:
            published = self._storage.published(release)
            await asyncio.to_thread(self._storage.check_bytes, release)
        except LoadFailedError as error:
            return error.message
        await asyncio.to_thread(self._trainer.load_weights, Path(published.path))
        return None
