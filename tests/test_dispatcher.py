"""The loop's order and what it does where one of its steps fails: a real ledger, real directories, a fake trainer."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

import reef.chain
import reef.progress
from reef.errors import (
    ConfigError,
    DamagedError,
    LoadFailedError,
    OwnershipLostError,
    ReefError,
    StepFailedError,
    UnavailableError,
    WorkersLostError,
)
from reef.ledger import releases, scenarios
from reef.ledger.ledger import Ledger
from reef.types import Batch, ReleaseState, StepResult
from tests.house import SCENARIO, Crash, FakeTrainer, House

CRASHES = (
    "reserve", "step", "stepped", "publish", "published", "commit", "committed", "load", "loaded", "set_verified",
    "copy", "save_done", "save", "saved", "set_checkpoint", "forget_weights",
)  # fmt: skip


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr(reef.progress, "STORE_RETRY_S", 0.01)
    monkeypatch.setattr(reef.chain, "RESTART_RETRY_S", 0.01)
    yield House(tmp_path / "run")


def test_reports_become_releases_in_the_order_reserve_step_publish_commit_load(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        names = await house.grade()
        await house.waits()
        order = [point for point in house.faults.passed if point not in ("read", "head", "ping", "begin", "lay_down")]
        arrows = ["reserve", "step", "stepped", "publish", "published", "commit", "committed", "load", "loaded"]
        assert order == [*arrows, "set_verified"]
        await house.trained_once(names)
        await house.stop()
        assert not house.trainer.running
        await house.open()  # the checkpoint of the stop: nothing is replayed
        assert (house.trainer.num_steps, house.trainer.state) == (0, [1])
        house.ledger.close()

    asyncio.run(live())


@pytest.mark.parametrize("point", ["read", "reserve", "publish", "commit", "set_verified", "save", "set_checkpoint"])
def test_what_disk_or_database_refuses_is_tried_again_and_no_step_is_repeated(house: House, point: str) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        house.faults.at(point, *[UnavailableError("disk full")] * 5)
        names = await house.grade()
        await house.until(lambda: not house.faults.planned[point] or point.startswith(("save", "set_check")))
        await house.waits()
        names += await house.grade()  # the second release has a checkpoint
        await house.waits()
        assert house.dispatcher.progress.error is None
        assert house.trainer.num_steps == 2
        await house.trained_once(names)
        assert (await house.chain())[-1].checkpoint is not None
        await house.stop()

    asyncio.run(live())


@pytest.mark.slow  # many
@pytest.mark.parametrize("point", CRASHES)
def test_a_crash_anywhere_loses_no_report_and_trains_none_twice(tmp_path: Path, point: str) -> None:
    house = House(tmp_path / "run", "--storage.keep", "1", "--storage.keep-checkpoints", "1")

    async def live() -> None:
        await house.open()
        house.run()
        names = await house.grade()
        await house.waits()
        house.faults.at(point, Crash())
        names += await house.grade()
        await house.crash()
        await house.open()
        house.run()
        await house.waits()
        names += await house.grade()
        await house.waits()
        chain = await house.chain()
        assert [release.number for release in chain] == [0, 1, 2, 3]
        assert house.trainer.state == [1, 2, 3]
        await house.trained_once(names)
        on_disk = {path.name for path in house.storage.releases_dir.iterdir()}
        assert on_disk == {release.id for release in chain if release.restorable and release.number}
        await house.stop()

    asyncio.run(live())


def test_two_crashes_in_its_step_end_a_batch_but_starts_that_fail_in_between_count_nothing(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        house.faults.at("step", Crash())
        lost = await house.grade()
        await house.crash()
        for _ in range(3):  # the engine does not start, or somebody presses Ctrl-C: recovered, and never run
            await house.open()
            await house.dispatcher.close()
            house.ledger.close()
        await house.open()
        house.run()
        house.faults.at("step", Crash())
        await house.crash()
        assert house.faults.passed.count("step") == 1  # it was tried a second time
        await house.open()
        house.run()
        await house.waits()
        assert {await house.state(name) for name in lost} == {("dropped", "step_failed")}
        await house.trained_once(await house.grade_and_wait())
        await house.stop()

    asyncio.run(live())


def test_in_manual_mode_a_complete_batch_waits_for_an_update_and_each_update_trains_once(house: House) -> None:
    async def live() -> None:
        await house.open()
        await house.ledger.write(scenarios.set_mode, SCENARIO, "manual")
        house.run()
        names = await house.grade_and_wait()
        later = await house.grade_and_wait()  # two batches are complete
        assert {await house.state(name) for name in names + later} == {("pending", None)}
        assert house.trainer.num_steps == 0
        house.dispatcher.update_now()
        await house.waits()
        await house.trained_once(names)
        house.dispatcher.notify()
        await house.waits()
        assert {await house.state(name) for name in later} == {("pending", None)}
        house.dispatcher.update_now()
        await house.waits()
        await house.trained_once(names + later)
        house.dispatcher.update_now()  # before there is anything to train on: for the next complete batch
        await house.waits()
        asked_before = await house.grade_and_wait()
        unasked = await house.grade_and_wait()
        await house.trained_once(names + later + asked_before)
        assert {await house.state(name) for name in unasked} == {("pending", None)}
        assert house.trainer.num_steps == 3
        await house.stop()

    asyncio.run(live())


def test_a_commit_after_another_owner_took_over_ends_the_loop_and_nothing_more_is_written(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        house.faults.at("publish", *[UnavailableError("disk full")] * 1000)
        names = await house.grade()
        await house.until(lambda: house.dispatcher.progress.error == "disk full")
        first = house.ledger
        house.ledger = Ledger.open(house.config.ledger_url)  # the next owner, though the first one still runs
        house.faults.at("publish")
        await house.loop
        assert (house.dispatcher.progress.phase, house.dispatcher.progress.paused) == ("stopped", None)
        assert "owned by epoch 2" in str(house.dispatcher.progress.error)
        await house.dispatcher.close()
        assert not house.trainer.running
        assert [point for point in house.faults.passed if point != "read"][-2:] == ["published", "commit"]
        assert [release.number for release in await house.chain()] == [0]
        assert {await house.state(name) for name in names} == {("reserved", None)}
        first.close()
        house.ledger.close()
        await house.open()
        house.run()
        await house.waits()
        await house.trained_once(names)
        await house.stop()

    asyncio.run(live())


def test_a_step_that_is_refused_twice_ends_its_batch_and_the_next_one_trains(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        house.faults.at("step", StepFailedError("nan"), StepFailedError("nan"))
        lost = await house.grade()
        await house.waits()
        assert {await house.state(name) for name in lost} == {("dropped", "step_failed")}
        assert "failed twice" in str(house.dispatcher.progress.error)
        await house.trained_once(await house.grade_and_wait())
        assert house.dispatcher.progress.error is None
        await house.stop()

    asyncio.run(live())


def test_workers_lost_in_a_step_and_again_on_the_way_back_are_replaced_until_they_are_at_the_head(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        names = await house.grade_and_wait()
        lost = WorkersLostError("a worker died")
        house.faults.at("step", lost, lost)  # the batch's own, then the replay's
        house.faults.at("restart", lost)
        names += await house.grade_and_wait()
        assert house.faults.passed.count("restart") == 3
        assert house.dispatcher.progress.error is None
        await house.trained_once(names)
        await house.stop()

    asyncio.run(live())


def test_workers_that_cannot_be_replaced_end_the_training_and_their_batch_is_taken_by_the_next_owner(
    house: House,
) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        house.faults.at("step", WorkersLostError("a worker died"))
        house.faults.at("restart", *[WorkersLostError("no room")] * reef.chain.MAX_RESTARTS)
        names = await house.grade()
        with pytest.raises(ReefError, match="cannot be replaced: no room"):
            await house.loop
        await house.dispatcher.close()
        assert not house.trainer.running
        house.ledger.close()
        await house.open()
        house.run()
        await house.waits()
        await house.trained_once(names)
        await house.stop()

    asyncio.run(live())


def test_workers_lost_in_a_checkpoint_are_replaced_and_training_goes_on(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        names = await house.grade_and_wait()
        house.faults.at("save", WorkersLostError("a worker died"))
        names += await house.grade_and_wait()
        assert house.trainer.state == [1, 2]
        names += await house.grade_and_wait()
        await house.trained_once(names)
        await house.stop()

    asyncio.run(live())


def test_a_release_that_no_engine_loads_pauses_training_and_the_one_before_it_serves_on(tmp_path: Path) -> None:
    house = House(tmp_path / "run", "--storage.keep", "1")

    async def live() -> None:
        await house.open()
        house.run()
        names = await house.grade_and_wait()
        house.faults.at("load", LoadFailedError("r2 differs from its probe"))
        names += await house.grade_and_wait()
        chain = await house.chain()
        assert [release.verified_at is not None for release in chain] == [False, True, False]
        assert house.engines.served == chain[1].id
        assert chain[1].restorable  # it serves: pruning waits
        assert (chain[2].state, chain[2].reason) == (ReleaseState.QUARANTINED, "r2 differs from its probe")
        assert house.dispatcher.progress.paused == f"release {chain[2].id} is quarantined: r2 differs from its probe"
        waiting = await house.grade_and_wait()
        assert {await house.state(name) for name in waiting} == {("pending", None)}
        await house.dispatcher.promote(chain[2].id)
        await house.waits()
        assert house.dispatcher.progress.error is None
        await house.trained_once(names + waiting)
        await house.stop()

    asyncio.run(live())


def test_a_stop_while_the_disk_refuses_a_checkpoint_ends_the_trainer_and_the_next_start_replays(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        names = await house.grade_and_wait()
        house.faults.at("save", UnavailableError("disk full"))
        await house.stop()
        assert not house.trainer.running
        await house.open()
        assert (house.trainer.num_steps, house.trainer.state) == (1, [1])
        house.run()
        await house.waits()
        await house.trained_once(names)
        await house.stop()

    asyncio.run(live())


def test_where_every_sample_is_filtered_there_is_no_step_and_the_loop_goes_on(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        tied = await house.grade_and_wait((1.0, 1.0))
        assert {await house.state(name) for name in tied} == {("dropped", "tied")}
        assert house.trainer.num_steps == 0
        assert house.metrics.drops.labels("tied")._value.get() == 2
        await house.trained_once(await house.grade_and_wait())
        await house.stop()

    asyncio.run(live())


def test_an_incomplete_group_ends_at_its_deadline_though_no_report_comes(tmp_path: Path) -> None:
    house = House(tmp_path / "run", "--recipe.config.group-deadline-s", "0.3")

    async def live() -> None:
        await house.open()
        house.run()
        (alone,) = await house.grade((1.0,))
        await house.until(lambda: house.metrics.drops.labels("group_incomplete")._value.get() == 1)
        assert await house.state(alone) == ("dropped", "group_incomplete")
        await house.stop()

    asyncio.run(live())


def test_a_directory_that_cannot_be_removed_is_a_warning_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(tmp_path / "run", "--storage.keep", "1", "--storage.keep-checkpoints", "1")

    async def live() -> None:
        await house.open()

        def refuse(path: Path) -> None:
            raise PermissionError(f"read-only: {path}")

        monkeypatch.setattr(house.storage, "remove", refuse)
        house.run()
        names = []
        for _ in range(4):
            names += await house.grade_and_wait()
        await house.trained_once(names)
        await house.stop()

    asyncio.run(live())
    assert "cannot remove" in caplog.text


def test_a_setting_that_a_replay_would_need_as_it_was_is_named(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        await house.grade_and_wait()
        house.faults.at("save", UnavailableError("disk full"))  # so the next start has to replay
        await house.stop()
        changed = {"training": house.config.training.model_copy(update={"seed": 7})}
        before, house.config = house.config, house.config.model_copy(update=changed)
        with pytest.raises(ConfigError, match=r"training.seed is 7, but .*-000001 was trained with 0"):
            await house.open()
        house.ledger.close()
        house.config = before
        await house.open()
        assert house.trainer.state == [1]
        house.run()
        await house.stop()

    asyncio.run(live())


@pytest.mark.parametrize("moment", ["in a step", "at the end"])
def test_who_does_not_own_the_ledger_any_more_publishes_nothing_and_writes_no_checkpoint(
    house: House, moment: str
) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        await house.grade_and_wait()
        if moment == "at the end":
            house.dispatcher.stop()
            await house.loop
        house.faults.at("head", OwnershipLostError("another service owns the ledger"))
        if moment == "in a step":
            await house.grade()
            await house.loop
            assert house.dispatcher.progress.error == "another service owns the ledger"
        await house.dispatcher.close()
        assert not house.trainer.running
        assert (house.faults.passed.count("publish"), house.faults.passed.count("save")) == (1, 0)
        house.ledger.close()

    asyncio.run(live())


def damage(house: House, receipt_id: str) -> None:
    """A bit of a log-probability turns on the disk."""
    with contextlib.closing(sqlite3.connect(house.config.reef.run_dir / "ledger.db")) as connection, connection:
        connection.execute("UPDATE receipts SET logprobs = x'000000C0' WHERE id = ?", (receipt_id,))


def test_a_damaged_receipt_costs_its_own_report_and_no_other(house: House) -> None:
    async def live() -> None:
        await house.open()
        await house.ledger.write(scenarios.set_mode, SCENARIO, "manual")
        house.run()
        names = await house.grade((0.0, 1.0))
        damage(house, names[0])
        later = await house.grade((0.0, 1.0))
        house.dispatcher.update_now()
        await house.until(lambda: house.trainer.num_steps == 1)
        await house.waits()
        assert await house.state(names[0]) == ("dropped", "damaged")
        assert await house.state(names[1]) == ("pending", None)
        assert {await house.state(name) for name in later} == {("trained", None)}
        await house.stop()

    asyncio.run(live())


def test_turns_that_cannot_be_laid_out_cost_the_reports_that_reference_them_and_no_others(house: House) -> None:
    async def live() -> None:
        await house.open()
        await house.ledger.write(scenarios.set_mode, SCENARIO, "manual")
        house.run()
        names = await house.grade((0.0, 1.0))
        with contextlib.closing(sqlite3.connect(house.config.reef.run_dir / "ledger.db")) as connection, connection:
            connection.execute("INSERT INTO report_receipts VALUES (?, 1, ?)", (names[0], names[1]))
            connection.execute("UPDATE requests SET sampling = '{' WHERE id = ?", (f"req-{names[1]}",))
        house.dispatcher.update_now()
        await house.until(lambda: house.dispatcher.progress.error is not None)
        await house.waits()
        assert {await house.state(name) for name in names} == {("dropped", "damaged")}
        later = await house.grade((0.0, 1.0))
        house.dispatcher.update_now()
        await house.until(lambda: house.trainer.num_steps == 1)
        await house.waits()
        await house.trained_once(later)
        await house.stop()

    asyncio.run(live())


def test_a_batch_that_other_workers_take_again_is_replayed_by_workers_like_them(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.faults.at("step", Crash())
        house.run()
        names = await house.grade()
        await house.crash()
        training = house.config.training.model_copy(update={"seed": 7})
        house.config = house.config.model_copy(update={"training": training})
        for _ in range(2):  # trains it with seed 7; makes it again
            await house.open()
            house.run()
            await house.waits()
            await house.trained_once(names)
            assert house.trainer.num_steps == 1
            house.faults.at("save", UnavailableError("disk full"))  # so the next start has to replay
            await house.stop()

    asyncio.run(live())


def test_a_batch_whose_receipts_are_damaged_after_it_was_reserved_is_given_up_for_its_others(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        house.faults.at("step", Crash())
        lost = await house.grade()
        await house.crash()
        damage(house, lost[1])
        await house.open()
        house.run()
        await house.waits()
        assert await house.state(lost[1]) == ("dropped", "damaged")
        assert await house.state(lost[0]) == ("pending", None)
        assert f"receipt {lost[1]} is damaged" in str(house.dispatcher.progress.error)
        await house.trained_once(await house.grade_and_wait())
        await house.stop()

    asyncio.run(live())


def test_a_replay_over_damaged_receipts_stops_the_start_and_names_the_receipt(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        names = await house.grade_and_wait()
        house.faults.at("save", UnavailableError("disk full"))  # so the next start has to replay
        await house.stop()
        damage(house, names[0])
        with pytest.raises(DamagedError, match=f"receipt {names[0]} is damaged"):
            await house.open()
        house.ledger.close()

    asyncio.run(live())


def test_a_release_says_how_the_time_since_the_one_before_was_spent(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        house.engines.load_takes_s = 0.3
        await house.grade_and_wait()
        await asyncio.sleep(0.3)  # nobody asks
        house.engines.load_takes_s = 0.0
        await house.grade_and_wait()
        await house.grade_and_wait()
        _, first, second, third = (release.metrics for release in await house.chain())
        assert first["async/engine_wait_share"] == 0.0
        assert "seconds/commit" not in first  # there was none before
        passed_s = second["seconds/wait"] / second["async/trainer_wait_share"]
        assert second["async/engine_wait_share"] * passed_s == pytest.approx(0.3)  # the load of the first
        assert 0.3 <= second["seconds/wait"] < passed_s
        assert third["async/engine_wait_share"] == 0.0
        for metrics in (first, second, third):
            assert metrics["seconds/reserve"] > 0
            assert metrics["tokens_per_s"] > 0
        assert third["seconds/commit"] > 0
        await house.stop()

    asyncio.run(live())


def test_a_release_counts_what_was_dropped_since_the_one_before_by_reason(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        await house.grade_and_wait((1.0, 1.0))
        await house.grade_and_wait((0.0, 0.0))
        await house.grade_and_wait()
        await house.grade_and_wait()
        _, first, second = (release.metrics for release in await house.chain())
        drops = [{name: value for name, value in row.items() if name.startswith("dropped/")} for row in (first, second)]
        assert drops == [{"dropped/tied": 4.0}, {}]
        assert house.metrics.registry.get_sample_value("reef_step", {"name": "dropped/tied"}) is None  # of the newest
        await house.stop()

    asyncio.run(live())


def test_a_stale_member_of_a_group_counts_as_dropped_in_the_release_that_its_group_made(tmp_path: Path) -> None:
    house = House(tmp_path / "run", "--recipe.config.max-staleness", "0")

    async def live() -> None:
        await house.open()
        house.run()
        (old,) = await house.grade_and_wait((0.0,), "slow")
        await house.grade_and_wait()
        (fresh,) = await house.grade_and_wait((1.0,), "slow")
        assert [await house.state(name) for name in (old, fresh)] == [("dropped", "stale"), ("trained", None)]
        _, first, second = (release.metrics for release in await house.chain())
        assert (first.get("dropped/stale"), second["dropped/stale"]) == (None, 1.0)
        assert house.metrics.drops.labels("stale")._value.get() == 1
        await house.stop()

    asyncio.run(live())


def test_while_the_gate_holds_a_release_the_trainer_does_not_wait_for_samples(tmp_path: Path) -> None:
    house = House(tmp_path / "run", "--evaluation.gate", "{accuracy: {min: 0.5}}")

    async def live() -> None:
        await house.open()
        house.run()
        await house.grade()
        await house.until(lambda: house.dispatcher.progress.phase == "holding")
        held = house.dispatcher.gate.held
        assert held is not None
        await house.grade()  # the next batch is complete
        await asyncio.sleep(0.5)
        await house.ledger.write(releases.add_evaluation, SCENARIO, held.id, {"accuracy": 0.75}, 1.0)
        house.dispatcher.notify()
        await house.until(lambda: house.trainer.num_steps == 2 and house.dispatcher.progress.phase == "holding")
        assert (await house.chain())[2].metrics["seconds/wait"] == 0.0
        await house.stop()

    asyncio.run(live())


def test_a_method_that_compares_with_the_past_gets_the_earlier_rewards_of_its_prompt(tmp_path: Path) -> None:
    running_mean = ("--recipe.implementation", "sao", "--recipe.config.advantage", "running-mean")
    sizes = ("--recipe.config.batch-size", "2", "--recipe.config.baseline-window", "3")
    house = House(tmp_path / "run", settings=(*running_mean, *sizes))
    histories: list[list[tuple[float, ...]]] = []

    class Remembers(FakeTrainer):
        def step(self, batch: Batch) -> StepResult:
            histories.append([batch.history.get(sample.report_id, ()) for sample in batch.samples])
            return super().step(batch)

    house.trainer_class = Remembers

    async def live() -> None:
        await house.open()
        house.run()
        await house.grade_and_wait((0.1, 0.2))
        await house.grade_and_wait((0.3, 0.4))
        house.faults.at("save", UnavailableError("disk full"))  # so the next start has to replay
        await house.grade_and_wait((0.5, 0.6))
        await house.stop()
        assert histories == [[()] * 2, [(0.2, 0.1)] * 2, [(0.4, 0.3, 0.2)] * 2]
        await house.open()
        assert histories[3:] == histories[:3]  # all of them were made again
        house.ledger.close()

    asyncio.run(live())
