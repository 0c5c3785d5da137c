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
        assert house.faults.passed.count("load") == 1
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


class DiesOnce(FakeTrainer):
    """Its workers die when they are to write a release, the first time."""

    died = False

    def publish(self, release_id, directory, on_disk=True):  # type: ignore[no-untyped-def]
        if on_disk and not self.died:
            self.died = True
            raise WorkersLostError("gone")
        return super().publish(release_id, directory, on_disk)


def test_workers_that_die_while_they_send_leave_no_engine_without_the_head(house: House) -> None:
    house.trainer_class = DiesOnce

    async def live() -> None:
        await house.open()
        house.run()
        house.faults.at("transfer", LoadFailedError("the trainer is gone"))
        names = await house.grade_and_wait()
        base, head = (link.id for link in await house.chain())
        assert house.engines.loads == [head, base, head]  # sent in vain; meanwhile; from its files
        await house.trained_once(names)
        assert await on_disk(house) == [0, 1]
        await house.stop()

    asyncio.run(live())


def test_workers_that_die_while_the_head_is_written_at_the_start_are_replaced(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        names = await house.grade_and_wait()
        house.faults.at("step", Crash())
        names += await house.grade()
        await house.crash()
        await house.open()
        house.faults.at("publish", WorkersLostError("gone"))
        house.run()
        await house.waits()
        await house.trained_once(names)
        await house.stop()

    asyncio.run(live())


def test_an_older_release_that_does_not_load_at_the_start_holds_up_nothing_once_the_head_is_served(
    house: House,
) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        for _ in range(4):
            await house.grade_and_wait()
        house.faults.at("step", Crash())
        await house.grade()
        await house.crash()
        await house.open()
        served = (await house.chain())[3]
        assert house.engines.served == served.id  # as far as it is on disk
        await house.dispatcher.chain.quarantine(served, "no memory")  # as a start does
        house.run()
        await house.waits()
        assert house.dispatcher.progress.paused is None
        assert house.engines.served == (await house.chain())[5].id
        await house.stop()

    asyncio.run(live())


def test_an_engine_that_dies_after_training_has_ended_gets_the_newest_release_on_disk(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        for _ in range(4):
            await house.grade_and_wait()
        house.faults.at("step", RuntimeError("a fault of ours"))
        await house.grade()
        with pytest.raises(RuntimeError):
            await house.loop
        chain = await house.chain()
        assert house.engines.served == chain[4].id  # serving goes on
        house.engines.need_files()
        async with asyncio.timeout(60):
            while house.engines.served != chain[3].id:
                await asyncio.sleep(0.005)
        house.dispatcher.stop()
        await house.dispatcher.close()
        house.ledger.close()

    asyncio.run(live())


def test_a_stop_before_anything_was_asked_ends_in_order(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.dispatcher.chain.scenario = None  # as where nothing has made one
        house.dispatcher.stop()
        house.run()
        await house.loop
        await house.dispatcher.close()
        assert not house.trainer.running
        house.ledger.close()

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


def test_engines_are_given_a_head_that_lost_workers_made_again_with_other_bits(house: House) -> None:
    house.trainer_class = OtherBits

    async def live() -> None:
        await house.open()
        house.run()
        await house.grade_and_wait()
        given = len(house.engines.loads)
        house.faults.at("ping", WorkersLostError("gone"))
        OtherBits.again = True
        try:
            await house.grade_and_wait()
        finally:
            OtherBits.again = False
        first = (await house.chain())[1]
        assert first.replay_diverged
        assert house.engines.loads[given] == first.id  # and only then its successor
        assert house.engines.served == (await house.chain())[2].id
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
