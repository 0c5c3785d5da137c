"""The client against a real socket: what it sends, what it makes of answers, and how it retries."""

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from reef_harness import Client, Conversation, Retry
from reef_harness import errors as e
from reef_harness.client import _read

QUICK = Retry(first_s=0.01, longest_s=0.02, total_s=60.0)


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
    assert time.monotonic() - started < 60


def test_retries_end_at_the_bound(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which each request takes a second, however long it takes."""
    service.faults.extend([503] * 1000)
    clock = SimpleNamespace(monotonic=lambda: float(len(service.requests)))
    monkeypatch.setattr("reef_harness.client.time", clock)
    with pytest.raises(e.Unavailable):
        with_client(service.url, lambda c: c.status(), retry=Retry(first_s=0.01, longest_s=0.02, total_s=10.0))
    assert len(service.requests) == 10


def test_each_pause_is_told_with_what_went_wrong_and_the_seconds_left(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which each request takes a second. What is not tried again is no pause."""
    service.faults.extend([503, "drop", 400])
    clock = SimpleNamespace(monotonic=lambda: float(len(service.requests)))
    monkeypatch.setattr("reef_harness.client.time", clock)
    told: list[tuple[type[e.HarnessError], float]] = []
    retry = Retry(0.01, 0.02, 10.0, on_pause=lambda error, left_s: told.append((type(error), left_s)))
    with pytest.raises(e.BadRequest):
        with_client(service.url, lambda c: c.status(), retry=retry)
    assert told == [(e.Unavailable, 9.0), (e.Unreachable, 8.0)]


def test_a_chat_whose_connection_broke_is_not_asked_again(service: Any) -> None:
    service.faults.append("drop")
    with pytest.raises(e.Unreachable, match="POST"):
        with_client(service.url, lambda c: c.chat("hi"))
    assert len(service.requests) == 1


def test_nothing_listening_is_unreachable() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(e.Unreachable, match=r"; is it running\? \(reef serve\)$"):
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
        (410, e.Gone),
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


def test_ids_and_log_probabilities_come_where_they_are_asked_for(service: Any) -> None:
    async def call(client: Client) -> Any:
        asked = {"logprobs": True, "token_ids": True, "n": 2}
        return await client.chat("hi", **asked), await client.completions([1, 2], **asked), await client.chat("hi")

    chat, text, plain = with_client(service.url, call)
    for answer in (chat, text):
        assert [choice.token_ids for choice in answer.choices] == [(10, 20), (11, 21)]
        assert [choice.logprobs for choice in answer.choices] == [(-0.5, -0.25)] * 2
        assert answer.prompt_token_ids == (1, 2)
    assert (plain.choices[0].token_ids, plain.choices[0].logprobs, plain.prompt_token_ids) == (None, None, None)
    chat_body, text_body, plain_body = (body for _, _, _, body in service.requests)
    assert (chat_body["logprobs"], chat_body["return_token_ids"]) == (True, True)
    assert (text_body["logprobs"], text_body["return_token_ids"]) == (0, True)
    assert {"logprobs", "return_token_ids"}.isdisjoint(plain_body)


def test_reasoning_and_tool_calls_are_read_and_said_back(service: Any) -> None:
    service.thinks = "hm"
    service.tool_calls = [{"id": "k", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    service.answer = lambda prompt, index: ""
    service.finish_reason = "tool_calls"
    choice = with_client(service.url, lambda c: c.chat("hi")).choices[0]
    assert (choice.reasoning, choice.finish_reason) == ("hm", "tool_calls")
    assert [(call.id, call.name, call.arguments) for call in choice.tool_calls] == [("k", "add", '{"a": 1}')]
    assert choice.message == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": service.tool_calls,
    }


def test_a_turn_names_the_receipt_that_it_continues(service: Any) -> None:
    async def call(client: Client) -> Any:
        talk = Conversation(client, [{"role": "system", "content": "Be brief."}], max_tokens=9)
        await talk.say("one")
        await talk.say({"role": "user", "content": "two"})
        return talk

    service.answer = lambda prompt, index: f"re: {prompt}"
    talk = with_client(service.url, call)
    assert talk.receipts == ["c0", "c1"]
    assert [message["content"] for message in talk.messages] == ["Be brief.", "one", "re: one", "two", "re: two"]
    first, second = ((headers, body) for _, _, headers, body in service.requests)
    assert "x-reef-parent" not in first[0]
    assert second[0]["x-reef-parent"] == "c0"
    assert second[1]["messages"] == talk.messages[:4]
    assert second[1]["max_tokens"] == 9


def test_a_service_without_our_extras_works_for_one_answer_at_a_time(service: Any) -> None:
    """As reef-infra: the receipt is in a header, there is no release and no usage."""
    real = service.chat

    def bare(body: Any, prompt: str, headers: dict[str, str], kind: str) -> Any:
        whole = real(body, prompt, headers, kind)
        del headers["x-reef-release-id"], whole["usage"]
        for choice in whole["choices"]:
            del choice["reef_agent_record_id"]
        return whole

    service.chat = bare
    answer = with_client(service.url, lambda c: c.chat("hi"))
    assert (answer.receipt, answer.release, answer.completion_tokens) == ("c0", "", 0)
    with pytest.raises(e.UnexpectedAnswer, match=r"choices\[1\].*one answer at a time"):
        with_client(service.url, lambda c: c.chat("hi", n=2))


def test_counts_of_null_are_none(service: Any) -> None:
    real = service.chat
    usage = {"prompt_tokens": None, "completion_tokens": None}
    service.chat = lambda *arguments: real(*arguments) | {"usage": usage}
    answer = with_client(service.url, lambda c: c.chat("hi"))
    assert (answer.prompt_tokens, answer.completion_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        ("completion_tokens", "7", "int as usage.completion_tokens: '7'"),
        ("index", None, "int as a choice's index: None"),
        ("reef_agent_record_id", 5, "str as choices.0.'s receipt: 5"),
        ("message", {"content": 3}, "str as choices.0.'s text: 3"),
        ("logprobs", {"content": [{"logprob": None}]}, "float"),
        ("logprobs", {"content": [{"logprob": "low"}]}, "float"),
    ],
)
def test_an_answer_with_a_value_of_another_kind_is_no_answer(service: Any, place: str, value: Any, told: str) -> None:
    real = service.chat

    def wrong(*arguments: Any) -> Any:
        whole = real(*arguments)
        (whole["usage"] if place in whole["usage"] else whole["choices"][0])[place] = value
        return whole

    service.chat = wrong
    with pytest.raises(e.UnexpectedAnswer, match=f"answered without .*{told}"):
        with_client(service.url, lambda c: c.chat("hi"))


@pytest.mark.parametrize("state", [None, ["trained"]])
def test_a_state_that_is_no_text_is_no_state(service: Any, state: Any) -> None:
    service.reports["x"] = ({}, {"agent_record_id": "x", "state": state})
    with pytest.raises(e.UnexpectedAnswer, match="a report's state came without str as state"):
        with_client(service.url, lambda c: c.report_state("x"))


def test_a_release_without_a_number_of_steps_is_none(service: Any) -> None:
    real = service.chain
    service.chain = lambda query: [entry | {"step": None} for entry in real(query)]
    with pytest.raises(e.UnexpectedAnswer, match="a release came without int as step: None"):
        with_client(service.url, lambda c: c.release("r0"))


def test_brackets_without_end_are_no_answer_and_no_error_of_the_services(service: Any) -> None:
    real, brackets = service.handle, b"[" * 100_000

    def handle(http: Any) -> None:
        status, write = (200 if http.path == "/reef/status" else 500), http.wfile.write
        http.send_response(status)
        http.send_header("content-length", str(len(brackets)))
        http.end_headers()
        write(brackets)

    service.handle = handle
    with pytest.raises(e.UnexpectedAnswer, match="answered 200 without a JSON object"):
        with_client(service.url, lambda c: c.status())
    with pytest.raises(e.ServiceError, match=r"\(HTTP 500\)"):
        with_client(service.url, lambda c: c.scenarios())
    service.handle = real


def test_a_report_carries_all_that_it_may_say(service: Any) -> None:
    async def call(client: Client) -> Any:
        answer = await client.chat("hi", n=2)
        return await client.report(
            answer.receipts, None, outcome="review", reason_code="unclear", rewards={"style": 0.5},
            reference_scores=[1.0, None], feedback={"note": "?"}, truncated=False, metadata={"k": 1}, report_id="mine",
        )  # fmt: skip

    state = with_client(service.url, call)
    assert (state.id, state.state, state.reason) == ("mine", "recorded", "no_score")
    assert service.paths("/reef/report") == [
        {
            "agent_record_id": "mine",
            "references": ["c0", "c1"],
            "outcome": "review",
            "reason_code": "unclear",
            "rewards": {"style": 0.5},
            "reference_scores": [1.0, None],
            "feedback": {"note": "?"},
            "truncated": False,
            "metadata": {"k": 1},
        }
    ]


def test_an_argument_that_there_is_not_is_refused_by_name(service: Any) -> None:
    with pytest.raises(TypeError, match="unexpected argument 'top_p'"):
        with_client(service.url, lambda c: c.chat("hi", top_p=0.5))
    with pytest.raises(TypeError, match="unexpected argument 'reward'"):
        with_client(service.url, lambda c: c.report("c0", 1.0, reward=2))
    assert service.requests == []


def test_text_in_headers_goes_as_utf_8(service: Any) -> None:
    with_client(service.url, lambda c: c.chat("hi", session="séance", tags={"who": "Ä·雪"}))
    headers = service.requests[0][2]
    assert headers["x-reef-session"].encode("latin-1").decode() == "séance"
    assert headers["x-reef-tag-who"].encode("latin-1").decode() == "Ä·雪"


@pytest.mark.parametrize(
    "wrong", [{"tags": {"a b": "c"}}, {"tags": {"a": "b\nc"}}, {"session": "a\r\nx-evil: 1"}, {"parent": " rcp_1"}]
)
def test_what_cannot_stand_in_a_header_is_refused_before_it_is_sent(service: Any, wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"expected a line of text|a name has letters"):
        with_client(service.url, lambda c: c.chat("hi", **wrong))
    assert service.requests == []


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "localhost", "", "ftp://x"])
def test_what_is_no_url_of_a_service_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match=r"expected a service's URL, http://HOST:PORT"):
        Client(url)


