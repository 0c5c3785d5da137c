"""Anthropic's own Python client against the real service."""

from __future__ import annotations

import asyncio
import time

import anthropic
import pytest
from pydantic import BaseModel

from tests.clients import guarded as guarded_service

QUESTION = [{"role": "user", "content": "2+3="}]
pytestmark = pytest.mark.slow  # importing it takes seconds

ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {"a": {}, "b": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b" 3}}\n</tool_call>'
ASK = {"model": "m", "max_tokens": 64, "messages": QUESTION}
SIGNED = {"authorization": f"Bearer {guarded_service.KEY}"}


@pytest.fixture(scope="module")
def client(recorder):
    with anthropic.Anthropic(base_url=recorder.url, api_key="none is asked", max_retries=0) as made:
        yield made


def tool_result(block, text):
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": text}]}


# --- messages ---------------------------------------------------------------------------------------------------------


def test_a_message_has_text_usage_and_a_receipt(client, recorder) -> None:
    message = client.messages.create(**ASK)
    receipt = recorder.receipt(message.reef["agent_record_id"])
    assert [(block.type, block.text) for block in message.content] == [("text", receipt["text"])]
    assert (message.role, message.model, message.stop_reason) == ("assistant", "m", "end_turn")
    assert message.usage.input_tokens == receipt["num_prompt_tokens"]
    assert message.usage.output_tokens == receipt["num_tokens"]
    assert message._request_id


def test_the_receipt_is_in_the_headers_too(client) -> None:
    raw = client.messages.with_raw_response.create(**ASK)
    assert raw.headers["x-reef-agent-record-id"] == raw.parse().reef["agent_record_id"]
    assert raw.headers["request-id"] == raw.parse()._request_id


def test_every_field_that_the_client_has_can_be_sent(client, recorder) -> None:
    """Those that it no longer has arguments for too: temperature and the like."""
    message = client.messages.create(
        **ASK,
        system=[{"type": "text", "text": "Add.", "cache_control": {"type": "ephemeral"}}],
        stop_sequences=["<final>"],
        metadata={"user_id": "u"},
        service_tier="auto",
        thinking={"type": "disabled"},
        output_config={"effort": "low"},
        tool_choice={"type": "auto"},
        extra_body={"temperature": 0.5, "top_k": 20, "top_p": 0.9},
    )
    sampling = recorder.receipt(message.reef["agent_record_id"])["sampling"]
    assert (sampling["temperature"], sampling["top_k"], sampling["top_p"]) == (0.5, 20, 0.9)
    assert sampling["stop"] == ["<final>"]


def test_the_stream_helper_puts_the_message_together(client, recorder) -> None:
    with client.messages.stream(**ASK) as stream:
        events = list(stream)
        message = stream.get_final_message()
    text = "".join(event.text for event in events if event.type == "text")
    assert [(block.type, block.text) for block in message.content] == [("text", text)]
    (last,) = [event for event in events if event.type == "message_delta"]
    receipt = recorder.receipt(last.reef["agent_record_id"])
    assert receipt["text"] == text
    assert (message.usage.input_tokens, message.usage.output_tokens) == (
        receipt["num_prompt_tokens"],
        receipt["num_tokens"],
    )


def test_a_raw_stream_ends_with_the_receipt(client, recorder) -> None:
    events = list(client.messages.create(**ASK, stream=True))
    assert [event.type for event in events if event.type != "content_block_delta"] == [
        *("message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop")
    ]
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    assert recorder.receipt(events[-1].reef["agent_record_id"])["text"] == text


def test_tokens_are_counted(client) -> None:
    counted = client.messages.count_tokens(model="m", messages=QUESTION, system="Add.")
    assert counted.input_tokens == client.messages.create(**ASK, system="Add.").usage.input_tokens


def test_a_message_that_is_sent_back_as_it_came_is_continued(client, recorder) -> None:
    messages = [{"role": "user", "content": "7+8="}]
    first = client.messages.create(model="m", max_tokens=8, messages=messages, extra_body={"temperature": 3})
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "and?"}]
    with client.messages.stream(model="m", max_tokens=8, messages=messages, extra_body={"temperature": 3}) as stream:
        second = stream.get_final_message()
    messages += [{"role": "assistant", "content": second.content}, {"role": "user", "content": "and?"}]
    third = recorder.receipt(client.messages.create(model="m", max_tokens=8, messages=messages).reef["agent_record_id"])
    parent = recorder.receipt(third["parent"])
    assert parent["parent"] == first.reef["agent_record_id"]


