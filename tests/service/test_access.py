"""Who may ask: the key, the limits, and what is never shown."""

from __future__ import annotations

import http.client
import json
from contextlib import ExitStack, closing

import httpx
import pytest

from reef.cli import main

pytestmark = pytest.mark.slow  # engines and services of its own

TOKEN = "s3cret-token-0123456789"
ASK = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 4}


@pytest.fixture(scope="module")
def strict(make_service):
    """A service that asks for a key, creates no scenario by itself and takes two requests at once."""
    service = make_service(
        "--training.backend", "none", "--reef.access", "key", "--reef.token", TOKEN,
        "--reef.implicit-scenarios", "false", "--reef.max-in-flight", "2", "--reef.max-body-bytes", "2000",
        "--recipe.scenario", "sums", "--inference.sampling", "neutral",
    )  # fmt: skip
    service.start()
    service.client.headers["authorization"] = f"Bearer {TOKEN}"
    yield service
    assert TOKEN not in service.log_tail(10_000)


def without_key(service, method, route, **headers):
    body = ASK if method == "POST" else None
    return httpx.request(method, service.url + route, headers=headers, json=body, timeout=60)


GUARDED = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("POST", "/reef/report"),
    ("GET", "/reef/reports/x"),
    ("GET", "/reef/receipts/x"),
    ("GET", "/reef/scenarios"),
    ("POST", "/reef/scenarios"),
    ("GET", "/reef/scenarios/sums/releases"),
    ("GET", "/reef/status"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing"),
]


@pytest.mark.parametrize(("method", "route"), GUARDED)
def test_every_route_but_health_asks_for_the_key(strict, is_error, method, route) -> None:
    missing = is_error(without_key(strict, method, route), 401, code="missing_api_key", type="authentication_error")
    wrong = is_error(without_key(strict, method, route, authorization="Bearer wrong"), 401, code="invalid_api_key")
    assert TOKEN not in missing["message"] + wrong["message"]


def test_health_is_open(strict) -> None:
    for route in ("/healthz", "/readyz"):
        assert without_key(strict, "GET", route).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {TOKEN}"},
        {"authorization": f"bearer {TOKEN}"},
        {"x-api-key": TOKEN},
        {"authorization": "Basic abc", "x-api-key": TOKEN},
    ],
)
def test_the_key_is_taken_as_bearer_and_as_x_api_key(strict, headers) -> None:
    assert httpx.get(strict.url + "/v1/models", headers=headers, timeout=60).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {TOKEN}x"},
        {"authorization": f"Bearer {TOKEN[:-1]}"},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": TOKEN},
        {"authorization": "Bearer"},
        {"authorization": "Bearer wrong", "x-api-key": TOKEN},
        {"x-api-key": ""},
        {"x-api-key": "ümlaut"},
    ],
)
def test_anything_else_is_no_key(strict, is_error, headers) -> None:
    headers = {name: value.encode() for name, value in headers.items()}
    is_error(httpx.get(strict.url + "/v1/models", headers=headers, timeout=60), 401)


def test_the_key_is_shown_nowhere(strict, capsys) -> None:
    for route in ("/reef/status", "/metrics", "/v1/models", "/reef/scenarios/sums/contract", "/openapi.json"):
        response = strict.get(route)
        assert response.status_code == 200, route
        assert TOKEN not in response.text
    assert TOKEN not in (strict.run_dir / "service.json").read_text()
    assert main(["serve", "--print-config", "--reef.token", TOKEN]) == 0
    assert TOKEN not in capsys.readouterr().out
    assert main(["serve", "--print-config", "--reef.token", TOKEN, "--reef.port", TOKEN]) == 2
    assert main(["serve", "--print-config", "--reef.token", f"[{TOKEN}]"]) == 2
    assert f"token: {TOKEN}" not in capsys.readouterr().err


def test_the_commands_send_the_key(strict, capsys, monkeypatch) -> None:
    run_dir = ["--reef.run-dir", str(strict.run_dir)]
    assert main(["status", *run_dir]) == 1
    told = capsys.readouterr().err
    assert "a key is needed" in told
    assert f"commands send --reef.token, else REEF_API_KEY, else {strict.run_dir}/api-key" in told
    assert main(["status", *run_dir, "--reef.token", TOKEN]) == 0
    monkeypatch.setenv("REEF_API_KEY", TOKEN)
    assert main(["releases", *run_dir]) == 0
    assert TOKEN not in capsys.readouterr().out


