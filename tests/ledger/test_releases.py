"""Releases: the chain, and where a token's weights lie in it."""

import dataclasses
from typing import Any

import pytest

from reef.errors import LedgerError, NotFoundError
from reef.ledger import batches, releases
from reef.types import Operation, Pick, ReleaseState

SCENARIO = "arithmetic"


def jump(book: Any, number: int, source: str, **changes: Any) -> None:
    """Release `number` repeats `source`."""
    changes = {"parent": f"r{number - 1}", "operation": Operation.ROLLBACK, "source": source, **changes}
    book.write(batches.jump, book.release(number, **changes), 1.0)


def grow(book: Any, count: int, first: int = 1) -> None:
    """Links without batches: releases `first`, `first` + 1, ..."""
    for number in range(first, first + count):
        book.write(releases.append, book.release(number, parent=f"r{number - 1}"))


def ids(found: list[Any]) -> list[str]:
    return [release.id for release in found]


def test_a_release_comes_back_as_it_was_appended(book: Any) -> None:
    release = book.release(
        1, checkpoint="/checkpoints/r1", restorable=False, metrics={"reward_mean": 0.1, "b": 1e-9}, verified_at=3.5
    )
    book.write(releases.append, release)
    assert book.read(releases.get, SCENARIO, "r1") == release
    assert book.read(releases.head, SCENARIO) == release
    assert book.read(releases.head, "nothing") is None
    with pytest.raises(NotFoundError, match="no release r1 in scenario other"):
        book.read(releases.get, "other", "r1")


def test_the_chain_is_shown_newest_first_in_pages(book: Any) -> None:
    grow(book, 6)
    assert ids(book.read(releases.chain, SCENARIO)) == ["r6", "r5", "r4", "r3", "r2", "r1", "r0"]
    assert ids(book.read(releases.chain, SCENARIO, 3)) == ["r6", "r5", "r4"]
    assert ids(book.read(releases.chain, SCENARIO, 3, 4)) == ["r3", "r2", "r1"]
    assert ids(book.read(releases.chain, SCENARIO, 3, 1)) == ["r0"]
    assert ids(book.read(releases.chain, SCENARIO, 3, 0)) == []


def test_what_a_checkpoint_lacks_comes_oldest_first(book: Any) -> None:
    grow(book, 4)


def test_every_link_of_the_chain_was_once_the_head(book: Any) -> None:
    grow(book, 5)
    chain = book.read(releases.chain, SCENARIO)
    assert [release.parent for release in chain] == ["r4", "r3", "r2", "r1", "r0", None]
    assert [release.number for release in chain] == [5, 4, 3, 2, 1, 0]


def test_staleness_counts_policy_updates_back_from_the_head(book: Any) -> None:
    grow(book, 6)
    found = book.read(releases.staleness, SCENARIO, {"r6", "r5", "r2", "r1", "r0"})
    assert found == {"r6": 0, "r5": 1, "r2": 4, "r1": 5, "r0": 6}


def test_a_link_without_a_policy_update_adds_no_staleness(book: Any) -> None:
    grow(book, 2)
    book.write(releases.append, dataclasses.replace(book.release(3, parent="r2"), policy_version=2))
    book.write(releases.append, dataclasses.replace(book.release(4, parent="r3"), policy_version=3))
    assert book.read(releases.staleness, SCENARIO, {"r4", "r3", "r2", "r1"}) == {"r4": 0, "r3": 1, "r2": 1, "r1": 2}


def test_a_release_of_a_branch_that_was_left_is_abandoned(book: Any) -> None:
    grow(book, 5)
    # r6 repeats r2, r7 goes on from it: r3, r4 and r5 are no ancestors.
    jump(book, 6, "r2", policy_version=2)
    book.write(releases.append, book.release(7, parent="r6", policy_version=3))
    found = book.read(releases.staleness, SCENARIO, [f"r{number}" for number in range(8)])
    assert found == {"r7": 0, "r6": 1, "r5": None, "r4": None, "r3": None, "r2": 1, "r1": 2, "r0": 3}


def test_ancestry_follows_the_content_through_jumps_back_and_forth(book: Any) -> None:
    grow(book, 5)
    jump(book, 6, "r2")
    book.write(releases.append, book.release(7, parent="r6"))
    jump(book, 8, "r5")  # back to the branch that was left
    jump(book, 9, "r8")
    assert book.read(releases.ancestry, SCENARIO, 7) == [(6, 7), (0, 2)]
    assert book.read(releases.ancestry, SCENARIO, 9) == [(9, 9), (8, 8), (0, 5)]
    assert book.read(releases.ancestry, SCENARIO, 5) == [(0, 5)]
    r7, r9 = (book.read(releases.get, SCENARIO, name) for name in ("r7", "r9"))
    assert [step.id for step in book.read(releases.steps_to, r7, 0)] == ["r1", "r2", "r7"]
    assert [step.id for step in book.read(releases.steps_to, r9, 3)] == ["r4", "r5"]
    for name in ("r1", "r4", "r7"):
        book.write(releases.set_checkpoint, name, f"/checkpoints/{name}")
    assert [found.id for found in book.read(releases.checkpoints_of, r7)] == ["r7", "r1"]
    assert [found.id for found in book.read(releases.checkpoints_of, r9)] == ["r4", "r1"]


