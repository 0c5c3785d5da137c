"""Which messages are the same turn, whatever clients do to them on their way back."""

import pytest

from reef.chat.conversation import Conversation, Message, ToolCall
from reef.chat.history import extend, root, same_reasoning


def calling(arguments, id="a", name="add"):
    return extend("key", Message("assistant", "", None, (ToolCall(id, name, arguments),)))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('{"a": 1, "b": 2}', '{ "b":2,\n"a":1 }'),
        ('{"a": 1.0, "b": [2.0, {"c": -0.0}]}', '{"a":1,"b":[2,{"c":0}]}'),  # what JSON.stringify makes of it
        ('{"a": 1e3}', '{"a":1000}'),
        ('{"a": "\\u00e9"}', '{"a": "é"}'),
        ("{}", ""),
        ("{}", "\n"),
        ("not JSON", "not JSON"),
    ],
)
def test_arguments_are_compared_as_json(said, told) -> None:
    assert calling(said) == calling(told, id="renamed")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ('{"a": 1}', '{"a": 2}'),
        ('{"a": 1}', '{"a": "1"}'),
        ('{"a": 1}', '{"a": true}'),
        ('{"a": 1.5}', '{"a": 1}'),
        ('{"a": 0}', '{"a": null}'),
        ('{"a": 9007199254740993}', '{"a": 9007199254740992}'),
        ("{}", "[]"),
        ("{}", "{"),
    ],
)
def test_other_arguments_are_another_turn(said, told) -> None:
    assert calling(said) != calling(told)


def test_another_tool_and_more_calls_are_another_turn() -> None:
    assert calling("{}") != calling("{}", name="sub")
    call = ToolCall("a", "add", "{}")
    assert extend("key", Message("assistant", "", None, (call, call))) != calling("{}")


def test_a_conversation_begins_with_all_that_makes_its_ids() -> None:
    """Scenario, key, template and tokenizer, tools, and the variables of the template, in whatever order."""
    tool = {"type": "function", "function": {"name": "f"}}
    plain = Conversation(())
    base = root("s", "owner", "digests", plain)
    others = [
        root("t", "owner", "digests", plain),
        root("s", "other", "digests", plain),
        root("s", "owner", "of another model", plain),
        root("s", "owner", "digests", Conversation((), (tool,))),
        root("s", "owner", "digests", Conversation((), (), {"enable_thinking": False})),
    ]
    assert len({base, *others}) == 6
    one, two = (Conversation((), (), dict(pairs)) for pairs in ((("a", 1), ("b", 2)), (("b", 2), ("a", 1))))
    assert root("s", "owner", "digests", one) == root("s", "owner", "digests", two)


def test_two_messages_of_the_same_words_are_two_places() -> None:
    message = Message("assistant", "yes")
    assert extend(extend("key", message), message) != extend("key", message)


@pytest.mark.parametrize(
    ("told", "said", "same"),
    [
        (None, "a", True),
        ("", "a", True),
        (" a\n", "a", True),
        ("b", "a", False),
        ("a", None, False),
        (None, None, True),
    ],
)
def test_reasoning_may_be_left_out_and_not_be_changed(told, said, same) -> None:
    assert same_reasoning(Message("assistant", "x", told), Message("assistant", "x", said)) is same
