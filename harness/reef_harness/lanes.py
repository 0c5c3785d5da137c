"""Connections for many requests at once: a lane each.

httpx's own pool looks through all of its connections for every request that begins or ends, which at 64 in flight costs
four times what the request itself does. A lane is a pool of one connection, and the lane used last is used next.
"""

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Callable

import httpx

from reef_harness.keys import is_here


def transport_for(url: str, max_connections: int) -> httpx.AsyncBaseTransport | None:
    """Lanes to a service; None where a proxy of the environment stands between, which httpx's own pool handles."""
    if not is_here(url) and urllib.request.getproxies():
        return None
    context = httpx.create_ssl_context() if url.startswith("https:") else False  # made once: it takes milliseconds
    limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
    return Lanes(lambda: httpx.AsyncHTTPTransport(verify=context, limits=limits), max_connections)


class Lanes(httpx.AsyncBaseTransport):
    """At most ``max_lanes`` requests at once; more wait for a lane, as long as they like."""

    def __init__(self, make: Callable[[], httpx.AsyncBaseTransport], max_lanes: int) -> None:
        self._make = make
        self._room = asyncio.Semaphore(max_lanes)
        self._all: list[httpx.AsyncBaseTransport] = []
        self._free: list[httpx.AsyncBaseTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request on a lane of its own, which is free again once the answer is closed."""
        await self._room.acquire()
        lane = self._free.pop() if self._free else self._open()
        try:
            response = await lane.handle_async_request(request)
        except BaseException:
            self._give_back(lane)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Held(response.stream, lambda: self._give_back(lane))
        return response

    async def aclose(self) -> None:
        """Close every connection."""
        for lane in self._all:
            await lane.aclose()

    def _open(self) -> httpx.AsyncBaseTransport:
        self._all.append(self._make())
        return self._all[-1]

    def _give_back(self, lane: httpx.AsyncBaseTransport) -> None:
        self._free.append(lane)
        self._room.release()


class _Held(httpx.AsyncByteStream):
    """An answer's body, which holds a lane until it is closed."""

    def __init__(self, stream: httpx.AsyncByteStream, give_back: Callable[[], None]) -> None:
        self._stream = stream
        self._give_back: Callable[[], None] | None = give_back

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            yield chunk

    async def aclose(self) -> None:
        give_back, self._give_back = self._give_back, None
        try:
            await self._stream.aclose()
        finally:
            if give_back is not None:
                give_back()
