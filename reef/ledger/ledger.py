"""The ledger: what the services on it remember, and which of them owns it.

    ledger.write(reports.accept, report)         durable when it returns; any service
    ledger.write_together(receipts.record_all, completion)
                                                 the same, with what others write beside it in one call
    ledger.write_owned(batches.commit, ...)      durable too; refused where this service is not the owner
    ledger.read(releases.chain, "arithmetic")    a snapshot, never blocks a write

SQLite: one run directory, one service, the owner. PostgreSQL: several services (`shared`), and `lease` says which owns.
What can be written and read is in the files beside this one, one per noun; each function takes a connection first.
"""

import asyncio
import fcntl
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import URL, Connection, Engine, insert, select, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from reef.errors import ConfigError, LedgerError, OwnershipLostError
from reef.ledger.database import POSTGRES, READERS, alone, meaning, postgres, sqlite
from reef.ledger.lease import Lease, SharedLease
from reef.ledger.migrations import migrate
from reef.ledger.schema import meta
from reef.ledger.writer import Writer

P = ParamSpec("P")
T = TypeVar("T")
Item = TypeVar("Item")


class RunLock:
    """One run directory, one owner: an exclusive lock that the kernel drops when the owner dies, however it dies."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "owner.lock"
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise LedgerError(f"cannot lock {self._path}: {error.strerror}") from None
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

    def __init__(self, writing: Engine, reading: Engine, lease: Lease, run_id: str, max_pending: int) -> None:
        self.lease = lease
        self.run_id = run_id  # 4 hex digits, so that releases of two run directories never share a name
        self.shared = writing.dialect.name != "sqlite"  # whether several services can be on it
        self._writing = writing
        self._reading = reading
        self._writer = Writer(writing, max_pending)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="ledger-reader")

    @classmethod
    def open(cls, url: str, max_pending: int = 4096, lease_timeout_s: float = 10.0) -> "Ledger":
        """Open or create the ledger at `url` and migrate it.

        SQLite: this service becomes its owner (a new epoch). PostgreSQL: nobody does; see `lease`.

        Raises:
            ConfigError: `url` is not one of a ledger.
            LedgerError: it cannot be opened, or a newer version wrote it.
        """
        parsed = check_url(url)
        try:
            if parsed.drivername == POSTGRES:
                return cls._open_postgres(parsed, max_pending, lease_timeout_s)
            return cls._open_sqlite(parsed, max_pending)
        except SQLAlchemyError as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            where = parsed.set(query={}).render_as_string(hide_password=True)
            raise LedgerError(f"cannot open the ledger at {where}: {cause}") from None

    @classmethod
    def _open_sqlite(cls, url: URL, max_pending: int) -> "Ledger":
        writing = sqlite(url, read_only=False)
        try:
            run_id, epoch = _set_up(writing)
            with writing.begin() as connection:
                connection.execute(update(meta).where(meta.c.key == "epoch").values(value=str(epoch + 1)))
        except Exception:
            writing.dispose()
            raise
        return cls(writing, sqlite(url, read_only=True), Lease(epoch + 1), run_id, max_pending)

    @classmethod
    def _open_postgres(cls, url: URL, max_pending: int, lease_timeout_s: float) -> "Ledger":
        opening = postgres(url, num_connections=2, patient=True)  # one that holds the others off, one that works
        try:
            run_id, _ = _set_up(opening)
        finally:
            opening.dispose()
        writing = postgres(url, num_connections=2)  # the writer's and the lease's
        reading = postgres(url, num_connections=READERS, read_only=True)
        return cls(writing, reading, SharedLease(writing, lease_timeout_s), run_id, max_pending)

    @property
    def epoch(self) -> int:
        """The number of this service's ownership; 0 where it is not the owner."""
        return self.lease.epoch

    @property
    def error(self) -> str | None:
        """Why the last write was refused (full, locked, gone); None while writes succeed."""
        return self._writer.error

    async def write(self, op: Callable[Concatenate[Connection, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `op(connection, *args)` in a group-committed transaction; durable when this returns.

        `op` may run more than once, and only the run that is committed counts: where an op of its group raises, or
        another service has stored a row of the same key meanwhile.

        Raises:
            UnavailableError: too many writes wait, or the database is locked, full or gone.
            LedgerError: the database is damaged.
            OwnershipLostError: SQLite, and another process has opened the ledger since.
        """
        epoch = None if self.shared else self.lease.epoch
        return await self._writer.write(lambda connection: op(connection, *args, **kwargs), epoch)

    async def write_together(self, op: Callable[[Connection, Sequence[Item]], None], item: Item, /) -> None:
        """`write` of `op(connection, items)`, which stores many items at once: those that wait beside this one too.

        Raises what `write` raises, and what `op` raises for this item alone.
        """
        await self._writer.write_together(op, item, None if self.shared else self.lease.epoch)

    async def write_owned(self, op: Callable[Concatenate[Connection, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """`write`, for what only the owner may write: that this service still is it is checked with the commit.

        Raises:
            OwnershipLostError: another service is the owner, or none; `op` has not run.
        """
        if not (epoch := self.lease.epoch):
            raise OwnershipLostError("this service does not own the ledger")
        return await self._writer.write(lambda connection: op(connection, *args, **kwargs), epoch)

    async def read(self, op: Callable[Concatenate[Connection, P], T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `op(connection, *args)` over a consistent snapshot, in a thread.

        Raises:
            UnavailableError: the database is locked or gone.
            LedgerError: the database is damaged.
        """

        def work() -> T:
            try:
                with self._reading.begin() as connection:
                    return op(connection, *args, **kwargs)
            except DBAPIError as error:
                raise meaning(error) from error

        return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    def close(self) -> None:
        """Commit what waits and close every connection."""
        self._writer.close()
        self._readers.shutdown()
        self.lease.close()
        self._reading.dispose()
        self._writing.dispose()


def check_url(url: str) -> URL:
    """Raises ConfigError for anything but a SQLite file or a PostgreSQL server; no message holds a password."""
    expected = "storage.url: expected sqlite:///PATH or postgresql+psycopg://USER:PASSWORD@HOST/DATABASE"
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # ValueError: of a port that is no number
        raise ConfigError(f"{expected}, got something that is not a URL") from None
    if "password" in parsed.query:
        raise ConfigError(f"{expected}, got a password after the question mark, where it would be shown")
    if parsed.drivername == POSTGRES:
        if find_spec("psycopg") is None:
            raise ConfigError("storage.url: PostgreSQL needs psycopg: pip install 'reef[postgres]'")
    elif parsed.drivername != "sqlite" or parsed.database in (None, "", ":memory:"):
        raise ConfigError(f"{expected}, got {parsed.render_as_string(hide_password=True)}")
    return parsed


def _set_up(engine: Engine) -> tuple[str, int]:
    """Schema and identity, made by whichever service comes first. The run's id, and the epoch so far."""
    with alone(engine, "reef: set up"):
        migrate(engine)
        with engine.begin() as connection:
            return _get_or_set(connection, "run_id", secrets.token_hex(2)), int(_get_or_set(connection, "epoch", "0"))


def _get_or_set(connection: Connection, key: str, default: str) -> str:
    value = connection.scalar(select(meta.c.value).where(meta.c.key == key))
    if value is None:
        connection.execute(insert(meta).values(key=key, value=default))
    return value or default
