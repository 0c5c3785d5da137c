"""Group commit: one thread, one transaction for all the writes that wait.

    write(op) -> queue -> [BEGIN; op; op; ...; COMMIT + fsync] -> results

A caller gets its result only after the commit that holds it is durable. An op that raises undoes itself alone; a
commit that fails fails all of its ops, and nothing of them is stored. A savepoint for each op costs two statements, so
they run without first: where one raises, the transaction is undone and they run again, each in a savepoint. Writes of
one kind that wait one after another (`write_together`) share one call. One that waits for another service's locks waits
alone, holding none that the other may need. So an op must do nothing but read and write its connection.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, select
from sqlalchemy.exc import DBAPIError

from reef.errors import OwnershipLostError, UnavailableError
from reef.ledger.database import OvertakenError, is_about_the_database, is_contention, is_taken, meaning, wait_longer
from reef.ledger.schema import meta

T = TypeVar("T")
Item = TypeVar("Item")
MAX_GROUP = 256  # ops in one transaction: bounds how long the first of them waits
MAX_LOOKS = 3  # runs of an op in which another service is first to store a row of the same key


@dataclass(slots=True, eq=False)
class _Write:
    op: Callable[[Connection], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    epoch: int | None  # the ownership that it needs; None: any service may write it
    together: Callable[[Connection, Sequence[Any]], None] | None = None  # does the work of `op` for many items
    item: Any = None
    result: Any = None
    error: BaseException | None = None
    contended: bool = False  # another service's transaction was in its way


class Writer:
    """A service's only writer of its ledger. Writes of an owner who has been followed by another are refused."""

    def __init__(self, engine: Engine, max_pending: int) -> None:
        self._engine = engine
        self._queue: queue.Queue[_Write | None] = queue.Queue(maxsize=max_pending)
        self._closed = False
        self.error: str | None = None  # why the last commit was refused; None once one succeeds
        self._thread = threading.Thread(target=self._run, name="ledger-writer", daemon=True)
        self._thread.start()

    async def write(self, op: Callable[[Connection], T], epoch: int | None) -> T:
        """Run `op` in the next transaction and return its result once that is durable.

        Raises:
            UnavailableError: the queue is full, or the database is locked, full or gone; nothing was stored. (A
                PostgreSQL server lost in the commit may have stored it: what is tried again must bear that.)
            LedgerError: the database is damaged; nothing was stored.
            OwnershipLostError: the ledger's epoch is not `epoch`.
            ReefError: whatever `op` raised; nothing of it was stored.
        """
        result: T = await self._wait(_Write(op, *_here(), epoch))
        return result

    async def write_together(
        self, op: Callable[[Connection, Sequence[Item]], None], item: Item, epoch: int | None
    ) -> None:
        """`write` of `op(connection, items)`, `item` among them: with those of the writes beside it.

        It raises what `write` raises, for this item alone.
        """
        await self._wait(_Write(lambda connection: op(connection, [item]), *_here(), epoch, op, item))

    async def _wait(self, write: _Write) -> Any:
        if self._closed:
            raise UnavailableError("the ledger is closed: the service is stopping", retry_after_s=1)
        try:
            self._queue.put_nowait(write)
        except queue.Full:
            raise UnavailableError(
                f"{self._queue.maxsize} writes are waiting for the ledger already", retry_after_s=1
            ) from None
        # Shielded: a caller that goes away does not undo a write that others may already depend on.
        return await asyncio.shield(write.future)

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
            self._commit(group, savepoints=False)
            _deliver(group)
            if last:
                return

    def _commit(self, group: list[_Write], savepoints: bool, alone: bool = False) -> None:
        try:
            with self._engine.begin() as connection:
                if alone:
                    wait_longer(connection)
                owner = _owner(connection) if any(write.epoch is not None for write in group) else None
                if savepoints:
                    for write in group:
                        _apply(connection, write, owner)
                else:
                    for writes in _runs(group):
                        _apply_bare(connection, writes, owner)
            self.error = None
        except _OpFailedError:
            self._commit(group, savepoints=True)
        except DBAPIError as error:
            refused = meaning(error)
            self.error = refused.message
            _fail(group, refused)
        except Exception as error:  # noqa: BLE001 - a supervisor: without this thread every later write would hang
            _fail(group, error)
        else:
            contended = [] if alone else [write for write in group if write.contended]
            for write in contended:
                self._commit([write], savepoints=True, alone=True)


def _here() -> tuple[asyncio.Future[Any], asyncio.AbstractEventLoop]:
    loop = asyncio.get_running_loop()
    return loop.create_future(), loop


# Built once: making a statement costs more than running it.
_OWNER = select(meta.c.value).where(meta.c.key == "epoch").with_for_update(read=True)


def _owner(connection: Connection) -> int:
    """The epoch of the ledger's owner. Nobody else becomes the owner before this transaction has ended."""
    return int(connection.execute(_OWNER).scalar_one())


def _runs(group: list[_Write]) -> Iterator[list[_Write]]:
    """The writes in their order, neighbours that one call can do together."""
    for _, writes in groupby(group, key=lambda write: (write.together or write, write.epoch)):
        yield list(writes)


class _OpFailedError(Exception):
    """An op without a savepoint has failed: its transaction begins again with them."""


def _apply_bare(connection: Connection, writes: list[_Write], owner: int | None) -> None:
    first = writes[0]
    if first.epoch is not None and first.epoch != owner:
        raise _OpFailedError
    transaction = connection.get_transaction()
    try:
        if first.together is not None:
            first.together(connection, [write.item for write in writes])
        else:
            first.result = first.op(connection)
    except Exception as error:
        if isinstance(error, DBAPIError) and is_about_the_database(error):
            raise
        raise _OpFailedError from error
    if connection.get_transaction() is not transaction:  # it has ended the transaction itself, with all that was in it
        raise _OpFailedError


def _apply(connection: Connection, write: _Write, owner: int | None, look: int = 1) -> None:
    write.error, write.contended = None, False
    if write.epoch is not None and write.epoch != owner:
        write.error = OwnershipLostError(f"this service has epoch {write.epoch}, the ledger is owned by epoch {owner}")
        return
    again = False
    savepoint = connection.begin_nested()
    try:
        write.result = write.op(connection)
    except DBAPIError as error:
        if is_about_the_database(error):
            raise
        again, write.error, write.contended = is_taken(error), meaning(error), is_contention(error)
    except OvertakenError as error:
        again, write.error = True, error
    except Exception as error:  # noqa: BLE001 - a supervisor: whatever an op raises belongs to its caller alone
        write.error = error
    else:
        savepoint.commit()
        return
    savepoint.rollback()
    if again and look < MAX_LOOKS:
        _apply(connection, write, owner, look + 1)


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
