"""Who may open a ledger, and what an opening leaves behind."""

import contextlib
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reef.errors import ConfigError, LedgerError
from reef.ledger import batches, receipts, scenarios
from reef.ledger.audit import audit
from reef.ledger.ledger import Ledger, RunLock
from reef.ledger.reading import open_reading

HOLD = """
import pathlib, sys
from reef.ledger.ledger import RunLock
lock = RunLock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
"""


def test_a_ledger_keeps_its_run_id_and_what_it_holds_when_it_is_opened_again(book: Any) -> None:
    run_id = book.ledger.run_id
    assert re.fullmatch("[0-9a-f]{4}", run_id)
    book.reopen()
    assert book.ledger.run_id == run_id
    assert book.read(scenarios.training) == "arithmetic"


def test_who_opens_a_file_owns_it_with_a_new_epoch_each_time(sqlite_book: Any) -> None:
    assert (sqlite_book.ledger.epoch, sqlite_book.ledger.shared) == (1, False)
    sqlite_book.reopen()
    assert sqlite_book.ledger.epoch == 2


def test_a_second_owner_is_refused_with_the_pid_of_the_first_until_that_one_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(LedgerError, match=rf"{re.escape(str(tmp_path))} is in use by process {first.pid}$"):
            RunLock(tmp_path)
        first.kill()
        first.wait()
    lock = RunLock(tmp_path)
    assert (tmp_path / "owner.lock").read_text() == str(os.getpid())
    lock.release()
    RunLock(tmp_path).release()


def test_a_ledger_of_a_newer_version_is_refused_and_left_as_it_is(sqlite_book: Any) -> None:
    book, path = sqlite_book, sqlite_book.store.path
    book.graded(2)
    book.ledger.close()
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
        connection.execute("CREATE TABLE of_the_future (id INTEGER)")
    before, files = path.read_bytes(), sorted(path.name for path in path.parent.iterdir())
    with pytest.raises(LedgerError, match="schema version 99, this Reef knows versions up to 4"):
        Ledger.open(book.url)
    assert path.read_bytes() == before
    assert sorted(path.name for path in path.parent.iterdir()) == files


def test_a_database_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE meta (key TEXT, value TEXT)")
        connection.execute("INSERT INTO meta VALUES ('schema_version', 'three')")
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="schema version is 'three', expected a number"):
        Ledger.open(f"sqlite:///{path}")
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.write_text("not a database, and longer than a header of one hundred bytes: " + "x" * 100)
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="not a database"):
        Ledger.open(f"sqlite:///{path}")
    assert path.read_bytes() == before


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"cannot open the ledger at .*missing.*unable to open"):
        Ledger.open(f"sqlite:///{tmp_path / 'missing' / 'ledger.db'}")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("ledger.db", "something that is not a URL"),
        ("postgresql+psycopg://u:secret@host:port/x", "something that is not a URL"),
        ("postgresql://reef:hunter2@db/reef", r"postgresql://reef:\*\*\*@db/reef"),
        ("postgresql+psycopg://db/reef?user=reef&password=hunter2", "a password after the question mark"),
        ("sqlite://", "sqlite://"),
        ("sqlite:///:memory:", "sqlite:///"),
        ("sqlite+unknown:///ledger.db", r"sqlite\+unknown"),
    ],
)
def test_a_url_that_is_not_one_of_a_ledger_is_refused_without_its_password(url: str, shown: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"storage.url: expected sqlite:///PATH or postgresql.*, got {shown}"
    ) as refused:
        Ledger.open(url)
    assert "hunter2" not in refused.value.message


def test_a_process_that_dies_in_a_write_leaves_a_ledger_that_opens_with_what_was_acknowledged(tmp_path: Path) -> None:
    script = """
import asyncio, os, sys
from sqlalchemy import insert
from reef.ledger.ledger import Ledger
from reef.ledger.schema import meta
ledger = Ledger.open(sys.argv[1])
def note(connection, key, die=False):
    connection.execute(insert(meta).values(key=key, value="x" * 100_000))
    if die:
        os._exit(9)
async def run():
    for number in range(20):
        await ledger.write(note, f"note{number}")
        print(number, flush=True)
    await ledger.write(note, "note-unacknowledged", True)
asyncio.run(run())
"""
    path = tmp_path / "ledger.db"
    ended = subprocess.run([sys.executable, "-c", script, f"sqlite:///{path}"], capture_output=True, text=True)
    assert ended.returncode == 9, ended.stderr
    assert ended.stdout.split() == [str(number) for number in range(20)]
    ledger = Ledger.open(f"sqlite:///{path}")
    try:
        assert ledger.epoch == 2
    finally:
        ledger.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        found = connection.execute("SELECT key FROM meta WHERE key LIKE 'note%' ORDER BY rowid").fetchall()
    assert found == [(f"note{number}",) for number in range(20)]


