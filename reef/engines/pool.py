"""The engines that serve: who may send a request now and to which replica, and how a release gets into all of them.

    acquire(session, release) -> the candidate, for its share; else a replica in rotation: the session's, or the idlest

A release is in once one replica holds it verified; those that failed are restarted with it beside the traffic. Replicas
in rotation hold one release. While there is none, requests wait up to `inference.pause-wait-s`, then get 503 +
Retry-After; over `inference.max-waiting` of them, 429. A candidate is one more replica, with a release that is still on
trial.
"""

import asyncio
import contextlib
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from hashlib import blake2b
from typing import Any

from reef.config import Config
from reef.engines.client import EngineClient
from reef.engines.host import EngineHost, Host
from reef.engines.lent import LentEngine
from reef.engines.replica import Replica
from reef.engines.transfer import Transfer
from reef.errors import BusyError, ConfigError, ConflictError, EngineError, LoadFailedError, ReefError, UnavailableError
from reef.observe import Metrics
from reef.types import Published

RETRY_AFTER_S = 2
MAX_SESSIONS = 65536  # whose replica is remembered; the one not heard of for longest is forgotten first
NEAREST_TO_READY = ("ready", "loading", "restarting", "starting", "failed", "stopped")


class Engines:
    """`inference.replicas` servers started here, or the one that `inference.url` names; perhaps a candidate; perhaps
    one that is lent for evaluations."""

    def __init__(self, config: Config, metrics: Metrics, hosts: Callable[[str], Host] | None = None) -> None:
        """`hosts` gives what starts the server of a replica's name; none: an EngineHost each, or nobody with a url."""
        self._config = config
        self._metrics = metrics
        self._hosts = hosts or (lambda name: EngineHost(config, name))
        self._replicas = [self._replica(f"engine-{index}") for index in range(config.inference.replicas)]
        self._changing = asyncio.Lock()  # one start, load or verification at a time
        self._sessions: OrderedDict[str, Replica] = OrderedDict()
        self._num_waiting = 0
        self._random = random.Random()
        self._also_called: set[str] = set()
        self._candidate: Replica | None = None
        self._candidate_changing = asyncio.Lock()
        self._share = 0.0
        self._trial = False  # the candidate answers; else it waits for the next one
        self._lent = LentEngine(lambda: self._replica("engine-evaluation"), config.evaluation.engine_idle_s)
        self.need_files: Callable[[], None] = lambda: None  # called when `lack_files` has become true

    @property
    def served(self) -> str | None:
        """The release that the replicas in rotation hold; while there is none, the one that answered last."""
        return self._newest.served

    def call_also(self, release_id: str) -> None:
        """What is served answers to this name too: a link that changed no weight, and so is not loaded."""
        self._also_called.add(release_id)

    @property
    def candidate(self) -> str | None:
        """The release on trial, from when it was verified until the trial ends."""
        return self._candidate.served if self._candidate is not None and self._trial else None

    @property
    def state(self) -> str:
        """The state of the replica that is nearest to answering: `ready` where one does."""
        return min((replica.state for replica in self._replicas), key=NEAREST_TO_READY.index)

    @property
    def closed_s(self) -> float:
        """Seconds so far in which a replica took no requests, on average over all of them."""
        return sum(replica.closed_s for replica in self._replicas) / len(self._replicas)

    @property
    def build(self) -> str:
        """What the engines say they are; `unknown` before the first one is up."""
        return self._newest.build

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together; 0 before the first engine is up."""
        return self._newest.context_length

    async def start(self, published: Published) -> None:
        """Bring the replicas up with a release, verified, side by side; enough that one of them is.

        Raises:
            LoadFailedError: none is, and at least one does not agree with the release.
            EngineError: none is; no server came that far.
        """
        async with self._changing:
            failures = await _failures(self._replicas, lambda replica: replica.start(published))
            if len(failures) == len(self._replicas):
                disagrees = any(isinstance(failure, LoadFailedError) for failure in failures.values())
                raise (LoadFailedError if disagrees else EngineError)(_reasons(failures))
            self._recover()

    async def load(self, published: Published, transfer: Transfer | None = None) -> None:
        """Put a release into all replicas at once; enough that one of them holds it then, verified.

        Those out of rotation already take part only where none of the others can: else they come back with it later.
        With `transfer` the trainer sends the tensors; without it the engines read the release's files.

        Raises:
            LoadFailedError: every replica failed, in place and after a restart. Nobody answers until the next load.
        """
        async with self._changing:
            in_rotation = [replica for replica in self._replicas if replica.ready] or self._replicas
            others = [replica for replica in self._replicas if replica not in in_rotation]
            self._also_called.clear()
            for replica in self._replicas:
                replica.want(published)  # now: from here on nobody opens with the release before it
            failures = await _failures(in_rotation, lambda replica: replica.load(published, transfer))
            if len(failures) == len(in_rotation) and not any(replica.ready for replica in others):
                failures |= await _failures(others, lambda replica: replica.load(published, transfer))
            if len(failures) == len(self._replicas):
                raise LoadFailedError(f"release {published.release_id} does not load: {_reasons(failures)}")
            self._recover()

    async def verify(self, published: Published) -> None:
        """Check the replicas in rotation against a probe that was not known when they started.

        Raises:
            LoadFailedError: all of them disagree; they stay as they are.
        """
        async with self._changing:
            in_rotation = [replica for replica in self._replicas if replica.ready]
            for replica in self._replicas:
                if replica not in in_rotation:
                    replica.want(published)
            failures = await _failures(in_rotation, lambda replica: replica.verify(published))
            if in_rotation and len(failures) == len(in_rotation):
                raise LoadFailedError(_reasons(failures))
            for replica in failures:
                replica.recover()

    @property
    def lack_files(self) -> bool:
        """Whether a replica can restart only once the files of the release wanted are written."""
        return any(replica.lacks_files for replica in self._replicas)

    def provide(self, published: Published) -> None:
        """The files of a release that the trainer alone held were written."""
        for replica in self._replicas:
            replica.provide(published)

    async def stop(self) -> None:
        """End the replicas, the candidate and what is lent, as far as they were started here."""
        everyone = [*self._replicas, *([self._candidate] if self._candidate is not None else [])]
        await asyncio.gather(*(replica.stop() for replica in everyone), self._lent.stop())

    @contextlib.asynccontextmanager
    async def acquire(self, session: str | None = None, release: str | None = None) -> AsyncIterator[EngineClient]:
        """A client to send one request with.

        Args:
            session: requests of one session go to one replica, while that is in rotation.
            release: the release that must answer; None: whichever serves, the candidate's share included.

        Raises:
            ConflictError: that release is neither served nor on trial nor lent.
            BusyError: too many wait for an engine already.
            UnavailableError: nobody who may answer opens in time.
        """
        with (await self._route(session, release)).use() as client:
            yield client

    async def start_candidate(self, published: Published, share: float) -> None:
        """Put a release on trial in a replica of its own, started here or there already.

        Args:
            share: of the requests (sessions, where they have one) that name no release; 0 to 1.

        Raises:
            ConfigError: there is no host for it with `inference.url`.
            LoadFailedError: it does not start with the release or disagrees with it; then there is no candidate.
        """
        if self._config.inference.url is not None:
            raise ConfigError("a candidate needs an engine of its own, and with inference.url Reef starts none")
        async with self._candidate_changing:
            self.end_trial()
            try:
                if self._candidate is None:
                    self._candidate = self._replica("engine-candidate")
                    try:
                        await self._candidate.start(published)
                    except ReefError:
                        await self._candidate.load(published)  # starts it once more
                elif self._candidate.served != published.release_id or not self._candidate.ready:
                    await self._candidate.load(published)
            except ReefError as error:
                if self._candidate is not None:
                    await self._candidate.stop()
                    self._candidate = None
                raise LoadFailedError(f"candidate {published.release_id} does not load: {error.message}") from error
            self._share, self._trial = share, True

    def end_trial(self) -> None:
        """No more requests to the candidate. Its engine stays, for the next one."""
        self._share, self._trial = 0.0, False

    @property
    def lent(self) -> str | None:
        """The release that an engine is lent for: its files are needed."""
        return self._lent.release

    async def lend(self, published: Published, loan: str) -> None:
        """Have an engine of its own answer requests that name a release, until the loan is given back.

        Raises:
            ConflictError: with `inference.url` Reef starts none, or it is lent for another release.
            EngineError: it does not start with the release.
        """
        if self._config.inference.url is not None:
            raise ConflictError(
                f"{published.release_id} needs an engine of its own, and with inference.url Reef starts none",
                code="no_engine",
            )
        await self._lent.lend(published, loan)

    async def give_back(self, release_id: str, loan: str) -> bool:
        """A borrower of `lend` is done; False where there is no such loan."""
        return await self._lent.give_back(release_id, loan)

    def describe(self) -> list[dict[str, Any]]:
        """For /reef/status: the replicas, then the candidate, then what is lent."""
        described = [
            {"role": "serving", "index": index, **replica.describe()} for index, replica in enumerate(self._replicas)
        ]
        if self._candidate is not None:
            described.append({"role": "candidate", "index": None, **self._candidate.describe()})
        if self._lent.replica is not None:
            described.append({"role": "evaluation", "index": None, **self._lent.replica.describe()})
        return described

    def pids(self) -> list[int]:
        """Process ids of the servers that were started here and run."""
        return [engine["pid"] for engine in self.describe() if engine["pid"] is not None]

    @property
    def _newest(self) -> Replica:
        return max(self._replicas, key=lambda replica: replica.opened_at)

    def _replica(self, name: str) -> Replica:
        attached = self._config.inference.url is not None
        host = None if attached else self._hosts(name)
        return Replica(name, self._config, self._metrics, host, lambda: self.need_files())

    def _recover(self) -> None:
        for replica in self._replicas:
            if not replica.ready:
                replica.recover()

    async def _route(self, session: str | None, release: str | None) -> Replica:
        if release is None and self._candidate is not None and self._candidate.ready and self._on_trial(session):
            return self._candidate
        clock = asyncio.get_running_loop()
        deadline = clock.time() + self._config.inference.pause_wait_s
        while True:
            group = self._group(release)
            if ready := [replica for replica in group if replica.ready]:
                return self._choose(ready, session)
            waiting_s = deadline - clock.time()
            if waiting_s <= 0 or all(replica.state in ("failed", "stopped") for replica in group):
                states = ", ".join(_state(replica) for replica in group)
                raise UnavailableError(f"no engine answers now: {states}", retry_after_s=RETRY_AFTER_S)
            with self._one_more_waits():
                await _first_open(group, waiting_s)

    @contextlib.contextmanager
    def _one_more_waits(self) -> Iterator[None]:
        if self._num_waiting >= self._config.inference.max_waiting:
            raise BusyError(
                f"{self._num_waiting} requests wait for an engine already (inference.max-waiting)",
                retry_after_s=RETRY_AFTER_S,
            )
        self._num_waiting += 1
        try:
            yield
        finally:
            self._num_waiting -= 1

    def _group(self, release: str | None) -> Sequence[Replica]:
        """Those that may answer a request which names this release; where it is lent, nobody else."""
        if release is not None and self._lent.replica is not None and release == self._lent.release:
            return [self._lent.replica]
        if release in (None, self.served) or release in self._also_called:
            return self._replicas
        if self._candidate is not None and release == self.candidate:
            return [self._candidate]
        on_trial = f", {self.candidate} is on trial" if self.candidate is not None else ""
        raise ConflictError(
            f"release {release} does not answer: {self.served} is served{on_trial}",
            param="x-reef-release",
            code="release_not_served",
        )

    def _on_trial(self, session: str | None) -> bool:
        """Whether a request that names no release is of the candidate's share; a session always is, or never."""
        if session is None:
            return self._random.random() < self._share
        digest = blake2b(session.encode(), digest_size=6).digest()
        return int.from_bytes(digest) < self._share * 2**48

    def _choose(self, ready: Sequence[Replica], session: str | None) -> Replica:
        """The session's replica, else the one with the fewest requests in work; ties by lot."""
        chosen = self._sessions.get(session) if session is not None else None
        if chosen not in ready:
            chosen = min(ready, key=lambda replica: (replica.num_in_flight, self._random.random()))
        assert chosen is not None
        if session is not None and len(self._replicas) > 1 and chosen in self._replicas:
            self._sessions[session] = chosen
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return chosen


async def _failures(
    replicas: Collection[Replica], work: Callable[[Replica], Awaitable[None]]
) -> dict[Replica, ReefError]:
    """Do something with all replicas at once; those that failed, and how."""

    async def attempt(replica: Replica) -> ReefError | None:
        try:
            await work(replica)
        except ReefError as error:
            return error
        return None

    outcomes = await asyncio.gather(*(attempt(replica) for replica in replicas))
    return {replica: error for replica, error in zip(replicas, outcomes, strict=True) if error is not None}


def _reasons(failures: dict[Replica, ReefError]) -> str:
    return "; ".join(f"{replica.name}: {error.message}" for replica, error in failures.items())


def _state(replica: Replica) -> str:
    return f"{replica.name} is {replica.state}" + (f" ({replica.error})" if replica.error else "")


async def _first_open(replicas: Collection[Replica], timeout_s: float) -> None:
    """Return once one of them opens its gate, or after the time."""
    opening = [asyncio.ensure_future(replica.gate.wait()) for replica in replicas]
    try:
        await asyncio.wait(opening, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in opening:
            task.cancel()
