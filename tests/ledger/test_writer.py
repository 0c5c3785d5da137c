"""Group commit: what is acknowledged is on disk, what fails fails alone, and a sick database loses nothing."""

import asyncio
import contextlib
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, insert, text

from reef.errors import ConflictError, LedgerError, OwnershipLostError, ReefError, UnavailableError
from reef.ledger import database, receipts, scenarios
from reef.ledger.ledger import Ledger
from reef.ledger.schema import meta
from reef.ledger.writer import MAX_GROUP

HOLD_THE_LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.readline()
connection.execute("COMMIT")
print("let go", flush=True)
"""


def note(connection: Connection, key: str, value: str = "x") -> str:
    connection.execute(insert(meta).values(key=key, value=value))
    return key


def notes(book: Any) -> set[str]:
    return {key for (key,) in book.rows("SELECT key FROM meta WHERE key LIKE 'note%'")}


class Gate:
    """An op that holds the writer's thread inside its transaction, so that the writes behind it form one group."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.leave = threading.Event()

    def __call__(self, connection: Connection) -> None:
        self.entered.set()
        assert self.leave.wait(30)


@contextlib.contextmanager
def counted_commits() -> Iterator[list[int]]:
    counts: list[int] = []

    def count(_connection: Connection) -> None:
        counts.append(1)

    event.listen(Engine, "commit", count)
    try:
        yield counts
    finally:
        event.remove(Engine, "commit", count)


def together(book: Any, *ops: Callable[..., Any]) -> list[Any]:
    """Runs ops in one group; their results, or what they raised."""

    async def run() -> list[Any]:
        gate = Gate()
        first = asyncio.create_task(book.ledger.write(gate))
        await asyncio.to_thread(gate.entered.wait)
        rest = [asyncio.create_task(book.ledger.write(op)) for op in ops]
        await asyncio.sleep(0)
        gate.leave.set()
        await first
        return await asyncio.gather(*rest, return_exceptions=True)

    return asyncio.run(run())


def test_many_writes_at_once_share_few_transactions_and_all_are_on_disk(book: Any) -> None:
    keys = [f"note{number}" for number in range(MAX_GROUP + 50)]
    with counted_commits() as commits:
        answers = together(book, *(lambda connection, key=key: note(connection, key) for key in keys))
    assert answers == keys
    assert notes(book) == set(keys)
    assert len(commits) == 3  # the gate's, a full group, the 50 that were left


def test_each_caller_gets_the_result_of_its_own_write(book: Any) -> None:
    async def run() -> list[str]:
        writes = [book.ledger.write(note, f"note{number}") for number in range(200)]
        return list(await asyncio.gather(*writes))

    assert asyncio.run(run()) == [f"note{number}" for number in range(200)]
    assert len(notes(book)) == 200


def test_a_write_is_visible_to_another_connection_when_it_returns(book: Any) -> None:
    book.write(note, "note")
    assert notes(book) == {"note"}


def test_a_commit_is_on_the_disk_when_it_returns(sqlite_book: Any) -> None:
    assert sqlite_book.rows("PRAGMA journal_mode") == [("wal",)]
    assert sqlite_book.write(lambda connection: connection.exec_driver_sql("PRAGMA synchronous").scalar_one()) == 2


def test_a_write_that_raises_undoes_itself_and_not_its_neighbours(book: Any) -> None:
    def half_done(connection: Connection) -> None:
        note(connection, "note-half")
        raise ConflictError("no")

    def a_bug(connection: Connection) -> None:
        note(connection, "note-bug")
        raise ZeroDivisionError

    answers = together(
        book, lambda c: note(c, "note1"), half_done, lambda c: note(c, "note2"), a_bug, lambda c: note(c, "note3")
    )
    assert [answer for answer in answers if isinstance(answer, str)] == ["note1", "note2", "note3"]
    assert isinstance(answers[1], ConflictError)
    assert isinstance(answers[3], ZeroDivisionError)
    assert notes(book) == {"note1", "note2", "note3"}


@pytest.mark.parametrize(
    "refused",
    [
        lambda connection: note(connection, "note1"),  # the key is there: an integrity error
        lambda connection: connection.execute(text("INSERT INTO meta VALUES ('note9', :v)"), {"v": object()}),
    ],
    ids=["a key that exists", "a value that cannot be bound"],
)
def test_a_row_that_is_refused_fails_its_own_write_only(book: Any, refused: Callable[[Connection], Any]) -> None:
    answers = together(book, lambda c: note(c, "note1"), refused, lambda c: note(c, "note2"))
    assert isinstance(answers[1], ReefError)
    assert answers[1].status == 500
    assert "refused" in answers[1].message
    assert notes(book) == {"note1", "note2"}


def test_a_write_that_breaks_its_transaction_fails_its_group_and_later_writes_go_on(book: Any) -> None:
    def misbehaving(connection: Connection) -> None:
        note(connection, "note-lost")
        connection.close()

    answers = together(book, lambda c: note(c, "note1"), misbehaving)
    assert all(isinstance(answer, Exception) for answer in answers)
    assert book.write(note, "note2") == "note2"
    assert notes(book) == {"note2"}


