"""The directories that the ledger names: weights and trainer checkpoints. What is kept, and what is a left-over.

A directory is named by its release. The ledger forgets one before it is removed, so a crash in between leaves a
directory that nobody names, and `clean` removes those at start.
"""

import asyncio
import contextlib
import dataclasses
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from reef.config import Config
from reef.errors import LoadFailedError
from reef.ledger import releases
from reef.ledger.ledger import Ledger
from reef.observe import log
from reef.training.manifest import read_manifest, verify
from reef.types import Operation, Probe, Published, Release


class Storage:
    """Where releases and checkpoints of one run directory lie."""

    def __init__(self, config: Config, ledger: Ledger, base: Published) -> None:
        self._ledger = ledger
        self._keep = config.storage.keep
        self._keep_checkpoints = config.storage.keep_checkpoints
        self.releases_dir = config.releases_dir.absolute()
        self._checkpoints = config.checkpoints_dir.absolute()
        self.replays_dir = config.reef.run_dir.absolute() / "replay"
        self.base = base
        for directory in (self.releases_dir, self._checkpoints):
            directory.mkdir(parents=True, exist_ok=True)

    def release_id(self, number: int) -> str:
        """The name of the chain's link `number`."""
        return release_id(self._ledger, number)

    def checkpoint_path(self, release_id: str) -> Path:
        """Where a release's trainer checkpoint is written."""
        return self._checkpoints / release_id

    def checkpoint_of(self, release: Release) -> Path:
        """Where this run directory has it now; else where the service that wrote it did."""
        return checkpoint_of(self._checkpoints, release)

    def set_base_probe(self, probe: Probe) -> None:
        """What the trainer says of the base, once it has started: the engine must agree."""
        self.base = dataclasses.replace(self.base, probe=probe)

    def base_release(self, scenario: str) -> Release:
        """The first link of a scenario's chain: the model as it came."""
        return Release(
            id=self.base.release_id,
            scenario=scenario,
            number=0,
            parent=None,
            content_id=self.base.content_id,
            operation=Operation.BASE,
            policy_version=0,
            step=0,
            batch_id=None,
            path=self.base.path,
            checkpoint=None,
            restorable=True,
            created_at=time.time(),
        )

    def published(self, release: Release) -> Published:
        """A release's weights as an engine loads them.

        Raises:
            LoadFailedError: they are not whole on disk, or not those that the ledger names.
        """
        if release.operation is Operation.BASE:
            return self.base
        return whole(self.releases_dir, release)

    def check_bytes(self, release: Release) -> None:
        """Read every file of a release against its manifest. Blocks. Raises LoadFailedError."""
        if release.operation is not Operation.BASE:
            verify(weights_of(self.releases_dir, release))

    async def prune(self, scenario: str, also: Collection[str] = ()) -> None:
        """Remove what is beyond `storage.keep` and `storage.keep-checkpoints`.

        The head, what is served, the base and `also` (releases by id) always stay, and of checkpoints those on the way
        to the head go last.
        """
        head = await self._ledger.read(releases.head, scenario)
        if head is None:
            return
        kept: set[str] = set()
        fallback = await self._fallback(head)
        for release in (head, fallback):
            kept |= {
                found.id
                for found in (await self._ledger.read(releases.checkpoints_of, release))[: self._keep_checkpoints]
            }
        for release in await self._ledger.read(releases.checkpoints, scenario):
            if release.id not in kept:
                await self._ledger.write_owned(releases.set_checkpoint, release.id, None)
                await self._discard_own(self.checkpoint_of(release))
        kept |= {head.id, fallback.id, *also}
        on_disk = await self._ledger.read(releases.restorable, scenario)
        old = [
            release
            for release in on_disk[self._keep :]
            if release.id not in kept and release.operation is not Operation.BASE
        ]
        if old:
            await self._ledger.write_owned(releases.forget_weights, [release.id for release in old])
        for release in old:
            await self._discard_own(weights_of(self.releases_dir, release))

    async def _fallback(self, head: Release) -> Release:
        """What engines serve, or go back to, while the head is not known to load; else the head."""
        verified = None if head.verified_at is not None else await self._ledger.read(releases.verified_before, head)
        return verified or head

    async def clean(self, scenario: str | None) -> None:
        """Remove this run directory's weights and checkpoints that no release names: what a killed service left.

        Nothing else is touched: a releases directory may hold other people's files.
        """
        await self.discard(self.replays_dir)
        for parent, named_by in ((self.releases_dir, releases.restorable), (self._checkpoints, releases.checkpoints)):
            named = await self._ledger.read(named_by, scenario) if scenario is not None else []
            for path in left_overs(parent, self._ledger.run_id, named):
                log.info("removing left-over %s", path)
                await self.discard(path)

    async def _discard_own(self, path: Path) -> None:
        """Never what lies elsewhere: this ledger may be a copy of another's. (A shared one has one owner at a time.)"""
        if self._ledger.shared or path.parent in (self.releases_dir, self._checkpoints):
            await self.discard(path)

    async def discard(self, path: Path) -> None:
        """Remove what no release names. What the disk does not let go of is a left-over for the next start."""
        try:
            await asyncio.to_thread(self.remove, path)
        except OSError as error:
            log.warning("cannot remove %s: %s", path, error)

    def remove(self, path: Path) -> None:
        """Remove a directory or a file, if it is there. Blocks."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def disk_use(self) -> dict[str, int]:
        """Bytes on disk by kind, for status."""
        return {
            "releases_bytes": _size(self.releases_dir),
            "checkpoints_bytes": _size(self._checkpoints),
            "free_bytes": shutil.disk_usage(self.releases_dir).free,
        }


def release_id(ledger: Ledger, number: int) -> str:
    """The name of link `number` in a run directory's chain, e.g. `3f2a-000012`."""
    return f"{ledger.run_id}-{number:06d}"


