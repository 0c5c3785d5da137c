"""An engine without a model: SGLang's native API, every generation NUM_TOKENS fixed tokens, answered at once.

    python -m benchmarks.stub        prints its URL, serves until it is ended

Written on the event loop's transports, so that what is measured beside it is not the stub.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import cast

import httptools
import orjson
import uvloop

NUM_TOKENS = 32
CONTEXT = 512
CONTROL = ("/health", "/pause_generation", "/continue_generation", "/abort_request")


class Stub:
    """What the engine would answer: bodies by route. A load changes the weights' name, as in a real one."""

    def __init__(self) -> None:
        self._version = "default"
        self._generation = b""
        self._name("default")

    def answer(self, route: str, body: bytes) -> bytes | None:
        """The body of an answer with status 200; None where the route does not exist."""
        if route == "/generate":
            return self._generation
        if route == "/update_weights_from_disk":
            self._name(orjson.loads(body)["weight_version"])
            return orjson.dumps({"success": True, "message": ""})
        if route in ("/model_info", "/server_info"):
            return orjson.dumps({"weight_version": self._version, "context_length": CONTEXT, "version": "stub"})
        return b"{}" if route in CONTROL else None

    def _name(self, version: str) -> None:
        ids = [5] * NUM_TOKENS
        self._version = version
        meta = {
            "id": "stub",
            "finish_reason": {"type": "length", "length": NUM_TOKENS},
            "completion_tokens": NUM_TOKENS,
            "weight_version": version,
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        self._generation = orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta})


class Connection(asyncio.Protocol):
    """One client's connection: requests one after the other, each answered as soon as it is whole."""

    def __init__(self, answer: Callable[[str, bytes], bytes | None]) -> None:
        self._answer = answer
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by its methods only

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._url, self._body = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        content = self._answer(self._url.decode(), b"".join(self._body))
        status = b"404 Not Found" if content is None else b"200 OK"
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % (status, len(content or b"")) + (content or b""))


async def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    stub = Stub()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(stub.answer), sock=listener)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
