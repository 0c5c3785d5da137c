"""OpenAI's inference routes: chat completions, completions, models; whole and streamed."""

import time
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from reef.errors import ReefError
from reef.service.document import INFERENCE, answers
from reef.service.errors import error_body
from reef.service.events import stream
from reef.service.house import House
from reef.service.http import body_schema, check_num_messages, house_of, json_response, read_body
from reef.service.inference import Answer, Ask, Item, Piece, Work, ask_chat, ask_text, run_whole
from reef.service.shapes import Chat, Text
from reef.service.wire import parse
from reef.service.wire_openai import ChatBody, CompletionBody, SamplingBody
from reef.types import Request

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatBody), responses=answers(*INFERENCE, streams=True))
async def chat_completions(http: HttpRequest) -> Response:
    """OpenAI chat completions. The answer's receipt is in `x-reef-agent-record-id`."""
    house = house_of(http)
    house.require_ready()
    raw = await read_body(http)
    body = parse(ChatBody, raw)
    body.check()
    check_num_messages(house, len(body.messages))
    ask = Ask("chat", raw, body.sampling(), body.n or 1, body.top_logprobs or 0)
    work = await ask_chat(house, http, ask, body.conversation())
    return await _answer(house, http, work, body, Chat(house.template, bool(body.logprobs)))


@router.post("/v1/completions", openapi_extra=body_schema(CompletionBody), responses=answers(*INFERENCE, streams=True))
async def completions(http: HttpRequest) -> Response:
    """OpenAI completions over text or token ids; nothing is added to the prompt."""
    house = house_of(http)
    house.require_ready()
    raw = await read_body(http)
    body = parse(CompletionBody, raw)
    body.check()
    if isinstance(body.prompt, str):
        prompt_ids = await house.template.encode(body.prompt)
    else:
        prompt_ids = np.asarray(body.prompt, dtype=np.int64).clip(-1, 2**31 - 1).astype(np.int32)
    ask = Ask("completions", raw, body.sampling(), body.n or 1, body.logprobs or 0)
    work = await ask_text(house, http, ask, prompt_ids)
    echo = ""
    if body.echo:
        echo = body.prompt if isinstance(body.prompt, str) else (await house.template.decode_all([prompt_ids]))[0]
    return await _answer(house, http, work, body, Text(house.template, body.logprobs is not None, echo))


@router.get("/v1/models", responses=answers())
async def models(http: HttpRequest) -> Response:
    """The one model that is served, under the name of its directory."""
    house = house_of(http)
    model = {"id": model_name(house), "object": "model", "created": int(house.started_at), "owned_by": "reef"}
    return json_response({"object": "list", "data": [model]})


async def _answer(house: House, http: HttpRequest, work: Work, body: SamplingBody, shape: Chat) -> Response:
    if body.stream:
        return await stream(house, http, work, partial(_events, house, work.request, body, shape))
    answers = await run_whole(house, http, work)
    choices = [
        {
            "index": answer.receipt.choice,
            **shape.choice(answer.reply, answer.receipt),
            "reef_agent_record_id": answer.receipt.id,
            **({"token_ids": answer.receipt.generation.output_ids.tolist()} if body.return_token_ids else {}),
        }
        for answer in answers
    ]
    whole = {**_frame(house, work.request, body, shape, shape.object), "choices": choices}
    whole["usage"] = _usage(work.request, answers)
    if body.return_token_ids:
        whole["prompt_token_ids"] = work.request.prompt_ids.tolist()
    return json_response(whole, headers=receipt_headers(answers))


async def _events(
    house: House, request: Request, body: SamplingBody, shape: Chat, items: AsyncGenerator[Item]
) -> AsyncGenerator[bytes]:
    """Deltas, finish reasons, the receipts once they are durable, usage, [DONE]."""
    frame = _frame(house, request, body, shape, shape.chunk_object)
    started = [False] * request.n
    try:
        async for item in items:
            if not isinstance(item, Piece):
                for line in _last_events(frame, item, request, body):
                    yield line
                continue
            opening = shape.first_delta()
            index = item.chunk.choice
            if not started[index] and opening is not None:
                yield _event(frame, [{"index": index, **opening, "finish_reason": None}])
            started[index] = True
            for choice in _choices(item, shape, body):
                yield _event(frame, [{"index": index, **choice}])
    except ReefError as error:  # the status line is out already: the error is an event, and there is no receipt
        yield b"data: " + orjson.dumps(error_body(error)) + b"\n\n"
    yield b"data: [DONE]\n\n"


def _choices(item: Piece, shape: Chat, body: SamplingBody) -> list[dict[str, Any]]:
    """What a piece says of its choice. The first event carries the tokens, the last one the finish reason."""
    chunk = item.chunk
    made = [{**delta, "finish_reason": None} for delta in shape.deltas(item.deltas)]
    logprobs = shape.logprobs(chunk.ids, chunk.logprobs, chunk)
    if not made and chunk.ids and (logprobs is not None or body.return_token_ids):
        made.append({**shape.nothing(), "finish_reason": None})
    if made:
        made[0]["logprobs"] = logprobs
        if body.return_token_ids:
            made[0]["token_ids"] = list(chunk.ids)
    if item.reply is not None and chunk.generation is not None:
        reason = shape.finish_reason(item.reply, chunk.generation.finish_reason.value)
        made.append({**shape.nothing(), "logprobs": None, "finish_reason": reason})
    return made


def _last_events(frame: dict[str, Any], answers: Sequence[Answer], request: Request, body: SamplingBody) -> list[bytes]:
    """The receipts; then the usage, which the SDKs expect last."""
    more: dict[str, Any] = {"reef": reef_field(answers)}
    if body.return_token_ids:
        more["prompt_token_ids"] = request.prompt_ids.tolist()
    lines = [_event(frame, [], **more)]
    if body.include_usage:
        lines.append(_event(frame, [], usage=_usage(request, answers)))
    return lines


def _event(frame: dict[str, Any], choices: list[dict[str, Any]], **more: Any) -> bytes:
    return b"data: " + orjson.dumps({**frame, "choices": choices, **more}) + b"\n\n"


def reef_field(answers: Sequence[Answer]) -> dict[str, Any]:
    """What a stream says of its receipts, once they are durable."""
    ids = [answer.receipt.id for answer in answers]
    return {"agent_record_id": ids[0], "agent_record_ids": ids, "release_id": _release_of(answers)}


def receipt_headers(answers: Sequence[Answer]) -> dict[str, str]:
    """The headers of a whole answer: the receipt of choice 0, and the release of its last token.

    The release is "" where that choice has no tokens. `answers` holds at least one, choice 0 first.
    """
    return {"x-reef-agent-record-id": answers[0].receipt.id, "x-reef-release-id": _release_of(answers) or ""}


def _release_of(answers: Sequence[Answer]) -> str | None:
    """The release that produced the last token of choice 0."""
    spans = answers[0].receipt.generation.spans
    return spans[-1].release_id if spans else None


def _frame(house: House, request: Request, body: SamplingBody, shape: Chat, kind: str) -> dict[str, Any]:
    return {
        "id": f"{shape.id_prefix}-{request.id[4:]}",
        "object": kind,
        "created": int(time.time()),
        "model": body.model or model_name(house),
    }


def model_name(house: House) -> str:
    """What the one model is called: its directory's name."""
    return house.config.inference.model_path.name


def _usage(request: Request, answers: Sequence[Answer]) -> dict[str, int]:
    num_sampled = sum(len(answer.receipt.generation.output_ids) for answer in answers)
    num_prompt = len(request.prompt_ids)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }
