"""What chat templates write of a message is read back as the message."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from reef.chat.conversation import Message, ToolCall
from reef.chat.parsing import default_parsers, make_parser, starts_in_reasoning
from tests.chat.styles import STYLES, TEMPLATES

pytestmark = pytest.mark.slow

NAMES = ("get_weather", "ping")
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object"}}}
    for name in NAMES
]
ASKED = [{"role": "user", "content": "Go on."}]
WEATHER = ToolCall("abcdefghi", "get_weather", '{"city": "Zürich \\"<tool_call>\\"", "days": [1, {"a": null}]}')
PING = ToolCall("123456789", "ping", "{}")
MESSAGES = {
    "text": Message("assistant", "Hello\n\n<b>you</b> }"),
    "a call": Message("assistant", "", None, (WEATHER,)),
    "two calls": Message("assistant", "", None, (PING, WEATHER)),
    "text and two calls": Message("assistant", "Both:", None, (WEATHER, PING)),
    "thinking and text": Message("assistant", "42", "First\n\nsecond"),
    "thinking and a call": Message("assistant", "", "Well <tool_call>", (PING,)),
    "thinking, text and two calls": Message("assistant", "Both:", "Well", (PING, PING)),
}
WRITTEN = {  # what a family's template can write
    "qwen3": list(MESSAGES),
    "llama3": ["text", "a call"],
    "mistral": ["text", "a call", "two calls"],
}


@pytest.fixture(scope="module")
def tokenizer(starter):
    return AutoTokenizer.from_pretrained(str(starter))


@pytest.mark.parametrize(("family", "name"), [(family, name) for family in WRITTEN for name in WRITTEN[family]])
def test_a_message_that_a_template_writes_is_read_back(tokenizer, family, name) -> None:
    message, style, template = MESSAGES[name], STYLES[family], (TEMPLATES / f"{family}.jinja").read_text()
    rendering = {"tools": TOOLS, "chat_template": template, "tokenize": False}
    prompt = tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, **rendering)
    whole = tokenizer.apply_chat_template([*ASKED, message.rendered()], **rendering)
    assert whole.startswith(prompt)
    text = whole[len(prompt) :].rstrip().removesuffix(style.end)
    tool_parser, reasoning_parser = default_parsers(style.model_type, template)
    parser = make_parser(
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        tools=TOOLS,
        seed="s",
        starts_in_reasoning=starts_in_reasoning(reasoning_parser, prompt),
    )
    for character in text:
        parser.push(character)
    parser.finish()
    assert seen(parser.reply.message()) == seen(message)


def seen(message):
    calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    return message.content.strip(), message.reasoning, calls  # Mistral's writes a space before all content