def test_a_jump_takes_the_queue_along(book: Any) -> None:
    kept = book.graded(2)
    first, second = book.graded(2)
    book.train(1, [first, second])
    left = book.graded(1, release="r1")
    reserved = book.graded(1)
    book.reserve(reserved, id="b2", base_release="r1")
    jump(book, 2, "r0")
    assert [book.state(name) for name in (*kept, *reserved)] == [("pending", None)] * 3
    assert book.state(left[0]) == ("dropped", "abandoned")
    assert book.state(first) == ("trained", None)
    assert book.rows("SELECT id, state FROM batches") == [("b1", "committed"), ("b2", "aborted")]
    assert book.read(releases.head, SCENARIO).source == "r0"


def test_a_jump_from_a_held_head_rejects_it_and_one_from_an_old_head_is_refused(book: Any) -> None:
    grow(book, 1)
    book.write(releases.append, book.release(2, parent="r1", state=ReleaseState.PENDING))
    assert book.read(releases.served, SCENARIO).id == "r1"
    jump(book, 3, "r1")
    held = book.read(releases.get, SCENARIO, "r2")
    assert (held.state, held.reason) == (ReleaseState.REJECTED, "rollback to r1 while it was held")
    assert book.read(releases.served, SCENARIO).id == "r3"
    before = book.dump()
    with pytest.raises(LedgerError, match="release r4 follows r2, but the head is r3"):
        jump(book, 4, "r1", parent="r2")
    assert book.dump() == before


def test_a_release_nobody_knows_counts_as_abandoned(book: Any) -> None:
    assert book.read(releases.staleness, SCENARIO, {"r0", "default"}) == {"r0": 0, "default": None}
    assert book.read(releases.staleness, "nothing", {"r0"}) == {"r0": None}


def test_the_lineage_of_a_release_is_its_batch_in_order(book: Any) -> None:
    a, b = book.graded(2)
    book.train(1, [Pick(b, "g1"), Pick(a, "g1", trains=False)])
    receipts = dict(book.rows("SELECT report_id, receipt_id FROM report_receipts"))
    assert book.read(releases.lineage, SCENARIO, "r1") == {
        "release_id": "r1",
        "parent_release_id": "r0",
        "batch_id": "b1",
        "samples": [
            {
                "position": 0,
                "report_id": b,
                "receipt_id": receipts[b],
                "group": "g1",
                "reward": 1.0,
                "trained": True,
                "sample": 0,
            },
            {
                "position": 1,
                "report_id": a,
                "receipt_id": receipts[a],
                "group": "g1",
                "reward": 0.0,
                "trained": False,
                "sample": 1,
            },
        ],
    }
    assert book.read(releases.lineage, SCENARIO, "r0")["samples"] == []
    with pytest.raises(NotFoundError):
        book.read(releases.lineage, SCENARIO, "r9")


def test_evaluations_are_kept_on_their_release_in_order(book: Any) -> None:
    grow(book, 1)
    book.write(releases.add_evaluation, SCENARIO, "r1", {"accuracy": 0.25, "n": 1000}, 1.0)
    book.write(releases.add_evaluation, SCENARIO, "r1", {"accuracy": 0.5}, 2.0)
    assert book.read(releases.evaluations_of, ["r0", "r1"]) == {
        "r1": [{"accuracy": 0.25, "n": 1000}, {"accuracy": 0.5}]
    }
    with pytest.raises(NotFoundError, match="no release r9"):
        book.write(releases.add_evaluation, SCENARIO, "r9", {}, 3.0)


def test_marks_on_a_release_survive_a_restart(book: Any) -> None:
    grow(book, 3)
    book.write(releases.set_verified, "r3", 8.5)
    book.write(releases.set_checkpoint, "r2", "/checkpoints/r2")
    book.write(releases.forget_weights, ["r0", "r1"])
    book.reopen()
    assert book.read(releases.get, SCENARIO, "r3").verified_at == 8.5
    assert ids(book.read(releases.checkpoints, SCENARIO)) == ["r2"]
    assert ids(book.read(releases.restorable, SCENARIO)) == ["r3", "r2"]
    book.write(releases.set_checkpoint, "r2", None)
    assert book.read(releases.checkpoints, SCENARIO) == []


def test_the_release_to_go_back_to_was_verified_and_is_on_disk_or_is_the_base(book: Any) -> None:
    grow(book, 5)
    base, *rest = book.read(releases.chain, SCENARIO)[::-1]
    head = rest[-1]
    assert book.read(releases.verified_before, head) == base
    for number in (2, 3, 5):
        book.write(releases.set_verified, f"r{number}", 9.0)
    assert book.read(releases.verified_before, head).id == "r3"
    book.write(releases.forget_weights, ["r3"])
    assert book.read(releases.verified_before, head).id == "r2"
    assert book.read(releases.verified_before, base) is None
