"""The one client of engines: SGLang's native HTTP API, token ids in, token ids and log-probabilities out.

    generate / stream    POST /generate
    abort                POST /abort_request, for a whole answer that nobody waits for any more
    pause, resume, load  POST /pause_generation, /continue_generation, /update_weights_from_disk
    join_group, leave_group, begin_update, receive, end_update
                         POST /init_weights_update_group, /destroy_weights_update_group, /begin_weight_update,
                         /update_weights_from_distributed, /end_weight_update
    score                POST /generate with no new tokens: log-probabilities of given ids

What it answers is checked by `reef.engines.answers`.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import orjson
from aiohttp.http_exceptions import HttpProcessingError

from reef.engines.answers import (
    MAX_ERROR_CHARS,
    Chunk,
    Progress,
    check_prompt,
    chunk_of,
    expected_shape,
    generation_of,
    message_of,
    raise_for_event,
)
from reef.errors import BadRequestError, EngineError, EngineTimeoutError
from reef.types import Bucket, Floats, Generation, Request, Sampling

MAX_EVENT_BYTES = 64 * 2**20  # one event of a stream: all tokens of a choice so far
CONTROL_TIMEOUT_S = 30  # for a pause (the step in work ends first) and for what only reads state
ABORT_TIMEOUT_S = 5
FAR_APART = 4096  # tokens between the events of a stream that is only wanted whole; each repeats what came before


@dataclass(frozen=True, slots=True)
class _Pauses:
    """How many have begun."""

    all: int = 0
    in_place: int = 0


class EngineClient:
    """Speaks to one engine server. Make and use it inside a running event loop; close it there too."""

    def __init__(self, url: str, request_timeout_s: float, key: str | None = None) -> None:
        """`key` goes with every request, as its bearer token."""
        self.url = url.rstrip("/")
        self._timeout = aiohttp.ClientTimeout(total=request_timeout_s, sock_connect=10)
        # No limit here: how many requests are in work is bounded by reef.max-in-flight.
        # Nothing is looked up or built for a request that no engine uses: cookies, what the client is and accepts.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
            headers=_JSON if key is None else {**_JSON, "authorization": f"Bearer {key}"},
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("accept", "accept-encoding", "user-agent"),
            timeout=self._timeout,
        )
        self.group: str | None = None  # that the engine joined last, and has not left
        self._pauses = _Pauses()
        self._aborts: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Close the connections; every call that begins afterwards fails."""
        if self._aborts:
            await asyncio.wait(self._aborts)
        await self._session.close()

    async def generate(self, request: Request) -> tuple[Generation, ...]:
        """All n choices of a request, once they are complete; cancelling it aborts them on the engine.

        Raises:
            BadRequestError: the engine refused the request (too long, an unsupported sampling field).
            EngineTimeoutError: it took longer than it may.
            EngineError: it failed, or its answer cannot be a record.
        """
        if request.n > 1:  # SGLang gives choices ids of its own: only the end of a stream aborts all of them
            ends = [chunk async for chunk in self._chunks(request, FAR_APART) if chunk.generation is not None]
            ends.sort(key=lambda chunk: chunk.choice)
            return tuple(chunk.generation for chunk in ends if chunk.generation is not None)
        before = self._pauses
        try:
            answer = await self._post("/generate", _payload(request, stream=False))
        except (asyncio.CancelledError, EngineError):
            self._abort(request.id)  # of itself SGLang notices after 4 s that nobody waits
            raise
        with expected_shape():
            check_prompt(answer, len(request.prompt_ids))
            return (generation_of(answer, self._reproducible(answer, before), before == self._pauses),)

    def stream(self, request: Request) -> AsyncGenerator[Chunk]:
        """Chunks of all choices as they come; closing the iterator early aborts the request on the engine.

        Raises what `generate` raises.
        """
        return self._chunks(request, None)

    async def _chunks(self, request: Request, interval: int | None) -> AsyncGenerator[Chunk]:
        """`interval`: tokens between two chunks of a choice; None: as the engine likes."""
        choices = [Progress() for _ in range(request.n)]
        before = self._pauses
        payload = _payload(request, stream=True)
        if interval is not None:
            payload["sampling_params"]["stream_interval"] = interval
        with self._failures("/generate"):
            async with self._session.post(f"{self.url}/generate", data=orjson.dumps(payload)) as response:
                await _raise_for_status(response)
                while line := await response.content.readline(max_line_length=MAX_EVENT_BYTES):
                    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                        continue
                    with expected_shape():
                        answer = orjson.loads(line[6:])
                        raise_for_event(answer)
                        check_prompt(answer, len(request.prompt_ids))
                        chunk = chunk_of(answer, choices, self._reproducible(answer, before), before == self._pauses)
                    yield chunk
        if not all(choice.ended for choice in choices):
            raise EngineError("the engine's stream ended before its last token", code="engine_stream_cut")

    def _reproducible(self, answer: Mapping[str, Any], before: _Pauses) -> bool:
        """Whether the weights of its spans alone explain an answer that was asked for after so many pauses.

        After one in place an engine goes on with the keys and values of older weights: in the requests that it
        interrupted, and in those whose prompts begin with what is in the prefix cache.
        """
        cached = answer["meta_info"].get("cached_tokens")
        return before.in_place == self._pauses.in_place and not (before.in_place and cached)

    def _abort(self, rid: str) -> None:
        """Tell the engine, in the background. Where it cannot be told, it has ended, or notices by itself later."""

        async def tell() -> None:
            with contextlib.suppress(EngineError, BadRequestError):
                await self._post("/abort_request", {"rid": rid}, ABORT_TIMEOUT_S)

        task = asyncio.create_task(tell(), name=f"abort-{rid}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def score(self, ids: Sequence[int]) -> Floats:
        """Log-probabilities [T-1] of ids[1:] at temperature 1, from the weights that are loaded now."""
        payload = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = await self._post("/generate", payload)
        with expected_shape():
            entries = answer["meta_info"].get("input_token_logprobs") or []
            values = [entry[0] for entry in entries[1:]]
        if len(values) != len(ids) - 1 or any(value is None for value in values):
            raise EngineError(f"the engine scored {len(values)} of {len(ids) - 1} probe tokens")
        return np.asarray(values, dtype=np.float32)

    async def pause(self, mode: str) -> None:
        """Stop generation; `mode` says what becomes of requests in work (`retract`, `in_place` or `abort`).

        Returns once the engine has stopped.

        Raises:
            BadRequestError: the engine refused the mode.
            EngineError: it failed, or did not answer within CONTROL_TIMEOUT_S.
        """
        self._pauses = _Pauses(self._pauses.all + 1, self._pauses.in_place + (mode == "in_place"))
        await self._post("/pause_generation", {"mode": mode}, CONTROL_TIMEOUT_S)

    async def resume(self) -> None:
        """Continue generation after a pause. Raises EngineError where the engine fails or does not answer in time."""
        await self._post("/continue_generation", {}, CONTROL_TIMEOUT_S)

    async def load(self, path: str, version: str, flush_cache: bool, timeout_s: float) -> None:
        """Load the weights in a directory and call them `version`. Raises EngineError where the engine refuses."""
        payload = {"model_path": path, "weight_version": version, "flush_cache": flush_cache}
        answer = await self._post("/update_weights_from_disk", payload, timeout_s)
        if not isinstance(answer, dict) or not answer.get("success"):
            raise EngineError(f"the engine did not load {path}: {message_of(answer)}")

    async def join_group(
        self, name: str, host: str, port: int, world_size: int, backend: str, timeout_s: float
    ) -> None:
        """Have the engine's ranks join a group as its ranks 1, 2, ...; returns once they have.

        Raises:
            EngineError: they could not, or did not in time.
        """
        payload = {
            "master_address": host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        await self._do("/init_weights_update_group", payload, timeout_s)
        self.group = name

    async def leave_group(self, timeout_s: float) -> None:
        """Have the engine leave the group that it joined last. Raises EngineError where it fails."""
        name, self.group = self.group, None
        if name is not None:
            await self._do("/destroy_weights_update_group", {"group_name": name}, timeout_s)

    async def begin_update(self, timeout_s: float) -> None:
        """Make the engine ready to receive weights; until `end_update`. Raises EngineError where it fails."""
        await self._do("/begin_weight_update", {}, timeout_s)

    async def receive(self, bucket: Bucket, version: str | None, flush_cache: bool, timeout_s: float) -> None:
        """Have the engine receive and load tensors that rank 0 of its group sends at the same time.

        Args:
            version: what the weights are called from now on; None: as before.

        Raises:
            EngineError: it could not; its weights may be of no use.
        """
        payload = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": self.group,
            "flush_cache": flush_cache,
            "weight_version": version,
        }
        await self._do("/update_weights_from_distributed", payload, timeout_s)

    async def end_update(self, timeout_s: float) -> None:
        """Undo `begin_update`; the weights received are in use. Raises EngineError where it fails."""
        await self._do("/end_weight_update", {}, timeout_s)

    async def model_info(self) -> Mapping[str, Any]:
        """The engine's answer to GET /model_info: its model and weights. Raises EngineError where there is none."""
        return await self._get("/model_info")

    async def server_info(self) -> Mapping[str, Any]:
        """The engine's answer to GET /server_info: its arguments and state. Raises EngineError where there is none."""
        return await self._get("/server_info")

    async def context_length(self) -> int | None:
        """Most tokens of a prompt and its answer together; None where the engine does not say. Raises EngineError."""
        for info in (await self.model_info(), await self.server_info()):
            if said := info.get("context_length") or info.get("max_context_length"):
                return int(said)
        # SGLang says there only what it was told; what it took from the model stands in the list for OpenAI's clients.
        with expected_shape():
            models = (await self._get("/v1/models")).get("data") or [{}]
            said = models[0].get("max_model_len")
            return None if said is None else int(said)

    async def healthy(self) -> bool:
        """Whether the engine answers GET /health with 200 within 5 s; False where it cannot be reached."""
        try:
            async with self._session.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=5)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _get(self, route: str) -> Mapping[str, Any]:
        with self._failures(route):
            async with self._session.get(
                f"{self.url}{route}", timeout=aiohttp.ClientTimeout(total=CONTROL_TIMEOUT_S)
            ) as response:
                await _raise_for_status(response)
                answer: Mapping[str, Any] = orjson.loads(await response.read())
                if not isinstance(answer, dict):
                    raise EngineError(f"the engine answered {route} with {str(answer)[:MAX_ERROR_CHARS]}")
                return answer

    async def _do(self, route: str, payload: Mapping[str, Any], timeout_s: float) -> None:
        """A call that answers whether it succeeded. Raises EngineError where it did not."""
        try:
            answer = await self._post(route, payload, timeout_s)
        except BadRequestError as error:  # how SGLang answers what failed on its side as well
            raise EngineError(f"{route}: {error.message}") from None
        if not isinstance(answer, dict) or not answer.get("success"):
            raise EngineError(f"{route}: the engine answered {message_of(answer)[:MAX_ERROR_CHARS]}")

    async def _post(self, route: str, payload: Mapping[str, Any], timeout_s: float | None = None) -> Any:
        timeout = self._timeout if timeout_s is None else aiohttp.ClientTimeout(total=timeout_s)
        with self._failures(route):
            async with self._session.post(
                f"{self.url}{route}", data=orjson.dumps(payload), timeout=timeout
            ) as response:
                await _raise_for_status(response)
                body = await response.read()
                # Control routes may answer with plain text or nothing; a generation is always JSON.
                return orjson.loads(body) if body.lstrip()[:1] in (b"{", b"[") else {}

    @contextlib.contextmanager
    def _failures(self, route: str) -> Iterator[None]:
        """Whatever goes wrong between here and the engine is an EngineError."""
        if self._session.closed:
            raise EngineError(f"the engine at {self.url} was replaced")
        try:
            yield
        except TimeoutError as error:
            raise EngineTimeoutError(f"the engine at {self.url} did not answer {route} in time") from error
        except orjson.JSONDecodeError as error:
            raise EngineError(f"the engine at {self.url} answered {route} with broken JSON: {error}") from error
        except (aiohttp.ClientError, HttpProcessingError, OSError) as error:
            raise EngineError(f"the engine at {self.url} failed: {error or type(error).__name__}") from error


