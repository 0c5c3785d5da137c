"""Conversations out of the ledger: chains with their bodies, each last turn once, each turn one conversation's own."""

from collections import Counter
from typing import Any

import pytest

from reef.errors import DamagedError, GoneError, NotFoundError
from reef.ledger import ancestors, deletion, recorded, scenarios
from reef.ledger.recorded import Grade
from reef.types import FinishReason, Receipt


def last_turns(book: Any, scenario: str = "arithmetic") -> list[str]:
    return book.read(lambda connection: list(recorded.last_turns(connection, scenario)))  # type: ignore[no-any-return]


def own(book: Any, receipt: Receipt) -> dict[str, bool]:
    """The turns up to a receipt, and whether they are its conversation's own."""
    return {turn.receipt.id: not turn.copied for turn in book.read(recorded.chain, receipt.id)}


def test_a_chain_comes_oldest_first_with_what_clients_sent(book: Any) -> None:
    first = book.complete([1], [10], body=b'{"n": 1}')
    second = book.turn(first, [2], [11], [12], body=b'{"n": 2}', api="messages")
    third = book.turn(second[1], [3], [13], body=b'{"n": 3}')
    chain = book.read(recorded.chain, third.id)
    assert [turn.receipt.id for turn in chain] == [first.id, second[1].id, third.id]
    assert [(turn.api, turn.body) for turn in chain] == [
        ("chat", b'{"n": 1}'),
        ("messages", b'{"n": 2}'),
        ("chat", b'{"n": 3}'),
    ]
    assert chain[-1].receipt.prompt_ids.tolist() == [1, 10, 2, 12, 3]
    book.accept(first.id, third.id, id="rep_a", score=0.5)
    book.accept(first.id, id="rep_b", score=None)
    a, b = Grade("rep_a", 0.5, "pending"), Grade("rep_b", None, "recorded")
    assert [turn.grades for turn in book.read(recorded.chain, third.id)] == [(a, b), (), (a,)]


def test_every_live_turn_is_the_own_of_exactly_one_last_turn(book: Any) -> None:
    root = book.complete([1], [10])
    left = book.turn(root, [2], [11])
    right = book.turn(root, [3], [12], [13])
    left_on = [book.turn(left, [4 + index], [14]) for index in range(3)]
    alone = book.complete([5], [15])
    names = {receipt.id: receipt for receipt in (root, left, *right, *left_on, alone)}
    assert last_turns(book) == [receipt.id for receipt in (*right, *left_on, alone)]
    counted = Counter(turn for name in last_turns(book) for turn, mine in own(book, names[name]).items() if mine)
    assert counted == dict.fromkeys(names, 1)
    assert own(book, left_on[0]) == {root.id: True, left.id: True, left_on[0].id: True}
    assert own(book, left_on[1]) == {root.id: False, left.id: False, left_on[1].id: True}
    assert own(book, right[0]) == {root.id: False, right[0].id: True}
    assert own(book, root) == {root.id: True}


def test_aborted_and_deleted_turns_end_no_conversation_and_take_none_over(book: Any) -> None:
    root = book.complete([1], [10])
    book.turn(root, [2], [11], finish_reason=FinishReason.ABORT)
    gone = book.turn(root, [3], [12])
    last = book.turn(root, [4], [13])
    book.complete([1], [14], finish_reason=FinishReason.ABORT)
    book.write(deletion.delete, [gone.request_id], 9.0)
    assert last_turns(book) == [last.id]
    assert own(book, last) == {root.id: True, last.id: True}
    with pytest.raises(GoneError):
        book.read(recorded.chain, gone.id)
    book.write(deletion.delete, [last.request_id], 9.0)
    assert last_turns(book) == [root.id]


def test_last_turns_come_in_pages_and_of_one_scenario(book: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "PAGE", 2)
    book.write(scenarios.create, "other", "grpo", 7.5)
    made = [book.complete([1], [10 + index]) for index in range(5)]
    other = book.complete([1], [20], scenario="other")
    assert last_turns(book) == [receipt.id for receipt in made]
    assert last_turns(book, "other") == [other.id]
    assert last_turns(book, "nobody's") == []


def test_a_chain_longer_than_a_page_is_whole(book: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "PAGE", 3)
    monkeypatch.setattr(ancestors, "PAGE", 3)
    turns = [book.complete([1], [2])]
    for _ in range(7):
        turns.append(book.turn(turns[-1], [3], [4]))
    book.turn(turns[3], [5], [6])
    assert own(book, turns[-1]) == {turn.id: True for turn in turns}


def test_what_is_not_there_or_broken_is_named(book: Any) -> None:
    with pytest.raises(NotFoundError, match="no receipt rcp_x"):
        book.read(recorded.chain, "rcp_x")
    made = book.complete([1], [2])

    def damage(connection: Any) -> None:
        connection.exec_driver_sql(f"UPDATE requests SET body = '' WHERE id = '{made.request_id}'")

    def circle(connection: Any) -> None:
        connection.exec_driver_sql(f"UPDATE requests SET parent = '{made.id}' WHERE id = '{made.request_id}'")

    book.write(damage)
    with pytest.raises(DamagedError, match=f"receipt {made.id} is damaged .its body"):
        book.read(recorded.chain, made.id)
    book.write(circle)
    with pytest.raises(DamagedError, match="in a circle"):
        book.read(recorded.chain, made.id)
