"""`reef doctor --ledger`: nothing is wrong with a ledger that lived a full life; each damage is named, and alone."""

import contextlib
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Connection, Engine, create_engine, event

from reef.errors import LedgerError
from reef.ledger import audit as audit_module
from reef.ledger import batches, deletion, receipts, releases, reports
from reef.ledger.audit import Finding, audit, counts
from reef.ledger.codec import digest
from reef.ledger.reading import open_reading
from reef.types import Drop, FinishReason, Operation, Pick, ReleaseState, Sampling
from tests.ledger.conftest import Book, SqliteFile


def found(store: Any) -> list[Finding]:
    """What the audit says; a service may own the ledger meanwhile."""
    with open_reading(store.url) as connection:
        return list(audit(connection))


def fill(book: Any) -> Any:
    """Something of everything.

    Releases r0 base, r1 and r2 trained, r3 repeats r1, r4 trained, r5 repeats r2, r6 trained and held. Batches b1, b2,
    b4 and b6 committed, b3 failed, b5 aborted, b7 reserved. Receipts of every kind, some deleted.
    """
    book.train(1, book.graded(4))
    stale, *fresh = book.graded(4)
    book.train(2, [Pick(stale, "g", trains=False), *(Pick(name, "g") for name in fresh)])
    jump(book, 3, Operation.ROLLBACK, "r1")
    book.reserve(book.graded(2, release="r1"), id="b3", base_release="r3")
    for attempt in range(1, batches.MAX_ATTEMPTS + 1):
        book.write(batches.again, "b3", attempt, "no gradient is finite", 8.0)
    train(book, 4, book.graded(2, release="r3"))
    book.reserve(waiting := book.graded(2, release="r1"), id="b5", base_release="r4")
    jump(book, 5, Operation.PROMOTE, "r2")
    train(book, 6, waiting, state=ReleaseState.PENDING)
    told(book)
    book.reserve(book.graded(2, release="r5"), id="b7", base_release="r6")
    book.write(releases.set_checkpoint, "r6", "/checkpoints/r6")
    book.write(deletion.delete, ["req1", book.complete([7], [8], release="r5").request_id], 10.0)
    return book


def train(book: Any, number: int, picks: list[str], **changes: Any) -> None:
    """Reserve and commit a release that follows the head."""
    head = book.read(releases.head, "arithmetic")
    batch = book.reserve(picks, id=f"b{number}", base_release=head.id)
    counters = {"policy_version": head.policy_version + 1, "step": head.step + 1}
    release = book.release(number, parent=head.id, batch_id=batch.id, **counters, **changes)
    book.write(batches.commit, batch.id, release, 8.0)


def jump(book: Any, number: int, operation: Operation, source: str) -> None:
    old = book.read(releases.get, "arithmetic", source)
    head = book.read(releases.head, "arithmetic")
    same = {name: getattr(old, name) for name in ("content_id", "policy_version", "step")}
    release = book.release(number, parent=head.id, operation=operation, source=source, **same)
    book.write(batches.jump, release, 7.0)


def told(book: Any) -> None:
    """Receipts and reports of every kind that no batch takes."""
    first = book.complete([1, 2], [3, 4], release="r5")
    second = book.complete([1, 2, 3, 4, 5], [6], release="r5", parent=first.id)
    book.complete([1, 2, 3, 4, 5, 6, 7], [8], [9, 10], release="r5", parent=second.id)
    empty = book.complete([1, 2], [], release="r5")
    greedy = book.complete([1, 2], [3], release="r5", sampling=Sampling(max_tokens=2, temperature=0.0))
    request = book.request([1, 2])
    values = np.array([-0.5, -np.inf], dtype=np.float32)
    book.write(receipts.record, request, made := book.made(request, book.generation([5, 6], "r5", logprobs=values)))
    cut = book.request([1, 2])
    aborted = book.made(cut, book.generation([5], "r5", finish_reason=FinishReason.ABORT))
    book.write(receipts.record, cut, aborted)
    for receipt in (empty, greedy, *made, *aborted):
        book.accept(receipt.id)
    book.accept(first.id, second.id)
    book.accept(second.id)
    book.accept(first.id, score=None)
    (tied,) = book.graded(1, release="r5")
    book.write(reports.drop, [Drop(tied, "tied")], 9.0)
    first = book.complete([1], [2], release="r5")
    second = book.complete([1, 2, 3], [4], release="r5", parent=first.id)
    book.accept(second.id, feedback="a text", id="rep-told")
    book.write(deletion.delete, [first.request_id], 9.0)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqliteFile]:
    """The file of a ledger as `fill` makes it, closed."""
    store = SqliteFile(tmp_path_factory.mktemp("healthy"))
    fill(Book(store).begin()).close()
    yield store


