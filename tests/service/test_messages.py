"""POST /v1/messages and /v1/messages/count_tokens, whole and streamed, over the real service."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading

import pytest
from aiohttp import web

from tests.service.says import Says
from tests.service.test_messages_body import read

pytestmark = pytest.mark.slow

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
CHAT = "/v1/chat/completions"
ADD = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {"a": {}, "b": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def result(block, text):
    return user([{"type": "tool_result", "tool_use_id": block["id"], "content": text}])


def post(service, messages, headers=None, **fields):
    body = {"model": "m", "max_tokens": 16, "messages": messages, **fields}
    return service.post(MESSAGES, body, headers=headers)


def ask(service, messages, **fields):
    response = post(service, messages, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def stream(service, messages, headers=None, **fields):
    """The events of a streamed answer; each has a line that names it, as Anthropic's SDKs need."""
    body = {"model": "m", "max_tokens": 16, "messages": messages, "stream": True, **fields}
    with service.client.stream("POST", service.url + MESSAGES, json=body, headers=headers) as response:
        text = response.read().decode()
    assert response.status_code == 200, text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def content_of(events):
    return read(event for event in events if event["type"].startswith("content_block"))


def all_ids(receipt):
    return receipt["prompt_token_ids"] + receipt["token_ids"]


@pytest.fixture
def is_anthropics_error():
    """`is_anthropics_error(response, 400, "invalid_request_error", param=...)`: Anthropic's shape, and nothing else."""

    def check(response, status, kind, *, code=None, param=None):
        assert response.status_code == status, response.text
        body = response.json()
        assert body.keys() == {"type", "error", "request_id"}
        assert body["type"] == "error"
        assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
        error = body["error"]
        assert error.keys() == {"type", "message", "details"}
        assert error["details"].keys() == {"error_code", "param"}
        assert error["type"] == kind
        assert error["message"]
        assert code in (None, error["details"]["error_code"]), error
        assert param in (None, error["details"]["param"]), error
        return error

    return check


# --- whole answers and streams ----------------------------------------------------------------------------------------


def test_an_answer_has_anthropics_shape_and_a_receipt(recorder, scenario) -> None:
    response = post(recorder, [user("12+7=")], headers={"x-reef-scenario": scenario, "x-request-id": "mine"})
    answer = response.json()
    assert answer.keys() == {
        *("id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage", "reef")
    }
    assert answer["id"].startswith("msg_")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "m")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert response.headers["request-id"] == response.headers["x-request-id"] == "mine"
    receipt = recorder.receipt(response.headers["x-reef-agent-record-id"])
    assert answer["reef"]["agent_record_id"] == receipt["agent_record_id"]
    assert answer["reef"]["release_id"] == response.headers["x-reef-release-id"]
    assert answer["content"] == [{"type": "text", "text": receipt["text"]}]
    assert receipt["scenario"] == scenario
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (
        len(receipt["prompt_token_ids"]),
        len(receipt["token_ids"]),
    )
    assert usage["cache_creation_input_tokens"] == usage["cache_read_input_tokens"] == 0


