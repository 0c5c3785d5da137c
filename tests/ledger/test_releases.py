"""Releases: the chain, and where a token's weights lie in it."""

import dataclasses
from typing import Any

import pytest

from reef.errors import NotFoundError
from reef.ledger import releases
from reef.types import Pick

SCENARIO = "arithmetic"


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
    assert ids(book.read(releases.since, SCENARIO, 2)) == ["r3", "r4"]
    assert ids(book.read(releases.since, SCENARIO, 4)) == []


def test_every_link_of_the_chain_was_once_the_head(book: Any) -> None:
    grow(book, 5)
    chain = book.read(releases.chain, SCENARIO)
    assert [release.parent for release in chain] == ["r4", "r3", "r2", "r1", "r0", None]
    assert [release.number for release in chain] == [5, 4, 3, 2, 1, 0]


def test_staleness_counts_policy_updates_back_from_the_head(book: Any) -> None:
    grow(book, 6)
    found = book.read(releases.staleness, SCENARIO, {"r6", "r5", "r2", "r1", "r0"}, 4)
    assert found == {"r6": 0, "r5": 1, "r2": 4, "r1": 5, "r0": 6}
    assert book.read(releases.staleness, SCENARIO, {"r6", "r5"}, 0) == {"r6": 0, "r5": 1}


def test_a_link_without_a_policy_update_adds_no_staleness(book: Any) -> None:
    grow(book, 2)
    book.write(releases.append, dataclasses.replace(book.release(3, parent="r2"), policy_version=2))
    book.write(releases.append, dataclasses.replace(book.release(4, parent="r3"), policy_version=3))
    assert book.read(releases.staleness, SCENARIO, {"r4", "r3", "r2", "r1"}, 4) == {"r4": 0, "r3": 1, "r2": 1, "r1": 2}


def test_a_release_of_a_branch_that_was_left_is_abandoned(book: Any) -> None:
    grow(book, 5)
    # r6 goes on from r2: r3, r4 and r5 are no ancestors of it.
    book.write(releases.append, dataclasses.replace(book.release(6, parent="r2"), policy_version=3))
    found = book.read(releases.staleness, SCENARIO, {"r6", "r5", "r4", "r3", "r2", "r1", "r0"}, 4)
    assert found == {"r6": 0, "r5": None, "r4": None, "r3": None, "r2": 1, "r1": 2, "r0": 3}


def test_a_release_nobody_knows_counts_as_abandoned(book: Any) -> None:
    assert book.read(releases.staleness, SCENARIO, {"r0", "default"}, 4) == {"r0": 0, "default": None}
    assert book.read(releases.staleness, "nothing", {"r0"}, 4) == {"r0": None}


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
            },
            {
                "position": 1,
                "report_id": a,
                "receipt_id": receipts[a],
                "group": "g1",
                "reward": 0.0,
                "trained": False,
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
