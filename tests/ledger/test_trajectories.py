"""Turns become sequences: one a branch and temperature, every sampled token of a report in exactly one of them."""

import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.errors import BadRequestError, DamagedError, GoneError
from reef.ledger import audit, batches, deletion, releases, story
from reef.ledger.trajectories import divide
from reef.methods.weights import token_weights
from reef.training.packing import split
from reef.types import FinishReason, Pick, Receipt, Sample, Sampling, Turn
from tests.ledger.conftest import MEMORY, Book, SqliteFile


def trained(sample: Sample) -> list[int]:
    """The ids that a sequence trains on."""
    return [int(token) for token in sample.tokens[sample.mask]]


def sequences(book: Any, *references: Receipt, **fields: Any) -> tuple[Sample, ...]:
    """What a report over these receipts trains as."""
    report = book.accept(*(receipt.id for receipt in references), **fields)
    samples: tuple[Sample, ...] = book.reserve([report["agent_record_id"]]).samples
    return samples


def test_a_chain_is_one_sequence_that_trains_every_turn_with_the_engines_log_probabilities(book: Any) -> None:
    first = book.complete([1, 2], [10, 11])
    second = book.turn(first, [3], [12])
    third = book.turn(second, [4, 5], [13, 14])
    (sample,) = sequences(book, first, second, third, score=0.5)
    assert sample.tokens.tolist() == [1, 2, 10, 11, 3, 12, 4, 5, 13, 14]
    assert sample.mask.tolist() == [False, False, True, True, False, True, False, False, True, True]
    expected = np.zeros(10, np.float32)
    for receipt, start in ((first, 2), (second, 5), (third, 8)):
        logprobs = receipt.generation.logprobs
        expected[start : start + len(logprobs)] = logprobs
    assert sample.logprobs.tobytes() == expected.tobytes()
    assert sample.turns == (Turn(first.id, 2, 4), Turn(second.id, 5, 6), Turn(third.id, 8, 10))
    assert (sample.receipt_id, sample.reward, sample.trains, sample.truncated) == (third.id, 0.5, True, False)


def test_the_split_sees_sequences_and_a_receipt_keeps_its_own_row(book: Any) -> None:
    first = book.complete([1, 2], [10])
    second = book.turn(first, [3], [11])
    alone = book.complete([1, 2], [12])
    book.accept(second.id, first.id, id="chain", group="g")
    book.accept(alone.id, id="single", group="g", score=0.0)
    lengths: list[int] = []

    def by_length(found: list[int]) -> tuple[tuple[int, ...], ...]:
        lengths.extend(found)
        return ((1, 0),)

    batch = book.reserve(["chain", "single"], split=by_length)
    assert lengths == [5, 3]
    assert batch.microbatches == ((1, 0),)
    assert [sample.receipt_id for sample in batch.samples] == [second.id, alone.id]
    assert book.rows("SELECT position, report_id, receipt_id, sample FROM batch_samples ORDER BY position") == [
        (0, "chain", first.id, 0),
        (1, "chain", second.id, 0),
        (2, "single", alone.id, 1),
    ]
    book.write(batches.commit, batch.id, book.release(1, batch_id=batch.id), 9.0)
    assert book.read(story.trained_in, first.id) == book.read(story.trained_in, second.id) == ["r1"]
    lineage = book.read(releases.lineage, "arithmetic", "r1")["samples"]
    assert [(row["receipt_id"], row["sample"]) for row in lineage] == [(first.id, 0), (second.id, 0), (alone.id, 1)]
    assert list(book.read(lambda connection: list(audit.audit(connection)))) == []


def test_a_turn_that_is_not_referenced_is_context(book: Any) -> None:
    first = book.complete([1], [10])
    second = book.turn(first, [2], [11])
    third = book.turn(second, [3], [12])
    (sample,) = sequences(book, first, third)
    assert sample.tokens.tolist() == [1, 10, 2, 11, 3, 12]
    assert trained(sample) == [10, 12]
    assert not sample.logprobs[~sample.mask].any()


def test_a_turn_that_branches_share_trains_in_the_first_by_the_order_of_the_report(book: Any) -> None:
    root = book.complete([1], [10])
    left, right = book.turn(root, [2], [11]), book.turn(root, [3], [12])
    right_on = book.turn(right, [4], [13])
    found = sequences(book, right_on, root, left, right)
    assert [sample.tokens.tolist() for sample in found] == [[1, 10, 3, 12, 4, 13], [1, 10, 2, 11]]
    assert [trained(sample) for sample in found] == [[10, 12, 13], [11]]
    assert [[turn.receipt_id for turn in sample.turns] for sample in found] == [
        [root.id, right.id, right_on.id],
        [left.id],
    ]


