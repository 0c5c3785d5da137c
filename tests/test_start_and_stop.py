"""Ctrl-C at any moment, and a start-up that fails: the exit status, the words, and nothing left running."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GROUPS_OF_TWO = ("--recipe.config.group-size", "2", "--recipe.config.batch-size", "2")
NEVER = ("Traceback", "restarting")


@pytest.fixture
def service(make_service: Callable[..., Any], request: pytest.FixtureRequest) -> Iterator[Any]:
    made = make_service(*getattr(request, "param", ()))
    yield made
    made.end()


def ctrl_c(service: Any) -> None:
    """What a terminal does: the signal goes to every process of the group."""
    service.processes()
    os.killpg(service.pid, signal.SIGINT)


def all_ended(service: Any) -> bool:
    _, alive = psutil.wait_procs(service.processes(), timeout=10)
    return not alive


def wait_for(true: Callable[[], Any], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


def starts(service: Any, name: str) -> bool:
    return any(name in " ".join(process.cmdline()) for process in service.processes() if process.is_running())


@pytest.mark.parametrize("service", [("--training.backend", "none")], indirect=True)
def test_ctrl_c_in_a_terminal_lets_the_requests_in_work_end(service: Any) -> None:
    service.start()
    body = {"prompt": "2+3=", "max_tokens": 480, "ignore_eos": True}
    with service.streaming("/v1/completions", **body) as chunks:
        first = next(chunks)
        ctrl_c(service)
        rest = list(chunks)
    assert first["choices"]
    assert rest[-1]["reef"]["agent_record_id"]
    assert service.wait() == 0
    assert all_ended(service)
    assert not [word for word in NEVER if word in service.log_tail(200)]


@pytest.mark.parametrize("moment", ["gcs_server", "raylet", "WorkerActor"])
def test_ctrl_c_while_it_starts_ends_what_was_started(service: Any, moment: str) -> None:
    service.launch()
    wait_for(lambda: starts(service, moment), f"{moment} runs")
    ctrl_c(service)
    assert service.wait() == 0
    assert all_ended(service)
    assert not [word for word in NEVER if word in service.log_tail(200)]


@pytest.mark.parametrize(
    ("service", "reason"),
    [
        (("--inference.context-length", "999999"), "--context-length 999999 is more than the model's 512"),
        (("--reef.ready-timeout", "0.5"), "engine and trainer are not up after 0.5 s (reef.ready-timeout)"),
    ],
    indirect=["service"],
)
def test_a_start_that_fails_says_why_in_its_own_words_and_leaves_nothing(service: Any, reason: str) -> None:
    service.launch()
    wait_for(lambda: service.processes() or service.returncode is not None, "it starts something")
    while service.returncode is None:
        service.processes()
        time.sleep(0.02)
    assert service.returncode == 1
    assert all_ended(service)
    said = service.log_tail(200)
    assert "failed to start: " in said
    assert reason in said
    assert "Traceback" not in said


def test_ctrl_c_before_it_has_begun_is_no_traceback(service: Any, tmp_path: Path) -> None:
    service.launch()
    time.sleep(1.0)  # it still imports
    ctrl_c(service)
    assert service.wait() in (0, 130)
    assert "Traceback" not in service.log_tail(200)


@pytest.mark.parametrize("service", [("--recipe.scenario", "s", *GROUPS_OF_TWO)], indirect=True)
def test_a_head_that_no_engine_agrees_with_leaves_the_release_before_it_serving(service: Any) -> None:
    service.start()
    answer = service.chat("Start at 9. Add 3.", n=2).json()
    for choice in answer["choices"]:
        graded = {"references": [choice["reef_agent_record_id"]], "score": choice["index"], "group": "g"}
        assert service.post("/reef/report", graded).status_code == 200
    wait_for(lambda: service.status()["scenario"]["step"] == 1, "a release")
    assert service.stop() == 0
    (release,) = (service.run_dir / "releases").iterdir()
    manifest = json.loads((release / "manifest.json").read_text())
    right = manifest["probe"]["logprobs"]
    manifest["probe"]["logprobs"] = [value - 0.5 for value in right]
    (release / "manifest.json").write_text(json.dumps(manifest))

    service.start()
    status = service.status()
    assert (status["scenario"]["head"], status["scenario"]["served"]) == (release.name, f"{release.name[:4]}-000000")
    assert "differ by 0.5" in status["training"]["paused"]
    assert service.chat().headers["x-reef-release-id"] == f"{release.name[:4]}-000000"

    manifest["probe"]["logprobs"] = right
    (release / "manifest.json").write_text(json.dumps(manifest))
    assert service.post("/reef/scenarios/s/update", {}).status_code == 200
    wait_for(lambda: service.status()["scenario"]["served"] == release.name, "the head is loaded")
    assert service.status()["training"]["paused"] is None
    assert service.stop() == 0
