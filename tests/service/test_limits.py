"""What takes too long, waits too long or is too much: which status, and when to come back."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from aiohttp import web

pytestmark = pytest.mark.slow  # a service of its own

ASK = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 4}


@pytest.fixture(scope="module")
def hasty(make_service, make_fake_engine):
    """A service with small limits, on an engine that misbehaves on demand: its `.engine`."""
    engine = make_fake_engine()
    service = make_service(
        "--training.backend", "none", "--inference.url", engine.url, "--reef.max-messages", "3",
        "--inference.request-timeout-s", "6", "--inference.first-token-timeout-s", "2",
        "--inference.max-waiting", "2", "--inference.pause-wait-s", "30",
    )  # fmt: skip
    service.start()
    service.engine = engine
    return service


@pytest.fixture
def engine(hasty):
    """It behaves again after the test."""
    yield hasty.engine
    hasty.engine.answers.clear()


def ask(service, **fields) -> httpx.Response:
    return service.post("/v1/chat/completions", {**ASK, **fields})


def test_an_engine_that_does_not_finish_in_time_is_504(hasty, engine, is_error) -> None:
    engine.answers["/generate"] = engine.never
    for n in (1, 2):
        started = time.monotonic()
        response = ask(hasty, n=n)
        is_error(response, 504, type="engine_error", code="engine_timeout", says="did not answer /generate in time")
        assert time.monotonic() - started > 5.9
    assert engine.cancelled.wait(60)


def test_a_stream_whose_first_token_does_not_come_is_504_and_told_when_to_come_back(hasty, engine, is_error) -> None:
    async def begins(http, body):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        await response.write(b": nothing yet\n")
        return await engine.never(http, body)

    for silent in (engine.never, begins):
        engine.cancelled.clear()
        engine.answers["/generate"] = silent
        started = time.monotonic()
        response = ask(hasty, stream=True)
        is_error(response, 504, code="first_token_timeout", says="inference.first-token-timeout-s")
        assert int(response.headers["retry-after"]) >= 1
        assert time.monotonic() - started > 1.9
        assert engine.cancelled.wait(60)


def test_after_the_first_token_a_stream_has_the_time_of_the_whole_request(hasty, engine) -> None:
    first, last = engine.generation([5], finish_reason=None), engine.generation([5, 6, 2])

    async def slow(http, body):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(http)
        await response.write(b"data: " + json.dumps(first).encode() + b"\n\n")
        await asyncio.sleep(2.5)  # longer than the first token may take
        await response.write(b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    engine.answers["/generate"] = slow
    chunks = hasty.stream(**ASK)
    assert [chunk["reef"]["agent_record_id"] for chunk in chunks if "reef" in chunk]
    assert not [chunk for chunk in chunks if "error" in chunk]


def test_over_max_messages_is_413(hasty, is_error) -> None:
    assert ask(hasty, messages=ASK["messages"] * 3).status_code == 200
    response = ask(hasty, messages=ASK["messages"] * 4)
    is_error(response, 413, code="too_many_messages", param="messages", says="4 messages, at most 3 are taken")


def test_over_max_waiting_requests_are_told_when_to_come_back_and_the_others_are_answered(
    hasty, engine, is_error, eventually
) -> None:
    engine.answers["/model_info"] = lambda http, body: web.Response(status=500)  # so that it goes out of rotation
    eventually(lambda: hasty.status()["engines"][0]["state"] == "restarting")
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask, hasty) for _ in range(4)]
        eventually(lambda: sum(request.done() for request in asked) == 2)
        eventually(lambda: hasty.status()["in_flight"] == 2)
        engine.answers.clear()
        answers = [request.result() for request in asked]
    refused = [response for response in answers if response.status_code == 429]
    assert sorted(response.status_code for response in answers) == [200, 200, 429, 429]
    for response in refused:
        is_error(response, 429, type="rate_limit_error", code="queue_full", says="inference.max-waiting")
        assert int(response.headers["retry-after"]) >= 1
    assert ask(hasty).status_code == 200  # and nobody counts as waiting any more
