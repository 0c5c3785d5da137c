"""Bodies of /v1/messages: what becomes of each field and block, and what is refused by name."""

from __future__ import annotations

import json

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.chat import history
from reef.chat.conversation import Message, ToolCall
from reef.chat.reply import ReasoningDelta, TextDelta, ToolCallArguments, ToolCallBegin
from reef.errors import BadRequestError
from reef.service.shapes_anthropic import Blocks, signature
from reef.service.wire import parse
from reef.service.wire_anthropic import CountBody, MessagesBody
from reef.service.wire_openai import ChatBody

pytestmark = pytest.mark.slow

HI = {"role": "user", "content": "hi"}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {"a": {}, "b": {}}}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "3"}
PICTURE = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}


def body(*messages, **fields) -> MessagesBody:
    value = {"model": "m", "max_tokens": 16, "messages": list(messages) or [HI], **fields}
    made = parse(MessagesBody, orjson.dumps(value))
    made.check()
    return made


def messages(*bodies, **fields) -> list[Message]:
    return list(body(*bodies, **fields).conversation().messages)


def refusal(*bodies, **fields) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        body(*bodies, **fields).conversation()
    return caught.value


# --- messages ---------------------------------------------------------------------------------------------------------


def test_text_alone_is_one_block_of_text() -> None:
    block = {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]}
    assert messages(HI) == messages(block) == [Message("user", "hi")]


def test_the_system_prompt_comes_first_as_text_or_blocks() -> None:
    parts = [
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "B"},
    ]
    assert messages(HI, system="Be brief.\nB") == messages(HI, system=parts)
    assert messages(HI, system=parts) == [Message("system", "Be brief.\nB"), Message("user", "hi")]
    assert messages(HI, system="") == messages(HI, system=[]) == [Message("user", "hi")]


@pytest.mark.parametrize("in_blocks", [False, True])
def test_the_account_for_billing_that_changes_with_each_request_is_not_for_the_model(in_blocks) -> None:
    """anthropics/claude-code 68900, ollama 14918: with it no prefix of two prompts is the same."""
    account = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;"
    parts = [{"type": "text", "text": account}, {"type": "text", "text": "Be brief."}]
    system = parts if in_blocks else f"{account}\nBe brief."
    assert messages(HI, system=system) == messages(HI, system="Be brief.")
    assert messages(HI, system=parts[:1]) == [Message("user", "hi")]
    assert messages({"role": "user", "content": account}) == [Message("user", account)]


def test_a_system_message_may_come_in_the_middle() -> None:
    later = {"role": "system", "content": [{"type": "text", "text": "Now in French."}]}
    assert messages(HI, later) == [Message("user", "hi"), Message("system", "Now in French.")]


def test_results_of_tools_come_before_what_the_user_says() -> None:
    said = {"role": "user", "content": [{"type": "text", "text": "and?"}, RESULT]}
    assert messages(HI, {"role": "assistant", "content": [CALL]}, said) == [
        Message("user", "hi"),
        Message("assistant", "", None, (ToolCall("toolu_1", "add", '{"a":1}'),)),
        Message("tool", "3", tool_call_id="toolu_1"),
        Message("user", "and?"),
    ]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({}, ""),
        ({"content": None}, ""),
        ({"content": "gone"}, "gone"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
        ({"content": "gone", "is_error": False}, "gone"),
        ({"content": "gone", "is_error": True}, "Error: gone"),
        ({"content": "ValueError: gone", "is_error": True}, "ValueError: gone"),
        ({"is_error": True}, "Error: "),
    ],
)
def test_the_result_of_a_tool_is_text_that_says_whether_it_failed(result, text) -> None:
    said = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", **result}]}
    assert messages(said) == [Message("tool", text, tool_call_id="t")]


