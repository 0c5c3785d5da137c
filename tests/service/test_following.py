"""A service that follows the owner of a shared ledger, and takes its place; a real ledger, a fake lease and engine."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from reef.config import load
from reef.errors import ConfigError, LoadFailedError, OwnershipLostError
from reef.ledger import releases, scenarios
from reef.ledger.lease import Lease
from reef.ledger.ledger import Ledger
from reef.progress import Progress
from reef.service import run
from reef.storage import Storage
from reef.types import Operation, Published, Release
from tests.service.rooms import make_house


class FakeLease(Lease):
    """Owned by another service until `free`."""

    def __init__(self) -> None:
        super().__init__(epoch=0)
        self.free = False

    async def try_acquire(self) -> bool:
        if self.free and not self.epoch:
            self.epoch, self.free = 1, False
            self.lost.clear()
        return self.held

    async def release(self) -> None:
        if self.epoch:
            self.epoch, self.free = 0, True

    def lose(self) -> None:
        self.epoch = 0
        self.lost.set()


class FakeEngines:
    def __init__(self) -> None:
        self.served: str | None = None
        self.refuses: set[str] = set()
        self.loads: list[str] = []

    async def load(self, published: Published) -> None:
        self.loads.append(published.release_id)
        if published.release_id in self.refuses:
            raise LoadFailedError(f"{published.release_id} does not agree")
        self.served = published.release_id

    async def verify(self, published: Published) -> None:
        """The base, as its trainer sees it."""

    def pids(self) -> list[int]:
        return []


class FakeDispatcher:
    """Ends with what `fails` says, else when it is stopped."""

    def __init__(self) -> None:
        self.progress = Progress()
        self.chain = self
        self.quarantined: list[tuple[str, str]] = []
        self.fails: Exception | None = None
        self.closed = False
        self._stopped = asyncio.Event()

    async def recover(self) -> None:
        self.progress.phase = "waiting"

    async def quarantine(self, release: Release, reason: str) -> None:
        self.quarantined.append((release.id, reason))

    async def run(self) -> None:
        try:
            if self.fails is not None:
                raise self.fails
            await self._stopped.wait()
        finally:
            self.progress.phase = "stopped"

    def stop(self) -> None:
        self._stopped.set()

    async def close(self) -> None:
        self.closed = True

    def worker_pids(self) -> list[int]:
        return []


class Clock:
    """What the follower takes for the time before it tries again: it stands still until a test moves it."""

    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Follower(run._Run):
    """Its trainers are fakes, made by `make`."""

    clock: Clock
    make: Callable[[], FakeDispatcher] = FakeDispatcher
    starting: Callable[[], None] = staticmethod(lambda: None)

    async def _start_training(self, storage: Storage) -> None:
        self._house.dispatcher = self.trainer = self.make()  # type: ignore[assignment]
        self.starting()

    @property
    def lease(self) -> Any:
        return self._house.ledger.lease

    @property
    def engines(self) -> Any:
        return self._house.engines

    @property
    def error(self) -> str | None:
        return self._house.following_error

    @property
    def trains(self) -> bool:
        return self._house.dispatcher is not None

    async def until(self, true: Callable[[], Any]) -> None:
        async with asyncio.timeout(60):
            while not true():
                await asyncio.sleep(0.005)

    async def release(self, number: int) -> str:
        """What the owner does, somewhere else."""
        storage, ledger = self._house.storage, self._house.ledger
        path = storage.releases_dir.parent / "elsewhere" / storage.release_id(number)
        path.mkdir(parents=True)
        values = {"release_id": path.name, "content_id": f"sha256:{number}", "size_bytes": 0, "files": {}}
        (path / "manifest.json").write_text(json.dumps({**values, "probe": None}))
        made: Release = dataclasses.replace(
            storage.base_release("s"),
            id=path.name,
            number=number,
            parent=storage.release_id(number - 1),
            operation=Operation.TRAIN,
            content_id=f"sha256:{number}",
            path=str(path),
            verified_at=time.time(),
        )
        await ledger.write(releases.append, made)
        return path.name


@pytest.fixture
def following(tmp_path: Path, starter: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`async with following() as follower`: it serves the base, and another service owns the ledger."""
    monkeypatch.setattr(run, "FOLLOW_S", 0.005)
    clock = Clock()
    monkeypatch.setattr(run, "time", clock)
    monkeypatch.setattr(Storage, "check_bytes", lambda _storage, _release: None)

    @asynccontextmanager
    async def begin() -> AsyncIterator[Follower]:
        flags = ("--reef.run-dir", str(tmp_path / "run"), "--inference.model-path", str(starter))
        config = load(None, [*flags, "--recipe.scenario", "s"], {})
        config.reef.run_dir.mkdir()
        ledger = Ledger.open(config.ledger_url)
        await ledger.write(scenarios.create, "s", "grpo", 1.0)
        ledger.shared, ledger.lease = True, FakeLease()
        ledger.write_owned = ledger.write  # type: ignore[method-assign]
        engines: Any = FakeEngines()
        house = make_house(config, ledger, engines)
        with socket.socket() as listener:
            follower = Follower(house, listener, lambda text: None)
            follower.clock = clock
            storage = await follower._open_storage()
            engines.served = (await follower._served(storage)).id
            task = asyncio.create_task(follower._follow(storage))
            yield follower
            assert not task.done()
            for running in (task, *follower._tasks):
                running.cancel()
            await asyncio.gather(task, *follower._tasks, return_exceptions=True)
        ledger.close()

    return begin


