"""Held-out results in the ledger, and the alarms that follow from them."""

from typing import Any

import pytest

from reef.config import AlarmSection
from reef.errors import NotFoundError
from reef.ledger import batches, held_out, releases
from reef.types import Operation

SCENARIO = "arithmetic"
ALARMS = (AlarmSection(metric="accuracy", drop=0.1, reward_rise=0.1, window=4),)
GOOD, BAD = ({"accuracy": share, "n": 1000} for share in (0.8, 0.5))


def grow(book: Any, count: int, first: int = 1) -> None:
    """Releases `first`, ... whose reward is a tenth of their number."""
    for number in range(first, first + count):
        release = book.release(number, parent=f"r{number - 1}", metrics={"reward_mean": number / 10})
        book.write(releases.append, release)


def add(book: Any, release_id: str, result: dict[str, Any]) -> list[str]:
    """The releases that ring for the first time."""
    return [name for name, _ in book.write(held_out.add, SCENARIO, release_id, result, 1.0, ALARMS)]


def ringing(book: Any) -> list[str]:
    """All that are marked in the chain, newest first."""
    return list(book.read(held_out.marks, book.read(releases.chain, SCENARIO), ALARMS))


def test_a_release_rings_when_its_result_is_stored_and_only_the_first_time(book: Any) -> None:
    grow(book, 4)
    assert add(book, "r1", GOOD) == []
    assert add(book, "r4", BAD) == ["r4"]
    assert add(book, "r4", BAD) == []
    assert ringing(book) == ["r4"]


def test_a_later_result_that_is_good_takes_the_mark_away(book: Any) -> None:
    grow(book, 4)
    add(book, "r1", GOOD)
    add(book, "r4", BAD)
    add(book, "r4", GOOD)
    assert ringing(book) == []


def test_a_result_that_comes_late_can_make_the_releases_after_it_ring(book: Any) -> None:
    grow(book, 8)
    for number in (3, 4, 8):
        assert add(book, f"r{number}", BAD) == []
    assert add(book, "r1", GOOD) == ["r3", "r4"]  # r8 lies outside the window
    assert ringing(book) == ["r4", "r3"]


def test_what_was_rolled_away_is_no_measure_for_what_came_after(book: Any) -> None:
    grow(book, 4)
    add(book, "r3", GOOD)
    jump = book.release(5, parent="r4", operation=Operation.ROLLBACK, source="r1", step=1, policy_version=1)
    book.write(batches.jump, jump, 1.0)
    for number, step in ((6, 2), (7, 3)):
        release = book.release(number, parent=f"r{number - 1}", step=step, metrics={"reward_mean": 5.0 * step})
        book.write(releases.append, release)
    assert add(book, "r7", BAD) == []
    assert add(book, "r1", GOOD) == ["r7"]


def test_status_is_of_the_newest_measured_ancestor_of_the_head(book: Any) -> None:
    grow(book, 5)
    assert book.read(held_out.newest, SCENARIO, ALARMS) is None
    add(book, "r1", GOOD)
    assert book.read(held_out.newest, SCENARIO, ALARMS) == ("r1", ())
    add(book, "r4", BAD)
    name, (mark,) = book.read(held_out.newest, SCENARIO, ALARMS)
    assert (name, mark.metric, mark.since) == ("r4", "accuracy", "r1")
    book.write(batches.jump, book.release(6, parent="r5", operation=Operation.ROLLBACK, source="r2", step=2), 1.0)
    assert book.read(held_out.newest, SCENARIO, ALARMS) == ("r1", ())


def test_without_alarms_results_are_stored_and_nothing_rings(book: Any) -> None:
    grow(book, 4)
    for name, result in (("r1", GOOD), ("r4", BAD)):
        assert book.write(held_out.add, SCENARIO, name, result, 1.0, ()) == []
    assert book.read(releases.evaluations_of, ["r4"]) == {"r4": [BAD]}
    assert book.read(held_out.marks, book.read(releases.chain, SCENARIO), ()) == {}
    assert book.read(held_out.newest, SCENARIO, ()) is None


def test_a_result_of_a_release_that_is_not_there_is_refused(book: Any) -> None:
    with pytest.raises(NotFoundError, match="no release r9"):
        add(book, "r9", GOOD)
