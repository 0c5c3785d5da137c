"""An engine without a model, slow on purpose: SGLang's native API with random delays, in a process of its own.

    python -m tests.load.stub_engine [--context TOKENS] [--at-once]     prints its URL, serves until it is ended

Like SGLang it notices only after 4 s that nobody waits for a whole answer: POST /abort_request ends that one at once.
It notices that a stream is not read any more when it next looks, a few times a second.

    GET /seen      what became of every request by its id, and how many are in work
    POST /forget   begin such a list anew
    POST /gate     {"open": bool}: while it is closed no generation gets a token
"""

from __future__ import annotations

import argparse
import asyncio
import random
from typing import Any

import orjson
import uvloop
from aiohttp import web

ENDLESS = 10_000  # max_new_tokens from here on: it goes on until it is aborted, or for longer than any test
LONGEST_S = 0.02  # that the next tokens take
LOOK_S = 0.2  # between looks whether a stream is still read
WHOLE_LOOK_S = 4.0  # until it gives up a whole answer that nobody waits for: an abort comes long before
FIRST_ID, LAST_ID = 20, 60  # digits and letters of the starter's tokenizer: no special ones


class Work:
    """One request: its fate, and the event that ends it early."""

    def __init__(self) -> None:
        self.fate = "running"  # finished | aborted | noticed: ended by itself, since nobody waited
        self.aborted = asyncio.Event()


class Engine:
    """What the routes answer from."""

    def __init__(self, context: int, at_once: bool) -> None:
        self._context = context
        self._longest_s = 0.0 if at_once else LONGEST_S
        self.works: dict[str, Work] = {}
        self.in_work = 0
        self.most = 0  # requests in work at once
        self.twice: list[str] = []  # ids that came more than once
        self._version = "v0"
        self._gate = asyncio.Event()
        self._gate.set()
        self._random = random.Random(0)

    async def generate(self, http: web.Request) -> web.StreamResponse:
        asked = orjson.loads(await http.read())
        if asked["sampling_params"]["max_new_tokens"] == 0:
            entries = [[None if i == 0 else -1.0, token, None] for i, token in enumerate(asked["input_ids"])]
            return _json(self._answer([], 0, input_token_logprobs=entries, ended=True))
        if asked["rid"] in self.works:
            self.twice.append(asked["rid"])
        work = self.works[asked["rid"]] = Work()
        self.in_work += 1
        self.most = max(self.most, self.in_work)
        try:
            return await (self._stream(http, asked, work) if asked["stream"] else self._whole(http, asked, work))
        finally:
            self.in_work -= 1

    async def abort(self, http: web.Request) -> web.StreamResponse:
        work = self.works.get(orjson.loads(await http.read())["rid"])
        if work is not None:
            work.aborted.set()
        return web.json_response({})

    async def load(self, http: web.Request) -> web.StreamResponse:
        self._version = orjson.loads(await http.read())["weight_version"]
        return web.json_response({"success": True, "message": "ok"})

    async def info(self, _http: web.Request) -> web.StreamResponse:
        return web.json_response({"weight_version": self._version, "context_length": self._context, "build": "stub"})

    async def nothing(self, _http: web.Request) -> web.StreamResponse:
        return web.json_response({})

    async def gate(self, http: web.Request) -> web.StreamResponse:
        if orjson.loads(await http.read())["open"]:
            self._gate.set()
        else:
            self._gate.clear()
        return web.json_response({})

    async def forget(self, _http: web.Request) -> web.StreamResponse:
        assert self.in_work == 0
        self.works, self.most, self.twice = {}, 0, []
        return web.json_response({})

    async def seen(self, _http: web.Request) -> web.StreamResponse:
        fates = {rid: work.fate for rid, work in self.works.items()}
        return web.json_response({"fates": fates, "in_work": self.in_work, "most": self.most, "twice": self.twice})

    async def _whole(self, http: web.Request, asked: dict[str, Any], work: Work) -> web.StreamResponse:
        num_tokens = asked["sampling_params"]["max_new_tokens"]
        work.fate = await self._fate(http, work, num_tokens)
        if work.fate != "finished":
            return _json(self._answer(self._ids(1), 0, ended=True, aborted=True))
        return _json(self._answer(self._ids(num_tokens), 0, ended=True))

    async def _fate(self, http: web.Request, work: Work, num_tokens: int) -> str:
        """What becomes of a whole answer, once that is known."""
        ends = {
            asyncio.create_task(work.aborted.wait()): "aborted",
            asyncio.create_task(self._time(num_tokens)): "finished",
            asyncio.create_task(_left(http)): "noticed",
        }
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        fate = next(name for task, name in ends.items() if task.done())
        for task in ends:
            task.cancel()
        return fate

    async def _time(self, num_tokens: int) -> None:
        await self._gate.wait()
        await asyncio.sleep(self._random.uniform(0, self._longest_s) if num_tokens < ENDLESS else 3600)

    async def _stream(self, http: web.Request, asked: dict[str, Any], work: Work) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        try:
            await response.prepare(http)
            limit = asked["sampling_params"]["max_new_tokens"]
            choices = [self._ids(min(limit, 500)) for _ in range(asked["sampling_params"].get("n", 1))]
            for end in _ends(self._random, min(limit, 500)):
                await self._pause(http, work, 0.3 if limit >= ENDLESS else self._longest_s)
                for choice, ids in enumerate(choices):
                    ended = end == limit
                    await self._write(response, self._answer(ids[:end], choice, ended=ended))
            if limit >= ENDLESS:
                await self._pause(http, work, 3600)
            await response.write(b"data: [DONE]\n\n")
            work.fate = "finished"
        except (ConnectionError, _AbortedError):
            work.fate = "aborted"
        return response

    async def _write(self, response: web.StreamResponse, answer: dict[str, Any]) -> None:
        await response.write(b"data: " + orjson.dumps(answer) + b"\n\n")

    async def _pause(self, http: web.Request, work: Work, longest_s: float) -> None:
        """Before the next tokens: until the gate is open, and a random time after it."""
        left_s = self._random.uniform(0, longest_s)
        while True:
            if work.aborted.is_set() or http.transport is None or http.transport.is_closing():
                raise _AbortedError
            if self._gate.is_set():
                if left_s <= 0:
                    return
                await asyncio.sleep(min(left_s, LOOK_S))
                left_s -= LOOK_S
            else:
                await asyncio.sleep(LOOK_S)

    def _ids(self, num: int) -> list[int]:
        return [self._random.randint(FIRST_ID, LAST_ID) for _ in range(num)]

    def _answer(self, ids: list[int], index: int, *, ended: bool, aborted: bool = False, **more: Any) -> dict[str, Any]:
        reason = {"type": "abort", "message": "aborted"} if aborted else {"type": "length", "length": len(ids)}
        meta = {
            "id": "stub",
            "finish_reason": reason if ended else None,
            "completion_tokens": len(ids),
            "weight_version": self._version,
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            **more,
        }
        return {"text": "", "index": index, "output_ids": ids, "meta_info": meta}


