"""POST /v1/responses, whole and streamed, and what continues it, over the real service and the embedded engine."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.slow

RESPONSES = "/v1/responses"
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}
SPACE = {"type": "namespace", "name": "maths", "description": "Sums.", "tools": [ADD]}


class Client:
    """Asks in a scenario of its own."""

    def __init__(self, service, scenario):
        self.service = service
        self.headers = {"x-reef-scenario": scenario}

    def post(self, input="2+3=", **fields):
        """The HTTP answer, whatever it is."""
        body = {"input": input, "max_output_tokens": 8, **fields}
        return self.service.post(RESPONSES, body, headers=self.headers)

    def ask(self, input="2+3=", **fields):
        """The response object."""
        answer = self.post(input, **fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, input="2+3=", **fields):
        """The events, in order."""
        body = {"input": input, "max_output_tokens": 8, "stream": True, **fields}
        with self.service.client.stream(
            "POST", self.service.url + RESPONSES, json=body, headers=self.headers
        ) as response:
            response.read()
        assert response.status_code == 200, response.text
        return events_of(response.text)

    def receipt(self, response):
        return self.service.receipt(response["reef"]["agent_record_id"])


def events_of(text):
    """Server-sent events, each with its type on the `event` line too."""
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def all_ids(receipt):
    return receipt["prompt_token_ids"] + receipt["token_ids"]


def continues(later, earlier, how):
    assert (later["parent"], later["continued_by"]) == (earlier["agent_record_id"], how)
    return later["prompt_token_ids"][: len(all_ids(earlier))] == all_ids(earlier)


@pytest.fixture
def client(recorder, scenario):
    return Client(recorder, scenario)


# --- whole answers ----------------------------------------------------------------------------------------------------


def test_a_response_has_openais_shape_and_a_receipt(client) -> None:
    answer = client.post("2+3=", temperature=0.5, metadata={"task": "sum"}, instructions="Add.", seed=4)
    response = answer.json()
    receipt = client.receipt(response)
    assert answer.headers["x-reef-agent-record-id"] == receipt["agent_record_id"]
    assert answer.headers["x-reef-release-id"] == response["reef"]["release_id"]
    assert response["id"] == "resp_" + receipt["request_id"].removeprefix("req_")
    assert response["object"] == "response"
    assert response["model"] == "starter"
    assert response["metadata"] == {"task": "sum"}
    assert response["temperature"] == receipt["sampling"]["temperature"] == 0.5
    assert receipt["sampling"]["seed"] == 4
    (message,) = response["output"]
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert message["content"] == [{"type": "output_text", "text": receipt["text"], "annotations": [], "logprobs": []}]
    assert response["usage"]["input_tokens"] == receipt["num_prompt_tokens"]
    assert response["usage"]["output_tokens"] == receipt["num_tokens"]
    assert response["usage"]["total_tokens"] == receipt["num_prompt_tokens"] + receipt["num_tokens"]
    assert receipt["prompt_text"] == "system\nAdd.\nuser\n2+3=\nassistant\n"
    assert receipt["request"]["input"] == "2+3="


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_its_limit_cuts_is_incomplete(client, stream) -> None:
    response = client.stream(max_output_tokens=1)[-1]["response"] if stream else client.ask(max_output_tokens=1)
    assert client.receipt(response)["finish_reason"] == "length"
    assert response["status"] == response["output"][-1]["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_an_answer_that_ends_by_itself_is_complete(client) -> None:
    response = client.ask(stop="=", max_output_tokens=None, temperature=5, seed=1)
    assert client.receipt(response)["finish_reason"] == "stop"
    assert response["status"] == response["output"][-1]["status"] == "completed"
    assert response["incomplete_details"] is None


def test_text_and_items_of_the_same_words_are_the_same_prompt(client) -> None:
    ways = [
        {"instructions": "Add.", "input": "2+3="},
        {"input": [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+3="}]},
        {
            "instructions": "Add.",
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [{"type": "input_text", "text": "2+"}, {"type": "input_text", "text": "3="}],
                }
            ],
        },
    ]
    prompts = [client.receipt(client.ask(**way))["prompt_token_ids"] for way in ways]
    assert prompts[0] == prompts[1] == prompts[2]


def test_a_response_can_be_asked_for_again(client) -> None:
    response = client.ask(instructions="Add.", seed=2)
    again = client.service.get(f"{RESPONSES}/{response['id']}")
    assert again.status_code == 200
    assert again.json() == response


def test_what_a_stream_ended_with_can_be_asked_for_again(client) -> None:
    response = client.stream(seed=2)[-1]["response"]
    assert client.service.get(f"{RESPONSES}/{response['id']}").json() == response


# --- streams ----------------------------------------------------------------------------------------------------------


def test_a_stream_has_its_events_in_order_and_numbered(client) -> None:
    events = client.stream(seed=3)
    kinds = [event["type"] for event in events]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{events[-1]['response']['status']}",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    text = "".join(event["delta"] for event in deltas)
    response = events[-1]["response"]
    assert text == response["output"][0]["content"][0]["text"] == client.receipt(response)["text"]
    assert events[-2]["item"] == response["output"][0]
    assert events[0]["response"]["status"] == "in_progress"
    assert "reef" not in events[0]["response"]  # there is no receipt yet


def test_a_stream_and_a_whole_answer_say_the_same(client) -> None:
    whole = client.ask(seed=5, temperature=2)
    streamed = client.stream(seed=5, temperature=2)[-1]["response"]
    assert client.receipt(whole)["token_ids"] == client.receipt(streamed)["token_ids"]
    for response in (whole, streamed):
        for name in ("id", "created_at", "reef"):
            del response[name]
        for item in response["output"]:
            del item["id"]
    assert whole == streamed


# --- later turns ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_turns_named_by_their_response_continue_its_exact_ids(client, stream) -> None:
    ask = (lambda *args, **fields: client.stream(*args, **fields)[-1]["response"]) if stream else client.ask
    first = ask("2+3=", temperature=3, seed=1)
    second = ask("4+1=", previous_response_id=first["id"], temperature=3, seed=2)
    third = ask([{"role": "user", "content": "7-2="}], previous_response_id=second["id"])
    receipts = [client.receipt(response) for response in (first, second, third)]
    assert continues(receipts[1], receipts[0], "response")
    assert continues(receipts[2], receipts[1], "response")
    assert receipts[2]["prompt_text"].endswith("7-2=\nassistant\n")


def test_turns_with_all_items_sent_again_continue_the_exact_ids(client) -> None:
    items = [{"role": "user", "content": "2+3="}]
    first = client.ask(items, temperature=3, seed=1, instructions="Add.")
    items += [*first["output"], {"type": "message", "role": "user", "content": "4+1="}]
    second = client.ask(items, temperature=3, seed=2, instructions="Add.")
    items += [*second["output"], {"role": "user", "content": "7-2="}]
    third = client.ask(items, instructions="Add.")
    receipts = [client.receipt(response) for response in (first, second, third)]
    assert continues(receipts[1], receipts[0], "messages")
    assert continues(receipts[2], receipts[1], "messages")


def test_both_ways_to_continue_have_the_same_prompt(client) -> None:
    first = client.ask("2+3=", temperature=3, seed=1)
    named = client.ask("4+1=", previous_response_id=first["id"])
    items = [{"role": "user", "content": "2+3="}, *first["output"], {"role": "user", "content": "4+1="}]
    resent = client.ask(items)
    assert client.receipt(named)["prompt_token_ids"] == client.receipt(resent)["prompt_token_ids"]


def test_two_turns_may_continue_the_same_response(client) -> None:
    first = client.ask("2+3=", temperature=3, seed=1)
    branches = [client.ask(text, previous_response_id=first["id"]) for text in ("1+1=", "2+2=")]
    for branch in branches:
        assert continues(client.receipt(branch), client.receipt(first), "response")


@pytest.mark.parametrize("change", [{"instructions": "Subtract."}, {}])
def test_other_instructions_than_before_begin_a_new_branch_with_the_same_messages(client, change) -> None:
    first = client.ask("2+3=", instructions="Add.", seed=1)
    later = client.receipt(client.ask("4+1=", previous_response_id=first["id"], **change))
    assert later["parent"] is None
    said = first["output"][0]["content"][0]["text"]
    system = f"system\n{change['instructions']}\n" if "instructions" in change else ""
    assert later["prompt_text"] == f"{system}user\n2+3=\nassistant\n{said}\nuser\n4+1=\nassistant\n"


def test_a_chat_continues_a_response_and_a_response_a_chat(client) -> None:
    first = client.ask("2+3=", temperature=3, seed=1)
    said = first["output"][0]["content"][0]["text"]
    messages = [
        {"role": "user", "content": "2+3="},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "4+1="},
    ]
    body = {"messages": messages, "max_tokens": 8}
    chat = client.service.post("/v1/chat/completions", body, headers=client.headers)
    second = client.service.receipt(chat.headers["x-reef-agent-record-id"])
    assert continues(second, client.receipt(first), "messages")
    items = [*messages, chat.json()["choices"][0]["message"], {"role": "user", "content": "7-2="}]
    third = client.receipt(client.ask([{name: item[name] for name in ("role", "content")} for item in items]))
    assert continues(third, second, "messages")


def test_a_response_that_is_not_there_cannot_be_continued(client, is_error) -> None:
    chat = client.service.chat(headers=client.headers).json()
    for unknown in ("resp_" + "0" * 32, "nonsense", "resp_" + chat["id"].removeprefix("chatcmpl-")):
        is_error(client.post(previous_response_id=unknown), 404, code="response_not_found", says=unknown)
        is_error(client.service.get(f"{RESPONSES}/{unknown}"), 404, code="response_not_found", says=unknown)


def test_a_response_of_another_scenario_cannot_be_continued(client, is_error) -> None:
    first = client.ask()
    other = Client(client.service, f"{client.headers['x-reef-scenario']}-other")
    is_error(other.post(previous_response_id=first["id"]), 404, code="response_not_found")


def test_a_response_that_was_deleted_is_gone(client, is_error) -> None:
    first = client.ask()
    second = client.ask(previous_response_id=first["id"])
    client.service.client.delete(f"{client.service.url}/reef/receipts/{first['reef']['agent_record_id']}")
    for response in (first, second):
        is_error(client.post(previous_response_id=response["id"]), 410, says=response["id"])
        is_error(client.service.get(f"{RESPONSES}/{response['id']}"), 410, says=response["id"])


def test_the_header_and_the_body_cannot_name_two_turns(client, is_error) -> None:
    first, second = client.ask(), client.ask()
    client.headers["x-reef-parent"] = second["reef"]["agent_record_id"]
    is_error(client.post(previous_response_id=first["id"]), 400, param="x-reef-parent")


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": None}, "input", "missing_field"),
        ({"input": []}, "input", "missing_field"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_field"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_field"),
        ({"context_management": []}, "context_management", "unsupported_field"),
        ({"background": True}, "background", "bad_field"),
        ({"truncation": "auto"}, "truncation", "bad_field"),
        ({"top_logprobs": 3}, "top_logprobs", "bad_field"),
        ({"include": ["message.output_text.logprobs"]}, "include", "unsupported_field"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools.0", "unsupported_field"),
        ({"tools": [ADD, {"type": "local_shell"}]}, "tools.1", "unsupported_field"),
        ({"tools": [ADD, ADD]}, "tools.1", "bad_field"),
        ({"tools": [{**SPACE, "tools": [{"type": "custom", "name": "x"}]}]}, "tools.0.tools.0", "unsupported_field"),
        ({"tools": [SPACE, {**ADD, "name": "maths.add"}]}, "tools.1", "bad_field"),
        ({"tools": [ADD], "parallel_tool_calls": False}, "parallel_tool_calls", "unsupported_field"),
        ({"tools": [{**ADD, "defer_loading": True}]}, "tools.0.defer_loading", "bad_field"),
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice", "unsupported_field"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "add"}}, "tool_choice", "unsupported_field"),
        ({"tool_choice": "sometimes"}, "tool_choice", "bad_field"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "bad_field"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "bad_field"),
        ({"messages": []}, "messages", "unknown_field"),
        ({"max_output_tokens": 0}, "max_output_tokens", "bad_field"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "bad_field"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "colour": 1}]}]},
            "input.0.content.0.colour",
            "unknown_field",
        ),
        ({"tools": [{"type": "function", "name": "x", "function": {}}]}, "tools.0.function", "unknown_field"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", "unsupported_field"),
        ({"input": [{"type": "computer_call_output"}]}, "input.0", "unsupported_field"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/"}]}]},
            "input.0.content.0.type",
            "unsupported_content",
        ),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}]},
            "input.0.encrypted_content",
            "unsupported_field",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "1", "output": [{"type": "input_file"}]}]},
            "input.0.output.0.type",
            "unsupported_content",
        ),
    ],
)
def test_what_nothing_here_does_is_refused_by_its_name(client, is_error, fields, param, code) -> None:
    is_error(client.post(**fields), 400, param=param, code=code)


def test_what_changes_no_answer_is_taken(client) -> None:
    hints = {
        "include": ["reasoning.encrypted_content"],
        "store": False,
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "prompt_cache_key": "thread-1",
        "client_metadata": {"x": "y"},
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "medium"},
        "truncation": "disabled",
        "background": False,
        "max_tool_calls": 3,
        "user": "u",
    }
    response = client.ask(**hints)
    assert response["store"] is True
    assert response["reasoning"] == {"effort": "low", "summary": None}


def test_the_web_search_that_agents_offer_unasked_is_left_out_and_the_answer_shows_it(client) -> None:
    """codex sends it by default; a model that is not told of it never asks."""
    response = client.ask(tools=[{"type": "web_search", "external_web_access": False}])
    assert response["tools"] == []


def test_a_schema_goes_to_the_engine(attached_recorder, broken_engine) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}}
    wanted = {"type": "json_schema", "name": "sum", "schema": schema, "strict": True}
    response = attached_recorder.post(RESPONSES, {"input": "2+3=", "text": {"format": wanted}})
    assert response.status_code == 200, response.text
    told = [body for route, body in broken_engine.calls if route == "/generate"][-1]
    assert json.loads(told["sampling_params"]["json_schema"]) == schema
    assert response.json()["text"]["format"] == wanted
    receipt = attached_recorder.receipt(response.headers["x-reef-agent-record-id"])
    assert receipt["inexact_reason"] == "json_schema"


def test_an_engine_that_fails_in_the_middle_of_a_stream_ends_it_as_failed(attached_recorder, broken_engine) -> None:
    first = broken_engine.generation([74], finish_reason=None)
    broken_engine.answers["/generate"] = broken_engine.events(first, {"error": {"message": "out of memory"}})
    events = Client(attached_recorder, "default").stream()
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert "out of memory" in events[-1]["response"]["error"]["message"]
    assert "reef" not in events[-1]["response"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_the_engine_gave_up_is_an_error_and_kept(attached_recorder, broken_engine, stream) -> None:
    """The API has no reason for an incomplete answer that says so."""
    given_up = broken_engine.generation([74, 75], finish_reason={"type": "abort", "message": "Aborted"})
    broken_engine.answers["/generate"] = broken_engine.events(given_up) if stream else lambda *_: given_up
    client = Client(attached_recorder, "default")
    if stream:
        last = client.stream()[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        error = last["response"]["error"]
        assert error["code"] == "server_error"
    else:
        response = client.post()
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        error = response.json()["error"]
        assert error["code"] == "aborted"
    receipt = attached_recorder.receipt(error["message"].rpartition(" ")[2])
    assert (receipt["finish_reason"], receipt["token_ids"]) == ("abort", [74, 75])
    kept = attached_recorder.get(f"{RESPONSES}/resp_{receipt['request_id'].removeprefix('req_')}").json()
    assert (kept["status"], kept["incomplete_details"]) == ("cancelled", None)


def test_a_response_that_its_client_cut_off_was_streamed_until_then_and_is_not_continued(
    attached_recorder, broken_engine, is_error, eventually, scenario
) -> None:
    engine = broken_engine

    async def answer(http, body):
        await engine.events(engine.generation([74, 75], finish_reason=None), done=False)(http, body)
        return await engine.never(http, body)

    engine.answers["/generate"] = answer
    engine.cancelled.clear()
    client = Client(attached_recorder, scenario)
    body = {"input": "2+3=", "stream": True}
    url = attached_recorder.url + RESPONSES
    with attached_recorder.client.stream("POST", url, json=body, headers=client.headers) as stream:
        text = ""
        for piece in stream.iter_text():  # the engine has not finished
            text += piece
            if "response.output_text.delta" in text:
                break
    response_id = json.loads(text.split("data: ")[1].partition("\n")[0])["response"]["id"]
    assert engine.cancelled.wait(60)
    url = f"{RESPONSES}/{response_id}"
    cut = eventually(lambda: (found := attached_recorder.get(url)).status_code == 200 and found.json())
    assert (cut["status"], cut["incomplete_details"]) == ("cancelled", None)
    assert attached_recorder.receipt(cut["reef"]["agent_record_id"])["token_ids"] == [74, 75]
    is_error(client.post(previous_response_id=response_id), 409, code="response_aborted", says=response_id)
