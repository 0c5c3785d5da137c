"""The client against a real socket: what it sends, what it makes of answers, and how it retries."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from reef_harness import Client, Retry
from reef_harness import errors as e

QUICK = Retry(first_s=0.01, longest_s=0.02, total_s=2.0)


def with_client(url: str, call: Callable[[Client], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        async with Client(url, **{"scenario": "sums", "retry": QUICK, **options}) as client:
            return await call(client)

    return asyncio.run(run())


def test_a_proxy_of_the_environment_is_not_asked_for_a_service_on_this_machine(service: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.delenv("no_proxy", raising=False)
    assert with_client(service.url, lambda c: c.chat("hi"), token="secret").choices


def test_chat_sends_headers_and_body_and_returns_every_choice_with_its_receipt(service: Any) -> None:
    service.answer = lambda prompt, index: f"{prompt}{index}"
    answer = with_client(
        service.url,
        lambda c: c.chat(
            "hi", n=3, max_tokens=9, seed=4, session="s", purpose="eval", tags={"team": "red"}, extra={"top_p": 0.5}
        ),
        token="secret",
    )
    assert [choice.text for choice in answer.choices] == ["hi0", "hi1", "hi2"]
    assert answer.receipts == ("c0", "c1", "c2")
    assert (answer.release, answer.prompt_tokens, answer.completion_tokens) == ("r0", 5, 21)
    _, path, headers, body = service.requests[0]
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == "Bearer secret"
    assert headers["x-reef-scenario"] == "sums"
    assert (headers["x-reef-session"], headers["x-reef-purpose"], headers["x-reef-tag-team"]) == ("s", "eval", "red")
    assert body == {
        "messages": [{"role": "user", "content": "hi"}],
        "n": 3,
        "temperature": 1.0,
        "max_tokens": 9,
        "seed": 4,
        "top_p": 0.5,
    }


def test_completions_take_token_ids(service: Any) -> None:
    answer = with_client(service.url, lambda c: c.completions([1, 2, 3]))
    assert answer.receipt == "c0"
    assert service.requests[0][3]["prompt"] == [1, 2, 3]


@pytest.mark.parametrize("fault", [503, 429, 502, 504, "drop", "lose"])
def test_a_report_is_retried_with_the_same_id_and_body(service: Any, fault: int | str) -> None:
    async def call(client: Client) -> Any:
        answer = await client.chat("hi")
        service.faults.extend([fault, fault])
        return await client.report(answer.receipt, 1.0, group="g", grader=("final", "1"))

    state = with_client(service.url, call)
    sent = service.paths("/reef/report")
    assert len(sent) == 3
    assert sent[0] == sent[1] == sent[2]
    assert sent[0] == {
        "agent_record_id": state.id,
        "references": ["c0"],
        "score": 1.0,
        "group": "g",
        "grader": {"id": "final", "version": "1"},
    }
    assert list(service.reports) == [state.id]


def test_two_reports_have_different_ids(service: Any) -> None:
    async def call(client: Client) -> Any:
        answer = await client.chat("hi", n=2)
        return [await client.report(receipt, 0.0) for receipt in answer.receipts]

    first, second = with_client(service.url, call)
    assert first.id != second.id


def test_retry_after_is_honoured(service: Any) -> None:
    service.faults.append(503)
    service.retry_after = "0.3"
    started = time.monotonic()
    with_client(service.url, lambda c: c.chat("hi"))
    assert time.monotonic() - started >= 0.3


def test_a_retry_after_beyond_the_bound_is_an_error_at_once(service: Any) -> None:
    service.faults.append(503)
    service.retry_after = "3600"
    started = time.monotonic()
    with pytest.raises(e.Unavailable, match="told to answer 503") as caught:
        with_client(service.url, lambda c: c.chat("hi"))
    assert caught.value.retry_after_s == 3600
    assert time.monotonic() - started < 1


def test_retries_end_at_the_bound(service: Any) -> None:
    service.faults.extend([503] * 1000)
    with pytest.raises(e.Unavailable):
        with_client(service.url, lambda c: c.status(), retry=Retry(first_s=0.01, longest_s=0.02, total_s=0.3))
    assert 5 < len(service.requests) < 60


def test_a_chat_whose_connection_broke_is_not_asked_again(service: Any) -> None:
    service.faults.append("drop")
    with pytest.raises(e.Unreachable, match="POST"):
        with_client(service.url, lambda c: c.chat("hi"))
    assert len(service.requests) == 1


def test_nothing_listening_is_unreachable() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(e.Unreachable):
            with_client(url, lambda c: c.status(), retry=Retry(total_s=0.05))
        assert with_client(url, lambda c: c.ready())[0] is False


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, e.BadRequest),
        (401, e.Unauthorized),
        (403, e.Forbidden),
        (404, e.NotFound),
        (409, e.Conflict),
        (413, e.TooLarge),
        (418, e.ServiceError),
        (500, e.ServiceError),
    ],
)
def test_errors_have_the_type_of_their_status_and_the_services_words(
    service: Any, status: int, kind: type[e.ServiceError]
) -> None:
    service.faults.append(status)
    with pytest.raises(kind, match=f"told to answer {status}") as caught:
        with_client(service.url, lambda c: c.report("c0", 1.0))
    assert caught.value.status == status
    assert len(service.requests) == 1


def test_a_stranger_without_receipts_is_not_taken_for_a_service(service: Any) -> None:
    service.chat = lambda body, prompt, headers, kind: {
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"content": "hello"}}]
    }
    with pytest.raises(e.UnexpectedAnswer, match="is it a Reef service"):
        with_client(service.url, lambda c: c.chat("hi"))


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_refused_before_it_is_sent(service: Any, score: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        with_client(service.url, lambda c: c.report("c0", score))
    assert service.requests == []


def test_an_id_with_slashes_stays_one_segment(service: Any) -> None:
    with pytest.raises(e.NotFound):
        with_client(service.url, lambda c: c.report_state("../a/b?c"))
    assert service.requests[0][1] == "/reef/reports/..%2Fa%2Fb%3Fc"


def test_why_follows_a_report_to_its_release_and_knows_receipts(service: Any) -> None:
    service.batch_size = 1

    async def call(client: Client) -> Any:
        answer = await client.chat("hi")
        state = await client.report(answer.receipt, 1.0)
        return await client.why(state.id), await client.why(answer.receipt)

    of_report, of_receipt = with_client(service.url, call)
    assert of_report["report"]["state"] == "trained"
    assert (of_report["release"].id, of_report["release"].parent) == ("r1", "r0")
    assert of_receipt == {"receipt": {"agent_record_id": "c0"}}


def test_wait_for_release_returns_the_next_one_or_times_out(service: Any) -> None:
    service.batch_size = 1

    async def call(client: Client) -> Any:
        waiting = asyncio.create_task(client.wait_for_release(after="r0", poll_s=0.01))
        await asyncio.sleep(0.05)
        await client.report((await client.chat("hi")).receipt, 1.0)
        release = await waiting
        with pytest.raises(TimeoutError):
            await client.wait_for_release(poll_s=0.01, timeout_s=0.1)
        return release

    assert with_client(service.url, call).id == "r1"


def test_scenarios_are_created_and_listed_and_evaluations_stored(service: Any) -> None:
    async def call(client: Client) -> Any:
        await client.store_evaluation("r0", {"accuracy": 0.5})
        return await client.create_scenario("sums"), await client.scenarios()

    assert with_client(service.url, call) == ({"name": "sums"}, [{"name": "sums"}])
    assert service.evaluations == [("r0", {"accuracy": 0.5})]
