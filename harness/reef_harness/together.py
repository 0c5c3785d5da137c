"""Several coroutines at once that end together, whatever ends them."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def together(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results, in order. Where one raises, that is raised, as it is, once the others are cancelled and have ended.

    ``asyncio.gather`` leaves the others running, and a TaskGroup raises a group that no ``except HarnessError`` takes.
    """
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
