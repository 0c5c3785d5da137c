"""The ASGI application: routes, one place where errors become answers, one middleware around all of it."""

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from inspect import signature
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reef.errors import ReefError
from reef.ledger.identity import new_id
from reef.service import anthropic, browsers, deletion, openai, records, reports, responses, scenarios, status
from reef.service.access import named_headers
from reef.service.document import complete
from reef.service.errors import fault, is_anthropic, on_http_error, on_reef_error, to_response
from reef.service.house import House
from reef.service.prefix import without_prefix

# Each with a router; `access.NEEDS` has a line for each route.
ROOMS = (anthropic, deletion, openai, records, reports, responses, scenarios, status)
Endpoint = Callable[[HttpRequest], Awaitable[Response]]
INFERENCE = "/v1/"  # routes that keep a request in work; counted before their bodies are read


def create_app(house: House) -> FastAPI:
    """The application of one house. It starts nothing: see `reef/service/run.py`."""
    # A redirect of a path with one slash more would lose the prefix that names the scenario.
    app = _App(title="Reef", version="0.1.0", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.house = house
    app.add_exception_handler(ReefError, on_reef_error)
    app.add_exception_handler(HTTPException, on_http_error)
    for room in ROOMS:
        app.include_router(room.router)
    app.add_middleware(Door, house=house, direct=_direct())
    return app


class _App(FastAPI):
    """FastAPI with a document that says what our routes do."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = complete(super().openapi())
        return self.openapi_schema


def _direct() -> Mapping[tuple[str, str], Endpoint]:
    """Routes whose function takes the request alone, by method and path: the door needs no framework to answer them."""
    routes = [route for room in ROOMS for route in room.router.routes if isinstance(route, APIRoute)]
    alone = [route for route in routes if list(signature(route.endpoint).parameters) == ["http"]]
    return {(method, route.path): route.endpoint for route in alone for method in route.methods or ()}


class Door:
    """Who asks, bound of requests in work, request id, metrics, what nobody expected. ASGI: streams pass untouched."""

    def __init__(self, app: ASGIApp, house: House, direct: Mapping[tuple[str, str], Endpoint]) -> None:
        """`direct`: what it answers itself; `app` answers the rest."""
        self._app = app
        self._direct = direct
        self._access = house.access
        self._metrics = house.metrics
        self._house = house

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        headers = named_headers(scope)
        request_id = scope["reef.request_id"] = headers.get("x-request-id") or new_id("")
        id_headers = (b"x-request-id", b"request-id") if is_anthropic(scope) else (b"x-request-id",)
        status: int | None = None  # until an answer has begun

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                encoded = request_id.encode("latin-1", "replace")
                message["headers"] = [*message["headers"], *((name, encoded) for name in id_headers)]
            await send(message)

        try:
            browsers.refuse_other_sites(headers, self._access.open)
            scope = without_prefix(scope)
            named_headers(scope)
            scope["reef.caller"] = self._access.admit(scope)
            with self._house.admit() if scope["path"].startswith(INFERENCE) else nullcontext():
                await self._answer(scope, receive, send_with_id)
        except ReefError as error:
            if status is not None:
                raise
            await to_response(error, scope)(scope, receive, send_with_id)
        except Exception as error:
            if status is not None:
                raise
            await fault(scope, error)(scope, receive, send_with_id)
        finally:
            direct = (scope["method"], scope["path"]) in self._direct
            route = scope["path"] if direct else getattr(scope.get("route"), "path", "unknown")
            self._metrics.requests.labels(route, str(status or 500)).inc()
            self._metrics.request_seconds.labels(route).observe(time.perf_counter() - started)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._direct.get((scope["method"], scope["path"]))
        if endpoint is None:
            await self._app(scope, receive, send)
        else:
            response = await endpoint(HttpRequest(scope, receive))
            await response(scope, receive, send)
