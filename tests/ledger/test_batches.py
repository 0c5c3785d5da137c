"""Batches: the exact order is stored before the step, and release, batch and reports change in one transaction."""

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest

from reef.errors import ConflictError, LedgerError, NotFoundError, ReefError
from reef.ledger import batches, receipts, releases, reports
from reef.types import Batch, Drop, FinishReason, Pick, Sampling, Selection


def same(one: Batch, other: Batch) -> bool:
    """Every field, arrays to the bit."""

    def plain(batch: Batch) -> list[object]:
        members = [
            [value.tobytes() if isinstance(value, np.ndarray) else value for value in values]
            for values in (
                [getattr(sample, name) for name in sample.__dataclass_fields__]  # slots: no __dict__
                for sample in batch.samples
            )
        ]
        rest = [getattr(batch, name) for name in batch.__dataclass_fields__ if name != "samples"]
        return [*rest, members]

    return plain(one) == plain(other)


def test_a_batch_keeps_the_order_of_its_picks_and_everything_that_decides_its_step(book: Any) -> None:
    a, b, c = book.graded(3)
    settings = {"method": {"name": "grpo", "clip_high": 0.28}, "seed": 3, "layout": {"data": 2}, "dtype": "float32"}
    picks = [Pick(c, "g2"), Pick(a, "g1"), Pick(b, "g2", trains=False)]
    batch = book.reserve(picks, settings=settings, split=lambda lengths: ((2, 0), (1,)))
    assert [(sample.report_id, sample.group, sample.trains) for sample in batch.samples] == [
        (c, "g2", True),
        (a, "g1", True),
        (b, "g2", False),
    ]
    assert (batch.scenario, batch.number, batch.attempt, batch.base_release) == ("arithmetic", 1, 1, "r0")
    assert batch.microbatches == ((2, 0), (1,))
    assert batch.settings == settings
    assert [book.state(name) for name in (a, b, c)] == [("reserved", None)] * 3
    assert book.read(batches.reserved, "arithmetic") == batch.id
    book.reopen()
    assert same(book.read(batches.load, batch.id), batch)


def test_a_sample_is_prompt_and_answer_with_the_engines_log_probabilities(book: Any) -> None:
    receipt = book.complete([1, 2, 3], [10, 2], sampling=Sampling(max_tokens=4, temperature=0.7))
    book.accept(receipt.id, id="rep_a", score=-0.5)
    lengths: list[int] = []

    def split(found: list[int]) -> tuple[tuple[int, ...], ...]:
        lengths.extend(found)
        return ((0,),)

    (sample,) = book.reserve(["rep_a"], split=split).samples
    assert lengths == [5]
    assert sample.tokens.tolist() == [1, 2, 3, 10, 2]
    assert sample.mask.tolist() == [False, False, False, True, True]
    assert sample.logprobs.tolist() == [0.0, 0.0, 0.0, *receipt.generation.logprobs.tolist()]
    assert (sample.reward, sample.temperature, sample.receipt_id, sample.truncated) == (-0.5, 0.7, receipt.id, False)
    assert (sample.tokens.dtype, sample.mask.dtype, sample.logprobs.dtype) == (np.int32, np.bool_, np.float32)


def test_a_sample_is_truncated_where_length_cut_it_or_its_report_says_so(book: Any) -> None:
    request = book.request([1])
    cut = book.made(request, book.generation([5], finish_reason=FinishReason.LENGTH))
    book.write(receipts.record, request, cut)
    book.accept(cut[0].id, id="cut")
    book.accept(book.complete([1], [5]).id, id="said", truncated=True)
    book.accept(book.complete([1], [5]).id, id="whole")
    batch = book.reserve(["cut", "said", "whole"])
    assert [sample.truncated for sample in batch.samples] == [True, True, False]


def test_a_report_over_several_receipts_gives_a_sample_for_each_in_its_order(book: Any) -> None:
    one, two, three = (book.complete([1], [token]) for token in (5, 6, 7))
    book.accept(three.id, one.id, id="trial", score=0.25)
    book.accept(two.id, id="single")
    batch = book.reserve(["trial", "single"])
    assert [(sample.report_id, sample.receipt_id, sample.reward) for sample in batch.samples] == [
        ("trial", three.id, 0.25),
        ("trial", one.id, 0.25),
        ("single", two.id, 1.0),
    ]


def test_a_continued_turn_trains_on_its_whole_history(book: Any) -> None:
    first = book.complete([1, 2], [10])
    second = book.complete([1, 2, 10, 3], [11], parent=first.id)
    book.accept(second.id, id="rep_a")
    (sample,) = book.reserve(["rep_a"]).samples
    assert sample.tokens.tolist() == [1, 2, 10, 3, 11]
    assert sample.mask.tolist() == [False, False, False, False, True]


def test_picks_that_are_no_longer_pending_are_refused_and_nothing_changes(book: Any) -> None:
    a, b, c, d = book.graded(4)
    book.train(1, [a])
    before = book.dump()
    for picks in ([b, a], [b, b]):
        selection = Selection(picks=tuple(Pick(name, "g") for name in picks), drops=(Drop(c, "stale"),))
        with pytest.raises(ConflictError, match="1 reports of batch b2 are no longer pending"):
            book.reserve([], id="b2", selection=selection)
        assert book.dump() == before
    recorded = book.accept(book.complete([1], [2]).id, score=None)["agent_record_id"]
    for name in (recorded, "rep_nobody_knows"):
        with pytest.raises(ConflictError):
            book.reserve([b, name], id="b2")
    assert book.state(d) == ("pending", None)


def test_a_second_batch_waits_until_the_first_is_committed(book: Any) -> None:
    a, b = book.graded(2)
    first = book.reserve([a])
    before = book.dump()
    with pytest.raises(ConflictError, match=f"batch {first.id} of arithmetic is reserved already"):
        book.reserve([b], id="b2")
    assert book.dump() == before
    book.write(batches.commit, first.id, book.release(1, batch_id=first.id), 9.0)
    assert book.reserve([b], id="b2").number == 2


def test_what_a_selection_drops_is_dropped_with_the_reservation(book: Any) -> None:
    a, b, c = book.graded(3)
    book.reserve([], selection=Selection(picks=(Pick(a, "g"),), drops=(Drop(b, "tied"), Drop(c, "stale"))))
    assert [book.state(name) for name in (a, b, c)] == [("reserved", None), ("dropped", "tied"), ("dropped", "stale")]


def test_a_split_that_fails_reserves_nothing(book: Any) -> None:
    (name,) = book.graded(1)
    before = book.dump()

    def split(lengths: list[int]) -> tuple[tuple[int, ...], ...]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        book.reserve([name], split=split)
    assert book.dump() == before


def test_batches_are_numbered_in_the_order_of_their_reservation(book: Any) -> None:
    names = book.graded(3)
    for number, name in enumerate(names, start=1):
        book.train(number, [name])
    assert [book.read(batches.load, f"b{number}").number for number in (1, 2, 3)] == [1, 2, 3]


def test_one_transaction_makes_the_release_the_head_and_its_reports_trained(book: Any) -> None:
    trained, stale = book.graded(2)
    batch = book.reserve([trained, Pick(stale, "g", trains=False)])
    release = book.release(1, batch_id=batch.id, metrics={"reward_mean": 0.5})
    assert book.write(batches.commit, batch.id, release, 9.0) == release
    assert book.read(releases.head, "arithmetic") == release
    assert book.read(batches.reserved, "arithmetic") is None
    assert book.rows("SELECT state, release_id, updated_at FROM batches") == [("committed", "r1", 9.0)]
    assert (book.state(trained), book.state(stale)) == (("trained", None), ("dropped", "stale"))


def test_committing_a_batch_again_gives_the_release_that_is_there(book: Any) -> None:
    batch = book.reserve(book.graded(1))
    release = book.release(1, batch_id=batch.id)
    book.write(batches.commit, batch.id, release, 9.0)
    book.train(2, book.graded(1))
    before = book.dump()
    other = book.release(3, parent="r2", batch_id=batch.id)
    assert book.write(batches.commit, batch.id, other, 11.0) == release
    assert book.dump() == before


