"""The loop's order and what it does where one of its steps fails: a real ledger, real directories, a fake trainer."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reef.dispatcher
from reef.config import load
from reef.dispatcher import Dispatcher
from reef.errors import ConfigError, LoadFailedError, StepFailedError, UnavailableError, WorkersLostError
from reef.ledger import batches, receipts, releases, reports, scenarios
from reef.ledger.ledger import Ledger
from reef.observe import Metrics
from reef.storage import Storage
from reef.types import (
    Batch,
    FinishReason,
    Generation,
    Probe,
    Published,
    Release,
    Report,
    Request,
    Sampling,
    Span,
    StepResult,
)

SCENARIO = "house"
SETTINGS = ("--recipe.config.group-size", "2", "--recipe.config.batch-size", "2", "--training.checkpoint-every", "2")
CRASHES = (
    "reserve", "step", "stepped", "publish", "published", "commit", "committed", "load", "loaded", "set_verified",
    "save", "saved", "set_checkpoint", "forget_weights",
)  # fmt: skip


class Crash(BaseException):
    """The process ends here."""


class Faults:
    """What goes wrong where: an exception is raised each time its point is passed, as often as it is listed."""

    def __init__(self) -> None:
        self.planned: dict[str, list[BaseException]] = {}
        self.passed: list[str] = []

    def at(self, point: str, *errors: BaseException) -> None:
        self.planned[point] = list(errors)

    def point(self, name: str) -> None:
        self.passed.append(name)
        if self.planned.get(name):
            raise self.planned[name].pop(0)


class FakeTrainer:
    """Its weights are the numbers of the batches it has trained on, in their order."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.state: list[int] = []
        self.running = False
        self.num_steps = 0

    def start(self) -> None:
        self.running = True

    def restart(self) -> None:
        self.state = []
        self.faults.point("restart")
        self.running = True

    def stop(self) -> None:
        self.running = False

    def probe(self) -> Probe:
        return Probe((1, 2), (-0.5,))

    def step(self, batch: Batch) -> StepResult:
        self.faults.point("step")
        self.num_steps += 1
        self.state.append(batch.number)
        self.faults.point("stepped")
        return StepResult(len(self.state), {"num_samples": float(len(batch.samples))}, {})

    def publish(self, release_id: str, directory: Path) -> Published:
        self.faults.point("publish")
        path = directory / release_id
        path.mkdir(parents=True, exist_ok=True)
        published = Published(release_id, str(path), f"sha256:{self.state}", 0, self.probe())
        values = {"release_id": release_id, "content_id": published.content_id, "size_bytes": 0, "files": {}}
        (path / "manifest.json").write_text(json.dumps({**values, "probe": None}))
        self.faults.point("published")
        return published

    def save(self, directory: Path) -> None:
        self.faults.point("save")
        directory.mkdir(exist_ok=True)
        (directory / "state").write_text(json.dumps(self.state))
        (directory / "COMPLETE").touch()
        self.faults.point("saved")

    def restore(self, directory: Path) -> int:
        self.state = json.loads((directory / "state").read_text())
        return len(self.state)


