"""An engine that is lent for an evaluation: it answers for one release, whatever is served meanwhile.

    lend(release, loan) -> its server starts, verified -> requests that name the release -> give_back(release, loan)

Several may borrow the same release at once, each by a loan of its own; the server ends with the last loan. Who forgets
to give it back loses it: after `evaluation.engine-idle-s` without a request the server ends.
"""

import asyncio
import time
from collections.abc import Callable

from reef.engines.replica import Replica
from reef.errors import ConflictError, EngineError, ReefError, UnavailableError
from reef.observe import log
from reef.types import Published


class LentEngine:
    """One server, or none: two releases are not lent at once."""

    def __init__(self, new_replica: Callable[[], Replica], idle_s: float) -> None:
        self._new_replica = new_replica
        self._idle_s = idle_s
        self._loans: set[str] = set()
        self._starting: asyncio.Task[None] | None = None  # done once the server answers
        self._watcher: asyncio.Task[None] | None = None
        self._one_server = asyncio.Lock()  # the next one starts when the last one is gone
        self._stopped = False
        self.replica: Replica | None = None  # once it answers
        self.release: str | None = None  # that is lent, from when its server begins to start

    async def lend(self, published: Published, loan: str) -> None:
        """Have a server answer for a release: once this returns, requests that name it are answered.

        Raises:
            ConflictError: it is lent for another release, or the loan was given back while the server started.
            EngineError: no server starts with the release, or it disagrees with it.
            UnavailableError: the service stops.
        """
        if self._stopped:
            raise UnavailableError("the service stops: it lends no engine", retry_after_s=5)
        if self.release not in (None, published.release_id):
            raise ConflictError(
                f"the engine for evaluations answers for {self.release} now, and there is one: give that back "
                f"(DELETE its /engine), or wait {self._idle_s:g} s after its last request",
                code="engine_taken",
            )
        self._loans.add(loan)
        if self._starting is None:
            self.release = published.release_id
            self._starting = asyncio.create_task(self._start(published), name="lent-engine-start")
        starting = self._starting
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            if not starting.cancelled():
                raise  # who asked is gone; the loan ends when it is given back, or idle
            raise ConflictError(
                f"the engine for {published.release_id} was given back while it started", code="given_back"
            ) from None

    async def give_back(self, release_id: str, loan: str) -> bool:
        """One loan less; the server ends with the last one. False where there is no such loan."""
        if self.release != release_id or loan not in self._loans:
            return False
        self._loans.discard(loan)
        if not self._loans:
            await self._end()
        return True

    async def stop(self) -> None:
        """End the server, whoever has borrowed it, and lend no more."""
        self._stopped = True
        await self._end()

    async def _start(self, published: Published) -> None:
        async with self._one_server:
            replica = self._new_replica()
            try:
                await replica.start(published)
            except BaseException as error:
                await replica.stop()
                if self._starting is asyncio.current_task():
                    self._forget()
                if isinstance(error, ReefError):
                    raise EngineError(f"no engine answers for {published.release_id}: {error.message}") from error
                raise
            self.replica = replica
            self._watcher = asyncio.create_task(self._end_when_idle(replica), name="lent-engine")

    def _forget(self) -> None:
        self.replica = self.release = self._starting = self._watcher = None
        self._loans.clear()

    async def _end(self) -> None:
        replica, starting, watcher = self.replica, self._starting, self._watcher
        self._forget()
        if watcher is not None and watcher is not asyncio.current_task():
            watcher.cancel()
        if starting is not None and not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        if replica is not None:
            async with self._one_server:
                await replica.stop()

    async def _end_when_idle(self, replica: Replica) -> None:
        idle_since = time.monotonic()
        seen = replica.num_used
        while time.monotonic() - idle_since < self._idle_s:
            await asyncio.sleep(min(1.0, self._idle_s / 10))
            if replica.num_in_flight or replica.num_used != seen:
                idle_since, seen = time.monotonic(), replica.num_used
        if self.replica is replica:
            log.warning("nobody asked %s for %g s: its engine ends", self.release, self._idle_s)
            await self._end()