def test_choices_of_one_request_are_branches(book: Any) -> None:
    root = book.complete([1], [10])
    choices = book.turn(root, [2], [11], [12], [13])
    found = sequences(book, root, *choices)
    assert [trained(sample) for sample in found] == [[10, 11], [12], [13]]
    assert [sample.tokens.tolist() for sample in found] == [[1, 10, 2, 11], [1, 10, 2, 12], [1, 10, 2, 13]]


def test_turns_sampled_at_different_temperatures_train_in_sequences_of_their_own(book: Any) -> None:
    def at(temperature: float) -> Sampling:
        return Sampling(max_tokens=8, temperature=temperature)

    first = book.complete([1], [10], sampling=at(0.7))
    second = book.turn(first, [2], [11], sampling=at(1.0), finish_reason=FinishReason.LENGTH)
    third = book.turn(second, [3], [12], sampling=at(0.7))
    warm, hot = sequences(book, first, second, third)
    assert (warm.temperature, warm.tokens.tolist(), trained(warm)) == (0.7, [1, 10, 2, 11, 3, 12], [10, 12])
    assert (hot.temperature, hot.tokens.tolist(), trained(hot)) == (1.0, [1, 10, 2, 11], [11])
    assert (warm.truncated, hot.truncated) == (False, True)


def test_a_sequence_is_truncated_by_its_last_turn_and_not_by_one_that_went_on(book: Any) -> None:
    first = book.complete([1], [10], finish_reason=FinishReason.LENGTH)
    second = book.turn(first, [2], [11])
    cut = book.turn(first, [3], [12], finish_reason=FinishReason.LENGTH)
    assert [sample.truncated for sample in sequences(book, first, second, cut)] == [False, True]


def test_a_turn_without_a_token_in_a_chain_costs_nothing(book: Any) -> None:
    first = book.complete([1], [10])
    empty = book.turn(first, [2], [])
    last = book.turn(empty, [3], [11])
    (sample,) = sequences(book, first, empty, last)
    assert trained(sample) == [10, 11]
    assert sample.turns[1] == Turn(empty.id, 3, 3)


def test_a_system_prompt_rewritten_between_turns_makes_a_branch_and_both_train(book: Any) -> None:
    """prime-rl 1334: what does not begin with the turn before it was recorded without a parent."""
    first = book.complete([7, 1], [10])
    second = book.turn(first, [2], [11])
    rewritten = book.complete([8, 1, 10, 2, 11, 3], [12])
    found = sequences(book, first, second, rewritten)
    assert [sample.tokens.tolist() for sample in found] == [[7, 1, 10, 2, 11], [8, 1, 10, 2, 11, 3, 12]]
    assert [trained(sample) for sample in found] == [[10, 11], [12]]


def test_an_agent_that_keeps_only_the_last_messages_gives_branches_and_each_token_trains_once(book: Any) -> None:
    """rLLM 352: from the third turn on the oldest messages are gone, so each turn begins anew."""
    first = book.complete([1], [10])
    second = book.turn(first, [2], [11])
    third = book.complete([2, 11, 3], [12])
    fourth = book.complete([3, 12, 4], [13])
    found = sequences(book, first, second, third, fourth)
    assert [trained(sample) for sample in found] == [[10, 11], [12], [13]]


def test_a_session_of_three_sequences_weighs_as_much_as_one_of_a_single(book: Any) -> None:
    """slime 378: the mean is over the tokens of a rollout, however many sequences they lie in."""
    three = [book.complete([1], [10 + index, 2][: 1 + index % 2]) for index in range(3)]
    single = book.complete([1], [20, 21])
    book.accept(*(receipt.id for receipt in three), id="three", group="g")
    book.accept(single.id, id="single", group="g", score=0.0)
    batch = book.reserve(["three", "single"])
    assert [sample.report_id for sample in batch.samples] == ["three"] * 3 + ["single"]
    weights = token_weights(batch.samples, "rollout-mean")
    assert sum(weight.sum() for weight in weights[:3]) == pytest.approx(0.5)
    assert weights[3].sum() == pytest.approx(0.5)
    assert {float(value) for weight in weights[:3] for value in weight if value} == {np.float32(1 / 8)}


def test_a_receipt_trains_once_by_its_claim_and_is_context_elsewhere(book: Any) -> None:
    first = book.complete([1], [10])
    second = book.turn(first, [2], [11])
    book.accept(second.id, id="later")  # the whole turn before it is context
    book.accept(first.id, id="earlier")
    assert book.accept(first.id, second.id, id="both")["reason"] == "already_claimed"
    batch = book.reserve(["later", "earlier"])
    assert [(sample.tokens.tolist(), trained(sample)) for sample in batch.samples] == [
        ([1, 10, 2, 11], [11]),
        ([1, 10], [10]),
    ]


