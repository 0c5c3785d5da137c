"""Bodies that are nested deep, and numbers that are long: refused by the field's name, or answered."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from reef.errors import BadRequestError
from reef.service.records import BatchBody
from reef.service.wire import MAX_DEPTH, ReportBody, parse
from reef.service.wire_anthropic import CountBody, MessagesBody
from reef.service.wire_openai import ChatBody, CompletionBody
from reef.service.wire_responses import ResponsesBody

DEEP = (MAX_DEPTH, 300, 980, 1000, 1023)  # 1024 is more than the JSON reader takes
ROUTES = {
    "/v1/chat/completions": b'{"max_tokens": 4, "messages": %s}',
    "/v1/completions": b'{"max_tokens": 4, "prompt": %s}',
    "/v1/responses": b'{"max_output_tokens": 4, "input": %s}',
    "/v1/messages": b'{"model": "m", "max_tokens": 4, "messages": %s}',
    "/v1/messages/count_tokens": b'{"model": "m", "messages": %s}',
    "/reef/report": b'{"references": [], "metadata": {"a": %s}}',
    "/reef/records/batch": b'{"records": [{"agent_record_id": "a", "request_type": "report", "payload": {"a": %s}}]}',
    "/reef/scenarios": b'{"name": %s}',
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("brackets", [(b"[", b"]"), (b'{"a":', b"}")])
def test_what_is_nested_deep_is_refused_and_never_a_fault_of_ours(recorder, route, brackets) -> None:
    for depth in DEEP:
        body = ROUTES[route] % (brackets[0] * depth + b"1" + brackets[1] * depth)
        response = recorder.client.post(recorder.url + route, content=body)
        assert response.status_code == 400, (depth, response.text)
        assert len(response.text) < 500


def test_a_wrong_value_is_shown_short_however_long_it_is() -> None:
    for value in ("x" * 10_000, list(range(10_000)), {"a": {"b": list(range(10_000))}}, 10**4000):
        with pytest.raises(BadRequestError, match="got ") as refused:
            parse(ReportBody, json.dumps({"references": [], "group": value, "score": float("nan")}).encode())
        assert len(refused.value.message) < 300


def test_arguments_of_a_call_that_are_nested_deep_come_back_as_the_text_that_they_are(recorder, scenario) -> None:
    """The templates and the keys of turns go through them by recursion."""
    for depth in (MAX_DEPTH, 300, 1000, 1023, 5000):
        call = {"name": "f", "arguments": '{"a": ' + "[" * depth + "]" * depth + "}"}
        messages = [
            {"role": "user", "content": "1+1="},
            {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "call_1", "content": "2"},
        ]
        headers = {"x-reef-scenario": scenario}
        response = recorder.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4}, headers=headers)
        assert response.status_code in (200, 400), (depth, response.text)
        if response.status_code == 400:  # it does not fit into the context
            assert response.json()["error"]["code"] == "context_length_exceeded"


BODIES = (ChatBody, CompletionBody, CountBody, MessagesBody, ResponsesBody, ReportBody, BatchBody)
WRONG = (
    (ChatBody, {"messages": [1] * 1000}),
    (ChatBody, {"messages": [{"role": "user", "content": [1] * 1000}]}),
    (ChatBody, {"messages": [{"role": "user", "content": "x"}], "tools": [1] * 1000, "stop": [1] * 1000}),
    (CompletionBody, {"prompt": [""] * 1000}),
    (MessagesBody, {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [1] * 1000}]}),
    (MessagesBody, {"model": "m", "max_tokens": 1, "messages": [1] * 1000, "system": [1] * 1000}),
    (ResponsesBody, {"input": [1] * 1000, "tools": [1] * 1000, "include": [1] * 1000}),
    (ResponsesBody, {"input": [{"role": "user", "content": [1] * 1000}]}),
    (ReportBody, {"references": [1] * 1000, "reference_scores": [""] * 1000}),
    (BatchBody, {"records": [1] * 1000}),
)


@pytest.mark.parametrize(("model", "body"), WRONG)
def test_a_list_is_refused_at_its_first_wrong_item(model, body) -> None:
    """An error for each item of a body of 4 MiB would be gigabytes, and seconds in which nobody else is answered."""
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)
    assert refused.value.error_count() < 10


@pytest.mark.parametrize("model", BODIES)
def test_every_list_of_a_body_is_one_of_those(model) -> None:
    lists = [schema for schema in _schemas(model.__pydantic_core_schema__) if schema["type"] == "list"]
    assert lists
    assert [schema for schema in lists if not schema.get("fail_fast") and schema["items_schema"]["type"] != "any"] == []


def _schemas(schema):
    """Every schema inside one of pydantic's."""
    if isinstance(schema, dict):
        if isinstance(schema.get("type"), str):
            yield schema
        for inner in schema.values():
            yield from _schemas(inner)
    elif isinstance(schema, list | tuple):
        for inner in schema:
            yield from _schemas(inner)
