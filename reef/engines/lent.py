"""An engine that is lent for an evaluation: it answers for one release, whatever is served meanwhile.

    lend(release) -> its server starts with the release, verified -> requests that name the release -> give_back

Several may borrow the same release at once. Who forgets to give it back loses it: after `evaluation.engine-idle-s`
without a request the server ends.
"""

import asyncio
import time
from collections.abc import Callable

from reef.engines.replica import Replica
from reef.errors import ConflictError, EngineError, ReefError
from reef.observe import log
from reef.types import Published


class LentEngine:
    """One server, or none: two releases are not lent at once."""

    def __init__(self, new_replica: Callable[[], Replica], idle_s: float) -> None:
        self._new_replica = new_replica
        self._idle_s = idle_s
        self._changing = asyncio.Lock()
        self._borrowers = 0
        self._watcher: asyncio.Task[None] | None = None
        self.replica: Replica | None = None  # while it is lent
        self.release: str | None = None  # that it answers for

    async def lend(self, published: Published) -> None:
        """Have a server answer for a release: once this returns, requests that name it are answered.

        Raises:
            ConflictError: it is lent for another release.
            EngineError: no server starts with the release, or it disagrees with it.
        """
        async with self._changing:
            if self.release not in (None, published.release_id):
                raise ConflictError(
                    f"the engine for evaluations answers for {self.release} now, and there is one: give that back "
                    f"(DELETE its /engine), or wait {self._idle_s:g} s after its last request",
                    code="engine_taken",
                )
            if self.replica is None:
                await self._start(published)
            self._borrowers += 1

    async def give_back(self, release_id: str) -> bool:
        """One borrower less; the server ends with the last one. False where the release is not lent."""
        async with self._changing:
            if self.release != release_id:
                return False
            self._borrowers -= 1
            if self._borrowers == 0:
                await self._end()
            return True

    async def stop(self) -> None:
        """End the server, whoever has borrowed it."""
        async with self._changing:
            await self._end()

    async def _start(self, published: Published) -> None:
        replica = self._new_replica()
        try:
            await replica.start(published)
        except BaseException as error:
            await replica.stop()
            if isinstance(error, ReefError):
                raise EngineError(f"no engine answers for {published.release_id}: {error.message}") from error
            raise
        self.replica, self.release = replica, published.release_id
        self._watcher = asyncio.create_task(self._end_when_idle(replica), name="lent-engine")

    async def _end(self) -> None:
        replica, self.replica, self.release, self._borrowers = self.replica, None, None, 0
        watcher, self._watcher = self._watcher, None
        if watcher is not None and watcher is not asyncio.current_task():
            watcher.cancel()
        if replica is not None:
            await replica.stop()

    async def _end_when_idle(self, replica: Replica) -> None:
        idle_since = time.monotonic()
        seen = replica.num_used
        while time.monotonic() - idle_since < self._idle_s:
            await asyncio.sleep(min(1.0, self._idle_s / 10))
            if replica.num_in_flight or replica.num_used != seen:
                idle_since, seen = time.monotonic(), replica.num_used
        async with self._changing:
            if self.replica is replica:
                log.warning("nobody asked %s for %g s: its engine ends", self.release, self._idle_s)
                await self._end()
