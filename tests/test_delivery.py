"""Releases whose weights are sent, and of which only some are written to disk: a fake trainer and fake engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import reef.progress
from reef.config import load
from reef.errors import ConfigError, LoadFailedError, WorkersLostError
from reef.types import Operation, ReleaseState
from tests.house import Crash, FakeTrainer, House

SENT = ("--training.sync.transport", "distributed", "--training.sync.disk-every", "3")
CRASHES = ("step", "publish", "published", "commit", "committed", "transfer", "loaded", "set_verified", "save", "saved")


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr(reef.progress, "STORE_RETRY_S", 0.01)
    yield House(tmp_path / "run", *SENT)


async def on_disk(house: House) -> list[int]:
    """Numbers of the links whose weights are on disk, which must be those that the ledger says."""
    chain = await house.chain()
    names = {path.name for path in house.storage.releases_dir.iterdir()}
    assert names == {release.id for release in chain if release.restorable and release.number}
    return [release.number for release in chain if release.restorable]


def test_every_release_is_sent_and_every_third_is_written_and_the_last_at_the_end(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        names = []
        for _ in range(5):
            names += await house.grade_and_wait()
        assert await on_disk(house) == [0, 3]
        assert "load" not in house.faults.passed
        assert house.faults.passed.count("transfer") == 5
        await house.trained_once(names)
        await house.stop()
        assert [path.name[-1] for path in sorted(house.storage.releases_dir.iterdir())] == ["3", "5"]
        await house.open()
        assert house.trainer.num_steps == 0
        assert house.engines.served == (await house.chain())[-1].id
        house.ledger.close()

    asyncio.run(live())


@pytest.mark.slow  # many
@pytest.mark.parametrize("point", CRASHES)
def test_a_crash_anywhere_loses_no_report_and_the_head_is_written_and_served_again(house: House, point: str) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        names = await house.grade_and_wait()
        house.faults.at(point, Crash())
        names += await house.grade()
        await house.crash()
        await house.open()
        house.run()
        await house.waits()
        names += await house.grade_and_wait()
        names += await house.grade_and_wait()
        assert [release.number for release in await house.chain()] == [0, 1, 2, 3, 4]
        assert house.trainer.state == [1, 2, 3, 4]
        await house.trained_once(names)
        assert 3 in await on_disk(house)
        await house.stop()

    asyncio.run(live())


def test_an_engine_that_cannot_restart_without_files_gets_them_between_two_steps(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        await house.grade_and_wait()
        assert await on_disk(house) == [0]
        house.engines.lack_files = True
        house.engines.need_files()
        await house.until(lambda: not house.engines.lack_files)
        await house.waits()
        assert await on_disk(house) == [0, 1]
        assert house.trainer.num_steps == 1
        await house.stop()

    asyncio.run(live())


def test_a_release_that_cannot_be_sent_is_written_and_read(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        house.faults.at("transfer", LoadFailedError("the group is gone"))
        names = await house.grade_and_wait()
        assert house.faults.passed[-20:].count("load") == 1
        assert await on_disk(house) == [0, 1]
        await house.trained_once(names)
        await house.stop()

    asyncio.run(live())


def test_one_that_neither_way_brings_in_is_quarantined_and_can_be_promoted_later(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        await house.grade_and_wait()
        house.faults.at("transfer", LoadFailedError("the group is gone"))
        house.faults.at("load", LoadFailedError("no"))
        await house.grade()
        await house.until(lambda: house.dispatcher.progress.paused)
        head = (await house.chain())[-1]
        assert (head.state, head.restorable) == (ReleaseState.QUARANTINED, True)
        await house.dispatcher.promote(head.id)
        assert house.engines.served == head.id
        await house.stop()

    asyncio.run(live())


def test_lost_workers_are_replaced_and_what_they_make_again_can_be_sent_on(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        names = await house.grade_and_wait()
        house.faults.at("ping", WorkersLostError("gone"))
        names += await house.grade_and_wait()
        assert house.trainer.state == [1, 2]
        await house.trained_once(names)
        await house.stop()

    asyncio.run(live())


class OtherBits(FakeTrainer):
    """Steps that are made again come out a little different, as on a GPU."""

    def step(self, batch):  # type: ignore[no-untyped-def]
        result = super().step(batch)
        if self.again:
            self.state[-1] += 1000
        return result

    again = False


def test_a_head_that_was_on_no_disk_and_comes_out_different_is_what_was_made_again(house: House) -> None:
    house.trainer_class = OtherBits

    async def live() -> None:
        await house.open()
        house.run()
        names = await house.grade_and_wait()
        house.faults.at("step", Crash())
        names += await house.grade()
        await house.crash()
        OtherBits.again = True
        try:
            await house.open()
        finally:
            OtherBits.again = False
        house.run()
        await house.waits()
        first = (await house.chain())[1]
        assert (first.content_id, first.replay_diverged, first.restorable) == ("sha256:[1001]", True, True)
        assert "it was sha256:[1], and on no disk" in str(first.reason)
        await house.trained_once(names)
        await house.stop()

    asyncio.run(live())


def test_a_rollback_to_a_release_that_was_never_written_makes_it_again_and_writes_it(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        await house.grade_and_wait()
        await house.grade_and_wait()
        first = (await house.chain())[1]
        assert not first.restorable
        back = await house.dispatcher.rollback(first.id)
        assert (back.operation, back.content_id, back.restorable) == (Operation.ROLLBACK, first.content_id, True)
        assert house.engines.served == back.id
        await house.stop()

    asyncio.run(live())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--evaluation.gate.accuracy.min", "0.5"), "with evaluation.gate a held release is loaded from its files"),
        (("--storage.url", "postgresql+psycopg://u@h/d"), "other services load releases from their files"),
        (("--training.sync.transport", "disk"), "transport disk needs the files of every release"),
    ],
)
def test_settings_that_need_every_release_on_disk_are_refused_without(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load(None, [*SENT, *flags], {})
