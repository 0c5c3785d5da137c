"""Alarms: what rings one, what does not, and where it is seen."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reef.alarms import Link, Mark, judge
from reef.config import AlarmSection, load
from reef.errors import ConfigError
from reef.types import Batch, ReleaseState, StepResult
from tests.house import FakeTrainer, House

ALARM = AlarmSection(metric="accuracy", drop=0.1)


def path(*links: tuple[float | None, Any]) -> list[Link]:
    """Releases r0, r1, ... of (reward, accuracy); an accuracy is a number, or a whole result, or None: not measured."""
    made = []
    for step, (reward, result) in enumerate(links):
        results = [] if result is None else [result if isinstance(result, dict) else {"accuracy": result}]
        made.append(Link(f"r{step}", step, reward, results))
    return made


def rings(found: list[Link], **settings: Any) -> Mark | None:
    """What one alarm on accuracy, down by more than 0.1, says."""
    marks = judge([ALARM.model_copy(update=settings)], found)
    return marks[0] if marks else None


# --- the arithmetic ---------------------------------------------------------------------------------------------------


def test_it_rings_where_the_metric_falls_and_the_reward_rises() -> None:
    mark = rings(path((None, 0.5), (1.0, None), (2.0, 0.25)))
    assert mark == Mark("accuracy", "r0", 0.25, 0.25, 1.0, mark.message if mark else "")
    assert mark is not None
    assert mark.message == (
        "accuracy fell by 0.25 (95%: by 0.25 at least) since r0, 2 steps before, while the reward rose by 1"
    )


@pytest.mark.parametrize(
    ("links", "settings"),
    [
        ([(None, 0.5), (1.0, None), (2.0, 0.75)], {}),  # it rose
        ([(None, 0.5), (1.0, None), (2.0, 0.40625)], {}),  # it fell by less than 0.1
        ([(None, 0.5), (2.0, None), (1.0, 0.25)], {}),  # the reward fell too: a bad run, but no wrong reward
        ([(None, 0.5), (1.0, None), (2.0, 0.25)], {"reward_rise": 1.5}),
        ([(None, 0.5), (1.0, None), (2.0, 0.25)], {"window": 1}),
        ([(None, 0.5), (2.0, 0.25)], {}),  # one reward: whether it rose nobody knows
        ([(None, 0.5), (None, None), (None, 0.25)], {}),
        ([(None, None), (1.0, None), (2.0, 0.25)], {}),  # nothing to compare with
        ([(None, 0.5), (1.0, None), (2.0, None)], {}),  # not measured
        ([(None, {"loss": 0.5}), (1.0, None), (2.0, {"loss": 0.25})], {}),
    ],
)
def test_it_rings_in_no_other_case(links: list[Any], settings: dict[str, Any]) -> None:
    assert rings(path(*links), **settings) is None


def test_both_limits_are_as_they_are_written() -> None:
    links = path((None, 0.75), (1.0, None), (2.0, 0.5))
    assert rings(links, drop=0.25) is None  # more than
    assert rings(links, drop=0.249) is not None
    assert rings(links, reward_rise=1.0) is not None  # at least
    assert rings(links, reward_rise=1.001) is None
    assert rings(links, window=2) is not None


def test_the_mark_names_the_release_since_which_it_fell_most() -> None:
    mark = rings(path((None, 0.5), (1.0, 0.875), (2.0, 0.75), (3.0, 0.25)))
    assert mark is not None
    assert (mark.since, mark.drop, mark.reward_rise) == ("r1", 0.625, 1.5)  # (2 + 3) / 2 - 1


def test_the_reward_rise_is_the_later_halfs_mean_minus_the_earlier_halfs() -> None:
    mark = rings(path((1.0, 0.5), (3.0, None), (None, None), (4.0, None), (8.0, 0.25)))
    assert mark is not None
    assert mark.reward_rise == 4.0  # (4 + 8) / 2 - (1 + 3) / 2


def test_a_metric_is_found_however_its_name_is_written_and_the_last_result_counts() -> None:
    earlier, now = path((None, {"pass_rate": 0.9}), (1.0, None), (2.0, {"metrics": {"pass-rate": 0.25}}))[::2]
    assert rings([earlier, Link("x", 1, 1.0, []), now], metric="pass-rate") is not None
    again = Link("r2", 2, 2.0, [*now.results, {"pass_rate": 0.9}])
    assert rings([earlier, Link("x", 1, 1.0, []), again], metric="pass_rate") is None


def test_the_nearest_drop_is_newcombes_where_results_have_intervals() -> None:
    """56/70 against 48/80: Newcombe (1998), table II, method 10, gives 0.0524 to 0.3339 for the difference of 0.2."""
    before, now = ({"accuracy": right / size, "n": size} for right, size in ((56, 70), (48, 80)))
    mark = rings(path((None, before), (1.0, None), (2.0, now)), drop=0)
    assert mark is not None
    assert mark.drop == pytest.approx(0.2)
    assert mark.least_drop == pytest.approx(0.0524, abs=5e-5)


def test_posted_intervals_count_as_those_from_a_number_of_problems() -> None:
    from reef_harness import wilson

    results = []
    for right, size in ((56, 70), (48, 80)):
        low, high = wilson(right, size)
        results.append({"accuracy": right / size, "low": low, "high": high, "graded": size})
    mark = rings(path((None, results[0]), (1.0, None), (2.0, results[1])), drop=0)
    assert mark is not None
    assert mark.least_drop == pytest.approx(0.0524, abs=5e-5)


@pytest.mark.parametrize("size", [0, -5, True, "70", math.nan, None])
def test_a_number_of_problems_that_is_none_is_not_used(size: Any) -> None:
    mark = rings(path((None, {"accuracy": 0.8, "n": size}), (1.0, None), (2.0, {"accuracy": 0.6, "n": size})))
    assert mark is not None
    assert mark.least_drop == mark.drop


def test_values_at_the_ends_of_float64_ring_nothing_and_break_nothing() -> None:
    huge = {"accuracy": {"value": 1e308, "low": -1e308, "high": 1e308}}
    assert rings(path((1e308, huge), (-1e308, None), (1e308, {"accuracy": -1e308}))) is None
    assert rings(path((-1e308, 0.5), (1e308, None), (1e308, 0.1))) is not None


@pytest.mark.parametrize(("drop", "most"), [(0.0, 0.04), (0.05, 0.005)])
def test_noise_alone_rings_seldom(drop: float, most: float) -> None:
    """The same accuracy of 0.6 all the time, measured on 200 problems every release, and a reward that rises."""
    draws = np.random.default_rng(0)
    rung = 0
    for _ in range(1000):
        shares = draws.binomial(200, 0.6, size=21) / 200
        links = path(*((float(step), {"accuracy": float(share), "n": 200}) for step, share in enumerate(shares)))
        rung += rings(links, drop=drop) is not None
    assert rung / 1000 < most


def test_a_true_fall_is_found_on_few_problems() -> None:
    draws = np.random.default_rng(0)
    rung = 0
    for _ in range(200):
        shares = draws.binomial(200, [0.6, 0.5, 0.4, 0.3]) / 200
        links = path(*((float(step), {"accuracy": float(share), "n": 200}) for step, share in enumerate(shares)))
        rung += rings(links) is not None
    assert rung / 200 > 0.95


# --- the settings -----------------------------------------------------------------------------------------------------


def test_alarms_are_read_from_flags_with_their_defaults() -> None:
    (alarm,) = load(None, ["--observability.alarms", "[{metric: accuracy, drop: 0.1}]"], {}).observability.alarms
    assert (alarm.metric, alarm.drop, alarm.reward_rise, alarm.window) == ("accuracy", 0.1, 0.0, 50)
    assert load(None, [], {}).observability.alarms == []


@pytest.mark.parametrize(
    ("alarms", "says"),
    [
        ("[{metric: accuracy}]", "observability.alarms.0.drop: field required"),
        ("[{drop: 0.1}]", "observability.alarms.0.metric: field required"),
        ("[{metric: accuracy, drop: -0.1}]", "observability.alarms.0.drop: input should be greater than or equal to 0"),
        ("[{metric: accuracy, drop: .nan}]", "observability.alarms.0.drop: input should be"),
        ("[{metric: accuracy, drop: 0.1, window: 0}]", "observability.alarms.0.window"),
        ("[{metric: accuracy, drop: 0.1, reward_raise: 1}]", "did you mean observability.alarms.reward-rise?"),
        ("[{metric: a_b, drop: 0.1}, {metric: a-b, drop: 0.2}]", "a-b is there more than once"),
    ],
)
def test_an_alarm_that_cannot_be_is_refused(alarms: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        load(None, ["--observability.alarms", alarms], {})


# --- with a gate ------------------------------------------------------------------------------------------------------


class PaidTrainer(FakeTrainer):
    """Its rewards rise by 1 each step."""

    def step(self, batch: Batch) -> StepResult:
        result = super().step(batch)
        return dataclasses.replace(result, metrics={**result.metrics, "reward_mean": float(result.step)})


def test_what_the_gates_command_measures_rings_too_and_the_release_is_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = """
import os
first = os.environ["REEF_RELEASE"].endswith("-000001")
print('{"accuracy": 0.75}' if first else '{"accuracy": 0.5}')
"""
    house = House(
        tmp_path / "run",
        *("--evaluation.gate", "{accuracy: {min: 0.1}}"),
        *("--evaluation.command", json.dumps([sys.executable, "-c", script])),
        *("--observability.alarms", "[{metric: accuracy, drop: 0.2, reward-rise: 1}]"),
    )
    house.trainer_class = PaidTrainer

    async def live() -> None:
        await house.open()
        house.run()
        for number in (1, 2):
            await house.grade()
            await house.until(lambda number=number: len(house.engines.loads) == number)
        _, first, second = await house.chain()
        assert [release.state for release in (first, second)] == [ReleaseState.RELEASED] * 2
        (message,) = [record.getMessage() for record in caplog.records if "alarm" in record.getMessage()]
        assert message.startswith(f"alarm on release {second.id}: accuracy fell by 0.25 ")
        assert f"since {first.id}, 1 step before, while the reward rose by 1" in message
        await house.stop()

    with caplog.at_level(logging.WARNING, "reef"):
        asyncio.run(live())
