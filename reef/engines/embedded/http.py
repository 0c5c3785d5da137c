"""What every route shares: reading bodies, writing answers and errors, the key, the client that leaves.

Errors have SGLang's two shapes: `{"error": {"message": …}}` with 400, and
`{"object": "error", "message": …, "type": …, "param": null, "code": …}` with every other status.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from reef.engines.embedded.errors import BadRequestError, EngineStoppedError, QueueFullError

MAX_BODY_BYTES = 64 * 2**20

T = TypeVar("T")


class RequireKey:
    """Lets a request through if it carries `Authorization: Bearer KEY`; health checks need none."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].startswith("/health"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                await respond({"error": "Unauthorized"}, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def read_json(request: Request) -> Any:
    """The parsed body; an empty one is `{}`."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise BadRequestError(f"the body is larger than {MAX_BODY_BYTES} bytes")
    try:
        return orjson.loads(body or b"{}")
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"the body is not JSON: {error}") from error


def control_fields(
    body: Any,
    types: Mapping[str, type],
    ignored: tuple[str, ...],
    fixed: Mapping[str, tuple[Any, ...]] | None = None,
) -> dict[str, Any]:
    """The non-null fields of a control body; refuses unknown names, wrong types and unsupported values."""
    fixed = fixed or {}
    if not isinstance(body, dict):
        raise BadRequestError(f"the body must be a JSON object, got {type(body).__name__}")
    for name, value in body.items():
        if name in fixed:
            if value not in fixed[name]:
                raise BadRequestError(f"{name} {value!r} is not supported, expected one of {fixed[name]}")
        elif name in types:
            if value is not None and not isinstance(value, types[name]):
                raise BadRequestError(f"{name} must be of type {types[name].__name__}, got {value!r}")
        elif name not in ignored:
            raise BadRequestError(f"unknown field {name!r}")
    return {name: body[name] for name in types if body.get(name) is not None}


async def unless_client_leaves(request: Request, answer: Awaitable[T]) -> T:
    """Waits for `answer`; raises `ClientDisconnect` if the client goes away first."""
    done = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise ClientDisconnect
        return done.result()
    finally:
        done.cancel()
        gone.cancel()


def respond(content: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(orjson.dumps(content), status, media_type="application/json")


def error_response(status: int, message: str) -> Response:
    """An error in the shape that its status has."""
    if status == 400:
        return respond({"error": {"message": message}}, 400)
    content = {"object": "error", "message": message, "type": str(status), "param": None, "code": status}
    return respond(content, status)


async def _bad_request(_: Request, error: Exception) -> Response:
    return error_response(400, str(error))


async def _unavailable(_: Request, error: Exception) -> Response:
    return error_response(503, str(error))


async def _client_left(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


ERROR_HANDLERS: Mapping[Any, Any] = {
    BadRequestError: _bad_request,
    QueueFullError: _unavailable,
    EngineStoppedError: _unavailable,
    ClientDisconnect: _client_left,
}
"""Exceptions of routes -> answers, for Starlette."""