@pytest.fixture(scope="module")
def behind(healthy: SqliteFile) -> Iterator[Engine]:
    """The ledger as someone else opens it, who minds no rules."""
    engine = create_engine(healthy.url)
    event.listen(engine, "connect", lambda connection, _record: connection.create_function("digest_of", 2, digest))
    yield engine
    engine.dispose()


@contextmanager
def damaged(behind: Engine, *statements: str) -> Iterator[Connection]:
    """The ledger after these statements, which are undone afterwards."""
    with behind.connect() as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)
        yield connection


def test_a_ledger_that_lived_a_full_life_has_no_findings_and_is_left_as_it_is(book: Any) -> None:
    fill(book)
    before = book.dump()
    assert found(book) == []
    with open_reading(book.url) as connection:
        assert counts(connection) == {
            name: book.rows(f"SELECT count(*) FROM {name}")[0][0]
            for name in ("receipts", "reports", "batches", "releases")
        }
    assert book.dump() == before
    for query, states in (
        ("SELECT DISTINCT state FROM batches", {"reserved", "committed", "failed", "aborted"}),
        ("SELECT DISTINCT state FROM reports", {"pending", "reserved", "trained", "recorded", "dropped"}),
        ("SELECT DISTINCT operation FROM releases", {"base", "train", "rollback", "promote"}),
        ("SELECT count(*) FROM requests WHERE deleted_at IS NOT NULL", {4}),
    ):
        assert {value for (value,) in book.rows(query)} == states