def test_a_host_that_others_can_reach_needs_a_key(capsys) -> None:
    assert main(["serve", "--dry-run", "--reef.host", "0.0.0.0"]) == 2
    assert "reef.host 0.0.0.0 is not loopback: set reef.token" in capsys.readouterr().err
    for token in ("", "two words", "schlüssel", "a\nb"):  # what no header carries as it is
        assert main(["serve", "--dry-run", "--reef.host", "0.0.0.0", "--reef.token", token]) == 2
        assert "reef.token" in capsys.readouterr().err


def test_an_unknown_scenario_is_refused_where_none_is_created_by_itself(strict, is_error) -> None:
    headers = {"x-reef-scenario": "new"}
    response = strict.post("/v1/chat/completions", ASK, headers=headers)
    is_error(response, 404, code="scenario_not_found", says="POST /reef/scenarios")
    is_error(strict.post("/reef/report", {"references": []}, headers=headers), 404, code="scenario_not_found")
    assert [item["name"] for item in strict.get("/reef/scenarios").json()["scenarios"]] == ["sums"]
    assert strict.post("/v1/chat/completions", ASK).status_code == 200  # the configured one
    assert strict.post("/reef/scenarios", {"name": "new"}).status_code == 201
    assert strict.post("/v1/chat/completions", ASK, headers=headers).status_code == 200


def begin_to_ask(stack: ExitStack, service, body: bytes) -> http.client.HTTPConnection:
    """A request in work for as long as the rest of its body does not come."""
    connection = http.client.HTTPConnection(service.url.removeprefix("http://"), timeout=60)
    stack.enter_context(closing(connection))
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("authorization", f"Bearer {TOKEN}")
    connection.putheader("content-length", str(len(body)))
    connection.endheaders(body[:1])
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_over_max_in_flight_requests_are_told_when_to_come_back(strict, is_error, eventually, stream) -> None:
    body = json.dumps(ASK).encode()
    with ExitStack() as stack:
        running = [begin_to_ask(stack, strict, body) for _ in range(2)]
        eventually(lambda: strict.status()["in_flight"] == 2)
        response = strict.post("/v1/chat/completions", {**ASK, "stream": stream})
        is_error(response, 429, code="queue_full", says="reef.max-in-flight")
        assert int(response.headers["retry-after"]) >= 1
        for connection in running:
            connection.send(body[1:])
            with connection.getresponse() as answer:
                assert (answer.status, bool(answer.read())) == (200, True)
    assert strict.post("/v1/chat/completions", {**ASK, "stream": stream}).status_code == 200


def test_over_max_body_bytes_is_413_on_every_route_with_a_body(strict, is_error) -> None:
    for route in ("/v1/chat/completions", "/v1/completions", "/reef/report", "/reef/scenarios"):
        is_error(strict.post(route, {"text": "a" * 2000}), 413, code="body_too_large", says="2000 bytes")
    parts = (b"a" * 100 for _ in range(30))  # and where no length is told beforehand
    is_error(strict.client.post(strict.url + "/reef/report", content=parts), 413, code="body_too_large")


def test_neutral_sampling_overrides_what_would_never_train(strict) -> None:
    answer = strict.post("/v1/chat/completions", {**ASK, "top_p": 0.5, "temperature": 0.7, "stop": ["x"]}).json()
    receipt = strict.receipt(answer["choices"][0]["reef_agent_record_id"])
    assert receipt["exact"] is True
    assert (receipt["sampling"]["top_p"], receipt["sampling"]["temperature"]) == (1.0, 0.7)
    assert receipt["sampling"]["stop"] == ["x"]
    greedy = strict.post("/v1/chat/completions", {**ASK, "temperature": 0}).json()
    assert strict.receipt(greedy["choices"][0]["reef_agent_record_id"])["inexact_reason"] == "greedy"
    assert "reef_sampling_neutralised_total 1.0" in strict.get("/metrics").text
