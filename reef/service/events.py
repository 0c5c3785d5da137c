"""Server-sent events: an answer that leaves in pieces, and what becomes of it when its reader goes."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from reef.errors import EngineTimeoutError
from reef.service.house import House
from reef.service.inference import Item, Work, run_stream, unless_gone

RETRY_AFTER_S = 2  # where the engine was too busy to begin
T = TypeVar("T")
Events = Callable[[AsyncGenerator[Item]], AsyncGenerator[bytes]]


async def stream(house: House, http: HttpRequest, work: Work, events: Events) -> StreamingResponse:
    """Answer with the events made of a request's pieces and answers.

    The status line waits for the engine's first token: until then a refusal is a status, not an event.

    Raises:
        EngineTimeoutError: there was none within `inference.first-token-timeout-s`.
        ReefError: whatever the engine refuses the request with.
    """
    items = run_stream(house, http, work)
    limit_s = house.config.inference.first_token_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            first = await unless_gone(http, anext(items))
    except TimeoutError:
        raise EngineTimeoutError(
            f"no token came within {limit_s:g} s (inference.first-token-timeout-s)",
            code="first_token_timeout",
            retry_after_s=RETRY_AFTER_S,
        ) from None
    return _EventStream(events(_chain(first, items)), items)


class _EventStream(StreamingResponse):
    """However the connection ends, so does the source: the engine stops sampling at once."""

    def __init__(self, events: AsyncGenerator[bytes], source: AsyncGenerator[Item]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._events = events
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            await self._source.aclose()


async def _chain(first: T, rest: AsyncGenerator[T]) -> AsyncGenerator[T]:
    yield first
    async for item in rest:
        yield item
