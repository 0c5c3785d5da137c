"""An engine that is lent for an evaluation: it answers for one release, whatever is served meanwhile.

    lend(release, loan) -> its server starts, verified -> requests that name the release -> give_back(release, loan)

Several may borrow the same release at once, each by a loan of its own; the server ends with the last loan. Who forgets
to give it back loses it: after `evaluation.engine-idle-s` without a request the server ends. A loan that is given back
before it was asked for is remembered: who gives up at once may be heard before what was asked.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

from reef.engines.replica import Replica
from reef.errors import ConflictError, EngineError, ReefError, UnavailableError
from reef.observe import log
from reef.types import Published

EARLY_S = 60.0  # a loan that was given back too early is refused for so long, once
MAX_EARLY = 1024  # of those, at once
LOOK_S = 1.0  # between looks at whether somebody asks, at most


class LentEngine:
    """One server, or none: two releases are not lent at once."""

    def __init__(self, new_replica: Callable[[], Replica], idle_s: float) -> None:
        self._new_replica = new_replica
        self._idle_s = idle_s
        self._loans: dict[str, asyncio.Future[None]] = {}  # each is done once it has ended
        self._early: OrderedDict[tuple[str, str], float] = OrderedDict()  # given back, not asked for yet: when
        self._life: asyncio.Task[None] | None = None  # of the server: from before its start to after its end
        self._started: asyncio.Future[None] | None = None  # done once it answers, or fails to
        self._one_server = asyncio.Lock()  # the next one starts when the last one is gone
        self._stopped = False
        self.replica: Replica | None = None  # once it answers
        self.release: str | None = None  # that is lent, from when its server begins to start

    async def lend(self, published: Published, loan: str) -> None:
        """Have a server answer for a release: once this returns, requests that name it are answered.

        Raises:
            ConflictError: it is lent for another release, or the loan was given back, before this or meanwhile.
            EngineError: no server starts with the release, or it disagrees with it.
            UnavailableError: the service stops.
        """
        self._check_goes_on()
        if time.monotonic() - self._early.pop((published.release_id, loan), -EARLY_S) < EARLY_S:
            message = (
                f"loan {loan} is not open and was given back within the last minute: ask once more if it is wanted"
            )
            raise ConflictError(message, code="given_back")
        if self.release not in (None, published.release_id):
            raise ConflictError(
                f"the engine for evaluations answers for {self.release} now, and there is one: give that back "
                f"(DELETE its /engine), or wait {self._idle_s:g} s after its last request",
                code="engine_taken",
            )
        ended = self._loans.setdefault(loan, asyncio.get_running_loop().create_future())
        started = self._started or self._begin(published)
        # Who asked may go away meanwhile: the loan ends when it is given back, or idle.
        await asyncio.wait({started, ended}, return_when=asyncio.FIRST_COMPLETED)
        if started.done():
            started.result()
        if ended.done():
            self._check_goes_on()
            message = f"the engine for {published.release_id} was given back while it started"
            raise ConflictError(message, code="given_back")

    async def give_back(self, release_id: str, loan: str) -> bool:
        """One loan less; the server ends with the last one. False where there is no such loan: it is refused then."""
        if self.release != release_id or loan not in self._loans:
            self._early[release_id, loan] = time.monotonic()
            self._early.move_to_end((release_id, loan))
            if len(self._early) > MAX_EARLY:
                self._early.popitem(last=False)
            return False
        self._loans.pop(loan).set_result(None)
        if not self._loans:
            await self._end()
        return True

    async def stop(self) -> None:
        """End the server, whoever has borrowed it, and lend no more."""
        self._stopped = True
        await self._end()
        async with self._one_server:  # one that was given back may be ending still
            pass

    def _check_goes_on(self) -> None:
        if self._stopped:
            raise UnavailableError("the service stops: it lends no engine", retry_after_s=5)

    def _begin(self, published: Published) -> asyncio.Future[None]:
        self.release = published.release_id
        started = self._started = asyncio.get_running_loop().create_future()
        started.add_done_callback(lambda done: done.exception())  # told to who waits for it, if anybody does
        self._life = asyncio.create_task(self._live(published, started), name="lent-engine")
        return started

    async def _live(self, published: Published, started: asyncio.Future[None]) -> None:
        async with self._one_server:
            replica = self._new_replica()
            try:
                await replica.start(published)
                self.replica = replica
                started.set_result(None)
                await self._while_asked(replica)
            except Exception as error:  # noqa: BLE001 - whatever it is goes to those who asked for it
                started.set_exception(_failure(published, error))
            finally:
                if self._life is asyncio.current_task():
                    self._forget()  # first: from here on nobody cuts this short
                await _stop(replica, published)

    def _forget(self) -> None:
        """There is no server, for all that others know."""
        self.replica = self.release = self._started = self._life = None
        for ended in self._loans.values():
            ended.set_result(None)
        self._loans.clear()

    async def _end(self) -> None:
        """End the server that there is. It goes on ending if who waits for that is cancelled."""
        life = self._life
        if life is not None:
            self._forget()
            life.cancel()
            await asyncio.wait({life})

    async def _while_asked(self, replica: Replica) -> None:
        """Return once nobody has asked for so long, or the server died and cannot be brought up again."""
        idle_since, seen = time.monotonic(), replica.num_used
        while time.monotonic() - idle_since < self._idle_s:
            await asyncio.sleep(min(LOOK_S, self._idle_s / 10))
            if replica.state == "failed":
                log.error("the engine that was lent for %s ends: %s", self.release, replica.error)
                return
            if replica.num_in_flight or replica.num_used != seen or not replica.ready:
                idle_since, seen = time.monotonic(), replica.num_used
        log.warning("nobody asked %s for %g s: its engine ends", self.release, self._idle_s)


async def _stop(replica: Replica, published: Published) -> None:
    try:
        await replica.stop()
    except Exception as error:  # noqa: BLE001 - nobody waits for it who could be told
        log.exception("the engine that was lent for %s does not end: %s", published.release_id, error)


def _failure(published: Published, error: Exception) -> Exception:
    if not isinstance(error, ReefError):
        return error
    failure = EngineError(f"no engine answers for {published.release_id}: {error.message}")
    failure.__cause__ = error
    return failure
