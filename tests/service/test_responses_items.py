"""Items of /v1/responses: what a reply becomes, and what items become when a client sends them back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.chat.conversation import Message, ToolCall
from reef.chat.reply import ReasoningDelta, Reply, TextDelta, ToolCallArguments, ToolCallBegin
from reef.service.responses_output import Output, whole_output
from reef.service.wire import parse
from reef.service.wire_responses import ResponsesBody

pytestmark = pytest.mark.slow

text = st.text(min_size=1, max_size=8)
call = st.builds(
    lambda id, name, value: ToolCall(f"call_{id}", name, json.dumps({"x": value})),
    st.integers(),
    st.sampled_from(["add", "agents.close"]),
    text,
)
NAMESPACES = {"agents.close": ("agents", "close")}


def messages_of(items):
    """As the service reads them when a client sends them."""
    return parse(ResponsesBody, json.dumps({"input": items}).encode()).messages()


def deltas_of(parts):
    """Parts of text and calls, each in pieces."""
    index = 0
    for part in parts:
        if isinstance(part, str):
            yield from (TextDelta(character) for character in part)
            continue
        yield ToolCallBegin(index, part.id, part.name)
        yield from (ToolCallArguments(index, character) for character in part.arguments)
        index += 1


@given(st.none() | text, st.lists(text | call, max_size=5))
def test_the_items_of_a_reply_that_come_back_are_its_message(reasoning, parts) -> None:
    """Wherever calls stand in the text: otherwise the next turn would not be found."""
    output = Output("req_1", NAMESPACES)
    events = []
    for delta in [*([ReasoningDelta(reasoning)] if reasoning else []), *deltas_of(parts)]:
        events += output.push(delta)
    events += output.finish(cut=False)
    content = "".join(part for part in parts if isinstance(part, str))
    calls = tuple(part for part in parts if isinstance(part, ToolCall))
    assert messages_of(output.items) == [Message("assistant", content, reasoning, calls)]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == output.items
    assert {item["status"] for item in done} == {"completed"}


@given(st.none() | text, st.text(max_size=8), st.lists(call, max_size=3))
def test_the_items_of_a_whole_reply_are_its_message(reasoning, content, calls) -> None:
    reply = Reply(content, reasoning, tuple(calls))
    assert messages_of(whole_output("req_1", NAMESPACES, reply, cut=False)) == [reply.message()]


def test_every_item_is_added_before_it_grows_and_done_before_the_next_begins() -> None:
    output = Output("req_1", {})
    events = []
    for delta in deltas_of(["ab", ToolCall("c", "add", "{}"), "d"]):
        events += output.push(delta)
    events += output.finish(cut=False)
    open_item = None
    for event in events:
        if event["type"] == "response.output_item.added":
            assert open_item is None
            open_item = event["output_index"]
        assert event["output_index"] == open_item
        if event["type"] == "response.output_item.done":
            open_item = None
    assert open_item is None
    assert [item["type"] for item in output.items] == ["message", "function_call", "message"]


def test_a_call_whose_arguments_are_no_json_is_incomplete() -> None:
    output = Output("req_1", {})
    for delta in deltas_of([ToolCall("a", "add", '{"x": '), ToolCall("b", "add", "{}")]):
        list(output.push(delta))
    list(output.finish(cut=False))
    assert [item["status"] for item in output.items] == ["incomplete", "completed"]


def test_a_reply_that_says_nothing_is_an_empty_message() -> None:
    (item,) = whole_output("req_1", {}, Reply(""), cut=True)
    assert (item["type"], item["status"], item["content"][0]["text"]) == ("message", "incomplete", "")


SAID = {"role": "assistant", "content": "a"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
CALLED = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "r"}


@pytest.mark.parametrize(
    ("items", "roles"),
    [
        ([SAID, SAID], ["assistant", "assistant"]),
        ([THOUGHT, SAID, THOUGHT, SAID], ["assistant", "assistant"]),
        ([THOUGHT, CALLED, RESULT, CALLED, RESULT, SAID], ["assistant", "tool", "assistant", "tool", "assistant"]),
        ([CALLED, CALLED, RESULT, RESULT], ["assistant", "tool", "tool"]),
        ([{"role": "user", "content": "u"}, SAID, {"role": "user", "content": "u"}], ["user", "assistant", "user"]),
        ([{"role": "developer", "content": []}, SAID], ["developer", "assistant"]),
    ],
)
def test_items_are_the_messages_that_said_them(items, roles) -> None:
    assert [message.role for message in messages_of(items)] == roles
