"""OpenAI's inference routes: chat completions, completions, models; whole and streamed."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from reef.chat.template import Detokenizer, Template, cut_at_stop
from reef.engines.answers import Chunk
from reef.errors import BadRequestError, ReefError
from reef.service.errors import error_body
from reef.service.house import House
from reef.service.http import body_schema, house_of, json_response, read_body
from reef.service.inference import Item, prepare, run_stream, run_whole, unless_gone
from reef.service.wire import ChatBody, CompletionBody, SamplingBody, parse
from reef.types import Receipt, Request

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatBody))
async def chat_completions(http: HttpRequest) -> Response:
    """OpenAI chat completions. The answer's receipt is in `x-reef-agent-record-id`."""
    house = house_of(http)
    house.require_ready()
    raw = await read_body(http)
    body = parse(ChatBody, raw)
    if body.top_logprobs and not body.logprobs:
        raise BadRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    messages = [message.rendered() for message in body.messages]
    prompt_ids = await house.template.render(messages, body.chat_template_kwargs or {})
    request = await prepare(house, http, raw, "chat", prompt_ids, body, body.limit, body.top_logprobs or 0)
    shape = Chat(house.template, body, wants_logprobs=bool(body.logprobs))
    return await _answer(house, http, request, body, shape)


@router.post("/v1/completions", openapi_extra=body_schema(CompletionBody))
async def completions(http: HttpRequest) -> Response:
    """OpenAI completions over text or token ids; nothing is added to the prompt."""
    house = house_of(http)
    house.require_ready()
    raw = await read_body(http)
    body = parse(CompletionBody, raw)
    if isinstance(body.prompt, str):
        prompt_ids = await house.template.encode(body.prompt)
    else:
        prompt_ids = np.asarray(body.prompt, dtype=np.int64).clip(-1, 2**31 - 1).astype(np.int32)
    request = await prepare(house, http, raw, "completions", prompt_ids, body, body.limit, body.logprobs or 0)
    shape = Text(house.template, body, wants_logprobs=body.logprobs is not None)
    return await _answer(house, http, request, body, shape)


@router.get("/v1/models")
async def models(http: HttpRequest) -> Response:
    """The one model that is served, under the name of its directory."""
    house = house_of(http)
    model = {"id": _model_name(house), "object": "model", "created": int(house.started_at), "owned_by": "reef"}
    return json_response({"object": "list", "data": [model]})


