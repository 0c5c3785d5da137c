"""The least that a recording gateway can be: what Reef's requests/s are held against.

    python -m benchmarks.skeleton ENGINE_URL DATABASE        prints its URL, serves until it is ended

Reef's own libraries used as their guides say: FastAPI with a typed body on uvicorn and uvloop, one call to the engine
by aiohttp, one row by SQLAlchemy in SQLite whose group commit (WAL, synchronous=FULL) is on the disk before the answer
leaves. No key, no chat template, no turns, no receipts.
"""

import asyncio
import queue
import socket
import sys
import threading
import uuid
from array import array
from typing import Any

import aiohttp
import orjson
import uvicorn
import uvloop
from fastapi import FastAPI, Response
from pydantic import BaseModel
from sqlalchemy import Column, LargeBinary, MetaData, String, Table, create_engine, event, insert

ANSWERS = Table(
    "answers",
    MetaData(),
    Column("id", String, primary_key=True),
    Column("body", LargeBinary),
    Column("ids", LargeBinary),
    Column("logprobs", LargeBinary),
)
Row = dict[str, str | bytes]
Waiting = tuple[Row, "asyncio.Future[None]"]
PROMPT = [5] * 24


class Rows:
    """One thread; each transaction holds every row that waits."""

    def __init__(self, path: str, loop: asyncio.AbstractEventLoop) -> None:
        self._path = path
        self._loop = loop
        self._queue: queue.SimpleQueue[Waiting] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    async def write(self, row: Row) -> None:
        """Returns once the row is on the disk."""
        written = self._loop.create_future()
        self._queue.put((row, written))
        await written

    def _run(self) -> None:
        engine = create_engine(f"sqlite:///{self._path}")
        event.listen(engine, "connect", _set_up)
        ANSWERS.create(engine)
        while True:
            group = [self._queue.get()]
            while not self._queue.empty():
                group.append(self._queue.get_nowait())
            with engine.begin() as connection:
                connection.execute(insert(ANSWERS), [row for row, _ in group])
            self._loop.call_soon_threadsafe(_resolve, [written for _, written in group])


def _set_up(connection: Any, _record: Any) -> None:
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")


class Message(BaseModel):
    """One message."""

    role: str
    content: str


class Chat(BaseModel):
    """The fields that the benchmark sends."""

    messages: list[Message]
    max_tokens: int


def _resolve(group: list["asyncio.Future[None]"]) -> None:
    for written in group:
        if not written.done():
            written.set_result(None)


def create_app(engine_url: str, session: aiohttp.ClientSession, rows: Rows) -> FastAPI:
    """One route."""
    app = FastAPI()

    @app.post("/v1/chat/completions")
    async def chat(asked: Chat) -> Response:
        sampling = {"max_new_tokens": asked.max_tokens, "temperature": 1.0}
        payload = orjson.dumps({"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True})
        headers = {"content-type": "application/json"}
        async with session.post(f"{engine_url}/generate", data=payload, headers=headers) as response:
            answer: dict[str, Any] = orjson.loads(await response.read())
        ids = array("i", answer["output_ids"])
        logprobs = array("f", [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
        identity = uuid.uuid4().hex
        body = asked.model_dump_json().encode()
        await rows.write({"id": identity, "body": body, "ids": ids.tobytes(), "logprobs": logprobs.tobytes()})
        choice = {"index": 0, "message": {"role": "assistant", "content": answer["text"]}, "finish_reason": "length"}
        return Response(orjson.dumps({"id": identity, "choices": [choice]}), media_type="application/json")

    return app


async def main(engine_url: str, database: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    rows = Rows(database, asyncio.get_running_loop())
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        app = create_app(engine_url, session, rows)
        config = uvicorn.Config(app, http="httptools", log_config=None, access_log=False, lifespan="off")
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        await uvicorn.Server(config).serve(sockets=[listener])


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
