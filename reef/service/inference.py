"""From a checked request to receipts: engine, record, answer. Nothing leaves before its receipts are durable.

run_whole:   engine.generate -> receipts -> ledger -> (the route answers)
run_stream:  engine.stream -> text deltas ... -> receipts -> ledger -> the last event
"""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

import numpy as np
from starlette.requests import Request as HttpRequest

from reef.engines.answers import Chunk
from reef.engines.client import EngineClient
from reef.errors import BadRequestError, EngineError, ReefError
from reef.faults import reach
from reef.ledger import receipts
from reef.observe import log
from reef.service.house import House
from reef.service.wire import SamplingBody
from reef.storage import is_release
from reef.types import PURPOSES, FinishReason, Generation, Ids, Receipt, Request, Sampling

T = TypeVar("T")
Item = Chunk | Sequence[Receipt]  # of a stream: chunks, then the receipts of all choices
TAG_PREFIX = "x-reef-tag-"


class ClientGoneError(ReefError):
    """The client closed its connection; nobody reads the answer."""

    status = 499
    code = "client_gone"


async def prepare(
    house: House,
    http: HttpRequest,
    raw: bytes,
    api: str,
    prompt_ids: Ids,
    body: SamplingBody,
    limit: int | None,
    top_logprobs: int,
) -> Request:
    """The request as engines and ledger see it. Raises BadRequestError where it cannot fit the model."""
    purpose = http.headers.get("x-reef-purpose", "train")
    if purpose not in PURPOSES:
        raise BadRequestError(f"x-reef-purpose: expected one of {PURPOSES}, got {purpose!r}", param="x-reef-purpose")
    sampling = body.sampling(_max_tokens(house, prompt_ids, limit))
    _check_stop_ids(house, sampling)
    scenario = await house.scenario_of(http)  # last: a request that is refused creates none
    if house.config.inference.sampling == "neutral" and sampling.inexact_reason() not in (None, "greedy"):
        house.metrics.neutralised.inc()
        sampling = sampling.neutralised()
    return Request(
        id=f"req_{uuid.uuid4().hex}",
        scenario=scenario.name,
        api=api,
        prompt_ids=prompt_ids,
        sampling=sampling,
        n=body.n or 1,
        body=raw,
        created_at=time.time(),
        purpose=purpose,
        session=http.headers.get("x-reef-session") or http.headers.get("x-session-id"),
        tags={name[len(TAG_PREFIX) :]: value for name, value in http.headers.items() if name.startswith(TAG_PREFIX)},
        top_logprobs=top_logprobs,
        template_digest=house.template.template_digest if api == "chat" else None,
        tokenizer_digest=house.template.tokenizer_digest,
    )


async def run_whole(house: House, http: HttpRequest, request: Request) -> Sequence[Receipt]:
    """Sample all choices and record them. A client that goes away aborts the work on the engine."""
    async with _engine(house, http, request) as engine:
        generations = await unless_gone(http, asyncio.create_task(engine.generate(request)))
    return await _record(house, request, generations)


async def run_stream(house: House, http: HttpRequest, request: Request) -> AsyncGenerator[Item]:
    """Chunks as they come, then the receipts. Closed early (a client gone), what was sampled is kept as aborted."""
    seen: list[list[Chunk]] = [[] for _ in range(request.n)]
    finished: list[Generation | None] = [None] * request.n
    try:
        async with _engine(house, http, request) as engine, contextlib.aclosing(engine.stream(request)) as chunks:
            async for chunk in chunks:
                seen[chunk.choice].append(chunk)
                finished[chunk.choice] = chunk.generation
                yield chunk
    except (GeneratorExit, asyncio.CancelledError):
        kept = [done or _aborted(chunks) for done, chunks in zip(finished, seen, strict=True)]
        if any(len(generation.output_ids) for generation in kept):
            house.keep(asyncio.create_task(_record_aborted(house, request, kept)))
        raise
    yield await _record(house, request, [generation for generation in finished if generation is not None])


def _engine(house: House, http: HttpRequest, request: Request) -> contextlib.AbstractAsyncContextManager[EngineClient]:
    return house.engines.acquire(request.session, http.headers.get("x-reef-release"))


async def _record(house: House, request: Request, generations: Sequence[Generation]) -> Sequence[Receipt]:
    _check_weights(house, generations)
    now = time.time()
    made = [
        receipts.make(request, choice, generation, house.engines.build, f"rcp_{uuid.uuid4().hex}", now)
        for choice, generation in enumerate(generations)
    ]
    await house.ledger.write(receipts.record, request, made)
    reach("receipt.written")
    house.metrics.receipts.inc(len(made))
    house.metrics.sampled_tokens.inc(sum(len(generation.output_ids) for generation in generations))
    return made


def _check_weights(house: House, generations: Sequence[Generation]) -> None:
    """An engine that someone restarted holds weights that are no release: what they said is nobody's record."""
    for span in (span for generation in generations for span in generation.spans):
        if not is_release(house.ledger, span.release_id):
            raise EngineError(f"the engine answered with weights {span.release_id!r}, which are no release of this run")


async def _record_aborted(house: House, request: Request, generations: Sequence[Generation]) -> None:
    try:
        await _record(house, request, generations)
    except ReefError as error:
        log.warning("an aborted stream of %s was not kept: %s", request.scenario, error.message)


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


def _max_tokens(house: House, prompt_ids: Ids, limit: int | None) -> int:
    context = house.engines.context_length
    if len(prompt_ids) == 0:
        raise BadRequestError("the prompt has no tokens", code="empty_prompt")
    room = context - len(prompt_ids)
    if room < 1:
        raise BadRequestError(
            f"the prompt has {len(prompt_ids)} tokens, the model's context is {context}",
            code="context_length_exceeded",
        )
    if limit is not None and limit > room:
        raise BadRequestError(
            f"the prompt has {len(prompt_ids)} tokens and max_tokens is {limit}; the model's context is {context}, "
            f"so at most {room} can be sampled",
            param="max_tokens",
            code="context_length_exceeded",
        )
    outside = (prompt_ids < 0) | (prompt_ids >= house.template.vocab_size)
    if outside.any():
        raise BadRequestError(
            f"prompt: ids must lie in 0..{house.template.vocab_size - 1}, position {int(outside.argmax())} does not",
            param="prompt",
        )
    return limit or room


def _check_stop_ids(house: House, sampling: Sampling) -> None:
    """With min_tokens, SGLang 0.5.23 ends at an id that its model has not."""
    outside = [token for token in sampling.stop_token_ids if token >= house.template.vocab_size]
    if outside:
        raise BadRequestError(
            f"stop_token_ids: ids must lie in 0..{house.template.vocab_size - 1}, got {outside[0]}",
            param="stop_token_ids",
        )


async def unless_gone(http: HttpRequest, work: asyncio.Task[T]) -> T:
    """What `work` returns. Raises ClientGoneError, and cancels the work, where the client goes away first."""
    gone = asyncio.create_task(_disconnected(http))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ClientGoneError("the client closed its connection")
    finally:
        gone.cancel()
        work.cancel()


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
