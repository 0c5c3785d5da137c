"""A load generator that takes little of the machine: a closed loop over keep-alive connections.

    python -m benchmarks.load URL CLIENTS SECONDS < body        writes latencies to standard output (seconds, float64)

Each of CLIENTS sends its next POST once the last was answered with status 200; anything else ends the run. Where the
body holds NUMBER, each request has another one there, so that no two are alike.
"""

import asyncio
import itertools
import random
import sys
import time
from array import array
from typing import cast
from urllib.parse import urlsplit

import uvloop

WARM_UP_S = 0.3
NUMBER = b"00000000"  # as long as what takes its place


class Client(asyncio.Protocol):
    """One connection. `latencies` gets those of the requests that were sent from `begin` on and answered by `end`."""

    def __init__(self, request: bytes, begin: float, end: float, latencies: "array[float]") -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._head, self._number, self._tail = request.partition(NUMBER)
        self._begin, self._end = begin, end
        self._latencies = latencies
        self._received = b""
        self._expected = 0  # bytes of the answer; 0: its head is not complete

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received = received = self._received + data if self._received else data
        if not self._expected:
            head = received.find(b"\r\n\r\n")
            if head < 0:
                return
            try:
                self._expected = head + 4 + _content_length(received[:head])
            except ValueError as error:
                self.connection_lost(error)
                return
        if len(received) >= self._expected:
            self._answered()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_exception(error or RuntimeError("the connection was closed before an answer was whole"))
        self._transport.close()

    def _send(self) -> None:
        self._received, self._expected = b"", 0
        request = self._head + (b"%08d" % next(_numbers) if self._number else b"") + self._tail
        self._sent = time.perf_counter()
        self._transport.write(request)

    def _answered(self) -> None:
        now = time.perf_counter()
        if self._begin <= self._sent and now <= self._end:
            self._latencies.append(now - self._sent)
        if now < self._end:
            self._send()
        else:
            self.closed.set_result(None)
            self._transport.close()


_numbers = itertools.count(random.randrange(10**7))  # another run's are others


def _content_length(head: bytes) -> int:
    """Of an answer with status 200. Raises ValueError for any other."""
    lines = head.lower().split(b"\r\n")
    if not lines[0].startswith(b"http/1.1 200 "):
        raise ValueError(f"expected status 200, got {head.decode()!r}")
    for line in lines[1:]:
        if line.startswith(b"content-length:"):
            return int(line[15:])
    raise ValueError(f"expected a content-length, got {head.decode()!r}")


async def run(url: str, body: bytes, num_clients: int, seconds: float) -> "array[float]":
    """Latencies of `seconds` after a warm-up, in seconds."""
    parts = urlsplit(url)
    head = f"POST {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    begin = time.perf_counter() + WARM_UP_S
    latencies = array("d")
    loop = asyncio.get_running_loop()
    clients = [Client(request, begin, begin + seconds, latencies) for _ in range(num_clients)]
    for client in clients:
        await loop.create_connection(lambda client=client: client, parts.hostname, parts.port)  # type: ignore[misc]
    await asyncio.gather(*(client.closed for client in clients))
    return latencies


if __name__ == "__main__":
    found = uvloop.run(run(sys.argv[1], sys.stdin.buffer.read(), int(sys.argv[2]), float(sys.argv[3])))
    sys.stdout.buffer.write(found.tobytes())