@pytest.mark.parametrize("changes", [{"parent": "r9"}, {"parent": None}, {"number": 0}, {"id": "r0"}])
def test_a_release_that_does_not_follow_the_head_is_refused_and_nothing_changes(
    book: Any, changes: dict[str, Any]
) -> None:
    (name,) = book.graded(1)
    batch = book.reserve([name])
    before = book.dump()
    wrong = dataclasses.replace(book.release(1, batch_id=batch.id), **changes)
    with pytest.raises(ReefError, match=r"follows r9, but the head is r0|follows None, but the head is r0|refused"):
        book.write(batches.commit, batch.id, wrong, 9.0)
    assert book.dump() == before
    book.write(batches.commit, batch.id, book.release(1, batch_id=batch.id), 9.0)
    assert book.state(name) == ("trained", None)


def test_nobody_sees_a_release_without_its_trained_reports(book: Any) -> None:
    names = book.graded(8)
    batch = book.reserve(names)
    query = (
        "SELECT (SELECT count(*) FROM releases), (SELECT count(*) FROM reports WHERE state = 'trained'), "
        "(SELECT count(*) FROM batches WHERE state = 'committed')"
    )

    async def run() -> set[tuple[int, int, int]]:
        seen = {book.rows(query)[0]}
        commit = asyncio.create_task(
            book.ledger.write(batches.commit, batch.id, book.release(1, batch_id=batch.id), 9.0)
        )
        while not commit.done():
            seen.add(await asyncio.to_thread(lambda: book.rows(query)[0]))
        await commit
        return seen | {book.rows(query)[0]}

    assert asyncio.run(run()) <= {(1, 0, 0), (2, 8, 1)}


def test_a_batch_is_taken_a_second_time_and_then_given_up_with_its_reports(book: Any) -> None:
    names = book.graded(2)
    batch = book.reserve(names)
    assert book.write(batches.again, batch.id, 1, "the worker died", 9.0) is True
    assert book.write(batches.again, batch.id, 1, "the worker died", 9.0) is True  # the answer was lost
    taken = book.read(batches.load, batch.id)
    assert taken.attempt == 2
    assert [sample.report_id for sample in taken.samples] == names
    assert book.read(batches.error_of, batch.id) == "the worker died"
    assert book.read(batches.reserved, "arithmetic") == batch.id
    assert book.write(batches.again, batch.id, 2, "and again", 10.0) is False
    assert book.write(batches.again, batch.id, 2, "and again", 10.0) is False
    assert [book.state(name) for name in names] == [("dropped", "step_failed")] * 2
    assert book.rows("SELECT state, error FROM batches") == [("failed", "and again")]
    assert book.read(batches.reserved, "arithmetic") is None
    assert book.read(reports.candidates, "arithmetic") == []
    with pytest.raises(LedgerError, match="is failed and cannot be committed"):
        book.write(batches.commit, batch.id, book.release(1, batch_id=batch.id), 11.0)
    after = book.reserve(book.graded(1), id="b2")  # training goes on
    assert after.number == 2
    assert book.write(batches.commit, after.id, book.release(1, batch_id=after.id), 12.0).parent == "r0"


def test_a_batch_that_was_laid_down_in_order_has_not_failed(book: Any) -> None:
    assert book.read(batches.killed_in, "arithmetic") is None
    batch = book.reserve(book.graded(1))
    assert book.read(batches.killed_in, "arithmetic") == (batch.id, 1)  # its owner was killed
    book.write(batches.lay_down, "arithmetic")
    assert book.read(batches.killed_in, "arithmetic") is None
    book.write(batches.begin, batch.id, lambda settings: {**settings, "seed": 7})
    assert book.read(batches.killed_in, "arithmetic") == (batch.id, 1)
    assert book.read(batches.load, batch.id).settings == {**batch.settings, "seed": 7}
    book.write(batches.again, batch.id, 1, "the worker died", 9.0)
    assert book.read(batches.killed_in, "arithmetic") is None  # counted, and not begun again


def test_only_a_reserved_batch_can_fail(book: Any) -> None:
    book.train(1, book.graded(1))
    before = book.dump()
    for name in ("b1", "b9"):
        with pytest.raises(LedgerError, match=f"batch {name} is not reserved"):
            book.write(batches.again, name, 1, "late", 12.0)
    assert book.dump() == before


def test_an_unknown_batch_is_named(book: Any) -> None:
    with pytest.raises(NotFoundError, match="no batch b9"):
        book.read(batches.load, "b9")
    with pytest.raises(NotFoundError, match="no batch b9"):
        book.write(batches.commit, "b9", book.release(1), 9.0)
