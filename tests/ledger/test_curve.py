"""A learning curve counts the rollouts that were trained, whatever became of what they made."""

from typing import Any

from reef.ledger import batches, curve, releases
from reef.types import Operation, Pick

SCENARIO = "arithmetic"


def points(book: Any, after: int, rollouts: int | None = None, limit: int = 100) -> list[tuple[str, int]]:
    return [(release.id, counted) for release, counted in book.read(curve.points, SCENARIO, after, rollouts, limit)]


def test_each_release_stands_beside_the_rollouts_trained_up_to_and_with_it(book: Any) -> None:
    book.train(1, book.graded(3))
    book.train(2, book.graded(2))
    assert points(book, after=0) == [("r1", 3), ("r2", 5)]
    assert points(book, after=1) == [("r2", 5)]
    assert points(book, after=2) == []


def test_a_curve_goes_on_from_a_count_that_is_known_and_comes_in_pages(book: Any) -> None:
    for number in (1, 2, 3):
        book.train(number, book.graded(2))
    assert points(book, after=1, rollouts=100) == [("r2", 102), ("r3", 104)]
    assert points(book, after=0, limit=2) == [("r1", 2), ("r2", 4)]


def test_a_report_of_several_turns_is_one_rollout_and_a_stale_one_is_none(book: Any) -> None:
    first = book.turn(None, [1, 2], [10, 2])
    second = book.turn(first, [3], [11, 2])
    book.accept(first.id, second.id, id="two turns")
    (stale,) = book.graded(1)
    book.train(1, ["two turns", Pick(stale, "g", trains=False)])
    assert points(book, after=0) == [("r1", 1)]


def test_a_rollback_is_a_link_that_trained_nothing_and_takes_no_rollouts_back(book: Any) -> None:
    book.train(1, book.graded(2))
    back = book.release(2, parent="r1", operation=Operation.ROLLBACK, source="r0", step=0, policy_version=0)
    book.write(batches.jump, back, 1.0)
    batch = book.reserve(book.graded(1), id="b3", base_release="r2")
    book.write(batches.commit, batch.id, book.release(3, parent="r2", batch_id=batch.id, step=1), 2.0)
    assert points(book, after=0) == [("r1", 2), ("r2", 2), ("r3", 3)]
    assert [release.step for release in reversed(book.read(releases.chain, SCENARIO))] == [0, 1, 0, 1]