def test_a_client_that_was_closed_says_so(service: Any) -> None:
    async def call() -> None:
        client = Client(service.url)
        await client.close()
        await client.status()

    with pytest.raises(e.Closed, match="is closed"):
        asyncio.run(call())


def test_more_requests_than_connections_wait_for_one(service: Any) -> None:
    async def call(client: Client) -> Any:
        return await asyncio.gather(*(client.chat(f"p{i}") for i in range(20)))

    answers = with_client(service.url, call, max_connections=3)
    assert {answer.receipt for answer in answers} == {f"c{i}" for i in range(20)}


@pytest.mark.parametrize(
    "wrong", [{"score": float("nan")}, {"rewards": {"a": float("inf")}}, {"reference_scores": [float("nan")]}]
)
def test_a_number_that_is_not_finite_is_refused_before_it_is_sent(service: Any, wrong: Any) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected finite"):
        with_client(service.url, lambda c: c.report("c0", **wrong))
    assert service.requests == []


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
        return state, await client.why(state.id), await client.why(answer.receipt)

    state, of_report, of_receipt = with_client(service.url, call)
    assert of_report.report.state == "trained"
    assert (of_report.release.id, of_report.release.parent) == ("r1", "r0")
    assert of_report.lineage == {"release_id": "r1", "samples": [{"report_id": state.id}]}
    assert (of_receipt.receipt, of_receipt.report) == ({"agent_record_id": "c0"}, None)
    assert repr(of_receipt) == "Explanation(receipt='c0')"
    assert f"report=ReportState(id='{state.id}', state='trained'" in repr(of_report)