def test_the_client_of_asyncio_is_answered_too(recorder) -> None:
    async def talk():
        async with anthropic.AsyncAnthropic(base_url=recorder.url, api_key="none", max_retries=0) as made:
            whole, counted = await asyncio.gather(
                made.messages.create(**ASK), made.messages.count_tokens(model="m", messages=QUESTION)
            )
            async with made.messages.stream(**ASK) as stream:
                text = "".join([piece async for piece in stream.text_stream])
                message = await stream.get_final_message()
        return whole, counted, text, message

    whole, counted, text, message = asyncio.run(talk())
    assert whole.usage.input_tokens == counted.input_tokens == message.usage.input_tokens
    assert [block.text for block in message.content] == [text]


def test_scenario_and_session_may_be_in_the_base_url(recorder) -> None:
    url = f"{recorder.url}/scenarios/anthropic-sdk/sessions/one"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as made:
        receipt = recorder.receipt(made.messages.create(**ASK).reef["agent_record_id"])
    assert (receipt["scenario"], receipt["session"]) == ("anthropic-sdk", "one")


# --- tools, thinking, errors: a service with a key and small limits, whose engine says what it is told ----------------


@pytest.fixture
def connect(guarded):
    """`connect(max_retries=..., api_key=...)`: a client that the test need not close."""
    made = []

    def open_client(**options):
        options = {"base_url": guarded.url, "api_key": guarded_service.KEY, "max_retries": 0, **options}
        made.append(anthropic.Anthropic(**options))
        return made[-1]

    guarded.says("<think>\nHm.\n</think>\n\nFive.")
    yield open_client
    for client in made:
        client.close()


def final(client, streamed, **fields):
    if not streamed:
        return client.messages.create(**{**ASK, **fields})
    with client.messages.stream(**{**ASK, **fields}) as stream:
        return stream.get_final_message()


both_ways = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "stream"])


@both_ways
def test_thinking_is_a_block_of_its_own(connect, streamed) -> None:
    thinking, text = final(
        connect(), streamed, max_tokens=2048, thinking={"type": "enabled", "budget_tokens": 1024}
    ).content
    assert (thinking.type, thinking.thinking, text.text) == ("thinking", "Hm.", "Five.")
    assert thinking.signature


@both_ways
def test_a_call_of_a_tool_and_its_result_continue_one_turn(connect, guarded, streamed) -> None:
    client, question = connect(), [{"role": "user", "content": f"2+3= ({streamed})"}]
    ids = guarded.says(f"<think>\nHm.\n</think>\n\nLet me add.\n{CALL}")
    first = final(client, streamed, messages=question, tools=[ADD])
    asked = guarded.says.prompts[-1]
    thinking, text, call = first.content
    assert (thinking.thinking, text.text, call.name, call.input) == ("Hm.", "Let me add.", "add", {"a": 2, "b": 3})
    assert first.stop_reason == "tool_use"
    guarded.says("Five.")
    messages = [*question, {"role": "assistant", "content": first.content}, tool_result(call, "5")]
    second = final(client, streamed, messages=messages, tools=[ADD])
    assert [block.text for block in second.content] == ["Five."]
    assert guarded.says.prompts[-1][: len(asked) + len(ids)] == asked + ids


