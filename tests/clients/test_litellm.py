"""LiteLLM, the client of many agents, against the real service: as OpenAI and as Anthropic, whole, streamed, tools."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients import guarded as guarded_service

pytestmark = pytest.mark.slow  # importing it takes seconds

QUESTION = [{"role": "user", "content": "2+3="}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


_numbers = itertools.count()


class Raised(Exception):  # noqa: N818 - the name of what LiteLLM raised is its text
    """What LiteLLM raised: the name of its class, and its message."""


@pytest.fixture(scope="module")
def call(tmp_path_factory):
    """`call("completion", **arguments)`: see `litellm_process`. Raises Raised."""
    log = (tmp_path_factory.mktemp("litellm") / "stderr").open("w+")
    command = [sys.executable, str(Path(__file__).with_name("litellm_process.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process:

        def ask(name, **arguments):
            process.stdin.write(json.dumps({"call": name, "arguments": arguments}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, Path(log.name).read_text()
            said = json.loads(line)
            if "error" in said:
                raise Raised(f"{said['error']}: {said['message']}")
            return said["answer"]

        yield ask
        process.stdin.close()
        assert process.wait(120) == 0
    log.close()


@pytest.fixture(params=["openai", "anthropic"])
def ask(request, call, guarded):
    """`ask(messages, **fields)`: a completion through one of the two providers, in a scenario of the test's own."""
    base = f"{guarded.url}/v1" if request.param == "openai" else guarded.url
    settings = {
        "model": f"{request.param}/m",
        "api_base": base,
        "api_key": guarded_service.KEY,
        "extra_headers": {"x-reef-scenario": f"scenario-{next(_numbers)}"},
        "num_retries": 0,
        "max_retries": 0,
        "max_tokens": 64,
    }
    return lambda messages, **fields: call("completion", messages=messages, **{**settings, **fields})


def test_an_answer_has_its_text_reasoning_and_usage(ask, guarded) -> None:
    num_sampled = len(guarded.says("<think>\nHm.\n</think>\n\nFive."))
    answer = ask(QUESTION)
    assert answer["message"]["content"] == "Five."
    assert answer["message"]["reasoning_content"] == "Hm."
    assert answer["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == num_sampled
    assert answer["usage"]["prompt_tokens"] == len(guarded.says.prompts[-1])


def test_a_stream_is_put_together_to_the_same(ask, guarded) -> None:
    num_sampled = len(guarded.says("<think>\nHm.\n</think>\n\nFive is the sum."))
    answer = ask(QUESTION, stream=True, stream_options={"include_usage": True})
    assert answer["num_pieces"] > 1
    assert answer["message"]["content"] == "Five is the sum."
    assert answer["message"]["reasoning_content"] == "Hm."
    assert answer["usage"]["completion_tokens"] == num_sampled
    assert answer["usage"]["prompt_tokens"] == len(guarded.says.prompts[-1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_of_a_tool_and_its_result_continue_one_turn(ask, guarded, stream) -> None:
    sampled = guarded.says(f"<think>\nHm.\n</think>\n\nLet me add.\n{CALL}")
    answer = ask(QUESTION, tools=[ADD], stream=stream)
    first = guarded.says.prompts[-1]
    (made,) = answer["message"]["tool_calls"]
    assert answer["finish_reason"] == "tool_calls"
    assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == ("add", {"a": 2, "b": 3})
    guarded.says("Five.")
    result = {"role": "tool", "tool_call_id": made["id"], "content": "5"}
    later = ask([*QUESTION, answer["message"], result], tools=[ADD])
    assert later["message"]["content"] == "Five."
    assert guarded.says.prompts[-1][: len(first) + len(sampled)] == first + sampled


def test_errors_have_their_exceptions(ask, guarded) -> None:
    guarded.says("Five.")
    with pytest.raises(Raised, match=r"^AuthenticationError"):
        ask(QUESTION, api_key="another")
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    with pytest.raises(Raised, match=r"^BadRequestError.*image"):
        ask([{"role": "user", "content": [picture]}])
    with guarded.full(), pytest.raises(Raised, match=r"^RateLimitError.*reef\.max-in-flight"):
        ask(QUESTION)


@pytest.mark.parametrize("stream", [False, True])
def test_its_responses_are_those_of_the_service(call, guarded, stream) -> None:
    guarded.says("<think>\nHm.\n</think>\n\nFive.")
    asked = {"model": "openai/m", "api_base": f"{guarded.url}/v1", "api_key": guarded_service.KEY}
    answer = call("responses", input="2+3=", stream=stream, **asked)
    assert answer["status"] == "completed"
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert answer["output"][1]["content"][0]["text"] == "Five."
    if stream:
        assert answer["types"][0] == "response.created"
        assert answer["types"][-1] == "response.completed"
