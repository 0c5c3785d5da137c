"""Steps of a critic alone, as the loop makes links of them: a real ledger, real directories, a fake trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import reef.chain
import reef.progress
from reef.config import load
from reef.errors import ConfigError, StepFailedError
from reef.ledger.audit import audit
from reef.types import Batch, Operation, StepResult
from tests.house import SETTINGS, Crash, FakeTrainer, House

SAO = (
    *("--recipe.implementation", "sao", "--recipe.config.batch-size", "2"),
    *("--recipe.config.critic-warmup-steps", "2", "--training.checkpoint-every", "2"),
)
CRASHES = ("reserve", "step", "stepped", "publish", "published", "commit", "committed", "copy", "saved")


class CriticTrainer(FakeTrainer):
    """Its first two batches are its critic's alone: they are in its state, and not in the weights it publishes."""

    warmup = 2

    def step(self, batch: Batch) -> StepResult:
        result = super().step(batch)
        trained = len(self.state) > self.warmup
        return StepResult(result.step, result.metrics, result.seconds, trained_policy=trained)

    def content(self) -> str:
        return f"sha256:{self.state[self.warmup :]}"


class Warm(House):
    """A house of `sao` whose trainer has a critic."""

    def __init__(self, directory: Path, *flags: str, settings: tuple[str, ...] = SAO) -> None:
        super().__init__(directory, *flags, settings=settings)
        self.trainer_class = CriticTrainer


@pytest.fixture
def warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Warm]:
    monkeypatch.setattr(reef.progress, "STORE_RETRY_S", 0.01)
    monkeypatch.setattr(reef.chain, "RESTART_RETRY_S", 0.01)
    yield Warm(tmp_path / "run")


async def findings(house: House) -> list[str]:
    """What `reef doctor --ledger` would find."""
    return [finding.what for finding in await house.ledger.read(lambda connection: list(audit(connection)))]


def test_a_step_of_the_critic_alone_is_a_link_with_its_parents_content_and_loads_nothing(warm: Warm) -> None:
    async def live() -> None:
        await warm.open()
        warm.run()
        names = [name for _ in range(3) for name in await warm.grade_and_wait()]
        base, first, second, third = await warm.chain()
        assert [link.operation for link in (first, second, third)] == ["critic-only", "critic-only", "train"]
        assert {base.content_id, first.content_id, second.content_id} == {"sha256:[]"}
        assert [link.policy_version for link in (base, first, second, third)] == [0, 0, 0, 1]
        assert [link.step for link in (base, first, second, third)] == [0, 1, 2, 3]
        assert warm.engines.loads == [third.id]
        assert warm.engines.also_called == [first.id, second.id]  # who asks for these is answered
        assert all(link.verified_at is not None for link in (first, second, third))
        assert {await warm.state(name) for name in names} == {("trained", None)}
        assert await findings(warm) == []
        await warm.stop()

    asyncio.run(live())


def test_what_engines_hold_stays_on_disk_while_links_of_the_critic_follow(tmp_path: Path) -> None:
    house = Warm(tmp_path / "run", "--storage.keep", "1", "--training.checkpoint-every", "100")

    async def live() -> None:
        house.trainer_class = type("Late", (CriticTrainer,), {"warmup": 0})
        await house.open()
        house.run()
        await house.grade_and_wait()
        held = (await house.chain())[-1]
        house.trainer.warmup = 100  # from here on the critic alone learns; what is published stays as it is
        house.trainer.content = lambda: held.content_id  # type: ignore[attr-defined]
        for _ in range(3):
            await house.grade_and_wait()
        assert house.engines.loads == [held.id]
        assert (house.storage.releases_dir / held.id).is_dir()  # a replica that restarts needs it
        assert (await house.chain())[1].restorable
        await house.stop()

    asyncio.run(live())


