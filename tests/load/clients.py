"""Clients on bare sockets: those that read their answer, and those that vanish, each at a moment of its own."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tests.load.stub_engine import ENDLESS

ROUTES = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client read to the end."""

    status: int
    receipt_ids: tuple[str, ...]
    texts: tuple[str, ...]  # of its choices


def request(dice: random.Random, *, stream: bool, n: int = 1, endless: bool = False) -> tuple[str, dict[str, Any]]:
    """A route, and a body for it; `endless`: it is only answered in part, whoever waits."""
    common = {"stream": stream, "n": n, "max_tokens": ENDLESS if endless else dice.randint(1, 12)}
    text = "".join(dice.choices("0123456789+-= ", k=dice.randint(3, 40))) + "="
    if dice.random() < 0.25:
        return ROUTES[1], {"prompt": text, **common}
    return ROUTES[0], {"messages": [{"role": "user", "content": text}], **common}


async def ask(url: str, route: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Answer:
    """Send a request on a connection of its own, and read the whole answer."""
    reader, writer = await _connect(url)
    try:
        writer.write(_encode(url, route, body, headers or {}))
        raw = await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()
    return _read(raw, bool(body.get("stream")))


async def ask_and_vanish(
    url: str,
    route: str,
    body: Mapping[str, Any],
    moment: Awaitable[None],
    *,
    reset: bool,
    sent: float = 1.0,
    begun: bool = False,
) -> int:
    """Send (part of) a request, wait for the moment, and close the connection: with a reset, or without.

    Args:
        sent: the part of the request that is sent, from 0 to 1.
        begun: vanish only once the answer has begun.

    Returns:
        Bytes of the answer that had come by then.
    """
    reader, writer = await _connect(url)
    received, has_begun = bytearray(), asyncio.Event()

    async def read() -> None:
        while piece := await reader.read(65536):
            received.extend(piece)
            has_begun.set()
        has_begun.set()  # or will not begin any more

    reading = asyncio.create_task(read())
    encoded = _encode(url, route, body, {})
    writer.write(encoded[: int(len(encoded) * sent)])
    await moment
    if begun:
        await has_begun.wait()
    assert not reading.done(), f"answered before it could vanish: {bytes(received[:300])!r}"
    reading.cancel()
    if reset:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return len(received)


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    return await asyncio.open_connection(parts.hostname, parts.port)


def _encode(url: str, route: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> bytes:
    content = json.dumps(body).encode()
    lines = [f"POST {route} HTTP/1.1", f"host: {urlsplit(url).netloc}", "content-type: application/json"]
    lines += [f"content-length: {len(content)}", "connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + content


def _read(raw: bytes, stream: bool) -> Answer:
    head, _, content = raw.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    if b"transfer-encoding: chunked" in head.lower():
        content = _unchunked(content)
    if status != 200:
        return Answer(status, (), (content.decode(),))
    if stream:
        return _events(status, content)
    choices = json.loads(content)["choices"]
    texts = tuple(choice.get("text", choice.get("message", {}).get("content")) for choice in choices)
    return Answer(status, tuple(choice["reef_agent_record_id"] for choice in choices), texts)


def _unchunked(content: bytes) -> bytes:
    whole = b""
    while content:
        size, _, content = content.partition(b"\r\n")
        length = int(size, 16)
        whole, content = whole + content[:length], content[length + 2 :]
    return whole


def _events(status: int, content: bytes) -> Answer:
    lines = [line.removeprefix(b"data: ") for line in content.split(b"\n\n") if line]
    assert lines[-1] == b"[DONE]", content[-300:]
    receipts: tuple[str, ...] = ()
    texts: dict[int, str] = {}
    for event in map(json.loads, lines[:-1]):
        assert "error" not in event, event
        receipts = tuple(event.get("reef", {}).get("agent_record_ids", receipts))
        for choice in event["choices"]:
            delta = choice.get("text") if "text" in choice else choice["delta"].get("content")
            texts[choice["index"]] = texts.get(choice["index"], "") + (delta or "")
    return Answer(status, receipts, tuple(text for _, text in sorted(texts.items())))
