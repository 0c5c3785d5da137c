"""A whole service on a Ray cluster of two nodes: one is lost in the middle of a step, with all that ran on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ray_nodes import ray_nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GROUPS_OF_TWO = ("--recipe.config.group-size", "2", "--recipe.config.batch-size", "2")
NODES = ("127.0.0.2", "127.0.0.3")


def test_a_node_is_lost_in_a_step_and_every_sample_trains_once(make_service: Callable[..., Any]) -> None:
    with ray_nodes(cpus=0) as nodes:
        for address in NODES:
            nodes.add(address, cpus=3)  # room for two workers and an engine
        service = make_service("--training.ray-address", nodes.address, "--training.layout.data", "2", *GROUPS_OF_TWO)
        service.settings = (*service.settings, "--recipe.scenario", "s")
        try:
            service.start()
            names = grade(service, "first")
            wait_for(lambda: served(service) == 1, "the first release")

            workers = {address: named(nodes.raylet(address), "WorkerActor") for address in NODES}
            (lost,) = (address for address, found in workers.items() if found)
            assert len(workers[lost]) == 2  # packed on one node
            for worker in workers[lost]:
                worker.suspend()
            names += grade(service, "second")
            wait_for(lambda: service.status()["training"]["phase"] == "stepping", "a step")
            nodes.kill(lost)
            for worker in workers[lost]:
                worker.kill()  # one that stands still does not notice that its node is gone

            wait_for(lambda: served(service) == 2, "the second release")
            (left,) = set(NODES) - {lost}
            assert len(named(nodes.raylet(left), "WorkerActor")) == 2
            assert len(named(nodes.raylet(left), "EngineActor")) == 1
            names += grade(service, "third")
            wait_for(lambda: served(service) == 3, "the third release")
            assert trained(service) == sorted(names)
            log = (service.run_dir / "logs" / "reef.log").read_text()
            assert f"on node {lost} died" in log or f"on node {lost} failed" in log
            assert not (service.run_dir / "processes.json").exists() or processes(service.run_dir) == "[]"

            assert service.stop() == 0
            wait_for(lambda: not actors(nodes.raylet(left)), "the end of the actors")
            assert nodes.raylet(left).is_running()
        finally:
            service.end()


def grade(service: Any, group: str) -> list[str]:
    """What one batch takes; the ids of its reports."""
    answer = service.chat("Start at 9. Add 3.", n=2, headers={"x-reef-scenario": "s"}).json()
    made = []
    for choice in answer["choices"]:
        graded = {"references": [choice["reef_agent_record_id"]], "score": choice["index"], "group": group}
        response = service.post("/reef/report", graded)
        assert response.status_code == 200, response.text
        made.append(response.json()["agent_record_id"])
    return made


def served(service: Any) -> int:
    """The number of the release that is served and that every step before has led to."""
    status = service.status()
    release = status["scenario"]["served"]
    return int(release.rpartition("-")[2]) if status["training"]["phase"] == "waiting" else -1


def trained(service: Any) -> list[str]:
    """The reports that releases were made of, as often as they were trained on."""
    found: list[str] = []
    for release in service.get("/reef/scenarios/s/releases").json()["releases"]:
        if release["operation"] == "train":
            lineage = service.get(f"/reef/scenarios/s/releases/{release['release_id']}/lineage").json()
            found += [sample["report_id"] for sample in lineage["samples"]]
    return sorted(found)


def named(raylet: psutil.Process, name: str) -> list[psutil.Process]:
    found = []
    for process in raylet.children():
        with suppress(psutil.NoSuchProcess):  # it ends meanwhile
            if name in " ".join(process.cmdline()):
                found.append(process)
    return found


def actors(raylet: psutil.Process) -> list[psutil.Process]:
    return named(raylet, "WorkerActor") + named(raylet, "EngineActor")


def processes(run_dir: Path) -> str:
    return (run_dir / "processes.json").read_text()


def wait_for(true: Callable[[], Any], what: str, timeout_s: float = 150) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)
