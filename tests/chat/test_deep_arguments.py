"""A call whose arguments are nested deeper than anything here writes again is text, as the model wrote it."""

from __future__ import annotations

import json

import pytest

from reef.chat import history
from reef.chat.conversation import MAX_DEPTH, Message, ToolCall
from reef.chat.parsing import make_parser

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "array"}}}}}
STYLES = {
    "hermes": '<tool_call>\n{{"name": "f", "arguments": {{"a": {}}}}}\n</tool_call>',
    "qwen3-coder": "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
    "llama3-json": '{{"name": "f", "parameters": {{"a": {}}}}}',
    "mistral": '[TOOL_CALLS] [{{"name": "f", "arguments": {{"a": {}}}}}]',
}


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("depth", [MAX_DEPTH - 1, MAX_DEPTH, 300, 1000])
def test_it_is_a_call_up_to_the_bound_and_text_beyond_it(style, depth) -> None:
    parser = make_parser(tool_parser=style, reasoning_parser=None, tools=[TOOL], seed="s", starts_in_reasoning=False)
    said = STYLES[style].format(nested(depth))
    parser.push(said)
    parser.finish()
    reply = parser.reply
    if depth < MAX_DEPTH:  # the object of the arguments is one level more
        (call,) = reply.tool_calls
        assert call.values() == {"a": json.loads(nested(depth))}
    else:
        assert (reply.content, reply.tool_calls) == (said, ())
    assert history.extend("key", reply.message())  # the turn has a key, so that its receipt can be stored


@pytest.mark.parametrize("depth", [MAX_DEPTH, 300, 1000, 5000])
def test_arguments_that_a_client_sends_are_text_beyond_the_bound(depth) -> None:
    text = '{"a": ' + nested(depth) + "}"
    call = ToolCall("call_1", "f", text)
    assert call.values() == text
    assert Message("assistant", tool_calls=(call,)).rendered()["tool_calls"][0]["function"]["arguments"] == text


def test_brackets_in_strings_and_beside_one_another_are_not_depth() -> None:
    for value in ({"a": "[" * 500}, {"a": [[] for _ in range(500)]}):
        assert ToolCall("call_1", "f", json.dumps(value)).values() == value
