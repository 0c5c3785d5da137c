"""Group commit: one thread, one transaction for all the writes that wait.

    write(op) -> queue -> [BEGIN; op; op; ...; COMMIT + fsync] -> results

A caller gets its result only after the commit that holds it is durable. An op that raises undoes itself alone
(each runs in a savepoint); a commit that fails fails all of its ops, and nothing of them is stored.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, select
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, InterfaceError, NotSupportedError, ProgrammingError

from reef.errors import OwnershipLostError, ReefError, UnavailableError
from reef.ledger.schema import meta

T = TypeVar("T")
MAX_GROUP = 256  # ops in one transaction: bounds how long the first of them waits


@dataclass(slots=True, eq=False)
class _Write:
    op: Callable[[Connection], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    result: Any = None
    error: BaseException | None = None


class Writer:
    """The only writer of a ledger. `epoch` is checked in every transaction: a newer owner ends this one."""

    def __init__(self, engine: Engine, epoch: int, max_pending: int) -> None:
        self._engine = engine
        self._epoch = str(epoch)
        self._queue: queue.Queue[_Write | None] = queue.Queue(maxsize=max_pending)
        self._closed = False
        self.error: str | None = None  # why the last commit was refused; None once one succeeds
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()

    async def write(self, op: Callable[[Connection], T]) -> T:
        """Run `op` in the next transaction and return its result once that is durable.

        Raises:
            UnavailableError: the queue is full, or the database is locked, full or gone; nothing was stored.
            ReefError: whatever `op` raised; nothing of it was stored.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if self._closed:
            raise UnavailableError("the ledger is closed: the service is stopping", retry_after_s=1)
        try:
            self._queue.put_nowait(_Write(op, future, loop))
        except queue.Full:
            raise UnavailableError(
                f"{self._queue.maxsize} writes are waiting for the ledger already", retry_after_s=1
            ) from None
        # Shielded: a caller that goes away does not undo a write that others may already depend on.
        return await asyncio.shield(future)

    def close(self) -> None:
        """Commit what waits, then end the thread."""
        self._closed = True
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            group = [first]
            last = False
            while len(group) < MAX_GROUP and not self._queue.empty():
                item = self._queue.get_nowait()
                if item is None:
                    last = True
                    break
                group.append(item)
            self._commit(group)
            _deliver(group)
            if last:
                return

    def _commit(self, group: list[_Write]) -> None:
        try:
            with self._engine.begin() as connection:
                self._check_epoch(connection)
                for write in group:
                    _apply(connection, write)
            self.error = None
        except OwnershipLostError as error:
            _fail(group, error)
        except DBAPIError as error:
            refused = UnavailableError(f"the ledger cannot be written now: {error.orig}", retry_after_s=1)
            self.error = refused.message
            _fail(group, refused)
        except Exception as error:  # noqa: BLE001 - a supervisor: without this thread every later write would hang
            _fail(group, error)

    def _check_epoch(self, connection: Connection) -> None:
        epoch = connection.scalar(select(meta.c.value).where(meta.c.key == "epoch"))
        if epoch != self._epoch:
            raise OwnershipLostError(f"this service has epoch {self._epoch}, the ledger is owned by epoch {epoch}")


def _apply(connection: Connection, write: _Write) -> None:
    savepoint = connection.begin_nested()
    try:
        write.result = write.op(connection)
    except DBAPIError as error:
        if error.connection_invalidated or _is_about_the_database(error):
            raise
        savepoint.rollback()
        write.error = ReefError(f"a row was refused by the ledger: {error.orig}")
    except Exception as error:  # noqa: BLE001 - a supervisor: whatever an op raises belongs to its caller alone
        savepoint.rollback()
        write.error = error
    else:
        savepoint.commit()


def _is_about_the_database(error: DBAPIError) -> bool:
    """Full, locked, read-only or gone: no op of the transaction can succeed. (A refused row is the op's own.)"""
    return not isinstance(error, IntegrityError | DataError | ProgrammingError | InterfaceError | NotSupportedError)


def _fail(group: list[_Write], error: BaseException) -> None:
    for write in group:
        write.error = error


def _deliver(group: list[_Write]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[_Write]] = {}
    for write in group:
        by_loop.setdefault(write.loop, []).append(write)
    for loop, writes in by_loop.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_resolve, writes)


def _resolve(writes: list[_Write]) -> None:
    for write in writes:
        if write.future.cancelled():
            continue
        if write.error is not None:
            write.future.set_exception(write.error)
        else:
            write.future.set_result(write.result)
