"""A plugin for pytest: random stalls where threads and loops hand over, so that races show which a fast machine hides.

    REEF_STALLS=7 .venv/bin/python -m pytest -p tests.stalls tests/test_gate.py        # 7 is the seed

Only in the tests' own process. What fails under it and is right otherwise is a test, or code, that hangs on speed.
"""

import asyncio
import os
import random
import threading
import time
from asyncio.base_events import BaseEventLoop
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any

SHARE = 0.08  # of the hand-overs
LONGEST_S = 0.05

_seed = int(os.environ.get("REEF_STALLS", "0"))
_dice = random.Random(_seed)
_sleep = time.sleep


def stall() -> None:
    if _dice.random() < SHARE:
        _sleep(_dice.uniform(0, LONGEST_S))


def stalled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, later; and later known to have ended."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        stall()
        try:
            return function(*args, **kwargs)
        finally:
            stall()

    return call


def pytest_report_header() -> str:
    return f"stalls: REEF_STALLS={_seed}"


def pytest_configure() -> None:
    submit, at = ThreadPoolExecutor.submit, BaseEventLoop.call_at

    def submit_stalled(pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return submit(pool, stalled(function), *args, **kwargs)

    def at_or_later(loop: BaseEventLoop, when: float, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        late = _dice.uniform(0, LONGEST_S) if _dice.random() < SHARE else 0.0
        return at(loop, when + late, *args, **kwargs)

    ThreadPoolExecutor.submit = submit_stalled  # type: ignore[method-assign, assignment]
    BaseEventLoop.call_at = at_or_later  # type: ignore[method-assign, assignment]
    BaseEventLoop.call_soon_threadsafe = stalled(BaseEventLoop.call_soon_threadsafe)  # type: ignore[method-assign]
    BaseEventLoop._run_once = stalled(BaseEventLoop._run_once)  # type: ignore[attr-defined]
    threading.Thread.run = stalled(threading.Thread.run)  # type: ignore[method-assign]
    time.sleep = stalled(time.sleep)
