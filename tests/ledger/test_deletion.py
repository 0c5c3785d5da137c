"""Deletion: what goes, what stays, what refuses it, and what retention may take."""

import dataclasses
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from reef.errors import CheckpointNeededError, ConflictError, GoneError, NotFoundError
from reef.ledger import batches, deletion, receipts, releases, reports, scenarios
from reef.types import Drop, Operation, Sampling

NOW = 1_700_000_000.25
LATER = NOW + 100


def delete(book: Any, *made: Any, now: float = LATER) -> list[str]:
    """Delete the requests of these receipts; the receipts that went."""
    return list(book.write(deletion.delete, [receipt.request_id for receipt in made], now).receipt_ids)


def is_deleted(book: Any, receipt: Any) -> bool:
    return book.read(receipts.skeleton, receipt.id).deleted_at is not None


def continued(book: Any, parent: Any, added: Sequence[int], *outputs: Sequence[int], **changes: Any) -> Any:
    """A later turn."""
    prompt = [*parent.prompt_ids.tolist(), *parent.generation.output_ids.tolist(), *added]
    return book.complete(prompt, *outputs, parent=parent.id, **changes)


def graded(book: Any, receipt: Any, **fields: Any) -> str:
    return str(book.accept(receipt.id, **fields)["agent_record_id"])


def num_deleted(book: Any) -> dict[str, int]:
    return dict(book.rows("SELECT id, num_deleted FROM releases WHERE num_deleted > 0"))


def test_text_ids_and_log_probabilities_go_and_the_skeleton_stays(book: Any) -> None:
    sampling = Sampling(max_tokens=5, temperature=0.5, stop=("my secret",), stop_token_ids=(7,))
    request = book.request([1, 2, 3], sampling=sampling, body=b'{"x": 1}', tags={"user": "ada"}, session="s")
    made = book.made(request, book.generation([4, 5], matched="my secret"), turn_key="k")
    book.write(receipts.record, request, made)
    before = book.read(receipts.skeleton, made[0].id)
    assert delete(book, *made) == [made[0].id]
    after = book.read(receipts.skeleton, made[0].id)
    kept = dataclasses.replace(sampling, stop=(), stop_token_ids=())
    assert after == dataclasses.replace(before, deleted_at=LATER, sampling=kept)
    assert (after.num_prompt_tokens, after.num_tokens, after.digest) == (3, 2, made[0].digest)
    assert book.rows("SELECT length(prompt_ids), length(body), tags FROM requests") == [(0, 0, "{}")]
    left = book.rows("SELECT length(output_ids), length(logprobs), matched, turn_key FROM receipts")
    assert left == [(0, 0, None, None)]
    for read, id in ((receipts.get, made[0].id), (receipts.body_of, request.id)):
        with pytest.raises(GoneError) as gone:
            book.read(read, id)
        assert (gone.value.status, gone.value.code) == (410, "receipt_deleted")