@pytest.mark.slow  # many
@pytest.mark.parametrize("point", CRASHES)
def test_a_crash_anywhere_in_the_warm_up_loses_no_report_and_trains_none_twice(tmp_path: Path, point: str) -> None:
    house = Warm(tmp_path / "run")

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
        chain = await house.chain()
        assert [link.operation for link in chain[1:]] == ["critic-only", "critic-only", "train"]
        assert house.trainer.state == [1, 2, 3]
        assert {await house.state(name) for name in names} == {("trained", None)}
        assert house.engines.served == chain[-1].id
        assert await findings(house) == []
        await house.stop()

    asyncio.run(live())


def test_back_to_a_link_of_the_critic_and_on_from_there(warm: Warm) -> None:
    async def live() -> None:
        await warm.open()
        warm.run()
        for _ in range(3):
            await warm.grade_and_wait()
        first = (await warm.chain())[1]
        back = await warm.dispatcher.rollback(first.id)
        assert (back.content_id, back.step, back.policy_version) == (first.content_id, 1, 0)
        assert warm.trainer.state == [1]
        await warm.grade_and_wait()
        head = (await warm.chain())[-1]
        assert (head.operation, head.step, head.content_id) == (Operation.CRITIC_ONLY, 2, first.content_id)
        assert await findings(warm) == []
        await warm.stop()

    asyncio.run(live())


def test_a_gate_does_not_hold_what_changes_no_weight(tmp_path: Path) -> None:
    house = Warm(tmp_path / "run", "--evaluation.gate", "{accuracy: {min: 0.5}}")

    async def live() -> None:
        await house.open()
        house.run()
        await house.grade_and_wait()
        await house.grade_and_wait()
        assert [link.state for link in (await house.chain())[1:]] == ["released", "released"]
        await house.grade()
        await house.until(lambda: house.dispatcher.gate.held is not None)
        assert (await house.chain())[-1].state == "pending"
        await house.stop()

    asyncio.run(live())


def test_a_step_that_failed_after_the_critic_had_moved_is_taken_back_before_the_next(tmp_path: Path) -> None:
    warm = Warm(tmp_path / "run", "--training.checkpoint-every", "1")  # else the way back would be a step that fails
    moved = StepFailedError("policy: the gradient norm is nan")
    moved.moved = True

    async def live() -> None:
        await warm.open()
        warm.run()
        await warm.grade_and_wait()
        warm.faults.at("stepped", moved, moved)  # the fake's state has the batch by then
        lost = await warm.grade()
        await warm.waits()
        assert {await warm.state(name) for name in lost} == {("dropped", "step_failed")}
        assert warm.trainer.state == [1]
        await warm.grade_and_wait()
        assert warm.trainer.state == [1, 3]
        assert len(await warm.chain()) == 3
        await warm.stop()

    asyncio.run(live())


def test_a_batch_that_was_reserved_for_a_critic_comes_again_where_there_is_none(tmp_path: Path) -> None:
    house = Warm(tmp_path / "run")

    async def live() -> None:
        await house.open()
        house.run()
        house.faults.at("step", Crash())
        names = await house.grade()
        await house.crash()
        without = ("--recipe.config.group-size", "2", "--recipe.config.batch-size", "2")
        other = House(tmp_path / "other", settings=without)
        other.config = other.config.model_copy(update={"reef": house.config.reef})
        other.base = house.base
        await other.open()
        other.run()
        await other.waits()
        await other.trained_once(names)
        assert [link.operation for link in await other.chain()] == ["base", "train"]
        await other.stop()

    asyncio.run(live())


def test_a_chain_with_a_critic_that_must_be_trained_again_names_the_way_to_another_method(tmp_path: Path) -> None:
    house = Warm(tmp_path / "run")

    async def live() -> None:
        await house.open()
        house.run()
        await house.grade_and_wait()
        house.faults.at("reserve", Crash())
        await house.grade()
        await house.crash()
        house.config = load(None, ["--reef.run-dir", str(tmp_path / "run"), *SETTINGS], {})
        with pytest.raises(ConfigError) as refused:
            await house.open()
        assert "was trained by sao with a model beside the policy" in str(refused.value)
        assert "start with sao once and stop it in order, then with grpo" in str(refused.value)
        house.ledger.close()

    asyncio.run(live())
