"""Whatever the order of reports, batches, failures and restarts, the ledger's promises hold.

Hypothesis chooses what happens; a plain model beside the real ledger says what must be in it after each step.
"""

import contextlib
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from reef.errors import ConflictError, ReefError
from reef.ledger import batches, releases, reports
from reef.ledger.audit import audit
from reef.ledger.reading import open_reading
from reef.types import Drop, Pick, Selection

ENDED = {"trained", "recorded", "dropped"}
SCENARIO = "arithmetic"
# What can happen, and how often relative to the rest.
WEIGHTS = {
    "complete": 2,
    "report": 6,
    "reserve": 4,
    "reserve_what_is_not_pending": 1,
    "commit": 4,
    "commit_again": 1,
    "commit_behind_the_head": 1,
    "fail": 2,
    "restart": 1,
}
ACTIONS = [name for name, weight in WEIGHTS.items() for _ in range(weight)]


class Life:
    """One scenario's life: each method does one thing, or nothing where it cannot happen now."""

    def __init__(self, book: Any, random: Random) -> None:
        self.book = book
        self.random = random
        self.expected: dict[str, tuple[str, str | None]] = {}  # by report: state and reason
        self.claims: dict[str, str] = {}  # by receipt: the report that trains it
        self.receipts: list[str] = []
        self.members: dict[str, list[Pick]] = {}  # by batch: its reports
        self.open: str | None = None  # the batch reserved now
        self.failures = 0
        self.chain = ["r0"]
        self.complete()
        self.report(1.0)

    def complete(self) -> None:
        outputs = [[10 + index, 2] for index in range(self.random.randint(2, 4))]
        made = self.book.complete([1, 2], *outputs, release=self.chain[-1])
        self.receipts += [receipt.id for receipt in made]

    def report(self, score: float | None = None) -> None:
        score = self.random.choice([0.0, 0.5, 1.0, None]) if score is None else score
        chosen = self.random.sample(self.receipts, self.random.randint(1, 2))
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

    def reserve(self) -> None:
        order = self.pending()
        if self.open is not None or not order:
            return
        self.random.shuffle(order)
        cut = self.random.randint(1, len(order))
        picks = tuple(Pick(name, "g", trains=self.random.random() < 0.8) for name in order[:cut])
        drops = tuple(Drop(name, "tied") for name in order[cut : cut + 1])
        self.open, self.failures = f"b{len(self.members)}", 0
        batch = self.book.reserve([], id=self.open, selection=Selection(picks, drops), base_release=self.chain[-1])
        self.members[self.open] = list(picks)
        self.holds_its_reports_in_order(batch)
        self.expected.update({pick.report_id: ("reserved", None) for pick in picks})
        self.expected.update({drop.report_id: ("dropped", "tied") for drop in drops})

    def holds_its_reports_in_order(self, batch: Any) -> None:
        found = dict.fromkeys((sample.report_id, sample.trains) for sample in batch.samples)
        assert list(found) == [(pick.report_id, pick.trains) for pick in self.members[batch.id]]

    def reserve_what_is_not_pending(self) -> None:
        gone = [name for name, (state, _) in self.expected.items() if state != "pending"]
        if gone:
            with pytest.raises(ConflictError):
                self.book.reserve([*self.pending(), self.random.choice(gone)], id="refused")

    def commit(self) -> None:
        if self.open is None:
            return
        release = self.book.release(len(self.chain), parent=self.chain[-1], batch_id=self.open)
        assert self.book.write(batches.commit, self.open, release, 9.0) == release
        self.chain.append(release.id)
        for pick in self.members[self.open]:
            self.expected[pick.report_id] = ("trained", None) if pick.trains else ("dropped", "stale")
        self.open = None

    def commit_again(self) -> None:
        if len(self.chain) > 1:
            stored = self.book.read(releases.get, SCENARIO, self.random.choice(self.chain[1:]))
            other = self.book.release(len(self.chain), parent=self.chain[-1], batch_id=stored.batch_id)
            assert self.book.write(batches.commit, stored.batch_id, other, 9.0) == stored

    def commit_behind_the_head(self) -> None:
        if self.open is not None:
            with pytest.raises(ReefError):
                self.book.write(batches.commit, self.open, self.book.release(len(self.chain), parent="r9999"), 9.0)

    def fail(self) -> None:
        if self.open is None:
            return
        self.failures += 1
        again = self.book.write(batches.again, self.open, self.failures, "no", 9.0)
        assert again is (self.failures < 2)
        if not again:
            names = [pick.report_id for pick in self.members[self.open]]
            self.expected.update(dict.fromkeys(names, ("dropped", "step_failed")))
            self.open = None

    def restart(self) -> None:
        self.book.reopen()
        left = self.book.read(batches.reserved, SCENARIO)
        assert left == self.open
        if left is not None:
            self.holds_its_reports_in_order(self.book.read(batches.load, left))

    def check(self) -> None:
        """Every report in exactly the state it must be in; no receipt trained twice; no link of the chain missing."""
        found = {row[0]: row[1:] for row in self.book.rows("SELECT id, state, reason FROM reports")}
        assert found == self.expected
        waiting = [item.report_id for item in self.book.read(reports.candidates, SCENARIO)]
        assert waiting == self.pending()
        twice = (
            "SELECT receipt_id FROM batch_samples JOIN batches ON batches.id = batch_id "
            "WHERE batches.state = 'committed' GROUP BY receipt_id HAVING count(*) > 1"
        )
        assert self.book.rows(twice) == []
        links = self.book.rows("SELECT id, number, parent, batch_id FROM releases ORDER BY number")
        assert [link[0] for link in links] == self.chain
        assert [link[1:3] for link in links] == list(enumerate([None, *self.chain[:-1]]))
        made = self.book.rows("SELECT release_id, id FROM batches WHERE state = 'committed' ORDER BY number")
        assert [(link[0], link[3]) for link in links[1:]] == made
        left = (
            "SELECT reports.state FROM reports JOIN batches ON batches.id = batch_id WHERE batches.state != 'reserved'"
        )
        assert {state for (state,) in self.book.rows(left)} <= ENDED


@pytest.mark.slow
def test_any_order_of_reports_batches_failures_and_restarts_keeps_every_promise(book: Any) -> None:
    book.ledger.close()
    reached: set[tuple[str, str | None]] = set()

    @settings(
        max_examples=20,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(st.sampled_from(ACTIONS), min_size=20, max_size=30), st.randoms(use_true_random=False))
    def live(actions: list[str], random: Random) -> None:
        with book.store.copied() as store, contextlib.closing(type(book)(store)) as copied:
            life = Life(copied, random)
            for action in actions:
                getattr(life, action)()
                life.check()
            with open_reading(copied.url) as connection:
                assert list(audit(connection)) == []
            reached.update(life.expected.values())

    live()
    assert reached >= {
        ("pending", None),
        ("reserved", None),
        ("trained", None),
        ("dropped", "stale"),
        ("dropped", "tied"),
        ("dropped", "step_failed"),
        ("recorded", "no_score"),
        ("recorded", "already_claimed"),
        ("recorded", "already_trained"),
    }
