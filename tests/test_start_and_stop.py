"""Ctrl-C at any moment, and a start-up that fails: the exit status, the words, and nothing left running."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GROUPS_OF_TWO = ("--recipe.config.group-size", "2", "--recipe.config.batch-size", "2")
NEVER = ("Traceback", "restarting")
STOPPING = "stopping after the work in hand"
SMALL_DISK_BYTES = 8 * 2**20  # room for five releases of the starter


@pytest.fixture
def service(make_service: Callable[..., Any], request: pytest.FixtureRequest) -> Iterator[Any]:
    made = make_service(*getattr(request, "param", ()))
    yield made
    made.end()


@pytest.fixture
def on_small_disk(make_service: Callable[..., Any]) -> Iterator[Any]:
    """A service that keeps little, its releases on a small disk of their own where this user may mount one."""
    keep = ("--storage.keep", "2", "--storage.keep-checkpoints", "1", "--training.checkpoint-every", "2")
    made = make_service("--recipe.scenario", "s", *GROUPS_OF_TWO, *keep)
    releases = made.run_dir / "releases"
    releases.mkdir(parents=True)
    mounted = False
    if os.geteuid() == 0:
        command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "tmpfs", str(releases)]
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield made
    finally:
        made.end()
        if mounted:
            subprocess.run(["umount", "--lazy", str(releases)], check=True)


@contextmanager
def no_room(releases: Path) -> Iterator[str]:
    """Until it is left nothing can be published. What the system says of that."""
    if releases.is_mount():
        filler = releases / "filler"
        with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(64 * 2**10))
        try:
            yield "No space left on device"
        finally:
            filler.unlink()
    else:
        aside = releases.rename(releases.with_name("aside"))
        releases.touch()
        try:
            yield "Not a directory"
        finally:
            releases.unlink()
            aside.rename(releases)


def ctrl_c(service: Any) -> None:
    """What a terminal does: the signal goes to every process of the group."""
    service.processes()
    os.killpg(service.pid, signal.SIGINT)


def all_ended(service: Any) -> bool:
    _, alive = psutil.wait_procs(service.processes(), timeout=60)
    return not alive


def wait_for(true: Callable[[], Any], what: str, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


def starts(service: Any, name: str) -> bool:
    return bool(service.named(name))


def grade(service: Any, group: str) -> None:
    """What one batch takes."""
    answer = service.chat("Start at 9. Add 3.", n=2).json()
    for choice in answer["choices"]:
        graded = {"references": [choice["reef_agent_record_id"]], "score": choice["index"], "group": group}
        assert service.post("/reef/report", graded).status_code == 200


def chain(service: Any) -> list[dict[str, Any]]:
    """Oldest first."""
    releases: list[dict[str, Any]] = service.get("/reef/scenarios/s/releases").json()["releases"]
    return releases[::-1]


def done_with(service: Any, number: int) -> bool:
    """Release `number` is served, stored and pruned after."""
    status = service.status()
    return status["scenario"]["served"].endswith(f"-{number:06d}") and status["training"]["phase"] == "waiting"


def held_in_a_step(service: Any, group: str) -> psutil.Process:
    """The training worker, stopped in a step that goes on once it is resumed."""
    (worker,) = service.named("ray::WorkerActor")
    worker.suspend()
    grade(service, group)
    wait_for(lambda: service.status()["training"]["phase"] == "stepping", "a step")
    return worker


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
    for seconds in (0, 0.4, 0.8, 1.2):
        service.launch()
        maps = Path(f"/proc/{service.pid}/maps")  # Python's own start comes before what Reef imports, and may take long
        wait_for(lambda maps=maps: "pydantic_core" in maps.read_text(), "it imports")
        time.sleep(seconds)
        ctrl_c(service)
        assert service.wait() in (0, 130, -signal.SIGINT)
        assert "Traceback" not in service.log_tail(200)


@pytest.mark.parametrize("service", [("--recipe.scenario", "s", *GROUPS_OF_TWO)], indirect=True)
def test_a_head_that_no_engine_agrees_with_leaves_the_release_before_it_serving(service: Any) -> None:
    service.start()
    grade(service, "g")
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
    refused = service.post("/reef/scenarios/s/update", {})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "paused")
    promoted = service.post("/reef/scenarios/s/promote", {"release_id": release.name})
    assert (promoted.status_code, promoted.json()["state"]) == (201, "released")
    assert service.status()["scenario"]["served"] == release.name
    assert service.status()["training"]["paused"] is None
    assert service.stop() == 0


@pytest.mark.parametrize("service", [("--recipe.scenario", "s", *GROUPS_OF_TWO)], indirect=True)
def test_ctrl_c_in_a_step_lets_it_end_with_a_checkpoint_and_a_second_one_leaves_at_once(service: Any) -> None:
    log = service.run_dir / "logs" / "reef.log"
    service.start()
    worker = held_in_a_step(service, "first")
    ctrl_c(service)
    wait_for(lambda: STOPPING in service.log_tail(200), "it has seen the Ctrl-C")
    assert service.returncode is None
    worker.resume()
    assert service.wait() == 0
    assert all_ended(service)
    assert not [word for word in NEVER if word in service.log_tail(200)]

    service.start()
    base, release = chain(service)
    assert (release["step"], release["parent_release_id"]) == (1, base["release_id"])
    assert Path(release["checkpoint"], "COMPLETE").is_file()
    assert service.status()["scenario"]["served"] == release["release_id"]
    assert "replaying" not in log.read_text()

    held_in_a_step(service, "second")
    os.kill(service.pid, signal.SIGTERM)
    wait_for(lambda: service.log_tail(200).count(STOPPING) == 2, "it has seen the signal")
    time.sleep(4)  # Ray's own handler, left to itself, lets the process abort 3 s after a SIGTERM
    assert service.returncode is None
    assert "SIGTERM received" not in service.log_tail(200)
    ctrl_c(service)
    assert service.wait(60) == 130
    assert all_ended(service)
    assert not [word for word in NEVER if word in service.log_tail(200)]


def test_only_what_is_kept_is_on_disk_and_a_full_one_delays_a_release_but_repeats_no_step(on_small_disk: Any) -> None:
    service = on_small_disk
    releases, checkpoints = service.run_dir / "releases", service.run_dir / "checkpoints"
    service.start()
    for number in range(1, 6):
        grade(service, f"group-{number}")
        wait_for(lambda number=number: done_with(service, number), f"release {number}")
    before = chain(service)
    ids = [release["release_id"] for release in before]
    assert [release["number"] for release in before if release["restorable"]] == [0, 4, 5]
    assert [release["number"] for release in before if release["checkpoint"]] == [4]
    assert sorted(path.name for path in releases.iterdir()) == ids[4:]
    assert sorted(path.name for path in checkpoints.iterdir()) == ids[4:5]
    assert service.stop() == 0
    assert (service.run_dir / "logs" / "engine-0.log").read_text().count("Finished server process") == 1  # in its turn
    assert sorted(path.name for path in checkpoints.iterdir()) == ids[5:]

    service.start()
    assert [release["content_id"] for release in chain(service)] == [release["content_id"] for release in before]
    assert service.status()["scenario"]["served"] == ids[5]
    with no_room(releases) as reason:
        grade(service, "group-6")
        wait_for(lambda: service.status()["training"]["error"], "a release is refused")
        training = service.status()["training"]
        assert reason in training["error"]
        assert (training["phase"], training["attempt"], training["batch_error"]) == ("stepping", 1, None)
        assert service.chat().headers["x-reef-release-id"] == ids[5]
        assert len(chain(service)) == 6
    wait_for(lambda: done_with(service, 6), "release 6")
    assert service.status()["training"]["error"] is None
    last = chain(service)[-1]
    assert (last["number"], last["step"], last["batch_id"]) == (6, 6, training["batch_id"])
    with sqlite3.connect(f"file:{service.run_dir / 'ledger.db'}?mode=ro", uri=True) as connection:
        (attempt,) = connection.execute("select attempt from batches where id = ?", [last["batch_id"]]).fetchone()
    connection.close()
    assert attempt == 1
    assert sorted(path.name for path in releases.iterdir()) == [ids[5], last["release_id"]]
    assert [path.name for path in checkpoints.iterdir()] == [last["release_id"]]
    assert service.stop() == 0
    assert not [word for word in NEVER if word in service.log_tail(200)]