def test_why_of_a_report_that_waits_knows_no_release(service: Any) -> None:
    async def call(client: Client) -> Any:
        return await client.why((await client.report((await client.chat("hi")).receipt, 1.0)).id)

    explained = with_client(service.url, call)
    assert (explained.report.state, explained.release, explained.lineage, explained.history) == (
        "pending",
        None,
        None,
        [],
    )


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


def test_releases_are_paged_by_their_numbers(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reef_harness.client._RELEASES_A_PAGE", 2)
    service.release_names = [f"r{i}" for i in range(5)]

    async def call(client: Client) -> Any:
        return await client.releases(limit=3), await client.releases(limit=None), await client.releases(before=2)

    three, everything, older = with_client(service.url, call)
    assert [release.id for release in three] == ["r4", "r3", "r2"]
    assert [release.id for release in everything] == ["r4", "r3", "r2", "r1", "r0"]
    assert [release.id for release in older] == ["r1", "r0"]
    asked = [path.partition("?")[2] for _, path, _, _ in service.requests]
    assert asked[:2] == ["limit=2", "limit=1&before=3"]
    assert asked[2:5] == ["limit=2", "limit=2&before=3", "limit=2&before=1"]


def test_an_engine_is_asked_for_and_given_back_however_the_block_ends(service: Any) -> None:
    service.release_names = ["r0", "r1"]

    async def call(client: Client) -> Any:
        async with client.engine_for("r0") as role:
            answer = await client.chat("hi", release="r0")
            lent = list(service.engines)
        with pytest.raises(KeyError, match="mine"):
            async with client.engine_for("r0"):
                raise KeyError("mine")
        async with client.engine_for("r1") as served:
            pass
        return role, lent, answer, served

    role, lent, answer, served = with_client(service.url, call)
    assert (role, lent, served, service.engines) == ("evaluation", ["r0"], "serving", [])
    asked = [(method, path, body) for method, path, _, body in service.requests if "/engine" in path]
    path = "/reef/scenarios/sums/releases/r0/engine"
    one, two, three = (body["loan"] for method, _, body in asked if method == "POST")
    assert len({one, two, three}) == 3
    assert asked == [
        ("POST", path, {"loan": one}),
        ("DELETE", f"{path}?loan={one}", None),
        ("POST", path, {"loan": two}),
        ("DELETE", f"{path}?loan={two}", None),
        ("POST", path.replace("r0", "r1"), {"loan": three}),
    ]
    assert answer.receipt == "c0"
    assert [headers.get("x-reef-release") for _, path, headers, _ in service.requests if "/v1/" in path] == ["r0"]


def test_an_engine_that_cannot_be_given_back_does_not_hide_what_went_wrong(service: Any) -> None:
    service.release_names = ["r0", "r1"]

    async def call(client: Client) -> None:
        async with client.engine_for("r0"):
            service.faults.append(409)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        with_client(service.url, call)
    assert "was not given back" in caught.value.__notes__[0]


def test_an_engine_that_is_taken_is_a_conflict(service: Any) -> None:
    async def call(client: Client) -> None:
        service.faults.append(409)
        async with client.engine_for("r0"):
            raise AssertionError("the block must not begin")

    with pytest.raises(e.Conflict):
        with_client(service.url, call)


def test_scenarios_are_created_and_listed_and_evaluations_stored(service: Any) -> None:
    async def call(client: Client) -> Any:
        await client.store_evaluation("r0", {"accuracy": 0.5})
        return await client.create_scenario("sums"), await client.scenarios()

    assert with_client(service.url, call) == ({"name": "sums"}, [{"name": "sums"}])
    assert service.evaluations == [("r0", {"accuracy": 0.5})]


async def lend_and_wait(client: Client, entered: asyncio.Event | None = None) -> None:
    async with client.engine_for("r0"):
        if entered is not None:
            entered.set()
        await asyncio.sleep(60)


def hold_the_answer_to_a_loan(service: Any) -> tuple[threading.Event, threading.Event]:
    """The service lends and does not answer: an event for that it has lent, and one that lets it answer."""
    lent, go_on = threading.Event(), threading.Event()
    real = service.handle

    def handle(http: Any) -> None:
        if http.command == "POST" and http.path.endswith("/engine"):
            real_send = http.send_response

            def late(status: int) -> None:
                lent.set()
                go_on.wait(60)
                real_send(status)

            http.send_response = late
        real(http)

    service.handle = handle
    return lent, go_on


def test_an_engine_is_given_back_though_who_asked_was_cancelled_while_it_started(service: Any) -> None:
    service.release_names = ["r0", "r1"]
    lent, go_on = hold_the_answer_to_a_loan(service)

    async def call(client: Client) -> None:
        task = asyncio.create_task(lend_and_wait(client))
        await asyncio.to_thread(lent.wait, 60)
        assert service.engines == ["r0"]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with_client(service.url, call)
    go_on.set()
    assert service.engines == []


@pytest.mark.parametrize("times", [1, 2])
def test_an_engine_is_given_back_though_the_block_was_cancelled_once_or_again(service: Any, times: int) -> None:
    service.release_names = ["r0", "r1"]

    async def call(client: Client) -> None:
        entered = asyncio.Event()
        task = asyncio.create_task(lend_and_wait(client, entered))
        await entered.wait()
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task

    with_client(service.url, call)
    assert service.engines == []


@pytest.mark.parametrize("fault", ["lose", 502, 504])
def test_an_engine_whose_loan_was_not_answered_is_given_back(service: Any, fault: str | int) -> None:
    """A gateway may give up on a service that lends: only Reef's own refusal means that nothing was lent."""
    service.release_names = ["r0", "r1"]

    async def call(client: Client) -> None:
        service.faults.append(fault)
        with pytest.raises(e.Unreachable if fault == "lose" else e.EngineFailed):
            await lend_and_wait(client)

    with_client(service.url, call)
    assert [method for method, path, _, _ in service.requests if "/engine" in path] == ["POST", "DELETE"]
    assert service.engines == []


def test_a_loan_that_was_refused_is_not_given_back(service: Any) -> None:
    async def call(client: Client) -> None:
        service.faults.append(409)
        with pytest.raises(e.Conflict):
            await lend_and_wait(client)

    with_client(service.url, call)
    assert [method for method, path, _, _ in service.requests if "/engine" in path] == ["POST"]


def test_giving_an_engine_back_is_tried_again_where_the_answer_is_lost(service: Any) -> None:
    service.release_names = ["r0", "r1"]

    async def call(client: Client) -> None:
        async with client.engine_for("r0"):
            service.faults.extend(["drop", "lose"])

    with_client(service.url, call)
    assert [method for method, path, _, _ in service.requests if "/engine" in path] == ["POST", *["DELETE"] * 3]
    assert service.engines == []


def test_an_engine_that_is_lent_still_is_given_back_when_the_client_is_closed(service: Any) -> None:
    service.release_names = ["r0", "r1"]

    async def call(client: Client) -> None:
        held = client.engine_for("r0")
        await held.__aenter__()
        assert service.engines == ["r0"]
        await client.close()
        assert service.engines == []
        await held.__aexit__(None, None, None)

    with_client(service.url, call)
    assert [method for method, path, _, _ in service.requests if "/engine" in path] == ["POST", "DELETE"]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:99999",
        "http://127.0.0.1:0",
        "http://127.0.0.1:x",
        "http://:8080",
        "https://",
        "http://[::1",
        "http://a..b:80",
        f"http://{'a' * 64}.example",
    ],
)
def test_a_url_to_which_nothing_could_be_sent_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="expected a service's URL, http://HOST:PORT") as caught:
        Client(url)
    assert repr(url) in str(caught.value)


