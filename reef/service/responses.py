"""OpenAI's Responses: whole and streamed, and continued by their ids. What codex speaks.

A response's id is its request's. `previous_response_id` is resolved from the ledger: the inputs of the responses
before, as their clients sent them, and the replies as they are read from the stored ids. Where the new request says the
same as before (instructions, tools), it continues the stored ids of the last of them; otherwise it is a new branch.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import orjson
from fastapi import APIRouter
from sqlalchemy import Connection
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from reef.chat.conversation import Conversation, Message
from reef.chat.detokenizer import cut_at_stop
from reef.chat.dialect import read_whole
from reef.chat.reply import Reply
from reef.errors import ConflictError, GoneError, NotFoundError, ReefError, TooLargeError
from reef.ledger import exchanges
from reef.ledger.exchanges import Exchange
from reef.service.access import caller
from reef.service.document import INFERENCE, answers
from reef.service.events import stream
from reef.service.house import House
from reef.service.http import body_schema, check_num_messages, house_of, json_response, read_body
from reef.service.inference import Answer, Ask, Item, Piece, Work, ask_chat, require_complete, run_whole
from reef.service.openai import model_name, receipt_headers, reef_field
from reef.service.responses_output import Event, Output, whole_output
from reef.service.turns import Named
from reef.service.wire import parse
from reef.service.wire_responses import ResponsesBody
from reef.service.wire_tools import Tools
from reef.types import FinishReason, Sampling

router = APIRouter()
_PREFIX = "resp_"
_ENDS: Final[Mapping[FinishReason, tuple[str, dict[str, str] | None]]] = {
    FinishReason.STOP: ("completed", None),
    FinishReason.LENGTH: ("incomplete", {"reason": "max_output_tokens"}),
    FinishReason.ABORT: ("cancelled", None),
}


@router.post("/v1/responses", openapi_extra=body_schema(ResponsesBody), responses=answers(*INFERENCE, streams=True))
async def post_response(http: HttpRequest) -> Response:
    """OpenAI Responses. The answer's receipt is in `x-reef-agent-record-id`, and in its field `reef`."""
    house = house_of(http)
    house.require_ready()
    raw = await read_body(http)
    body = parse(ResponsesBody, raw)
    body.check()
    work = await _work(house, http, body, raw)
    head = Head(_PREFIX + work.request.id[4:], work.request.created_at, work.request.sampling, body, model_name(house))
    if body.stream:
        return await stream(house, http, work, partial(_events, house, work, head))
    (answer,) = await run_whole(house, http, work)
    require_complete(answer)
    reason = answer.receipt.generation.finish_reason
    output = whole_output(work.request.id, body.functions().namespaces, answer.reply, reason is not FinishReason.STOP)
    whole = head.finished(reason, output, await _usage(house, work, answer), reef_field([answer]))
    return json_response(whole, headers=receipt_headers([answer]))


@router.get("/v1/responses/{response_id}", responses=answers(404, 410, 503))
async def get_response(response_id: str, http: HttpRequest) -> Response:
    """A response as it was answered, from the ledger."""
    house = house_of(http)

    def read(connection: Connection) -> Exchange:
        return _exchange(connection, response_id, caller(http).sees)

    found = await house.ledger.read(read)
    body = parse(ResponsesBody, found.body)
    (reply,) = await _replies(house, [(found, body)])
    head = Head(response_id, found.created_at, found.sampling, body, model_name(house))
    output = whole_output(
        found.request_id, body.functions().namespaces, reply, found.finish_reason is not FinishReason.STOP
    )
    usage = await _usage_of(house, found.num_prompt_tokens, len(found.output_ids), reply)
    reef = {"agent_record_id": found.receipt_id, "agent_record_ids": [found.receipt_id], "release_id": found.release_id}
    return json_response(head.finished(found.finish_reason, output, usage, reef))


@dataclass(frozen=True, slots=True)
class Head:
    """What every state of one response says of it."""

    id: str
    created_at: float
    sampling: Sampling  # as it was sampled
    body: ResponsesBody
    model: str

    def shown(self, status: str, **fields: Any) -> dict[str, Any]:
        """The response object of the API; `fields` change what is not known at first."""
        body = self.body
        wanted = body.text.format if body.text is not None else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": int(self.created_at),
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": body.model or self.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": True,
            "temperature": self.sampling.temperature,
            "text": {
                "format": {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
            },
            "tool_choice": body.tool_choice or "auto",
            "tools": Tools(body.tools or ()).shown(),
            "top_logprobs": 0,
            "top_p": self.sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            **fields,
        }

    def finished(
        self, reason: FinishReason, output: list[dict[str, Any]], usage: dict[str, Any], reef: dict[str, Any]
    ) -> dict[str, Any]:
        """The whole response: `incomplete` where its limit cut it, `cancelled` where client or engine gave up."""
        status, why = _ENDS[reason]
        return self.shown(status, incomplete_details=why, output=output, usage=usage, reef=reef)


async def _events(house: House, work: Work, head: Head, items: AsyncGenerator[Item]) -> AsyncGenerator[bytes]:
    """created, in_progress, the output's events; completed or incomplete once the receipt is durable, or failed."""
    lines = _Lines()
    output = Output(work.request.id, head.body.functions().namespaces)
    yield lines.line({"type": "response.created", "response": head.shown("in_progress")})
    yield lines.line({"type": "response.in_progress", "response": head.shown("in_progress")})
    try:
        async for item in items:
            if isinstance(item, Piece):
                for event in _of_piece(output, item):
                    yield lines.line(event)
                continue
            require_complete(item[0])
            reason = item[0].receipt.generation.finish_reason
            usage = await _usage(house, work, item[0])
            whole = head.finished(reason, output.items, usage, reef_field(item))
            yield lines.line({"type": f"response.{whole['status']}", "response": whole})
    except ReefError as error:  # the status line is out already: the error is an event, and there is no receipt
        failed = head.shown("failed", output=output.items, error={"code": _code(error), "message": error.message})
        yield lines.line({"type": "response.failed", "response": failed})