def is_release(ledger: Ledger, name: str) -> bool:
    """Whether this is the name of a release of this run directory, by its looks."""
    return name.startswith(f"{ledger.run_id}-")


def weights_of(releases_dir: Path, release: Release) -> Path:
    """Where this run directory has a release now; else where it was published.

    Here may lie, under its name, what this service had published when another one took its place and released that.
    """
    here, there = releases_dir / release.id, Path(release.path)
    return here if here.is_dir() and (not there.is_dir() or _holds(here, release)) else there


def checkpoint_of(checkpoints_dir: Path, release: Release) -> Path:
    """Where this run directory has a release's checkpoint now; else where the service that wrote it did."""
    here = checkpoints_dir / release.id
    return here if here.is_dir() or release.checkpoint is None else Path(release.checkpoint)


def whole(releases_dir: Path, release: Release) -> Published:
    """A release on disk, its files there with their sizes.

    Raises:
        LoadFailedError: it is not whole, or not the one that the ledger names.
    """
    found = read_manifest(weights_of(releases_dir, release))
    if (found.release_id, found.content_id) != (release.id, release.content_id):
        raise LoadFailedError(
            f"{found.path} holds {found.release_id} with {found.content_id}, "
            f"the ledger names {release.id} with {release.content_id}"
        )
    return found


def left_overs(parent: Path, run_id: str, named: Iterable[Release]) -> list[Path]:
    """What lies in `parent` under names of this run directory's releases, and is none of `named`."""
    mine = re.compile(rf"\.?{run_id}-\d+(\.partial|\.old)?")
    names = {release.id for release in named}
    return [path for path in sorted(parent.iterdir()) if mine.fullmatch(path.name) and path.name not in names]


def _holds(directory: Path, release: Release) -> bool:
    try:
        return read_manifest(directory).content_id == release.content_id
    except LoadFailedError:
        return False


def _size(directory: Path) -> int:
    total = 0
    for parent, _, files in os.walk(directory):  # passes over directories that are pruned meanwhile
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                total += (Path(parent) / name).stat().st_size
    return total
