"""An asynchronous client of a Reef service: ask, report, and follow what became of the reports."""

import asyncio
import math
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from reef_harness.errors import (
    EngineFailed,
    NotFound,
    ServiceError,
    TooManyRequests,
    Unavailable,
    UnexpectedAnswer,
    Unreachable,
    from_response,
)
from reef_harness.keys import KEY_FILE, find_key, is_here
from reef_harness.types import Choice, Completion, Json, Message, Release, ReportState

_NOT_STARTED = (TooManyRequests, Unavailable)  # refused before any work: safe to ask again
_TRANSIENT = (*_NOT_STARTED, EngineFailed)  # safe to try again only where the request is idempotent


@dataclass(frozen=True, slots=True)
class Retry:
    """How long to keep trying: pauses double from ``first_s`` to ``longest_s``, for at most ``total_s`` in all."""

    first_s: float = 0.1
    longest_s: float = 5.0
    total_s: float = 60.0

    def pause_s(self, attempt: int, asked_s: float | None) -> float:
        """The pause after failed attempt number ``attempt`` (from 0); never shorter than the service asked for."""
        backoff_s = min(self.longest_s, self.first_s * 2.0 ** min(attempt, 30)) * random.uniform(0.5, 1.0)
        return max(backoff_s, asked_s or 0.0)


