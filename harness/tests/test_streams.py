"""Streamed answers: what is told as it comes, what they add up to, and streams that break."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from reef_harness import Client, Completion, Retry
from reef_harness import errors as e
from reef_harness.streams import Assembly, event_data
from reef_harness.types import ReasoningDelta, TextDelta, ToolCallDelta

QUICK = Retry(first_s=0.01, longest_s=0.02, total_s=2.0)


def streamed(service: Any, **asking: Any) -> list[Any]:
    async def run() -> list[Any]:
        async with Client(service.url, scenario="sums", retry=QUICK) as client:
            return [event async for event in client.stream("hi", **asking)]

    return asyncio.run(run())


def whole(service: Any, **asking: Any) -> Completion:
    async def run() -> Completion:
        async with Client(service.url, scenario="sums", retry=QUICK) as client:
            return await client.chat("hi", **asking)

    return asyncio.run(run())


def test_text_comes_in_pieces_and_ends_with_the_whole_answer(service: Any) -> None:
    service.answer = lambda prompt, index: f"a b{index}"
    *deltas, last = streamed(service, n=2, token_ids=True, logprobs=True, max_tokens=9)
    assert deltas == [TextDelta(0, "a"), TextDelta(0, " b0"), TextDelta(1, "a"), TextDelta(1, " b1")]
    assert [choice.text for choice in last.choices] == ["a b0", "a b1"]
    assert last.receipts == ("c0", "c1")
    assert (last.release, last.prompt_tokens, last.completion_tokens) == ("r0", 5, 14)
    body = service.requests[0][3]
    assert (body["stream"], body["stream_options"], body["max_tokens"]) == (True, {"include_usage": True}, 9)


def test_a_stream_adds_up_to_what_the_whole_answer_says(service: Any) -> None:
    service.thinks = "let me\u2028think"
    service.answer = lambda prompt, index: "caf\u00e9 \u2028 fin"
    call = {"id": "k", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    service.tool_calls = [call, {**call, "id": "l"}]
    service.finish_reason = "tool_calls"
    *deltas, last = streamed(service, n=2, token_ids=True, logprobs=True)
    other = whole(service, n=2, token_ids=True, logprobs=True)
    for ours, theirs in zip(last.choices, other.choices, strict=True):
        assert (ours.text, ours.reasoning, ours.tool_calls) == (theirs.text, theirs.reasoning, theirs.tool_calls)
        assert (ours.token_ids, ours.logprobs) == (theirs.token_ids, theirs.logprobs)
        assert ours.message == theirs.message
    assert last.prompt_token_ids == other.prompt_token_ids == (1, 2)
    assert ReasoningDelta(0, "let me\u2028think") in deltas
    assert [delta for delta in deltas if isinstance(delta, ToolCallDelta) and delta.choice == 1][:4] == [
        ToolCallDelta(1, 0, "k", "add", ""),
        ToolCallDelta(1, 0, None, None, '{"a"'),
        ToolCallDelta(1, 0, None, None, ": 1}"),
        ToolCallDelta(1, 1, "l", "add", ""),
    ]


def test_a_call_that_was_cut_is_told_and_is_none_in_the_end(service: Any) -> None:
    service.tool_calls = [{"id": "k", "type": "function", "function": {"name": "add", "arguments": '{"a": '}}]
    service.finish_reason = "length"
    *deltas, last = streamed(service)
    assert any(isinstance(delta, ToolCallDelta) for delta in deltas)
    assert (last.choices[0].tool_calls, last.choices[0].finish_reason) == ((), "length")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("cut", r"without why choice 0 ended, the receipts, \[DONE\]"),
        ("error", "the engine died"),
        ("no_receipt", "without the receipts"),
        ("no_done", r"without \[DONE\]"),
    ],
)
def test_a_stream_that_ends_early_is_no_answer(service: Any, fault: str, message: str) -> None:
    service.stream_fault = fault
    seen: list[Any] = []

    async def run() -> None:
        async with Client(service.url, scenario="sums", retry=QUICK) as client:
            async for event in client.stream("hi"):
                seen.append(event)

    with pytest.raises(e.BrokenStream, match=message) as caught:
        asyncio.run(run())
    assert seen
    assert not [event for event in seen if isinstance(event, Completion)]
    assert caught.value.code == ("engine_failed" if fault == "error" else None)
    assert len(service.requests) == 1


@pytest.mark.parametrize(("fault", "kind"), [(400, e.BadRequest), (410, e.Gone), ("drop", e.Unreachable)])
def test_a_refusal_before_the_stream_has_its_own_type(service: Any, fault: Any, kind: type[Exception]) -> None:
    service.faults.append(fault)
    with pytest.raises(kind):
        streamed(service)
    assert len(service.requests) == 1


def test_a_stream_that_was_refused_for_now_is_asked_for_again(service: Any) -> None:
    service.faults.extend([503, 429])
    assert streamed(service)[-1].receipt == "c0"
    assert len(service.requests) == 3


def test_who_leaves_the_loop_closes_the_connection_and_the_client_goes_on(service: Any) -> None:
    async def run() -> Any:
        async with Client(service.url, scenario="sums", max_connections=1) as client:
            async with aclosing(client.stream("hi")) as events:
                first = await anext(events)
            return first, await client.chat("hi")

    first, answer = asyncio.run(run())
    assert first == TextDelta(0, "1+1=2.")
    assert answer.receipt == "c1"


def test_an_answer_that_is_no_stream_is_said(service: Any) -> None:
    service.send_stream = None
    real = service.route
    service.route = lambda method, parts, body, headers, query: (
        body.pop("stream"),
        real(method, parts, body, headers, query),
    )[1]
    with pytest.raises(e.UnexpectedAnswer, match="application/json, not text/event-stream"):
        streamed(service)


def test_events_are_read_wherever_the_chunks_are_cut() -> None:
    raw = b': ping\r\ndata: {"a":"\xe2\x80\xa8"}\r\n\r\ndata:one\ndata: two\n\nevent: x\n\ndata: [DONE]\n\ndata: cut'

    async def chunks(size: int) -> AsyncIterator[bytes]:
        for start in range(0, len(raw), size):
            yield raw[start : start + size]

    async def read(size: int) -> list[bytes]:
        return [data async for data in event_data(chunks(size))]

    for size in (1, 2, 7, 1000):
        assert asyncio.run(read(size)) == ['{"a":"\u2028"}'.encode(), b"one\ntwo", b"[DONE]"]


@pytest.mark.parametrize("data", [b"{", b"[]", b"3", b'{"choices": 1}', b'{"choices": [{"delta": {}}]}'])
def test_a_chunk_of_something_else_is_said(data: bytes) -> None:
    with pytest.raises(e.UnexpectedAnswer, match="none of a chat's"):
        list(Assembly("http://x", None, None).take(data))


def test_a_receipt_in_the_header_or_alone_in_the_chunk_is_enough_for_one_choice() -> None:
    """What reef-infra sends: no list of receipts, no release."""
    for header, chunk in (("c7", b'{"choices": []}'), (None, b'{"choices": [], "reef": {"agent_record_id": "c7"}}')):
        assembly = Assembly("http://x", header, None)
        for data in (
            b'{"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}',
            chunk,
            b"[DONE]",
        ):
            list(assembly.take(data))
        answer = assembly.completion()
        assert (answer.text, answer.receipt, answer.release) == ("a", "c7", "")


@pytest.mark.parametrize("index", [-1, "0", None])
def test_a_choice_with_an_index_that_is_none_is_no_chunk(index: Any) -> None:
    chunk = {"choices": [{"index": index, "delta": {"content": "a"}, "finish_reason": None}]}
    with pytest.raises(e.UnexpectedAnswer, match="none of a chat's"):
        list(Assembly("u", "c0", "r0").take(json.dumps(chunk).encode()))


def test_a_choice_beyond_the_receipts_is_an_answer_without_them() -> None:
    assembly = Assembly("u", "c0", "r0")
    chunk = {"choices": [{"index": 3, "delta": {"content": "a"}, "finish_reason": "stop"}]}
    assert list(assembly.take(json.dumps(chunk).encode())) == [TextDelta(3, "a")]
    list(assembly.take(b"[DONE]"))
    with pytest.raises(e.BrokenStream, match="without the receipts"):
        assembly.completion()
