"""What a batch says of its samples besides their tokens: age, grades by turn and part, and what the prompt earned."""

import dataclasses
import json
from typing import Any

import pytest

from reef.errors import GoneError
from reef.ledger import batches, deletion, receipts, releases
from reef.ledger.history import rewards_before
from reef.types import Operation, Pick, Sampling, Span
from tests.ledger.conftest import NOW, SCENARIO
from tests.ledger.test_batches import same

COLD, HOT = Sampling(max_tokens=8, temperature=0.5), Sampling(max_tokens=8)


def jump(book: Any, number: int, source: str, version: int) -> None:
    """A rollback to `source`."""
    release = book.release(number, parent=f"r{number - 1}", source=source, policy_version=version)
    book.write(batches.jump, dataclasses.replace(release, operation=Operation.ROLLBACK), NOW)


def earn(book: Any, number: int, *scores: float, prompt: tuple[int, ...] = (1, 2), sampling: Sampling = HOT) -> None:
    """Release `number`, trained on answers to one prompt with these scores."""
    made = [book.complete(prompt, [10], sampling=sampling) for _ in scores]
    names = [
        book.accept(receipt.id, score=score, group=f"g{number}")["agent_record_id"]
        for receipt, score in zip(made, scores, strict=True)
    ]
    book.train(number, names)


def ask(book: Any, prompt: tuple[int, ...] = (1, 2), sampling: Sampling = HOT, **fields: Any) -> str:
    """One more graded answer, not trained yet."""
    name: str = book.accept(book.complete(prompt, [11], sampling=sampling).id, **fields)["agent_record_id"]
    return name


# --- history ----------------------------------------------------------------------------------------------------------


def test_the_last_rewards_of_a_prompt_come_newest_first_and_never_more_than_the_window(book: Any) -> None:
    for number, score in enumerate((0.1, 0.2, 0.3, 0.4), start=1):
        earn(book, number, score)
    earn(book, 5, 0.9, 0.8, prompt=(7,))
    one, other, new = ask(book), ask(book, (7,)), ask(book, (8,))
    batch = book.reserve([one, other, new], id="b6", base_release="r5", history_window=3)
    assert batch.history == {one: (0.4, 0.3, 0.2), other: (0.8, 0.9)}


def test_a_prompt_has_a_history_of_its_own_at_each_temperature_whatever_its_seed_and_group(book: Any) -> None:
    earn(book, 1, 0.25, sampling=COLD)
    earn(book, 2, 0.5, sampling=dataclasses.replace(HOT, seed=7))
    earn(book, 3, 0.75, sampling=dataclasses.replace(HOT, max_tokens=4))
    hot, cold = ask(book), ask(book, sampling=dataclasses.replace(COLD, seed=1), group="another")
    batch = book.reserve([hot, cold], id="b4", base_release="r3", history_window=8)
    assert batch.history == {hot: (0.75, 0.5), cold: (0.25,)}


def test_only_what_was_trained_counts(book: Any) -> None:
    stale = ask(book, score=0.0)
    book.train(1, [ask(book, score=0.5), Pick(stale, "g", trains=False)])
    ask(book, score=0.1)  # pending
    failed = ask(book, score=0.2)
    book.reserve([failed], id="b2", base_release="r1")
    for attempt in (1, 2):
        book.write(batches.again, "b2", attempt, "nan", NOW)
    assert book.state(failed) == ("dropped", "step_failed")
    own = ask(book, score=1.0)
    assert book.reserve([own], id="b3", base_release="r1", history_window=8).history == {own: (0.5,)}


def test_rewards_of_a_branch_that_was_rolled_away_do_not_count(book: Any) -> None:
    earn(book, 1, 0.1)
    earn(book, 2, 0.2)
    jump(book, 3, "r1", version=1)
    earn(book, 4, 0.4)
    name = ask(book)
    assert book.reserve([name], id="b5", base_release="r4", history_window=8).history == {name: (0.4, 0.1)}