def schema_of(path: Path) -> dict[str, list[Any]]:
    """Tables with their columns, and indices, however they were made."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        found = {
            name: sorted(
                (column, kind, notnull, str(default).strip("'"), key)
                for _, column, kind, notnull, default, key in connection.execute(f"PRAGMA table_info({name})")
            )
            for name in tables
        }
        indices = connection.execute("SELECT name, tbl_name, sql FROM sqlite_master WHERE type = 'index'").fetchall()
        found["indices"] = sorted((name, table, " ".join((sql or "").split())) for name, table, sql in indices)
    return found


def test_a_ledger_of_version_1_is_backed_up_and_brought_forward_with_all_it_holds(
    sqlite_book: Any, tmp_path: Path
) -> None:
    old = tmp_path / "old" / "ledger.db"
    old.parent.mkdir()
    script = (Path(__file__).parent / "data" / "schema-1.sql").read_text()
    with contextlib.closing(sqlite3.connect(old)) as connection:
        connection.executescript(script)
    Ledger.open(f"sqlite:///{old}").close()
    assert schema_of(old) == schema_of(sqlite_book.store.path)
    with contextlib.closing(sqlite3.connect(f"{old}.schema-1")) as connection:
        assert "\n".join(connection.iterdump()) + "\n" == script
    with contextlib.closing(sqlite3.connect(old)) as connection:
        assert connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone() == ("4",)
        assert connection.execute("SELECT id, releases FROM reports ORDER BY seq").fetchall() == [
            *((f"rep{number}", '["r0"]') for number in range(5, 9)),
            ("rep-note", '["r0"]'),
        ]
        assert connection.execute("SELECT id, state, source FROM releases").fetchall() == [
            ("r0", "released", None),
            ("r1", "released", None),
        ]


def test_a_ledger_of_version_2_keeps_its_digests_its_batches_and_what_it_waits_for(
    sqlite_book: Any, tmp_path: Path
) -> None:
    old = tmp_path / "old" / "ledger.db"
    old.parent.mkdir()
    script = (Path(__file__).parent / "data" / "schema-2.sql").read_text()
    with contextlib.closing(sqlite3.connect(old)) as connection:
        connection.executescript(script)
    Ledger.open(f"sqlite:///{old}").close()
    assert schema_of(old) == schema_of(sqlite_book.store.path)
    with contextlib.closing(sqlite3.connect(f"{old}.schema-2")) as connection:
        assert "\n".join(connection.iterdump()) + "\n" == script
    with open_reading(f"sqlite:///{old}") as connection:
        assert list(audit(connection)) == []
        found = receipts.get(connection, "req6.0")  # its digest is the one it was recorded with
        assert (found.parent, found.continued_by, found.turn_key) == ("req5.0", None, None)
        batch = batches.load(connection, "b2")  # each turn a sequence of its own, as it was reserved
        assert batch.microbatches == ((0,), (1,))
        assert [sample.tokens.tolist() for sample in batch.samples] == [[1, 2, 10], [1, 2, 10, 3, 11, 12]]
        assert [sample.mask.tolist() for sample in batch.samples] == [
            [False, False, True],
            [False, False, False, False, True, True],
        ]


def test_a_ledger_that_cannot_be_backed_up_is_not_migrated(tmp_path: Path) -> None:
    old = tmp_path / "ledger.db"
    with contextlib.closing(sqlite3.connect(old)) as connection:
        connection.executescript((Path(__file__).parent / "data" / "schema-1.sql").read_text())
    (tmp_path / "ledger.db.schema-1.partial").mkdir()
    with pytest.raises(LedgerError, match=r"is not migrated, since it cannot be backed up to .*ledger\.db\.schema-1"):
        Ledger.open(f"sqlite:///{old}")
    with contextlib.closing(sqlite3.connect(old)) as connection:
        assert connection.execute("SELECT value FROM meta WHERE key = 'schema_version'").fetchone() == ("1",)
        assert "deleted_at" not in [row[1] for row in connection.execute("PRAGMA table_info(requests)")]
