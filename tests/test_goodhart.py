"""A Goodhart drill with the whole house: a reward that pays for length makes the model worse, and the alarm says so."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from recipes.arithmetic.goodhart import Row, drill
from reef import cli

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RELEASES, EVERY, HELD_OUT = 24, 12, 200
DROP, RISE = 0.1, 0.25
ALARM = {"metric": "accuracy", "drop": DROP, "reward-rise": RISE, "window": 40}
SETTINGS = ("--training.options.lr", "3e-4", "--observability.alarms", json.dumps([ALARM]))


@dataclass(frozen=True, slots=True)
class Drill:
    """What the drill measured (before, in the middle, at the end), and the service it was made with, still up."""

    rows: list[Row]
    service: Any

    def chain(self) -> list[dict[str, Any]]:
        """Oldest first."""
        found: list[dict[str, Any]] = self.service.get("/reef/scenarios/arithmetic/releases").json()["releases"]
        return found[::-1]

    def says(self, capsys: pytest.CaptureFixture[str], *words: str) -> str:
        """What a command prints."""
        capsys.readouterr()
        at = ("--url", self.service.url, "--reef.run-dir", str(self.service.run_dir))
        assert cli.main([*words, *at]) == 0
        return capsys.readouterr().out


@pytest.fixture(scope="module")
def drilled(make_service: Callable[..., Any]) -> Iterator[Drill]:
    """Real rollouts, a trainer that believes what it is told, and held-out results that it never sees."""
    service = make_service(*SETTINGS).start()
    rows = asyncio.run(drill(service.url, None, bonus=1.0, releases=RELEASES, every=EVERY, held_out=HELD_OUT))
    yield Drill(rows, service)
    service.end()


def test_the_reward_rises_while_held_out_accuracy_falls(drilled: Drill) -> None:
    before, middle, after = drilled.rows
    assert max(before.accuracy, middle.accuracy) - after.accuracy > 0.2
    assert min(before.low, middle.low) > after.high
    assert middle.reward is not None and after.reward is not None and middle.length is not None
    assert after.reward > middle.reward + RISE
    assert after.length is not None and after.length > middle.length
    assert after.held_out_length > before.held_out_length


def test_the_metrics_of_the_releases_show_what_pays(drilled: Drill) -> None:
    trained = [release["metrics"] for release in drilled.chain() if release["operation"] == "train"]
    assert len(trained) >= RELEASES
    for name in ("reward_mean", "response_length_mean"):
        values = [metrics[name] for metrics in trained]
        quarter = len(values) // 4
        assert sum(values[-quarter:]) > sum(values[:quarter]), name


def test_the_alarm_marks_the_release_that_is_worse_and_no_other(drilled: Drill) -> None:
    marked = {release["release_id"]: release["alarms"] for release in drilled.chain() if release["alarms"]}
    before, _, after = drilled.rows
    assert after.release in marked
    assert before.release not in marked
    assert marked.keys() <= {row.release for row in drilled.rows}
    (alarm,) = marked[after.release]
    assert alarm["metric"] == "accuracy"
    assert DROP < alarm["least_drop"] < alarm["drop"]
    assert alarm["reward_rise"] >= RISE
    assert after.alarms == (alarm["message"],)


def test_it_is_seen_in_status_in_the_commands_in_the_counter_and_once_in_the_log(
    drilled: Drill, capsys: pytest.CaptureFixture[str]
) -> None:
    after = drilled.rows[-1]
    (message,) = after.alarms
    (shown,) = drilled.service.status()["scenario"]["alarms"]
    assert (shown["release_id"], shown["message"]) == (after.release, message)
    assert f"alarm     {after.release}: {message}" in drilled.says(capsys, "status")
    table = drilled.says(capsys, "releases", "--limit", "100").splitlines()
    (line,) = [line for line in table if after.release in line]
    assert line.endswith(f"  alarm: {message}")
    told = drilled.says(capsys, "why", after.release)
    assert f"release {after.release} made by train of batch bat_" in told
    assert f"alarm: {message}" in told
    assert f'"accuracy": {after.accuracy}' in told

    rung = sum(bool(row.alarms) for row in drilled.rows)
    assert f'reef_alarms_total{{metric="accuracy"}} {rung}.0' in drilled.service.get("/metrics").text
    again = {"accuracy": after.accuracy, "low": after.low, "high": after.high}
    answer = drilled.service.post(f"/reef/scenarios/arithmetic/releases/{after.release}/evaluations", again)
    assert [alarm["message"] for alarm in answer.json()["alarms"]] == [message]
    log = (drilled.service.run_dir / "logs" / "reef.log").read_text()
    assert len(re.findall(rf"WARNING reef alarm on release {after.release}: ", log)) == 1


def test_it_ends_no_training(drilled: Drill) -> None:
    """That is what a gate is for."""
    training = drilled.service.status()["training"]
    assert (training["phase"] in ("stopped", "holding"), training["paused"], training["error"]) == (False, None, None)
    assert {release["state"] for release in drilled.chain()} == {"released"}
