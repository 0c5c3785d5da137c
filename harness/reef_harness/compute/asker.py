"""Asks within a budget: every sampled token is counted, and no request is sent that could exceed what is left."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reef_harness.client import Client
from reef_harness.compute.outcome import Spent
from reef_harness.errors import HarnessError, UnexpectedAnswer
from reef_harness.types import Completion, Message
from reef_harness.wire import Asking


@dataclass(frozen=True, slots=True)
class Budget:
    """At most so many sampled tokens, and answers or parts of answers (None: no limit).

    An answer that could get fewer than ``least`` tokens is not asked for: it would be cut for certain. Raises
    ValueError for limits below 1.
    """

    sampled_tokens: int | None = None
    samples: int | None = None
    least: int = 1

    def __post_init__(self) -> None:
        for name, value in (
            ("sampled_tokens", self.sampled_tokens),
            ("samples", self.samples),
            ("least", self.least),
        ):
            if value is not None and value < 1:
                raise ValueError(f"a budget's {name} must be at least 1, got {value}")


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer, or one part of an answer, as it was sampled.

    ``ids`` [N] and ``prompt_ids`` are there where they were asked for, ``logprobs`` [N] likewise; ``pieces`` [N], the
    texts of the sampled tokens, come with the log-probabilities. ``seed`` and ``index``: of its random numbers.
    """

    text: str
    finish_reason: str
    num_tokens: int
    seed: int
    index: int
    receipt: str
    release: str
    ids: tuple[int, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    pieces: tuple[str, ...] | None = None


class Asker:
    """Samples through ``client`` for one item, marked as evaluation.

    Request number i (from 0) has the seed ``seed`` + i, so the same weights give the same answers again. ``max_tokens``
    limits an answer; the budget cuts that to what is left. With ``logprobs`` each sample has those of its tokens.
    """

    def __init__(
        self,
        client: Client,
        budget: Budget,
        *,
        max_tokens: int = 64,
        temperature: float = 1.0,
        seed: int = 0,
        release: str | None = None,
        logprobs: bool = False,
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
        self._client, self._budget, self._release = client, budget, release
        self._max_tokens, self._temperature, self._seed, self._logprobs = max_tokens, temperature, seed, logprobs
        self._reserved = Spent()  # by requests on their way
        self.spent = Spent()

    @property
    def tokens_left(self) -> int | None:
        """Sampled tokens that may still be asked for; None: no limit."""
        limit = self._budget.sampled_tokens
        return None if limit is None else limit - self.spent.sampled_tokens - self._reserved.sampled_tokens

    @property
    def samples_left(self) -> int | None:
        """Answers that may still be asked for; None: no limit."""
        limit = self._budget.samples
        return None if limit is None else limit - self.spent.samples - self._reserved.samples

    def limit(self, budget: Budget) -> None:
        """Go on under another budget; what was spent counts against it. Raises ValueError where that exceeds it."""
        spent = self.spent + self._reserved
        for limit, used in ((budget.sampled_tokens, spent.sampled_tokens), (budget.samples, spent.samples)):
            if limit is not None and used > limit:
                raise ValueError(f"{used} are spent already: that is over the new budget of {limit}")
        self._budget = budget

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        token_ids: bool = False,
        extra: Mapping[str, Any] | None = None,
    ) -> tuple[Sample, ...]:
        """Up to ``n`` answers to a conversation: fewer where the budget does not hold n, none where it is spent."""
        return await self._ask(messages, None, n, token_ids, extra)

    async def go_on(
        self, ids: Sequence[int], *, n: int = 1, extra: Mapping[str, Any] | None = None
    ) -> tuple[Sample, ...]:
        """Up to ``n`` continuations of exactly these token ids."""
        return await self._ask(None, ids, n, True, extra)

    async def _ask(
        self,
        messages: Sequence[Message] | None,
        ids: Sequence[int] | None,
        n: int,
        token_ids: bool,
        extra: Mapping[str, Any] | None,
    ) -> tuple[Sample, ...]:
        n, each = self._affordable(n)
        if n == 0:
            return ()
        asked = self.spent.requests + self._reserved.requests
        reserved = Spent(requests=1, samples=n, sampled_tokens=n * each)
        self._reserved += reserved
        seed = self._seed + asked
        asking: Asking = {
            "n": n,
            "temperature": self._temperature,
            "max_tokens": each,
            "seed": seed,
            "logprobs": self._logprobs,
            "token_ids": token_ids or n > 1,
            "purpose": "eval",
            "release": self._release,
            "extra": extra,
        }
        try:
            if messages is not None:
                completion = await self._client.chat(messages, **asking)
            else:
                completion = await self._client.completions(ids or (), **asking)
        except HarnessError:
            self.spent += Spent(requests=1, failed=1)
            raise
        finally:
            self._reserved += _negative(reserved)
        self.spent += Spent(1, n, completion.prompt_tokens, completion.completion_tokens)
        _check(completion, n, each)
        return tuple(_sample(completion, position, seed) for position in range(n))

    def _affordable(self, n: int) -> tuple[int, int]:
        """How many answers can be asked for, and how many tokens each of them may have."""
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        if self.samples_left is not None:
            n = min(n, self.samples_left)
        if self.tokens_left is None:
            return max(0, n), self._max_tokens
        least = min(self._budget.least, self._max_tokens)
        n = max(0, min(n, self.tokens_left // least))
        return n, min(self._max_tokens, self.tokens_left // n) if n else 0


def _negative(spent: Spent) -> Spent:
    return Spent(-spent.requests, -spent.samples, -spent.prompt_tokens, -spent.sampled_tokens, -spent.failed)


def _check(completion: Completion, n: int, each: int) -> None:
    """A budget is only as good as the service's counts."""
    if sorted(choice.index for choice in completion.choices) != list(range(n)):
        raise UnexpectedAnswer(f"{n} answers were asked for, {len(completion.choices)} came")
    if completion.completion_tokens > n * each:
        raise UnexpectedAnswer(f"at most {n * each} tokens were asked for, {completion.completion_tokens} came")
    if completion.completion_tokens == 0 and any(choice.text for choice in completion.choices):
        raise UnexpectedAnswer("the service does not count tokens (usage.completion_tokens): no budget can be kept")


def _sample(completion: Completion, position: int, seed: int) -> Sample:
    choice = completion.choices[position]
    if choice.token_ids is not None:
        num_tokens = len(choice.token_ids)
    elif len(completion.choices) == 1:
        num_tokens = completion.completion_tokens
    else:
        raise UnexpectedAnswer("token ids were asked for and did not come")
    return Sample(
        choice.text,
        choice.finish_reason,
        num_tokens,
        seed,
        choice.index,
        choice.receipt,
        completion.release,
        choice.token_ids,
        completion.prompt_token_ids,
        choice.logprobs,
        _pieces(completion.raw["choices"][position].get("logprobs")),
    )


def _pieces(logprobs: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    """The texts of the sampled tokens, out of the shape of chats or that of completions."""
    if logprobs is None:
        return None
    if "tokens" in logprobs:
        return tuple(logprobs["tokens"])
    return tuple(token["token"] for token in logprobs.get("content") or ())