def test_a_stream_says_the_same_in_the_right_order_and_its_receipt_last(recorder) -> None:
    asked = [user("31+4=")]
    events = stream(recorder, asked, temperature=0)
    kinds = [event["type"] for event in events if event["type"] != "content_block_delta"]
    assert kinds == [
        *("message_start", "ping", "content_block_start", "content_block_stop", "message_delta", "message_stop")
    ]
    opening, last = events[0]["message"], events[-2]
    assert opening["content"] == []
    assert (opening["stop_reason"], opening["stop_sequence"]) == (None, None)
    assert opening["usage"]["output_tokens"] == 0
    whole = ask(recorder, asked, temperature=0)
    assert content_of(events) == whole["content"]
    assert last["delta"] == {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    assert last["usage"] == whole["usage"]
    assert opening["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert events[-1]["reef"] == last["reef"]
    receipt = recorder.receipt(events[-1]["reef"]["agent_record_id"])
    assert receipt["text"] == whole["content"][0]["text"]


def test_a_stop_sequence_is_named_and_not_part_of_the_text(recorder) -> None:
    asked = [user("2+3=")]
    assert "<final>" in ask(recorder, asked, temperature=0)["content"][0]["text"]
    answer = ask(recorder, asked, temperature=0, stop_sequences=["nowhere", "<final>"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "<final>")
    assert "<final>" not in answer["content"][0]["text"]
    events = stream(recorder, asked, temperature=0, stop_sequences=["<final>"])
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "<final>"}
    assert content_of(events) == answer["content"]


def test_an_answer_that_is_cut_says_so(recorder) -> None:
    answer = ask(recorder, [user("2+3=")], max_tokens=1)
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 1)


def test_more_tokens_than_the_context_leaves_mean_all_that_it_leaves(recorder) -> None:
    """Clients must name a limit, and know nothing of this model's context."""
    response = post(recorder, [user("2+3=")], max_tokens=64_000)
    assert response.json()["stop_reason"] == "end_turn"
    receipt = recorder.receipt(response.headers["x-reef-agent-record-id"])
    assert receipt["sampling"]["max_tokens"] == 512 - len(receipt["prompt_token_ids"])


# --- turns ------------------------------------------------------------------------------------------------------------


def test_turns_go_on_from_one_api_to_the_other_and_back(recorder, scenario) -> None:
    headers = {"x-reef-scenario": scenario}
    messages = [{"role": "system", "content": "Add."}, user("1+1=")]

    def chat(seed):
        fields = {"messages": messages, "max_tokens": 8, "temperature": 3, "seed": seed}
        response = recorder.post(CHAT, fields, headers=headers)
        messages.append(assistant(response.json()["choices"][0]["message"]["content"]))
        return recorder.receipt(response.headers["x-reef-agent-record-id"])

    first = chat(1)
    messages.append(user([{"type": "text", "text": "2+2="}]))
    second_answer = post(
        recorder, messages[1:], headers=headers, system=[{"type": "text", "text": "Add."}], max_tokens=8, temperature=3
    )
    second = recorder.receipt(second_answer.headers["x-reef-agent-record-id"])
    messages.append(assistant("".join(block["text"] for block in second_answer.json()["content"])))
    messages.append(user("3+3="))
    third = chat(3)
    for earlier, later in ((first, second), (second, third)):
        assert (later["parent"], later["continued_by"]) == (earlier["agent_record_id"], "messages")
        assert later["prompt_token_ids"][: len(all_ids(earlier))] == all_ids(earlier)


def test_counting_counts_the_prompt_that_a_message_is_answered_from(recorder, scenario) -> None:
    """Also in a turn that continues ids which no rendering would give."""
    headers = {"x-reef-scenario": scenario}
    messages = [user("5+8=")]
    for _ in range(3):
        counted = recorder.post(COUNT, {"model": "m", "messages": messages, "system": "Add."}, headers=headers)
        assert counted.status_code == 200, counted.text
        answer = ask(recorder, messages, headers=headers, system="Add.", temperature=3, max_tokens=8)
        assert counted.json() == {"input_tokens": answer["usage"]["input_tokens"]}
        messages += [assistant(answer["content"]), user("and?")]


# --- errors -----------------------------------------------------------------------------------------------------------


def test_every_error_has_anthropics_shape(recorder, is_anthropics_error) -> None:
    bad = "invalid_request_error"
    is_anthropics_error(recorder.post(MESSAGES, {"x": 1}), 400, bad, code="missing_field", param="model")
    is_anthropics_error(recorder.post(COUNT, {"model": "m", "messages": []}), 400, bad, param="messages")
    is_anthropics_error(recorder.client.post(recorder.url + MESSAGES, content=b"{"), 400, bad, code="invalid_json")
    is_anthropics_error(recorder.get(MESSAGES), 405, bad, code="method_not_allowed")
    is_anthropics_error(recorder.get(f"{MESSAGES}/batches"), 404, "not_found_error")
    too_long = post(recorder, [user("1" * 600)])
    is_anthropics_error(too_long, 400, bad, code="context_length_exceeded")
    unknown = {"x-reef-parent": "rcp_unknown"}
    is_anthropics_error(post(recorder, [user("1")], headers=unknown), 404, "not_found_error", code="receipt_not_found")
    other = post(recorder, [user("1")], headers={"x-reef-recipe": "another"})
    is_anthropics_error(other, 409, "conflict_error", param="x-reef-recipe")
    assert other.headers["x-should-retry"] == "false"


def test_errors_before_a_prefix_is_read_have_it_too(recorder, is_anthropics_error) -> None:
    contradicted = {"x-reef-scenario": "another"}
    response = recorder.post("/scenarios/one/v1/messages", {"model": "m"}, headers=contradicted)
    is_anthropics_error(response, 400, "invalid_request_error", code="header_contradicts_path")


def test_other_routes_keep_their_own_shape(recorder, is_error) -> None:
    is_error(recorder.post(CHAT, {}), 400)
    is_error(recorder.get("/v1/messagesx"), 404)
    assert "request-id" not in recorder.get("/v1/models").headers


def test_too_many_messages_are_too_large(recorder, is_anthropics_error) -> None:
    limit = 4096
    response = post(recorder, [user("1"), assistant("2")] * limit + [user("3")])
    error = is_anthropics_error(response, 413, "request_too_large")
    assert "max-messages" in error["message"]


def test_a_prefixed_path_names_the_scenario(recorder, scenario) -> None:
    body = {"model": "m", "max_tokens": 4, "messages": [user("1+1=")]}
    response = recorder.post(f"/scenarios/{scenario}/v1/messages", body)
    assert recorder.receipt(response.headers["x-reef-agent-record-id"])["scenario"] == scenario


# --- tools and thinking, with an engine that says what it is told -----------------------------------------------------


@pytest.fixture
def says(qwen3, scenario):
    """What speaks as Qwen3, asked in a scenario of the test's own."""
    made = Says(*qwen3, "qwen3")
    made.headers = {"x-reef-scenario": scenario}
    yield made
    made.engine.answers.pop("/generate", None)


def whole_or_stream(says, messages, is_stream, **fields):
    """Content, why it ended, the receipt."""
    if is_stream:
        events = stream(says.service, messages, headers=says.headers, **fields)
        content, reason, reef = content_of(events), events[-2]["delta"]["stop_reason"], events[-1]["reef"]
    else:
        answer = ask(says.service, messages, headers=says.headers, **fields)
        content, reason, reef = answer["content"], answer["stop_reason"], answer["reef"]
    return content, reason, says.service.receipt(reef["agent_record_id"])


both_ways = pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])