def test_neighbours_of_one_role_are_one_message() -> None:
    """As Anthropic's API has it: the tools' results of two messages stand right after the calls."""
    calls = [{"role": "assistant", "content": "So:"}, {"role": "assistant", "content": [CALL]}]
    answers = [{"role": "user", "content": "wait"}, {"role": "user", "content": [RESULT]}]
    assert messages(HI, *calls, *answers) == [
        Message("user", "hi"),
        Message("assistant", "So:", None, (ToolCall("toolu_1", "add", '{"a":1}'),)),
        Message("tool", "3", tool_call_id="toolu_1"),
        Message("user", "wait"),
    ]


def test_thinking_comes_back_with_or_without_a_signature() -> None:
    thought = {"type": "thinking", "thinking": "hm"}
    for block in (thought, {**thought, "signature": signature("hm")}, {**thought, "signature": "another's"}):
        said = {"role": "assistant", "content": [block, {"type": "text", "text": "3"}]}
        assert messages(HI, said, HI)[1] == Message("assistant", "3", "hm")


def test_thinking_that_nobody_can_read_counts_as_not_sent() -> None:
    hidden = [{"type": "redacted_thinking", "data": "xyz"}, {"type": "thinking", "thinking": "", "signature": "s"}]
    said = {"role": "assistant", "content": [*hidden, {"type": "text", "text": "3"}]}
    assert messages(HI, said, HI)[1] == Message("assistant", "3")


def test_the_same_conversation_through_both_apis_has_the_same_keys() -> None:
    openai_tool = {"name": "add", "description": "Adds.", "parameters": TOOL["input_schema"]}
    call = {"id": "toolu_1", "type": "function", "function": {"name": "add", "arguments": '{ "a": 1 }'}}
    chat = {
        "messages": [
            {"role": "system", "content": "Add."},
            HI,
            {"role": "assistant", "content": "So:", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "toolu_1", "content": "3"},
            {"role": "user", "content": "and?"},
        ],
        "tools": [{"type": "function", "function": openai_tool}],
        "chat_template_kwargs": {"enable_thinking": True},
    }
    said = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "So:"}, CALL]
    ours = body(
        HI,
        {"role": "assistant", "content": said},
        {"role": "user", "content": [RESULT, {"type": "text", "text": "and?"}]},
        system="Add.",
        tools=[TOOL],
        thinking={"type": "adaptive"},
    ).conversation()
    theirs = parse(ChatBody, orjson.dumps(chat)).conversation()
    keys = [
        history.keys(history.root("s", "owner", "digest", conversation), conversation.messages)
        for conversation in (ours, theirs)
    ]
    assert keys[0] == keys[1]
    assert ours.tools == theirs.tools
    assert [json.dumps(tool) for tool in ours.tools] == [json.dumps(tool) for tool in theirs.tools]


# --- fields -----------------------------------------------------------------------------------------------------------


def test_sampling_is_what_was_asked_for_and_neutral_otherwise() -> None:
    plain = body().sampling()
    assert (plain.max_tokens, plain.temperature, plain.top_p, plain.top_k, plain.stop) == (16, 1.0, 1.0, -1, ())
    assert plain.inexact_reason() is None
    told = body(temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["END", "\n\n"]).sampling()
    assert (told.temperature, told.top_p, told.top_k, told.stop) == (0.5, 0.9, 7, ("END", "\n\n"))


def test_a_schema_for_the_answer_is_the_engines_grammar() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        told = body(**fields).sampling().json_schema
        assert told is not None
        assert json.loads(told) == schema


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({}, {}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1025}, {"enable_thinking": True}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    ],
)
def test_thinking_and_effort_are_variables_of_the_template(fields, options) -> None:
    assert body(**fields).conversation().options == options


def test_tools_are_shown_unless_none_may_be_used() -> None:
    shown = body(tools=[{**TOOL, "type": "custom", "cache_control": {"type": "ephemeral"}}]).conversation().tools
    described = {"name": "add", "description": "Adds.", "parameters": TOOL["input_schema"]}
    assert shown == ({"type": "function", "function": described},)
    assert body(tools=[TOOL], tool_choice={"type": "auto"}).conversation().tools == shown
    assert body(tools=[TOOL], tool_choice={"type": "none"}).conversation().tools == ()


def test_what_changes_no_answer_is_taken() -> None:
    """What Claude Code sends with each request."""
    body(
        metadata={"user_id": "user_1"},
        service_tier="auto",
        speed="standard",
        cache_control={"type": "ephemeral", "ttl": "1h"},
        container=None,
        diagnostics=None,
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        mcp_servers=[],
        tools=[{**TOOL, "eager_input_streaming": True, "strict": False, "allowed_callers": ["direct"]}],
    )


THINKING = "thinking.budget_tokens"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"model": ""}, "model", "bad_field"),
        ({"max_tokens": 0}, "max_tokens", "bad_field"),
        ({"max_tokens": "16"}, "max_tokens", "bad_field"),
        ({"messages": []}, "messages", "bad_field"),
        ({"temperature": -1}, "temperature", "bad_field"),
        ({"top_p": 0}, "top_p", "bad_field"),
        ({"top_k": -1}, "top_k", "bad_field"),
        ({"stop_sequences": [""]}, "stop_sequences", "bad_field"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences", "bad_field"),
        ({"n": 2}, "n", "unknown_field"),
        ({"system": [PICTURE]}, "system.0.type", "unsupported_content"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type", "unsupported_field"),
        ({"tools": [{"name": "add"}]}, "tools.0.input_schema", "missing_field"),
        ({"tools": [TOOL, TOOL]}, "tools.1", "bad_field"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools.0", "bad_field"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools.0.defer_loading", "bad_field"),
        ({"tools": [{**TOOL, "input_examples": [{}]}]}, "tools.0.input_examples", "bad_field"),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice.type", "unsupported_field"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "add"}}, "tool_choice.type", "unsupported_field"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice", "bad_field"),
        ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "add"}}, "tool_choice", "bad_field"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            "tool_choice.disable_parallel_tool_use",
            "unsupported_field",
        ),
        ({"thinking": {"type": "enabled"}}, THINKING, "missing_field"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1023}, "max_tokens": 2048}, THINKING, "bad_field"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}, "max_tokens": 2048}, THINKING, "bad_field"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 1024}, "max_tokens": 2048}, THINKING, "bad_field"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type", "unsupported_field"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort", "bad_field"),
        ({"speed": "fast"}, "speed", "bad_field"),
        ({"container": "c"}, "container", "unsupported_field"),
        ({"diagnostics": {"previous_message_id": "msg_1"}}, "diagnostics", "unsupported_field"),
        ({"inference_geo": "eu"}, "inference_geo", "unsupported_field"),
        ({"mcp_servers": [{}]}, "mcp_servers", "bad_field"),
        ({"thread": {"type": "create"}}, "thread", "thread_unsupported_request"),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits.0",
            "unsupported_field",
        ),
        ({"context_management": {"compact": {}}}, "context_management.compact", "unknown_field"),
        ({"context_management": {"edits": "all"}}, "context_management.edits", "bad_field"),
    ],
)
def test_what_is_not_done_is_refused_by_name(fields, param, code) -> None:
    error = refusal(**fields)
    assert (error.param, error.code) == (param, code)
    assert param.removesuffix(".type") in error.message