async def _left(http: web.Request) -> None:
    """Return once nobody waits any more and that is noticed."""
    while http.transport is not None and not http.transport.is_closing():
        await asyncio.sleep(LOOK_S)
    await asyncio.sleep(WHOLE_LOOK_S)


def _json(content: Any) -> web.Response:
    return web.Response(body=orjson.dumps(content), content_type="application/json")


class _AbortedError(Exception):
    """Nobody reads this stream any more."""


def _ends(dice: random.Random, num_tokens: int) -> list[int]:
    """Where a stream's events end: after 1 to 4 tokens each."""
    ends = [0]
    while ends[-1] < num_tokens:
        ends.append(min(num_tokens, ends[-1] + dice.randint(1, 4)))
    return ends[1:]


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--context", type=int, default=1_000_000)
    parser.add_argument("--at-once", action="store_true", help="no delays")
    told = parser.parse_args()
    engine = Engine(told.context, told.at_once)
    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_post("/generate", engine.generate)
    app.router.add_post("/abort_request", engine.abort)
    app.router.add_post("/update_weights_from_disk", engine.load)
    app.router.add_post("/gate", engine.gate)
    app.router.add_post("/forget", engine.forget)
    app.router.add_get("/seen", engine.seen)
    for route in ("/model_info", "/server_info"):
        app.router.add_get(route, engine.info)
    for route in ("/health", "/pause_generation", "/continue_generation", "/flush_cache"):
        app.router.add_route("*", route, engine.nothing)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
