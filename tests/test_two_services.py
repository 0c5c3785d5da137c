"""Two real services on one PostgreSQL database: one trains, the other serves what it releases and takes its place."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from reef.errors import ConflictError
from reef.ledger.audit import audit
from reef.ledger.reading import open_reading

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LEASE_S = 10.0  # a service whose loop stands still for two thirds of it on a busy machine is replaced
SETTINGS = (
    *("--recipe.scenario", "s", "--recipe.config.group-size", "2", "--recipe.config.batch-size", "2"),
    *("--storage.lease-timeout-s", str(LEASE_S), "--training.checkpoint-every", "2"),
)
WAIT_S = 180.0
Service = Any  # tests/conftest.py


class Pair:
    """Two services on one database, each with a run directory of its own."""

    def __init__(self, make_service: Callable[..., Service], server: Any) -> None:
        self.server = server
        self.database = server.create()
        self.url = server.url(self.database)
        self.services = [make_service(*SETTINGS, "--storage.url", self.url) for _ in range(2)]

    def start(self) -> tuple[Service, Service]:
        """Both at once; the owner first."""
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda service: service.start(), self.services))
        first, second = self.services
        return (first, second) if phase(second) == "following" else (second, first)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with self.server.connect(self.database) as connection:
            return list(connection.execute(query.encode()).fetchall())

    def is_sound(self) -> None:
        """The chain is unbroken, every row is what it must be, and no report is in two committed batches."""
        with open_reading(self.url) as connection:
            assert list(audit(connection)) == []
        parents = self.rows("SELECT id, parent FROM releases ORDER BY number")
        assert [parent for _, parent in parents] == [None, *(id for id, _ in parents[:-1])]

    def trained(self) -> dict[str, int]:
        """In how many committed batches each report is."""
        query = "SELECT report_id, count(*) FROM batch_samples JOIN batches ON id = batch_id"
        return dict(self.rows(f"{query} WHERE state = 'committed' GROUP BY report_id"))


@pytest.fixture
def pair(make_service: Callable[..., Service], postgres_server: Any) -> Iterator[Pair]:
    made = Pair(make_service, postgres_server)
    yield made
    for service in made.services:
        if service.returncode is None and service.url:
            service._process.send_signal(signal.SIGCONT)
        service.end()
    postgres_server.drop(made.database)


def phase(service: Service) -> str:
    return str(service.status()["training"]["phase"])


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {WAIT_S:g} s"
        time.sleep(0.05)
    return found


def answers(service: Service, text: str = "Start at 9. Add 3.") -> list[str]:
    """Two receipts of one prompt."""
    answer = service.chat(text, n=2)
    assert answer.status_code == 200, answer.text
    return [choice["reef_agent_record_id"] for choice in answer.json()["choices"]]


def grade(service: Service, group: str, receipts: list[str]) -> list[str]:
    """What one batch takes; the ids of the reports."""
    names = []
    for score, receipt in enumerate(receipts):
        names.append(f"{group}-{score}")
        body = {"agent_record_id": names[-1], "references": [receipt], "score": score, "group": group}
        response = service.post("/reef/report", body)
        assert response.status_code == 200, response.text
    return names


def head(service: Service) -> str:
    return str(service.status()["scenario"]["head"])


def serves(service: Service, number: int) -> str:
    """The id of release `number`, once the service's engine answers with it."""
    until(lambda: (service.status()["scenario"]["served"] or "").endswith(f"-{number:06d}"), f"{number}")
    answer = service.chat()
    assert answer.headers["x-reef-release-id"].endswith(f"-{number:06d}")
    return str(answer.headers["x-reef-release-id"])


def workers(service: Service) -> list[Any]:
    found: list[Any] = service.named("ray::WorkerActor")
    return found


def said(service: Service, text: str) -> bool:
    return text in service.log_tail(400)