class Client:
    """Speaks to one service. Use as ``async with Client(url, scenario="arithmetic") as client``.

    ``scenario`` is the default for every call. The key that is sent as a bearer token is ``token``, else REEF_API_KEY,
    else, for a service on this machine, the content of ``key_file``. Requests that the service refused before starting
    (429, 503) are tried again within ``retry``, honouring Retry-After; so are, for idempotent calls, broken connections
    and gateway errors. Every failure is a subclass of :class:`reef_harness.errors.HarnessError`.
    """

    def __init__(
        self,
        url: str,
        *,
        scenario: str | None = None,
        token: str | None = None,
        key_file: Path = KEY_FILE,
        timeout_s: float = 300.0,
        max_connections: int = 256,
        retry: Retry | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.scenario = scenario
        self.retry = retry or Retry()
        key = find_key(self.url, token, key_file)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {key}"} if key else {},
            trust_env=not is_here(self.url),
            timeout=httpx.Timeout(timeout_s, connect=10.0, pool=None),
            limits=httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    # ---- asking

    async def chat(
        self,
        messages: str | Sequence[Message],
        *,
        n: int = 1,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        seed: int | None = None,
        scenario: str | None = None,
        session: str | None = None,
        purpose: str | None = None,
        release: str | None = None,
        tags: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Ask for ``n`` answers to a conversation (a string is one user message).

        ``purpose="eval"`` keeps the answers out of training; ``release`` must be the one that answers (the service
        refuses where it is neither served nor held); ``tags`` become ``x-reef-tag-*`` headers; ``extra`` adds
        further body fields (``top_p``, ``tools``, ``return_token_ids``, …).
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        body = {
            "messages": list(messages),
            "n": n,
            "temperature": temperature,
            "max_tokens": max_tokens,
            "seed": seed,
            **(extra or {}),
        }
        headers = self._headers(scenario, session, purpose, release, tags)
        response = await self._send("POST", "/v1/chat/completions", body=_given(body), headers=headers)
        return _completion(response)

    async def completions(
        self,
        prompt: str | Sequence[int],
        *,
        n: int = 1,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        seed: int | None = None,
        scenario: str | None = None,
        session: str | None = None,
        purpose: str | None = None,
        release: str | None = None,
        tags: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Completion:
        """Ask for ``n`` continuations of a text or of token ids; the other arguments are those of :meth:`chat`."""
        body = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "n": n,
            "temperature": temperature,
            "max_tokens": max_tokens,
            "seed": seed,
            **(extra or {}),
        }
        headers = self._headers(scenario, session, purpose, release, tags)
        response = await self._send("POST", "/v1/completions", body=_given(body), headers=headers)
        return _completion(response)

    # ---- reporting

    async def report(
        self,
        references: str | Sequence[str],
        score: float | None = None,
        *,
        outcome: str | None = None,
        reason_code: str | None = None,
        rewards: Mapping[str, float] | None = None,
        feedback: str | Mapping[str, Any] | None = None,
        group: str | None = None,
        grader: tuple[str, str] | None = None,
        truncated: bool | None = None,
        metadata: Mapping[str, Any] | None = None,
        report_id: str | None = None,
    ) -> ReportState:
        """Grade one or more receipts; return once the report is durable.

        Idempotent: the report's id is made once (or given), and every retry sends the same id and body. ``grader`` is
        (id, version). Raises ValueError for a score that is not a finite number.
        """
        if score is not None and not math.isfinite(score):
            raise ValueError(f"a score must be a finite number, got {score}")
        body = {
            "agent_record_id": report_id or f"report-{uuid.uuid4().hex}",
            "references": [references] if isinstance(references, str) else list(references),
            "score": score,
            "outcome": outcome,
            "reason_code": reason_code,
            "rewards": rewards,
            "feedback": feedback,
            "group": group,
            "grader": {"id": grader[0], "version": grader[1]} if grader else None,
            "truncated": truncated,
            "metadata": metadata,
        }
        return _report_state(await self._json("POST", "/reef/report", body=_given(body), idempotent=True))

    async def report_state(self, report_id: str) -> ReportState:
        """What became of a report."""
        return _report_state(await self._json("GET", f"/reef/reports/{_part(report_id)}"))

    async def receipt(self, receipt_id: str) -> Json:
        """The whole receipt: ids, log-probabilities, releases, digests."""
        return await self._json("GET", f"/reef/receipts/{_part(receipt_id)}")

    async def why(self, id: str) -> Json:
        """Explain a report (its state and the release it trained), or a receipt, by whichever of the two ``id`` is."""
        try:
            report = await self.report_state(id)
        except NotFound:
            return {"receipt": await self.receipt(id)}
        explained: Json = {"report": report.raw}
        scenario = report.raw.get("scenario") or self.scenario
        if report.release and scenario:
            explained["release"] = next((r for r in await self.releases(scenario) if r.id == report.release), None)
        return explained

    # ---- scenarios and releases

    async def scenarios(self) -> list[Json]:
        """All scenarios."""
        listed: list[Json] = (await self._json("GET", "/reef/scenarios"))["scenarios"]
        return listed

    async def create_scenario(self, name: str) -> Json:
        """Create a scenario, or return the one there is."""
        return await self._json("POST", "/reef/scenarios", body={"name": name}, idempotent=True)

    async def releases(self, scenario: str | None = None, *, limit: int = 1000) -> list[Release]:
        """The scenario's chain, newest first, at most ``limit`` links of it."""
        path = f"/reef/scenarios/{_part(self._scenario(scenario))}/releases?limit={limit}"
        return [_release(entry) for entry in (await self._json("GET", path))["releases"]]

    async def current_release(self, scenario: str | None = None) -> Release:
        """The head of the chain: what the engine serves, or is about to load."""
        chain = await self.releases(scenario, limit=20)
        for release in chain:
            if release.current:
                return release
        raise UnexpectedAnswer(f"none of the last {len(chain)} releases of {self._scenario(scenario)!r} is current")

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
        path = f"/reef/scenarios/{_part(self._scenario(scenario))}/releases/{_part(release)}/evaluations"
        return await self._json("POST", path, body=dict(result))

    # ---- the service itself

    async def status(self) -> Json:
        """Step in flight, queues, engines and their release, errors."""
        return await self._json("GET", "/reef/status")

    async def ready(self) -> tuple[bool, str]:
        """Whether the service is ready, and if not, what it says it waits for. Never raises for a service not up."""
        try:
            response = await self._http.get("/readyz")
        except httpx.HTTPError as error:
            return False, f"no answer yet ({type(error).__name__})"
        return response.status_code == 200, response.text

    # ---- the wire

    def _scenario(self, scenario: str | None) -> str:
        name = scenario or self.scenario
        if name is None:
            raise ValueError("name a scenario, here or when making the Client")
        return name

    def _headers(
        self,
        scenario: str | None,
        session: str | None,
        purpose: str | None,
        release: str | None,
        tags: Mapping[str, str] | None,
    ) -> dict[str, str]:
        headers = {
            "x-reef-scenario": scenario or self.scenario,
            "x-reef-session": session,
            "x-reef-purpose": purpose,
            "x-reef-release": release,
        }
        named = {f"x-reef-tag-{name}": value for name, value in (tags or {}).items()}
        return {name: value for name, value in headers.items() if value is not None} | named

    async def _json(self, method: str, path: str, *, body: Json | None = None, idempotent: bool = False) -> Json:
        response = await self._send(method, path, body=body, headers={}, idempotent=idempotent or method == "GET")
        return _object(response)

    async def _send(
        self, method: str, path: str, *, body: Json | None, headers: dict[str, str], idempotent: bool = False
    ) -> httpx.Response:
        """Send until answered below 400, an error not worth a retry, or the end of ``retry.total_s``."""
        deadline = time.monotonic() + self.retry.total_s
        attempt = 0
        while True:
            try:
                return await self._send_once(method, path, body, headers)
            except (Unreachable, ServiceError) as error:
                asked_s = error.retry_after_s if isinstance(error, ServiceError) else None
                pause_s = self.retry.pause_s(attempt, asked_s)
                if not _worth_a_retry(error, idempotent) or time.monotonic() + pause_s > deadline:
                    raise
            attempt += 1
            await asyncio.sleep(pause_s)

    async def _send_once(self, method: str, path: str, body: Json | None, headers: dict[str, str]) -> httpx.Response:
        try:
            response = await self._http.request(method, path, json=body, headers=headers)
        except httpx.HTTPError as error:
            raise Unreachable(f"{method} {self.url}{path}: {type(error).__name__} {error}".rstrip()) from error
        if response.status_code >= 400:
            raise from_response(response)
        return response


def _worth_a_retry(error: Unreachable | ServiceError, idempotent: bool) -> bool:
    if isinstance(error, Unreachable):
        return idempotent or isinstance(error.__cause__, httpx.ConnectError)
    return isinstance(error, _TRANSIENT if idempotent else _NOT_STARTED)


def _given(body: Json) -> Json:
    """The fields that were given: the service refuses nulls and unknown fields alike."""
    return {name: value for name, value in body.items() if value is not None}


def _part(name: str) -> str:
    """A name as one segment of a path, whatever is in it."""
    return quote(name, safe="")


def _object(response: httpx.Response) -> Json:
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise UnexpectedAnswer(
            f"{response.request.url} answered {response.status_code} without a JSON object: {response.text[:200]!r}"
        )
    return body


def _completion(response: httpx.Response) -> Completion:
    body = _object(response)
    usage = body.get("usage") or {}
    try:
        return Completion(
            choices=tuple(_choice(choice, response.headers) for choice in body["choices"]),
            release=response.headers["x-reef-release-id"],
            prompt_tokens=usage.get("prompt_tokens", 0),
            completion_tokens=usage.get("completion_tokens", 0),
            raw=body,
        )
    except KeyError as error:
        raise UnexpectedAnswer(f"{response.request.url} answered without {error}: is it a Reef service?") from error


def _choice(choice: Json, headers: httpx.Headers) -> Choice:
    receipt = choice.get("reef_agent_record_id")
    if receipt is None and choice["index"] == 0:
        receipt = headers["x-reef-agent-record-id"]
    if receipt is None:
        raise KeyError(f"choices[{choice['index']}].reef_agent_record_id")
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    token_ids = choice.get("token_ids")
    return Choice(
        choice["index"], text or "", choice["finish_reason"], receipt, None if token_ids is None else tuple(token_ids)
    )


def _report_state(body: Json) -> ReportState:
    try:
        return ReportState(
            body["agent_record_id"], body["state"], body.get("reason"), body.get("step"), body.get("release_id"), body
        )
    except KeyError as error:
        raise UnexpectedAnswer(f"a report's state came without {error}: {body}") from error


def _release(entry: Json) -> Release:
    try:
        return Release(
            entry["release_id"],
            entry["parent_release_id"],
            entry["content_id"],
            entry["operation"],
            entry["step"],
            entry["checkpoint"],
            entry["restorable"],
            entry["current"],
            entry["created_at"],
            entry["metrics"] or {},
        )
    except KeyError as error:
        raise UnexpectedAnswer(f"a release came without {error}: {entry}") from error
