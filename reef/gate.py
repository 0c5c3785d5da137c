"""Holds a release until its results let it be served: a candidate engine answers for it, a command may measure it.

commit (pending) -> candidate engine -> command, posted results, canary -> passed: load it | failed: roll it back
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from reef.config import Config
from reef.engines.pool import Engines
from reef.errors import ReefError
from reef.evaluation import Verdict, compare, judge, run_command
from reef.ledger import held_out, releases, reports
from reef.ledger.ledger import Ledger
from reef.observe import Metrics, log
from reef.storage import Storage
from reef.types import Release

Store = Callable[..., Awaitable[Any]]


class Gate:
    """At most one release is held at a time: training waits for it."""

    def __init__(
        self, config: Config, ledger: Ledger, engines: Engines, storage: Storage, store: Store, metrics: Metrics
    ) -> None:
        self._config = config.evaluation
        self._alarms = config.observability.alarms
        self._metrics = metrics
        self._ledger = ledger
        self._engines = engines
        self._storage = storage
        self._store = store
        self._command: asyncio.Task[None] | None = None
        self.url: str | None = None  # of this service, for the command
        self.key: str | None = None  # that the command must send; None: none is asked
        self.held: Release | None = None
        self.verdict: Verdict | None = None  # on `held`, so far
        self.error: str | None = None  # of the command

    @property
    def holds(self) -> bool:
        """Whether new releases are held."""
        return bool(self._config.gate)

    async def hold(self, release: Release, wake: Callable[[], None]) -> None:
        """Let a candidate engine answer for `release`, and measure it; `wake` is called when there is news.

        Raises:
            LoadFailedError: no engine loads it.
        """
        await self._engines.start_candidate(self._storage.published(release), self._config.canary.share)
        self.held, self.verdict, self.error = release, None, None
        if self._config.command:
            self._command = asyncio.create_task(self._measure(release, wake), name="evaluation")

    async def decide(self) -> Verdict:
        """What the results on the held release say by now."""
        assert self.held is not None
        results = (await self._store(self._ledger.read, releases.evaluations_of, [self.held.id])).get(self.held.id, [])
        if self._config.canary.share > 0 and not any(result.get("kind") == "canary" for result in results):
            results = [*results, *await self._compare(self.held)]
        self.verdict = judge(self._config.gate, results)
        return self.verdict

    async def let_go(self) -> None:
        """The release is decided, or the service stops: no more candidate, no more command."""
        self.held = self.verdict = None
        if self._command is not None:
            self._command.cancel()
            await asyncio.gather(self._command, return_exceptions=True)
            self._command = None
        self._engines.end_trial()

    async def _compare(self, held: Release) -> list[dict[str, Any]]:
        """The canary's result, stored once there are reports enough on both sides."""
        sides = []
        for release_id in (held.id, self._engines.served):
            graded = await self._store(self._ledger.read, reports.graded, held.scenario, release_id)
            sides.append(graded)
        if min(map(len, sides)) < self._config.canary.min_reports:
            return []
        result = compare(*sides)
        await self._keep(held, result)
        return [result]

    async def _measure(self, release: Release, wake: Callable[[], None]) -> None:
        try:
            await self._run_command(release)
        except Exception as error:  # noqa: BLE001 - a supervisor: nobody awaits this, and the release stays held
            said = error.message if isinstance(error, ReefError) else repr(error)
            if self.key is not None:
                said = said.replace(self.key, "**********")
            self.error = f"{release.id} stays held: {said}"
            log.error("%s", self.error)
        wake()

    async def _run_command(self, release: Release) -> None:
        environment = {
            "REEF_URL": self.url or "",
            "REEF_SCENARIO": release.scenario,
            "REEF_RELEASE": release.id,
            "REEF_RELEASE_PATH": self._storage.published(release).path,
        }
        if self.key is not None:
            environment["REEF_API_KEY"] = self.key
        result = await run_command(self._config, environment)
        if result is not None:
            await self._keep(release, result)

    async def _keep(self, release: Release, result: dict[str, Any]) -> None:
        """Store a result of a release, and let the alarms ring that it rings."""
        rung = await self._store(
            self._ledger.write, held_out.add, release.scenario, release.id, result, time.time(), self._alarms
        )
        for release_id, mark in rung:
            self._metrics.ring(release_id, mark.metric, mark.message)