@pytest.mark.parametrize(
    ("table", "id", "change", "fault"),
    [
        ("receipts", "req43.0", "output_ids = x'00'", "it has 2 tokens in 1 bytes"),
        ("receipts", "req43.0", "logprobs = x''", "it has 2 tokens in 8 bytes of ids, 0"),
        ("receipts", "req43.0", "num_tokens = 3", "it has 3 tokens in 8 bytes of ids, 8"),
        ("receipts", "req43.0", """spans = '[[0,1,"r5"]]'""", "its spans cover 1 of 2 tokens"),
        (
            "receipts",
            "req43.0",
            """spans = '[[0,1,"r5"],[0,2,"r5"]]'""",
            "its spans have a gap or overlap at token 1: the next is [0, 2)",
        ),
        ("receipts", "req43.0", """spans = '[[0,2,"r9"]]'""", "tokens [0, 2) are from r9, which is no release"),
        ("receipts", "req43.0", "spans = '[[0'", "its spans cannot be read: "),
        ("receipts", "req43.0", "spans = '[7]'", "its spans cannot be read: "),
        ("receipts", "req43.0", "output_ids = x'0102030405060708'", "it was changed: its digest differs"),
        ("receipts", "req31.1", "digest = 'd'", "it was changed: its digest differs"),
        ("receipts", "req33.0", "inexact_reason = NULL", "it was changed"),
        (
            "receipts",
            "req34.0",
            "inexact_reason = NULL",
            "it has log-probabilities that are not finite, and does not say so",
        ),
        ("receipts", "req43.0", "finish_reason = 'tired'", "it cannot be read: 'tired'"),
        ("receipts", "req29.0", "output_ids = x'0102030405060708'", "it was changed: its digest differs"),
        ("receipts", "req30.0", "output_ids = x'00'", "it has 1 tokens in 1 bytes of ids, 4"),
        ("receipts", "req1.0", "logprobs = x'00'", "it was deleted, and 1 bytes"),
        ("receipts", "req1.0", "turn_key = 'k'", "it was deleted, and the hash of its conversation is there"),
        ("receipts", "req33.0", "claimed_by = 'rep48'", "it is claimed by rep48, which does not reference it"),
        ("reports", "rep44", "body = replace(body, 'score', 'grade')", "its body is not the one"),
        ("reports", "rep5", "body = '{'", "its body cannot be read: "),
        ("reports", "rep44", "state = 'lost'", "its state lost is not one"),
        ("reports", "rep44", "reason = NULL", "it is dropped without a reason"),
        ("reports", "rep42", "reason = ''", "it is recorded without a reason"),
        ("reports", "rep49", "state = 'pending'", "it is pending (None), and its batch b7 is reserved"),
        ("reports", "rep49", "state = 'trained'", "it is trained (None), and its batch b7 is reserved"),
        ("reports", "rep5", "state = 'reserved'", "it is reserved (None), and its batch b1 is committed"),
        ("reports", "rep19", "reason = 'tied'", "it is dropped (tied), and its batch b3 is failed"),
        ("reports", "rep19", "reason = 'stale'", "it is dropped (stale), and its batch b3 is failed"),
        ("reports", "rep13", "reason = 'step_failed'", "it is dropped (step_failed), and its batch b2 is"),
        ("reports", "rep44", "reason = 'step_failed'", "it is dropped (step_failed), and its batch None"),
        ("reports", "rep40", "state = 'reserved'", "it is reserved (None), and its batch None is None"),
        ("reports", "rep5", "batch_id = NULL", "its batch is None, samples of it are in b1"),
        ("reports", "rep6", "batch_id = NULL, state = 'pending'", "its batch is None, samples of it are in b1"),
        ("reports", "rep5", "batch_id = 'b9'", "its batch is b9, samples of it are in b1"),
        ("reports", "rep40", "batch_id = 'b2'", "its batch is b2, samples of it are in none"),
        (
            "reports",
            "rep-told",
            "state = 'pending', reason = NULL",
            "it is pending, and its receipt req46.0 was deleted",
        ),
        (
            "reports",
            "rep5",
            """body = replace(body, '{', '{"feedback":"a text",')""",
            "its receipt req1.0 was deleted, and its feedback not",
        ),
        ("batches", "b5", "state = 'odd'", "its state odd is not one"),
        ("batches", "b5", "settings = '{'", "its settings or microbatches cannot be read: "),
        ("batches", "b5", "microbatches = '[0]'", "its settings or microbatches cannot be read: "),
        ("batches", "b5", "microbatches = '[[0],[0]]'", "its microbatches do not hold each of its 2"),
        ("batches", "b5", "microbatches = '[[0]]'", "its microbatches do not hold each of its 2"),
        ("batches", "b3", "attempt = 1", "it failed in attempt 1, expected 2"),
        ("batches", "b5", "release_id = 'r3'", "it is aborted, and has release r3"),
        ("releases", "r6", "number = 7", "its number is 7, expected 6"),
        ("releases", "r6", "parent = 'r2'", "its parent is r2, the link before it is r5"),
        ("releases", "r0", "parent = 'r6'", "its parent is r6, the link before it is None"),
        ("releases", "r0", "operation = 'train'", "the first link is not a base"),
        ("releases", "r3", "operation = 'base'", "its operation base cannot follow a link"),
        ("releases", "r6", "policy_version = 9", "its policy version and step are (9, 3), expected (3, 3)"),
        ("releases", "r6", "step = 2", "its policy version and step are (3, 2), expected (3, 3)"),
        ("releases", "r6", "source = 'r1'", "it is trained, and repeats r1"),
        ("releases", "r3", "source = NULL", "it repeats None, which is no earlier link"),
        ("releases", "r3", "source = 'r4'", "it repeats r4, which is no earlier link"),
        ("releases", "r3", "content_id = 'other'", "its content, policy version and step are not those of r1"),
        ("releases", "r3", "batch_id = 'b5'", "it repeats r1, and has batch b5"),
        ("releases", "r2", "state = 'lost'", "its state lost is not one"),
        ("releases", "r2", "state = 'pending'", "it is held, and is not the head"),
        ("releases", "r2", "state = 'quarantined'", "it is quarantined without a reason"),
        ("releases", "r6", "state = 'rejected'", "it is rejected without a reason"),
        ("releases", "r1", "num_deleted = 0", "it counts 0 deleted samples, 1 of its batch were"),
    ],
)
def test_a_row_that_was_changed_is_named_and_no_other(
    behind: Engine, table: str, id: str, change: str, fault: str
) -> None:
    with damaged(behind, f"UPDATE {table} SET {change} WHERE id = '{id}'") as connection:
        (finding,) = audit(connection)
    assert (f"{finding.kind}s", finding.subject) == (table.replace("batches", "batchs"), id)
    assert finding.message.startswith(fault)