def test_an_answer_without_a_choice_is_none(service: Any) -> None:
    service.chat = lambda body, prompt, headers, kind: {"choices": []}
    with pytest.raises(e.UnexpectedAnswer, match="answered without any choice"):
        with_client(service.url, lambda c: c.chat("hi"))


@pytest.mark.parametrize("answer", [{}, {"scenarios": None, "releases": None}, {"scenarios": [1], "releases": ["x"]}])
def test_lists_that_are_none_are_an_unexpected_answer(service: Any, answer: Any) -> None:
    service.route = lambda *_: (200, answer)
    for call in (Client.scenarios, Client.releases, Client.current_release):
        with pytest.raises(e.UnexpectedAnswer, match="expected a list of objects"):
            with_client(service.url, call)


def test_the_current_release_is_found_behind_many_that_are_not(service: Any) -> None:
    """Held and rejected links are newer than the head."""
    service.release_names = [f"r{i}" for i in range(1100)]
    real = service.chain

    def chain(query: dict[str, str]) -> Any:
        return [entry | {"current": entry["number"] == current} for entry in real(query)]

    service.chain, current = chain, 30
    assert with_client(service.url, lambda c: c.current_release()).id == "r30"
    assert len(service.requests) == 3
    current = -1
    with pytest.raises(e.UnexpectedAnswer, match="none of the 1100 releases of 'sums' is current"):
        with_client(service.url, lambda c: c.current_release())