def test_what_the_owner_releases_is_served_and_what_does_not_load_is_tried_again_now_and_then(following: Any) -> None:
    async def live() -> None:
        async with following() as follower:
            engines = follower.engines
            one = await follower.release(1)
            await follower.until(lambda: engines.served == one)
            engines.refuses = {two := f"{one[:-1]}2"}
            await follower.release(2)
            await follower.until(lambda: follower.error == f"{two} does not agree")
            await asyncio.sleep(0.05)
            assert engines.loads == [one, two, one]  # back to what was verified, and not again at once
            engines.refuses = set()
            follower.clock.now += run.RETRY_S
            await follower.until(lambda: engines.served == two and follower.error is None)
            three = await follower.release(3)
            await follower.until(lambda: engines.served == three)

    asyncio.run(live())


def test_a_release_that_this_service_had_published_itself_under_that_name_is_passed_over(following: Any) -> None:
    async def live() -> None:
        async with following() as follower:
            storage = follower._house.storage
            mine = storage.releases_dir / storage.release_id(1)
            mine.mkdir()
            values = {"release_id": mine.name, "content_id": "sha256:mine", "size_bytes": 0, "files": {}}
            (mine / "manifest.json").write_text(json.dumps({**values, "probe": None}))
            one = await follower.release(1)
            await follower.until(lambda: follower.engines.served == one)
            assert follower.error is None

    asyncio.run(live())


def test_an_error_that_nobody_foresaw_is_shown_and_does_not_end_it(following: Any) -> None:
    async def live() -> None:
        async with following() as follower:
            write = follower._house.ledger.write

            async def broken(*_args: Any) -> None:
                raise RuntimeError("what is this?")

            follower._house.ledger.write = broken
            await follower.until(lambda: follower.error == "RuntimeError('what is this?')")
            follower._house.ledger.write = write
            await follower.until(lambda: follower.error is None)

    asyncio.run(live())


def test_an_owner_that_is_gone_is_replaced_with_its_last_release_served_first(following: Any) -> None:
    async def live() -> None:
        async with following() as follower:
            one = await follower.release(1)
            follower.lease.free = True
            await follower.until(lambda: follower.trains and follower.trainer.progress.phase == "waiting")
            assert follower.engines.served == one
            trainer = follower.trainer
            follower.lease.lose()  # and somebody else takes its own place
            await follower.until(lambda: not follower.trains)
            assert trainer.closed
            two = await follower.release(2)
            await follower.until(lambda: follower.engines.served == two)

    asyncio.run(live())


def test_a_release_that_its_new_owner_does_not_load_either_time_is_quarantined(following: Any) -> None:
    async def live() -> None:
        async with following() as follower:
            one = await follower.release(1)
            await follower.until(lambda: follower.engines.served == one)
            follower.engines.refuses = {two := f"{one[:-1]}2"}
            await follower.release(2)
            await follower.until(lambda: follower.error is not None)
            follower.lease.free = True
            await follower.until(lambda: follower.trains and follower.trainer.quarantined)
            assert follower.trainer.quarantined == [(two, f"{two} does not agree")]
            assert follower.engines.loads == [one, *[two, one] * 2]

    asyncio.run(live())


def test_a_lease_that_is_lost_while_the_trainer_starts_ends_that_trainer(following: Any) -> None:
    async def live() -> None:
        async with following() as follower:
            follower.starting = follower.lease.lose
            follower.lease.free = True
            await follower.until(lambda: "while it started to train" in (follower.error or ""))
            assert follower.trainer.closed
            assert not follower.trains

    asyncio.run(live())


@pytest.mark.parametrize("fault", ["in the start", "in the loop"])
def test_a_fault_of_its_own_lets_another_service_train_before_it_tries_again(following: Any, fault: str) -> None:
    async def live() -> None:
        async with following() as follower:

            def refuse() -> None:
                raise ConfigError("Ray is not there")

            def broken() -> FakeDispatcher:
                made = FakeDispatcher()
                made.fails = ConfigError("Ray is not there")
                return made

            if fault == "in the start":
                follower.starting = refuse
            else:
                follower.make = broken
            follower.lease.free = True
            await follower.until(lambda: "Ray is not there" in (follower.error or ""))
            await asyncio.sleep(0.05)
            assert (follower.trains, follower.lease.held, follower.lease.free) == (False, False, True)
            assert "Ray is not there" in follower.error
            follower.starting, follower.make = lambda: None, FakeDispatcher
            follower.clock.now += run.RETRY_S
            await follower.until(lambda: follower.trains and follower._fault is None)

    asyncio.run(live())


def test_who_does_not_hold_the_lease_does_not_lead(following: Any) -> None:
    async def live() -> None:
        async with following() as follower:
            with pytest.raises(OwnershipLostError):
                await follower._lead(follower._house.storage, follower._house.storage.base_release("s"), None)

    asyncio.run(live())
