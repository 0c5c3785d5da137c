"""Routes of SGLang's native API over an engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import orjson
import torch
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from reef.engines.embedded import request as sequences
from reef.engines.embedded.answers import Answers
from reef.engines.embedded.engine import Engine
from reef.engines.embedded.errors import BadRequestError
from reef.engines.embedded.http import (
    ERROR_HANDLERS,
    RequireKey,
    control_fields,
    error_response,
    read_json,
    respond,
    unless_client_leaves,
)
from reef.engines.embedded.text import GrowingText, Tokenizer
from reef.engines.embedded.updates import Updates
from reef.engines.embedded.wire import Call, Parser, result, text_of

HEALTH_TIMEOUT_S = 20.0
FLUSH_POLL_S = 0.02
MAX_FLUSH_WAIT_S = 600.0
PAUSE_MODES = ("abort", "retract", "in_place")
"""SGLang's; `abort` is the default."""


class _Part:
    """An incremental stream of one sequence: each event what is new in it."""

    def __init__(self, request: sequences.Request, tokenizer: Tokenizer | None) -> None:
        params = request.params
        self._request = request
        self._num_ids = 0
        self._text = None
        if tokenizer is not None:
            self._text = GrowingText(tokenizer, not params.no_stop_trim, params.skip_special_tokens)

    def event(self, snapshot: sequences.Snapshot) -> dict[str, Any]:
        """The answer object of what a snapshot has more than the one before."""
        text = ""
        if self._text is not None:
            finish = snapshot.finish
            text = self._text.push(snapshot.output_ids, finish.get("matched") if finish else None, finish is not None)
        offset, self._num_ids = self._num_ids, len(snapshot.output_ids)
        return result(self._request, snapshot, text, offset)


