"""Who owns the ledger: which of the services on it may reserve, commit, roll back and store checkpoints.

    try_acquire -> keep (renews every third of the time-out) -> lost, or release

Each ownership has an epoch, greater than every one before it. The clock only decides when another service may take
over; that the last owner writes nothing more is decided by the epoch, which each of its writes is checked against.
"""

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sqlalchemy import ColumnElement, Connection, Engine, Float, cast, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError

from reef.errors import ReefError
from reef.ledger.database import meaning, wait_longer
from reef.ledger.schema import leases, meta
from reef.observe import log

T = TypeVar("T")
NAME = "dispatcher"


class Lease:
    """SQLite's: the run directory's lock has made this service the owner, for as long as it runs."""

    def __init__(self, epoch: int) -> None:
        self.holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(3)}"
        self.epoch = epoch  # of this ownership; 0: this service is not the owner
        self.lost = asyncio.Event()  # set when an ownership ends without `release`; cleared by the next one

    @property
    def held(self) -> bool:
        """Whether this service is the owner, as far as it can know by itself."""
        return self.epoch > 0

    async def try_acquire(self) -> bool:
        """Become the owner, where there is none. What ran under an earlier ownership must have ended before.

        Raises:
            UnavailableError: the database does not answer.
        """
        return self.held

    async def renew(self) -> bool:
        """Stay the owner for another time-out. False: this service is not the owner any more.

        Raises:
            UnavailableError: the database does not answer.
        """
        return self.held

    async def keep(self) -> None:
        """Renew for as long as that goes well: returns when the ownership is lost or released."""
        await self.lost.wait()

    async def release(self) -> None:
        """Let another service take over at once. Raises nothing: what is not released expires."""

    def close(self) -> None:
        """End what runs beside."""


class SharedLease(Lease):
    """PostgreSQL's: a row that its holder prolongs, and that another may take once it has expired.

    `timeout_s` counts by the database's clock for others, and by this process's monotonic clock, from before the
    request was sent, for itself: the holder gives up no later than another one can take over.
    """

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        super().__init__(epoch=0)
        self._engine = engine
        self._timeout_s = timeout_s
        self._until = 0.0  # by time.monotonic()
        # Its own thread: a renewal must not wait behind reads.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger-lease")

    @property
    def held(self) -> bool:
        return self.epoch > 0 and time.monotonic() < self._until

    async def try_acquire(self) -> bool:
        if self.held:
            return True
        asked = time.monotonic()
        epoch = await self._run(self._take)
        if epoch is None:
            return False
        self.epoch, self._until = epoch, asked + self._timeout_s
        self.lost.clear()
        log.info("%s owns the ledger now, epoch %d", self.holder, epoch)
        return True

    async def renew(self) -> bool:
        asked, epoch = time.monotonic(), self.epoch
        if not await self._run(self._prolong, epoch):
            self._lose(epoch)
            return False
        self._until = asked + self._timeout_s
        return True

    async def keep(self) -> None:
        epoch = self.epoch
        while self.epoch == epoch and (left := self._until - time.monotonic()) > 0:
            await asyncio.sleep(min(self._timeout_s / 3, left))
            try:
                async with asyncio.timeout(self._until - time.monotonic()):
                    await self.renew()
            except ReefError as error:
                log.warning("the lease is not renewed, trying again: %s", error.message)
            except TimeoutError:
                break
        self._lose(epoch)

    async def release(self) -> None:
        epoch, self.epoch = self.epoch, 0
        try:
            await self._run(self._free, epoch)
        except ReefError as error:
            log.warning("the lease is not released, it expires: %s", error.message)

    def close(self) -> None:
        self._thread.shutdown()

    def _lose(self, epoch: int) -> None:
        if self.epoch == epoch > 0:
            log.error("%s does not own the ledger any more, epoch %d", self.holder, epoch)
            self.epoch = 0
            self.lost.set()

    def _take(self, connection: Connection) -> int | None:
        """The new epoch, in the lease's row and in `meta` in one transaction; None: another service holds it."""
        connection.execute(
            insert(leases).values(name=NAME, holder="", epoch=0, expires_at=0.0).on_conflict_do_nothing()
        )
        expired = update(leases).where(leases.c.name == NAME, leases.c.expires_at < _clock())
        taken = connection.execute(expired.values(holder=self.holder, expires_at=_clock() + self._timeout_s))
        if taken.rowcount == 0:
            return None
        # Waits here for a transaction that the last owner has begun and not ended: see Writer.
        owned = meta.c.key == "epoch"
        epoch = int(connection.execute(select(meta.c.value).where(owned).with_for_update()).scalar_one()) + 1
        connection.execute(update(meta).where(owned).values(value=str(epoch)))
        connection.execute(update(leases).where(leases.c.name == NAME).values(epoch=epoch))
        return epoch

    def _prolong(self, connection: Connection, epoch: int) -> bool:
        row = update(leases).where(leases.c.name == NAME, leases.c.holder == self.holder, leases.c.epoch == epoch)
        return connection.execute(row.values(expires_at=_clock() + self._timeout_s)).rowcount == 1

    def _free(self, connection: Connection, epoch: int) -> None:
        row = update(leases).where(leases.c.name == NAME, leases.c.holder == self.holder, leases.c.epoch == epoch)
        connection.execute(row.values(expires_at=0.0))

    async def _run(self, op: Callable[..., T], *args: int) -> T:
        def work() -> T:
            try:
                with self._engine.begin() as connection:
                    wait_longer(connection)
                    return op(connection, *args)
            except DBAPIError as error:
                raise meaning(error) from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def owner(connection: Connection) -> str | None:
    """PostgreSQL: who owns the ledger, as HOST:PID:NUMBER; None where nobody does."""
    return connection.scalar(select(leases.c.holder).where(leases.c.name == NAME, leases.c.expires_at >= _clock()))


def _clock() -> ColumnElement[float]:
    """The database's clock at this statement, in seconds since the epoch."""
    return cast(func.extract("epoch", func.clock_timestamp()), Float)
