"""The whole house at work: the real service, engine, Ray, Megatron and SQLite; and what a kill leaves of it.

Traffic here is graded by position, so that each group has unlike rewards and each round makes one release.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GROUP, GROUPS = 4, 2
SETTINGS = (
    "--recipe.scenario",
    "house",
    "--recipe.config.group-size",
    str(GROUP),
    "--recipe.config.batch-size",
    str(GROUP * GROUPS),
)
MAX_GAP = 1e-4  # between the engine's and the trainer's log-probabilities, float32
WAIT_S = 120.0
POISON = (1.7e308, 1e308, 1.7e308, 1e308)  # finite each, not their sum: the mean of the group is not
Service = Any  # tests/conftest.py


@pytest.fixture(scope="module")
def shared(make_service: Callable[..., Service]) -> Iterator[Service]:
    """A service that trains: a start takes longer than most tests."""
    service = make_service(*SETTINGS)
    yield service
    service.end()


@pytest.fixture
def house(shared: Service) -> Service:
    """It runs; its chain is what the tests before have made of it."""
    return shared if shared.url and shared.returncode is None else shared.start()


def send_group(service: Service, name: str, members: int = GROUP, **sampling: Any) -> list[str]:
    """One prompt, `members` graded answers; the ids of the reports."""
    answer = service.chat(f"Start at 9. Add {len(name)}. {name}", n=GROUP, **sampling).json()
    reports = []
    for choice in answer["choices"][:members]:
        body = {
            "agent_record_id": f"{name}-{choice['index']}",
            "references": [choice["reef_agent_record_id"]],
            "score": float(choice["index"] % 2),
            "group": name,
        }
        response = service.post("/reef/report", body)
        assert response.status_code == 200, response.text
        reports.append(response.json()["agent_record_id"])
    return reports


def send_round(service: Service, name: str, **sampling: Any) -> list[str]:
    """What one batch takes."""
    return [report for group in range(GROUPS) for report in send_group(service, f"{name}-{group}", **sampling)]


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {WAIT_S:g} s"
        time.sleep(0.02)
    return found


def chain(service: Service) -> list[dict[str, Any]]:
    """Oldest first."""
    releases: list[dict[str, Any]] = service.get("/reef/scenarios/house/releases").json()["releases"]
    return releases[::-1]


def served(service: Service, number: int) -> dict[str, Any]:
    """Release `number`, once the engine answers with it."""
    releases = until(lambda: (found := chain(service)) and len(found) > number and found, f"release {number}")
    release: dict[str, Any] = releases[number]
    until(lambda: service.status()["scenario"]["served"] == release["release_id"], f"{release['release_id']} served")
    return release


def report(service: Service, report_id: str) -> dict[str, Any]:
    found: dict[str, Any] = service.get(f"/reef/reports/{report_id}").json()
    return found


def workers(service: Service) -> list[psutil.Process]:
    """The training workers' processes."""
    found: list[psutil.Process] = service.named("ray::WorkerActor")
    return found


def assert_unbroken(releases: list[dict[str, Any]]) -> None:
    assert [release["parent_release_id"] for release in releases] == [
        None,
        *(release["release_id"] for release in releases[:-1]),
    ]
    assert [release["step"] for release in releases] == list(range(len(releases)))
    assert len({release["content_id"] for release in releases}) == len(releases)
    assert [release["current"] for release in releases] == [False] * (len(releases) - 1) + [True]


def times_trained(service: Service) -> dict[str, int]:
    """In how many committed batches each report is, read from the ledger itself."""
    with sqlite3.connect(f"file:{service.run_dir / 'ledger.db'}?mode=ro", uri=True) as connection:
        rows = connection.execute(
            "select report_id, count(*) from batch_samples join batches on batches.id = batch_samples.batch_id "
            "where batches.state = 'committed' group by report_id"
        ).fetchall()
    connection.close()
    return dict(rows)