class Server:
    """The HTTP side of one engine. All of it runs on the event loop; the engine has its own thread."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        eos_ids: frozenset[int],
        served_model_name: str,
        info: Mapping[str, Any],
        incremental: bool,
        updates: Updates,
    ) -> None:
        """`info` is reported by `/server_info`; `incremental` streams send each token once instead of all so far."""
        self._engine = engine
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._served_model_name = served_model_name
        self._info = info
        self._incremental = incremental
        self._updates = updates
        self._started_s = time.time()
        self._live: dict[str, sequences.Request] = {}

    def app(self, api_key: str | None) -> ASGIApp:
        """The ASGI application; with a key, every route but the health checks asks for it as a bearer token."""
        both, get, post = ["GET", "POST"], ["GET"], ["POST"]
        routes = [
            Route("/generate", self.generate, methods=["POST", "PUT"]),
            Route("/update_weights_from_disk", self.update_weights, methods=post),
            *self._updates.routes(),
            Route("/update_weight_version", self.update_version, methods=post),
            Route("/pause_generation", self.pause, methods=post),
            Route("/continue_generation", self.resume, methods=post),
            Route("/flush_cache", self.flush, methods=both),
            Route("/abort_request", self.abort, methods=post),
            Route("/health", self.health, methods=get),
            Route("/health_generate", self.health_generate, methods=get),
            Route("/model_info", self.model_info, methods=get),
            Route("/get_model_info", self.model_info, methods=get),
            Route("/server_info", self.server_info, methods=get),
            Route("/get_server_info", self.server_info, methods=get),
            Route("/v1/loads", self.loads, methods=get),
        ]
        app = Starlette(routes=routes, exception_handlers=ERROR_HANDLERS)
        return app if api_key is None else RequireKey(app, api_key)

    # --- generation ---------------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        """POST /generate."""
        body = await read_json(request)
        answers = Answers()
        call = Parser(self._engine, self._tokenizer, self._eos_ids, answers.put).parse(body)
        duplicate = next((r.rid for r in call.requests if r.rid in self._live), None)
        if duplicate is not None:
            raise BadRequestError(f"Duplicate request ID detected: {duplicate}")
        self._engine.submit(call.requests)
        answers.expect(call.requests)
        self._live |= {r.rid: r for r in call.requests}
        if call.stream:
            # The stream releases the call itself, unless its client left before the first event was asked for.
            release = BackgroundTask(self._release, call)
            return StreamingResponse(self._stream(call, answers), media_type="text/event-stream", background=release)
        try:
            finals = await unless_client_leaves(request, answers.finals())
        finally:
            self._release(call)
        return self._whole(call, finals)

    def _whole(self, call: Call, finals: list[sequences.Snapshot]) -> Response:
        for snapshot in finals:
            status = (snapshot.finish or {}).get("status_code")
            if status is not None:
                return error_response(status, snapshot.finish["message"] if snapshot.finish else "")
        results = [result(r, s, text_of(r, s, self._tokenizer)) for r, s in zip(call.requests, finals, strict=True)]
        return respond(results[0] if call.single else results)

    async def _stream(self, call: Call, answers: Answers) -> AsyncIterator[bytes]:
        """Server-sent events: everything so far in each (or, incremental, what is new), then `[DONE]`."""
        index = {r.rid: i for i, r in enumerate(call.requests)}
        parts = {r.rid: _Part(r, self._tokenizer) for r in call.requests} if self._incremental else {}
        try:
            async for request, snapshot in answers.changes():
                if self._incremental:
                    event = parts[request.rid].event(snapshot)
                else:
                    event = result(request, snapshot, text_of(request, snapshot, self._tokenizer))
                if not call.single:
                    event["index"] = index[request.rid]
                yield b"data: " + orjson.dumps(event) + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            self._release(call)

    def _release(self, call: Call) -> None:
        """Forgets a call, once or more; what of it still runs has lost its client and is aborted."""
        for request in call.requests:
            if self._live.get(request.rid) is request:
                del self._live[request.rid]
        unfinished = [request for request in call.requests if request.finish is None]
        if unfinished:
            self._engine.abort(unfinished)

    # --- control ------------------------------------------------------------------------------------------------------

    async def update_weights(self, request: Request) -> Response:
        """POST /update_weights_from_disk."""
        body = control_fields(
            await read_json(request),
            {"model_path": str, "weight_version": str, "flush_cache": bool, "abort_all_requests": bool},
            ignored=("is_async", "torch_empty_cache", "keep_pause", "recapture_cuda_graph", "token_step", "rid"),
            fixed={"load_format": (None, "auto", "safetensors"), "manifest": (None,)},
        )
        path = body.get("model_path")
        if not path:
            raise BadRequestError("model_path must be a directory")
        if body.get("abort_all_requests"):
            await self._engine.abort_matching(lambda _: True)
        flush = body.get("flush_cache", True)
        outcome = await self._engine.load(Path(path), body.get("weight_version"), flush)
        if outcome.success:
            self._served_model_name = path  # as SGLang does: a load moves the name along
        content = {
            "success": outcome.success,
            "message": outcome.message,
            "num_paused_requests": outcome.num_paused_requests,
        }
        return respond(content, 200 if outcome.success else 400)

    async def update_version(self, request: Request) -> Response:
        """POST /update_weight_version."""
        body = control_fields(
            await read_json(request), {"new_version": str, "abort_all_requests": bool}, ignored=("rid",)
        )
        version = body.get("new_version")
        if not version:
            raise BadRequestError("new_version must be a non-empty string")
        if body.get("abort_all_requests", True):
            await self._engine.abort_matching(lambda _: True)
        await self._engine.rename(version)
        return respond({"success": True, "message": f"Weight version updated to {version}", "new_version": version})

    async def pause(self, request: Request) -> Response:
        """POST /pause_generation."""
        body = control_fields(await read_json(request), {"mode": str}, ignored=("rid",))
        mode = body.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise BadRequestError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}")
        await self._engine.pause(mode)
        return respond({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: Request) -> Response:
        """POST /continue_generation."""
        control_fields(await read_json(request), {}, ignored=("rid", "torch_empty_cache"))
        await self._engine.resume()
        return respond({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(self, request: Request) -> Response:
        """GET or POST /flush_cache?timeout=SECONDS: 200, or 400 while requests run or wait."""
        try:
            timeout_s = float(request.query_params.get("timeout", "0"))
        except ValueError:
            raise BadRequestError("timeout must be a number of seconds") from None
        if not 0 <= timeout_s <= MAX_FLUSH_WAIT_S:
            raise BadRequestError(f"timeout must be in [0, {MAX_FLUSH_WAIT_S:.0f}] seconds, got {timeout_s}")
        deadline = time.monotonic() + timeout_s
        while not await self._engine.flush():
            if time.monotonic() >= deadline:
                return Response("Cache not flushed: requests are running or waiting.\n", 400)
            await asyncio.sleep(FLUSH_POLL_S)
        return Response("Cache flushed.\n")

    async def abort(self, request: Request) -> Response:
        """POST /abort_request; an id nobody has is no error."""
        body = control_fields(
            await read_json(request), {"rid": str, "abort_all": bool}, ignored=("finished_reason", "abort_message")
        )
        rid = body.get("rid")
        if body.get("abort_all"):
            await self._engine.abort_matching(lambda _: True)
        elif rid:
            await self._engine.abort_matching(lambda r: rid in (r.rid, r.call_rid))
        return Response()

    # --- state --------------------------------------------------------------------------------------------------------

    async def health(self, _: Request) -> Response:
        """GET /health: the generation thread lives. Answers during a load."""
        return Response(status_code=200 if self._engine.alive else 503)

    async def health_generate(self, request: Request) -> Response:
        """GET /health_generate: an idle engine generates a token; a busy or paused one only has to be alive."""
        engine = self._engine
        if not engine.alive or engine.paused or engine.num_running or engine.num_waiting:
            return await self.health(request)
        answers = Answers()
        probe = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        call = Parser(engine, self._tokenizer, self._eos_ids, answers.put).parse(probe)
        engine.submit(call.requests)
        answers.expect(call.requests)
        try:
            (final,) = await asyncio.wait_for(answers.finals(), HEALTH_TIMEOUT_S)
        except TimeoutError:
            engine.abort(call.requests)
            return Response(status_code=503)
        return Response(status_code=503 if (final.finish or {}).get("status_code") else 200)

    async def model_info(self, _: Request) -> Response:
        """GET /model_info."""
        engine = self._engine
        return respond(
            {
                "model_path": engine.model_path,
                "served_model_name": self._served_model_name,
                "tokenizer_path": None if self._tokenizer is None else self._info["model_path"],
                "is_generation": True,
                "weight_version": engine.version,
                "model_type": engine.arch.model_type,
                "vocab_size": engine.arch.vocab_size,
                "context_length": engine.limits.context_length,
                "eos_token_ids": sorted(self._eos_ids),
                "build": f"reef-embedded torch-{torch.__version__} {self._info['dtype']}",
            }
        )

    async def loads(self, _: Request) -> Response:
        """GET /v1/loads: how much is in work."""
        engine = self._engine
        load = {
            "num_running_reqs": engine.num_running,
            "num_waiting_reqs": engine.num_waiting,
            "max_total_num_tokens": engine.limits.max_total_tokens,
            "max_running_requests": engine.limits.max_running_requests,
        }
        return respond({"loads": [load]})

    async def server_info(self, _: Request) -> Response:
        """GET /server_info: the arguments in force and what is going on."""
        engine = self._engine
        state = {
            "paused": engine.paused,
            "num_running_requests": engine.num_running,
            "num_waiting_requests": engine.num_waiting,
            "num_free_tokens": engine.num_free_tokens,
            "uptime_s": time.time() - self._started_s,
        }
        return respond({**self._info, "weight_version": engine.version, "internal_states": [state]})
