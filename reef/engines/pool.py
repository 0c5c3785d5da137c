"""The engines that serve: who may send a request now, which release they hold, and how a new one gets in.

    load(release):  close the gate -> pause -> load -> continue -> verify (id, probe) -> open the gate

A replica that fails a load is restarted with the release; a replica that dies is restarted with the one it served.
While the gate is closed requests wait up to `inference.pause-wait-s`, then get 503 + Retry-After.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np

from reef.config import Config
from reef.engines.client import EngineClient, wait_healthy
from reef.engines.host import EngineHost
from reef.errors import EngineError, LoadFailedError, ReefError, UnavailableError
from reef.observe import Metrics, log
from reef.types import Published

RETRY_AFTER_S = 2
BACKOFF_S = 0.5  # before the second restart in a row, doubled each time
MAX_BACKOFF_S = 30


class Engines:
    """One replica: started here, or attached by `inference.url`."""

    def __init__(self, config: Config, metrics: Metrics, host: EngineHost | None = None) -> None:
        """`host` starts the server; none: one of ours, or nobody where `inference.url` says that it runs already."""
        self._settings = config.inference
        self._metrics = metrics
        self._host = host
        if host is None and config.inference.url is None:
            self._host = EngineHost(
                config.inference.options,
                config.inference.context_length,
                config.reef.run_dir,
                config.logs_dir / "engine.log",
            )
        self._ready_timeout_s = config.reef.ready_timeout
        self._client: EngineClient | None = None
        self._gate = asyncio.Event()
        self._changing = asyncio.Lock()  # one load or restart at a time
        self._watcher: asyncio.Task[None] | None = None
        self._wanted: Published | None = None
        self.served: str | None = None  # the release that answers, as verified
        self.build = "unknown"
        self.context_length = 0
        self.state = "starting"  # starting | ready | loading | restarting | failed | stopped
        self.error: str | None = None
        self.num_in_flight = 0
        self.last_load: Mapping[str, float] = {}

    async def start(self, published: Published) -> None:
        """Bring the replica up with a release, verified. Raises EngineError or LoadFailedError."""
        async with self._changing:
            self._wanted = published
            await self._connect(published)

    async def verify(self, published: Published) -> None:
        """Check the serving replica against a probe that was not known when it started. Raises LoadFailedError."""
        async with self._changing:
            self._wanted = published
            await self._verify(published)

    async def stop(self) -> None:
        """End the replica, if it was started here."""
        self.state = "stopped"
        self._gate.clear()
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        if self._client is not None:
            await self._client.close()
        if self._host is not None:
            await self._host.stop()

    @contextlib.asynccontextmanager
    async def acquire(self) -> AsyncIterator[EngineClient]:
        """A client to send one request with. Raises UnavailableError where no replica opens in time."""
        if not self._gate.is_set():
            await self._wait_for_gate()
        if self._client is None:
            raise UnavailableError("no engine is connected", retry_after_s=RETRY_AFTER_S)
        self.num_in_flight += 1
        try:
            yield self._client
        finally:
            self.num_in_flight -= 1

    async def load(self, published: Published) -> None:
        """Put a release into the replica; on failure restart it with that release, once.

        Raises:
            LoadFailedError: it failed both ways; the gate stays closed and `error` says why.
        """
        async with self._changing:
            self._wanted = published
            self._gate.clear()
            self.state = "loading"
            try:
                async with asyncio.timeout(self._settings.load_timeout_s):
                    await self._load_in_place(published)
            except (ReefError, TimeoutError) as failure:
                error = failure if isinstance(failure, ReefError) else self._too_slow(published)
                log.warning("release %s did not load, restarting the engine: %s", published.release_id, error.message)
                self._metrics.load_failures.inc()
                self.error = error.message
                await self._replace(published)

    def describe(self) -> dict[str, Any]:
        """For /reef/status."""
        return {
            "url": self._client.url if self._client is not None else None,
            "state": self.state,
            "release_id": self.served,
            "build": self.build,
            "in_flight": self.num_in_flight,
            "pid": self._host.pid if self._host is not None else None,
            "last_load": dict(self.last_load),
            "error": self.error,
        }

    async def _wait_for_gate(self) -> None:
        if self.state in ("failed", "stopped"):
            raise UnavailableError(f"the engine is {self.state}: {self.error}", retry_after_s=RETRY_AFTER_S)
        try:
            async with asyncio.timeout(self._settings.pause_wait_s):
                await self._gate.wait()
        except TimeoutError:
            raise UnavailableError(f"the engine is {self.state}; try again", retry_after_s=RETRY_AFTER_S) from None

    async def _connect(self, published: Published) -> None:
        """Start (or find) the server, load the release where it has another, verify, open the gate."""
        if self._client is not None:
            await self._client.close()
        if self._host is not None:
            url = await self._host.start(published.path, published.release_id, self._ready_timeout_s)
        else:
            url = str(self._settings.url)
        self._client = EngineClient(url, self._settings.request_timeout_s)
        try:
            async with asyncio.timeout(self._ready_timeout_s):
                await wait_healthy(self._client)
        except TimeoutError:
            raise EngineError(f"the engine at {url} is not healthy after {self._ready_timeout_s:g} s") from None
        info = await self._client.model_info()
        if info.get("weight_version") != published.release_id:
            await self._client.load(published.path, published.release_id, True, self._settings.load_timeout_s)
        await self._describe_server()
        await self._verify(published)
        self._open(published)

    async def _describe_server(self) -> None:
        assert self._client is not None
        info = {**await self._client.server_info(), **await self._client.model_info()}
        self.build = str(info.get("build") or f"sglang-{info.get('version', 'unknown')}")
        engine_says = info.get("context_length") or info.get("max_context_length")
        lengths = [int(length) for length in (engine_says, self._settings.context_length) if length]
        if not lengths:
            raise EngineError("the engine does not say its context length: set inference.context-length")
        self.context_length = min(lengths)

    def _too_slow(self, published: Published) -> LoadFailedError:
        url = self._client.url if self._client is not None else None
        return LoadFailedError(
            f"the engine at {url} did not load and verify {published.release_id} in "
            f"{self._settings.load_timeout_s:g} s (inference.load-timeout-s)"
        )

    async def _load_in_place(self, published: Published) -> None:
        if self._client is None:
            raise LoadFailedError("no engine is connected")
        started = time.perf_counter()
        mode = self._settings.pause_mode
        await self._client.pause(mode)
        paused = time.perf_counter()
        try:
            await self._client.load(
                published.path, published.release_id, mode != "in_place", self._settings.load_timeout_s
            )
        except BaseException:
            if self._host is None:  # not ours: leave it as we found it; ours is replaced
                with contextlib.suppress(ReefError):
                    await self._client.resume()
            raise
        loaded = time.perf_counter()
        await self._client.resume()
        await self._verify(published)
        verified = time.perf_counter()
        self.last_load = {
            "pause_s": paused - started,
            "load_s": loaded - paused,
            "verify_s": verified - loaded,
            "total_s": verified - started,
            "size_bytes": float(published.size_bytes),
        }
        self._metrics.load_seconds.observe(verified - started)
        self._open(published)

    async def _verify(self, published: Published) -> None:
        """The replica names the release, and agrees with the trainer about the probe."""
        assert self._client is not None
        info = await self._client.model_info()
        if info.get("weight_version") != published.release_id:
            raise LoadFailedError(f"the engine holds {info.get('weight_version')}, expected {published.release_id}")
        if published.probe is None:
            return
        scored = await self._client.score(published.probe.ids)
        gap = float(np.abs(scored - np.asarray(published.probe.logprobs, dtype=np.float32)).max(initial=0.0))
        if not gap <= self._settings.verify_tolerance:  # NaN fails too
            raise LoadFailedError(
                f"engine and trainer differ by {gap:.3g} on the probe of {published.release_id}, "
                f"at most {self._settings.verify_tolerance:g} is allowed"
            )

    def _open(self, published: Published) -> None:
        self.served = published.release_id
        self.state = "ready"
        self.error = None
        self._gate.set()
        if self._host is not None and (self._watcher is None or self._watcher.done()):
            self._watcher = asyncio.create_task(self._watch(), name="engine-watcher")

    async def _replace(self, published: Published) -> None:
        """A fresh server with the release. Raises LoadFailedError and leaves the gate closed."""
        if self._host is None:
            self.state = "failed"
            raise LoadFailedError(f"the attached engine failed: {self.error}")
        self.state = "restarting"
        try:
            await self._host.stop()
            await self._connect(published)
        except (ReefError, OSError) as error:
            self.state, self.error = "failed", str(error)
            raise LoadFailedError(f"release {published.release_id} does not load: {error}") from error

    async def _watch(self) -> None:
        """Restart the server whenever it ends though nobody asked it to."""
        assert self._host is not None
        failures = 0
        while True:
            status = await self._host.wait()
            async with self._changing:
                if self._host.pid is not None:  # a load replaced it meanwhile
                    failures = 0
                    continue
                self._gate.clear()
                self.state, self.error = "restarting", f"the engine ended with {status}"
                log.warning("%s; restarting it", self.error)
                self._metrics.engine_restarts.inc()
                if failures >= self._settings.max_restarts:
                    self.state, self.error = "failed", f"the engine ended {failures + 1} times in a row, giving up"
                    log.error(self.error)
                    return
                if failures:
                    await asyncio.sleep(min(BACKOFF_S * 2**failures, MAX_BACKOFF_S))
                assert self._wanted is not None
                try:
                    await self._connect(self._wanted)
                    failures = 0
                except (ReefError, OSError) as error:  # OSError: no memory for a process, no disk for its log
                    failures += 1
                    self.error = str(error)
                    await self._host.stop()