@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        (
            "UPDATE requests SET prompt_ids = x'01020304' WHERE id = 'req43'",
            "receipt req43.0: its prompt is not the one that was asked",
        ),
        ("UPDATE requests SET tags = '7' WHERE id = 'req43'", "receipt req43.0: it cannot be read: "),
        ("UPDATE requests SET sampling = '{' WHERE id = 'req43'", "receipt req43.0: it cannot be read: "),
        (
            """UPDATE requests SET sampling = '{"max_tokens":8,"mood":1}' WHERE id = 'req43'""",
            "receipt req43.0: it cannot be read: ",
        ),
        ("""UPDATE requests SET tags = '{"a":"b"}' WHERE id = 'req43'""", "receipt req43.0: it was changed"),
        (
            "UPDATE requests SET parent = 'req0.0' WHERE id = 'req43'",
            "receipt req43.0: it continues req0.0, which is not there",
        ),
        (
            "UPDATE requests SET parent = 'req51.0' WHERE id = 'req43'",
            "receipt req43.0: it continues req51.0, which is not older",
        ),
        (
            "UPDATE requests SET parent = 'req43.0' WHERE id = 'req43'",
            "receipt req43.0: it continues req43.0, which is not older",
        ),
        (
            "UPDATE requests SET parent = 'req1.0' WHERE id = 'req43'",
            "receipt req43.0: it continues req1.0, which was deleted",
        ),
        (
            "UPDATE requests SET body = x'0000' WHERE id = 'req1'",
            "receipt req1.0: it was deleted, and 2 bytes of its content",
        ),
        ("UPDATE requests SET body = x'0000' WHERE id = 'req43'", "request req43: its body cannot be read: Error -3"),
        (
            "UPDATE report_receipts SET receipt_id = 'req35.0' WHERE report_id = 'rep36'",
            "report rep36: its body references other receipts",
        ),
        (
            "UPDATE receipts SET claimed_by = NULL WHERE id = 'req30.0'",
            "report rep40: it is pending, and its receipt req30.0 is claimed by None",
        ),
        (
            "UPDATE receipts SET claimed_by = NULL WHERE id = 'req47.0'",
            "report rep49: it is reserved, and its receipt req47.0 is claimed by",
        ),
        (
            "UPDATE receipts SET claimed_by = NULL WHERE id = 'req2.0'",
            "report rep6: it is trained, and its receipt req2.0 is claimed by None",
        ),
        (
            "INSERT INTO batch_samples VALUES ('b2', 4, 'rep6', 'req2.0', 'g', 1.0, 1, 4); "
            "UPDATE batches SET microbatches = '[[0],[1],[2],[3],[4]]' WHERE id = 'b2'",
            "report rep6: it was trained twice: in b1 and b2",
        ),
        (
            "UPDATE report_receipts SET receipt_id = 'req2.0' WHERE report_id = 'rep7'; "
            "UPDATE reports SET body = replace(body, 'req3.0', 'req2.0') WHERE id = 'rep7'; "
            "UPDATE reports SET digest = (SELECT digest_of(scenario, body)) WHERE id = 'rep7'; "
            "UPDATE receipts SET claimed_by = NULL WHERE id = 'req3.0'",
            "receipt req2.0: it was trained twice: two trained reports reference it",
        ),
        (
            "UPDATE batch_samples SET position = 5 WHERE batch_id = 'b5' AND position = 0",
            "batch b5: the positions of its 2 samples are not",
        ),
        ("DELETE FROM batch_samples WHERE batch_id = 'b5'", "batch b5: the positions of its 0 samples are not"),
        (
            "UPDATE batch_samples SET sample = 3 WHERE batch_id = 'b5' AND position = 1",
            "batch b5: its sequences are 0, 3, expected 0, 1, ...",
        ),
        ("UPDATE batch_samples SET sample = 0 WHERE batch_id = 'b5'", "batch b5: its sequence 0 is of several reports"),
        (
            "DROP INDEX batches_reserved; "
            "UPDATE batches SET state = 'reserved' WHERE id = 'b5'; "
            "DELETE FROM batch_samples WHERE batch_id = 'b5' AND position = 1; "
            "UPDATE batch_samples SET report_id = 'rep44', receipt_id = 'req43.0' WHERE batch_id = 'b5'; "
            "UPDATE batches SET microbatches = '[[0]]' WHERE id = 'b5'; "
            "UPDATE reports SET state = 'reserved', batch_id = 'b5' WHERE id = 'rep44'",
            "scenario arithmetic: it has more than one reserved batch",
        ),
        (
            "DELETE FROM evaluations; INSERT INTO evaluations VALUES (1, 'r9', '{}', 1)",
            "database sqlite: row 1 of evaluations names a row of releases",
        ),
    ],
)
def test_a_damage_is_named_and_nothing_else(behind: Engine, statement: str, finding: str) -> None:
    with damaged(behind, *statement.split("; ")) as connection:
        (named,) = audit(connection)
    assert str(named).startswith(finding)


