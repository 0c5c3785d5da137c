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

QUICK = Retry(first_s=0.01, longest_s=0.02, total_s=60.0)


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
    raw = b"\xef\xbb\xbfdata: 1\n\n\xef\xbb\xbfdata: 2\n\ndata: 3\n\n"
    for size in (1, 2, 7, 1000):
        assert asyncio.run(read(size)) == [b"1", b"3"]  # a byte order mark elsewhere is a part of its line


def test_a_line_that_comes_in_very_many_pieces_is_put_together_once() -> None:
    """64 MiB: joined anew for each piece, they would be 32 GiB of copies."""

    async def chunks() -> AsyncIterator[bytes]:
        yield b"data: "
        for _ in range(1024):
            yield b"x" * 65536
        yield b"\n\n"

    async def read() -> list[bytes]:
        return [data async for data in event_data(chunks())]

    (data,) = asyncio.run(read())
    assert data == b"x" * 65536 * 1024


@pytest.mark.parametrize("held", [True, False])
def test_a_stream_is_whole_at_done_whenever_its_body_ends(monkeypatch: pytest.MonkeyPatch, held: bool) -> None:
    """Where the body ends soon, the next request goes over the same connection."""
    monkeypatch.setattr("reef_harness.client._END_S", 0.01 if held else 60.0)
    chunk = b'data: {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
    head += b"x-reef-agent-record-id: c0\r\nx-reef-release-id: r0\r\n\r\n"

    async def run() -> tuple[list[Any], int]:
        over, ends = asyncio.Event(), []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            ends.append(ended := asyncio.Event())
            while request := await reader.readline():
                while (line := await reader.readline()) != b"\r\n":
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                assert request.startswith(b"POST ")
                await reader.readexactly(length)
                writer.write(head + b"%x\r\n%s\r\n" % (len(chunk), chunk))
                if held:
                    await over.wait()
                    break
                writer.write(b"0\r\n\r\n")
            writer.close()
            ended.set()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with Client(url, scenario="sums", retry=QUICK) as client:
            events = [event for _ in range(2) async for event in client.stream("hi")]
        over.set()
        await asyncio.gather(*(ended.wait() for ended in ends))
        server.close()
        await server.wait_closed()
        return events, len(ends)

    events, connections = asyncio.run(run())
    assert [events[0], events[2]] == [TextDelta(0, "a")] * 2
    assert [(event.text, event.receipt) for event in (events[1], events[3])] == [("a", "c0")] * 2
    assert connections == (2 if held else 1)


def call_of(*arguments: str, finish_reason: str = "tool_calls") -> tuple[str, ...]:
    """The arguments of the calls that a stream of calls with these adds up to."""
    assembly = Assembly("u", "c0", "r0")
    pieces = [
        {"index": i, "id": f"k{i}", "function": {"name": "f", "arguments": each}} for i, each in enumerate(arguments)
    ]
    choice = {"index": 0, "delta": {"tool_calls": pieces}, "finish_reason": finish_reason}
    list(assembly.take(json.dumps({"choices": [choice]}).encode()))
    list(assembly.take(b"[DONE]"))
    return tuple(call.arguments for call in assembly.completion().choices[0].tool_calls)


def test_arguments_of_any_size_and_none_at_all_are_a_call_and_what_cannot_be_read_is_none() -> None:
    long = '{"n": %s}' % ("1" * 5000)
    assert call_of(long) == (long,)
    assert call_of("") == ("",)
    assert call_of("", finish_reason="length") == ()  # it may have been cut before them
    assert call_of("{}", "") == ("{}",)  # the one that is whole is why it ended
    assert call_of("[" * 2000) == ()
    assert call_of("[" * 5000 + "]" * 5000) == ()  # deeper than the service takes


def test_no_error_beside_the_choices_is_no_error_and_brackets_without_end_are_no_chunk() -> None:
    chunk = {"error": None, "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]}
    assert list(Assembly("u", "c0", "r0").take(json.dumps(chunk).encode())) == [TextDelta(0, "a")]
    with pytest.raises(e.UnexpectedAnswer, match="none of a chat's"):
        list(Assembly("u", "c0", "r0").take(b"[" * 100_000))


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
