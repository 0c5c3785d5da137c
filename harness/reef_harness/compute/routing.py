"""Routing by difficulty: a few cheap answers to every item say where the rest of the tokens goes."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from reef_harness.compute.asker import Asker, Budget
from reef_harness.compute.consistency import Read, candidate_of, self_consistency
from reef_harness.compute.outcome import Candidate, Outcome
from reef_harness.compute.run import failed
from reef_harness.compute.votes import Votes
from reef_harness.errors import HarnessError
from reef_harness.together import together
from reef_harness.types import Item


async def route(
    askers: Sequence[Asker],
    items: Sequence[Item],
    read: Read,
    *,
    tokens: int,
    first: int,
    most: int,
    least: int = 1,
    concurrency: int = 64,
    progress: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Vote on every item, with ``tokens`` sampled tokens for all of them together, never more.

    Each item gets ``first`` answers; what is left then is shared out by the entropy of what they say, up to ``most``
    answers to an item. Items whose first answers agree get no more. ``least`` is that of :class:`Budget`. At most
    ``concurrency`` items are asked for at a time; ``progress`` gets each outcome as it ends. Raises ValueError unless
    1 <= first <= most and every item can have its share of ``tokens``, and for a ``concurrency`` below 1.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, got {concurrency}")
    if not 1 <= first <= most:
        raise ValueError(f"routing needs 1 <= first <= most, got {first} and {most}")
    share = tokens // len(items) if items else 0
    if share < 1:
        raise ValueError(f"{tokens} tokens are too few for {len(items)} items")
    for asker in askers:
        asker.limit(Budget(share, first, least))
    slots = asyncio.Semaphore(concurrency)

    async def draw(asker: Asker, item: Item) -> Drawn:
        async with slots:
            return await _draw(asker, item, read, first)

    async def vote(asker: Asker, item: Item, found: Drawn) -> Outcome:
        async with slots:
            outcome = await _vote(asker, item, found, read, first, most)
        if progress:
            progress(outcome)
        return outcome

    drawn = await together(map(draw, askers, items))
    left = tokens - sum(asker.spent.sampled_tokens for asker in askers)
    for asker, more in zip(askers, share_out([_need(found) for found in drawn], left), strict=True):
        asker.limit(Budget(max(1, asker.spent.sampled_tokens + more), most, least))
    return await together(map(vote, askers, items, drawn))


Drawn = list[Candidate] | HarnessError


async def _draw(asker: Asker, item: Item, read: Read, count: int) -> Drawn:
    found: list[Candidate] = []
    try:
        for _ in range(count):
            found += [candidate_of(sample, read) for sample in await asker.chat(item.messages)]
    except HarnessError as error:
        return error
    return found


def _need(drawn: Drawn) -> float:
    """How unsure the first answers are: their entropy in nats, or the most there can be where none can be read."""
    if isinstance(drawn, HarnessError):
        return 0.0
    votes = Votes([each.answer for each in drawn])
    return votes.entropy if votes.leaders or not drawn else math.log(len(drawn) + 1)


async def _vote(asker: Asker, item: Item, drawn: Drawn, read: Read, first: int, most: int) -> Outcome:
    if isinstance(drawn, HarnessError):
        return failed(item, asker, drawn)
    agreed = first <= len(drawn) < most and _need(drawn) == 0
    try:
        outcome = await self_consistency(asker, item, read, len(drawn) if agreed else most, drawn=drawn)
    except HarnessError as error:
        return failed(item, asker, error)
    return replace(outcome, stopped_by="agreed") if agreed else outcome


def share_out(weights: Sequence[float], amount: int) -> list[int]:
    """``amount`` in whole shares proportional to ``weights``, rounded down; all 0 where every weight is 0.

    Raises ValueError for a negative weight or amount.
    """
    if amount < 0 or any(weight < 0 for weight in weights):
        raise ValueError(f"cannot share out {amount} by {list(weights)}: nothing may be negative")
    whole = math.fsum(weights)
    return [int(amount * weight / whole) if whole > 0 else 0 for weight in weights]


def knee(xs: Sequence[float], ys: Sequence[float]) -> int | None:
    """The position at which a rising curve that flattens bends most: where more effort begins to bring little.

    Both axes are scaled to 0..1 between the first and the last point; the knee is the point furthest above the chord,
    the straight line between these two (the first of equals). None where no point is above it: the curve does not
    flatten. Source: Satopaa et al., Finding a "Kneedle" in a Haystack (2011), without its smoothing. Raises ValueError
    unless xs rise strictly and there are as many ys.
    """
    if len(xs) != len(ys) or len(xs) < 2 or any(b <= a for a, b in pairwise(xs)):
        raise ValueError(f"a knee needs at least two points with rising xs, got {len(xs)} xs and {len(ys)} ys")
    width, height = xs[-1] - xs[0], ys[-1] - ys[0]
    if height <= 0:
        return None
    above = [(y - ys[0]) / height - (x - xs[0]) / width for x, y in zip(xs, ys, strict=True)]
    best = max(range(len(above)), key=lambda i: above[i])
    return best if above[best] > 1e-12 else None
