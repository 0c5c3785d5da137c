"""Where the snapshots of one HTTP call meet the coroutine that answers it. Lives on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from reef.engines.embedded.request import Request, Snapshot


class Answers:
    """Keeps the newest snapshot of each sequence of a call.

    A slow reader of a stream skips snapshots instead of queueing them: each holds everything before it.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._fresh: dict[int, tuple[Request, Snapshot]] = {}
        self._finals: dict[int, Snapshot] = {}
        self._changed = asyncio.Event()
        self._complete = asyncio.Event()

    def expect(self, requests: Sequence[Request]) -> None:
        """Names the sequences of the call, in the order of the answer."""
        self._requests = list(requests)

    def put(self, request: Request, snapshot: Snapshot) -> None:
        """Takes a snapshot: the `sink` of each sequence."""
        self._fresh[id(request)] = (request, snapshot)
        self._changed.set()
        if snapshot.finish is not None:
            self._finals[id(request)] = snapshot
            if len(self._finals) == len(self._requests):
                self._complete.set()

    async def finals(self) -> list[Snapshot]:
        """The last snapshot of every sequence, once all have one."""
        await self._complete.wait()
        return [self._finals[id(request)] for request in self._requests]

    async def changes(self) -> AsyncIterator[tuple[Request, Snapshot]]:
        """Snapshots as they come, until every sequence has sent its last."""
        num_open = len(self._requests)
        while num_open:
            await self._changed.wait()
            self._changed.clear()
            fresh, self._fresh = self._fresh, {}
            for request, snapshot in fresh.values():
                num_open -= snapshot.finish is not None
                yield request, snapshot
