"""Which recorded turn a conversation continues, by the keys of its prefixes."""

from typing import Any

import pytest
from sqlalchemy import event

from reef.errors import GoneError, NotFoundError
from reef.ledger import deletion, scenarios, turns
from tests.ledger.conftest import NOW, SCENARIO


def find(book: Any, *keys: str, session: str | None = None) -> Any:
    return book.read(turns.find, list(keys), SCENARIO, session)


def turn(book: Any, key: str, **changes: Any) -> str:
    receipt_id: str = book.complete([1, 2], [3, 4], turn_key=key, **changes).id
    return receipt_id


def test_the_longest_key_that_is_known_wins_however_it_is_found(book: Any) -> None:
    """Also over one of the session, which is a shorter prefix of the messages."""
    short, long = turn(book, "short", session="s"), turn(book, "long")
    assert find(book, "longer", "long", "short", session="s") == (long, "long", "messages")
    assert find(book, "longer", "short", session="s") == (short, "short", "session")
    assert find(book, "longest", "longer") is None
    assert find(book) is None


@pytest.mark.parametrize("at", [0, 1, 3])
def test_of_several_turns_with_one_key_only_a_session_can_tell(book: Any, at: int) -> None:
    mine, other = turn(book, "key", session="mine"), turn(book, "key", session="other")
    keys = [f"unknown {i}" for i in range(at)] + ["key"]
    assert find(book, *keys) is None
    assert find(book, *keys, session="nobody's") is None
    assert find(book, *keys, session="mine") == (mine, "key", "session")
    assert find(book, *keys, session="other") == (other, "key", "session")
    newest = turn(book, "key", session="mine")
    assert find(book, *keys, session="mine") == (newest, "key", "session")


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_key_that_several_turns_have_is_passed_over_for_a_shorter_one_that_one_has(book: Any, at: int) -> None:
    shared = turn(book, "first")
    for _ in range(3):
        turn(book, "twice")
    keys = [f"unknown {i}" for i in range(at)] + ["twice", "first"]
    assert find(book, *keys) == (shared, "first", "messages")


def test_a_session_is_one_of_its_scenario(book: Any) -> None:
    book.write(scenarios.create, "another", "grpo", NOW)
    mine = turn(book, "key", session="s")
    turn(book, "key", session="s", scenario="another")
    assert find(book, "key", session="s") == (mine, "key", "session")


def test_thousands_of_messages_that_nobody_knows_take_few_looks_into_a_long_session(sqlite_book: Any) -> None:
    """An agent whose first message changes each time: none of its turns is found, at every request."""
    book = sqlite_book
    for i in range(3):
        turn(book, f"turn {i}", session="s")
    statements: list[str] = []
    event.listen(
        book.ledger._reading, "before_cursor_execute", lambda c, r, statement, *rest: statements.append(statement)
    )
    assert find(book, *(f"unknown {i}" for i in range(2000)), session="s") is None
    looks = [statement for statement in statements if "FROM receipts" in statement]
    assert 0 < len(looks) <= 12
    assert find(book, *(f"unknown {i}" for i in range(2000)), "turn 1", session="s")[2] == "session"


def test_a_receipt_that_was_deleted_has_no_key_any_more(book: Any) -> None:
    receipt_id = turn(book, "key")
    assert book.read(turns.key_of, receipt_id, SCENARIO) == "key"
    book.write(deletion.delete, book.read(deletion.of_receipt, receipt_id), NOW)
    assert find(book, "key") is None
    with pytest.raises(GoneError, match=receipt_id):
        book.read(turns.key_of, receipt_id, SCENARIO)


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_receipt_of_another_scenario_is_as_if_it_had_never_been_there(book: Any, is_deleted: bool) -> None:
    receipt_id = turn(book, "key")
    if is_deleted:
        book.write(deletion.delete, book.read(deletion.of_receipt, receipt_id), NOW)
    with pytest.raises(NotFoundError, match=f"^no receipt {receipt_id}$"):
        book.read(turns.key_of, receipt_id, "another")


def test_what_ended_a_turn_is_known_to_the_next(book: Any) -> None:
    """An id that ended it is in its ids; where a string did, or length, no id is an end."""
    request = book.request([1, 2])
    ended = [book.made(request, book.generation([3, 4], matched=matched))[0] for matched in (4, "four", None)]
    past = [turns.turn_of(receipt) for receipt in ended]
    assert [(turn.stop_id, turn.matched) for turn in past] == [(4, 4), (None, "four"), (None, None)]
    assert [turn.ids.tolist() for turn in past] == [[1, 2, 3, 4]] * 3
    nothing = turns.turn_of(book.made(request, book.generation([], matched=4))[0])
    assert (nothing.stop_id, nothing.output_ids.tolist()) == (None, [])
