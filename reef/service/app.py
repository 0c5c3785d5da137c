"""The ASGI application: routes, one place where errors become answers, one middleware around all of it."""

import secrets
import time
import uuid
from contextlib import nullcontext

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reef.errors import BusyError, ReefError, UnauthorizedError
from reef.service import deletion, openai, reports, scenarios, status
from reef.service.errors import fault, on_http_error, on_reef_error, to_response
from reef.service.house import House

INFERENCE = "/v1/"  # routes that keep a request in work; counted before their bodies are read
OPEN_ROUTES = ("/healthz", "/readyz")  # no key asked: a supervisor has none


def create_app(house: House) -> FastAPI:
    """The application of one house. It starts nothing: see `reef/service/run.py`."""
    app = FastAPI(title="Reef", version="0.1.0", docs_url=None, redoc_url=None)
    app.state.house = house
    app.add_exception_handler(ReefError, on_reef_error)
    app.add_exception_handler(HTTPException, on_http_error)
    for module in (deletion, openai, reports, scenarios, status):
        app.include_router(module.router)
    app.add_middleware(Door, house=house)
    return app


class Door:
    """Key, bound of requests in work, request id, metrics, what nobody expected. Plain ASGI: streams pass untouched."""

    def __init__(self, app: ASGIApp, house: House) -> None:
        token = house.config.reef.token
        self._app = app
        self._token = token.get_secret_value().encode() if token is not None else None
        self._metrics = house.metrics
        self._house = house

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id") or uuid.uuid4().hex
        status: int | None = None  # until an answer has begun

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode("latin-1", "replace"))]
            await send(message)

        try:
            if self._token is not None and scope["path"] not in OPEN_ROUTES:
                self._check_key(headers)
            with self._house.admit() if scope["path"].startswith(INFERENCE) else nullcontext():
                await self._app(scope, receive, send_with_id)
        except (UnauthorizedError, BusyError) as error:
            await to_response(error)(scope, receive, send_with_id)
        except Exception as error:
            if status is not None:
                raise
            await fault(scope, error)(scope, receive, send_with_id)
        finally:
            route = getattr(scope.get("route"), "path", "unknown")
            self._metrics.requests.labels(route, str(status or 500)).inc()
            self._metrics.request_seconds.labels(route).observe(time.perf_counter() - started)

    def _check_key(self, headers: Headers) -> None:
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = key if kind.lower() == "bearer" else headers.get("x-api-key", "")
        if not given:
            raise UnauthorizedError("a key is needed: Authorization: Bearer KEY", code="missing_api_key")
        if self._token is None or not secrets.compare_digest(given.encode(), self._token):
            raise UnauthorizedError("the key is not the configured one")
