"""OpenAI's own Python client against the real service."""

from __future__ import annotations

import json
import time

import openai
import pytest
from pydantic import BaseModel

from tests.clients import guarded as guarded_service

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "2+3="}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ADD_FLAT = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": None}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(recorder):
    with openai.OpenAI(base_url=f"{recorder.url}/v1", api_key="none is asked", max_retries=0) as made:
        yield made


def receipt_of(service, choice):
    return service.receipt(choice.reef_agent_record_id)


# --- chat -------------------------------------------------------------------------------------------------------------


def test_a_chat_has_text_usage_and_a_receipt(client, recorder) -> None:
    answer = client.chat.completions.create(model="starter", messages=QUESTION, max_tokens=8)
    receipt = receipt_of(recorder, answer.choices[0])
    assert answer.choices[0].message.content == receipt["text"]
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.completion_tokens == receipt["num_tokens"]
    assert answer.usage.prompt_tokens == receipt["num_prompt_tokens"]
    assert answer._request_id


def test_the_receipt_is_in_the_headers_too(client, recorder) -> None:
    raw = client.chat.completions.with_raw_response.create(model="starter", messages=QUESTION, max_tokens=8)
    assert raw.headers["x-reef-agent-record-id"] == raw.parse().choices[0].reef_agent_record_id
    assert raw.headers["x-request-id"] == raw.parse()._request_id