class FakeEngines:
    """Serves what it was told to load last."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.served: str | None = None
        self.loads: list[str] = []

    async def load(self, published: Published) -> None:
        self.loads.append(published.release_id)
        self.faults.point("load")
        self.served = published.release_id
        self.faults.point("loaded")


class FaultyLedger:
    """The real ledger; a write passes the point of its name before it begins."""

    def __init__(self, ledger: Ledger, faults: Faults) -> None:
        self.ledger = ledger
        self.faults = faults
        self.run_id = ledger.run_id

    async def write(self, op: Callable[..., Any], *args: Any) -> Any:
        self.faults.point(op.__name__)
        done = await self.ledger.write(op, *args)
        if op is batches.commit:
            self.faults.point("committed")
        return done

    async def read(self, op: Callable[..., Any], *args: Any) -> Any:
        self.faults.point("read")
        return await self.ledger.read(op, *args)


class House:
    """One owner of a run directory after the other."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.config = load(None, ["--reef.run-dir", str(directory), *SETTINGS, *flags], {})
        self.names = (f"answer-{number}" for number in itertools.count(1))
        self.base = directory / "base"
        self.base.mkdir(parents=True)

    async def open(self) -> None:
        """What `reef serve` does before the loop runs."""
        self.faults = Faults()
        self.ledger = Ledger.open(self.config.ledger_url)
        self.metrics = Metrics()
        base = Published(f"{self.ledger.run_id}-000000", str(self.base), "sha256:[]", 0, None)
        faulty: Any = FaultyLedger(self.ledger, self.faults)
        self.storage = Storage(self.config, faulty, base)
        if await self.ledger.read(scenarios.find, SCENARIO) is None:
            await self.ledger.write(scenarios.create, SCENARIO, "grpo", 1.0)
            await self.ledger.write(releases.append, self.storage.base_release(SCENARIO))
        await self.storage.clean(SCENARIO)
        self.trainer, self.engines = FakeTrainer(self.faults), FakeEngines(self.faults)
        head = (await self.chain())[-1]
        self.engines.served = self.storage.published(head).release_id
        parts: list[Any] = [faulty, self.engines, self.trainer, self.storage, self.metrics]
        self.dispatcher = Dispatcher(self.config, *parts)
        await self.dispatcher.start()
        await self.dispatcher.recover()

    def run(self) -> None:
        self.loop = asyncio.create_task(self.dispatcher.run())

    async def stop(self) -> None:
        """Ctrl-C."""
        self.dispatcher.stop()
        await self.loop
        await self.dispatcher.close()
        self.ledger.close()

    async def crash(self) -> None:
        """The process has ended inside `run`; nothing of it goes on."""
        with pytest.raises(Crash):
            await self.loop
        self.ledger.close()

    async def grade(self, scores: tuple[float, ...] = (0.0, 1.0)) -> list[str]:
        """One group of graded answers from the release that is served; the names of the reports."""
        names = [next(self.names) for _ in scores]
        for score, name in zip(scores, names, strict=True):
            request = Request(
                id=f"req-{name}",
                scenario=SCENARIO,
                api="completions",
                prompt_ids=np.array([1, 2], np.int32),
                sampling=Sampling(max_tokens=4),
                n=1,
                body=b"{}",
                created_at=0.0,
            )
            spans = (Span(0, 1, str(self.engines.served)),)
            ids, logprobs = np.array([3], np.int32), np.array([-0.5], np.float32)
            generation = Generation(ids, logprobs, FinishReason.STOP, spans)
            receipt = receipts.make(request, 0, generation, "fake", name, 0.0)
            await self.ledger.write(receipts.record, request, [receipt])
            report = Report(name, SCENARIO, (name,), {"score": score}, score, group=names[0])
            await self.ledger.write(reports.accept, report, True, time.time())
        self.dispatcher.notify()
        return names

    async def grade_and_wait(self, scores: tuple[float, ...] = (0.0, 1.0)) -> list[str]:
        names = await self.grade(scores)
        await self.waits()
        return names

    async def chain(self) -> list[Release]:
        """Oldest first."""
        found: list[Release] = await self.ledger.read(releases.chain, SCENARIO)
        return found[::-1]

    async def state(self, name: str) -> tuple[str, str | None]:
        view = await self.ledger.read(reports.view, name)
        return view["state"], view["reason"]

    async def until(self, true: Callable[[], Any]) -> None:
        async with asyncio.timeout(10):
            while not true():
                assert not self.loop.done(), self.loop.exception()
                await asyncio.sleep(0.005)

    async def waits(self) -> None:
        """Until the loop has nothing to do."""
        await self.until(lambda: self.dispatcher.phase == "waiting" and not self.dispatcher._wake.is_set())

    async def trained_once(self, names: list[str]) -> None:
        """Every report in one committed batch, an unbroken chain, and trainer and engine at its head."""
        chain = await self.chain()
        assert [release.parent for release in chain] == [None, *(release.id for release in chain[:-1])]
        members = []
        for release in chain[1:]:
            lineage = await self.ledger.read(releases.lineage, SCENARIO, release.id)
            members += [sample["report_id"] for sample in lineage["samples"]]
        assert sorted(members) == sorted(names)
        assert {await self.state(name) for name in names} == {("trained", None)}
        assert chain[-1].content_id == f"sha256:{self.trainer.state}"
        assert self.engines.served == chain[-1].id
        assert chain[-1].verified_at is not None


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr(reef.dispatcher, "STORE_RETRY_S", 0.01)
    monkeypatch.setattr(reef.dispatcher, "RESTART_RETRY_S", 0.01)
    yield House(tmp_path / "run")


def test_reports_become_releases_in_the_order_reserve_step_publish_commit_load(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        names = await house.grade()
        await house.waits()
        order = [point for point in house.faults.passed if point != "read"]
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
        await house.until(lambda: house.dispatcher.error == "disk full" or point.startswith(("save", "set_check")))
        await house.waits()
        names += await house.grade()  # the second release has a checkpoint
        await house.waits()
        assert house.dispatcher.error is None
        assert house.trainer.num_steps == 2
        await house.trained_once(names)
        assert (await house.chain())[-1].checkpoint is not None
        await house.stop()

    asyncio.run(live())


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
        await house.until(lambda: house.dispatcher.error == "disk full")
        first = house.ledger
        house.ledger = Ledger.open(house.config.ledger_url)  # the next owner, though the first one still runs
        house.faults.at("publish")
        await house.loop
        assert (house.dispatcher.phase, house.dispatcher.paused) == ("stopped", None)
        assert "owned by epoch 2" in str(house.dispatcher.error)
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
        assert "failed twice" in str(house.dispatcher.error)
        await house.trained_once(await house.grade_and_wait())
        assert house.dispatcher.error is None
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
        assert house.dispatcher.error is None
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
        house.faults.at("restart", *[WorkersLostError("no room")] * reef.dispatcher.MAX_RESTARTS)
        names = await house.grade()
        with pytest.raises(WorkersLostError, match="no room"):
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
        assert house.dispatcher.paused == "r2 differs from its probe"
        waiting = await house.grade_and_wait()
        assert {await house.state(name) for name in waiting} == {("pending", None)}
        house.dispatcher.resume()
        await house.waits()
        assert house.dispatcher.error is None
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
