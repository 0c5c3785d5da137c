"""Going back and forth in the chain: weights, trainer and queue together, or not at all."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import reef.chain
import reef.progress
from reef.errors import ConflictError, LoadFailedError, NotFoundError, ReefError, UnavailableError, WorkersLostError
from reef.ledger import batches, releases
from reef.types import Operation, ReleaseState
from tests.house import SCENARIO, Crash, House


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr(reef.progress, "STORE_RETRY_S", 0.01)
    monkeypatch.setattr(reef.chain, "RESTART_RETRY_S", 0.01)
    yield House(tmp_path / "run")


async def with_releases(house: House, count: int) -> list[str]:
    """A running house whose chain has `count` trained releases; the reports that made them."""
    await house.open()
    house.run()
    names: list[str] = []
    for _ in range(count):
        names += await house.grade_and_wait()
    return names


def test_a_rollback_brings_weights_trainer_and_queue_back_as_a_new_link(house: House) -> None:
    async def live() -> None:
        names = await with_releases(house, 3)
        chain = await house.chain()
        (waiting,) = await house.grade((1.0,))  # half a group, sampled from release 3
        made = await house.dispatcher.rollback(chain[1].id)
        assert (made.number, made.parent, made.source) == (4, chain[3].id, chain[1].id)
        assert (made.operation, made.content_id) == (Operation.ROLLBACK, chain[1].content_id)
        assert (made.policy_version, made.step, made.state) == (1, 1, ReleaseState.RELEASED)
        assert made.verified_at is not None
        assert made.checkpoint is not None  # a crash now costs no way back
        assert house.trainer.state == [1]
        assert house.engines.served == made.id
        assert await house.state(waiting) == ("dropped", "abandoned")
        assert {await house.state(name) for name in names} == {("trained", None)}
        more = await house.grade_and_wait()
        assert house.trainer.state == [1, 4]
        head = (await house.chain())[-1]
        assert (head.number, head.parent, head.policy_version, head.step) == (5, made.id, 2, 2)
        await house.trained_once(names + more)
        await house.stop()
        await house.open()
        assert (house.trainer.state, house.trainer.num_steps) == ([1, 4], 0)
        house.ledger.close()

    asyncio.run(live())


def test_a_rollback_gives_a_step_in_work_up_and_its_reports_wait_again(house: House) -> None:
    async def live() -> None:
        names = await with_releases(house, 2)
        first = (await house.chain())[1]
        asked: list[asyncio.Task[object]] = []
        real = house.trainer.step

        def step_and_be_asked(batch: object) -> object:
            """The rollback is asked for while the step is in work."""
            loop.call_soon_threadsafe(lambda: asked.append(asyncio.ensure_future(house.dispatcher.rollback(first.id))))
            done = real(batch)  # type: ignore[arg-type]
            while not house.dispatcher._commands:
                time.sleep(0.001)
            house.trainer.step = real  # type: ignore[method-assign]
            return done

        loop = asyncio.get_running_loop()
        house.trainer.step = step_and_be_asked  # type: ignore[assignment,method-assign]
        names += await house.grade(release=first.id)  # an ancestor of what comes after the rollback
        await house.until(lambda: len(asked) == 1 and asked[0].done())
        await house.waits()
        chain = await house.chain()
        assert [link.operation for link in chain[3:]] == [Operation.ROLLBACK, Operation.TRAIN]
        assert house.trainer.state == [1, 4]  # batch 3 was given up, its reports came again as batch 4
        await house.trained_once(names)
        await house.stop()

    asyncio.run(live())


@pytest.mark.slow  # many
@pytest.mark.parametrize("point", ["restore", "publish", "jump", "load", "set_verified", "save", "set_checkpoint"])
def test_a_crash_in_a_rollback_leaves_it_done_or_not_begun(house: House, point: str) -> None:
    async def live() -> None:
        names = await with_releases(house, 3)
        target = (await house.chain())[2]  # it has a checkpoint
        house.faults.at(point, Crash())
        asked = asyncio.ensure_future(house.dispatcher.rollback(target.id))
        await house.crash()
        asked.cancel()
        await house.open()
        head = (await house.chain())[-1]
        done = head.operation is Operation.ROLLBACK
        assert done == (point in ("load", "set_verified"))  # a checkpoint of the head comes first
        assert house.trainer.state == ([1, 2] if done else [1, 2, 3])
        house.run()
        await house.waits()
        names += await house.grade_and_wait()
        await house.trained_once(names)
        await house.stop()

    asyncio.run(live())


def test_what_cannot_be_restored_whole_is_refused_and_nothing_changes(house: House) -> None:
    async def live() -> None:
        names = await with_releases(house, 3)
        chain = await house.chain()
        with pytest.raises(NotFoundError, match="no release nothing"):
            await house.dispatcher.rollback("nothing")
        with pytest.raises(ConflictError, match="already"):
            await house.dispatcher.rollback(chain[3].id)
        await house.ledger.write(releases.set_state, chain[2].id, ReleaseState.QUARANTINED, "it is bad", 1.0)
        with pytest.raises(ConflictError, match="is quarantined: it is bad"):
            await house.dispatcher.rollback(chain[2].id)
        with pytest.raises(ConflictError, match="is quarantined: it is bad"):
            await house.dispatcher.promote(chain[2].id, force=True)
        house.faults.at("step", WorkersLostError("a worker died"))  # on the way to release 1
        with pytest.raises(ConflictError, match="cannot be restored: a worker died"):
            await house.dispatcher.rollback(chain[1].id)
        await house.waits()
        assert house.trainer.state == [1, 2, 3]
        assert [release.id for release in await house.chain()] == [release.id for release in chain]
        assert house.engines.served == chain[3].id
        names += await house.grade_and_wait()
        assert house.trainer.state == [1, 2, 3, 4]
        await house.stop()

    asyncio.run(live())


def test_a_promotion_brings_back_a_branch_that_was_rolled_away(house: House) -> None:
    async def live() -> None:
        names = await with_releases(house, 3)
        chain = await house.chain()
        back = await house.dispatcher.rollback(chain[1].id)
        forth = await house.dispatcher.promote(chain[3].id)
        assert (forth.parent, forth.source, forth.operation) == (back.id, chain[3].id, Operation.PROMOTE)
        assert (forth.content_id, forth.step, forth.policy_version) == (chain[3].content_id, 3, 3)
        assert house.trainer.state == [1, 2, 3]
        names += await house.grade_and_wait()
        assert house.trainer.state == [1, 2, 3, 4]
        await house.trained_once(names)
        with pytest.raises(ConflictError, match="already"):
            await house.dispatcher.promote((await house.chain())[-1].id)
        await house.stop()

    asyncio.run(live())


def test_a_quarantined_head_stays_so_until_it_loads_or_is_rolled_back(house: House) -> None:
    async def live() -> None:
        await with_releases(house, 1)
        house.faults.at("load", LoadFailedError("it differs"))
        await house.grade_and_wait()
        bad = (await house.chain())[2]
        assert (bad.state, house.engines.served) == (ReleaseState.QUARANTINED, (await house.chain())[1].id)
        await house.stop()
        await house.open()  # it stays so over a restart
        house.run()
        await house.waits()
        assert house.dispatcher.progress.paused == f"release {bad.id} is quarantined: it differs"
        assert house.engines.served == (await house.chain())[1].id
        house.faults.at("load", LoadFailedError("it still differs"))
        with pytest.raises(ConflictError, match="still does not load: it still differs"):
            await house.dispatcher.promote(bad.id)
        assert house.engines.served == (await house.chain())[1].id
        waiting = await house.grade_and_wait()
        assert {await house.state(name) for name in waiting} == {("pending", None)}
        await house.dispatcher.rollback((await house.chain())[1].id)
        await house.waits()
        assert house.dispatcher.progress.paused is None
        assert {await house.state(name) for name in waiting} == {("trained", None)}
        assert house.trainer.state == [1, 3]
        await house.stop()

    asyncio.run(live())


def test_a_checkpoint_that_is_damaged_gives_way_to_the_one_before_it(
    house: House, caplog: pytest.LogCaptureFixture
) -> None:
    async def live() -> None:
        names = await with_releases(house, 5)  # checkpoints of 2 and 4
        chain = await house.chain()
        await house.stop()  # and of 5
        (house.storage.checkpoint_path(chain[5].id) / "COMPLETE").unlink()
        await house.open()
        assert (house.trainer.state, house.trainer.num_steps) == ([1, 2, 3, 4, 5], 1)
        assert [release.number for release in await house.chain() if release.checkpoint] == [4, 5]  # never forgotten
        assert (house.storage.checkpoint_path(chain[5].id) / "COMPLETE").exists()  # but written anew
        house.ledger.close()
        shutil.rmtree(house.storage.checkpoint_path(chain[4].id))
        shutil.rmtree(house.storage.checkpoint_path(chain[5].id))
        await house.open()
        assert (house.trainer.state, house.trainer.num_steps) == ([1, 2, 3, 4, 5], 5)
        house.run()
        await house.waits()
        await house.trained_once(names)
        await house.stop()

    asyncio.run(live())
    assert caplog.text.count("is not used, the one before it is") == 3  # 5 at the first start, 5 and 4 at the second


def test_a_replay_that_comes_out_different_takes_the_published_weights_and_says_so(house: House) -> None:
    async def live() -> None:
        await with_releases(house, 1)
        house.faults.at("save", UnavailableError("disk full"))
        await house.stop()
        real = house.trainer_class.step

        def otherwise(trainer: object, batch: object) -> object:
            done = real(trainer, batch)
            trainer.state[-1] += 100  # type: ignore[attr-defined]
            return done

        house.trainer_class = type("Other", (house.trainer_class,), {"step": otherwise})
        await house.open()
        assert house.trainer.state == [1]
        assert [release.replay_diverged for release in await house.chain()] == [False, True]
        house.ledger.close()
        name = f"{house.ledger.run_id}-000001"
        shutil.rmtree(house.storage.releases_dir / name)
        with pytest.raises(ReefError, match=f"replay of {name} gave .* and its weights are gone"):
            await house.open()
        house.ledger.close()

    asyncio.run(live())


def test_a_rollback_to_the_base_starts_from_the_base(house: House) -> None:
    async def live() -> None:
        names = await with_releases(house, 2)
        base = (await house.chain())[0]
        made = await house.dispatcher.rollback(base.id)
        assert (made.content_id, made.step, made.policy_version) == (base.content_id, 0, 0)
        assert house.trainer.state == []
        names += await house.grade_and_wait()
        assert house.trainer.state == [3]
        await house.trained_once(names)
        await house.stop()
        await house.open()
        assert house.trainer.state == [3]
        house.ledger.close()

    asyncio.run(live())


def test_a_stop_answers_what_was_asked_and_not_begun(house: House) -> None:
    async def live() -> None:
        await with_releases(house, 2)
        asked = asyncio.ensure_future(house.dispatcher.rollback((await house.chain())[1].id))
        house.dispatcher.stop()
        await house.loop
        with pytest.raises((UnavailableError, ConflictError)):
            await asked
        with pytest.raises(ConflictError, match="has stopped"):
            await house.dispatcher.rollback("any")
        await house.dispatcher.close()
        house.ledger.close()

    asyncio.run(live())


def test_a_checkpoint_on_request_is_of_the_head_and_durable(house: House) -> None:
    async def live() -> None:
        await with_releases(house, 1)
        await house.dispatcher.checkpoint()
        assert (await house.chain())[-1].checkpoint is not None
        passed = list(house.faults.passed)
        await house.dispatcher.checkpoint()  # it has one
        assert house.faults.passed.count("save") == passed.count("save")
        assert await house.ledger.read(batches.reserved, SCENARIO) is None
        await house.stop()

    asyncio.run(live())


def test_a_quarantined_head_whose_weights_are_damaged_is_written_anew_when_it_is_promoted(house: House) -> None:
    async def live() -> None:
        names = await with_releases(house, 1)
        head = (await house.chain())[-1]
        await house.dispatcher.chain.quarantine(head, "its file is damaged")
        shutil.rmtree(house.storage.releases_dir / head.id)
        made = await house.dispatcher.promote(head.id)
        assert (made.id, made.state, made.reason) == (head.id, ReleaseState.RELEASED, "promoted by hand")
        assert house.storage.published(head).content_id == head.content_id
        names += await house.grade_and_wait()
        await house.trained_once(names)
        await house.stop()

    asyncio.run(live())


def test_a_checkpoint_that_loses_a_worker_whose_way_back_is_gone_never_trains_on_from_another_state(
    house: House,
) -> None:
    async def live() -> None:
        await with_releases(house, 3)  # a checkpoint of 2; the way home goes through batch 3
        house.faults.at("save", WorkersLostError("a worker died"))
        house.faults.at("step", ReefError("receipts are damaged", code="receipt_damaged"))
        with pytest.raises(ReefError, match="receipts are damaged"):
            await house.dispatcher.checkpoint()
        await house.waits()  # the next turn went home
        assert house.trainer.state == [1, 2, 3]
        await house.grade_and_wait()
        head = (await house.chain())[-1]
        assert (head.step, head.content_id) == (4, "sha256:[1, 2, 3, 4]")
        await house.stop()

    asyncio.run(live())


def test_a_stop_whose_last_checkpoint_fails_for_good_is_an_orderly_stop(house: House) -> None:
    async def live() -> None:
        await with_releases(house, 1)
        house.faults.at("save", WorkersLostError("a worker died"))
        house.faults.at("restart", *[WorkersLostError("no room")] * reef.chain.MAX_RESTARTS)
        await house.stop()
        assert not house.trainer.running

    asyncio.run(live())


def test_an_unknown_target_gives_no_step_up(house: House) -> None:
    async def live() -> None:
        names = await with_releases(house, 1)
        real = house.trainer.step

        def step_and_be_asked(batch: object) -> object:
            asked = asyncio.run_coroutine_threadsafe(house.dispatcher.rollback("nothing"), loop)
            with pytest.raises(NotFoundError):
                asked.result(60)
            return real(batch)  # type: ignore[arg-type]

        loop = asyncio.get_running_loop()
        house.trainer.step = step_and_be_asked  # type: ignore[assignment,method-assign]
        names += await house.grade_and_wait()
        assert house.trainer.num_steps == 2
        await house.trained_once(names)
        await house.stop()

    asyncio.run(live())