@pytest.mark.slow
@both_ways
def test_thinking_text_and_calls_are_blocks(says, is_stream) -> None:
    ids = says(f"<think>\nhm é\n</think>\n\nBoth:\n{CALL}\n{CALL.replace('1', '7')}")
    content, reason, receipt = whole_or_stream(says, [user("1+2=")], is_stream, tools=[ADD])
    thinking, text, one, two = content
    assert thinking["thinking"] == "hm é"
    assert thinking["signature"]
    assert text == {"type": "text", "text": "Both:"}
    assert (one["name"], one["input"]) == ("add", {"a": 1, "b": 2})
    assert two["input"] == {"a": 7, "b": 2}
    assert one["id"] != two["id"]
    assert reason == "tool_use"
    assert receipt["token_ids"] == ids


@pytest.mark.slow
def test_arguments_are_streamed_as_they_come(says) -> None:
    says(CALL)
    pieces = [
        event["delta"]["partial_json"]
        for event in stream(says.service, [user("1+2=")], headers=says.headers, tools=[ADD])
        if event["type"] == "content_block_delta"
    ]
    assert len(pieces) > 5
    assert json.loads("".join(pieces)) == {"a": 1, "b": 2}


@pytest.mark.slow
def test_text_arrives_while_the_engine_still_samples(says) -> None:
    ids, arrived = says("Five, I think."), threading.Event()
    begun, whole = says.engine.generation(ids[:6], finish_reason=None), says.engine.generation(ids)

    async def answer(request, _body):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + json.dumps(begun).encode() + b"\n\n")
        while not arrived.is_set():
            await asyncio.sleep(0.01)
        await response.write(b"data: " + json.dumps(whole).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    says.engine.answers["/generate"] = answer
    body = {"model": "m", "max_tokens": 16, "messages": [user("2+3=")], "stream": True}
    with says.service.client.stream("POST", says.service.url + MESSAGES, json=body, headers=says.headers) as response:
        text, kinds = "", []
        for line in response.iter_lines():
            if line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                kinds.append(event["type"])
                text += event.get("delta", {}).get("text", "")
                if text:
                    arrived.set()
    assert text == "Five, I think."
    assert kinds.count("content_block_delta") == 2
    assert kinds[-1] == "message_stop"


@pytest.mark.slow
@both_ways
def test_thinking_is_kept_out_of_the_answer_where_that_is_asked_for(says, is_stream) -> None:
    says("<think>\nhm\n</think>\n\n3")
    thinking = {"type": "adaptive", "display": "omitted"}
    content, _, _ = whole_or_stream(says, [user("1+2=")], is_stream, thinking=thinking)
    assert (content[0]["type"], content[0]["thinking"], content[1]["text"]) == ("thinking", "", "3")
    assert content[0]["signature"]


@pytest.mark.slow
def test_thinking_is_switched_off_in_the_prompt(says) -> None:
    for thinking, end in (({"type": "disabled"}, "<think>\n\n</think>\n\n"), ({"type": "adaptive"}, "assistant\n")):
        says("3")
        ask(says.service, [user("1+2=")], headers=says.headers, thinking=thinking)
        assert says.decode(says.prompts[-1]).endswith(end)


def keep_all(content):
    return content


def drop_thinking(content):
    return [block for block in content if block["type"] != "thinking"]


def drop_signature(content):
    return [{name: value for name, value in block.items() if name != "signature"} for block in content]


@pytest.mark.slow
@both_ways
@pytest.mark.parametrize("sent_back", [keep_all, drop_thinking, drop_signature])
def test_a_turn_with_thinking_and_tools_is_continued_with_its_exact_ids(says, is_stream, sent_back) -> None:
    messages, turns = [user("1+2=")], []
    for said in (
        f"<think>\nhm\n</think>\n\nSo:\n{CALL}",
        f"<think>\nagain\n</think>\n\n{CALL}",
        "<think>\n!\n</think>\n\n3",
    ):
        says(said)
        content, reason, receipt = whole_or_stream(says, messages, is_stream, tools=[ADD])
        turns.append(receipt)
        messages.append(assistant(sent_back(content)))
        messages.append(result(content[-1], "3") if reason == "tool_use" else user("and?"))
    for earlier, later in itertools.pairwise(turns):
        assert (later["parent"], later["continued_by"]) == (earlier["agent_record_id"], "messages")
        assert later["prompt_token_ids"][: len(all_ids(earlier))] == all_ids(earlier)


@pytest.mark.slow
def test_a_turn_whose_thinking_was_rewritten_is_another_one(says) -> None:
    says(f"<think>\nhm\n</think>\n\n{CALL}")
    first = ask(says.service, [user("1+2=")], headers=says.headers, tools=[ADD])["content"]
    messages = [user("1+2="), assistant([{**first[0], "thinking": "no"}, first[1]]), result(first[1], "3")]
    says("3")
    _, _, receipt = whole_or_stream(says, messages, False, tools=[ADD])
    assert receipt["parent"] is None
    assert "<think>\nno\n</think>" in says.decode(says.prompts[-1])


@pytest.mark.slow
@both_ways
def test_a_call_that_was_cut_is_no_tool_use(says, is_stream) -> None:
    """As the API does it, a stream that had begun to send it leaves it where it was cut."""
    says('Sure <tool_call>\n{"name": "add", "arguments": {"a": 1, "b"', cut=True)
    body = {"tools": [ADD], "max_tokens": 16}
    if not is_stream:
        answer = ask(says.service, [user("1+2=")], headers=says.headers, **body)
        assert [block["type"] for block in answer["content"]] == ["text"]
        assert '"arguments": {"a": 1, "b"' in answer["content"][0]["text"]
        assert answer["stop_reason"] == "max_tokens"
        return
    events = stream(says.service, [user("1+2=")], headers=says.headers, **body)
    pieces = [event["delta"].get("partial_json", "") for event in events if event["type"] == "content_block_delta"]
    assert "".join(pieces) == '{"a": 1, "b"'
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    assert events[-1]["type"] == "message_stop"


@pytest.mark.slow
def test_an_answer_that_fills_the_context_says_that_this_ended_it(says) -> None:
    ids = says("3", cut=True)
    answer = ask(says.service, [user("1+2=")], headers=says.headers, max_tokens=len(ids) + 1)
    assert answer["stop_reason"] == "model_context_window_exceeded"


@pytest.mark.slow
def test_tools_that_may_not_be_used_are_not_looked_for(says) -> None:
    says(CALL)
    content, reason, _ = whole_or_stream(says, [user("1+2=")], False, tools=[ADD], tool_choice={"type": "none"})
    assert (content, reason) == ([{"type": "text", "text": CALL}], "end_turn")
    assert "add" not in says.decode(says.prompts[-1])


@pytest.mark.slow
def test_a_reply_without_a_word_is_a_message_without_blocks_and_can_be_sent_back(says) -> None:
    says("")
    content, reason, first = whole_or_stream(says, [user("1+2=")], False)
    assert (content, reason) == ([], "end_turn")
    says("3")
    _, _, second = whole_or_stream(says, [user("1+2="), assistant(content), user("?")], True)
    assert second["parent"] == first["agent_record_id"]


@pytest.mark.slow
def test_an_engine_that_fails_in_a_stream_is_an_error_event_and_there_is_no_receipt(says, stored) -> None:
    begun = says.engine.generation([5, 6], finish_reason=None)
    says.engine.answers["/generate"] = says.engine.events(begun, done=False)
    events = stream(says.service, [user("1+2=")], headers=says.headers)
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"
    assert events[-1]["request_id"]
    assert "message_stop" not in [event["type"] for event in events]
    name = says.headers["x-reef-scenario"]
    rows = "SELECT count(*) FROM receipts JOIN requests ON requests.id = receipts.request_id WHERE scenario = ?"
    assert stored(says.service, rows, name) == [(0,)]


@pytest.mark.slow
@both_ways
def test_an_answer_that_the_engine_gave_up_is_an_error_and_kept(says, is_stream) -> None:
    """No stop reason of Anthropic's says so."""
    given_up = says.engine.generation([5, 6], finish_reason={"type": "abort", "message": "Aborted"})
    says.engine.answers["/generate"] = says.engine.events(given_up) if is_stream else lambda *_: given_up
    if is_stream:
        error = stream(says.service, [user("1+2=")], headers=says.headers)[-1]["error"]
    else:
        response = post(says.service, [user("1+2=")], headers=says.headers)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        error = response.json()["error"]
    assert (error["type"], error["details"]["error_code"]) == ("overloaded_error", "aborted")
    receipt = says.service.receipt(error["message"].rpartition(" ")[2])
    assert (receipt["finish_reason"], receipt["token_ids"]) == ("abort", [5, 6])


@pytest.mark.slow
def test_a_client_that_goes_away_ends_the_work_on_the_engine(says, ask_and_leave) -> None:
    says.engine.cancelled.clear()
    says.engine.calls.clear()
    says.engine.answers["/generate"] = says.engine.never
    body = {"model": "m", "max_tokens": 4, "messages": [user("1")]}
    ask_and_leave(says.service, MESSAGES, body, lambda: "/generate" in [route for route, _ in says.engine.calls])
    assert says.engine.cancelled.wait(60)