class Broken:
    """A server on a real socket that refuses every request with a body that it does not finish."""

    def __init__(self, *, closes: bool) -> None:
        self._closes = closes
        self.num_asked = 0
        self.done: list[asyncio.Event] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        done = asyncio.Event()
        self.done.append(done)
        await reader.readuntil(b"\r\n\r\n")
        self.num_asked += 1
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()
        if not self._closes:
            await reader.read()  # its own body, and then until the client goes
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        done.set()


@pytest.mark.parametrize("closes", [True, False])
def test_refusals_whose_body_breaks_or_is_cancelled_hold_no_connection(
    closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = asyncio.Event()

    async def read(response: httpx.Response) -> None:
        reading.set()  # the headers are there; it waits for the rest of the body
        await _read(response)

    monkeypatch.setattr("reef_harness.client._read", read)

    async def stream(client: Client) -> None:
        async for _ in client.stream("hi"):
            pass

    async def ask(client: Client) -> None:
        reading.clear()
        asking = asyncio.create_task(stream(client))
        if not closes:
            await reading.wait()
            asking.cancel()
        with pytest.raises(e.Unreachable if closes else asyncio.CancelledError):
            await asking

    async def run() -> int:
        broken = Broken(closes=closes)
        async with await asyncio.start_server(broken.answer, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with Client(url, max_connections=2, retry=QUICK) as client:
                for _ in range(4):
                    await ask(client)
            for done in broken.done:
                await done.wait()
        return broken.num_asked

    assert asyncio.run(run()) == 4


def test_an_engine_that_is_not_taken_back_in_time_does_not_hold_up_a_failure(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reef_harness.client._GIVE_BACK_S", 0.05)
    service.release_names = ["r0", "r1"]
    real, go_on = service.handle, threading.Event()

    def handle(http: Any) -> None:
        if http.command == "DELETE":
            go_on.wait(60)
        real(http)

    service.handle = handle

    async def call(client: Client) -> None:
        async with client.engine_for("r0"):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        with_client(service.url, call)
    assert "no answer within 0.05 s" in caught.value.__notes__[0]
    go_on.set()
