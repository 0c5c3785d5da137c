"""What training is doing and why it stands still: written by the rooms around the loop, read by status."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from reef.errors import UnavailableError
from reef.observe import log
from reef.types import Batch

T = TypeVar("T")
STORE_RETRY_S = 1.0  # between tries of what disk or database refused; the state to be stored is kept meanwhile


class Progress:
    """One for each dispatcher."""

    def __init__(self) -> None:
        self.phase = "starting"  # recovering | waiting | reserving | stepping | committing | loading | holding | ...
        self.batch: Batch | None = None  # in work
        self.error: str | None = None  # the last one that is not mended yet
        self.paused: str | None = None  # why training stands still though reports come
        self.stopping = False

    def pause(self, reason: str) -> None:
        """Train no further until a promotion or a rollback."""
        self.paused = self.error = reason
        log.error("training pauses: %s", reason)

    async def until_stored(self, store: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Something that must not be lost: tried again until the disk and the database take it.

        Raises:
            UnavailableError: they do not, and the service stops.
        """
        refused: str | None = None
        while True:
            try:
                stored = await store(*args)
            except UnavailableError as error:
                if self.stopping:
                    raise
                refused = self.error = error.message
                log.warning("not stored, trying again: %s", error.message)
                await asyncio.sleep(STORE_RETRY_S)
                continue
            if refused is not None and self.error == refused:
                self.error = None
            return stored
