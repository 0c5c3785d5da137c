"""reef-client (PyPI) against the real service: its class, and the sidecar that agents treat as their model."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time

import httpx
import pytest
from reef_client import ReefClient
from reef_client.client import ReefClientError

from tests.ports import free_port

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
QUESTION = {"messages": [{"role": "user", "content": "2+3="}], "max_tokens": 8}
_numbers = itertools.count()


@pytest.fixture
def scenario():
    return f"reef-client-{next(_numbers)}"


@pytest.fixture
def client(recorder):
    return ReefClient(recorder.url, token="none is asked")


# --- the class --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "payload"),
    [
        (CHAT, QUESTION),
        ("/v1/completions", {"prompt": "2+3=", "max_tokens": 8}),
        ("/v1/responses", {"input": "2+3=", "max_output_tokens": 8}),
        ("/v1/messages", {"model": "m", **QUESTION}),
    ],
)
def test_an_answer_comes_with_its_receipt_whatever_the_api(client, recorder, scenario, path, payload) -> None:
    body, receipt_id = client.inference_with_record(scenario, path, payload)
    receipt = recorder.receipt(receipt_id)
    assert receipt["scenario"] == scenario
    assert receipt["text"] in json.dumps(body, ensure_ascii=False)
    assert receipt["request"] == payload


def test_a_report_grades_the_receipt(client, recorder, scenario) -> None:
    _, receipt_id = client.inference_with_record(scenario, CHAT, QUESTION)
    stored = client.report(scenario, {"score": 0.5, "feedback": "half"}, references=[receipt_id])
    assert stored["references"] == [receipt_id]
    assert client.get(f"/reef/reports/{stored['agent_record_id']}")["score"] == 0.5


def test_a_report_that_is_sent_again_is_stored_once(client, scenario) -> None:
    _, receipt_id = client.inference_with_record(scenario, CHAT, QUESTION)
    report = {"agent_record_id": f"{scenario}-report", "score": 1.0}
    first = client.report(scenario, report, references=[receipt_id])
    assert client.report(scenario, report, references=[receipt_id]) == first
    with pytest.raises(ReefClientError) as conflict:
        client.report(scenario, {**report, "score": 0.0}, references=[receipt_id])
    assert conflict.value.status == 409


def test_a_recipe_of_another_name_is_a_conflict(client, recorder, scenario) -> None:
    own = recorder.get("/reef/scenarios").json()["scenarios"][0]["recipe"]
    client.inference(scenario, CHAT, QUESTION, recipe=own)
    with pytest.raises(ReefClientError) as conflict:
        client.inference(scenario, CHAT, QUESTION, recipe="another")
    assert conflict.value.status == 409


def test_errors_keep_their_status_and_say_what_was_wrong(client, scenario) -> None:
    with pytest.raises(ReefClientError) as bad:
        client.inference(scenario, CHAT, {**QUESTION, "no_such_field": 1})
    assert (bad.value.status, bad.value.content_type) == (400, "application/json")
    assert "no_such_field" in bad.value.body
    with pytest.raises(ReefClientError) as missing:
        client.get("/reef/receipts/rcp_0")
    assert missing.value.status == 404


def test_the_chain_of_a_scenario_can_be_read(client, scenario) -> None:
    client.inference(scenario, CHAT, QUESTION)
    assert client.get(f"/reef/scenarios/{scenario}/releases") == {"scenario": scenario, "releases": []}


# --- the sidecar ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["", "--force-non-stream"])
def sidecar(request, recorder, tmp_path_factory):
    """`python -m reef_client.serve` in front of the service; an HTTP client of it."""
    port = free_port()
    command = [sys.executable, "-m", "reef_client.serve", "--listen", str(port), "--upstream", recorder.url]
    command += ["--session-header", "x-reef-session", *request.param.split()]
    with (tmp_path_factory.mktemp("sidecar") / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        # A connection for each request: after a stream, reef-client 0.3.1 leaves out the next answer's status line.
        alone = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, limits=alone) as http:
            _wait(http)
            yield http
    finally:
        process.terminate()
        process.wait(120)


def _wait(http):
    deadline = time.monotonic() + 90
    while True:
        try:
            http.get("/_sessions")
            return
        except httpx.ConnectError:
            assert time.monotonic() < deadline, "the sidecar does not listen"
            time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_the_sidecar_keeps_the_receipt_of_what_an_agent_asked(sidecar, recorder, scenario, stream) -> None:
    session = f"{scenario}-session"
    root = sidecar.post("/_sessions", json={"id": session}).json()["path"]
    body = {**QUESTION, "stream": stream, "stream_options": {"include_usage": True} if stream else None}
    answer = sidecar.post(root + CHAT, json=body, headers={"x-reef-scenario": scenario})
    assert answer.status_code == 200, answer.text
    (turn,) = _captures(sidecar, session)
    receipt = recorder.receipt(turn["receipt"])
    assert (receipt["session"], receipt["scenario"]) == (session, scenario)
    assert turn["response"]["choices"][0]["message"]["content"] == receipt["text"]
    assert turn["response"]["usage"]["completion_tokens"] == receipt["num_tokens"]
    assert turn["receipt"] in answer.text if stream else answer.headers["x-reef-agent-record-id"] == turn["receipt"]


@pytest.mark.slow
def test_turns_through_the_sidecar_continue_each_other(sidecar, recorder, scenario) -> None:
    session = f"{scenario}-session"
    root = sidecar.post("/_sessions", json={"id": session}).json()["path"]
    messages = list(QUESTION["messages"])
    for text in ("4+1=", "7-2="):
        answer = sidecar.post(
            root + CHAT, json={"messages": messages, "max_tokens": 8}, headers={"x-reef-scenario": scenario}
        )
        messages += [answer.json()["choices"][0]["message"], {"role": "user", "content": text}]
    first, second = (recorder.receipt(turn["receipt"]) for turn in _captures(sidecar, session))
    assert (second["parent"], second["continued_by"]) == (first["agent_record_id"], "session")


def _captures(sidecar, session):
    """What it kept; it keeps a stream only after the last byte of it has left."""
    deadline = time.monotonic() + 60
    while not (turns := sidecar.get(f"/_sessions/{session}/captures").json()["turns"]):
        assert time.monotonic() < deadline, "nothing was captured"
        time.sleep(0.02)
    return turns