def test_a_stream_ends_with_the_receipt_and_then_the_usage(client, recorder) -> None:
    chunks = list(
        client.chat.completions.create(
            model="starter", messages=QUESTION, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
    )
    *_, with_receipt, with_usage = chunks
    receipt = recorder.receipt(with_receipt.reef["agent_record_id"])
    assert with_usage.usage.completion_tokens == receipt["num_tokens"]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == receipt["text"]


def test_the_stream_helper_puts_the_answer_together(client) -> None:
    with client.chat.completions.stream(
        model="starter", messages=QUESTION, max_tokens=8, stream_options={"include_usage": True}
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        answer = stream.get_final_completion()
    assert answer.choices[0].message.content == "".join(pieces)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_several_choices_have_a_receipt_each(client, recorder) -> None:
    answer = client.chat.completions.create(model="starter", messages=QUESTION, max_tokens=8, n=3, temperature=3)
    assert len({choice.reef_agent_record_id for choice in answer.choices}) == 3
    for index, choice in enumerate(answer.choices):
        receipt = receipt_of(recorder, choice)
        assert (choice.index, choice.message.content) == (index, receipt["text"])


def test_logprobs_are_those_of_the_receipt(client, recorder) -> None:
    answer = client.chat.completions.create(
        model="starter", messages=QUESTION, max_tokens=8, logprobs=True, top_logprobs=2
    )
    entries = answer.choices[0].logprobs.content
    receipt = receipt_of(recorder, answer.choices[0])
    assert [entry.logprob for entry in entries] == pytest.approx(receipt["logprobs"], rel=1e-6)
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


def test_ids_come_with_the_answer_where_they_are_asked_for(client, recorder) -> None:
    answer = client.chat.completions.create(
        model="starter", messages=QUESTION, max_tokens=8, extra_body={"return_token_ids": True}
    )
    receipt = receipt_of(recorder, answer.choices[0])
    assert answer.prompt_token_ids == receipt["prompt_token_ids"]
    assert answer.choices[0].token_ids == receipt["token_ids"]


def test_messages_that_the_client_got_can_be_sent_back_and_continue_the_turn(client, recorder) -> None:
    headers = {"x-reef-scenario": "openai-sdk"}
    ask = lambda messages: client.chat.completions.create(  # noqa: E731
        model="starter", messages=messages, max_tokens=8, temperature=3, extra_headers=headers
    )
    first = ask(QUESTION)
    second = ask([*QUESTION, first.choices[0].message, {"role": "user", "content": "4+1="}])
    assert receipt_of(recorder, second.choices[0])["parent"] == first.choices[0].reef_agent_record_id


def test_text_completions_work_whole_and_streamed(client, recorder) -> None:
    whole = client.completions.create(model="starter", prompt="2+3=", max_tokens=4, seed=1, logprobs=1)
    assert whole.choices[0].text == recorder.receipt(whole.choices[0].reef_agent_record_id)["text"]
    assert len(whole.choices[0].logprobs.tokens) == whole.usage.completion_tokens
    pieces = client.completions.create(model="starter", prompt="2+3=", max_tokens=4, seed=1, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole.choices[0].text


def test_the_model_is_listed(client) -> None:
    assert [model.id for model in client.models.list()] == ["starter"]


# --- responses --------------------------------------------------------------------------------------------------------


def test_a_response_has_text_usage_and_a_receipt(client, recorder) -> None:
    response = client.responses.create(model="starter", input="2+3=", instructions="Add.", max_output_tokens=8)
    receipt = recorder.receipt(response.reef["agent_record_id"])
    assert response.output_text == receipt["text"]
    assert response.usage.output_tokens == receipt["num_tokens"]
    assert client.responses.retrieve(response.id).output_text == response.output_text


def test_a_response_continues_the_one_it_names(client, recorder) -> None:
    first = client.responses.create(model="starter", input="2+3=", max_output_tokens=8)
    second = client.responses.create(model="starter", input="4+1=", previous_response_id=first.id, max_output_tokens=8)
    assert second.previous_response_id == first.id
    assert recorder.receipt(second.reef["agent_record_id"])["parent"] == first.reef["agent_record_id"]


def test_the_output_of_a_response_can_be_the_input_of_the_next(client, recorder) -> None:
    items = [{"role": "user", "content": "2+3="}]
    headers = {"x-reef-scenario": "openai-sdk-responses"}
    first = client.responses.create(model="starter", input=items, max_output_tokens=8, extra_headers=headers)
    items += [*first.output, {"role": "user", "content": "4+1="}]
    second = client.responses.create(model="starter", input=items, max_output_tokens=8, extra_headers=headers)
    assert recorder.receipt(second.reef["agent_record_id"])["parent"] == first.reef["agent_record_id"]


def test_a_streamed_response_is_put_together_by_the_helper(client, recorder) -> None:
    with client.responses.stream(model="starter", input="2+3=", extra_body={"stop": "="}) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        response = stream.get_final_response()
    assert response.output_text == "".join(pieces)
    assert response.output_text == recorder.receipt(response.reef["agent_record_id"])["text"]


# --- tools, keys, limits ----------------------------------------------------------------------------------------------


@pytest.fixture
def connect(guarded):
    """`connect(max_retries=0, api_key=...)`: a client of the guarded service."""
    made = []

    def open_client(max_retries=0, api_key=guarded_service.KEY):
        made.append(openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=api_key, max_retries=max_retries))
        return made[-1]

    guarded.says("<think>\nHm.\n</think>\n\nFive.")
    yield open_client
    for client in made:
        client.close()


def ask(client, **fields):
    return client.chat.completions.create(model="m", messages=QUESTION, **fields)


@pytest.mark.slow
def test_reasoning_is_a_field_of_its_own(connect) -> None:
    message = ask(connect()).choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm.", "Five.")


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_of_a_tool_and_its_result_continue_one_turn(connect, guarded, streamed) -> None:
    """What the client made of the answer goes back as it is, with all that the client added to it."""
    asked = {"model": "m", "tools": [ADD], "extra_headers": {"x-reef-scenario": f"tools-{streamed}"}}
    client = connect()
    guarded.says(f"Let me add.\n{CALL}")
    if streamed:
        with client.chat.completions.stream(messages=QUESTION, **asked) as stream:
            choice = stream.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(messages=QUESTION, **asked).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
    guarded.says("Five.")
    result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    later = client.chat.completions.create(messages=[*QUESTION, choice.message, result], **asked)
    assert later.choices[0].message.content == "Five."
    assert guarded.receipt(later.choices[0].reef_agent_record_id)["continued_by"] == "messages"


@pytest.mark.slow
def test_a_call_of_a_tool_and_its_result_over_responses(connect, guarded) -> None:
    client = connect()
    guarded.says(f"<think>\nHm.\n</think>\n\n{CALL}")
    with client.responses.stream(model="m", input="2+3=", tools=[ADD_FLAT]) as stream:
        first = stream.get_final_response()
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 2, "b": 3})
    assert [item.type for item in first.output] == ["reasoning", "function_call"]
    guarded.says("Five.")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "5"}
    named = client.responses.create(model="m", input=[result], tools=[ADD_FLAT], previous_response_id=first.id)
    resent = client.responses.create(
        model="m", input=[{"role": "user", "content": "2+3="}, *first.output, result], tools=[ADD_FLAT]
    )
    for second in (named, resent):
        assert second.output_text == "Five."
        assert guarded.receipt(second.reef["agent_record_id"])["parent"] == first.reef["agent_record_id"]