def test_what_a_batch_was_given_stays_though_more_was_earned_since(book: Any) -> None:
    earn(book, 1, 0.5)
    name = ask(book, score=0.75)
    batch = book.reserve([name], id="b2", base_release="r1", history_window=2, settings={"seed": 3})
    assert (batch.history, batch.settings) == ({name: (0.5,)}, {"seed": 3})
    book.write(batches.begin, "b2", lambda stored: {**stored, "seed": 4})  # taken again, by other workers
    book.write(batches.commit, "b2", book.release(2, parent="r1", batch_id="b2"), NOW)
    earn(book, 3, 1.0)
    book.reopen()
    again = book.read(batches.load, "b2")
    assert (again.history, again.settings) == ({name: (0.5,)}, {"seed": 4})


def test_a_method_that_asks_for_no_history_gets_none_and_none_is_stored(book: Any) -> None:
    earn(book, 1, 0.5)
    assert book.reserve([ask(book)], id="b2", base_release="r1").history == {}
    assert "history" not in book.rows("SELECT settings FROM batches WHERE id = 'b2'")[0][0]


def test_a_history_is_found_by_an_index_and_not_by_reading_every_report(sqlite_book: Any) -> None:
    book = sqlite_book
    earn(book, 1, 0.5)
    queries: list[str] = []
    book.ledger.close()
    book.reopen()

    def reserve(connection: Any) -> None:
        connection.connection.driver_connection.set_trace_callback(queries.append)
        try:
            rewards_before(connection, SCENARIO, [name], "r1", 4)
        finally:
            connection.connection.driver_connection.set_trace_callback(None)

    name = ask(book)
    book.read(reserve)
    (query,) = [found for found in queries if "'trained'" in found]
    plan = [row[3] for row in book.rows(f"EXPLAIN QUERY PLAN {query}")]
    assert plan[0].startswith("SEARCH reports USING INDEX reports_prompt"), plan
    assert not any("SCAN" in line or "TEMP B-TREE" in line for line in plan), plan


def test_a_history_outlives_the_deletion_of_what_earned_it(book: Any) -> None:
    receipt = book.complete((1, 2), [10], sampling=COLD)
    book.train(1, [book.accept(receipt.id, score=0.5)["agent_record_id"]])
    book.write(releases.set_checkpoint, "r1", "/checkpoints/r1")
    book.write(deletion.delete, [receipt.request_id], NOW)
    with pytest.raises(GoneError):
        book.read(batches.load, "b1")
    name = ask(book, sampling=COLD)
    assert book.reserve([name], id="b2", base_release="r1", history_window=4).history == {name: (0.5,)}


# --- age --------------------------------------------------------------------------------------------------------------


def test_a_sample_is_as_old_as_the_oldest_release_that_sampled_a_token_it_trains_on(book: Any) -> None:
    for number in (1, 2, 3):
        book.train(number, book.graded(1, prompt=(9,)))
    request = book.request([1])
    spans = (Span(0, 1, "r2"), Span(1, 2, "r3"))
    moved = book.made(request, book.generation([5, 6], spans=spans))[0]
    book.write(receipts.record, request, [moved])
    first = book.complete([2], [10], release="r0")
    second = book.turn(first, [3], [11], release="r3")
    names = [
        book.accept(moved.id)["agent_record_id"],
        book.accept(second.id)["agent_record_id"],  # its context is older, and context is not trained
        book.accept(book.complete([2], [10], release="r1").id)["agent_record_id"],
    ]
    samples = book.reserve(names, id="b4", base_release="r3").samples
    assert [sample.lag for sample in samples] == [1, 0, 2]