def test_what_is_deleted_is_not_in_the_file_any_more(book: Any) -> None:
    if not hasattr(book.store, "path"):
        pytest.skip("PostgreSQL: vacuum decides")
    secret = np.random.default_rng(0).integers(1, 255, 6000).astype("<i4")
    small, large = book.complete([1], secret[:40]), book.complete([1], secret[40:])
    book.ledger.close()
    blobs = [secret[:40].tobytes(), secret[3000:3020].tobytes()]
    assert all(blob in book.store.path.read_bytes() for blob in blobs)
    book.reopen()
    delete(book, small, large)
    book.ledger.close()
    with closing(sqlite3.connect(book.store.path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert not any(blob in book.store.path.read_bytes() for blob in blobs)
    book.reopen()


def test_all_choices_and_every_later_turn_go_and_nothing_else(book: Any) -> None:
    first = book.complete([1, 2], [3], [4])
    second = continued(book, first[1], [5], [6])
    third = continued(book, second, [7], [8], [9], session="elsewhere")
    sibling, stranger = book.complete([1, 2], [3]), continued(book, book.complete([1], [2]), [3], [4])
    assert set(delete(book, first[0])) == {receipt.id for receipt in (*first, second, *third)}
    assert not is_deleted(book, sibling) and not is_deleted(book, stranger)
    assert book.read(receipts.get, stranger.id).prompt_ids.tolist() == [1, 2, 3]
    dump = book.dump()
    assert delete(book, first[0], third[0], now=LATER + 1) == []
    assert book.dump() == dump


def test_receipts_that_come_between_deletions_are_deleted_in_their_turn(book: Any) -> None:
    made = []
    for index in range(4):
        made.append(book.complete([1], [index]))
        assert delete(book, made[-1]) == [made[-1].id]
    kept = book.complete([1], [9])
    assert [book.read(receipts.skeleton, receipt.id).deleted_at for receipt in (*made, kept)] == [LATER] * 4 + [None]
    assert book.rows("SELECT id FROM receipts ORDER BY seq") == [(receipt.id,) for receipt in (*made, kept)]


def test_the_turns_before_a_deleted_one_stay(book: Any) -> None:
    first = book.complete([1, 2], [3])
    second = continued(book, first, [5], [6])
    assert delete(book, second) == [second.id]
    assert book.read(receipts.get, first.id).generation.output_ids.tolist() == [3]


def test_a_deleted_receipt_cannot_be_continued(book: Any) -> None:
    first = book.complete([1, 2], [3])
    delete(book, first)
    before = book.dump()
    with pytest.raises(GoneError, match=f"receipt {first.id} was deleted"):
        continued(book, first, [5], [6])
    assert book.dump() == before


def test_what_goes_with_a_receipt_or_a_session_comes_newest_first(book: Any) -> None:
    first = book.complete([1, 2], [3], session="a/b c")
    second = continued(book, first, [4], [5], session="other")
    third = book.complete([1], [2], session="a/b c")
    fourth = continued(book, second, [6], [7])
    book.write(scenarios.create, "other", "grpo", NOW)
    book.complete([1], [2], session="a/b c", scenario="other")
    ids = [receipt.request_id for receipt in (fourth, third, second, first)]
    assert book.read(deletion.of_session, "arithmetic", "a/b c") == ids
    assert book.read(deletion.of_receipt, second.id) == [ids[0], ids[2]]
    delete(book, second)
    assert book.read(deletion.of_session, "arithmetic", "a/b c") == [ids[1], ids[3]]
    assert book.read(deletion.of_receipt, second.id) == []
    with pytest.raises(NotFoundError, match="no session x in scenario arithmetic"):
        book.read(deletion.of_session, "arithmetic", "x")
    with pytest.raises(NotFoundError, match="no receipt rcp_x"):
        book.read(deletion.of_receipt, "rcp_x")


def test_the_receipts_of_a_scenario_come_in_pages_newest_first_without_the_deleted_ones(
    book: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "PAGE", 2)
    made = [book.complete([1], [2]) for _ in range(5)]
    book.write(scenarios.create, "other", "grpo", NOW)
    book.complete([1], [2], scenario="other")
    delete(book, made[3])
    seen, before = [], None
    while page := book.read(deletion.of_scenario, "arithmetic", before):
        seen.append([request_id for _, request_id in page])
        before = page[-1][0]
    ids = [receipt.request_id for receipt in made]
    assert seen == [[ids[4], ids[2]], [ids[1], ids[0]]]


def test_the_free_text_of_reports_goes_and_the_same_body_is_still_the_same_report(book: Any) -> None:
    receipt, other = book.complete([1], [2]), book.complete([1], [3])
    text = {"feedback": "you said 2", "metadata": {"who": "ada"}, "reason_code": "free"}
    kept = {"outcome": "correct", "rewards": {"a": 1.0}, "grader": {"id": "g", "version": "1"}, "truncated": True}
    report = book.report(receipt.id, id="rep_a", group="g", **text, **kept)
    before = book.write(reports.accept, report, True, NOW)
    book.accept(other.id, id="rep_b", score=None, **text)
    delete(book, receipt)
    (body,) = book.rows("SELECT body FROM reports WHERE id = 'rep_a'")[0]
    assert not any(name in body for name in text)
    assert all(name in body for name in (*kept, "group", "score"))
    assert "you said 2" in book.rows("SELECT body FROM reports WHERE id = 'rep_b'")[0][0]
    after = book.write(reports.accept, report, True, NOW)
    assert (after["state"], after["reason"], after["updated_at"]) == ("dropped", "deleted", LATER)
    assert {**after, "state": "pending", "reason": None, "updated_at": NOW} == before
    with pytest.raises(ConflictError):
        book.accept(receipt.id, id="rep_a", group="g")


def test_a_report_that_comes_after_the_deletion_is_dropped_and_its_text_not_kept(book: Any) -> None:
    receipt = book.complete([1], [2])
    delete(book, receipt)
    view = book.accept(receipt.id, feedback="you said 2")
    assert (view["state"], view["reason"]) == ("dropped", "deleted")
    assert "you said 2" not in book.dump()
    assert book.accept(receipt.id, id=view["agent_record_id"], feedback="you said 2") == view


def test_a_pending_report_of_several_receipts_is_dropped_with_the_first_that_goes(book: Any) -> None:
    one, two = book.complete([1], [2]), book.complete([1], [3])
    view = book.accept(one.id, two.id)
    delete(book, two)
    assert book.state(view["agent_record_id"]) == ("dropped", "deleted")
    assert not is_deleted(book, one)
    assert book.read(reports.candidates, "arithmetic") == []


def test_what_a_step_trains_on_is_refused_and_nothing_is_deleted(book: Any) -> None:
    free = book.complete([1], [2])
    waiting = graded(book, free, feedback="text")
    reserved = book.complete([1], [2], [3])
    child = continued(book, reserved[0], [4], [5])
    book.reserve([graded(book, child)])
    before = book.dump()
    for made in ((child,), (reserved[1],), (free, reserved[0])):
        with pytest.raises(ConflictError, match="batch b1 is being trained") as refused:
            delete(book, *made)
        assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (409, "in_training", 5)
    for check, of in ((deletion.refuse_in_training, "arithmetic"), (deletion.refuse_reserved, [child.request_id])):
        with pytest.raises(ConflictError, match="batch b1"):
            book.read(check, of)
    book.read(deletion.refuse_reserved, [free.request_id])
    assert book.dump() == before
    assert book.state(waiting) == ("pending", None)
    book.write(batches.abort, "arithmetic", NOW)
    assert delete(book, free, child) == [free.id, child.id]


def test_releases_count_the_samples_they_have_lost_and_their_batch_says_so(book: Any) -> None:
    made = [book.complete([1], [index]) for index in range(6)]
    for number, pair in enumerate((made[:3], made[3:5]), start=1):
        book.train(number, [graded(book, receipt) for receipt in pair])
    book.write(releases.set_checkpoint, "r2", "/checkpoints/r2")
    delete(book, made[0])
    assert num_deleted(book) == {"r1": 1}
    delete(book, made[1], made[3], made[5])
    assert num_deleted(book) == {"r1": 2, "r2": 1}
    with pytest.raises(GoneError, match=f"2 of the 3 receipts of batch b1 were deleted: {made[0].id}, {made[1].id}$"):
        book.read(batches.load, "b1")
    delete(book, made[0], made[1], made[2])
    assert num_deleted(book) == {"r1": 3, "r2": 1}
    assert book.read(releases.get, "arithmetic", "r1").num_deleted == 3


def test_a_batch_of_many_deleted_receipts_names_the_first_three(book: Any) -> None:
    made = [book.complete([1], [index]) for index in range(5)]
    book.train(1, [graded(book, receipt) for receipt in made])
    book.write(releases.set_checkpoint, "r1", "/checkpoints/r1")
    delete(book, *made)
    first = ", ".join(receipt.id for receipt in made[:3])
    with pytest.raises(GoneError, match=rf"5 of the 5 receipts of batch b1 were deleted: {first}, \.\.\.$"):
        book.read(batches.load, "b1")


def test_what_a_crash_would_train_again_needs_a_checkpoint_first(book: Any) -> None:
    made = [book.complete([1], [index]) for index in range(4)]
    for number in (1, 2, 3):
        book.train(number, [graded(book, made[number - 1])])
    ids = [receipt.request_id for receipt in made]
    needed = lambda: [book.read(deletion.needs_checkpoint, [id]) for id in ids]  # noqa: E731
    assert needed() == [True, True, True, False]
    book.write(releases.set_checkpoint, "r2", "/checkpoints/r2")
    assert needed() == [False, False, True, False]
    before = book.dump()
    with pytest.raises(CheckpointNeededError, match="checkpoint"):
        delete(book, made[3], made[2])
    assert book.dump() == before
    assert delete(book, made[1]) == [made[1].id]
    # Back to r2: r3 is no ancestor of the head any more, so nobody will train on its batch again.
    back = book.release(4, parent="r3", operation=Operation.ROLLBACK, source="r2")
    book.write(batches.jump, back, NOW)
    assert needed() == [False] * 4


# --- retention --------------------------------------------------------------------------------------------------------


def expire(book: Any, *made: Any) -> list[bool]:
    """Offer the requests of these receipts, newest first; which went."""
    book.write(deletion.expire, [receipt.request_id for receipt in reversed(made)], LATER)
    return [is_deleted(book, receipt) for receipt in made]


def test_retention_takes_what_nothing_needs(book: Any) -> None:
    idle, recorded, waiting, dropped = (book.complete([1], [index]) for index in range(4))
    graded(book, recorded, score=None)
    graded(book, waiting)
    book.write(reports.drop, [Drop(graded(book, dropped), "tied")], NOW)
    assert expire(book, idle, recorded, waiting, dropped) == [True, True, False, True]
    book.reserve([book.read(reports.reports_of, waiting.id)[0]])
    assert expire(book, waiting) == [False]


def test_retention_keeps_what_a_replay_from_the_oldest_checkpoint_needs(book: Any) -> None:
    made = [book.complete([1], [index]) for index in range(4)]
    for number in (1, 2, 3):
        book.train(number, [graded(book, made[number - 1])])
    assert expire(book, *made) == [False, False, False, True]
    for name in ("r1", "r2"):
        book.write(releases.set_checkpoint, name, f"/checkpoints/{name}")
    assert expire(book, *made) == [True, False, False, True]
    assert num_deleted(book) == {"r1": 1}


def test_retention_keeps_a_turn_while_a_later_one_stays(book: Any) -> None:
    first = book.complete([1], [2], [3])
    second = continued(book, first[0], [4], [5])
    third = continued(book, second, [6], [7])
    assert expire(book, first[0], second) == [False, False]
    assert expire(book, first[1]) == [False]
    graded(book, third)
    assert expire(book, first[0], second, third) == [False, False, False]
    book.write(reports.drop, [Drop(book.read(reports.reports_of, third.id)[0], "tied")], NOW)
    went, kept = book.write(deletion.expire, [item.request_id for item in (third, second, first[0])], LATER)
    assert (set(went.receipt_ids), kept) == ({first[0].id, first[1].id, second.id, third.id}, set())


def test_the_walk_sees_live_receipts_with_their_sizes_oldest_first(book: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deletion, "PAGE", 2)
    made = [book.complete([1], list(range(10 * index))) for index in (1, 2, 3, 4)]
    delete(book, made[1])
    page = book.read(deletion.live_after, 0)
    assert [live.request_id for live in page] == [made[0].request_id, made[2].request_id]
    assert page[1].size_bytes - page[0].size_bytes == 20 * 8
    (last,) = book.read(deletion.live_after, page[-1].seq)
    assert (last.request_id, last.created_at) == (made[3].request_id, NOW)
    assert book.read(deletion.live_after, last.seq) == []


def test_what_was_deleted_is_counted_and_the_ledger_uses_less(book: Any) -> None:
    made = [book.complete([1, 2], list(range(4000)), body=b"x") for _ in range(20)]
    before = book.read(deletion.used_bytes)
    assert before > 20 * 4000 * 8
    deleted = book.write(deletion.delete, [receipt.request_id for receipt in made], LATER)
    assert deleted.size_bytes == 20 * (4000 * 8 + 2 * 4 + len(receipts.pack_body(b"x")))
    if book.ledger._writing.dialect.name == "sqlite":  # PostgreSQL gives nothing back before a vacuum
        assert before - book.read(deletion.used_bytes) > 0.8 * deleted.size_bytes
