"""Connections for many requests at once: a lane each.

httpx's own pool looks through all of its connections for every request that begins or ends, which at 64 in flight costs
four times what the request itself does. A lane is a pool of one connection, and the lane used last is used next. One on
which a request did not come to its end is not used again.
"""

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx

from reef_harness.errors import Closed
from reef_harness.keys import is_here


def transport_for(url: str, max_connections: int) -> httpx.AsyncBaseTransport:
    """Lanes to a service; through the proxies of the environment, unless the service is on this machine."""
    context = httpx.create_ssl_context() if url.startswith("https:") else False  # made once: it takes milliseconds
    limits = httpx.Limits(max_connections=1, max_keepalive_connections=1)
    if not is_here(url) and urllib.request.getproxies():
        return Lanes(lambda: _Proxied(httpx.AsyncClient(verify=context, limits=limits)), max_connections)
    return Lanes(lambda: httpx.AsyncHTTPTransport(verify=context, limits=limits), max_connections)


class Lanes(httpx.AsyncBaseTransport):
    """At most ``max_lanes`` requests at once; more wait for a lane, as long as they like.

    Closed, whoever waits for a lane or for the beginning of an answer gets Closed.
    """

    def __init__(self, make: Callable[[], httpx.AsyncBaseTransport], max_lanes: int) -> None:
        self._make = make
        self._room = asyncio.Semaphore(max_lanes)
        self._all: set[httpx.AsyncBaseTransport] = set()
        self._free: list[httpx.AsyncBaseTransport] = []
        self._closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request on a lane of its own, which is free again once the answer is closed."""
        await self._room.acquire()
        try:
            self._check_open(request)
            lane = self._free.pop() if self._free else self._open()
        except BaseException:
            self._room.release()
            raise
        try:
            response = await lane.handle_async_request(request)
            if self._closed:  # while it was connecting: then httpcore (1.0.9) goes on, though its pool is closed
                await response.aclose()
                self._check_open(request)
        except BaseException:
            await self._let_go(lane, whole=False)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Held(response.stream, lambda whole: self._let_go(lane, whole=whole))
        return response

    async def aclose(self) -> None:
        """Close every connection."""
        self._closed = True
        self._room.release()  # one who waits goes, which lets the next one go
        self._free.clear()
        while self._all:
            await self._all.pop().aclose()

    def _check_open(self, request: httpx.Request) -> None:
        if self._closed:
            raise Closed(f"{request.method} {request.url}: the client was closed meanwhile")

    def _open(self) -> httpx.AsyncBaseTransport:
        lane = self._make()
        self._all.add(lane)
        return lane

    async def _let_go(self, lane: httpx.AsyncBaseTransport, *, whole: bool) -> None:
        """A request is done with a lane, which is only used again if the answer was read to its end.

        A cancellation while httpcore (1.0.9) opens or closes a connection can leave it in a state from which it is
        neither used nor dropped: the pool of one would wait for it for ever.
        """
        self._room.release()
        if whole and lane in self._all:
            self._free.append(lane)
            return
        self._all.discard(lane)
        await lane.aclose()


class _Held(httpx.AsyncByteStream):
    """An answer's body, which holds a lane until it is closed; ``let_go`` is told whether it was read to its end."""

    def __init__(self, stream: httpx.AsyncByteStream, let_go: Callable[[bool], Awaitable[None]]) -> None:
        self._stream = stream
        self._let_go: Callable[[bool], Awaitable[None]] | None = let_go
        self._whole = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._stream:
            yield chunk
        self._whole = True

    async def aclose(self) -> None:
        let_go, self._let_go = self._let_go, None
        try:
            await self._stream.aclose()
        except BaseException:
            self._whole = False
            raise
        finally:
            if let_go is not None:
                await let_go(self._whole)


class _Proxied(httpx.AsyncBaseTransport):
    """A lane through whichever proxy the environment names for a request's address."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._client.send(request, stream=True)

    async def aclose(self) -> None:
        await self._client.aclose()