def test_a_caller_that_goes_away_does_not_undo_its_write(book: Any) -> None:
    async def run() -> None:
        gate = Gate()
        first = asyncio.create_task(book.ledger.write(gate))
        await asyncio.to_thread(gate.entered.wait)
        leaving = asyncio.create_task(book.ledger.write(note, "note"))
        await asyncio.sleep(0)
        leaving.cancel()
        gate.leave.set()
        await first
        with pytest.raises(asyncio.CancelledError):
            await leaving
        await book.ledger.write(lambda connection: None)

    asyncio.run(run())
    assert notes(book) == {"note"}


def test_more_waiting_writes_than_the_bound_are_refused_and_the_others_stored(open_book: Any) -> None:
    book = open_book(max_pending=4)

    async def run() -> None:
        gate = Gate()
        first = asyncio.create_task(book.ledger.write(gate))
        await asyncio.to_thread(gate.entered.wait)
        waiting = [asyncio.create_task(book.ledger.write(note, f"note{number}")) for number in range(4)]
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="4 writes are waiting") as refused:
            await book.ledger.write(note, "note-too-many")
        assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
        gate.leave.set()
        await asyncio.gather(first, *waiting)
        await book.ledger.write(note, "note-later")

    asyncio.run(run())
    assert notes(book) == {"note0", "note1", "note2", "note3", "note-later"}


def test_closing_commits_what_waits_and_refuses_what_comes_later(make_store: Any) -> None:
    store = make_store()
    ledger = Ledger.open(store.url)

    async def run() -> None:
        writes = [asyncio.create_task(ledger.write(note, f"note{number}")) for number in range(500)]
        await asyncio.sleep(0)
        ledger.close()
        await asyncio.gather(*writes)
        with pytest.raises(UnavailableError, match="closed"):
            await ledger.write(note, "note-late")

    asyncio.run(run())
    assert store.rows("SELECT count(*) FROM meta WHERE key LIKE 'note%'") == [(500,)]