@pytest.mark.parametrize("flaw", ["aborted", "inexact"])
def test_a_chain_with_a_flawed_turn_trains_only_without_referencing_it(book: Any, flaw: str) -> None:
    first = book.complete([1], [10])
    changes: dict[str, Any] = (
        {"finish_reason": FinishReason.ABORT} if flaw == "aborted" else {"sampling": Sampling(max_tokens=4, top_p=0.5)}
    )
    second = book.turn(first, [2], [11], **changes)
    third = book.turn(second, [3], [12])
    whole = book.accept(first.id, second.id, third.id)
    assert (whole["state"], whole["reason"]) == ("dropped", flaw)
    (sample,) = sequences(book, first, third)
    assert (sample.tokens.tolist(), trained(sample)) == ([1, 10, 2, 11, 3, 12], [10, 12])


def test_a_report_over_later_turns_joins_the_group_of_those_whose_conversations_began_alike(book: Any) -> None:
    first, second = book.complete([1, 2], [10]), book.complete([1, 2], [11])
    last, other = book.turn(first, [3], [12]), book.turn(second, [4], [13])
    assert book.accept(last.id, group="g")["state"] == "pending"
    assert book.accept(other.id, group="g")["state"] == "pending"
    assert book.accept(book.complete([1, 2], [14]).id, group="g")["state"] == "pending"
    with pytest.raises(BadRequestError, match="of it answers another"):
        book.accept(book.turn(book.complete([9], [15]), [3], [16]).id, group="g")


def test_a_chain_whose_first_turn_was_deleted_does_not_train(book: Any) -> None:
    first = book.complete([1], [10])
    second = book.turn(first, [2], [11])
    third = book.turn(second, [3], [12])
    pending = book.accept(third.id)["agent_record_id"]
    book.write(deletion.delete, [first.request_id], 9.0)
    assert book.state(pending) == ("dropped", "deleted")
    assert book.accept(second.id, third.id)["reason"] == "deleted"


def test_a_batch_of_chains_of_which_one_was_deleted_says_so(book: Any) -> None:
    first = book.complete([1], [10])
    second = book.turn(first, [2], [11])
    book.accept(first.id, second.id, id="chain")
    book.train(1, ["chain"])
    book.write(releases.set_checkpoint, "r1", "/checkpoints/r1")
    book.write(deletion.delete, [second.request_id], 9.0)
    with pytest.raises(GoneError, match=f"1 of the 2 receipts of batch b1 were deleted: {second.id}$"):
        book.read(batches.load, "b1")
    assert book.read(releases.get, "arithmetic", "r1").num_deleted == 1
    assert book.read(lambda connection: list(audit.audit(connection))) == []


def test_a_damaged_turn_is_named_and_not_the_chain(book: Any) -> None:
    first = book.complete([1], [10])
    second = book.turn(first, [2], [11])
    book.accept(first.id, second.id, id="chain")
    batch = book.reserve(["chain"])

    def damage(connection: Any) -> None:
        connection.exec_driver_sql(f"UPDATE receipts SET finish_reason = 'length' WHERE id = '{first.id}'")

    book.write(damage)
    with pytest.raises(DamagedError) as damaged:
        book.read(batches.load, batch.id)
    assert damaged.value.receipt_id == first.id


def test_turns_put_into_one_sequence_that_do_not_continue_one_another_are_refused(book: Any) -> None:
    first, second = book.complete([1], [10]), book.complete([1, 2], [11])
    book.accept(first.id, second.id, id="pair")
    batch = book.reserve(["pair"])

    def mix(connection: Any) -> None:
        connection.exec_driver_sql("UPDATE batch_samples SET sample = 0")

    book.write(mix)
    with pytest.raises(DamagedError, match=f"receipt {second.id}, trained with it as a later turn, does not continue"):
        book.read(batches.load, batch.id)
    findings = [str(finding) for finding in book.read(lambda connection: list(audit.audit(connection)))]
    assert findings == ["batch b1: its microbatches do not hold each of its 1 sequences once"]


def test_a_stale_member_keeps_its_sequences_and_trains_none(book: Any) -> None:
    root = book.complete([1], [10])
    left, right = book.turn(root, [2], [11]), book.turn(root, [3], [12])
    book.accept(root.id, left.id, right.id, id="tree")
    book.accept(book.complete([1], [13]).id, id="fresh")
    batch = book.reserve([Pick("tree", "g", trains=False), Pick("fresh", "g")])
    assert [(sample.report_id, sample.trains) for sample in batch.samples] == [
        ("tree", False),
        ("tree", False),
        ("fresh", True),
    ]


