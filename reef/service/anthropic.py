"""Anthropic's routes: messages, whole and streamed, and how many tokens one would have."""

from collections.abc import AsyncGenerator, Iterator
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from reef.errors import ReefError
from reef.service.document import ANTHROPIC_ERROR, INFERENCE, answers
from reef.service.errors import anthropic_error_body, request_id
from reef.service.events import stream
from reef.service.house import House
from reef.service.http import body_schema, check_num_messages, house_of, json_response, read_body
from reef.service.inference import Answer, Ask, Item, Piece, ask_chat, place_chat, require_complete, run_whole
from reef.service.openai import receipt_headers, reef_field
from reef.service.shapes_anthropic import Blocks, content, stop_reason, usage
from reef.service.wire import B, parse
from reef.service.wire_anthropic import CountBody, MessagesBody
from reef.types import Request

router = APIRouter()


@router.post(
    "/v1/messages",
    openapi_extra=body_schema(MessagesBody),
    responses=answers(*INFERENCE, streams=True, error=ANTHROPIC_ERROR),
)
async def messages(http: HttpRequest) -> Response:
    """Anthropic messages. The answer's receipt is in `x-reef-agent-record-id`, a stream's in `message_stop`."""
    house, raw, body = await _read(http, MessagesBody)
    ask = Ask("messages", raw, body.sampling(), cut_to_context=True)
    work = await ask_chat(house, http, ask, body.conversation())
    if body.stream:
        return await stream(house, http, work, partial(_events, work.request, body, request_id(http.scope)))
    (answer,) = await run_whole(house, http, work)
    require_complete(answer)  # no stop reason of Anthropic's says that an engine gave up
    whole = {
        **_message(work.request, body),
        "content": content(answer.reply, body.shows_thinking),
        **stop_reason(answer.reply, answer.receipt.generation, body.max_tokens),
        "usage": usage(len(work.request.prompt_ids), len(answer.receipt.generation.output_ids)),
        "reef": reef_field([answer]),
    }
    return json_response(whole, headers=receipt_headers([answer]))


@router.post(
    "/v1/messages/count_tokens",
    openapi_extra=body_schema(CountBody),
    responses=answers(400, 404, 409, 410, 413, 503, error=ANTHROPIC_ERROR),
)
async def count_tokens(http: HttpRequest) -> Response:
    """The tokens of the prompt that a message would be answered from: the turn that it continues, and what follows."""
    house, _, body = await _read(http, CountBody)
    place = await place_chat(house, http, body.conversation())
    return json_response({"input_tokens": len(place.prompt_ids)})


async def _read(http: HttpRequest, model: type[B]) -> tuple[House, bytes, Any]:
    house = house_of(http)
    house.require_ready()
    raw = await read_body(http)
    body: Any = parse(model, raw)
    check_num_messages(house, len(body.messages))
    body.check()
    return house, raw, body


async def _events(
    request: Request, body: MessagesBody, its_id: str, items: AsyncGenerator[Item]
) -> AsyncGenerator[bytes]:
    """The message begins, its blocks, why it ended; `message_stop` once the receipt is durable."""
    blocks = Blocks(body.shows_thinking)
    opening = {**_message(request, body), "content": [], "stop_reason": None, "stop_sequence": None}
    yield _event({"type": "message_start", "message": {**opening, "usage": usage(len(request.prompt_ids), 0)}})
    yield _event({"type": "ping"})
    try:
        async for item in items:
            if isinstance(item, Piece):
                for event in blocks.add(item.deltas):
                    yield _event(event)
                continue
            for event in blocks.end():
                yield _event(event)
            for event in _last_events(item[0], request, body):
                yield _event(event)
    except ReefError as error:  # the status line is out already: the error is an event, and there is no receipt
        yield _event(anthropic_error_body(error, its_id))


def _last_events(answer: Answer, request: Request, body: MessagesBody) -> Iterator[dict[str, Any]]:
    """Both name the receipt: the SDK's stream helper makes a `message_stop` of its own, without it."""
    require_complete(answer)
    generation = answer.receipt.generation
    told = usage(len(request.prompt_ids), len(generation.output_ids))
    reef = reef_field([answer])
    delta = stop_reason(answer.reply, generation, body.max_tokens)
    yield {"type": "message_delta", "delta": delta, "usage": told, "reef": reef}
    yield {"type": "message_stop", "reef": reef}


def _message(request: Request, body: MessagesBody) -> dict[str, Any]:
    return {"id": f"msg_{request.id[4:]}", "type": "message", "role": "assistant", "model": body.model}


def _event(value: dict[str, Any]) -> bytes:
    kind: str = value["type"]
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps(value) + b"\n\n"
