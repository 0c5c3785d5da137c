"""Why: every station of a report and of a receipt is told, in order of time."""

from typing import Any

import pytest

from reef.errors import NotFoundError
from reef.ledger import batches, deletion, releases, reports, story
from reef.types import Drop, Operation, Pick, ReleaseState, Sampling

NOW = 1_700_000_000.25


def told(book: Any, report_id: str, group_size: int | None = None) -> list[str]:
    """The names of a report's events."""
    history = book.read(story.of_report, report_id, group_size)
    times = [event["at"] for event in history if event["at"] is not None]
    assert times == sorted(times)
    return [event["event"] for event in history]


def jump(book: Any, number: int, source: str, operation: Operation = Operation.ROLLBACK) -> None:
    release = book.release(number, parent=f"r{number - 1}", operation=operation, source=source)
    book.write(batches.jump, release, NOW + number)


def test_a_trained_report_tells_its_whole_way_and_its_receipt_begins_it(book: Any) -> None:
    receipt = book.complete([1, 2], [3, 4])
    report = book.accept(receipt.id, id="rep_a", score=0.5)["agent_record_id"]
    book.train(1, [report])
    book.write(releases.set_verified, "r1", NOW + 2)
    claimed = {"at": NOW, "event": "claimed", "report_id": "rep_a", "score": 0.5, "receipts": [receipt.id]}
    later = [
        {"at": NOW + 1, "event": "reserved", "report_id": "rep_a", "batch_id": "b1"},
        {
            "at": NOW + 1,
            "event": "trained",
            "report_id": "rep_a",
            "batch_id": "b1",
            "step": 1,
            "release_id": "r1",
        },
        {"at": NOW + 2, "event": "verified", "release_id": "r1"},
    ]
    assert book.read(story.of_report, report) == [claimed, *later]
    written = {
        "at": NOW,
        "event": "written",
        "receipt_id": receipt.id,
        "tokens": 2,
        "releases": ["r0"],
        "exact": True,
        "reason": None,
    }
    assert book.read(story.of_receipt, receipt.id) == [written, claimed, *later]
    assert book.read(story.trained_in, receipt.id) == ["r1"]


def test_a_receipt_that_nobody_graded_was_only_written_and_says_why_it_is_not_exact(book: Any) -> None:
    receipt = book.complete([1], [2], sampling=Sampling(max_tokens=4, top_p=0.5))
    (written,) = book.read(story.of_receipt, receipt.id)
    assert (written["event"], written["exact"], written["reason"]) == ("written", False, "top_p")
    assert book.read(story.trained_in, receipt.id) == []


def test_what_never_waited_is_told_with_its_reason(book: Any) -> None:
    receipt = book.complete([1], [2])
    noted = book.accept(receipt.id, score=None)["agent_record_id"]
    first = book.accept(receipt.id)["agent_record_id"]
    second = book.accept(receipt.id)["agent_record_id"]
    empty = book.accept(book.complete([1], []).id)["agent_record_id"]
    reasons = {
        report: [(event["event"], event.get("reason")) for event in book.read(story.of_report, report)]
        for report in (noted, second, empty)
    }
    assert reasons == {
        noted: [("recorded", "no_score")],
        second: [("recorded", "already_claimed")],
        empty: [("dropped", "empty")],
    }
    assert told(book, first) == ["claimed", "pending"]
    events = book.read(story.of_receipt, receipt.id)
    assert [event.get("report_id") for event in events] == [None, noted, first, first, second]


def test_a_member_of_an_incomplete_group_waits(book: Any) -> None:
    report = book.graded(1)[0]
    *_, last = book.read(story.of_report, report, 4)
    assert (last["event"], last["reason"]) == ("waiting", "group 1 of 4")
    book.write(reports.drop, [Drop(report, "group_incomplete")], NOW + 9)
    *_, last = book.read(story.of_report, report, 4)
    assert (last["event"], last["at"], last["reason"]) == ("dropped", NOW + 9, "group_incomplete")
    assert told(book, report, 4) == ["claimed", "dropped"]


def test_a_batch_that_was_given_up_stays_in_the_story(book: Any) -> None:
    report = book.graded(1)[0]
    book.reserve([report], id="b1")
    book.write(batches.abort, "arithmetic", NOW + 2)
    assert told(book, report) == ["claimed", "reserved", "aborted", "pending"]
    book.reserve([report], id="b2", now=NOW + 3)
    assert told(book, report) == ["claimed", "reserved", "aborted", "reserved"]
    book.write(batches.commit, "b2", book.release(1, batch_id="b2", created_at=NOW + 4), NOW + 4)
    history = book.read(story.of_report, report)
    assert [(event["event"], event.get("batch_id")) for event in history] == [
        ("claimed", None),
        ("reserved", "b1"),
        ("aborted", "b1"),
        ("reserved", "b2"),
        ("trained", "b2"),
    ]


