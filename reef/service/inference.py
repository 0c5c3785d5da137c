"""From a checked request to receipts: place, engine, record, answer. Nothing leaves before its receipts are durable.

    ask_chat | ask_text   conversation or ids -> Work: the engine's request, and how its answers are read
    run_whole             engine.generate -> receipts -> ledger -> Answers
    run_stream            engine.stream -> Pieces ... -> receipts -> ledger -> Answers

Whatever API a request came through, this is the same; `openai.py`, `anthropic.py` and `responses.py` give it its shape.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request as HttpRequest

from reef.chat.conversation import Conversation
from reef.chat.detokenizer import cut_at_stop
from reef.chat.dialect import read_whole
from reef.chat.reply import Delta, PlainParser, Reply, ReplyParser
from reef.engines.answers import Chunk
from reef.engines.client import EngineClient
from reef.errors import (
    BadRequestError,
    ClientGoneError,
    ConflictError,
    EngineError,
    GoneError,
    ReefError,
    UnavailableError,
)
from reef.faults import reach
from reef.ledger import receipts
from reef.ledger.identity import new_id
from reef.observe import log
from reef.service.access import caller, headers_of
from reef.service.house import House
from reef.service.http import text_of
from reef.service.turns import Named, Place
from reef.storage import is_release
from reef.types import PURPOSES, FinishReason, Generation, Ids, Receipt, Request, Sampling

T = TypeVar("T")
TAG_PREFIX = "x-reef-tag-"
MAX_SESSION_CHARS = 256


@dataclass(frozen=True, slots=True)
class Ask:
    """What a route wants sampled. `sampling.max_tokens` 0 means all that the context leaves."""

    api: str  # chat | completions | messages | responses
    body: bytes  # the client's JSON as it came
    sampling: Sampling
    n: int = 1
    top_logprobs: int = 0
    named: Named | None = None  # the turn that it must continue, where the body names one
    cut_to_context: bool = False  # a `max_tokens` over what the context leaves means all of it; else it is refused


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A request on its way: what the engine gets, and how its answers are read."""

    request: Request
    place: Place | None  # of a chat
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What one choice gained: tokens, and what of its reply is certain by now."""

    chunk: Chunk
    deltas: Sequence[Delta]
    reply: Reply | None  # the whole of it, on its last piece only


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """One choice, recorded."""

    receipt: Receipt
    reply: Reply


Item = Piece | Sequence[Answer]  # of a stream: pieces, then the answers of all choices


async def ask_chat(house: House, http: HttpRequest, ask: Ask, conversation: Conversation) -> Work:
    """A conversation as engines and ledger see it.

    Raises:
        BadRequestError: it cannot be rendered, or does not fit the model.
        NotFoundError, GoneError, ConflictError: it names a turn that it does not continue.
    """
    place = await place_chat(house, http, conversation, ask.named)
    return Work(await _request(house, http, ask, place), place, conversation.tools)


async def place_chat(house: House, http: HttpRequest, conversation: Conversation, named: Named | None = None) -> Place:
    """The prompt of a conversation. Raises what `ask_chat` raises."""
    if conversation.tools and not house.dialect.shows_tools:
        raise BadRequestError(
            "tools: this model's chat template shows it none", param="tools", code="unsupported_field"
        )
    name = house.scenario_name(http)
    return await house.turns.place(conversation, name, caller(http).name, _session(http), _named(http, named))


async def ask_text(house: House, http: HttpRequest, ask: Ask, prompt_ids: Ids) -> Work:
    """Plain ids as engines and ledger see them. Raises what `ask_chat` raises."""
    _check_ids(house, prompt_ids)
    place = Place(prompt_ids, "")
    if (named := _named(http, ask.named)) is not None:
        place = await house.turns.continue_ids(prompt_ids, house.scenario_name(http), named)
    return Work(await _request(house, http, ask, place), None)


async def run_whole(house: House, http: HttpRequest, work: Work) -> Sequence[Answer]:
    """Sample all choices and record them. A client that goes away aborts the work on the engine."""
    async with _engine(house, http, work.request) as engine:
        generations = await unless_gone(http, engine.generate(work.request))
    keep = house.dialect.keep if work.place is not None else frozenset()
    texts = await house.template.decode_all([generation.output_ids for generation in generations], keep)
    replies = [
        read_whole(_parser(house, work, choice), cut_at_stop(text, generation.matched))
        for choice, (text, generation) in enumerate(zip(texts, generations, strict=True))
    ]
    return await _record(house, work, generations, replies)


async def run_stream(house: House, http: HttpRequest, work: Work) -> AsyncGenerator[Item]:
    """Pieces as they come, then the answers. Closed early (a client gone), what was sampled is kept as aborted."""
    readers = [_Reader(house, work, choice) for choice in range(work.request.n)]
    try:
        async with (
            _engine(house, http, work.request) as engine,
            contextlib.aclosing(engine.stream(work.request)) as all,
        ):
            async for chunk in all:
                yield readers[chunk.choice].read(chunk)
    except (GeneratorExit, asyncio.CancelledError):
        kept = [reader.finished or _aborted(reader.chunks) for reader in readers]
        if any(len(generation.output_ids) for generation in kept):
            house.keep(asyncio.create_task(_record_aborted(house, work, kept)))
        raise
    finished = [reader.finished for reader in readers if reader.finished is not None]
    yield await _record(house, work, finished, [reader.parser.reply for reader in readers])


def require_complete(answer: Answer) -> None:
    """Raises UnavailableError where the engine gave up, for APIs that have no word for that in an answer."""
    if answer.receipt.generation.finish_reason is FinishReason.ABORT:
        raise UnavailableError(
            f"the engine aborted this answer; what there was of it is kept in {answer.receipt.id}",
            code="aborted",
            retry_after_s=1,
        )


class _Reader:
    """Text and parts of one choice as its tokens come."""

    def __init__(self, house: House, work: Work, choice: int) -> None:
        self.parser = _parser(house, work, choice)
        self.chunks: list[Chunk] = []
        self.finished: Generation | None = None
        self._detokenizer = house.dialect.detokenizer(work.request.sampling.stop, plain=work.place is None)

    def read(self, chunk: Chunk) -> Piece:
        self.chunks.append(chunk)
        if chunk.generation is None:
            return Piece(chunk, self.parser.push(self._detokenizer.push(chunk.ids)), None)
        self.finished = chunk.generation
        last = self._detokenizer.finish(chunk.ids, chunk.generation.matched)
        deltas = [*self.parser.push(last), *self.parser.finish()]
        return Piece(chunk, deltas, self.parser.reply)


def _parser(house: House, work: Work, choice: int) -> ReplyParser:
    if work.place is None:
        return PlainParser()
    return house.dialect.reader(work.tools, f"{work.request.id}/{choice}", work.request.prompt_ids)


async def _request(house: House, http: HttpRequest, ask: Ask, place: Place) -> Request:
    purpose = headers_of(http).get("x-reef-purpose", "train")
    if purpose not in PURPOSES:
        raise BadRequestError(f"x-reef-purpose: expected one of {PURPOSES}, got {purpose!r}", param="x-reef-purpose")
    sampling = replace(ask.sampling, max_tokens=_max_tokens(house, place.prompt_ids, ask))
    _check_stop_ids(house, sampling)
    scenario = await house.scenario_of(http)  # last: a request that is refused creates none
    if house.config.inference.sampling == "neutral" and sampling != (neutral := sampling.neutralised()):
        house.metrics.neutralised.inc()
        sampling = neutral
    return Request(
        id=new_id("req_"),
        scenario=scenario.name,
        api=ask.api,
        prompt_ids=place.prompt_ids,
        sampling=sampling,
        n=ask.n,
        body=ask.body,
        created_at=time.time(),
        purpose=purpose,
        session=_session(http),
        parent=place.parent,
        continued_by=place.continued_by,
        tags={
            name[len(TAG_PREFIX) :]: text_of(value)
            for name, value in headers_of(http).items()
            if name.startswith(TAG_PREFIX)
        },
        top_logprobs=ask.top_logprobs,
        template_digest=house.template.template_digest if ask.api != "completions" else None,
        tokenizer_digest=house.template.tokenizer_digest,
    )


def _session(http: HttpRequest) -> str | None:
    for name in ("x-reef-session", "x-session-id", "session-id"):  # ours, many agents', codex's
        if value := headers_of(http).get(name):
            if len(value) > MAX_SESSION_CHARS:
                raise BadRequestError(f"{name}: expected at most {MAX_SESSION_CHARS} characters", param=name)
            return text_of(value)
    return None


def _named(http: HttpRequest, named: Named | None) -> Named | None:
    """`named`: by the body."""
    header = headers_of(http).get("x-reef-parent")
    if header and named is not None and header != named.receipt_id:
        raise BadRequestError(
            f"x-reef-parent names {header}, the body {named.receipt_id}: a turn continues one", param="x-reef-parent"
        )
    return Named(header, "explicit") if header else named


def _engine(house: House, http: HttpRequest, request: Request) -> contextlib.AbstractAsyncContextManager[EngineClient]:
    return house.engines.acquire(request.session, headers_of(http).get("x-reef-release"))


async def _record(
    house: House, work: Work, generations: Sequence[Generation], replies: Sequence[Reply | None]
) -> Sequence[Answer]:
    """`replies`: None where a choice was aborted; nothing continues it."""
    _check_weights(house, generations)
    now = time.time()
    place = work.place
    keys = [place.turn_key(reply) if place is not None and reply is not None else None for reply in replies]
    made = [
        receipts.make(work.request, choice, generation, house.engines.build, new_id("rcp_"), now, key)
        for choice, (generation, key) in enumerate(zip(generations, keys, strict=True))
    ]
    try:
        await house.ledger.write_together(receipts.record_all, (work.request, made))
    except GoneError as error:  # nothing is kept that holds what was deleted meanwhile
        raise _deleted_meanwhile(work.request, error) from None
    reach("receipt.written")
    house.metrics.receipts.inc(len(made))
    house.metrics.sampled_tokens.inc(sum(len(generation.output_ids) for generation in generations))
    for receipt in made:
        if receipt.turn_key is not None:
            house.turns.remember(receipt)
    return [Answer(receipt, reply or Reply("")) for receipt, reply in zip(made, replies, strict=True)]


def _deleted_meanwhile(request: Request, error: GoneError) -> ReefError:
    """A client that named no turn knows of none that could be gone: asked again, it is a new branch."""
    if request.continued_by not in ("session", "messages"):
        return error
    return ConflictError(
        "the turn that this request continues was deleted while it was answered: ask again", code="turn_deleted"
    )


def _check_weights(house: House, generations: Sequence[Generation]) -> None:
    """An engine that someone restarted holds weights that are no release: what they said is nobody's record."""
    for span in (span for generation in generations for span in generation.spans):
        if not is_release(house.ledger, span.release_id):
            raise EngineError(f"the engine answered with weights {span.release_id!r}, which are no release of this run")