_JSON = {"content-type": "application/json"}


async def _raise_for_status(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    body = await response.read()
    try:
        message = message_of(orjson.loads(body))
    except orjson.JSONDecodeError:  # a proxy in between may answer anything
        message = body.decode(errors="replace")
    message = message[:MAX_ERROR_CHARS]
    if response.status == 400:
        raise BadRequestError(f"the engine refused the request: {message}", code="engine_refused")
    raise EngineError(f"the engine answered {response.status}: {message}")


def _payload(request: Request, stream: bool) -> dict[str, Any]:
    payload: dict[str, Any] = {
        "rid": request.id,
        "input_ids": request.prompt_ids.tolist(),
        "sampling_params": _sampling_params(request.sampling, request.n),
        "return_logprob": True,
        "stream": stream,
    }
    if request.top_logprobs:
        payload["top_logprobs_num"] = request.top_logprobs
    return payload


def _sampling_params(sampling: Sampling, n: int) -> dict[str, Any]:
    """SGLang's names; neutral values are left out, so that an engine's defaults for them hold."""
    params: dict[str, Any] = {"max_new_tokens": sampling.max_tokens, "temperature": sampling.temperature}
    optional: dict[str, tuple[Any, bool]] = {
        "n": (n, n != 1),
        "top_p": (sampling.top_p, sampling.top_p != 1.0),
        "top_k": (sampling.top_k, sampling.top_k > 0),
        "min_p": (sampling.min_p, sampling.min_p > 0),
        "presence_penalty": (sampling.presence_penalty, sampling.presence_penalty != 0),
        "frequency_penalty": (sampling.frequency_penalty, sampling.frequency_penalty != 0),
        "repetition_penalty": (sampling.repetition_penalty, sampling.repetition_penalty != 1.0),
        "min_new_tokens": (sampling.min_tokens, sampling.min_tokens > 0),
        "stop": (list(sampling.stop), bool(sampling.stop)),
        "stop_token_ids": (list(sampling.stop_token_ids), bool(sampling.stop_token_ids)),
        "ignore_eos": (True, sampling.ignore_eos),
        "sampling_seed": (sampling.seed, sampling.seed is not None),
        "json_schema": (sampling.json_schema, sampling.json_schema is not None),
    }
    params.update({name: value for name, (value, is_set) in optional.items() if is_set})
    return params


async def wait_healthy(client: EngineClient, poll_s: float = 0.1) -> None:
    """Return once the engine answers /health with 200. Bound it with asyncio.timeout."""
    while not await client.healthy():
        await asyncio.sleep(poll_s)