@pytest.mark.parametrize(
    ("bodies", "param", "says"),
    [
        ([{"role": "tool", "content": "3"}], "messages.0.role", "'user', 'assistant' or 'system'"),
        ([{"role": "user"}], "messages.0.content", "is missing"),
        ([{"role": "user", "content": []}], "messages.0.content", "empty list"),
        ([{"role": "user", "content": None}], "messages.0.content", "string"),
        ([{"role": "user", "content": ["hi"]}], "messages.0.content.0", "dictionary"),
        ([{"role": "user", "content": [{"text": "hi"}]}], "messages.0.content.0.type", "is missing"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text", "is missing"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages.0.content.0.text", "string"),
        ([{"role": "user", "content": [{**RESULT, "x": 1}]}], "messages.0.content.0.x", "unknown field"),
        ([{"role": "user", "content": [PICTURE]}], "messages.0.content.0.type", "image is not supported"),
        ([{"role": "user", "content": [{"type": "document"}]}], "messages.0.content.0.type", "document"),
        (
            [{"role": "user", "content": [{**RESULT, "content": [PICTURE]}]}],
            "messages.0.content.0.content.0.type",
            "image",
        ),
        ([{"role": "user", "content": [CALL]}], "messages.0.content.0.type", "has no place in a message of the user"),
        ([HI, {"role": "assistant", "content": [RESULT]}, HI], "messages.1.content.0.type", "of the assistant"),
        ([{"role": "system", "content": [CALL]}, HI], "messages.0.content.0.type", "of the system"),
        ([{"role": "user", "content": [{**RESULT, "content": [CALL]}]}], "messages.0.content.0.content.0.type", "here"),
        (
            [HI, {"role": "assistant", "content": [{**CALL, "input": "x"}]}, HI],
            "messages.1.content.0.input",
            "dictionary",
        ),
        ([HI, {"role": "assistant", "content": "The answer is ("}], "messages", "prefill"),
    ],
)
def test_a_message_that_cannot_be_read_is_refused_by_name(bodies, param, says) -> None:
    error = refusal(*bodies)
    assert error.param == param
    assert says in error.message


def test_counting_takes_what_makes_a_prompt_and_nothing_else() -> None:
    value = {"model": "m", "messages": [HI], "system": "s", "tools": [TOOL]}
    made = parse(CountBody, orjson.dumps(value))
    made.check()
    assert made.conversation() == body(system="s", tools=[TOOL]).conversation()
    with pytest.raises(BadRequestError, match="unknown field max_tokens"):
        parse(CountBody, orjson.dumps({**value, "max_tokens": 16}))


SCALARS = st.none() | st.booleans() | st.integers(-3, 3000) | st.floats(allow_nan=False) | st.text(max_size=8)
NAMES = st.sampled_from(
    ["type", "text", "thinking", "tool_use", "tool_result", "content", "id", "name", "input", "tool_use_id", "role"]
)
WORDS = st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image", "user", "assistant", "system", "add"])
JSON = st.recursive(
    SCALARS | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=20,
)
KNOWN = st.sampled_from(sorted(MessagesBody.model_fields))


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(KNOWN, JSON, max_size=6), st.lists(st.dictionaries(NAMES, JSON, max_size=4), max_size=4))
def test_whatever_a_body_holds_it_is_taken_or_refused(fields, listed) -> None:
    value = {"model": "m", "max_tokens": 16, "messages": listed, **fields}
    try:
        made = parse(MessagesBody, orjson.dumps(value))
        made.check()
        made.sampling()
        assert made.conversation().messages
    except BadRequestError as error:
        assert error.message


# --- what a stream sends ----------------------------------------------------------------------------------------------


def read(events) -> list[dict]:
    """The content that a client puts together, checked as strictly as Anthropic's SDKs read it."""
    content, inputs, open_index = [], {}, None
    for event in events:
        index = event["index"]
        if event["type"] == "content_block_start":
            assert open_index is None
            assert index == len(content)
            content.append(dict(event["content_block"]))
            open_index = index
        elif event["type"] == "content_block_stop":
            assert index == open_index
            open_index = None
            if index in inputs:
                content[index]["input"] = json.loads(inputs[index])
        else:
            assert index == open_index
            delta = event["delta"]
            match delta["type"]:
                case "text_delta":
                    content[index]["text"] += delta["text"]
                case "thinking_delta":
                    content[index]["thinking"] += delta["thinking"]
                case "signature_delta":
                    content[index]["signature"] = delta["signature"]
                case "input_json_delta":
                    inputs[index] = inputs.get(index, "") + delta["partial_json"]
    assert open_index is None
    return content