async def _record_aborted(house: House, work: Work, generations: Sequence[Generation]) -> None:
    try:
        await _record(house, work, generations, [None] * len(generations))
    except ReefError as error:
        log.warning("an aborted stream of %s was not kept: %s", work.request.scenario, error.message)


def _aborted(chunks: Sequence[Chunk]) -> Generation:
    """What came of a choice, as far as it is certain which weights made it."""
    spans = chunks[-1].spans if chunks else ()
    num_tokens = spans[-1].end if spans else 0
    ids = [token for chunk in chunks for token in chunk.ids][:num_tokens]
    logprobs = [value for chunk in chunks for value in chunk.logprobs][:num_tokens]
    return Generation(
        output_ids=np.asarray(ids, dtype=np.int32),
        logprobs=np.asarray(logprobs, dtype=np.float32),
        finish_reason=FinishReason.ABORT,
        spans=spans,
        reproducible=all(chunk.reproducible for chunk in chunks),
    )


def _max_tokens(house: House, prompt_ids: Ids, ask: Ask) -> int:
    limit = ask.sampling.max_tokens
    context = house.engines.context_length
    if len(prompt_ids) == 0:
        raise BadRequestError("the prompt has no tokens", code="empty_prompt")
    room = context - len(prompt_ids)
    if room < 1:
        raise BadRequestError(
            f"the prompt has {len(prompt_ids)} tokens, the model's context is {context}",
            code="context_length_exceeded",
        )
    if limit > room and not ask.cut_to_context:
        raise BadRequestError(
            f"the prompt has {len(prompt_ids)} tokens and max_tokens is {limit}; the model's context is {context}, "
            f"so at most {room} can be sampled",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return min(limit or room, room)


def _check_ids(house: House, prompt_ids: Ids) -> None:
    """Of a client; those of a rendered chat are the tokenizer's own."""
    outside = (prompt_ids < 0) | (prompt_ids >= house.template.vocab_size)
    if outside.any():
        raise BadRequestError(
            f"prompt: ids must lie in 0..{house.template.vocab_size - 1}, position {int(outside.argmax())} does not",
            param="prompt",
        )


def _check_stop_ids(house: House, sampling: Sampling) -> None:
    """With min_tokens, SGLang 0.5.23 ends at an id that its model has not."""
    outside = [token for token in sampling.stop_token_ids if token >= house.template.vocab_size]
    if outside:
        raise BadRequestError(
            f"stop_token_ids: ids must lie in 0..{house.template.vocab_size - 1}, got {outside[0]}",
            param="stop_token_ids",
        )


async def unless_gone(http: HttpRequest, work: Awaitable[T]) -> T:
    """What `work` returns. Raises ClientGoneError, and cancels the work, where the client goes away first."""
    async with asyncio.timeout(None) as limit:
        watch = asyncio.create_task(_watch(http, limit))
        try:
            return await work
        except asyncio.CancelledError:
            if limit.expired():
                raise ClientGoneError("the client closed its connection") from None
            raise
        finally:
            watch.cancel()


async def _watch(http: HttpRequest, limit: asyncio.Timeout) -> None:
    """Ends the time limit of the work as soon as its client is gone."""
    while (await http.receive())["type"] != "http.disconnect":
        pass
    limit.reschedule(0)