def test_a_turn_of_an_old_release_makes_its_whole_sequence_old(book: Any) -> None:
    first = book.complete([2], [10])
    book.train(1, book.graded(1, prompt=(9,)))
    second = book.turn(first, [3], [11], release="r1")
    name = book.accept(first.id, second.id)["agent_record_id"]
    (sample,) = book.reserve([name], id="b2", base_release="r1").samples
    assert (sample.lag, len(sample.turns)) == (1, 2)


def test_ages_count_from_the_release_that_a_batch_was_reserved_on_whenever_it_is_loaded(book: Any) -> None:
    book.train(1, book.graded(1))
    book.train(2, book.graded(1))
    jump(book, 3, "r1", version=1)
    fresh, old = book.graded(2, release="r3"), book.graded(1, release="r0")
    batch = book.reserve([*fresh, *old], id="b4", base_release="r3")
    assert [sample.lag for sample in batch.samples] == [0, 0, 1]
    release = book.release(4, parent="r3", batch_id="b4", policy_version=2)
    book.write(batches.commit, "b4", release, NOW)
    for number in (5, 6):
        book.train(number, book.graded(1))
    jump(book, 7, "r2", version=2)  # the batch's own branch is left
    assert same(book.read(batches.load, "b4"), batch)


def test_a_token_of_nobody_knows_which_release_counts_as_old_as_the_chain(book: Any) -> None:
    book.train(1, book.graded(1))
    book.train(2, book.graded(1))
    (name,) = book.graded(1, release="elsewhere")
    assert [sample.lag for sample in book.reserve([name], id="b3", base_release="r2").samples] == [2]


# --- grades -----------------------------------------------------------------------------------------------------------


def test_a_batch_says_when_it_was_reserved_and_each_sample_when_its_report_came(book: Any) -> None:
    early = book.accept(book.complete([1], [2]).id, now=NOW - 60)["agent_record_id"]
    late = book.accept(book.complete([1], [2]).id, now=NOW)["agent_record_id"]
    batch = book.reserve([early, late], now=NOW + 2.5)
    assert batch.reserved_at == NOW + 2.5
    assert [sample.accepted_at for sample in batch.samples] == [NOW - 60, NOW]


def test_grades_of_single_turns_stand_at_their_turns_in_whatever_order_they_were_named(book: Any) -> None:
    first = book.complete([1], [10])
    second = book.turn(first, [2], [11])
    third = book.turn(second, [3], [12])
    name = book.accept(
        third.id, first.id, second.id, score=1.0, reference_scores=[0.5, None, -0.25], rewards={"right": 1, "tidy": 0.5}
    )["agent_record_id"]
    (sample,) = book.reserve([name]).samples
    assert [(turn.receipt_id, turn.reward) for turn in sample.turns] == [
        (first.id, 0.0),
        (second.id, -0.25),
        (third.id, 0.5),
    ]
    assert (sample.reward, dict(sample.components)) == (1.0, {"right": 1, "tidy": 0.5})


def test_a_report_without_grades_of_its_turns_or_parts_has_none(book: Any) -> None:
    name = book.accept(book.complete([1], [10]).id, reference_scores=None, rewards=None)["agent_record_id"]
    (sample,) = book.reserve([name]).samples
    assert ([turn.reward for turn in sample.turns], dict(sample.components)) == ([0.0], {})


def test_grades_outlive_the_free_text_of_a_report(book: Any) -> None:
    kept, gone = book.complete([1], [10]), book.complete([2], [11])
    grades = {"reference_scores": [0.5, 0.25], "rewards": {"right": 1.0}, "truncated": True}
    book.accept(kept.id, gone.id, id="rep", feedback="words", **grades)
    book.train(1, ["rep"])
    book.write(releases.set_checkpoint, "r1", "/checkpoints/r1")
    book.write(deletion.delete, [gone.request_id], NOW)
    [(stored,)] = book.rows("SELECT body FROM reports WHERE id = 'rep'")
    body = json.loads(stored)
    assert "feedback" not in body
    assert {name: body[name] for name in grades} == grades
