"""An asynchronous client of a Reef service: ask, report, and follow what became of the reports."""

import asyncio
import random
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import httpx

from reef_harness import wire
from reef_harness.errors import (
    BrokenStream,
    Closed,
    EngineFailed,
    HarnessError,
    NotFound,
    ServiceError,
    TooManyRequests,
    Unavailable,
    UnexpectedAnswer,
    Unreachable,
    from_response,
)
from reef_harness.keys import KEY_FILE, find_key, is_here
from reef_harness.lanes import transport_for
from reef_harness.streams import Assembly, event_data
from reef_harness.types import Completion, Delta, Explanation, Json, Message, Release, ReportState
from reef_harness.wire import Asking, Grading, part

TIMEOUT_S = 630.0  # longer than the service lets a request take: then it is the service that says so
MAX_CONNECTIONS = 256
_NOT_STARTED = (TooManyRequests, Unavailable)  # refused before any work: safe to ask again
_RELEASES_A_PAGE = 1000  # the service gives no more at once
_LOOKED_AT = 20  # links at first for the current one: as a rule it is the newest
_POOL_S = 10.0  # a request that has a lane has its connection: longer than that is a fault, not a queue
_END_S = 1.0  # for the end of a stream's body behind [DONE]: it comes at once, or the connection is closed
_GIVE_BACK_S = 30.0  # of giving an engine back after a failure: the service ends it by itself when it is idle
_TRANSIENT = (*_NOT_STARTED, EngineFailed)  # safe to try again only where the request is idempotent


@dataclass(frozen=True, slots=True)
class Retry:
    """How long to keep trying: pauses double from ``first_s`` to ``longest_s``, for at most ``total_s`` in all.

    ``on_pause`` is called before each pause: with what went wrong, and the seconds for which it is tried still.
    """

    first_s: float = 0.1
    longest_s: float = 5.0
    total_s: float = 60.0
    on_pause: Callable[[HarnessError, float], None] | None = None

    def pause_s(self, attempt: int, asked_s: float | None) -> float:
        """The pause after failed attempt number ``attempt`` (from 0); never shorter than the service asked for."""
        backoff_s = min(self.longest_s, self.first_s * 2.0 ** min(attempt, 30)) * random.uniform(0.5, 1.0)
        return max(backoff_s, asked_s or 0.0)


