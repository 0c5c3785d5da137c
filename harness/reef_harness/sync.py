"""The client without asyncio: for scripts, threads and notebooks."""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, Unpack

from reef_harness.client import MAX_CONNECTIONS, TIMEOUT_S, Client, Retry
from reef_harness.errors import Closed
from reef_harness.keys import KEY_FILE
from reef_harness.types import Completion, Delta, Explanation, Json, Message, Release, ReportState
from reef_harness.wire import Asking, Grading

T = TypeVar("T")


class SyncClient:
    """:class:`Client` without asyncio: the same methods, arguments, results and errors, each call waits.

    It is the asynchronous client in an event loop of its own, in a thread: so it may be called from any number of
    threads at once, and where an event loop runs already, as in a notebook. Use it in a ``with`` block, or close it. A
    forked process has no such thread: there its calls, :meth:`close` too, raise Closed; make one in each process.
    """

    def __init__(
        self,
        url: str,
        *,
        scenario: str | None = None,
        token: str | None = None,
        key_file: Path = KEY_FILE,
        timeout_s: float = TIMEOUT_S,
        max_connections: int = MAX_CONNECTIONS,
        retry: Retry | None = None,
    ) -> None:
        self._client = Client(
            url,
            scenario=scenario,
            token=token,
            key_file=key_file,
            timeout_s=timeout_s,
            max_connections=max_connections,
            retry=retry,
        )
        self._process = os.getpid()
        self._closing = threading.Lock()  # held until it is closed
        self._lock = threading.Lock()  # of the next two: nothing is begun once it is closed
        self._closed = False
        self._begun: dict[Coroutine[Any, Any, Any], Future[Any] | None] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"reef client of {url}", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection and end the thread; calls that wait in other threads raise Closed."""
        self._check_process()
        with self._closing:
            if self._loop.is_closed():
                return
            with self._lock:
                self._closed = True
            try:
                # What was begun before is ahead of this in the loop: it is a task by then, which this ends.
                asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            finally:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()
                for future in tuple(self._begun.values()):
                    if future is not None:
                        future.cancel()

    @property
    def url(self) -> str:
        """Of the service."""
        return self._client.url

    @property
    def scenario(self) -> str | None:
        """The default for every call."""
        return self._client.scenario

    # ---- asking

    def chat(self, messages: str | Sequence[Message], **asking: Unpack[Asking]) -> Completion:
        """:meth:`Client.chat`."""
        return self._wait(self._client.chat(messages, **asking))

    def completions(self, prompt: str | Sequence[int], **asking: Unpack[Asking]) -> Completion:
        """:meth:`Client.completions`."""
        return self._wait(self._client.completions(prompt, **asking))

    def stream(self, messages: str | Sequence[Message], **asking: Unpack[Asking]) -> Iterator[Delta | Completion]:
        """:meth:`Client.stream`: leaving the loop early ends the work on the engine."""
        events = _Events(self._client.stream(messages, **asking))
        try:
            while (event := self._wait(events.next())) is not None:
                yield event
        finally:
            with suppress(Closed):  # then it is ended
                self._wait(events.close())

    # ---- reporting

    def report(
        self, references: str | Sequence[str], score: float | None = None, **grading: Unpack[Grading]
    ) -> ReportState:
        """:meth:`Client.report`."""
        return self._wait(self._client.report(references, score, **grading))

    def report_state(self, report_id: str) -> ReportState:
        """:meth:`Client.report_state`."""
        return self._wait(self._client.report_state(report_id))

    def receipt(self, receipt_id: str) -> Json:
        """:meth:`Client.receipt`."""
        return self._wait(self._client.receipt(receipt_id))

    def why(self, id: str) -> Explanation:
        """:meth:`Client.why`."""
        return self._wait(self._client.why(id))

    # ---- scenarios and releases

    def scenarios(self) -> list[Json]:
        """:meth:`Client.scenarios`."""
        return self._wait(self._client.scenarios())

    def create_scenario(self, name: str) -> Json:
        """:meth:`Client.create_scenario`."""
        return self._wait(self._client.create_scenario(name))

    def contract(self, scenario: str | None = None) -> Json:
        """:meth:`Client.contract`."""
        return self._wait(self._client.contract(scenario))

    def queue(self, scenario: str | None = None) -> Json:
        """:meth:`Client.queue`."""
        return self._wait(self._client.queue(scenario))

    def releases(
        self, scenario: str | None = None, *, limit: int | None = 1000, before: int | None = None
    ) -> list[Release]:
        """:meth:`Client.releases`."""
        return self._wait(self._client.releases(scenario, limit=limit, before=before))

    def release(self, release: str, scenario: str | None = None) -> Release:
        """:meth:`Client.release`."""
        return self._wait(self._client.release(release, scenario))

    def lineage(self, release: str, scenario: str | None = None) -> Json:
        """:meth:`Client.lineage`."""
        return self._wait(self._client.lineage(release, scenario))

    def current_release(self, scenario: str | None = None) -> Release:
        """:meth:`Client.current_release`."""
        return self._wait(self._client.current_release(scenario))

    def wait_for_release(
        self, scenario: str | None = None, *, after: str | None = None, timeout_s: float = 300.0, poll_s: float = 0.25
    ) -> Release:
        """:meth:`Client.wait_for_release`."""
        return self._wait(self._client.wait_for_release(scenario, after=after, timeout_s=timeout_s, poll_s=poll_s))

    def store_evaluation(self, release: str, result: Mapping[str, Any], scenario: str | None = None) -> Json:
        """:meth:`Client.store_evaluation`."""
        return self._wait(self._client.store_evaluation(release, result, scenario))

    @contextmanager
    def engine_for(self, release: str, scenario: str | None = None, *, timeout_s: float = 600.0) -> Iterator[str]:
        """:meth:`Client.engine_for`."""
        held = self._client.engine_for(release, scenario, timeout_s=timeout_s)
        role = self._wait(held.__aenter__())
        try:
            yield role
        except BaseException as error:
            with suppress(Closed):  # then it is given back
                self._wait(held.__aexit__(type(error), error, error.__traceback__))
            raise
        self._wait(held.__aexit__(None, None, None))

    # ---- the service itself

    def status(self) -> Json:
        """:meth:`Client.status`."""
        return self._wait(self._client.status())

    def ready(self) -> tuple[bool, str]:
        """:meth:`Client.ready`."""
        return self._wait(self._client.ready())

    # ---- the loop in its thread

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` returns, or raises. A Ctrl-C here ends it there."""
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("a SyncClient cannot be called from its own event loop")
        try:
            self._check_process()
        except Closed:
            work.close()
            raise
        with self._lock:
            if self._closed:
                work.close()
                raise Closed(f"the client of {self.url} is closed")
            self._begun[work] = None  # first: a Ctrl-C may come between any two lines
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._begun[work] = future
        try:
            future.add_done_callback(lambda _: self._begun.pop(work, None))
            return future.result()
        except CancelledError:
            raise Closed(f"the client of {self.url} was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    def _check_process(self) -> None:
        """Before any lock: a fork may have copied it held."""
        if os.getpid() != self._process:
            raise Closed(f"the client of {self.url} was made in another process, {self._process}: make one in each")

    async def _end(self) -> None:
        """Close the client, and end what still waits for an answer.

        Only what was begun here is cancelled: the tasks under it are their parents' to end. anyio cancels none of its
        own before its first step, for the coroutine within would never be awaited.
        """
        waiting = asyncio.all_tasks() - {asyncio.current_task()} - self._client.returns
        for task in waiting:
            if task.get_coro() in self._begun:
                task.cancel()
        if waiting:
            await asyncio.wait(waiting)
        await self._client.close()
        await asyncio.get_running_loop().shutdown_asyncgens()


class _Events(Generic[T]):
    """An asynchronous generator that is closed only once its step has ended, though nobody waits for that any more."""

    def __init__(self, events: AsyncGenerator[T]) -> None:
        self._events = events
        self._step = asyncio.Lock()

    async def next(self) -> T | None:
        """The next event; None at the end."""
        async with self._step:
            return await anext(self._events, None)

    async def close(self) -> None:
        async with self._step:
            await self._events.aclose()
