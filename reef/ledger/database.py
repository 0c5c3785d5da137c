"""The two databases a ledger can lie in: how each is connected to, and what its errors mean.

SQLite: one file, one writing service. PostgreSQL: any number of services at once; what must not happen twice at one
time waits on a row, on a unique key or on `lock`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import URL, Connection, Engine, Select, create_engine, event, func, select
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, InterfaceError, NotSupportedError, ProgrammingError

from reef.errors import BadRequestError, LedgerError, ReefError, UnavailableError

READERS = 4  # threads, and connections, that read at once
BUSY_TIMEOUT_S = 5  # how long a statement waits for another process's lock, or for a server that does not answer
LOCK_WAIT_S = 0.2  # how long a group of writes waits for another service's; one that waits longer does so alone
POSTGRES = "postgresql+psycopg"
_DAMAGED = (11, 26, "XX001", "XX002")  # SQLITE_CORRUPT, SQLITE_NOTADB; data_corrupted, index_corrupted
_CONTENTION = ("40001", "40P01", "55P03")  # serialization_failure, deadlock_detected, lock_not_available
_UNIQUE = "23505"


class OvertakenError(UnavailableError):
    """Another service was first: the op is to run again, and to see what that one has stored."""


def sqlite(url: URL, read_only: bool) -> Engine:
    """WAL, synchronous=FULL: a commit is on the disk when it returns, and readers never wait for it."""
    engine = create_engine(url, pool_size=READERS, max_overflow=0, connect_args={"check_same_thread": False})

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # SQLAlchemy's own BEGIN below, so that savepoints work
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={int(BUSY_TIMEOUT_S * 1000)}")
        cursor.execute("PRAGMA foreign_keys=ON")
        if read_only:
            cursor.execute("PRAGMA query_only=ON")
        else:
            cursor.execute("PRAGMA journal_mode=WAL")
            cursor.execute("PRAGMA synchronous=FULL")
            cursor.execute("PRAGMA secure_delete=ON")  # what is deleted is overwritten, not only let go of
        cursor.close()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


def postgres(url: URL, num_connections: int, read_only: bool = False, patient: bool = False) -> Engine:
    """A commit is on the server's disk when it returns; a read sees one moment. A server that has gone is noticed.

    `patient`: statements may take as long as they take, as changes of the schema do.
    """
    settings = {"synchronous_commit": "on"}
    if not patient:
        # The last one frees what a service holds that hangs, or is cut off, inside a transaction.
        limits = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
        settings.update(dict.fromkeys(limits, _milliseconds(BUSY_TIMEOUT_S)))
        if not read_only:
            settings["lock_timeout"] = _milliseconds(LOCK_WAIT_S)
    if read_only:
        settings.update(default_transaction_isolation="repeatable read", default_transaction_read_only="on")
    network = {
        "connect_timeout": int(BUSY_TIMEOUT_S),
        "keepalives_idle": 5,
        "keepalives_interval": 2,
        "keepalives_count": 3,
        "tcp_user_timeout": _milliseconds(BUSY_TIMEOUT_S),
        "application_name": "reef",
    }
    engine = create_engine(
        url,
        pool_size=num_connections,
        max_overflow=0,
        pool_pre_ping=True,  # a server that was restarted meanwhile costs nobody an error
        connect_args={**network, **url.query},
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _record: Any) -> None:
        with connection.cursor() as cursor:
            for name, value in settings.items():
                cursor.execute("SELECT set_config(%s, %s, false)", (name, value))
        connection.commit()

    return engine


def lock(connection: Connection, name: str) -> None:
    """Wait until no other transaction holds `name`, then hold it to the end of this one.

    SQLite: nothing, since there is one writer.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(name, 0))))


def wait_longer(connection: Connection) -> None:
    """For another service's locks, in this transaction: BUSY_TIMEOUT_S. SQLite: nothing, it waits as long anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.set_config("lock_timeout", _milliseconds(BUSY_TIMEOUT_S), True)))


def hold_rows(connection: Connection, query: Select[Any]) -> None:
    """Keep other transactions from changing the rows that `query` finds, to the end of this one.

    SQLite: nothing, since there is one writer.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(query.with_for_update(key_share=True))


@contextmanager
def alone(engine: Engine, name: str) -> Iterator[None]:
    """No other service is inside at the same time. SQLite: nothing, since the run directory's lock says it."""
    if engine.dialect.name == "sqlite":
        yield
        return
    with engine.begin() as connection:
        lock(connection, name)
        yield


def meaning(error: DBAPIError) -> ReefError:
    """What a database's error means to the caller: damage, a value that cannot be stored, a refused row, or not now."""
    code = _code(error)
    if code in _DAMAGED:
        return LedgerError(f"the ledger is damaged, `reef doctor --ledger` says how far: {error.orig}", code="damaged")
    if is_about_the_database(error) or is_contention(error):
        return UnavailableError(f"the ledger cannot be used now: {error.orig}", retry_after_s=1)
    if isinstance(error, DataError):
        return BadRequestError(f"a value cannot be stored in the ledger: {error.orig}")
    return ReefError(f"a row was refused by the ledger: {error.orig}")


def is_about_the_database(error: DBAPIError) -> bool:
    """Full, locked, read-only, damaged or gone: no op of the transaction can succeed. (A refused row is its own.)"""
    refused = IntegrityError | DataError | ProgrammingError | InterfaceError | NotSupportedError
    if is_contention(error):
        return False
    return error.connection_invalidated or _code(error) in _DAMAGED or not isinstance(error, refused)


def is_taken(error: DBAPIError) -> bool:
    """PostgreSQL: another service has stored a row of the same key meanwhile; a second look finds it."""
    return _code(error) == _UNIQUE


def is_contention(error: DBAPIError) -> bool:
    """PostgreSQL: another service holds what this op needs, and may wait for what its transaction holds."""
    return _code(error) in _CONTENTION


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))


def _code(error: DBAPIError) -> int | str | None:
    """SQLite's primary result code, or PostgreSQL's SQLSTATE; None where the driver itself refused."""
    # By attribute: psycopg need not be installed, and sqlite3 gives no code where it did not ask SQLite.
    if (code := getattr(error.orig, "sqlite_errorcode", None)) is not None:
        return int(code) & 0xFF
    state: str | None = getattr(error.orig, "sqlstate", None)
    return state