def events(blocks, *deltas) -> list[dict]:
    return [*blocks.add(deltas), *blocks.end()]


def test_each_block_ends_before_the_next_begins() -> None:
    sent = events(
        Blocks(shows_thinking=True),
        ReasoningDelta("h"),
        ReasoningDelta("m"),
        TextDelta("So"),
        TextDelta(":"),
        ToolCallBegin(0, "t0", "add"),
        ToolCallArguments(0, '{"a"'),
        ToolCallArguments(0, ": 1}"),
        ToolCallBegin(1, "t1", "add"),
        ToolCallArguments(1, "{}"),
        TextDelta("done"),
    )
    assert read(sent) == [
        {"type": "thinking", "thinking": "hm", "signature": signature("hm")},
        {"type": "text", "text": "So:"},
        {"type": "tool_use", "id": "t0", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "t1", "name": "add", "input": {}},
        {"type": "text", "text": "done"},
    ]


def test_thinking_that_is_not_shown_is_signed_all_the_same() -> None:
    sent = events(Blocks(shows_thinking=False), ReasoningDelta("hm"), TextDelta("3"))
    assert read(sent)[0] == {"type": "thinking", "thinking": "", "signature": signature("hm")}


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_arguments_arrive_whole_however_they_are_cut(data) -> None:
    value = data.draw(st.dictionaries(st.text(max_size=5), st.recursive(SCALARS, lambda i: st.lists(i, max_size=3))))
    text = data.draw(st.sampled_from([json.dumps(value), json.dumps(value, ensure_ascii=False)]))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    deltas = [ToolCallArguments(0, piece) for piece in pieces if piece]
    (block,) = read(events(Blocks(True), ToolCallBegin(0, "t", "add"), *deltas))
    assert block["input"] == json.loads(text)


def test_of_arguments_that_are_not_json_only_the_readable_beginning_is_sent() -> None:
    from_json = pytest.importorskip("jiter").from_json  # what the SDK reads each piece with
    deltas = [ToolCallArguments(0, char) for char in '{"a": 1, "b" "x"}']
    sent = [
        event["delta"]["partial_json"]
        for event in events(Blocks(True), ToolCallBegin(0, "t", "add"), *deltas)
        if event["type"] == "content_block_delta"
    ]
    for end in range(1, len(sent) + 1):
        from_json("".join(sent[:end]).encode(), partial_mode=True)
    assert "".join(sent).startswith('{"a": 1, "b"')


def test_long_arguments_do_not_cost_the_square_of_their_length() -> None:
    """Each check reads all that was sent: there may be few of them, and still many pieces."""
    text = json.dumps({"text": "x" * 30_000})
    sent = events(Blocks(True), ToolCallBegin(0, "t", "add"), *(ToolCallArguments(0, char) for char in text))
    assert 50 < len(sent) < 300
    assert json.loads("".join(event["delta"]["partial_json"] for event in sent if "delta" in event)) == json.loads(text)


@pytest.mark.parametrize("kind", [[], ["text"], {}, {"text": "text"}, 1, True, None])
def test_a_type_that_is_no_text_is_refused_where_it_stands(kind) -> None:
    block = {"type": kind, "text": "x"}
    within = {"type": "tool_result", "tool_use_id": "t", "content": [block]}
    for content in ([block], [within]):
        assert refusal({"role": "user", "content": content}).param.startswith("messages.0.content.0")
    assert refusal(system=[block]).param.startswith("system.0")
    if kind is not None:  # a tool's is optional
        assert refusal(tools=[{**TOOL, "type": kind}]).param.startswith("tools.0")
