"""Threads for graders that wait on a process."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Pool:
    """At most ``count`` threads. They do not survive a fork: each process has its own."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._start()

    def _start(self) -> None:
        self._owner = os.getpid()
        self._threads = ThreadPoolExecutor(self._count, thread_name_prefix=self._name)

    async def run(self, call: Callable[[*Ts], T], *args: *Ts) -> T:
        """What ``call`` returns or raises, without holding up the loop."""
        if self._owner != os.getpid():
            self._start()
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)
