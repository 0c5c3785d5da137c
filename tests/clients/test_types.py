"""Every answer and every event is what the SDKs' own types say, field by field: their clients do not check it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import ErrorResponse, Message, MessageTokensCount, RawMessageStreamEvent
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.service.says import Says

pytestmark = pytest.mark.slow

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SAID = {
    "text": "Five.",
    "nothing": "",
    "thinking only": "<think>\nHm.\n</think>\n\n",
    "thinking and text": "<think>\nHm.\n</think>\n\nFive.",
    "one call": CALL,
    "thinking, text and two calls": f"<think>\nHm.\n</think>\n\nLet me add.\n{CALL}\n{CALL.replace('1', '2')}",
    "text after a call": f"{CALL}\nDone.",
}
CUT = {
    "in the thinking": "<think>\nHm",
    "in the text": "<think>\nHm.\n</think>\n\nFi",
    "in a call": f"Let me add.\n{CALL[:50]}",
    "before anything": "",
}
ANSWERS = [*((text, False) for text in SAID.values()), *((text, True) for text in CUT.values())]
NAMES = [*SAID, *(f"cut {where}" for where in CUT)]
each = pytest.mark.parametrize(("said", "cut"), ANSWERS, ids=NAMES)
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
ASKED = [{"role": "user", "content": "2+3="}]


@pytest.fixture(scope="module")
def says(qwen3):
    return Says(*qwen3, "qwen3")


def conforms(type: Any, value: Any) -> Any:
    """Strict but for what JSON has no types for, and with all fields that are required."""
    return TypeAdapter(type).validate_json(json.dumps(value), strict=True)


def named_events(says, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream that names each by its type."""
    response = says.service.post(route, {**body, "stream": True})
    assert response.status_code == 200, response.text
    events = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def breaks(says, after: str) -> None:
    """The next stream ends without an end after some text."""
    ids = says.encode(after)
    steps = [says.engine.generation(ids[:end], finish_reason=None) for end in range(1, len(ids) + 1)]
    says.engine.answers["/generate"] = says.engine.events(*steps, done=False)


def same_chats(service, body: dict[str, Any], *, whole_text: bool) -> None:
    """The whole answer and the chunks of a streamed one have their types, and say the same."""
    whole = conforms(ChatCompletion, service.post("/v1/chat/completions", body).json())
    assert [choice.index for choice in whole.choices] == list(range(body.get("n", 1)))
    chunks = service.stream(**body, stream_options={"include_usage": True})
    checked = [conforms(ChatCompletionChunk, chunk) for chunk in chunks]
    assert checked[-1].usage == whole.usage
    assert {chunk.id for chunk in checked} == {checked[0].id}
    for choice in whole.choices:
        parts = [part for chunk in checked for part in chunk.choices if part.index == choice.index]
        assert [part.delta.role for part in parts if part.delta.role is not None] == ["assistant"]
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
        assert parts[-1].finish_reason
        if whole_text:
            assert "".join(part.delta.content or "" for part in parts) == (choice.message.content or "")


@each
def test_chats(says, said, cut) -> None:
    says(said, cut=cut)
    tool = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
    body = {"model": "m", "messages": ASKED, "tools": [tool], "max_tokens": 64, "logprobs": True}
    same_chats(says.service, body, whole_text=not cut)  # a call that is cut is text in the whole answer only


def test_chats_with_several_choices(recorder) -> None:
    body = {"model": "m", "messages": ASKED, "max_tokens": 8, "n": 3, "seed": 1, "logprobs": True, "top_logprobs": 2}
    same_chats(recorder, body, whole_text=True)


@each
def test_responses(says, said, cut) -> None:
    says(said, cut=cut)
    tool = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}
    body = {"input": ASKED, "tools": [tool]}
    whole = says.service.post("/v1/responses", body).json()
    conforms(Response, whole)
    conforms(Response, says.service.get(f"/v1/responses/{whole['id']}").json())
    events = named_events(says, "/v1/responses", body)
    for event in events:
        conforms(ResponseStreamEvent, event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == f"response.{whole['status']}" == f"response.{'incomplete' if cut else 'completed'}"
    added = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert added == list(range(len(done)))
    assert done == events[-1]["response"]["output"]


@each
@pytest.mark.parametrize("thinking", [None, {"type": "adaptive", "display": "omitted"}])
def test_messages(says, said, cut, thinking) -> None:
    says(said, cut=cut)
    body = {"model": "m", "max_tokens": 64, "messages": ASKED, "tools": [{"name": "add", "input_schema": PARAMETERS}]}
    body |= {"thinking": thinking} if thinking else {}
    whole = conforms(Message, says.service.post("/v1/messages", body).json())
    count = {key: value for key, value in body.items() if key != "max_tokens"}
    counted = conforms(MessageTokensCount, says.service.post("/v1/messages/count_tokens", count).json())
    assert counted.input_tokens == whole.usage.input_tokens
    events = named_events(says, "/v1/messages", body)
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    open_index, next_index = None, 0
    for event in events:
        if event["type"] == "ping":
            continue
        conforms(RawMessageStreamEvent, event)
        if event["type"] == "content_block_start":
            assert (open_index, event["index"]) == (None, next_index)
            open_index, next_index = next_index, next_index + 1
        elif event["type"].startswith("content_block"):
            assert event["index"] == open_index
            open_index = None if event["type"].endswith("stop") else open_index
    assert open_index is None
    assert events[-2]["delta"]["stop_reason"] == whole.stop_reason


def test_text_completions_and_the_model(recorder) -> None:
    body = {"model": "m", "prompt": "2+3=", "max_tokens": 8, "logprobs": 1, "n": 2}
    conforms(Completion, recorder.post("/v1/completions", body).json())
    for chunk in recorder.stream("/v1/completions", **body, stream_options={"include_usage": True}):
        for choice in chunk["choices"]:  # the type is that of whole answers, and OpenAI's own streams say null too
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        conforms(Completion, chunk)
    for model in recorder.get("/v1/models").json()["data"]:
        conforms(Model, model)


def test_an_engine_that_fails_in_a_stream_ends_it_as_the_types_say(says) -> None:
    breaks(says, "Let me see.")
    events = named_events(says, "/v1/responses", {"input": ASKED})
    assert conforms(ResponseStreamEvent, events[-1]).response.error.code == "server_error"
    events = named_events(says, "/v1/messages", {"model": "m", "max_tokens": 64, "messages": ASKED})
    assert conforms(ErrorResponse, events[-1]).error.type == "api_error"
    wrong = says.service.post("/v1/messages", {"model": "m", "max_tokens": 64, "messages": []}).json()
    assert conforms(ErrorResponse, wrong).error.type == "invalid_request_error"