def _of_piece(output: Output, piece: Piece) -> list[Event]:
    events = [event for delta in piece.deltas for event in output.push(delta)]
    if piece.chunk.generation is not None:
        events += output.finish(piece.chunk.generation.finish_reason is not FinishReason.STOP)
    return events


class _Lines:
    """Events as lines, numbered."""

    def __init__(self) -> None:
        self._number = 0

    def line(self, event: Event) -> bytes:
        data = orjson.dumps({**event, "sequence_number": self._number})
        self._number += 1
        return f"event: {event['type']}\ndata: ".encode() + data + b"\n\n"


def _code(error: ReefError) -> str:
    """The API's few words for what went wrong."""
    if error.status >= 500:
        return "server_error"
    return "rate_limit_exceeded" if error.status == 429 else "invalid_prompt"


async def _work(house: House, http: HttpRequest, body: ResponsesBody, raw: bytes) -> Work:
    before: Sequence[Message] = ()
    named = None
    if body.previous_response_id is not None:
        before, named = await _before(house, http, body.previous_response_id)
    conversation = body.conversation(before)
    check_num_messages(house, len(conversation.messages), "input")
    ask = Ask("responses", raw, body.sampling(), named=named)
    return await _continue(house, http, ask, conversation)


async def _continue(house: House, http: HttpRequest, ask: Ask, conversation: Conversation) -> Work:
    """A request that says something else than the response it names (other instructions or tools) is a new branch."""
    try:
        return await ask_chat(house, http, ask, conversation)
    except ConflictError as error:
        if ask.named is None or error.code != "not_continued":
            raise
        return await ask_chat(house, http, replace(ask, named=None), conversation)


async def _before(house: House, http: HttpRequest, response_id: str) -> tuple[list[Message], Named]:
    """The messages up to and including a response, and its receipt as the turn to continue.

    Raises:
        NotFoundError: it, or one before it, is not there, or not in the request's scenario.
        GoneError: one was deleted.
        ConflictError: it was cut off by its client.
    """
    scenario = house.scenario_name(http)
    limit = house.config.reef.max_messages
    found = await house.ledger.read(_chain, response_id, scenario, limit)
    replies = await _replies(house, found)
    messages: list[Message] = []
    for (_, body), reply in zip(found, replies, strict=True):
        messages += [*body.messages(), reply.message()]
    return messages, Named(found[-1][0].receipt_id, "response")


def _chain(connection: Connection, response_id: str, scenario: str, limit: int) -> list[tuple[Exchange, ResponsesBody]]:
    """The response and all before it, the oldest first."""
    found: list[tuple[Exchange, ResponsesBody]] = []
    previous: str | None = response_id
    while previous is not None:
        exchange = _exchange(connection, previous, lambda name: name == scenario)
        if exchange.finish_reason is FinishReason.ABORT:
            raise ConflictError(
                f"{previous} was cut off: nothing continues it", param="previous_response_id", code="response_aborted"
            )
        if len(found) == limit:
            raise TooLargeError(
                f"more than {limit} responses come before this one (reef.max-messages)", param="previous_response_id"
            )
        body = parse(ResponsesBody, exchange.body)
        found.append((exchange, body))
        previous = body.previous_response_id
    return found[::-1]


def _exchange(connection: Connection, response_id: str, is_seen: Callable[[str], bool]) -> Exchange:
    """`is_seen`: of a scenario; what is in others is as if it were not there, and so is what was deleted of them."""
    request_id = f"req_{response_id.removeprefix(_PREFIX)}"
    if not response_id.startswith(_PREFIX):
        raise _unknown(response_id)
    try:
        if not is_seen(exchanges.scenario_of(connection, request_id)):
            raise _unknown(response_id)
        found = exchanges.read(connection, request_id)
    except NotFoundError:
        raise _unknown(response_id) from None
    except GoneError:
        raise GoneError(f"response {response_id} was deleted", param="previous_response_id") from None
    if found.api != "responses":
        raise _unknown(response_id)
    return found


async def _replies(house: House, found: Sequence[tuple[Exchange, ResponsesBody]]) -> list[Reply]:
    """The replies as they were answered, read from the stored ids."""
    outputs = [exchange.output_ids for exchange, _ in found]
    texts = await house.template.decode_all(outputs, house.dialect.keep)
    replies = []
    for (exchange, body), text in zip(found, texts, strict=True):
        tools = body.conversation().tools
        parser = house.dialect.reader(tools, f"{exchange.request_id}/0", exchange.added_ids)
        replies.append(read_whole(parser, cut_at_stop(text, exchange.matched)))
    return replies


async def _usage(house: House, work: Work, answer: Answer) -> dict[str, Any]:
    num_output = len(answer.receipt.generation.output_ids)
    return await _usage_of(house, len(work.request.prompt_ids), num_output, answer.reply)


async def _usage_of(house: House, num_input: int, num_output: int, reply: Reply) -> dict[str, Any]:
    """Tokens in and out; those of the thinking are counted by its text, since they are not told apart when sampled."""
    num_thinking = len(await house.template.encode(reply.reasoning)) if reply.reasoning else 0
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": min(num_thinking, num_output)},
        "total_tokens": num_input + num_output,
    }


def _unknown(response_id: str) -> NotFoundError:
    return NotFoundError(f"no response {response_id[:80]}", param="previous_response_id", code="response_not_found")