def test_graded_answers_become_releases_that_the_next_answer_comes_from(house: Service) -> None:
    base = chain(house)[0]
    assert (base["operation"], base["step"]) == ("base", 0)
    head = len(chain(house)) - 1
    first_reports = send_round(house, "first")
    first = served(house, head + 1)
    assert [report(house, name)["state"] for name in first_reports] == ["trained"] * len(first_reports)
    assert {report(house, name)["release_id"] for name in first_reports} == {first["release_id"]}
    assert first["metrics"]["train_rollout_logprob_abs_diff_max"] < MAX_GAP

    answer = house.chat("Start at 3. Add 4.")
    assert answer.headers["x-reef-release-id"] == first["release_id"]
    spans = house.receipt(answer.headers["x-reef-agent-record-id"])["spans"]
    assert {span["release_id"] for span in spans} == {first["release_id"]}

    send_round(house, "second", temperature=0.7)
    second = served(house, head + 2)
    assert second["metrics"]["train_rollout_logprob_abs_diff_max"] < MAX_GAP
    lineage = house.get(f"/reef/scenarios/house/releases/{first['release_id']}/lineage").json()
    assert sorted(sample["report_id"] for sample in lineage["samples"]) == sorted(first_reports)
    assert [sample["position"] for sample in lineage["samples"]] == list(range(len(first_reports)))
    assert_unbroken(chain(house))


def test_kill_9_during_a_step_loses_no_report_and_trains_none_twice(house: Service) -> None:
    head, trained = len(chain(house)) - 1, times_trained(house)
    done = send_round(house, "a")
    served(house, head + 1)
    done += send_round(house, "b")
    served(house, head + 2)
    before = chain(house)

    for worker in workers(house):
        worker.suspend()  # the step begins and does not end
    caught = send_round(house, "c")
    until(lambda: house.status()["training"]["phase"] == "stepping", "a step")
    late = send_group(house, "d-0", members=3)  # acknowledged while the step hangs
    assert {report(house, name)["state"] for name in caught} == {"reserved"}
    house.kill_9()
    until(lambda: not house.processes(), "what it had started ends by itself")

    house.start()
    third = served(house, head + 3)
    contents = [release["content_id"] for release in chain(house)[: len(before)]]
    assert contents == [release["content_id"] for release in before]
    assert {report(house, name)["release_id"] for name in caught} == {third["release_id"]}
    assert {report(house, name)["state"] for name in late} == {"waiting"}
    assert_unbroken(chain(house))

    extra = house.chat("Start at 9. Add 3. d-0", n=1).json()["choices"][0]["reef_agent_record_id"]
    body = {"agent_record_id": "d-0-3", "references": [extra], "score": 1.0, "group": "d-0"}
    assert house.post("/reef/report", body).status_code == 200
    late = [*late, "d-0-3", *send_group(house, "d-1")]
    served(house, head + 4)
    assert times_trained(house) == trained | dict.fromkeys([*done, *caught, *late], 1)


def test_a_start_after_a_stop_goes_on_from_the_checkpoint_without_a_replay(house: Service) -> None:
    head, log = len(chain(house)) - 1, house.run_dir / "logs" / "reef.log"
    send_round(house, "before")
    release = served(house, head + 1)
    assert house.stop() == 0
    num_lines = len(log.read_text().splitlines())
    house.start()
    assert chain(house)[head + 1]["checkpoint"] is not None
    assert not [line for line in log.read_text().splitlines()[num_lines:] if "replay" in line]
    assert house.chat().headers["x-reef-release-id"] == release["release_id"]
    send_round(house, "after")
    served(house, head + 2)
    assert_unbroken(chain(house))


def test_a_worker_killed_in_a_step_is_replaced_and_the_batch_trains_once(house: Service) -> None:
    head, trained = len(chain(house)) - 1, times_trained(house)
    done = send_round(house, "whole")
    served(house, head + 1)
    (worker,) = workers(house)
    worker.suspend()
    done += send_round(house, "lost")
    until(lambda: house.status()["training"]["phase"] == "stepping", "a step")
    worker.kill()
    assert house.chat().status_code == 200  # serving goes on
    served(house, head + 2)
    assert times_trained(house) == trained | dict.fromkeys(done, 1)
    assert_unbroken(chain(house))


