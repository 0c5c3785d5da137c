"""One engine server: which release it holds, how a new one gets in, and what happens where that fails or it ends.

    load(release):  close the gate -> pause -> load -> continue -> verify (id, probe) -> open the gate

The server reads the release's files, or is sent its tensors by the trainer. One that fails a load is restarted with the
release, once; one that dies is restarted with the release wanted last. For that there must be files: while the trainer
alone holds the release, it waits until they are written. The gate is open only while the server holds the release
wanted last, verified.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from reef.config import Config
from reef.engines.client import EngineClient, wait_healthy
from reef.engines.host import Host
from reef.engines.transfer import Transfer, transfer_weights
from reef.errors import EngineError, LoadFailedError, ReefError
from reef.faults import reach
from reef.observe import Metrics, log
from reef.types import Published

BACKOFF_S = 0.5  # before the second restart in a row, doubled each time
MAX_BACKOFF_S = 30
MAX_DOUBLINGS = 10  # more make no wait longer
LOOK_S = 2.0  # between looks at a server that is not ours


class Replica:
    """A server of ours (`host` starts it), or the one that `inference.url` names (no host).

    `start`, `load`, `verify` and `recover` are called one at a time; requests and the watcher run beside them.
    """

    def __init__(
        self,
        name: str,
        config: Config,
        metrics: Metrics,
        host: Host | None,
        need_files: Callable[[], None] = lambda: None,
    ) -> None:
        """`need_files` is called when a restart waits for the files of a release that the trainer alone holds."""
        self.name = name
        self._need_files = need_files
        self._settings = config.inference
        self._ready_timeout_s = config.reef.ready_timeout
        self._metrics = metrics
        self._host = host
        self._client: EngineClient | None = None
        self._wanted: Published | None = None
        self._has_files = asyncio.Event()  # of the release wanted
        # Whether a transfer was cut: the server may hold parts of two releases, whatever it says. One that is not ours
        # may have been left so by a service that was killed.
        self._torn = host is None and config.training.sync.transport == "distributed"
        self._watcher: asyncio.Task[None] | None = None
        self.gate = asyncio.Event()
        self.opened_at = 0.0  # when the gate opened last; monotonic
        self._closed_at: float | None = time.monotonic()  # when it closed last; None: it is open
        self._closed_s = 0.0  # the times before that, together
        self.served: str | None = None  # the release that answers, as verified; while the gate is closed, that did
        self.build = "unknown"
        self.context_length = 0
        self.state = "starting"  # starting | ready | loading | restarting | failed | stopped
        self.error: str | None = None
        self.num_in_flight = 0
        self.num_used = 0  # requests so far
        self.last_load: Mapping[str, float] = {}

    @property
    def ready(self) -> bool:
        """Whether it may be sent requests."""
        return self.gate.is_set()

    @property
    def closed_s(self) -> float:
        """Seconds so far in which it took no requests, while it started, loaded or was restarted."""
        return self._closed_s + (0.0 if self._closed_at is None else time.monotonic() - self._closed_at)

    @property
    def url(self) -> str | None:
        """Where its server listens; None while it is not connected."""
        return self._client.url if self._client is not None else None

    @property
    def pid(self) -> int | None:
        """The process id of its server; None where that does not run, or is not ours."""
        return self._host.pid if self._host is not None else None

    @contextlib.contextmanager
    def use(self) -> Iterator[EngineClient]:
        """The client to send one request with. Only while it is ready."""
        assert self._client is not None
        self.num_in_flight += 1
        self.num_used += 1
        try:
            yield self._client
        finally:
            self.num_in_flight -= 1

    def want(self, published: Published) -> None:
        """Answer nobody until this release is in; a restart under way ends with it."""
        self._want(published)
        if self.ready:
            self._leave("loading")

    @property
    def lacks_files(self) -> bool:
        """Whether it is out of rotation until the files of the release wanted are written."""
        return not self.ready and self.state == "restarting" and not self._has_files.is_set()

    def provide(self, published: Published) -> None:
        """The files of a release were written; where it is the one wanted, a restart can go on."""
        if self._wanted is not None and self._wanted.release_id == published.release_id:
            self._want(published)

    async def start(self, published: Published) -> None:
        """Bring the server up with a release, verified. Raises EngineError or LoadFailedError."""
        self.want(published)
        try:
            await self._bring_up()
        except ReefError as error:
            self._leave("failed", error.message)
            raise
        self._watch(failures=0)

    async def load(self, published: Published, transfer: Transfer | None = None) -> None:
        """Put a release into the running server; on failure restart it with that release, once.

        Args:
            transfer: brings the tensors from the trainer; None: the server reads the files.

        Raises:
            LoadFailedError: it failed both ways (one, where there are no files to restart it with); the gate stays
                closed and `error` says why.
        """
        self.want(published)
        await self._end_watcher()
        self._leave("loading")
        try:
            await self._load_or_restart(published, transfer)
        except ReefError as error:
            self._leave("failed", error.message)
            raise LoadFailedError(error.message) from error
        self._watch(failures=0)

    async def verify(self, published: Published) -> None:
        """Check the server against a probe that was not known when it started. Raises EngineError, LoadFailedError."""
        self._want(published)
        await self._verify(published)

    def recover(self) -> None:
        """Restart the server with the wanted release in the background, again and again, but max-restarts times.

        For one that failed to start, to load or to verify, while others do not. One that is not ours is asked again
        and again to load it. Nothing happens where it is under way.
        """
        if self.state != "restarting":
            self._leave("restarting", self.error)
            self._watch(failures=1)

    async def stop(self) -> None:
        """Take no more requests and end the server, if it is ours."""
        self._leave("stopped")
        await self._end_watcher()
        if self._client is not None:
            await self._client.close()
        if self._host is not None:
            await self._host.stop()

    def describe(self) -> dict[str, Any]:
        """For /reef/status."""
        return {
            "url": self.url,
            "state": self.state,
            "release_id": self.served,
            "build": self.build,
            "in_flight": self.num_in_flight,
            "pid": self.pid,
            "last_load": dict(self.last_load),
            "error": self.error,
        }

    def _want(self, published: Published) -> None:
        self._wanted = published
        if published.on_disk:
            self._has_files.set()
        else:
            self._has_files.clear()

    def _leave(self, state: str, error: str | None = None) -> None:
        """Out of rotation, and why."""
        self.gate.clear()
        self._closed_at = self._closed_at or time.monotonic()
        self.state, self.error = state, error

    def _open(self, published: Published) -> None:
        self.served = published.release_id
        self.state, self.error = "ready", None
        self._closed_s, self._closed_at = self.closed_s, None
        self.opened_at = time.monotonic()
        self.gate.set()

    async def _bring_up(self) -> None:
        """Start (or find) the server, load what is wanted where it has another, verify, open the gate."""
        assert self._wanted is not None
        if self._client is not None:
            await self._client.close()
        self._client = None
        if self._host is None:
            url = str(self._settings.url)
        else:
            await self._host.stop()
            await self._files()
            try:
                url = await self._host.start(self._wanted.path, self._wanted.release_id, self._ready_timeout_s)
            except OSError as error:  # no memory for a process, no disk for its log
                raise EngineError(f"{self.name} does not start: {error}") from error
            self._torn = False
        key = self._host.key if self._host is not None else None
        client = self._client = EngineClient(url, self._settings.request_timeout_s, key)
        try:
            async with asyncio.timeout(self._ready_timeout_s):
                await wait_healthy(client)
                await self._describe_server(client)
            while not self.ready:  # another release may be wanted by the time that one is in
                await self._files()  # (as long as a step takes)
                async with asyncio.timeout(self._ready_timeout_s):
                    await self._settle(client)
        except TimeoutError:
            raise EngineError(f"{self.name} at {url} is not up after {self._ready_timeout_s:g} s") from None

    async def _files(self) -> None:
        """Wait until the release wanted is on disk."""
        if not self._has_files.is_set():
            self._need_files()
            await self._has_files.wait()

    async def _settle(self, client: EngineClient) -> None:
        """Hold what is wanted now, verified."""
        published = self._wanted
        assert published is not None
        held = (await client.model_info()).get("weight_version")
        if self._torn or held != published.release_id:
            await client.load(published.path, published.release_id, True, self._settings.load_timeout_s)
            self._torn = False
        if self._host is None:  # a load that failed, or that its service was killed in, may have left it paused
            await client.resume()
        await self._verify(published)
        if published is self._wanted:
            self._open(published)

    async def _describe_server(self, client: EngineClient) -> None:
        info = {**await client.server_info(), **await client.model_info()}
        self.build = str(info.get("build") or f"sglang-{info.get('version', 'unknown')}")
        lengths = [length for length in (await client.context_length(), self._settings.context_length) if length]
        if not lengths:
            raise EngineError("the engine does not say its context length: set inference.context-length")
        self.context_length = min(lengths)

    async def _load_or_restart(self, published: Published, transfer: Transfer | None) -> None:
        try:
            async with asyncio.timeout(self._settings.load_timeout_s):
                await self._load_in_place(published, transfer)
            return
        except ReefError as error:
            failure = error.message
        except TimeoutError:
            failure = (
                f"{self.name} at {self.url} did not load and verify {published.release_id} in "
                f"{self._settings.load_timeout_s:g} s (inference.load-timeout-s)"
            )
        self._metrics.load_failures.inc()
        if not published.on_disk:
            raise EngineError(failure)
        again = "restarting" if self._host is not None else "trying once more with"
        log.warning("release %s did not load, %s %s: %s", published.release_id, again, self.name, failure)
        self._leave("restarting", failure)
        await self._bring_up()

    async def _load_in_place(self, published: Published, transfer: Transfer | None) -> None:
        if self._client is None:
            raise EngineError(f"{self.name} is not connected")
        started = time.perf_counter()
        mode = self._settings.pause_mode
        await self._client.pause(mode)
        paused = time.perf_counter()
        reach("load.paused")
        flush_cache = mode != "in_place"
        timeout_s = self._settings.load_timeout_s
        try:
            if transfer is None:
                await self._client.load(published.path, published.release_id, flush_cache, timeout_s)
            else:
                self._torn = True
                await transfer_weights(
                    self._client, self.name, self._settings.tensor, transfer, published, flush_cache, timeout_s
                )
        except BaseException:
            # Not ours: leave it as we found it, but not going on with half of a release. Ours is replaced.
            if self._host is None and not self._torn:
                with contextlib.suppress(ReefError):
                    await self._client.resume()
            raise
        self._torn = False
        loaded = time.perf_counter()
        reach("load.loaded")
        await self._client.resume()
        resumed = time.perf_counter()
        reach("load.resumed")
        await self._verify(published)
        verified = time.perf_counter()
        reach("load.verified")
        self.last_load = {
            "pause_s": resumed - started,
            "transfer_s": loaded - paused,
            "verify_s": verified - resumed,
            "total_s": verified - started,
            "size_bytes": float(published.size_bytes),
        }
        self._metrics.load_seconds.observe(verified - started)
        for phase in ("pause", "transfer", "verify"):
            self._metrics.load_phases.labels(phase).observe(self.last_load[f"{phase}_s"])
        self._metrics.load_bytes.inc(published.size_bytes)
        self._open(published)

    async def _verify(self, published: Published) -> None:
        """The server names the release, and agrees with the trainer about the probe."""
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
                f"at most {self._settings.verify_tolerance:g} is allowed (inference.verify-tolerance)"
            )

    def _watch(self, failures: int) -> None:
        """Watch over the server from now on, after so many restarts in a row that failed."""
        if self._watcher is not None:
            self._watcher.cancel()
        self._watcher = asyncio.create_task(self._keep_up(failures), name=f"{self.name}-watcher")

    async def _end_watcher(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait({self._watcher})

    async def _keep_up(self, failures: int) -> None:
        """Bring the server up again whenever it ends though nobody asked it to."""
        while True:
            if self.ready:
                self._leave("restarting", await self._ended())
                failures = 0
            if self._host is not None and failures >= self._settings.max_restarts:
                self._leave("failed", f"giving up after {failures} restarts in a row: {self.error}")
                log.error(self.error)
                return
            if failures:
                await asyncio.sleep(min(BACKOFF_S * 2 ** min(failures - 1, MAX_DOUBLINGS), MAX_BACKOFF_S))
            log.warning("restarting %s: %s", self.name, self.error)
            self._metrics.engine_restarts.inc()
            try:
                await self._bring_up()
            except ReefError as error:
                failures += 1
                self.error = error.message
            except Exception as error:  # noqa: BLE001 - a supervisor: nobody else would bring it up again
                failures += 1
                self.error = f"{self.name} does not start: {error!r}"
                log.error(self.error, exc_info=error)

    async def _ended(self) -> str:
        """How the server ended, once it has; one that is not ours also where it holds other weights by itself."""
        if self._host is not None:
            return f"{self.name} ended with {await self._host.wait()}"
        assert self._client is not None
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                held = (await self._client.model_info()).get("weight_version")
            except ReefError as error:
                return error.message
            if held != self.served:
                return f"{self.url} holds {held} instead of {self.served}: was it restarted?"