@pytest.mark.slow
def test_a_response_is_parsed_to_a_model_of_pydantic(connect, guarded) -> None:
    class Sum(BaseModel):
        sum: int

    guarded.says('{"sum": 5}')
    response = connect().responses.parse(model="m", input="2+3=", text_format=Sum)
    assert response.output_parsed == Sum(sum=5)
    chat = connect().chat.completions.parse(model="m", messages=QUESTION, response_format=Sum)
    assert chat.choices[0].message.parsed == Sum(sum=5)


@pytest.mark.slow
def test_every_error_has_its_exception(connect, guarded) -> None:
    client = connect()
    with pytest.raises(openai.BadRequestError) as bad:
        ask(client, extra_body={"no_such_field": 1})
    assert (bad.value.status_code, bad.value.param, bad.value.code) == (400, "no_such_field", "unknown_field")
    with pytest.raises(openai.AuthenticationError) as unknown:
        ask(connect(api_key="another"))
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_0")
    with pytest.raises(openai.ConflictError) as conflict:
        ask(client, extra_headers={"x-reef-recipe": "another"})
    assert conflict.value.param == "x-reef-recipe"
    with guarded.full(), pytest.raises(openai.RateLimitError) as full:
        ask(client)
    assert full.value.response.headers["retry-after"] == "1"
    assert full.value.code == "queue_full"
    for error in (bad, unknown, conflict, full):
        assert error.value.request_id
        assert error.value.type


@pytest.mark.slow
def test_a_full_service_is_asked_again_after_the_time_it_says(connect, guarded) -> None:
    client = connect(max_retries=10)
    with guarded.full() as release:
        started = time.monotonic()
        pause = guarded.when_refused(release.set)
        answer = ask(client)
        pause.join()
    assert answer.choices[0].message.content == "Five."
    assert time.monotonic() - started >= 1


@pytest.mark.slow
def test_a_service_without_its_engine_answers_503_until_it_is_back(connect, guarded) -> None:
    with guarded.without_engine():
        with pytest.raises(openai.InternalServerError) as away:
            ask(connect())
        assert away.value.status_code == 503
        assert int(away.value.response.headers["retry-after"]) >= 1
    assert ask(connect(max_retries=30)).choices[0].message.content == "Five."


@pytest.mark.slow
def test_an_engine_that_fails_in_a_stream_raises(connect, guarded) -> None:
    engine = guarded.says.engine
    first = engine.generation([74], finish_reason=None)
    engine.answers["/generate"] = engine.events(first, {"error": {"message": "out of memory"}})
    with pytest.raises(openai.APIError, match="out of memory"):
        list(ask(connect(), stream=True))
    events = list(connect().responses.create(model="m", input="2+3=", stream=True))
    assert events[-1].type == "response.failed"
    assert "out of memory" in events[-1].response.error.message