def test_the_tool_runner_of_the_client_runs_a_tool_and_comes_to_an_end(connect, guarded) -> None:
    ran = []

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        ran.append((a, b))
        guarded.says("Five.")
        return str(a + b)

    guarded.says(CALL)
    fields = {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": "run"}]}
    answers = list(connect().beta.messages.tool_runner(**fields, tools=[add]))
    assert ran == [(2, 3)]
    assert [answer.stop_reason for answer in answers] == ["tool_use", "end_turn"]
    receipt = guarded.service.get(f"/reef/receipts/{answers[1].reef['agent_record_id']}", headers=SIGNED).json()
    assert receipt["parent"] == answers[0].reef["agent_record_id"]


@both_ways
@pytest.mark.parametrize(
    "said",
    [BROKEN, CALL[:-14], CALL[:-18], CALL[:40]],
    ids=["not JSON", "cut after the arguments", "cut in the arguments", "cut before them"],
)
def test_whatever_is_wrong_with_a_call_the_client_reads_the_message(connect, guarded, streamed, said) -> None:
    """The streamed call's arguments are read as JSON piece by piece, and by an exception where that fails."""
    guarded.says(said, cut=said is not BROKEN)
    message = final(connect(), streamed, tools=[ADD], max_tokens=16)
    assert message.stop_reason == ("end_turn" if said is BROKEN else "max_tokens")
    if not streamed and said is BROKEN:
        assert [(block.type, block.text) for block in message.content] == [("text", BROKEN)]


def test_an_answer_is_parsed_to_a_model_of_pydantic(connect, guarded) -> None:
    class Sum(BaseModel):
        sum: int

    guarded.says('{"sum": 5}')
    assert connect().messages.parse(**ASK, output_format=Sum).parsed_output == Sum(sum=5)
    sent = [body for route, body in guarded.says.engine.calls if route == "/generate"][-1]
    assert '"sum"' in sent["sampling_params"]["json_schema"]


def test_every_error_has_its_exception(connect, guarded) -> None:
    client = connect()
    with pytest.raises(anthropic.BadRequestError) as bad:
        client.messages.create(**ASK, extra_body={"no_such_field": 1})
    with pytest.raises(anthropic.AuthenticationError) as unknown:
        connect(api_key="another").messages.create(**ASK)
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**ASK, extra_headers={"x-reef-parent": "rcp_none"})
    with pytest.raises(anthropic.NotFoundError) as no_route:
        client.messages.batches.list()
    with guarded.full(), pytest.raises(anthropic.RateLimitError) as full:
        client.messages.create(**ASK)
    for error, kind, code in (
        (bad, "invalid_request_error", "unknown_field"),
        (unknown, "authentication_error", "invalid_api_key"),
        (missing, "not_found_error", "receipt_not_found"),
        (no_route, "not_found_error", "not_found"),
        (full, "rate_limit_error", "queue_full"),
    ):
        assert (error.value.type, error.value.error_code) == (kind, code)
        assert error.value.api_message
        assert error.value.request_id == error.value.response.headers["x-request-id"]
    assert "no_such_field" in bad.value.api_message
    assert full.value.response.headers["retry-after"] == "1"


def test_an_older_client_sends_its_key_in_another_header(guarded, connect) -> None:
    headers = {"x-api-key": guarded_service.KEY, "anthropic-version": "2023-06-01"}
    assert guarded.service.post("/v1/messages", ASK, headers=headers).status_code == 200
    refused = guarded.service.post("/v1/messages", ASK, headers={"x-api-key": "another"})
    assert refused.json()["error"]["type"] == "authentication_error"


def test_a_conflict_is_not_asked_again(connect, guarded) -> None:
    """The client would: elsewhere it is a lock that another holds."""
    with pytest.raises(anthropic.ConflictError) as conflict:
        connect(max_retries=5).messages.create(**ASK, extra_headers={"x-reef-recipe": "another"})
    assert conflict.value.type == "conflict_error"
    assert conflict.value.response.request.headers["x-stainless-retry-count"] == "0"


@both_ways
def test_a_full_service_is_asked_again_after_the_time_it_says(connect, guarded, streamed) -> None:
    client = connect(max_retries=10)
    with guarded.full() as release:
        started = time.monotonic()
        pause = guarded.when_refused(release.set)
        message = final(client, streamed)
        pause.join()
    assert message.content[-1].text == "Five."
    assert time.monotonic() - started >= 1


def test_a_service_without_its_engine_answers_503_until_it_is_back(connect, guarded) -> None:
    with guarded.without_engine():
        with pytest.raises(anthropic.ServiceUnavailableError) as away:
            connect().messages.create(**ASK)
        assert away.value.type == "overloaded_error"
        assert int(away.value.response.headers["retry-after"]) >= 1
    assert connect(max_retries=30).messages.create(**ASK).content[-1].text == "Five."


def test_an_engine_that_fails_in_a_stream_raises(connect, guarded) -> None:
    engine = guarded.says.engine
    first = engine.generation([74], finish_reason=None)
    engine.answers["/generate"] = engine.events(first, {"error": {"message": "out of memory"}})
    with pytest.raises(anthropic.APIStatusError, match="out of memory") as failed:
        final(connect(), streamed=True)
    assert failed.value.type == "api_error"
    assert failed.value.request_id
