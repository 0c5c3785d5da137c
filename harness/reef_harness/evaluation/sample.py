"""Answers to items: asked for with a seed each, a bounded number at a time, kept before anything is made of them."""

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import httpx

from reef_harness.client import Client
from reef_harness.drivers import GRADABLE
from reef_harness.errors import (
    Conflict,
    Forbidden,
    HarnessError,
    NotFound,
    ServiceError,
    Unauthorized,
    Unavailable,
    UnexpectedAnswer,
    Unreachable,
)
from reef_harness.evaluation.records import Key, Response
from reef_harness.together import together
from reef_harness.types import Completion, Item

_FOR_ALL = (Unauthorized, Forbidden, NotFound, Conflict, Unavailable)  # every other request would end the same


@dataclass(frozen=True, slots=True)
class Settings:
    """How answers are sampled: ``samples`` for each item at ``temperature``, and with ``greedy`` one more at 0.

    Raises ValueError for values that mean nothing: several answers at temperature 0 are the same answer.
    """

    samples: int = 1
    temperature: float = 1.0
    greedy: bool = False
    max_tokens: int = 64
    seed: int = 0
    logprobs: bool = False

    def __post_init__(self) -> None:
        if self.samples < 1 or self.max_tokens < 1:
            raise ValueError(f"samples and max_tokens must be at least 1, got {self.samples} and {self.max_tokens}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be a number from 0 up, got {self.temperature}")
        if self.temperature == 0 and self.samples > 1:
            raise ValueError("at temperature 0 all answers to an item are one: ask for 1 sample, or for a temperature")

    def asked(self) -> dict[float, int]:
        """How many answers to each item, by temperature; 0 is greedy."""
        return {self.temperature: self.samples} | ({0.0: 1} if self.greedy else {})


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to come: the answer number ``sample`` to an item at a temperature."""

    item: Item
    sample: int
    seed: int
    temperature: float

    @property
    def key(self) -> Key:
        """The key of its response."""
        return (self.item.id, self.temperature, self.sample)


def asks(items: Sequence[Item], settings: Settings) -> Iterator[Ask]:
    """Every request, item by item. Each has a seed of its own, ``seed + position + sample * len(items)``.

    So the same items and settings send the same seeds to whatever release, and more samples later change no seed.
    """
    for position, item in enumerate(items):
        for temperature, samples in settings.asked().items():
            for number in range(samples):
                yield Ask(item, number, settings.seed + position + number * len(items), temperature)


async def sample(
    client: Client,
    wanted: Sequence[Ask],
    settings: Settings,
    *,
    release: str | None,
    concurrency: int,
    keep: Callable[[Ask, Response], Awaitable[None]],
) -> None:
    """Send ``wanted``, ``concurrency`` at a time, marked as evaluation; ``keep`` gets each response as it comes.

    A request that fails is a response with an ``error``. What would fail for all (no service, no right, no such
    release) ends it with that HarnessError, once the requests in flight are answered; what was kept is kept. Whatever
    else ``keep`` raises ends it at once, and cancels them.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, got {concurrency}")
    left = iter(wanted)

    failures: list[HarnessError] = []

    async def work() -> None:
        for ask in left:  # one iterator for all workers: each request is taken once
            try:
                await keep(ask, await _answer(client, ask, settings, release))
            except HarnessError as error:
                failures.append(error)
            if failures:
                return

    await together(work() for _ in range(min(concurrency, len(wanted))))
    if failures:
        raise failures[0]


async def _answer(client: Client, ask: Ask, settings: Settings, release: str | None) -> Response:
    try:
        completion = await client.chat(
            ask.item.messages,
            temperature=ask.temperature,
            max_tokens=settings.max_tokens,
            seed=ask.seed,
            purpose="eval",
            release=release,
            logprobs=settings.logprobs,
        )
    except (ServiceError, Unreachable) as error:
        if isinstance(error, _FOR_ALL) or isinstance(error.__cause__, httpx.ConnectError | httpx.ConnectTimeout):
            raise
        return Response(ask.item.id, ask.sample, ask.seed, ask.temperature, error=f"{type(error).__name__}: {error}")
    except HarnessError as error:
        return Response(ask.item.id, ask.sample, ask.seed, ask.temperature, error=f"{type(error).__name__}: {error}")
    if release is not None and completion.release != release:
        raise UnexpectedAnswer(f"asked for an answer of release {release}, got one of {completion.release}")
    return _response(ask, completion)


def _response(ask: Ask, completion: Completion) -> Response:
    choice = completion.choices[0]
    whole = choice.finish_reason in GRADABLE
    return Response(
        item=ask.item.id,
        sample=ask.sample,
        seed=ask.seed,
        temperature=ask.temperature,
        release=completion.release,
        receipt=choice.receipt,
        text=choice.text,
        finish_reason=choice.finish_reason,
        prompt_tokens=completion.prompt_tokens,
        completion_tokens=completion.completion_tokens,
        logprob_sum=None if choice.logprobs is None else math.fsum(choice.logprobs),
        error=None if whole else f"not a whole answer: finish_reason {choice.finish_reason!r}",
    )
