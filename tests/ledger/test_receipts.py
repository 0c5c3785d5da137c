"""Receipts come back as they were stored, to the bit, and take little room."""

import asyncio
import base64
import dataclasses
import os
import sqlite3
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from sqlalchemy import event

from reef.errors import ConflictError, DamagedError, NotFoundError, ReefError
from reef.ledger import receipts
from reef.types import FinishReason, Generation, Receipt, Request, Sampling, Span


def equal(one: Any, other: Any) -> bool:
    """Field by field, arrays to the bit."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, Generation | Receipt):
        names = [field.name for field in dataclasses.fields(one)]
        return all(equal(getattr(one, name), getattr(other, name)) for name in names)
    return bool(one == other)


def full_request(book: Any) -> Request:
    """A request in which no field has its default."""
    return book.request(
        [151_000, 0, 7, 2**31 - 1],
        sampling=Sampling(
            max_tokens=5,
            temperature=0.7,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            repetition_penalty=1.1,
            min_tokens=1,
            stop=("</final>", "\n"),
            stop_token_ids=(2, 5),
            ignore_eos=True,
            seed=2**62,
            json_schema='{"type":"object"}',
        ),
        n=2,
        body=b'{"messages": [{"role": "user", "content": "7+5=\\u00e9"}]}',
        purpose="eval",
        session="s-1",
        tags={"team": "blue", "a": "ü"},
        template_digest="t" * 64,
        tokenizer_digest="k" * 64,
        continued_by="messages",
    )


def test_a_receipt_comes_back_bit_for_bit_with_every_field(book: Any) -> None:
    request = full_request(book)
    whole = Generation(
        output_ids=np.array([9, 2**31 - 1, 0], dtype=np.int32),
        logprobs=np.array([-0.1, -1e-42, -np.float32(np.pi)], dtype=np.float32),
        finish_reason=FinishReason.LENGTH,
        spans=(Span(0, 1, "r0"), Span(1, 3, "r1")),
        matched="</final>",
        reproducible=False,
    )
    made = book.made(request, whole, book.generation([4], matched=2), turn_key="k1")
    book.write(receipts.record, request, made)
    book.reopen()
    found = book.read(receipts.get_many, [made[1].id, made[0].id])
    assert list(found) and all(equal(found[receipt.id], receipt) for receipt in made)
    assert all(receipts.compute_digest(receipt) == receipt.digest for receipt in found.values())
    assert found[made[1].id].generation.matched == 2
    assert book.read(receipts.body_of, request.id) == request.body


@pytest.mark.parametrize("odd", [-np.inf, np.nan, np.inf])
def test_a_log_probability_that_is_not_finite_is_kept_and_marks_the_receipt_inexact(book: Any, odd: float) -> None:
    logprobs = np.array([-0.5, odd], dtype=np.float32)
    request = book.request([1])
    made = book.made(request, book.generation([5, 2], logprobs=logprobs))
    book.write(receipts.record, request, made)
    found = book.read(receipts.get, made[0].id)
    assert found.inexact_reason == "logprob_not_finite"
    assert found.generation.logprobs.tobytes() == logprobs.tobytes()
    assert receipts.compute_digest(found) == found.digest


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"temperature": 0.7, "seed": 3, "stop": ("x",), "stop_token_ids": (2,), "ignore_eos": True}, None),
        ({"temperature": 0.0}, "greedy"),
        ({"top_p": 0.95}, "top_p"),
        ({"top_k": 20, "min_p": 0.1}, "top_k,min_p"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"frequency_penalty": 1.0}, "frequency_penalty"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"min_tokens": 1}, "min_tokens"),
    ],
)
def test_a_receipt_says_which_sampling_field_makes_it_inexact(
    book: Any, changes: dict[str, Any], reason: str | None
) -> None:
    receipt = book.complete([1], [2], sampling=Sampling(max_tokens=4, **changes))
    assert book.read(receipts.get, receipt.id).inexact_reason == reason


def test_both_reasons_are_kept_where_two_make_a_receipt_inexact(book: Any) -> None:
    request = book.request([1], sampling=Sampling(max_tokens=4, top_p=0.5))
    logprobs = np.array([-np.inf], dtype=np.float32)
    assert book.made(request, book.generation([2], logprobs=logprobs))[0].inexact_reason == "top_p,logprob_not_finite"


def test_the_digest_changes_with_any_field(book: Any) -> None:
    request = full_request(book)
    receipt = book.made(request, book.generation([9, 2]), turn_key="k1")[0]
    generation = receipt.generation
    other: dict[str, Any] = {
        "id": "x",
        "request_id": "x",
        "scenario": "x",
        "choice": 1,
        "prompt_ids": np.array([1], dtype=np.int32),
        "generation": [
            dataclasses.replace(generation, **change)
            for change in (
                {"output_ids": np.array([9, 3], dtype=np.int32)},
                {"logprobs": np.nextafter(generation.logprobs, np.float32(0))},
                {"finish_reason": FinishReason.LENGTH},
                {"spans": (Span(0, 2, "r1"),)},
                {"matched": 2},
                {"matched": "2"},
                {"reproducible": False},
            )
        ],
        "sampling": [
            dataclasses.replace(receipt.sampling, **{name: value})
            for name, value in {
                **dict.fromkeys(("max_tokens", "top_k", "min_tokens", "seed"), 3),
                **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), 0.25),
                **dict.fromkeys(("presence_penalty", "frequency_penalty"), 0.25),
                "stop": ("</final>",),
                "stop_token_ids": (2,),
                "ignore_eos": False,
                "json_schema": None,
            }.items()
        ],
        "purpose": "train",
        "session": None,
        "parent": "x",
        "tags": {"team": "red", "a": "ü"},
        "template_digest": None,
        "tokenizer_digest": None,
        "engine_build": "engine 2",
        "created_at": receipt.created_at + 1e-6,
        "inexact_reason": None,
        "continued_by": "session",
        "turn_key": "k2",
    }
    assert {*other, "digest"} == {field.name for field in dataclasses.fields(Receipt)}
    assert len(other["sampling"]) == len(dataclasses.fields(Sampling))
    changed = [
        dataclasses.replace(receipt, **{name: value})
        for name, values in other.items()
        for value in (values if isinstance(values, list) else [values])
    ]
    digests = {receipts.compute_digest(item) for item in [receipt, *changed]}
    assert len(digests) == 1 + len(changed)
    assert receipts.compute_digest(dataclasses.replace(receipt)) == receipt.digest


def test_a_continued_conversation_is_whole_again_and_stores_only_what_each_turn_added(book: Any) -> None:
    first = book.complete([1, 2, 3], [10, 11])
    second = book.complete([1, 2, 3, 10, 11, 4], [12], parent=first.id)
    third_prompt = [1, 2, 3, 10, 11, 4, 12, 5, 6]
    third = book.complete(third_prompt, [13], [14, 15], parent=second.id)
    unchanged = book.complete([*third_prompt, 14, 15], [16], parent=third[1].id)  # goes on where length cut it
    found = book.read(receipts.get_many, [first.id, second.id, third[0].id, third[1].id, unchanged.id])
    assert [receipt.prompt_ids.tolist() for receipt in found.values()] == [
        [1, 2, 3],
        [1, 2, 3, 10, 11, 4],
        third_prompt,
        third_prompt,
        [*third_prompt, 14, 15],
    ]
    assert all(receipts.compute_digest(receipt) == receipt.digest for receipt in found.values())
    stored = book.rows("SELECT length(prompt_ids) / 4, prompt_length FROM requests ORDER BY id")
    assert stored == [(3, 3), (1, 6), (2, 9), (0, 11)]


def test_a_long_conversation_is_whole_again(book: Any) -> None:
    tokens, parent = [1], None
    for turn in range(40):
        receipt = book.complete(tokens, [100 + turn], parent=parent)
        tokens, parent = [*tokens, 100 + turn, 200 + turn], receipt.id
    found = book.read(receipts.get, parent)
    assert found.prompt_ids.tolist() == tokens[:-2]
    assert book.rows("SELECT sum(length(prompt_ids)) / 4 FROM requests") == [(40,)]


def test_a_receipt_without_the_later_fields_has_the_digest_that_it_always_had(book: Any) -> None:
    request = book.request([1, 2], created_at=5.0)
    made = receipts.make(request, 0, book.generation([3]), "engine 1", "rcp_a", 5.0)
    assert made.digest == "970f27b8bad6a0d81eca401fb08794cac482c342eced2ed07f76abe4f43b1f71"


def test_a_skeleton_says_how_its_parent_was_found(book: Any) -> None:
    first = book.complete([1], [2])
    second = book.turn(first, [3], [4], continued_by="session")
    found = [book.read(receipts.skeleton, receipt.id) for receipt in (first, second)]
    assert [(left.parent, left.continued_by) for left in found] == [(None, None), (first.id, "session")]


def test_prompts_of_a_tree_are_whole_again_whichever_turns_are_read_together(book: Any) -> None:
    root = book.complete([1, 2], [3, 4])
    left = book.turn(root, [5], [6])
    deep = book.turn(left, [7, 8], [9], [10])
    right = book.turn(root, [11], [])
    on = book.turn(right, [], [12])
    made = {receipt.id: receipt for receipt in (root, left, *deep, right, on)}
    for names in (list(made), list(made)[::-1], [on.id], [deep[1].id, root.id], [right.id, deep[0].id]):
        found = book.read(receipts.get_many, names)
        assert found.keys() == set(names)
        assert all(equal(receipt, made[name]) for name, receipt in found.items())


def test_a_conversation_of_300_turns_is_read_by_few_queries_and_lies_in_memory_once(book: Any) -> None:
    turns, added = [book.complete([1], [2])], list(range(50))
    for _ in range(299):
        turns.append(book.turn(turns[-1], added, [2]))
    num_queries = 0

    def count(*_: Any) -> None:
        nonlocal num_queries
        num_queries += 1

    engine = book.ledger._reading
    event.listen(engine, "before_cursor_execute", count)
    try:
        found = book.read(receipts.read_many, [receipt.id for receipt in turns])
    finally:
        event.remove(engine, "before_cursor_execute", count)
    assert num_queries <= 3  # rows, their ancestors, and the BEGIN of a SQLite transaction
    assert all(equal(found[receipt.id], receipt) for receipt in turns)
    whole = found[turns[-1].id].prompt_ids
    assert all(np.shares_memory(found[receipt.id].prompt_ids, whole) for receipt in turns)


def test_a_parent_that_is_lost_or_that_continues_its_own_turns_is_named(sqlite_book: Any) -> None:
    first = sqlite_book.complete([1], [2])
    second = sqlite_book.turn(first, [3], [4])
    for change, message in (
        (f"UPDATE requests SET parent = '{second.id}' WHERE id = '{first.request_id}'", "which continues it"),
        (
            f"UPDATE requests SET parent = 'rcp_x' WHERE id = '{first.request_id}'",
            "continues rcp_x, which is not there",
        ),
    ):
        with closing(sqlite3.connect(sqlite_book.store.path)) as connection, connection:
            connection.execute(change)
        with pytest.raises(DamagedError, match=f"receipt {second.id} is damaged .*{message}"):
            sqlite_book.read(receipts.get_many, [second.id])


@pytest.mark.parametrize(
    "prompt",
    [[1, 2, 3, 10, 12, 4], [1, 9, 3, 10, 11, 4], [1, 2, 3, 10], [1, 2]],
    ids=["another answer", "another prompt", "cut in the answer", "cut in the prompt"],
)
def test_a_prompt_that_does_not_begin_with_its_parent_is_refused_and_not_mixed(book: Any, prompt: list[int]) -> None:
    parent = book.complete([1, 2, 3], [10, 11])
    with pytest.raises(ConflictError, match=f"does not begin with the ids of receipt {parent.id}"):
        book.complete(prompt, [5], parent=parent.id)
    assert book.rows("SELECT count(*) FROM requests") == [(1,)]


def test_a_parent_that_is_not_there_is_refused_and_nothing_stored(book: Any) -> None:
    with pytest.raises(NotFoundError, match="no receipt rcp_x to continue"):
        book.complete([1, 2], [3], parent="rcp_x")
    assert book.rows("SELECT count(*) FROM requests") == [(0,)]


def test_an_unknown_receipt_is_named(book: Any) -> None:
    known = book.complete([1], [2])
    with pytest.raises(NotFoundError, match="no receipt rcp_x") as missing:
        book.read(receipts.get_many, [known.id, "rcp_x"])
    assert missing.value.code == "receipt_not_found"
    with pytest.raises(NotFoundError, match="no request req_x"):
        book.read(receipts.body_of, "req_x")


def test_the_same_completion_twice_is_stored_once(book: Any) -> None:
    request = book.request([1])
    made = book.made(request, book.generation([2]))
    book.write(receipts.record, request, made)
    with pytest.raises(ReefError, match="refused"):
        book.write(receipts.record, request, made)
    assert book.rows("SELECT count(*) FROM receipts") == [(1,)]


def test_ids_and_log_probabilities_take_at_most_twelve_bytes_a_token(book: Any) -> None:
    book.complete(list(range(300)), list(range(1000)), list(range(500)))
    query = "SELECT sum(length(output_ids) + length(logprobs)) FROM receipts"
    assert book.rows(query)[0][0] <= 12 * 1500
    assert book.rows("SELECT length(prompt_ids) FROM requests")[0][0] <= 12 * 300  # once, though two choices share it


def test_a_body_is_stored_compressed_and_comes_back_as_it_was(book: Any) -> None:
    body = b'{"messages": [' + b'{"role": "user", "content": "the same words again"}, ' * 5000 + b"{}]}"
    receipt = book.complete([1], [2], body=body)
    assert book.rows("SELECT length(body) FROM requests")[0][0] < len(body) / 20
    assert book.read(receipts.body_of, receipt.request_id) == body


def test_sixty_four_bodies_of_half_a_megabyte_at_once_are_all_stored(book: Any) -> None:
    bodies = [b'{"x": "' + base64.b64encode(os.urandom(375_000)) + b'"}' for _ in range(64)]
    requests = [book.request([index], body=body) for index, body in enumerate(bodies)]
    made = [book.made(request, book.generation([2])) for request in requests]

    async def run() -> None:
        pairs = zip(requests, made, strict=True)
        await asyncio.gather(*(book.ledger.write(receipts.record, request, receipt) for request, receipt in pairs))

    asyncio.run(run())
    assert all(book.read(receipts.body_of, request.id) == request.body for request in requests)
    assert len(book.read(receipts.get_many, [receipt[0].id for receipt in made])) == 64


def test_more_receipts_than_one_query_takes_come_back(book: Any) -> None:
    request = book.request([1, 2])
    made = book.made(request, *(book.generation([index, 2]) for index in range(1200)))
    book.write(receipts.record, request, made)
    found = book.read(receipts.get_many, [receipt.id for receipt in made])
    assert [found[receipt.id].generation.output_ids[0] for receipt in made] == list(range(1200))