class Client:
    """Speaks to one service. Use as ``async with Client(url, scenario="arithmetic") as client``.

    ``scenario`` is the default for every call. The key that is sent as a bearer token is ``token``, else REEF_API_KEY,
    else, for a service on this machine, the content of ``key_file``. Requests that the service refused before starting
    (429, 503) are tried again within ``retry``, honouring Retry-After; so are, for idempotent calls, broken connections
    and gateway errors. At most ``max_connections`` requests are in work at once, others wait. Every failure is a
    subclass of :class:`reef_harness.errors.HarnessError`; arguments that make no sense are a ValueError or TypeError.
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
        self.url = wire.service_url(url)
        self.scenario = scenario
        self.max_connections = max_connections
        self.retry = retry or Retry()
        key = find_key(self.url, token, key_file)
        self._timeout = httpx.Timeout(timeout_s, connect=10.0, pool=_POOL_S)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            trust_env=not is_here(self.url),
            timeout=self._timeout,
            transport=transport_for(self.url, max_connections),
        )
        self._loans: dict[str, str] = {}  # of engines: the path of each
        self._returns: set[asyncio.Task[None]] = set()  # of loans, under way

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Give back the engines that are lent to us still, and close every connection."""
        try:
            for loan in list(self._loans):
                self._begin_return(loan, _GIVE_BACK_S)
            if self._returns:
                await asyncio.wait(self._returns)
        finally:
            await self._http.aclose()

    @property
    def returns(self) -> frozenset["asyncio.Task[None]"]:
        """Engines on their way back: who ends all tasks leaves these to :meth:`close`."""
        return frozenset(self._returns)

    # ---- asking

    async def chat(self, messages: str | Sequence[Message], **asking: Unpack[Asking]) -> Completion:
        """Ask for answers to a conversation (a string is one user message): :class:`reef_harness.wire.Asking`.

        Asked again only where the service refused before it began. ``tools`` and the like go into ``extra``.
        """
        body, headers = wire.chat_body(messages, asking), wire.ask_headers(asking, self.scenario)
        return wire.completion(await self._send("POST", "/v1/chat/completions", body=body, headers=headers))

    async def completions(self, prompt: str | Sequence[int], **asking: Unpack[Asking]) -> Completion:
        """Ask for continuations of a text or of token ids; the other arguments are those of :meth:`chat`."""
        body, headers = wire.completion_body(prompt, asking), wire.ask_headers(asking, self.scenario)
        return wire.completion(await self._send("POST", "/v1/completions", body=body, headers=headers))

    async def stream(
        self, messages: str | Sequence[Message], **asking: Unpack[Asking]
    ) -> AsyncGenerator[Delta | Completion]:
        """As :meth:`chat`, told as it comes: deltas of text, reasoning and tool calls, then the Completion, last.

        Raises BrokenStream where the stream ends early; a Completion only comes once its receipts are durable. Whoever
        leaves the loop before its end closes the generator (``contextlib.aclosing``): that ends the work on the engine.
        """
        body = wire.chat_body(messages, asking, stream=True, stream_options={"include_usage": True})
        headers = wire.ask_headers(asking, self.scenario)
        response = await self._send("POST", "/v1/chat/completions", body=body, headers=headers, stream=True)
        try:
            url = str(response.request.url)
            if not response.headers.get("content-type", "").startswith("text/event-stream"):
                kind = response.headers.get("content-type")
                raise UnexpectedAnswer(f"{url} answered a stream with {kind}, not text/event-stream")
            assembly = Assembly(
                url, response.headers.get(wire.RECEIPT_HEADER), response.headers.get(wire.RELEASE_HEADER)
            )
            events = event_data(response.aiter_bytes())
            async for data in events:
                for delta in assembly.take(data):
                    yield delta
                if assembly.done:
                    break  # whole, whenever the body ends
            yield assembly.completion()
            await _read_end(events)
        except httpx.HTTPError as error:
            self._check_open()
            raise BrokenStream(f"{url}: the stream broke: {type(error).__name__} {error}".rstrip()) from error
        finally:
            await response.aclose()

    # ---- reporting

    async def report(
        self, references: str | Sequence[str], score: float | None = None, **grading: Unpack[Grading]
    ) -> ReportState:
        """Grade one or more receipts (:class:`reef_harness.wire.Grading`); return once the report is durable.

        Idempotent: the report's id is made once (or given), and every retry sends the same id and body. ``grader`` is
        (id, version). Raises ValueError for a score that is not a finite number.
        """
        body = wire.report_body(references, score, grading)
        return wire.report_state(await self._json("POST", "/reef/report", body=body, idempotent=True))

    async def report_state(self, report_id: str) -> ReportState:
        """What became of a report."""
        return wire.report_state(await self._json("GET", f"/reef/reports/{part(report_id)}"))

    async def receipt(self, receipt_id: str) -> Json:
        """The whole receipt: ids, log-probabilities, releases, digests."""
        return await self._json("GET", f"/reef/receipts/{part(receipt_id)}")

    async def why(self, id: str) -> Explanation:
        """Explain a report or a receipt, by whichever of the two ``id`` is. Raises NotFound where it is neither."""
        try:
            report = await self.report_state(id)
        except NotFound:
            return Explanation(receipt=await self.receipt(id))
        scenario = report.raw.get("scenario") or self.scenario
        if not report.release or not scenario:
            return Explanation(report)
        release, lineage = await asyncio.gather(
            self.release(report.release, scenario), self.lineage(report.release, scenario)
        )
        return Explanation(report, None, release, lineage)

    # ---- scenarios and releases

    async def scenarios(self) -> list[Json]:
        """All scenarios."""
        return wire.listed(await self._json("GET", "/reef/scenarios"), "scenarios")

    async def create_scenario(self, name: str) -> Json:
        """Create a scenario, or return the one there is."""
        return await self._json("POST", "/reef/scenarios", body={"name": name}, idempotent=True)

    async def contract(self, scenario: str | None = None) -> Json:
        """The method's settings (``config``), the model, and the schema of a report."""
        return await self._json("GET", f"{self._path(scenario)}/contract")

    async def queue(self, scenario: str | None = None) -> Json:
        """Mode, ``head``, and how many reports are ``pending`` and ``reserved``."""
        return await self._json("GET", self._path(scenario))

    async def releases(
        self, scenario: str | None = None, *, limit: int | None = 1000, before: int | None = None
    ) -> list[Release]:
        """The scenario's chain, newest first: at most ``limit`` links (None: all), those numbered below ``before``."""
        found: list[Release] = []
        while limit is None or len(found) < limit:
            size = _RELEASES_A_PAGE if limit is None else min(_RELEASES_A_PAGE, limit - len(found))
            query = f"limit={size}" if before is None else f"limit={size}&before={before}"
            listed = wire.listed(await self._json("GET", f"{self._path(scenario)}/releases?{query}"), "releases")
            found += [wire.release(entry) for entry in listed]
            if len(listed) < size or (before := found[-1].number) is None:
                break
        return found

    async def release(self, release: str, scenario: str | None = None) -> Release:
        """One link of the chain."""
        return wire.release(await self._json("GET", f"{self._path(scenario)}/releases/{part(release)}"))

    async def lineage(self, release: str, scenario: str | None = None) -> Json:
        """The batch that made a release: its ``samples``, each with report, receipt, group and reward."""
        return await self._json("GET", f"{self._path(scenario)}/releases/{part(release)}/lineage")

    async def current_release(self, scenario: str | None = None) -> Release:
        """The head of the chain: what the engine serves, or is about to load."""
        size, before, looked = _LOOKED_AT, None, 0
        while True:
            page = await self.releases(scenario, limit=size, before=before)
            for release in page:
                if release.current:
                    return release
            looked += len(page)
            if len(page) < size or (before := page[-1].number) is None:
                raise UnexpectedAnswer(f"none of the {looked} releases of {self._scenario(scenario)!r} is current")
            size = _RELEASES_A_PAGE  # held or rejected ones in such a number are rare

    async def wait_for_release(
        self, scenario: str | None = None, *, after: str | None = None, timeout_s: float = 300.0, poll_s: float = 0.25
    ) -> Release:
        """Wait until the head of the chain is another release than ``after`` (default: the head there is now).

        Raises TimeoutError after ``timeout_s``.
        """
        async with asyncio.timeout(timeout_s):
            if after is None:
                after = (await self.current_release(scenario)).id
            while True:
                current = await self.current_release(scenario)
                if current.id != after:
                    return current
                await asyncio.sleep(poll_s)

    async def store_evaluation(self, release: str, result: Mapping[str, Any], scenario: str | None = None) -> Json:
        """Store a held-out result on a release."""
        path = f"{self._path(scenario)}/releases/{part(release)}/evaluations"
        return await self._json("POST", path, body=dict(result))

    @asynccontextmanager
    async def engine_for(
        self, release: str, scenario: str | None = None, *, timeout_s: float = 600.0
    ) -> AsyncIterator[str]:
        """Within the block, requests that name ``release`` are answered by it, whatever is served meanwhile.

        The value is who answers: ``serving``, ``candidate``, or ``evaluation``, an engine of its own, which the service
        is told to end with the block. Starting one can take minutes; ``timeout_s`` is for that. Raises Conflict where
        another release has the engine, or this one's weights are gone.
        """
        path = f"{self._path(scenario)}/releases/{part(release)}/engine"
        loan = uuid.uuid4().hex  # ours: so it can be given back though no answer came
        self._loans[loan] = path
        try:
            role = await self._lend(path, loan, timeout_s)
            if role != "evaluation":
                self._loans.pop(loan, None)  # nothing was lent
            yield role
        except BaseException as error:
            await self._give_back(loan, error)
            raise
        await self._give_back(loan)

    async def _lend(self, path: str, loan: str, timeout_s: float) -> str:
        try:
            return str((await self._json("POST", path, body={"loan": loan}, timeout_s=timeout_s)).get("role"))
        except (ServiceError, Unreachable) as error:
            # A 502 or 504 may be a gateway's, and an answer may be lost: then the service may have lent it.
            refused = isinstance(error, ServiceError) and not isinstance(error, EngineFailed)
            if refused or isinstance(error.__cause__, httpx.ConnectError):
                self._loans.pop(loan, None)  # who closes the client may have given it back
            raise

    async def _give_back(self, loan: str, reason: BaseException | None = None) -> None:
        """End a loan, whoever cancels us meanwhile. After a failure that matters more than one of this."""
        if (task := self._begin_return(loan, None if reason is None else _GIVE_BACK_S)) is None:
            return
        try:
            await asyncio.shield(task)
        except HarnessError as error:
            if reason is None:
                raise
            reason.add_note(f"and the engine was not given back (it ends when idle): {error}")

    def _begin_return(self, loan: str, limit_s: float | None) -> "asyncio.Task[None] | None":
        """None where it was returned before, or never lent."""
        path = self._loans.pop(loan, None)
        if path is None:
            return None
        task = asyncio.create_task(self._return(path, loan, limit_s))
        self._returns.add(task)
        task.add_done_callback(self._returned)
        return task

    async def _return(self, path: str, loan: str, limit_s: float | None) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await self._json("DELETE", f"{path}?loan={loan}", idempotent=True)
        except TimeoutError:
            raise Unreachable(f"DELETE {path}: no answer within {limit_s} s") from None

    def _returned(self, task: "asyncio.Task[None]") -> None:
        self._returns.discard(task)
        if not task.cancelled():
            task.exception()  # told to who waits for it, if anybody does

    # ---- the service itself

    async def status(self) -> Json:
        """Step in flight, queues, engines and their release, errors."""
        return await self._json("GET", "/reef/status")

    async def ready(self) -> tuple[bool, str]:
        """Whether the service is ready, and if not, what it says it waits for. Never raises for a service not up."""
        self._check_open()
        try:
            response = await self._http.get("/readyz")
        except httpx.HTTPError as error:
            self._check_open()
            return False, f"no answer yet ({type(error).__name__})"
        return response.status_code == 200, response.text

    # ---- the wire

    def _scenario(self, scenario: str | None) -> str:
        name = scenario or self.scenario
        if name is None:
            raise ValueError("name a scenario, here or when making the Client")
        return name

    def _path(self, scenario: str | None) -> str:
        return f"/reef/scenarios/{part(self._scenario(scenario))}"

    async def _json(
        self,
        method: str,
        path: str,
        *,
        body: Json | None = None,
        idempotent: bool = False,
        timeout_s: float | None = None,
    ) -> Json:
        idempotent = idempotent or method == "GET"
        response = await self._send(method, path, body=body, headers={}, idempotent=idempotent, timeout_s=timeout_s)
        return wire.json_object(response)

    async def _send(
        self,
        method: str,
        path: str,
        *,
        body: Json | None,
        headers: dict[bytes, bytes],
        idempotent: bool = False,
        stream: bool = False,
        timeout_s: float | None = None,
    ) -> httpx.Response:
        """Send until answered below 400, an error not worth a retry, or the end of ``retry.total_s``.

        With ``stream`` the answer's body is still to be read, and the answer to be closed.
        """
        deadline = time.monotonic() + self.retry.total_s
        timeout = self._timeout if timeout_s is None else httpx.Timeout(timeout_s, connect=10.0, pool=_POOL_S)
        attempt = 0
        while True:
            # Built here each time: one that was sent has no body left to send.
            request = self._http.build_request(method, path, json=body, headers=headers, timeout=timeout)
            try:
                return await self._send_once(request, stream)
            except (Unreachable, ServiceError) as error:
                asked_s = error.retry_after_s if isinstance(error, ServiceError) else None
                pause_s = self.retry.pause_s(attempt, asked_s)
                left_s = deadline - time.monotonic()
                if not _worth_a_retry(error, idempotent) or pause_s > left_s:
                    raise
                if self.retry.on_pause:
                    self.retry.on_pause(error, left_s)
            attempt += 1
            await asyncio.sleep(pause_s)

    def _check_open(self) -> None:
        if self._http.is_closed:
            raise Closed(f"the client of {self.url} is closed")

    async def _send_once(self, request: httpx.Request, stream: bool) -> httpx.Response:
        self._check_open()
        try:
            response = await self._http.send(request, stream=stream)
            if response.status_code >= 400:
                await _read(response)
        except httpx.HTTPError as error:
            self._check_open()  # what closing breaks is no fault of the connection
            hint = "; is it running? (reef serve)" if isinstance(error, httpx.ConnectError) else ""
            told = f"{type(error).__name__} {error}".rstrip()
            raise Unreachable(f"{request.method} {request.url}: {told}{hint}") from error
        if response.status_code >= 400:
            raise from_response(response)
        return response


async def _read_end(events: AsyncIterator[bytes]) -> None:
    """Read what comes behind the end of a stream, as a rule nothing: then its connection can be used again."""
    with suppress(TimeoutError, httpx.HTTPError):
        async with asyncio.timeout(_END_S):
            async for _ in events:
                pass


async def _read(response: httpx.Response) -> None:
    """The body of an answer, which is closed then, also where the body breaks or whoever reads it is cancelled."""
    try:
        await response.aread()
    except BaseException:
        await response.aclose()
        raise


def _worth_a_retry(error: Unreachable | ServiceError, idempotent: bool) -> bool:
    if isinstance(error, Unreachable):
        return idempotent or isinstance(error.__cause__, (httpx.ConnectError, httpx.PoolTimeout))
    return isinstance(error, _TRANSIENT if idempotent else _NOT_STARTED)
