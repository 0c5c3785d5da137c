"""Releases that are held: what lets them be served, and what does not."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import reef.progress
from reef.config import Threshold
from reef.errors import ConflictError, LoadFailedError
from reef.evaluation import Figure, compare, judge, read_figures
from reef.ledger import releases
from reef.types import Operation, ReleaseState
from tests.house import SCENARIO, House

GATE = ("--evaluation.gate", "{accuracy: {min: 0.5}, invalid-rate: {max: 0.1}}")


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr(reef.progress, "STORE_RETRY_S", 0.01)
    yield House(tmp_path / "run", *GATE)


async def held(house: House) -> Any:
    """The release that is held now."""
    await house.until(lambda: house.dispatcher.progress.phase == "holding" and house.dispatcher.gate.held is not None)
    return house.dispatcher.gate.held


async def post(house: House, release_id: str, **result: Any) -> None:
    """What POST .../evaluations does."""
    await house.ledger.write(releases.add_evaluation, SCENARIO, release_id, result, 1.0)
    house.dispatcher.notify()


def test_a_release_is_held_until_every_threshold_is_passed_and_training_waits(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        base = house.engines.served
        names = await house.grade()
        release = await held(house)
        assert (await house.chain())[-1].state is ReleaseState.PENDING
        assert (house.engines.served, house.engines.candidate) == (base, release.id)
        names += await house.grade()
        await post(house, release.id, accuracy=0.75, low=0.55, high=0.9)
        await house.until(lambda: house.dispatcher.gate.verdict.missing == ("invalid-rate",))
        assert {await house.state(name) for name in names[2:]} == {("pending", None)}
        await post(house, release.id, metrics={"invalid_rate": 0.0})
        await house.until(lambda: house.engines.served == release.id)
        second = await held(house)  # the reports that waited
        assert second.number == 2
        assert (await house.chain())[1].reason == "passed the gate"
        await post(house, second.id, accuracy=0.9, invalid_rate=0)
        await house.until(lambda: house.engines.served == second.id)
        await house.waits()
        assert house.engines.candidate is None
        await house.trained_once(names)
        await house.stop()

    asyncio.run(live())


def test_a_release_that_fails_is_rejected_and_weights_trainer_and_queue_go_back(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        base = (await house.chain())[0]
        names = await house.grade()
        release = await held(house)
        await post(house, release.id, accuracy=0.75, low=0.45, high=0.9)
        await house.until(lambda: house.dispatcher.gate.held is None)
        await house.waits()
        _, rejected, back = await house.chain()
        assert rejected.state is ReleaseState.REJECTED
        assert rejected.reason == "failed the gate: accuracy is 0.75 [0.45, 0.9], at least 0.5 is needed"
        assert (back.operation, back.source, back.reason) == (Operation.ROLLBACK, base.id, rejected.reason)
        assert (house.trainer.state, house.engines.served, house.engines.candidate) == ([], back.id, None)
        assert {await house.state(name) for name in names} == {("trained", None)}
        with pytest.raises(ConflictError, match="was rejected: failed the gate"):
            await house.dispatcher.promote(rejected.id)
        forced = await house.dispatcher.promote(rejected.id, force=True)
        assert (forced.source, forced.state) == (rejected.id, ReleaseState.RELEASED)
        assert house.trainer.state == [1]
        await house.stop()

    asyncio.run(live())


def test_a_held_release_is_held_over_a_restart_and_promoted_or_rolled_back_by_hand(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        names = await house.grade()
        first = await held(house)
        await house.stop()
        await house.open()
        assert house.engines.served == f"{house.ledger.run_id}-000000"
        house.run()
        assert (await held(house)).id == first.id
        promoted = await house.dispatcher.promote(first.id)
        assert (promoted.id, promoted.state, promoted.reason) == (first.id, ReleaseState.RELEASED, "promoted by hand")
        assert house.engines.served == first.id
        names += await house.grade()
        second = await held(house)
        back = await house.dispatcher.rollback(first.id)
        chain = await house.chain()
        assert (chain[2].state, chain[2].reason) == (
            ReleaseState.REJECTED,
            f"rollback to {first.id} while it was held",
        )
        assert chain[2].id == second.id
        assert (house.engines.served, house.engines.candidate) == (back.id, None)
        assert house.trainer.state == [1]
        await house.stop()

    asyncio.run(live())


def test_a_candidate_that_no_engine_loads_is_quarantined(house: House) -> None:
    async def live() -> None:
        await house.open()
        house.run()
        base = house.engines.served
        house.faults.at("start_candidate", LoadFailedError("it differs"))
        await house.grade_and_wait()
        head = (await house.chain())[-1]
        assert (head.state, head.reason, house.engines.served) == (ReleaseState.QUARANTINED, "it differs", base)
        assert house.dispatcher.progress.paused == f"release {head.id} is quarantined: it differs"
        await house.stop()

    asyncio.run(live())


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        ("print('working'); print('{\"accuracy\": 0.9, \"invalid_rate\": 0.01}')", "released"),
        ("print('{\"accuracy\": 0.1}')", "rejected"),
        ("import os, sys; sys.exit('no ' + os.environ['REEF_RELEASE'] + os.environ['REEF_API_KEY'])", "pending"),
    ],
)
def test_the_command_measures_what_is_held(tmp_path: Path, script: str, outcome: str) -> None:
    house = House(tmp_path / "run", *GATE, "--evaluation.command", json.dumps([sys.executable, "-c", script]))

    async def live() -> None:
        await house.open()
        house.dispatcher.gate.url, house.dispatcher.gate.key = "http://127.0.0.1:1", "the-key-of-the-command"
        house.run()
        await house.grade()
        if outcome == "pending":
            release = await held(house)
            await house.until(lambda: house.dispatcher.gate.error is not None)
            expected = f"{release.id} stays held: evaluation.command ended with 1: no {release.id}**********"
            assert house.dispatcher.gate.error == expected
        else:
            await house.until(lambda: house.dispatcher.progress.phase == "waiting" and len(house.engines.loads) == 1)
        assert (await house.chain())[1].state == outcome
        await house.stop()

    asyncio.run(live())


def test_a_canary_is_compared_with_what_is_served_once_both_have_reports_enough(tmp_path: Path) -> None:
    flags = ("--evaluation.canary.share", "0.5", "--evaluation.canary.min-reports", "4")
    house = House(tmp_path / "run", "--evaluation.gate", "{canary: {min: -0.9}}", *flags)

    async def live() -> None:
        await house.open()
        house.run()
        await house.grade()
        release = await held(house)
        assert house.engines.share == 0.5
        await house.grade((0.0, 1.0))
        await house.grade((0.0, 1.0))
        assert (await held(house)).id == release.id
        await house.grade((1.0, 1.0), release=release.id)  # what the candidate answers
        await house.grade((1.0, 0.0), release=release.id)
        await house.until(lambda: release.id in house.engines.loads)
        (result,) = (await house.ledger.read(releases.evaluations_of, [release.id]))[release.id]
        assert result["reports"] == {"candidate": 4, "served": 4}
        assert result["metrics"]["canary"]["value"] == pytest.approx(0.25)
        await house.stop()

    asyncio.run(live())


def test_figures_are_numbers_and_intervals_and_the_last_one_counts() -> None:
    results = [
        {"accuracy": 0.5, "low": 0.4, "high": 0.6, "coverage": True, "note": "x"},
        {"metrics": {"retention": {"value": 0.9, "low": 0.8}, "invalid_rate": 0.5}},
        {"invalid-rate": 0.25, "length": float("nan")},
    ]
    assert read_figures(results) == {
        "accuracy": Figure(0.5, 0.4, 0.6),
        "low": Figure(0.4, 0.4, 0.4),
        "high": Figure(0.6, 0.6, 0.6),
        "retention": Figure(0.9, 0.8, 0.9),
        "invalid-rate": Figure(0.25, 0.25, 0.25),
    }


def test_a_gate_compares_the_near_end_of_an_interval() -> None:
    gate = {"accuracy": Threshold(min=0.45), "response-length": Threshold(max=100), "retention": Threshold(min=0.9)}
    verdict = judge(gate, [{"metrics": {"accuracy": {"value": 0.5, "low": 0.46}, "response_length": 100}}])
    assert (verdict.failed, verdict.missing, verdict.passed) == ((), ("retention",), False)
    verdict = judge(gate, [{"accuracy": 0.44, "response_length": 101, "retention": 0.9}])
    assert verdict.failed == (
        "accuracy is 0.44, at least 0.45 is needed",
        "response-length is 101, at most 100 is allowed",
    )
    assert judge(gate, [{"accuracy": 0.45, "response_length": 99, "retention": 0.95}]).passed


def test_a_comparison_is_paired_by_prompt_where_it_can_be() -> None:
    candidate = [("a", 1.0), ("a", 0.0), ("b", 1.0), ("c", 1.0)]
    served = [("a", 0.0), ("b", 0.5), ("d", 0.0)]
    paired = compare(candidate, served)
    # a: 0.5 - 0 = 0.5, b: 1 - 0.5 = 0.5: no spread.
    assert paired["metrics"]["canary"] == {"value": 0.5, "low": 0.5, "high": 0.5}
    assert paired["paired_prompts"] == 2
    unpaired = compare([("a", 1.0), ("b", 0.0)], [("c", 1.0), ("d", 0.0)])
    # variances 0.5 / 2 on each side: 1.96 * sqrt(0.5)
    assert unpaired["metrics"]["canary"]["value"] == 0.0
    assert unpaired["metrics"]["canary"]["high"] == pytest.approx(1.385903824, abs=1e-9)
    assert unpaired["paired_prompts"] == 0