def reef(service: Service, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "reef", *words, "--url", service.url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_one_trains_what_both_are_told_and_both_serve_it_and_a_clean_stop_hands_over(pair: Pair) -> None:
    owner, follower = pair.start()
    here, there = answers(owner), answers(follower)
    names = grade(follower, "a", here)  # receipts of the one, reported to the other
    serves(owner, 1)
    release = serves(follower, 1)
    spans = follower.receipt(answers(follower)[0])["spans"]
    assert {span["release_id"] for span in spans} == {release}
    names += grade(owner, "b", there)
    serves(owner, 2)
    serves(follower, 2)
    assert pair.trained() == dict.fromkeys(names, 1)
    assert [follower.get(f"/reef/reports/{name}").json()["state"] for name in names] == ["trained"] * 4

    training = follower.status()["training"]
    assert training["phase"] == "following"
    assert training["owner"].split(":")[1] == str(owner.pid)
    assert training["error"] is None
    assert f"trainer   following {training['owner']}" in reef(follower, "status").stdout
    for route, body in (("rollback", {"release_id": release}), ("promote", {"release_id": release}), ("update", {})):
        refused = follower.post(f"/reef/scenarios/s/{route}", body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (ConflictError.status, "not_owner")
    rolled = owner.post("/reef/scenarios/s/rollback", {"release_id": release})
    assert rolled.status_code == 201, rolled.text
    serves(follower, 3)

    assert owner.stop() == 0
    assert pair.rows(
        "SELECT count(*) FROM leases WHERE expires_at > 0 AND holder LIKE '%:" + str(owner.pid) + ":%'"
    ) == [(0,)]
    until(lambda: phase(follower) == "waiting", "the other one trains")
    names += grade(follower, "c", answers(follower))
    serves(follower, 4)
    assert follower.stop() == 0
    assert pair.trained() == dict.fromkeys(names, 1)
    pair.is_sound()
    assert not said(owner, "Traceback")
    assert not said(follower, "Traceback")


def test_the_other_one_finishes_the_batch_of_an_owner_that_was_killed_who_comes_back_to_follow(pair: Pair) -> None:
    owner, follower = pair.start()
    names = grade(owner, "a", answers(owner))
    serves(owner, 1)
    for worker in workers(owner):
        worker.suspend()  # the step begins and does not end
    caught = grade(follower, "b", answers(follower))
    until(lambda: phase(owner) == "stepping", "a step")
    late = grade(follower, "c", answers(follower))
    assert {follower.get(f"/reef/reports/{name}").json()["state"] for name in caught} == {"reserved"}
    owner.kill_9()
    until(lambda: not owner.processes(), "what it had started ends by itself")

    assert follower.chat().status_code == 200
    serves(follower, 3)
    names += [*caught, *late]
    assert pair.trained() == dict.fromkeys(names, 1)
    assert {follower.get(f"/reef/reports/{name}").json()["state"] for name in names} == {"trained"}
    pair.is_sound()

    owner.start()
    assert phase(owner) == "following"
    serves(owner, 3)
    names += grade(owner, "d", answers(owner))
    serves(follower, 4)
    serves(owner, 4)
    assert pair.trained() == dict.fromkeys(names, 1)
    pair.is_sound()
    recorded = {entry["pid"] for entry in json.loads((follower.run_dir / "processes.json").read_text())}
    assert {worker.pid for worker in workers(follower)} <= recorded


def test_an_owner_that_was_stopped_longer_than_its_lease_writes_nothing_more_and_follows(pair: Pair) -> None:
    owner, follower = pair.start()
    names = grade(owner, "a", answers(owner))
    serves(owner, 1)
    (worker,) = workers(owner)
    worker.suspend()
    names += grade(owner, "b", answers(owner))
    until(lambda: phase(owner) == "stepping", "a step")
    owner._process.send_signal(signal.SIGSTOP)
    worker.resume()  # its step ends meanwhile
    serves(follower, 2)
    second = pair.rows("SELECT id, content_id, path FROM releases WHERE number = 2")
    owner._process.send_signal(signal.SIGCONT)
    until(lambda: phase(owner) == "following", "it follows")
    assert said(owner, "does not own the ledger any more")
    serves(owner, 2)
    assert pair.rows("SELECT id, content_id, path FROM releases WHERE number = 2") == second
    assert str(follower.run_dir) in second[0][2]
    assert not (owner.run_dir / "releases" / second[0][0]).exists()
    until(lambda: not workers(owner), "its workers end")
    names += grade(owner, "c", answers(owner))
    serves(owner, 3)
    assert pair.trained() == dict.fromkeys(names, 1)

    follower.kill_9()  # and back again
    until(lambda: phase(owner) == "waiting", "it trains once more")
    names += grade(owner, "d", answers(owner))
    serves(owner, 4)
    assert pair.trained() == dict.fromkeys(names, 1)
    pair.is_sound()
    assert not said(owner, "Traceback")
