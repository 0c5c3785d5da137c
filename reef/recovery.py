"""Brings the trainer to a release: from a checkpoint, or from the base, by training again what the ledger says.

    checkpoint (or base) -> batch of the next release -> step -> publish aside -> same content id? -> ... -> the release

After a crash, at a rollback and in `reef replay` it is this code that makes a release again.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reef.errors import ConfigError, LoadFailedError, ReefError
from reef.faults import reach
from reef.ledger import batches, releases
from reef.ledger.ledger import Ledger
from reef.observe import log
from reef.storage import Storage
from reef.training.cluster import Trainer
from reef.types import Batch, Published, Release

Store = Callable[..., Awaitable[Any]]  # calls its first argument with the rest, until disk and database let it
WORKERS_OWN = ("layout", "dtype", "seed")  # settings that workers are built with, and no batch can change


async def replay(
    read: Store, trainer: Trainer, settings: Mapping[str, Any], steps: Sequence[Release], directory: Path, store: Store
) -> AsyncIterator[tuple[Release, Published, float]]:
    """Train releases again, oldest first, from the state before the first; what each came out as, in `directory`.

    Args:
        read: calls a ledger query, as `Ledger.read` does.
        settings: those of the workers, see `reef.training.settings`.
        steps: releases made by training.
    Yields:
        the release, what was made of its batch now, and the seconds that the step took.

    Raises:
        ConfigError: the workers are set up otherwise than those that trained a release.
        GoneError: receipts that a release was trained on were deleted.
        LedgerError: they are damaged.
    """
    for release in steps:
        assert release.batch_id is not None
        batch: Batch = await store(read, batches.load, release.batch_id)
        check_settings(release, batch, settings)
        result = await asyncio.to_thread(trainer.step, batch)
        published: Published = await store(asyncio.to_thread, trainer.publish, release.id, directory)
        reach("recovery.replayed")
        yield release, published, result.seconds.get("total", 0.0)


def check_settings(release: Release, batch: Batch, settings: Mapping[str, Any]) -> None:
    """A step takes method and optimizer from its batch; what the workers are built with must be as it was.

    Raises:
        ConfigError: names the setting that was changed.
    """
    for key in WORKERS_OWN:
        if batch.settings[key] != settings[key]:
            raise ConfigError(
                f"training.{key} is {settings[key]}, but {release.id} was trained with {batch.settings[key]} and must "
                f"be trained again: set it back, or begin another run directory from {release.path}",
                param=f"training.{key}",
            )


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

    async def bring(self, target: Release, fresh: bool = False) -> bool:
        """Bring the trainer to `target`'s state: weights, moments, schedule, random numbers.

        `fresh`: its workers have just started, so it is at the base. Returns whether every checkpoint that was tried
        could be used.

        Where a release made again differs from the one that is there (not on a CPU), its published weights are taken,
        the moments kept, and the release is marked `replay_diverged`.

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
        async for release, made, seconds in replay(
            self._ledger.read, self._trainer, self._settings, steps, aside, self._store
        ):
            log.info("replayed %s", release.id)
            self.replay_s += seconds
            await self._storage.discard(aside)
            differs = None
            if made.content_id != release.content_id:
                differs = f"replay of {release.id} gave {made.content_id}, the release is {release.content_id}"
                log.error("%s", differs)
                await self._store(self._ledger.write_owned, releases.set_diverged, release.id)
                if await self._take_published(release) is None:
                    differs = None
        if differs is not None and (gone := await self._take_published(target)) is not None:
            raise ReefError(f"{differs}, and its weights are gone: {gone}", code="replay_diverged")
        return all_whole

    async def save(self, release: Release) -> None:
        """A checkpoint of `release`, which the trainer is at. Raises WorkersLostError."""
        path = self._storage.checkpoint_path(release.id)
        await self._store(asyncio.to_thread, self._trainer.save, path)
        await self._store(self._ledger.write_owned, releases.set_checkpoint, release.id, str(path))
        self.replay_s = 0.0

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
