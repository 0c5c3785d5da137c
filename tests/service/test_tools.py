"""Tools and reasoning over /v1/chat/completions, whole and streamed, with the templates of known families."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.chat.styles import STYLES, make_model
from tests.service.says import Says

CHAT = "/v1/chat/completions"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALLS = {
    "qwen3": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "llama3": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]',
}


@pytest.fixture(scope="session")
def speakers(make_service, make_fake_engine, starter, tmp_path_factory):
    """`speakers(name)`: a service that only records, in front of an engine that speaks like a family; made once."""
    made = {}

    def speaker(name):
        if name not in made:
            engine = make_fake_engine()
            model = make_model(starter, tmp_path_factory.mktemp("model") / name, name)
            service = make_service("--training.backend", "none", "--inference.url", engine.url, model=model).start()
            made[name] = Says(service, engine, name)
        return made[name]

    return speaker


@pytest.fixture(params=STYLES)
def says(request, speakers):
    return speakers(request.param)


pytestmark = pytest.mark.slow


def folded(chunks):
    """The message that a client puts together from a stream, and its finish reason."""
    message, reason = {"role": "assistant", "content": ""}, None
    calls = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for field in ("content", "reasoning_content"):
                if delta.get(field):
                    message[field] = message.get(field, "") + delta[field]
            for part in delta.get("tool_calls", []):
                call = calls.setdefault(part["index"], {"function": {"name": "", "arguments": ""}})
                call.update({name: part[name] for name in ("id", "type") if name in part})
                for name, text in part["function"].items():
                    call["function"][name] += text
            reason = choice["finish_reason"] or reason
    return message, list(calls.values()), reason


def ask(says, messages, stream=False, **fields):
    body = {"messages": messages, "tools": [ADD], **fields}
    if stream:
        return folded(says.service.stream(CHAT, **body))
    response = says.service.post(CHAT, body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["message"], choice["message"].get("tool_calls", []), choice["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_call_is_a_tool_call(says, stream) -> None:
    says(CALLS[says.name])
    message, (call,), reason = ask(says, [{"role": "user", "content": "1+2="}], stream)
    assert reason == "tool_calls"
    assert not message["content"]
    assert call["type"] == "function"
    assert call["function"]["name"] == "add"
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}


def test_the_ids_of_a_streamed_call_are_those_of_the_whole_answer(says) -> None:
    """vllm 27482: as many ids in the receipt as completion tokens, whichever way it came."""
    ids = says(CALLS[says.name])
    body = {"messages": [{"role": "user", "content": "2+2="}], "tools": [ADD], "return_token_ids": True}
    chunks = says.service.stream(CHAT, **body, stream_options={"include_usage": True})
    whole = says.service.post(CHAT, body).json()
    streamed = [token for chunk in chunks for choice in chunk["choices"] for token in choice.get("token_ids", [])]
    receipts = [chunk["reef"]["agent_record_id"] for chunk in chunks if "reef" in chunk]
    assert streamed == whole["choices"][0]["token_ids"] == says.service.receipt(receipts[0])["token_ids"] == ids
    assert chunks[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_turn_after_a_tools_result_continues_the_exact_ids(says, stream) -> None:
    """Arguments come back with other white space and key order (miles); ids of calls may be renamed."""
    messages = [{"role": "user", "content": f"1+2= {stream}"}]
    ids = says(CALLS[says.name])
    message, (call,), _ = ask(says, messages, stream)
    first = says.prompts[-1] + ids
    call["function"]["arguments"] = '{ "b":2,\n "a":1}'
    messages += [{**message, "tool_calls": [call]}, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
    says("3")
    body = {"messages": messages, "tools": [ADD]}
    response = says.service.post(CHAT, body)
    assert says.prompts[-1][: len(first)] == first
    receipt = says.service.receipt(response.headers["x-reef-agent-record-id"])
    assert receipt["continued_by"] == "messages"
    parent = says.service.receipt(receipt["parent"])
    assert parent["prompt_token_ids"] + parent["token_ids"] == first


def test_two_parallel_calls_are_both_there_and_both_continued(speakers) -> None:
    """verifiers 1463."""
    says = speakers("qwen3")
    text = CALLS["qwen3"] + "\n" + CALLS["qwen3"].replace("2", "7")
    ids = says("Let me see." + "\n" + text)
    messages = [{"role": "user", "content": "1+2= and 1+7="}]
    message, calls, reason = ask(says, messages)
    assert (message["content"], reason, len(calls)) == ("Let me see.", "tool_calls", 2)
    assert len({call["id"] for call in calls}) == 2
    first = says.prompts[-1] + ids
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in calls]
    says("3 and 8")
    ask(says, [*messages, message, *results])
    assert says.prompts[-1][: len(first)] == first


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "cut", ["", '<tool_call>\n{"name": "add", "argum', '<tool_call>\n{"name": "add", "arguments": {"a": ']
)
def test_a_call_that_length_cuts_is_no_crash(speakers, stream, cut) -> None:
    """miles 2689, verifiers 1763: whole, it is text; a stream says length as well."""
    says = speakers("qwen3")
    says("Hm. " + cut, cut=True)
    message, calls, reason = ask(says, [{"role": "user", "content": "1+2="}], stream)
    assert reason == "length"
    if not stream:
        assert (message["content"], calls) == ("Hm. " + cut, [])


def test_with_other_tools_than_before_a_new_branch_begins(says) -> None:
    messages = [{"role": "user", "content": "1+5="}]
    says("6")
    message, _, _ = ask(says, messages)
    other = {"type": "function", "function": {"name": "subtract", "parameters": {"type": "object"}}}
    for tools, is_continued in (([ADD], True), ([ADD, other], False), (None, False)):
        body = {"messages": [*messages, message, {"role": "user", "content": "and 7?"}], "tools": tools}
        response = says.service.post(CHAT, body)
        receipt = says.service.receipt(response.headers["x-reef-agent-record-id"])
        assert (receipt["parent"] is not None) == is_continued


def test_without_tools_a_call_is_text(says) -> None:
    says(CALLS[says.name])
    message, calls, reason = ask(says, [{"role": "user", "content": "x"}], tools=None)
    assert (calls, reason) == ([], "stop")
    assert "add" in message["content"]


def test_tool_choice_none_shows_the_model_no_tools(speakers) -> None:
    says = speakers("qwen3")
    says("3")
    ask(says, [{"role": "user", "content": "1+2="}], tool_choice="none")
    assert "<tools>" not in says.decode(says.prompts[-1])
    ask(says, [{"role": "user", "content": "1+2="}], tool_choice="auto")
    assert '"name": "add"' in says.decode(says.prompts[-1])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", ["dropped", "kept", "renamed"])
def test_reasoning_has_its_own_field_and_stays_in_the_ids_of_the_next_turn(speakers, stream, echo) -> None:
    """verl 6854 and Gym 1545: whether the client sends it back or not."""
    says = speakers("qwen3")
    messages = [{"role": "user", "content": f"1+2= {stream} {echo}"}]
    ids = says("<think>\none and two\n</think>\n\n3")
    message, _, reason = ask(says, messages, stream)
    assert (message["content"], message["reasoning_content"].strip(), reason) == ("3", "one and two", "stop")
    first = says.prompts[-1] + ids
    if echo != "kept":
        reasoning = message.pop("reasoning_content")
    if echo == "renamed":
        message["reasoning"] = reasoning
    says("4")
    ask(says, [*messages, message, {"role": "user", "content": "and 4?"}])
    assert says.prompts[-1][: len(first)] == first
    assert "one and two" in says.decode(says.prompts[-1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_that_a_stop_string_ended_in_its_thinking_is_continued(speakers, stream) -> None:
    """The client has the thinking up to the stop string, and sends that back."""
    says = speakers("qwen3")
    messages = [{"role": "user", "content": f"1+7= {stream}"}]
    ids = says("<think>\none and seven END", stopped="END")
    message, _, reason = ask(says, messages, stream, stop=["END"])
    assert (message["content"], message["reasoning_content"], reason) == ("", "one and seven ", "stop")
    first = says.prompts[-1] + ids
    says("4")
    ask(says, [*messages, message, {"role": "user", "content": "and 4?"}])
    assert says.prompts[-1][: len(first)] == first


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", ["<think>\none and", '<tool_call>\n{"name": "ad', "<thi", ""])
def test_a_turn_that_length_cut_anywhere_is_closed_once_and_read_as_text_again(speakers, stream, said) -> None:
    """In its thinking, in a call, in a marker, before its first word: the next reply does not begin inside of it."""
    says = speakers("qwen3")
    messages = [{"role": "user", "content": f"1+8= {stream}"}]
    ids = says(said, cut=True)
    message, calls, reason = ask(says, messages, stream)
    assert (calls, reason) == ([], "length")
    first = says.prompts[-1] + ids
    says("9")
    message, _, _ = ask(says, [*messages, message, {"role": "user", "content": "go on"}], stream)
    assert says.prompts[-1][: len(first)] == first
    following = says.decode(says.prompts[-1][len(first) :])
    assert following == "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    assert message == {"role": "assistant", "content": "9", **({} if stream else {"refusal": None})}


def test_reasoning_that_was_edited_is_another_turn(speakers) -> None:
    says = speakers("qwen3")
    messages = [{"role": "user", "content": "1+9="}]
    says("<think>\none and nine\n</think>\n\n10")
    message, _, _ = ask(says, messages)
    message["reasoning_content"] = "a lie"
    says("4")
    ask(says, [*messages, message, {"role": "user", "content": "and 4?"}])
    assert "one and nine" not in says.decode(says.prompts[-1])


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_that_is_deleted_while_the_next_is_answered_is_not_kept_by_it(speakers, stream) -> None:
    """Asked again, as OpenAI's SDK does of itself after a 409, it is a new branch."""
    says = speakers("qwen3")
    messages = [{"role": "user", "content": f"1+6= {stream}"}]
    says("7")
    first = says.service.post(CHAT, {"messages": messages})
    messages += [{"role": "assistant", "content": "7"}, {"role": "user", "content": "and 4?"}]
    says("10")
    answer = says.engine.answers["/generate"]

    async def deleting(request, body):
        async with httpx.AsyncClient(timeout=60) as client:
            route = f"{says.service.url}/reef/receipts/{first.headers['x-reef-agent-record-id']}"
            assert (await client.delete(route)).status_code == 200
        return await answer(request, body)

    says.engine.answers["/generate"] = deleting
    body = {"messages": messages, "stream": stream}
    refused = says.service.post(CHAT, body)
    assert "turn_deleted" in refused.text
    assert (refused.status_code, "reef" in refused.text) == (200 if stream else 409, False)
    says("10")
    again = says.service.post(CHAT, {"messages": messages})
    assert says.service.receipt(again.headers["x-reef-agent-record-id"])["parent"] is None


def test_the_same_text_as_content_and_as_reasoning_is_rendered_once(speakers) -> None:
    """NeMo 2821."""
    says = speakers("qwen3")
    says("4")
    twice = {"role": "assistant", "content": "both", "reasoning_content": "both"}
    ask(says, [{"role": "user", "content": "x"}, twice, {"role": "user", "content": "y"}])
    assert says.decode(says.prompts[-1]).count("both") == 1


@pytest.mark.parametrize(
    ("fields", "ending"),
    [
        ({}, "assistant\n"),
        ({"reasoning_effort": "none"}, "<think>\n\n</think>\n\n"),
        ({"reasoning_effort": "high"}, "assistant\n"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<think>\n\n</think>\n\n"),
    ],
)
def test_reasoning_effort_reaches_the_template(speakers, fields, ending) -> None:
    says = speakers("qwen3")
    says("4")
    message, _, _ = ask(says, [{"role": "user", "content": "x"}], **fields)
    assert says.decode(says.prompts[-1]).endswith(ending)
    assert message["content"] == "4"
    assert "reasoning_content" not in message


def test_a_json_schema_goes_to_the_engines_grammar_and_the_receipt_says_so(speakers) -> None:
    says = speakers("qwen3")
    says('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    response = says.service.chat("x", response_format=form)
    told = [body for route, body in says.engine.calls if route == "/generate"][-1]
    assert json.loads(told["sampling_params"]["json_schema"]) == schema
    receipt = says.service.receipt(response.headers["x-reef-agent-record-id"])
    assert (receipt["exact"], receipt["inexact_reason"]) == (False, "json_schema")


def test_a_developers_message_is_the_systems_where_the_template_knows_none(speakers) -> None:
    says = speakers("qwen3")
    says("4")
    says.service.post(CHAT, {"messages": [{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}]})
    assert says.decode(says.prompts[-1]).startswith("<|im_start|>system\nd<|im_end|>")
