"""The generation thread: the scheduler on one side, an event loop on the other.

Other threads hand in commands; the thread runs them between two steps, in order, so the scheduler needs no locks.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from reef.engines.embedded.architecture import Architecture, read_architecture
from reef.engines.embedded.cache import KVCache
from reef.engines.embedded.errors import EngineStoppedError, ModelError, QueueFullError
from reef.engines.embedded.model import Model
from reef.engines.embedded.request import Request, Snapshot
from reef.engines.embedded.scheduler import Scheduler
from reef.engines.embedded.weights import Weights, load_weights

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of one engine."""

    context_length: int
    max_running_requests: int
    max_queued_requests: int
    max_total_tokens: int
    """Tokens of keys and values, padding included: rows x the longest reservation among them."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How a weight load ended. On failure the weights before are in use, untouched."""

    success: bool
    message: str
    num_paused_requests: int


class Engine:
    """A model, its scheduler and the thread that runs them. Methods are called from the event loop's thread."""

    def __init__(self, model: Model, dtype: torch.dtype, limits: Limits, version: str, path: Path, seed: int) -> None:
        self.limits = limits
        self.model_path = str(path)
        """The directory the current weights came from, or those before that were received."""
        self.seeds = random.Random(seed)
        """Draws a seed for each request that brings none."""
        self._model = model
        self._dtype = dtype
        cache = KVCache(model.arch, dtype, limits.max_running_requests, limits.max_total_tokens)
        self._outbox: list[tuple[Request, Snapshot]] = []
        self._scheduler = Scheduler(model, cache, limits.max_running_requests, version, self._load, self._send)
        self._changed = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._num_incoming = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self.failure: BaseException | None = None
        """What ended the thread, if it was not `stop`."""

    def start(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[], None]) -> None:
        """Starts the thread; sinks, and `on_end` when the thread is over, are called on `loop`."""
        self._loop = loop
        self._on_end = on_end
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends every request as aborted and the thread with it; False if it is still busy after `timeout_s`."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def arch(self) -> Architecture:
        """Of the model served; a load cannot change it."""
        return self._model.arch

    @property
    def alive(self) -> bool:
        """Whether the thread runs and is not about to end."""
        return self._thread.is_alive() and not self._stopping

    @property
    def version(self) -> str:
        """The name of the current weights."""
        return self._scheduler.version

    @property
    def paused(self) -> bool:
        """Whether generation is paused."""
        return self._scheduler.paused

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return len(self._scheduler.rows)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._scheduler.waiting) + self._num_incoming

    @property
    def num_free_tokens(self) -> int:
        """Tokens of `max_total_tokens` that no running request has reserved."""
        rows = self._scheduler.rows
        return self.limits.max_total_tokens - len(rows) * rows.longest_bound

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests; their sinks hear of them from now on.

        Raises:
            QueueFullError: there is no room for all of them; none is queued.
            EngineStoppedError: the thread has ended.
        """

        def add() -> None:
            for request in requests:
                self._scheduler.add(request)
            self._num_incoming -= len(requests)

        with self._changed:
            if self.num_waiting + len(requests) > self.limits.max_queued_requests:
                raise QueueFullError("The request queue is full.")
            self._num_incoming += len(requests)
            self._enqueue(add)

    def abort(self, requests: Iterable[Request]) -> None:
        """Ends these requests soon, wherever they are."""
        targets = set(map(id, requests))
        with self._changed:
            if self.alive:
                self._enqueue(lambda: self._abort(targets))

    async def abort_matching(self, matches: Callable[[Request], bool]) -> int:
        """Ends the requests that match; returns how many."""
        return await self._call(lambda: self._scheduler.abort(matches))

    async def pause(self, mode: str) -> None:
        """See `Scheduler.pause`; returns once generation stands still."""
        await self._call(lambda: self._scheduler.pause(mode))

    async def resume(self) -> None:
        """See `Scheduler.resume`."""
        await self._call(self._scheduler.resume)

    async def flush(self) -> bool:
        """See `Scheduler.flush`."""
        return await self._call(self._scheduler.flush)

    async def rename(self, version: str) -> None:
        """See `Scheduler.rename`."""
        await self._call(lambda: self._scheduler.rename(version))

    async def load(self, source: Path | Weights, version: str | None, flush_cache: bool) -> LoadResult:
        """Replaces the weights by those in a directory, or by these; see `Scheduler.request_load` for when."""
        result: Future[LoadResult] = Future()

        def reply(success: bool, message: str, num_live: int) -> None:
            if success and isinstance(source, Path):
                self.model_path = str(source)
            if not result.done():
                result.set_result(LoadResult(success, message, num_live))

        await self._call(lambda: self._scheduler.request_load(source, version, flush_cache, reply))
        return await asyncio.wrap_future(result)

    async def _call(self, command: Callable[[], T]) -> T:
        result: Future[T] = Future()

        def run() -> None:
            if result.set_running_or_notify_cancel():
                result.set_result(command())

        with self._changed:
            self._enqueue(run)
        return await asyncio.wrap_future(result)

    def _enqueue(self, command: Callable[[], None]) -> None:
        if not self.alive:
            raise EngineStoppedError("the engine has stopped")
        self._commands.append(command)
        self._changed.notify()

    def _abort(self, targets: set[int]) -> None:
        self._scheduler.abort(lambda request: id(request) in targets)

    def _load(self, source: Path | Weights) -> None:
        if isinstance(source, Weights):
            self._model.weights = source
            return
        if (source / "config.json").exists():
            arch = read_architecture(source)
            if arch != self.arch:
                raise ModelError(f"{source} is another architecture than the one served: {arch}, expected {self.arch}")
        self._model.weights = load_weights(source, self.arch, self._dtype)

    def _send(self, request: Request, snapshot: Snapshot) -> None:
        self._outbox.append((request, snapshot))

    def _post(self) -> None:
        """Hands what a turn produced to the event loop: one wake-up a turn, not one a request."""
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            self._loop.call_soon_threadsafe(_deliver, outbox)

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._turn():
                    self._post()
                self._scheduler.close()
                self._post()
        except Exception as error:
            log.exception("the generation thread failed; the server ends")
            self.failure = error
        finally:
            self._loop.call_soon_threadsafe(self._on_end)

    def _turn(self) -> bool:
        """Waits for something to do and does it; False once the engine is to stop."""
        with self._changed:
            while not (self._commands or self._stopping or self._scheduler.has_work):
                self._changed.wait()
            if self._stopping:
                # Commands that came in time still run: their callers wait for them.
                self._drain()
                return False
            self._drain()
        self._scheduler.step()
        return True

    def _drain(self) -> None:
        commands, self._commands = self._commands, []
        for command in commands:
            command()


def _deliver(outbox: list[tuple[Request, Snapshot]]) -> None:
    for request, snapshot in outbox:
        request.sink(request, snapshot)