def test_a_chain_of_300_turns_is_reserved_and_loaded_in_a_moment(book: Any) -> None:
    rng = np.random.default_rng(0)
    turns = [book.complete(rng.integers(0, 1000, 100), rng.integers(0, 1000, 50))]
    for _ in range(299):
        turns.append(book.turn(turns[-1], rng.integers(0, 1000, 50).tolist(), rng.integers(0, 1000, 50).tolist()))
    report = book.accept(*(receipt.id for receipt in turns), id="long")
    started = time.process_time()
    (sample,) = book.reserve([report["agent_record_id"]], split=lambda lengths: split(lengths, 4096)).samples
    seconds = time.process_time() - started
    assert len(sample.tokens) == 100 + 50 + 299 * 100
    assert trained(sample) == [int(token) for receipt in turns for token in receipt.generation.output_ids]
    assert len(sample.turns) == 300
    assert seconds < 3  # 0.2 s measured; a walk up the chain for each turn took 8


def test_a_circle_that_only_damage_makes_is_named() -> None:
    with pytest.raises(DamagedError, match=r"receipt a is damaged \(its turns continue one another in a circle"):
        divide(["a", "b"], {"a": "b", "b": "a"}, {"a": 1.0, "b": 1.0})
    assert divide(["c"], {"c": "x", "x": "y", "y": "x"}, {"c": 1.0}) == [("c",)]


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int | None], list[float], list[int]]:
    """Parents of turns 0, 1, ... (each an earlier one, or none), temperatures, and which are referenced, in order."""
    size = draw(st.integers(1, 14))
    parents = [draw(st.sampled_from([None, *range(index), *range(index)])) for index in range(size)]
    temperatures = [draw(st.sampled_from([0.5, 1.0])) for _ in range(size)]
    chosen = draw(st.lists(st.integers(0, size - 1), min_size=1, unique=True))
    return parents, temperatures, chosen


def ancestors(turn: str, parents: dict[str, str | None]) -> list[str]:
    """The turn and all above it."""
    found, at = [], turn
    while at is not None:
        found.append(at)
        at = parents[at]
    return found


@given(trees())
@settings(deadline=None, max_examples=400)
def test_every_referenced_turn_is_in_exactly_one_sequence_of_its_own_branch(
    tree: tuple[list[int | None], list[float], list[int]],
) -> None:
    names = [f"t{index}" for index in range(len(tree[0]))]
    parents = {name: None if at is None else names[at] for name, at in zip(names, tree[0], strict=True)}
    temperatures = dict(zip(names, tree[1], strict=True))
    references = [names[index] for index in tree[2]]
    found = divide(references, parents, temperatures)
    assert Counter(turn for turns in found for turn in turns) == Counter(references)
    for turns in found:
        above = ancestors(turns[-1], parents)
        assert list(turns) == [turn for turn in reversed(above) if turn in turns]  # oldest first, one branch
        assert len({temperatures[turn] for turn in turns}) == 1
    leaves = [turn for turn in references if not any(turn in ancestors(other, parents)[1:] for other in references)]
    num_kinds = [
        len({temperatures[turn] for turn in ancestors(leaf, parents) if turn in references}) for leaf in leaves
    ]
    assert len(leaves) <= len(found) <= sum(num_kinds)
    assert [turn for turns in found for turn in turns if turn in leaves] == leaves
    assert divide(references, parents, temperatures) == found


@given(trees())
@settings(deadline=None, max_examples=25)
def test_every_sampled_token_of_a_tree_trains_exactly_once(
    tree: tuple[list[int | None], list[float], list[int]],
) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as directory:
        book = Book(SqliteFile(Path(directory))).begin()
        made: list[Receipt] = []
        for index, (at, temperature) in enumerate(zip(tree[0], tree[1], strict=True)):
            sampling = Sampling(max_tokens=8, temperature=temperature)
            outputs = list(range(1000 + 10 * index, 1000 + 10 * index + 1 + index % 3))
            made.append(book.turn(None if at is None else made[at], [index], outputs, sampling=sampling))
        report = book.accept(*(made[index].id for index in tree[2]))["agent_record_id"]
        found = book.reserve([report]).samples
        expected = Counter(int(token) for index in tree[2] for token in made[index].generation.output_ids)
        assert Counter(token for sample in found for token in trained(sample)) == expected
        logprobs = {receipt.id: receipt.generation.logprobs for receipt in made}
        for sample in found:
            assert sample.mask.sum() == sum(turn.end - turn.start for turn in sample.turns)
            for turn in sample.turns:
                assert sample.logprobs[turn.start : turn.end].tobytes() == logprobs[turn.receipt_id].tobytes()
            last = next(receipt for receipt in made if receipt.id == sample.receipt_id)
            assert sample.tokens.tolist() == [*last.prompt_ids.tolist(), *last.generation.output_ids.tolist()]
        book.close()