def test_failed_attempts_are_told_with_their_errors_where_the_time_is_known_with_it(book: Any) -> None:
    good, bad = book.graded(2)
    book.reserve([good], id="b1")
    book.write(batches.again, "b1", 1, "a worker died", NOW + 2)
    failed = book.read(story.of_report, good)[-1]
    assert failed == {
        "at": NOW + 2,
        "event": "attempt_failed",
        "report_id": good,
        "batch_id": "b1",
        "attempt": 1,
        "error": "a worker died",
    }
    book.write(batches.commit, "b1", book.release(1, batch_id="b1", created_at=NOW + 3), NOW + 3)
    history = book.read(story.of_report, good)
    assert [(event["event"], event["at"]) for event in history[2:]] == [("attempt_failed", None), ("trained", NOW + 3)]
    book.reserve([bad], id="b2", base_release="r1", now=NOW + 4)
    book.write(batches.again, "b2", 1, "not finite", NOW + 5)
    book.write(batches.again, "b2", 2, "still not finite", NOW + 6)
    *_, last = book.read(story.of_report, bad)
    assert (last["event"], last["at"], last["attempt"], last["error"]) == (
        "step_failed",
        NOW + 6,
        2,
        "still not finite",
    )
    assert told(book, bad) == ["claimed", "reserved", "step_failed"]


def test_a_silent_member_was_dropped_in_the_batch_that_trained_the_others(book: Any) -> None:
    loud, silent = book.graded(2)
    book.train(1, [Pick(loud, "g"), Pick(silent, "g", trains=False)])
    *_, last = book.read(story.of_report, silent)
    assert (last["event"], last["reason"], last["batch_id"]) == ("dropped", "stale", "b1")
    assert told(book, silent) == ["claimed", "reserved", "dropped"]
    receipt = book.read(reports.references_of, silent)[0]
    assert book.read(story.trained_in, receipt) == []


@pytest.mark.parametrize(
    ("state", "reason", "event"),
    [
        (ReleaseState.RELEASED, "passed", "released"),
        (ReleaseState.REJECTED, "accuracy 0.1 is below 0.5", "rejected"),
        (ReleaseState.QUARANTINED, "no engine loads it", "quarantined"),
    ],
)
def test_the_fate_of_the_release_is_told(book: Any, state: ReleaseState, reason: str, event: str) -> None:
    report = book.graded(1)[0]
    book.reserve([report], id="b1")
    held = book.release(1, batch_id="b1", state=ReleaseState.PENDING)
    book.write(batches.commit, "b1", held, NOW + 1)
    assert told(book, report)[-1] == "held"
    book.write(releases.set_state, "r1", state, reason, NOW + 5)
    *_, last = book.read(story.of_report, report)
    assert last == {"at": NOW + 5, "event": event, "release_id": "r1", "reason": reason}


def test_a_rollback_takes_the_release_away_and_another_jump_brings_it_back(book: Any) -> None:
    early, late = book.graded(2)
    book.train(1, [early])
    book.train(2, [late])
    jump(book, 3, "r1")
    jump(book, 4, "r3")
    jump(book, 5, "r2", Operation.PROMOTE)
    assert told(book, early) == ["claimed", "reserved", "trained"]
    away, back = book.read(story.of_report, late)[-2:]
    assert away == {
        "at": NOW + 3,
        "event": "rolled_away",
        "release_id": "r2",
        "by": "r3",
        "operation": "rollback",
    }
    assert (back["event"], back["by"], back["operation"]) == ("brought_back", "r5", "promote")


def test_a_deletion_ends_the_story_of_the_receipt_and_of_its_report(book: Any) -> None:
    receipt = book.complete([1], [2])
    report = book.accept(receipt.id)["agent_record_id"]
    book.write(deletion.delete, [receipt.request_id], NOW + 7)
    assert told(book, report) == ["claimed", "dropped", "deleted"]
    events = book.read(story.of_receipt, receipt.id)
    assert [(event["event"], event.get("reason")) for event in events] == [
        ("written", None),
        ("claimed", None),
        ("dropped", "deleted"),
        ("deleted", None),
    ]


def test_what_is_not_there_is_named(book: Any) -> None:
    with pytest.raises(NotFoundError, match="no report x"):
        book.read(story.of_report, "x")
    with pytest.raises(NotFoundError, match="no receipt x"):
        book.read(story.of_receipt, "x")
