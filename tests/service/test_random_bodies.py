"""Chats and reports with something wrong anywhere in them: answered, or refused with the name of a field."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.slow

CHAT = {
    "model": "starter",
    "messages": [
        {"role": "system", "content": "You add."},
        {"role": "user", "content": [{"type": "text", "text": "1+1="}, {"type": "text", "text": "?"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "user", "content": "2+2="},
    ],
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}],
    "tool_choice": "auto",
    "max_tokens": 2,
    "temperature": 0.7,
    "top_p": 0.9,
    "n": 1,
    "stop": ["x"],
    "seed": 3,
    "logprobs": True,
    "top_logprobs": 2,
    "stream": False,
    "return_token_ids": True,
    "metadata": {"a": "b"},
}
REPORT = {
    "score": 0.5,
    "outcome": "correct",
    "reason_code": "r",
    "rewards": {"style": 1.0},
    "reference_scores": [0.5],
    "feedback": {"text": "well"},
    "references": ["rcp_"],
    "group": "g",
    "grader": {"id": "g", "version": "1"},
    "truncated": False,
    "metadata": {"a": [1, {"b": None}]},
}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | st.sampled_from(["", "user", "\x00", "\ud7ff", "9" * 300, "rcp_", "json_schema"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
EXAMPLES = settings(
    max_examples=500,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in a JSON value, the whole of it left out."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in ((*at, key), *places(inner, (*at, key)))]


def changed(value: Any, place: tuple[Any, ...], how: str, new: Any) -> Any:
    """A copy with something else, nothing, or one thing more at a place."""
    if not place:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else value
    key, rest = place[0], place[1:]
    if (
        not isinstance(copy, dict | list)
        or (isinstance(copy, list) and not 0 <= key < len(copy))
        or (isinstance(copy, dict) and key not in copy)
    ):  # an earlier change took it away
        return copy
    if rest:
        copy[key] = changed(copy[key], rest, how, new)
    elif how == "remove":
        del copy[key]
    elif how == "add" and isinstance(copy, dict):
        copy[f"{key}_"] = new
    else:
        copy[key] = new
    return copy


@st.composite
def broken(draw: st.DrawFn, body: dict[str, Any]) -> dict[str, Any]:
    """The body with one to three changes somewhere in it."""
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(places(body)))
        body = changed(body, place, draw(st.sampled_from(["replace", "replace", "remove", "add"])), draw(JSON))
        if not places(body):
            return body
    return body


def check(response) -> None:
    """An answer, or the one error shape, which names a field."""
    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert response.json().keys() == {"error"}
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["param"], error
        assert error["message"] and error["type"] and error["code"]


@pytest.fixture(scope="module")
def receipt_id(tool_recorder) -> str:
    return tool_recorder.chat("1+1=", headers={"x-reef-scenario": "random-bodies"}).headers["x-reef-agent-record-id"]


def test_the_bodies_that_are_broken_here_are_right_before(tool_recorder, receipt_id) -> None:
    headers = {"x-reef-scenario": "random-bodies"}
    assert tool_recorder.post("/v1/chat/completions", CHAT, headers=headers).status_code == 200
    assert (
        tool_recorder.post("/reef/report", {**REPORT, "references": [receipt_id]}, headers=headers).status_code == 200
    )


@EXAMPLES
@given(body=broken(CHAT))
def test_a_chat_that_is_wrong_somewhere_is_answered_or_refused_by_the_fields_name(tool_recorder, body) -> None:
    if body.get("max_tokens") is None:  # without a limit it would be sampled for long
        body = {**body, "max_tokens": 2}
    check(tool_recorder.post("/v1/chat/completions", body, headers={"x-reef-scenario": "random-bodies"}))


@EXAMPLES
@given(body=broken(REPORT))
def test_a_report_that_is_wrong_somewhere_is_stored_or_refused_by_the_fields_name(
    tool_recorder, receipt_id, body
) -> None:
    if body.get("references") == ["rcp_"]:
        body = {**body, "references": [receipt_id]}
    check(tool_recorder.post("/reef/report", body, headers={"x-reef-scenario": "random-bodies"}))
