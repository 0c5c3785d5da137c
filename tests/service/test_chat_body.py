"""Chat bodies as conversations: what clients may send back of what they got."""

from __future__ import annotations

import orjson
import pytest

from reef.chat.conversation import Message
from reef.errors import BadRequestError
from reef.service.wire import parse
from reef.service.wire_openai import ChatBody


def messages(*bodies):
    return parse(ChatBody, orjson.dumps({"messages": bodies})).conversation().messages


@pytest.mark.parametrize(
    "body",
    [
        {"content": None, "refusal": "No."},
        {"refusal": "No."},
        {"content": [{"type": "refusal", "refusal": "No."}]},
        {"content": "No.", "refusal": None},
    ],
)
def test_a_refusal_is_what_the_assistant_said(body) -> None:
    """OpenAI's models answer with content null and the refusal beside it."""
    assert messages({"role": "assistant", **body}) == (Message("assistant", "No."),)


@pytest.mark.parametrize("role", ["user", "system", "developer", "assistant"])
def test_a_message_that_says_nothing_at_all_is_refused_and_one_with_empty_text_is_not(role) -> None:
    assert messages({"role": role, "content": ""}) == (Message(role, ""),)
    with pytest.raises(BadRequestError, match=r"messages\.0\.content: expected text"):
        messages({"role": role, "content": None})
