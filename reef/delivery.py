"""How a release gets from the trainer into the engines: as files that they read, or as tensors that they are sent.

    training.sync.transport: disk          publish (files) -> engines read them
                             distributed   publish (every Nth with files) -> trainer sends -> engines

A release without files is in the trainer alone, which is at the head between two steps. Whoever needs the files (a
server that starts, the next start of the service) has them written then.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from reef.config import Config
from reef.engines.pool import Engines
from reef.errors import LoadFailedError
from reef.ledger import releases
from reef.ledger.ledger import Ledger
from reef.observe import log
from reef.storage import Storage
from reef.training.cluster import Trainer
from reef.training.transfer import TrainerTransfer
from reef.types import Published, Release

Store = Callable[..., Awaitable[Any]]  # calls its first argument with the rest, until disk and database let it


class Delivery:
    """The way from one trainer to its engines."""

    def __init__(
        self, config: Config, ledger: Ledger, engines: Engines, trainer: Trainer, storage: Storage, store: Store
    ) -> None:
        sync = config.training.sync
        self._disk_every = sync.disk_every
        self._ledger = ledger
        self._engines = engines
        self._trainer = trainer
        self._storage = storage
        self._store = store
        self._transfer = (
            TrainerTransfer(trainer, config.inference.model_path, sync.bucket_bytes)
            if sync.transport == "distributed"
            else None
        )
        self._in_trainer: Published | None = None  # the release that the trainer is at, as it published it

    def writes(self, number: int) -> bool:
        """Whether the chain's link of this number gets files at once."""
        return number % self._disk_every == 0

    async def publish(self, release_id: str, on_disk: bool = True) -> Published:
        """The trainer's weights under this name, with files or without."""
        self._in_trainer = None
        published: Published = await self._store(
            asyncio.to_thread, self._trainer.publish, release_id, self._storage.releases_dir, on_disk
        )
        self._in_trainer = published
        return published

    def forget(self) -> None:
        """The trainer moves to another release, or to the same one made again."""
        self._in_trainer = None

    async def load(self, release: Release) -> None:
        """Put a release into the engines, from trainer or files. Raises LoadFailedError where none of them takes it."""
        published = self._in_trainer
        if published is None or published.release_id != release.id:
            await self._engines.load(self._storage.published(release))
            return
        if self._transfer is not None:
            try:
                await self._engines.load(published, self._transfer)
                return
            except LoadFailedError as error:
                log.warning("%s is loaded from its files: %s", release.id, error.message)
                if not published.on_disk:
                    published = await self.write(release)
        await self._engines.load(published)

    async def write(self, release: Release) -> Published:
        """The files of a release that the trainer is at, and now also for engines that wait for them.

        Raises:
            LoadFailedError: what the trainer holds is not that release.
        """
        published: Published = await self._store(
            asyncio.to_thread, self._trainer.publish, release.id, self._storage.releases_dir, True
        )
        if published.content_id != release.content_id:
            raise LoadFailedError(f"{release.id} cannot be written: the trainer holds {published.content_id}")
        await self._store(self._ledger.write_owned, releases.set_restorable, release.id)
        if self._in_trainer is not None and self._in_trainer.release_id == release.id:
            self._in_trainer = published
        self._engines.provide(published)
        return published

    async def mend(self, release: Release) -> None:
        """Write a release that the trainer is at, where its files are not there or not whole. Raises as `write`."""
        try:
            await asyncio.to_thread(self._storage.check_bytes, release)
        except LoadFailedError as error:
            log.info("writing %s: %s", release.id, error.message)
            await self.write(release)