class Chat:
    """How a chat completion looks, whole and in chunks."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, template: Template, body: SamplingBody, wants_logprobs: bool) -> None:
        self._template = template
        self._wants_logprobs = wants_logprobs
        self.body = body

    def choice(self, text: str, receipt: Receipt) -> dict[str, Any]:
        """The message of a whole choice, and its log-probabilities; `text` is its answer, cut at the stop."""
        generation = receipt.generation
        return {
            "message": {"role": "assistant", "content": text},
            "logprobs": self.logprobs(generation.output_ids.tolist(), generation.logprobs.tolist(), generation),
        }

    def first_delta(self) -> dict[str, Any] | None:
        """What opens a choice's stream, before its first tokens; None: nothing does."""
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, text: str, chunk: Chunk) -> dict[str, Any]:
        """What a chunk adds to a choice: `text`, and the log-probabilities of the chunk's ids."""
        return {"delta": {"content": text}, "logprobs": self.logprobs(chunk.ids, chunk.logprobs, chunk)}

    def last_delta(self) -> dict[str, Any]:
        """What goes with a choice's finish reason: an empty delta."""
        return {"delta": {}}

    def logprobs(self, ids: Sequence[int], values: Sequence[float], source: Any) -> dict[str, Any] | None:
        """Log-probabilities in OpenAI's chat shape, an entry per token; None where the client asked for none.

        Args:
            ids: [N] sampled ids.
            values: [N] their log-probabilities (natural logarithm); `finite` stands in for -inf.
            source: the Generation or Chunk they come from; its `top_logprobs` are [N] or empty.
        """
        if not self._wants_logprobs:
            return None
        tops = source.top_logprobs or [()] * len(ids)
        return {
            "content": [
                {**self._token(token, value), "top_logprobs": [self._token(other, lp) for lp, other in top]}
                for token, value, top in zip(ids, values, tops, strict=True)
            ]
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._template.token_text(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}


class Text(Chat):
    """How a text completion looks."""

    id_prefix = "cmpl"
    object = "text_completion"
    chunk_object = "text_completion"

    def choice(self, text: str, receipt: Receipt) -> dict[str, Any]:
        """The text of a whole choice, and its log-probabilities; `text` is already cut at the stop."""
        generation = receipt.generation
        return {
            "text": text,
            "logprobs": self.logprobs(generation.output_ids.tolist(), generation.logprobs.tolist(), generation),
        }

    def first_delta(self) -> dict[str, Any] | None:
        """None: a text completion has no opening event."""
        return None

    def delta(self, text: str, chunk: Chunk) -> dict[str, Any]:
        """What a chunk adds to a choice: `text`, and the log-probabilities of the chunk's ids."""
        return {"text": text, "logprobs": self.logprobs(chunk.ids, chunk.logprobs, chunk)}

    def last_delta(self) -> dict[str, Any]:
        """What goes with a choice's finish reason: no text, no log-probabilities."""
        return {"text": "", "logprobs": None}

    def logprobs(self, ids: Sequence[int], values: Sequence[float], source: Any) -> dict[str, Any] | None:
        """Log-probabilities in OpenAI's completions shape (no text_offset); None where the client asked for none.

        Three lists of length N: tokens, token_logprobs, top_logprobs (empty mappings where there are none).
        Arguments as in `Chat.logprobs`.
        """
        if not self._wants_logprobs:
            return None
        tops = source.top_logprobs or [()] * len(ids)
        return {
            "tokens": [self._template.token_text(token) for token in ids],
            "token_logprobs": [finite(value) for value in values],
            "top_logprobs": [{self._template.token_text(other): finite(lp) for lp, other in top} for top in tops],
        }


def finite(logprob: float) -> float:
    """JSON has no -inf: the smallest float32 stands for it (the receipt says `logprob_not_finite`)."""
    return max(logprob, -3.4028235e38)


async def _answer(house: House, http: HttpRequest, request: Request, body: SamplingBody, shape: Chat) -> Response:
    if body.stream:
        items = run_stream(house, http, request)
        # The status line waits for the engine's first token: until then a refusal is a status, not an event.
        first = await unless_gone(http, asyncio.create_task(_next(items)))
        return EventStream(_events(house, request, shape, _chain(first, items)), items)
    made = await run_whole(house, http, request)
    texts = await house.template.decode_all([receipt.generation.output_ids for receipt in made])
    choices = [
        {
            "index": receipt.choice,
            **shape.choice(cut_at_stop(text, receipt.generation.matched), receipt),
            "finish_reason": receipt.generation.finish_reason.value,
            "reef_agent_record_id": receipt.id,
            **({"token_ids": receipt.generation.output_ids.tolist()} if body.return_token_ids else {}),
        }
        for text, receipt in zip(texts, made, strict=True)
    ]
    answer = {**_frame(house, request, shape, shape.object), "choices": choices, "usage": _usage(request, made)}
    if body.return_token_ids:
        answer["prompt_token_ids"] = request.prompt_ids.tolist()
    return json_response(answer, headers=receipt_headers(made))


class EventStream(StreamingResponse):
    """Server-sent events. However the connection ends, so does their source: the engine stops sampling at once."""

    def __init__(self, events: AsyncGenerator[bytes], source: AsyncGenerator[Item]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._events = events
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.aclose()
            await self._source.aclose()


async def _next(items: AsyncGenerator[Item]) -> Item:
    return await anext(items)


async def _chain(first: Item, rest: AsyncGenerator[Item]) -> AsyncGenerator[Item]:
    yield first
    async for item in rest:
        yield item


async def _events(house: House, request: Request, shape: Chat, items: AsyncGenerator[Item]) -> AsyncGenerator[bytes]:
    """Server-sent events: deltas, finish reasons, the receipts once they are durable, usage, [DONE]."""
    frame = _frame(house, request, shape, shape.chunk_object)
    texts = [Detokenizer(house.template, request.sampling.stop) for _ in range(request.n)]
    started = [False] * request.n

    def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
        return b"data: " + orjson.dumps({**frame, "choices": choices, **more}) + b"\n\n"

    try:
        async for item in items:
            if not isinstance(item, Chunk):
                for line in _last_events(item, request, shape, event):
                    yield line
                continue
            opening = shape.first_delta()
            if not started[item.choice] and opening is not None:
                yield event([{"index": item.choice, **opening, "finish_reason": None}])
            started[item.choice] = True
            detokenizer, whole = texts[item.choice], item.generation
            text = detokenizer.push(item.ids) if whole is None else detokenizer.finish(item.ids, whole.matched)
            token_ids = {"token_ids": list(item.ids)} if shape.body.return_token_ids else {}
            if item.ids or text:
                yield event([{"index": item.choice, **shape.delta(text, item), "finish_reason": None, **token_ids}])
            if whole is not None:
                reason = whole.finish_reason.value
                yield event([{"index": item.choice, **shape.last_delta(), "finish_reason": reason}])
    except ReefError as error:  # the status line is out already: the error is an event, and there is no receipt
        yield b"data: " + orjson.dumps(error_body(error)) + b"\n\n"
    yield b"data: [DONE]\n\n"


def _last_events(made: Sequence[Receipt], request: Request, shape: Chat, event: Any) -> list[bytes]:
    """The receipts; then the usage, which the SDKs expect last."""
    more: dict[str, Any] = {
        "reef": {
            "agent_record_id": made[0].id,
            "agent_record_ids": [receipt.id for receipt in made],
            "release_id": _release_of(made),
        }
    }
    if shape.body.return_token_ids:
        more["prompt_token_ids"] = request.prompt_ids.tolist()
    lines = [event([], **more)]
    options = shape.body.stream_options
    if options is not None and options.include_usage:
        lines.append(event([], usage=_usage(request, made)))
    return lines


def receipt_headers(made: Sequence[Receipt]) -> dict[str, str]:
    """The headers of a whole answer: the receipt of choice 0, and the release of its last token.

    The release is "" where that choice has no tokens. `made` holds at least one receipt, choice 0 first.
    """
    return {"x-reef-agent-record-id": made[0].id, "x-reef-release-id": _release_of(made) or ""}


def _release_of(made: Sequence[Receipt]) -> str | None:
    """The release that produced the last token of choice 0."""
    spans = made[0].generation.spans
    return spans[-1].release_id if spans else None


def _frame(house: House, request: Request, shape: Chat, kind: str) -> dict[str, Any]:
    return {
        "id": f"{shape.id_prefix}-{request.id[4:]}",
        "object": kind,
        "created": int(time.time()),
        "model": shape.body.model or _model_name(house),
    }


def _model_name(house: House) -> str:
    return house.config.inference.model_path.name


def _usage(request: Request, made: Sequence[Receipt]) -> dict[str, int]:
    num_sampled = sum(len(receipt.generation.output_ids) for receipt in made)
    num_prompt = len(request.prompt_ids)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }
