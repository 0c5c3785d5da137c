"""Alive, ready, metrics, status, and the commands that ask for them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from reef.cli import main
from reef.config import load
from reef.errors import ConfigError, LedgerError
from reef.service.run import serve


def test_it_is_alive_and_ready(recorder) -> None:
    alive = recorder.get("/healthz")
    assert alive.json()["status"] == "ok"
    assert alive.json()["uptime_s"] > 0
    assert recorder.get("/readyz").json() == {"ready": True}


def test_status_says_what_is_going_on(recorder, eventually) -> None:
    recorder.chat("1+1=")
    status = eventually(lambda: (said := recorder.status())["in_flight"] == 0 and said)  # what a test before has left
    assert status["ready"] is True
    assert (status["waiting_for"], status["failure"], status["training"]) == (None, None, None)
    assert status["run_dir"] == str(recorder.run_dir)
    (engine,) = status["engines"]
    assert engine["state"] == "ready"
    assert engine["pid"] in [process.pid for process in recorder.processes()]
    assert engine["release_id"] == status["scenario"]["served"] == status["scenario"]["head"]
    assert status["scenario"]["pending"] == status["scenario"]["reserved"] == 0
    assert status["disk"]["free_bytes"] > 0


def test_requests_in_work_are_counted_while_they_run(attached_recorder, broken_engine, eventually) -> None:
    eventually(lambda: attached_recorder.status()["in_flight"] == 0)  # what a test before has left
    go_on = threading.Event()

    async def held(_http, _body):
        await asyncio.to_thread(go_on.wait, 60)
        return broken_engine.generation([5, 6, 2])

    broken_engine.answers["/generate"] = held
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(attached_recorder.chat)
        eventually(lambda: attached_recorder.status()["engines"][0]["in_flight"] == 1)
        assert attached_recorder.status()["in_flight"] == 1
        go_on.set()
        assert asked.result().status_code == 200
    eventually(lambda: attached_recorder.status()["in_flight"] == 0)


def test_it_is_alive_while_64_requests_run(recorder) -> None:
    with ThreadPoolExecutor(64) as threads:
        running = [threads.submit(recorder.chat, "1+1=", max_tokens=100, ignore_eos=True) for _ in range(64)]
        while not all(request.done() for request in running):
            assert recorder.get("/healthz", timeout=30).status_code == 200
        assert {request.result().status_code for request in running} == {200}


def test_metrics_count_answers_by_route_and_never_by_path(recorder) -> None:
    recorder.chat("1+1=")
    recorder.get("/reef/receipts/rcp_nothing_here")
    recorder.get("/a/path/nobody/has")
    text = recorder.get("/metrics").text
    assert 'reef_http_requests_total{route="/v1/chat/completions",status="200"}' in text
    assert 'reef_http_requests_total{route="/reef/receipts/{receipt_id:path}",status="404"}' in text
    assert 'reef_http_requests_total{route="unknown",status="404"}' in text
    assert "nobody" not in text
    assert "rcp_nothing_here" not in text
    receipts = next(line for line in text.splitlines() if line.startswith("reef_receipts_total"))
    assert float(receipts.split()[1]) > 0


@pytest.mark.parametrize(
    "route", ["/", "/v1", "/v1/chat", "/v1/chat/completions/more", "/reef/nothing", "/docs", "/%2e%2e/etc/passwd"]
)
def test_an_unknown_route_is_404_in_the_one_shape(recorder, is_error, route) -> None:
    is_error(recorder.post(route, {}), 404, type="not_found_error", code="not_found", says="POST")


@pytest.mark.parametrize(
    ("method", "route"),
    [
        ("GET", "/v1/chat/completions"),
        ("DELETE", "/v1/models"),
        ("PUT", "/reef/report"),
        ("POST", "/healthz"),
        ("PATCH", "/reef/scenarios"),
    ],
)
def test_a_method_that_a_route_does_not_have_is_405_in_the_one_shape(recorder, is_error, method, route) -> None:
    response = recorder.client.request(method, recorder.url + route)
    is_error(response, 405, type="invalid_request_error", code="method_not_allowed", says=f"{method} {route}")


def test_every_answer_has_a_request_id(recorder) -> None:
    for response in (recorder.get("/healthz"), recorder.get("/nothing"), recorder.chat("1+1=", max_tokens=0)):
        assert response.headers["x-request-id"]
    assert recorder.get("/healthz", headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"


# --- the commands -----------------------------------------------------------------------------------------------------


@pytest.fixture
def reef(recorder, capsys):
    """`reef("status")`: the exit status and what was printed, asked of the recorder by its run directory."""

    def run(*words):
        status = main([*words, "--reef.run-dir", str(recorder.run_dir)])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


def test_reef_status_shows_the_engine_and_its_release(reef, recorder) -> None:
    recorder.chat("1+1=")
    status, text = reef("status")
    release = recorder.status()["engines"][0]["release_id"]
    assert status == 0
    assert "ready     True" in text
    assert f"engine    ready, serves {release}" in text
    assert json.loads(reef("status", "--json")[1])["ready"] is True


def test_reef_releases_shows_the_chain(reef, recorder) -> None:
    recorder.chat("1+1=")
    release = recorder.status()["engines"][0]["release_id"]
    status, text = reef("releases")
    assert status == 0
    assert f"* {release}" in text
    assert "base" in text
    first = recorder.status()["scenario"]["name"]
    assert json.loads(reef("releases", first, "--json")[1])["releases"][0]["release_id"] == release
    status, text = reef("releases", "no such")
    assert status == 1
    assert "no scenario no such" in text


def test_reef_why_tells_the_story_of_a_receipt_and_of_a_report(reef, recorder, scenario) -> None:
    receipt = recorder.chat("1+1=", headers={"x-reef-scenario": scenario}).headers["x-reef-agent-record-id"]
    status, text = reef("why", receipt)
    assert status == 0
    written, ended = text.splitlines()
    assert re.fullmatch(rf"\S+ \S+  receipt {receipt} written, \d+ tokens from \S+, exact", written)
    assert ended == "no report references it"
    report = f"job/{scenario} 1?x=%41"
    recorder.post("/reef/report", {"agent_record_id": report, "references": [receipt], "score": 1})
    for asked in (receipt, report):
        status, text = reef("why", asked)
        assert status == 0
        assert f"report {report} with score 1.0 recorded, not to be trained: not_training" in text
        assert text.count("\n") == (2 if asked == receipt else 1)
    assert json.loads(reef("why", report, "--json")[1])["reports"][0]["references"] == [receipt]
    status, text = reef("why", "nothing")
    assert status == 1
    assert "nothing" in text


def test_a_proxy_of_the_environment_is_not_asked_for_a_service_on_this_machine(reef, monkeypatch) -> None:
    """It would get the key, and who sits behind one could not ask their own service."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.delenv("no_proxy", raising=False)
    status, printed = reef("status")
    assert (status, "ready     True" in printed) == (0, True)


def test_the_commands_say_where_no_service_answers(capsys, tmp_path) -> None:
    assert main(["status", "--reef.run-dir", str(tmp_path)]) == 1
    assert f"no service has run in {tmp_path}" in capsys.readouterr().err
    assert main(["status", "--url", "http://127.0.0.1:9"]) == 1
    assert "no service answers at http://127.0.0.1:9" in capsys.readouterr().err


# --- from start to end ------------------------------------------------------------------------------------------------


@pytest.fixture
def serve_here():
    """`serve_here("--reef.port", ...)` in this process, with its logging undone: for services that cannot begin."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def run(*settings):
        config = load(None, ["--training.backend", "none", *settings], environ={})
        return asyncio.run(serve(config, lambda text: None))

    yield run
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_port_that_is_taken_is_named_and_the_service_on_it_goes_on(recorder, serve_here, tmp_path) -> None:
    port = recorder.url.rsplit(":", 1)[1]
    with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*\(reef\.host, reef\.port\)"):
        serve_here("--reef.port", port, "--reef.run-dir", str(tmp_path / "run"))
    assert recorder.chat("1+1=").status_code == 200


def test_a_run_directory_has_one_owner_who_is_named_to_the_second(recorder, serve_here) -> None:
    with pytest.raises(LedgerError, match=f"is in use by process {recorder.pid}"):
        serve_here("--reef.port", "0", "--reef.run-dir", str(recorder.run_dir))
    assert recorder.chat("1+1=").status_code == 200


@pytest.mark.slow
def test_a_connection_that_was_idle_longer_than_clients_keep_one_is_still_good(recorder) -> None:
    idle_s = 6  # httpx drops its own after 5
    with contextlib.closing(http.client.HTTPConnection(recorder.url.removeprefix("http://"), timeout=60)) as connection:
        for pause_s in (idle_s, 0):
            connection.request("GET", "/healthz")
            assert connection.getresponse().read()
            time.sleep(pause_s)


@pytest.mark.slow
def test_an_engine_killed_under_the_service_is_replaced_and_requests_wait_for_it(make_service, eventually) -> None:
    service = make_service("--training.backend", "none").start()
    before = service.chat("1+1=", temperature=0, return_token_ids=True).json()["choices"][0]
    engine = service.status()["engines"][0]["pid"]
    os.kill(engine, signal.SIGKILL)
    eventually(
        lambda: service.status()["engines"][0]["state"] != "ready" or service.status()["engines"][0]["pid"] != engine
    )
    assert service.get("/healthz").status_code == 200
    after = service.chat("1+1=", temperature=0, return_token_ids=True)
    assert after.status_code == 200, after.text
    assert after.json()["choices"][0]["token_ids"] == before["token_ids"]
    assert service.status()["engines"][0]["pid"] != engine
    # kill -9 of the service: its engine ends too, and the next start finds everything that was acknowledged.
    left = service.processes()
    service.kill_9()
    assert psutil.wait_procs(left, timeout=60)[1] == []
    service.start()
    assert service.receipt(before["reef_agent_record_id"])["token_ids"] == before["token_ids"]
    assert service.stop() == 0
