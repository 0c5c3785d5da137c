"""Whatever the order of reports, batches, failures and restarts, the ledger's promises hold.

A hypothesis state machine drives a real ledger and keeps a plain model of what must be in it.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from reef.errors import ConflictError, ReefError
from reef.ledger import batches, releases, reports
from reef.types import Drop, Pick, Selection

MEMORY = Path("/dev/shm")  # hundreds of small transactions: not on a disk where that can be avoided
STATES = {"pending", "reserved", "trained", "recorded", "dropped"}
ENDED = {"trained", "recorded", "dropped"}


def machine(book_class: type, begun: Path) -> type[RuleBasedStateMachine]:
    """The state machine over a class of books (fixtures cannot be imported in this mode), from a copy of a ledger."""

    class Life(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.directory = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
            shutil.copy(begun, self.directory / "ledger.db")
            self.book: Any = book_class(self.directory)
            self.expected: dict[str, tuple[str, str | None]] = {}  # by report: state and reason
            self.claims: dict[str, str] = {}  # by receipt: the report that trains it
            self.receipts: list[str] = []
            self.members: dict[str, list[tuple[str, bool]]] = {}  # by batch: its reports and whether they train
            self.open: str | None = None  # the batch reserved now
            self.failures = 0
            self.chain = ["r0"]

        def teardown(self) -> None:
            self.book.close()
            shutil.rmtree(self.directory)

        @initialize()
        def traffic(self) -> None:
            self.complete(4)
            for receipt in self.receipts[:3]:
                self.submit([receipt], 1.0)

        @rule(count=st.integers(1, 4))
        def complete(self, count: int) -> None:
            made = self.book.complete([1, 2], *([10 + index, 2] for index in range(count)), release=self.chain[-1])
            self.receipts += [receipt.id for receipt in (made if isinstance(made, list) else [made])]

        @rule(data=st.data(), score=st.sampled_from([0.0, 1.0, None]))
        def report(self, data: st.DataObject, score: float | None) -> None:
            chosen = data.draw(st.lists(st.sampled_from(self.receipts), min_size=1, max_size=3, unique=True))
            self.submit(chosen, score)

        def submit(self, chosen: list[str], score: float | None) -> None:
            owners = [self.claims[receipt] for receipt in chosen if receipt in self.claims]
            report_id = self.book.accept(*chosen, score=score)["agent_record_id"]
            if score is None:
                self.expected[report_id] = ("recorded", "no_score")
            elif any(self.expected[owner][0] == "trained" for owner in owners):
                self.expected[report_id] = ("recorded", "already_trained")
            elif owners:
                self.expected[report_id] = ("recorded", "already_claimed")
            else:
                self.expected[report_id] = ("pending", None)
                self.claims.update(dict.fromkeys(chosen, report_id))

        def pending(self) -> list[str]:
            return [name for name, (state, _) in self.expected.items() if state == "pending"]

        @precondition(lambda self: self.open is None and self.pending())
        @rule(data=st.data())
        def reserve(self, data: st.DataObject) -> None:
            order = data.draw(st.permutations(self.pending()))
            cut = data.draw(st.integers(1, len(order)))
            silent = data.draw(st.integers(0, cut))  # the pick at this position is stale; none where it is `cut`
            picks = tuple(Pick(name, "g", trains=index != silent) for index, name in enumerate(order[:cut]))
            drops = tuple(Drop(name, "tied") for name in order[cut : cut + 1])
            self.open = f"b{len(self.members)}"
            batch = self.book.reserve([], id=self.open, selection=Selection(picks, drops), base_release=self.chain[-1])
            assert list(dict.fromkeys(sample.report_id for sample in batch.samples)) == [p.report_id for p in picks]
            self.members[self.open] = [(pick.report_id, pick.trains) for pick in picks]
            self.failures = 0
            self.expected.update({pick.report_id: ("reserved", None) for pick in picks})
            self.expected.update({drop.report_id: ("dropped", "tied") for drop in drops})

        @precondition(lambda self: any(state != "pending" for state, _ in self.expected.values()))
        @rule(data=st.data())
        def reserve_what_is_not_pending(self, data: st.DataObject) -> None:
            gone = sorted(name for name, (state, _) in self.expected.items() if state != "pending")
            picks = [*self.pending(), data.draw(st.sampled_from(gone))]
            with pytest.raises(ConflictError):
                self.book.reserve(picks, id="refused")

        @precondition(lambda self: self.open is not None)
        @rule()
        def commit(self) -> None:
            batch_id, number = self.open, len(self.chain)
            release = self.book.release(number, parent=self.chain[-1], batch_id=batch_id)
            assert self.book.write(batches.commit, batch_id, release, 9.0) == release
            self.chain.append(release.id)
            for name, trains in self.members[str(batch_id)]:
                self.expected[name] = ("trained", None) if trains else ("dropped", "stale")
            self.open = None

        @precondition(lambda self: len(self.chain) > 1)
        @rule(data=st.data())
        def commit_again(self, data: st.DataObject) -> None:
            number = data.draw(st.integers(1, len(self.chain) - 1))
            stored = self.book.read(releases.get, "arithmetic", f"r{number}")
            other = self.book.release(len(self.chain), parent=self.chain[-1], batch_id=stored.batch_id)
            assert self.book.write(batches.commit, stored.batch_id, other, 9.0) == stored

        @precondition(lambda self: self.open is not None)
        @rule()
        def commit_behind_the_head(self) -> None:
            with pytest.raises(ReefError):
                self.book.write(batches.commit, self.open, self.book.release(len(self.chain), parent="r9999"), 9.0)

        @precondition(lambda self: self.open is not None)
        @rule()
        def fail(self) -> None:
            self.failures += 1
            again = self.book.write(batches.again, self.open, "no", 9.0)
            assert again is (self.failures < 2)
            if not again:
                names = dict(self.members[str(self.open)])
                self.expected.update(dict.fromkeys(names, ("dropped", "step_failed")))
                self.open = None

        @rule()
        def restart(self) -> None:
            self.book.reopen()
            left = self.book.read(batches.reserved, "arithmetic")
            assert left == self.open
            if left is not None:
                batch = self.book.read(batches.load, left)
                assert [name for name, _ in self.members[left]] == list(
                    dict.fromkeys(sample.report_id for sample in batch.samples)
                )

        @invariant()
        def every_report_is_where_it_must_be(self) -> None:
            found = {row[0]: row[1:] for row in self.book.rows("SELECT id, state, reason FROM reports")}
            assert found == self.expected
            assert {state for state, _ in found.values()} <= STATES
            waiting = [item.report_id for item in self.book.read(reports.candidates, "arithmetic")]
            assert waiting == self.pending()

        @invariant()
        def a_receipt_is_trained_at_most_once(self) -> None:
            query = (
                "SELECT receipt_id, count(*) FROM batch_samples JOIN batches ON batches.id = batch_id "
                "WHERE batches.state = 'committed' GROUP BY receipt_id HAVING count(*) > 1"
            )
            assert self.book.rows(query) == []

        @invariant()
        def the_chain_is_unbroken_and_each_link_has_its_batch(self) -> None:
            rows = self.book.rows("SELECT id, number, parent, batch_id FROM releases ORDER BY number")
            assert [row[0] for row in rows] == self.chain
            assert [row[1] for row in rows] == list(range(len(rows)))
            assert [row[2] for row in rows] == [None, *self.chain[:-1]]
            committed = self.book.rows("SELECT release_id, id FROM batches WHERE state = 'committed' ORDER BY number")
            assert [(row[0], row[3]) for row in rows[1:]] == committed

        @invariant()
        def reports_of_ended_batches_have_ended(self) -> None:
            query = (
                "SELECT reports.state FROM reports JOIN batches ON batches.id = batch_id "
                "WHERE batches.state != 'reserved'"
            )
            assert {state for (state,) in self.book.rows(query)} <= ENDED

    return Life


def test_any_order_of_reports_batches_failures_and_restarts_keeps_every_promise(book: Any) -> None:
    book.ledger.close()
    run_state_machine_as_test(
        machine(type(book), book.path),
        settings=settings(
            max_examples=20,
            stateful_step_count=25,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