@pytest.mark.parametrize(
    ("statement", "findings"),
    [
        (
            "UPDATE batches SET release_id = NULL WHERE id = 'b1'",
            {
                "release r1: its batch b1 is committed, with release None",
                "batch b1: it is committed, and its release None was made from batch None",
            },
        ),
        (
            "UPDATE releases SET batch_id = NULL WHERE id = 'r6'",
            {
                "release r6: its batch None is None, with release None",
                "batch b6: it is committed, and its release r6 was made from batch None",
            },
        ),
        (
            "UPDATE batches SET state = 'aborted', release_id = NULL WHERE id = 'b6'",
            {
                "release r6: its batch b6 is aborted, with release None",
                "report rep27: its batch is b6, samples of it are in none",
                "report rep28: its batch is b6, samples of it are in none",
            },
        ),
        (
            "UPDATE batches SET state = 'failed', attempt = 2 WHERE id = 'b7'",
            {
                "report rep49: it is reserved (None), and its batch b7 is failed",
                "report rep50: it is reserved (None), and its batch b7 is failed",
            },
        ),
        (
            "DELETE FROM receipts WHERE id = 'req50.0'; DELETE FROM receipts WHERE id = 'req48.0'",
            {
                "database sqlite: row 26 of report_receipts names a row of receipts that is not there",
                "database sqlite: row 18 of batch_samples names a row of receipts that is not there",
            },
        ),
    ],
)
def test_a_damage_of_what_belongs_together_is_named_on_each_side(
    behind: Engine, statement: str, findings: set[str]
) -> None:
    with damaged(behind, *statement.split("; ")) as connection:
        assert {str(item) for item in audit(connection)} == findings


def test_a_broken_page_is_a_finding_and_nothing_is_read_beyond_it(healthy: SqliteFile) -> None:
    (page,) = healthy.rows("SELECT rootpage FROM sqlite_master WHERE name = 'reports_group'")
    (size,) = healthy.rows("PRAGMA page_size")
    with healthy.copied() as copy:
        with copy.path.open("r+b") as file:
            file.seek((page[0] - 1) * size[0])
            file.write(b"\xff" * size[0])
        findings = found(copy)
    assert findings
    assert {finding.kind for finding in findings} == {"database"}


def test_receipts_of_a_ledger_without_a_chain_may_name_any_release(behind: Engine) -> None:
    only = ("reports", "report_receipts", "batch_samples", "batches", "releases")
    deletions = [f"DELETE FROM {table}" for table in only]
    with damaged(behind, *deletions, "UPDATE receipts SET claimed_by = NULL") as connection:
        assert list(audit(connection)) == []


def test_pages_are_followed_to_the_end(behind: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_module, "PAGE", 3)
    told: list[str] = []
    change = "UPDATE receipts SET digest = 'd' WHERE id IN ('req2.0', 'req47.0')"
    with damaged(behind, change) as connection:
        assert [item.subject for item in audit(connection, told.append)] == ["req2.0", "req47.0"]
    assert told[-1] == "receipt 28"


def test_an_older_ledger_is_not_read_and_not_migrated(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript((Path(__file__).parent / "data" / "schema-1.sql").read_text())
    before = path.read_bytes()
    with (
        pytest.raises(LedgerError, match="schema version 1, and 4 is needed to read it"),
        open_reading(f"sqlite:///{path}"),
    ):
        pass
    assert path.read_bytes() == before


def test_what_is_no_ledger_is_refused_and_nothing_is_made(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with pytest.raises(LedgerError, match=r"there is no ledger .*ledger\.db"), open_reading(f"sqlite:///{path}"):
        pass
    assert not path.exists()
    path.touch()
    with pytest.raises(LedgerError, match="holds no ledger yet"), open_reading(f"sqlite:///{path}"):
        pass
    path.write_text("not a database, and longer than a header of one hundred bytes: " + "x" * 100)
    with (
        pytest.raises(LedgerError, match=r"cannot read the ledger at .*not a database"),
        open_reading(f"sqlite:///{path}"),
    ):
        pass


def test_a_reader_cannot_write(healthy: SqliteFile) -> None:
    with pytest.raises(LedgerError, match="readonly"), open_reading(healthy.url) as connection:
        connection.exec_driver_sql("DELETE FROM evaluations")
