"""Rollback, promotion, the gate, deletion and replay as a user has them: a real service, its commands, its files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reef.training.manifest import content_id_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SETTINGS = ("--recipe.scenario", "s", "--recipe.config.group-size", "2", "--recipe.config.batch-size", "2")


def reef(service: Any, *words: str, check: int = 0) -> str:
    """A command on the service's run directory; what it printed. `check`: the exit status that it must have."""
    command = [sys.executable, "-m", "reef", *words, "--reef.run-dir", str(service.run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == check, done.stdout + done.stderr
    return done.stdout + done.stderr


def train(service: Any, group: str, n: int = 2) -> list[str]:
    """One step's worth of graded answers; their receipts."""
    answers = [service.chat(f"{group}: 2+3=", seed=seed, max_tokens=8).json() for seed in range(n)]
    receipts = [answer["choices"][0]["reef_agent_record_id"] for answer in answers]
    for score, receipt in enumerate(receipts):
        body = {"references": [receipt], "score": score, "group": group, "agent_record_id": f"report-{receipt}"}
        assert service.post("/reef/report", body).status_code == 200
    return receipts


def until(true: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline, f"not within two minutes: {what}"
        time.sleep(0.05)


def releases(service: Any) -> list[dict[str, Any]]:
    """Oldest first."""
    found: list[dict[str, Any]] = service.get("/reef/scenarios/s/releases").json()["releases"]
    return found[::-1]


def served(service: Any) -> str:
    return str(service.status()["scenario"]["served"])


@pytest.fixture
def service(make_service: Callable[..., Any]) -> Iterator[Any]:
    made = make_service(*SETTINGS, "--training.checkpoint-every", "100")
    yield made
    made.end()


def test_back_and_forth_and_every_release_again_from_the_ledger(service: Any, tmp_path: Path) -> None:
    service.start()
    told: list[str] = []
    for number in (1, 2, 3):
        told += train(service, f"group {number}")
        until(
            lambda number=number: len(releases(service)) == number + 1 and served(service).endswith(str(number)),
            "a release",
        )
    base, first, second, third = releases(service)
    an_earlier_release_is_evaluated_in_an_engine_of_its_own(service, first["release_id"], third["release_id"])
    assert reef(service, "rollback", "nothing", check=1) == "reef: no release nothing in scenario s\n"
    assert "already" in reef(service, "rollback", third["release_id"], check=1)
    assert reef(service, "rollback", first["release_id"]).endswith("(rollback), step 1, released\n")
    back = releases(service)[-1]
    assert (back["content_id"], back["source_release_id"]) == (first["content_id"], first["release_id"])
    assert back["checkpoint"] is not None
    answer = service.chat("2+3=", max_tokens=8)
    assert answer.headers["x-reef-release-id"] == back["release_id"] == served(service)
    told += train(service, "group 4")
    until(lambda: served(service).endswith("5"), "a release on the old content")
    head = releases(service)[-1]
    assert (head["step"], head["policy_version"]) == (2, 2)
    assert head["content_id"] != second["content_id"]

    # The story of a receipt that trained what was rolled away, and of one that trains what is served.
    rolled_away = reef(service, "why", told[2])
    assert f"release {second['release_id']} left by rollback {back['release_id']}" in rolled_away
    assert head["release_id"] in reef(service, "why", told[-1])

    # From the ledger alone, beside the running service.
    again = tmp_path / "again"
    said = reef(service, "replay", "s", "--directory", str(again))
    assert [line.split()[::2] for line in said.splitlines()[1:3]] == [
        [first["release_id"], "equal"],
        [head["release_id"], "equal"],
    ]
    assert content_id_of(again / head["release_id"]) == head["content_id"]
    assert "is not empty" in reef(service, "replay", "s", "--directory", str(again), check=2)
    assert "nothing to train again" in reef(service, "replay", "--to", base["release_id"], check=1)
    assert "no release r9" in reef(service, "replay", "--to", "r9", check=1)

    # Forth again, over a kill: weights, moments and random numbers come from checkpoint and ledger.
    assert reef(service, "promote", third["release_id"]).endswith("(promote), step 3, released\n")
    service.kill_9()
    service.start()
    forth = releases(service)[-1]
    assert (served(service), forth["content_id"]) == (forth["release_id"], third["content_id"])

    # Deleted receipts: the release that they trained says so, and a replay across it says what is missing.
    deleted = service.client.delete(f"{service.url}/reef/receipts/{told[0]}").json()["deleted"]
    assert deleted == [told[0]]
    assert "token_ids" not in service.receipt(told[0])
    assert releases(service)[1]["num_deleted"] == 1
    missing = reef(service, "replay", "--directory", str(tmp_path / "gone"), check=1)
    assert f"receipts that it needs were deleted: 1 of {first['release_id']}" in missing
    assert "deleted" in reef(service, "why", told[0])
    assert "0 findings" in reef(service, "doctor", "--ledger")
    assert service.stop() == 0

    # A model that is no longer there.
    other = tmp_path / "other model"
    shutil.copytree(again / head["release_id"], other)
    text = reef(service, "replay", "--inference.model-path", str(other), check=2)
    assert "training began with" in text


def an_earlier_release_is_evaluated_in_an_engine_of_its_own(service: Any, first: str, head: str) -> None:
    def ask(release: str) -> Any:
        body = {"messages": [{"role": "user", "content": "2+3="}], "max_tokens": 8, "temperature": 0}
        headers = {"x-reef-release": release, "x-reef-purpose": "eval"}
        return service.post("/v1/chat/completions", body, headers=headers)

    route = f"/reef/scenarios/s/releases/{first}/engine"
    refused = ask(first)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "release_not_served")
    for loan in ("a", "b"):  # two evaluations at once
        lent = {"release_id": first, "role": "evaluation", "loan": loan}
        assert service.post(route, {"loan": loan}).json() == lent
    assert [engine["role"] for engine in service.status()["engines"]] == ["serving", "evaluation"]
    assert f"evaluationready, serves {first}" in reef(service, "status")
    answer = ask(first)
    assert answer.headers["x-reef-release-id"] == first
    receipt = service.get(f"/reef/receipts/{answer.headers['x-reef-agent-record-id']}").json()
    assert {span["release_id"] for span in receipt["spans"]} == {first}
    assert (served(service), ask(head).headers["x-reef-release-id"]) == (head, head)
    taken = service.post(route.replace(first, head), {})
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "engine_taken")
    for loan, lent in (("a", True), ("a", False), ("b", True)):
        assert ask(first).status_code == 200
        gone = service.client.delete(f"{service.url}{route}?loan={loan}")
        assert gone.json() == {"release_id": first, "given_back": lent}
    assert service.client.delete(f"{service.url}{route}?loan=c").json()["given_back"] is False  # overtakes its POST
    late = service.post(route, {"loan": "c"})
    assert (late.status_code, late.json()["error"]["code"]) == (409, "given_back")
    assert service.client.delete(service.url + route).status_code == 400
    assert ask(first).status_code == 409
    assert [engine["role"] for engine in service.status()["engines"]] == ["serving"]


MEASURE = """
import json, os, sys, urllib.request
release = os.environ["REEF_RELEASE"]
body = {"messages": [{"role": "user", "content": "2+3="}], "max_tokens": 8}
headers = {"content-type": "application/json", "x-reef-release": release, "x-reef-purpose": "eval"}
headers["authorization"] = "Bearer " + os.environ["REEF_API_KEY"]
request = urllib.request.Request(os.environ["REEF_URL"] + "/v1/chat/completions", json.dumps(body).encode(), headers)
with urllib.request.urlopen(request, timeout=30) as answer:
    assert answer.headers["x-reef-release-id"] == release
number = int(release[-6:])
print(json.dumps({"accuracy": {"value": 0.6, "low": 0.5 if number == 1 else 0.3}}))
"""


def test_a_gate_lets_through_what_passes_and_takes_back_what_does_not(
    make_service: Callable[..., Any], tmp_path: Path
) -> None:
    script = tmp_path / "measure.py"
    script.write_text(MEASURE)
    command = json.dumps([sys.executable, str(script)])
    gate = ("--evaluation.gate", "{accuracy: {min: 0.5}}", "--evaluation.command", command)
    service = make_service(*SETTINGS, *gate, "--reef.access", "key")
    service.start()
    service.client.headers["authorization"] = f"Bearer {(service.run_dir / 'api-key').read_text().strip()}"
    train(service, "group 1")
    until(lambda: served(service).endswith("1"), "the first release passes")
    candidate = service.status()["engines"][1]
    assert candidate["role"] == "candidate"
    train(service, "group 2")
    until(lambda: served(service).endswith("3"), "the second release is rejected and rolled back")
    _, first, rejected, back = releases(service)
    assert first["reason"] == "passed the gate"
    assert (rejected["state"], rejected["verified_at"]) == ("rejected", None)
    assert rejected["reason"] == "failed the gate: accuracy is 0.6 [0.3, 0.6], at least 0.5 is needed"
    assert (back["operation"], back["content_id"]) == ("rollback", first["content_id"])
    assert service.status()["engines"][1]["pid"] == candidate["pid"]
    refused = service.post("/reef/scenarios/s/promote", {"release_id": rejected["release_id"]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "gate_failed")
    assert "1 by hand" not in reef(service, "promote", rejected["release_id"], "--force")
    assert served(service) == releases(service)[-1]["release_id"]
    assert service.stop() == 0
    service.end()