def test_a_database_locked_by_another_process_is_a_503_that_passes(
    sqlite_book: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.2)
    book = sqlite_book
    book.reopen()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD_THE_LOCK, str(book.store.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == "held\n"
            with pytest.raises(UnavailableError, match="locked") as locked:
                book.write(note, "note-locked")
            assert (locked.value.status, locked.value.retry_after_s) == (503, 1)
            assert [scenario.name for scenario in book.read(scenarios.all_of)] == ["arithmetic"]  # reads go on
        finally:
            other.stdin.write("go\n")
            other.stdin.flush()
            assert other.stdout.readline() == "let go\n"
    book.write(note, "note-after")
    assert notes(book) == {"note-after"}


def test_a_full_database_fails_the_whole_group_and_takes_writes_again_once_there_is_room(sqlite_book: Any) -> None:
    book = sqlite_book

    def bound(connection: Connection, pages: int | None) -> None:
        used = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        connection.exec_driver_sql(f"PRAGMA max_page_count={pages or used + 2}")

    book.write(bound, None)
    before = book.dump()
    answers = together(book, lambda c: note(c, "note1"), lambda c: note(c, "note2", "x" * 500_000))
    for answer in answers:
        assert isinstance(answer, UnavailableError)
        assert (answer.status, answer.retry_after_s) == (503, 1)
        assert "full" in answer.message
    assert book.dump() == before
    book.write(bound, 1_000_000)
    assert together(book, lambda c: note(c, "note1"), lambda c: note(c, "note2", "x" * 500_000)) == ["note1", "note2"]
    assert book.rows("PRAGMA integrity_check") == [("ok",)]


def test_a_disk_that_takes_no_more_bytes_is_a_503_and_nothing_is_half_written(sqlite_book: Any) -> None:
    book = sqlite_book
    before = book.dump()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = Path(f"{book.store.path}-wal").stat().st_size + 40_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        request = book.request(range(50_000), body=os.urandom(200_000))
        made = book.made(request, book.generation([7, 2]))
        with pytest.raises(UnavailableError, match=r"disk|full") as refused:
            book.write(receipts.record, request, made)
        assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
        assert book.dump() == before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    book.write(receipts.record, request, made)
    assert book.read(receipts.get, made[0].id).digest == made[0].digest
    assert book.rows("PRAGMA integrity_check") == [("ok",)]


def test_a_damaged_file_is_said_to_be_damaged_by_reads_and_writes(sqlite_book: Any) -> None:
    book = sqlite_book
    receipt = book.complete([1], [2])
    (page,) = book.rows("SELECT rootpage FROM sqlite_master WHERE name = 'receipts'")[0]
    (size,) = book.rows("PRAGMA page_size")[0]
    book.ledger.close()
    with book.store.path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    book.ledger = Ledger.open(book.url)
    for use in (lambda: book.read(receipts.get, receipt.id), lambda: book.accept(receipt.id)):
        with pytest.raises(LedgerError, match="the ledger is damaged, `reef doctor --ledger`") as refused:
            use()
        assert (refused.value.status, refused.value.code, refused.value.retry_after_s) == (500, "damaged", None)
    assert book.write(note, "note") == "note"  # elsewhere it still works


def test_an_owner_whose_ledger_was_taken_over_writes_nothing_more(sqlite_book: Any) -> None:
    book = sqlite_book
    newer = Ledger.open(book.url)
    try:
        with pytest.raises(OwnershipLostError, match=r"epoch 1, .*epoch 2"):
            book.write(note, "note-old")
        with pytest.raises(OwnershipLostError, match=r"epoch 1, .*epoch 2"):
            asyncio.run(book.ledger.write_owned(note, "note-old"))
        asyncio.run(newer.write(note, "note-new"))
    finally:
        newer.close()
    assert notes(book) == {"note-new"}


def test_reads_see_one_moment_though_writes_go_on(book: Any) -> None:
    inside, written = threading.Event(), threading.Event()

    def twice(connection: Connection) -> tuple[int, int]:
        count = text("SELECT count(*) FROM meta WHERE key LIKE 'note%'")
        first = connection.execute(count).scalar_one()
        inside.set()
        assert written.wait(30)
        return first, connection.execute(count).scalar_one()

    async def run() -> tuple[int, int]:
        reading = asyncio.create_task(book.ledger.read(twice))
        await asyncio.to_thread(inside.wait)
        await book.ledger.write(note, "note")
        written.set()
        return await reading

    assert asyncio.run(run()) == (0, 0)
    assert notes(book) == {"note"}


def test_a_read_cannot_write(book: Any) -> None:
    with pytest.raises(UnavailableError, match=r"read-?only"):
        book.read(note, "note")
    assert notes(book) == set()


# --- writes that share a call -----------------------------------------------------------------------------------------


def completion(book: Any, prompt: list[int], **changes: Any) -> receipts.Completion:
    request = book.request(prompt, **changes)
    return request, book.made(request, book.generation([7, 8]), book.generation([2]))


def beside_one_another(book: Any, op: Callable[..., None], items: list[Any], between: Any = None) -> list[Any]:
    """`write_together` of all items in one group, `between` after the first two; what each returned or raised."""

    async def run() -> list[Any]:
        gate = Gate()
        first = asyncio.create_task(book.ledger.write(gate))
        await asyncio.to_thread(gate.entered.wait)
        writes = [book.ledger.write_together(op, item) for item in items]
        if between is not None:
            writes.insert(2, book.ledger.write(between))
        tasks = [asyncio.create_task(write) for write in writes]
        await asyncio.sleep(0)
        gate.leave.set()
        await first
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(run())


def test_neighbours_of_one_kind_share_one_call(book: Any) -> None:
    calls: list[list[str]] = []

    def note_all(connection: Connection, keys: list[str]) -> None:
        calls.append(list(keys))
        for key in keys:
            note(connection, key)

    keys = [f"note{number}" for number in range(6)]
    assert beside_one_another(book, note_all, keys) == [None] * 6
    assert calls == [keys]
    assert notes(book) == set(keys)


def test_a_write_between_them_keeps_its_place(book: Any) -> None:
    order: list[str] = []

    def note_all(connection: Connection, keys: list[str]) -> None:
        order.extend(keys)
        for key in keys:
            note(connection, key)

    def other(connection: Connection) -> str:
        order.append("note-other")
        return note(connection, "note-other")

    answers = beside_one_another(book, note_all, ["note1", "note2", "note3"], between=other)
    assert answers == [None, None, "note-other", None]
    assert order == ["note1", "note2", "note-other", "note3"]


def test_one_of_many_that_raises_fails_alone(book: Any) -> None:
    def note_all(connection: Connection, keys: list[str]) -> None:
        for key in keys:
            note(connection, key)
            if key == "note2":
                raise ConflictError("no")

    answers = beside_one_another(book, note_all, ["note1", "note2", "note3", "note3"])
    assert isinstance(answers[1], ConflictError)
    assert isinstance(answers[3], ReefError)  # its key is there
    assert [answers[0], answers[2]] == [None, None]
    assert notes(book) == {"note1", "note3"}


def test_completions_that_share_a_call_are_each_stored_whole(book: Any) -> None:
    completions = [completion(book, [1, 2, number]) for number in range(70)]
    beside_one_another(book, receipts.record_all, completions)
    for request, made in completions:
        stored = book.read(receipts.get, made[0].id)
        assert stored.digest == made[0].digest == receipts.compute_digest(stored)
        assert stored.request_id == request.id


def test_a_turn_in_the_same_group_as_the_one_it_continues_is_stored(book: Any) -> None:
    first, made = completion(book, [1, 2, 3])
    ids = [*first.prompt_ids.tolist(), *made[0].generation.output_ids.tolist(), 9]
    second, continued = completion(book, ids, parent=made[0].id)
    assert beside_one_another(book, receipts.record_all, [(first, made), (second, continued)]) == [None, None]
    assert book.read(receipts.get, continued[0].id).prompt_ids.tolist() == ids
