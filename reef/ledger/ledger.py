"""The ledger: one run directory's memory, opened by one owner.

    ledger.write(receipts.record, receipt)    durable when it returns
    ledger.read(releases.chain, "arithmetic")  a snapshot, never blocks a write

What can be written and read is in the files beside this one, one per noun; each function takes a connection first.
"""

import asyncio
import fcntl
import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event, insert, select, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from reef.errors import ConfigError, LedgerError, UnavailableError
from reef.ledger.migrations import migrate
from reef.ledger.schema import meta
from reef.ledger.writer import Writer

P = ParamSpec("P")
T = TypeVar("T")
READERS = 4  # threads, and connections, that read at once
BUSY_TIMEOUT_S = 5  # how long SQLite waits for another process's lock


class RunLock:
    """One run directory, one owner: an exclusive lock that the kernel drops when the owner dies, however it dies."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "owner.lock"
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            os.close(self._fd)
            owner = f"process {pid}" if pid else "another process"
            raise LedgerError(f"the run directory {run_dir} is in use by {owner}") from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        os.ftruncate(self._fd, 0)
        os.close(self._fd)


class Ledger:
    """Group-committed writes and concurrent reads over SQLAlchemy. Made by `open`."""

    def __init__(self, writing: Engine, reading: Engine, epoch: int, run_id: str, max_pending: int) -> None:
        self.epoch = epoch
        self.run_id = run_id  # 4 hex digits, so that releases of two run directories never share a name
        self._writing = writing
        self._reading = reading
        self._writer = Writer(writing, epoch, max_pending)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="ledger-reader")

    @classmethod
    def open(cls, url: str, max_pending: int = 4096) -> "Ledger":
        """Open or create the ledger at `url`, migrate it, and become its owner (a new epoch).

        Raises:
            ConfigError: `url` is not one of a ledger.
            LedgerError: it cannot be opened, or a newer version wrote it.
        """
        check_url(url)
        writing = _sqlite(url, read_only=False)
        try:
            migrate(writing)
            with writing.begin() as connection:
                epoch = int(_get_or_set(connection, "epoch", "0")) + 1
                connection.execute(update(meta).where(meta.c.key == "epoch").values(value=str(epoch)))
                run_id = _get_or_set(connection, "run_id", secrets.token_hex(2))
        except SQLAlchemyError as error:
            writing.dispose()
            raise LedgerError(f"cannot open the ledger at {url}: {getattr(error, 'orig', None) or error}") from None
        except LedgerError:
            writing.dispose()
            raise
        return cls(writing, _sqlite(url, read_only=True), epoch, run_id, max_pending)

    @property
    def error(self) -> str | None:
        """Why the last write was refused (full, locked); None while writes succeed."""
        return self._writer.error

    async def write(self, op: Callable[Concatenate[Connection, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `op(connection, *args)` in a group-committed transaction; durable when this returns."""
        return await self._writer.write(lambda connection: op(connection, *args, **kwargs))

    async def read(self, op: Callable[Concatenate[Connection, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `op(connection, *args)` over a consistent snapshot, in a thread."""

        def work() -> T:
            try:
                with self._reading.begin() as connection:
                    return op(connection, *args, **kwargs)
            except DBAPIError as error:
                raise UnavailableError(f"the ledger cannot be read now: {error.orig}", retry_after_s=1) from error

        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    def close(self) -> None:
        """Commit what waits and close every connection."""
        self._writer.close()
        self._readers.shutdown()
        self._reading.dispose()
        self._writing.dispose()


def check_url(url: str) -> None:
    """Raises ConfigError for anything but a SQLite file."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ConfigError("storage.url: expected sqlite:///PATH, got something that is not a URL") from None
    if parsed.drivername != "sqlite" or parsed.database in (None, "", ":memory:"):
        raise ConfigError(f"storage.url: expected sqlite:///PATH, got {parsed.render_as_string(hide_password=True)}")


def _get_or_set(connection: Connection, key: str, default: str) -> str:
    value = connection.scalar(select(meta.c.value).where(meta.c.key == key))
    if value is None:
        connection.execute(insert(meta).values(key=key, value=default))
    return value or default


def _sqlite(url: str, read_only: bool) -> Engine:
    """WAL, synchronous=FULL: a commit is on the disk when it returns, and readers never wait for it."""
    engine = create_engine(url, pool_size=READERS, max_overflow=0, connect_args={"check_same_thread": False})

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # SQLAlchemy's own BEGIN below, so that savepoints work
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_S * 1000}")
        cursor.execute("PRAGMA foreign_keys=ON")
        if read_only:
            cursor.execute("PRAGMA query_only=ON")
        else:
            cursor.execute("PRAGMA journal_mode=WAL")
            cursor.execute("PRAGMA synchronous=FULL")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine
