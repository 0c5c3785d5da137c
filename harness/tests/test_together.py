"""Coroutines that end together."""

import asyncio
from typing import NoReturn

import pytest
from reef_harness.errors import HarnessError
from reef_harness.together import together


async def say(word: str, turns: int) -> str:
    for _ in range(turns):
        await asyncio.sleep(0)
    return word


def test_results_come_in_the_order_of_the_work() -> None:
    async def call() -> list[str]:
        return await together(say(word, turns) for word, turns in (("slow", 5), ("fast", 0)))

    assert asyncio.run(call()) == ["slow", "fast"]


def test_an_error_is_raised_as_it_is_once_the_others_have_ended() -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # whoever is cancelled may have to put something away
            ended.append("the other")

    async def fail() -> NoReturn:
        await asyncio.sleep(0)
        raise HarnessError("no such release")

    async def call() -> None:
        with pytest.raises(HarnessError, match="no such release"):
            await together([wait(), fail()])
        assert ended == ["the other"]

    asyncio.run(call())


def test_cancelled_from_outside_it_ends_all() -> None:
    ended: list[int] = []

    async def wait(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(number)

    async def call() -> None:
        whole = asyncio.ensure_future(together(wait(number) for number in range(2)))
        await say("", 3)
        whole.cancel()
        with pytest.raises(asyncio.CancelledError):
            await whole
        assert sorted(ended) == [0, 1]

    asyncio.run(call())
