"""A checkpoint is written while training goes on: a real ledger, real directories, a trainer as slow as it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import reef.chain
import reef.progress
from reef.errors import UnavailableError, WorkersLostError
from reef.training.durable import partial
from reef.types import Release
from tests.house import Crash, House

NEVER = 10**9


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr(reef.progress, "STORE_RETRY_S", 0.01)
    monkeypatch.setattr(reef.chain, "RESTART_RETRY_S", 0.01)
    yield House(tmp_path / "run", "--storage.keep", "1", "--storage.keep-checkpoints", "1")


async def with_one_in_work(house: House) -> list[str]:
    """Two releases, and the checkpoint of the second being written for as long as nobody waits for it."""
    await house.open()
    house.trainer.looks_a_save_takes = NEVER
    house.run()
    names = [*await house.grade_and_wait(), *await house.grade()]
    await house.until(lambda: house.dispatcher.progress.phase == "storing" and house.trainer.looks > 1)
    return names


async def and_another_release(house: House) -> list[str]:
    number = house.trainer.num_steps
    names = await house.grade()
    await house.until(lambda: house.trainer.num_steps > number and house.engines.served == house.engines.loads[-1])
    looks = house.faults.passed.count("save_done")
    await house.until(lambda: house.faults.passed.count("save_done") > looks)  # the next turn of the loop
    return names


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.005)


def saved(house: House, release: Release) -> list[int]:
    found: list[int] = json.loads((house.storage.checkpoint_path(release.id) / "state").read_text())
    return found


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_one_waits_for_it(house: House) -> None:
    async def live() -> None:
        names = await with_one_in_work(house)
        names += await and_another_release(house)
        chain = await house.chain()
        assert [release.number for release in chain] == [0, 1, 2, 3]
        assert not any(release.checkpoint for release in chain)  # named once it is complete
        assert chain[2].restorable  # a checkpoint's weights stay, also of one that is being written
        names += await and_another_release(house)
        chain = await house.chain()
        assert [release.number for release in chain if release.checkpoint] == [2]
        assert saved(house, chain[2]) == [1, 2]  # though the trainer had gone on
        house.trainer.looks_a_save_takes = 0
        await house.waits()
        chain = await house.chain()
        assert [release.number for release in chain if release.checkpoint] == [4]
        assert saved(house, chain[4]) == [1, 2, 3, 4]
        await house.trained_once(names)
        await house.stop()

    asyncio.run(live())


def test_a_stop_waits_for_the_checkpoint_that_is_being_written(house: House) -> None:
    async def live() -> None:
        await with_one_in_work(house)
        await house.stop()
        await house.open()
        assert (house.trainer.num_steps, house.trainer.state) == (0, [1, 2])
        house.ledger.close()

    asyncio.run(live())


def test_a_checkpoint_that_is_asked_for_is_the_one_being_written_where_that_is_of_the_head(house: House) -> None:
    async def live() -> None:
        await with_one_in_work(house)
        await house.dispatcher.checkpoint()
        assert (await house.chain())[-1].checkpoint is not None
        assert house.faults.passed.count("copy") == 1
        await house.stop()

    asyncio.run(live())


def test_what_the_disk_refuses_of_it_is_written_again_and_was_copied_once(house: House) -> None:
    async def live() -> None:
        names = await with_one_in_work(house)
        names += await and_another_release(house)
        house.faults.at("save", *[UnavailableError("disk full")] * 3)
        house.trainer.looks_a_save_takes = 0
        await house.waits()
        assert saved(house, (await house.chain())[2]) == [1, 2]
        assert house.faults.passed.count("copy") == 1
        await house.trained_once(names)
        await house.stop()

    asyncio.run(live())


@pytest.mark.parametrize("point", ["copy", "save_done", "save", "step"])
def test_workers_lost_over_it_leave_the_head_with_a_checkpoint_and_nothing_half_written(
    house: House, point: str
) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        names = await house.grade_and_wait()
        house.trainer.looks_a_save_takes = NEVER if point == "step" else 1
        if point != "step":
            house.faults.at(point, WorkersLostError("a worker died"))
        names += await house.grade()
        in_work = point == "step"  # else workers are lost and replaced before the next report comes
        await house.until(lambda: house.trainer.looks > 0 if in_work else "restart" in house.faults.passed)
        left = partial(house.storage.checkpoint_path((await house.chain())[2].id))
        left.mkdir(exist_ok=True)  # as the threads of killed workers would
        if point == "step":
            house.faults.at("step", WorkersLostError("a worker died"))
        names += await house.grade()
        await house.until(lambda: "restart" in house.faults.passed and house.trainer.num_steps >= 3)
        house.trainer.looks_a_save_takes = 0
        await house.waits()
        chain = await house.chain()
        assert [release.number for release in chain if release.checkpoint] == [2]
        assert saved(house, chain[2]) == [1, 2]
        if point == "step":
            assert not left.exists()
        await house.trained_once(names)
        await house.stop()

    asyncio.run(live())


@pytest.mark.slow  # many
@pytest.mark.parametrize("point", ["copy", "save_done", "save", "saved", "set_checkpoint", "step", "commit"])
def test_a_crash_while_it_is_written_leaves_the_one_before_it_in_use(house: House, point: str) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        names = []
        for _ in range(3):
            names += await house.grade_and_wait()
        house.trainer.looks, house.trainer.looks_a_save_takes = 0, NEVER if point in ("step", "commit") else 1
        if point not in ("step", "commit"):
            house.faults.at(point, Crash())
        names += await house.grade()
        await until(lambda: house.trainer.looks > 1 or house.loop.done())
        if point in ("step", "commit"):
            house.faults.at(point, Crash())
            names += await house.grade()
        await house.crash()
        await house.open()
        assert house.faults.passed.count("restore") == 1  # of the second
        assert house.trainer.num_steps == 2  # the third and the fourth are trained again
        house.run()
        await house.waits()
        await house.trained_once(names)
        await house.stop()

    asyncio.run(live())


def test_what_a_crash_would_train_again_counts_from_the_checkpoint_that_is_complete(tmp_path: Path) -> None:
    house = House(tmp_path / "run", "--training.checkpoint-every", "100", "--training.max-replay-s", "5")

    async def live() -> None:
        await house.open()
        house.trainer.looks_a_save_takes = NEVER
        house.run()
        await house.grade_and_wait()
        chain, recovery = house.dispatcher.chain, house.dispatcher.chain._recovery
        recovery.replay_s = 4.0
        release = (await house.chain())[-1]
        await chain.keep(release, 0.5)
        assert not chain.saving
        await chain.keep(release, 1.0)  # 5.5 s: begun
        assert (chain.saving, recovery.replay_s) == (True, 5.5)
        await chain.keep(release, 2.0)  # 7.5 s, were it to crash now: waited for, and 2 s are left
        assert (chain.saving, recovery.replay_s) == (False, 2.0)
        await chain.keep(release, 3.0)  # 5 s: begun once more
        assert (chain.saving, recovery.replay_s) == (True, 5.0)
        await house.stop()
        assert recovery.replay_s == 0.0

    asyncio.run(live())
