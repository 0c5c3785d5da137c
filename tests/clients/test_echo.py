"""Whole answers go back as input, in every form that the SDKs give them, and continue the exact ids."""

from __future__ import annotations

import itertools
import re

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.service.says import Says

pytestmark = pytest.mark.slow

_numbers = itertools.count()
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SAID = {
    "text": "Five.",
    "thinking and text": "<think>\nHm.\n</think>\n\nFive.",
    "thinking, text and two calls": f"<think>\nHm.\n</think>\n\nLet me add.\n{CALL}\n{CALL.replace('1', '2')}",
    "one call": CALL,
    "thinking and a call": f"<think>\nHm.\n</think>\n\n{CALL}",
    "nothing": "",
    "thinking only": "<think>\nHm.\n</think>\n\n",
}
FORMS = {
    "as it is": lambda item: item,
    "model_dump": lambda item: item.model_dump(),
    "model_dump, as JSON": lambda item: item.model_dump(mode="json"),
    "model_dump without null": lambda item: item.model_dump(exclude_none=True),
    "model_dump of what was sent": lambda item: item.model_dump(exclude_unset=True),
    "to_dict": lambda item: item.to_dict(),
    "to_dict with all": lambda item: item.to_dict(exclude_unset=False),
}
every = pytest.mark.parametrize("said", SAID)
each_way = pytest.mark.parametrize("way", ["whole", "stream", "parsed"])


class Add(BaseModel):
    """Adds to a."""

    a: int


@pytest.fixture(scope="module")
def says(qwen3):
    return Says(*qwen3, "qwen3")


@pytest.fixture(scope="module")
def openai_client(says):
    with openai.OpenAI(base_url=f"{says.service.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def anthropic_client(says):
    with anthropic.Anthropic(base_url=says.service.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def headers():
    return {"x-reef-scenario": f"echo-{next(_numbers)}"}


def continues(says, first, after: str) -> None:
    """`first`: an answer of any API; all have their request's id behind a prefix of their own."""
    second = says.service.receipt(after)
    assert second["parent"] is not None
    turn = says.service.receipt(second["parent"])
    assert turn["request_id"][len("req_") :] == re.split("[-_]", first.id)[1]
    ids = turn["prompt_token_ids"] + turn["token_ids"]
    assert second["prompt_token_ids"][: len(ids)] == ids


@every
@each_way
def test_the_message_of_a_chat(openai_client, says, headers, said, way) -> None:
    tool = openai.pydantic_function_tool(Add, name="add")
    asked = {"model": "m", "tools": [tool], "extra_headers": headers}
    question = [{"role": "user", "content": "2+3="}]
    says(SAID[said])
    if way == "stream":
        with openai_client.chat.completions.stream(messages=question, **asked) as stream:
            first = stream.get_final_completion()
    else:
        ask = openai_client.chat.completions.parse if way == "parsed" else openai_client.chat.completions.create
        first = ask(messages=question, **asked)
    message = first.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in message.tool_calls or ()]
    for form in FORMS.values():
        messages = [*question, form(message), *(results or [{"role": "user", "content": "And?"}])]
        second = openai_client.chat.completions.create(messages=messages, **asked)
        continues(says, first, second.choices[0].reef_agent_record_id)


@every
@each_way
def test_the_output_of_a_response(openai_client, says, headers, said, way) -> None:
    tool = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}
    asked = {"model": "m", "tools": [tool], "extra_headers": headers}
    question = [{"role": "user", "content": "2+3="}]
    says(SAID[said])
    if way == "stream":
        with openai_client.responses.stream(input=question, **asked) as stream:
            first = stream.get_final_response()
    else:
        ask = openai_client.responses.parse if way == "parsed" else openai_client.responses.create
        first = ask(input=question, **asked)
    calls = [item.call_id for item in first.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call, "output": "7"} for call in calls]
    for form in FORMS.values():
        items = [*question, *map(form, first.output), *(results or [{"role": "user", "content": "And?"}])]
        second = openai_client.responses.create(input=items, **asked)
        continues(says, first, second.reef["agent_record_id"])


@every
@each_way
def test_the_content_of_a_message(anthropic_client, says, headers, said, way) -> None:
    asked = {"model": "m", "max_tokens": 64, "extra_headers": headers}
    asked["tools"] = [{"name": "add", "input_schema": PARAMETERS}]
    question = [{"role": "user", "content": "2+3="}]
    says(SAID[said])
    if way == "stream":
        with anthropic_client.messages.stream(messages=question, **asked) as stream:
            first = stream.get_final_message()
    else:
        ask = anthropic_client.messages.parse if way == "parsed" else anthropic_client.messages.create
        first = ask(messages=question, **asked)
    calls = [block.id for block in first.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call, "content": "7"} for call in calls]
    for form in FORMS.values():
        content = [form(block) for block in first.content]
        told = [{"role": "assistant", "content": content}, {"role": "user", "content": results or "And?"}]
        second = anthropic_client.messages.create(messages=[*question, *told], **asked)
        continues(says, first, second.reef["agent_record_id"])