def test_a_batch_whose_gradient_is_not_finite_fails_twice_and_training_goes_on(house: Service) -> None:
    head, poison = len(chain(house)) - 1, []
    for group in range(GROUPS):
        answer = house.chat(f"Start at 1. Add {group + 1}.", n=GROUP).json()
        for choice, score in zip(answer["choices"], POISON, strict=True):
            body = {"references": [choice["reef_agent_record_id"]], "score": score, "group": f"poison-{group}"}
            poison.append(house.post("/reef/report", body).json()["agent_record_id"])
    until(lambda: report(house, poison[-1])["state"] == "dropped", "the batch is given up")
    assert {report(house, name)["reason"] for name in poison} == {"step_failed"}
    until(lambda: "twice" in (house.status()["training"]["error"] or ""), "it is said")  # after it is stored
    send_round(house, "good")
    served(house, head + 1)
    assert house.status()["training"]["error"] is None


def test_64_clients_for_a_minute_during_training_see_no_failed_request(house: Service) -> None:
    seconds, at_most_s, num_clients = 60.0, 400.0, 64
    failures: list[str] = []
    answered, num_before, num_links = 0, len(chain(house)), 0

    async def watch(http: httpx.AsyncClient) -> None:
        """For a minute, and on until there are three releases more, which a busy machine may need longer for."""
        nonlocal num_links
        began = time.monotonic()
        while (passed_s := time.monotonic() - began) < at_most_s and (passed_s < seconds or num_links < num_before + 3):
            await asyncio.sleep(1)
            num_links = len((await http.get("/reef/scenarios/house/releases")).json()["releases"])

    async def client(index: int, http: httpx.AsyncClient, watching: asyncio.Task[None]) -> None:
        nonlocal answered
        turn = 0
        while not watching.done():
            turn += 1
            name = f"client-{index}-{turn}"
            body = {"messages": [{"role": "user", "content": f"Start at 9. {name}"}], "n": GROUP, "max_tokens": 24}
            answer = await http.post("/v1/chat/completions", json=body)
            if answer.status_code != 200:
                failures.append(answer.text)
                continue
            for choice in answer.json()["choices"]:
                graded = {
                    "references": [choice["reef_agent_record_id"]],
                    "score": float(choice["index"] % 2),
                    "group": name,
                }
                stored = await http.post("/reef/report", json=graded)
                if stored.status_code != 200:
                    failures.append(stored.text)
            answered += 1

    async def all_clients() -> None:
        limits = httpx.Limits(max_connections=num_clients + 1, max_keepalive_connections=num_clients + 1)
        async with httpx.AsyncClient(base_url=house.url, timeout=120, limits=limits) as http:
            watching = asyncio.create_task(watch(http))
            await asyncio.gather(watching, *(client(index, http, watching) for index in range(num_clients)))

    asyncio.run(all_clients())
    assert failures == []
    assert answered > num_clients
    assert num_links > num_before + 2, json.dumps(house.status())
    assert all(count == 1 for count in times_trained(house).values())


def test_a_sample_older_than_max_staleness_is_dropped_alone_and_counted(make_service: Callable[..., Service]) -> None:
    house = make_service(*SETTINGS, "--recipe.config.max-staleness", "1").start()
    answer = house.chat("Start at 2. Add 2.", n=GROUP).json()  # sampled now, graded three releases later
    for number in (1, 2, 3):
        send_round(house, f"round-{number}")
        served(house, number)
    old = []
    for choice in answer["choices"]:
        body = {"references": [choice["reef_agent_record_id"]], "score": float(choice["index"] % 2), "group": "old"}
        old.append(house.post("/reef/report", body).json()["agent_record_id"])
    until(lambda: report(house, old[-1])["state"] == "dropped", "the old group is dropped")
    assert {report(house, name)["reason"] for name in old} == {"stale"}
    counted = f'reef_dropped_reports_total{{reason="stale"}} {GROUP}.0'
    until(lambda: counted in house.get("/metrics").text, "they are counted")  # after they are dropped
    send_round(house, "fresh")
    served(house, 4)
    assert_unbroken(chain(house))
    house.end()
