"""The trainer's side of a transfer of weights without a disk: see `reef.engines.transfer`."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from reef.engines.transfer import group_name
from reef.training.buckets import buckets
from reef.training.cluster import Trainer
from reef.types import Bucket

T = TypeVar("T")


class TrainerTransfer:
    """Carries the tensors of one trainer to the engines, one call of it at a time.

    A group ends with the workers it was made with.
    """

    def __init__(self, trainer: Trainer, model_path: Path, bucket_bytes: int) -> None:
        """Raises ConfigError where the model's files cannot be read."""
        self.buckets: Sequence[Bucket] = buckets(model_path, bucket_bytes)
        self.backend = ""  # known once the workers listen
        self._trainer = trainer
        self._turn = asyncio.Lock()
        self._ports: dict[str, int] = {}
        self._joined: dict[str, list[int]] = {}  # the workers of each engine's group

    def joined(self, engine: str) -> bool:
        """As in `Transfer`."""
        return engine in self._joined and self._joined[engine] == self._trainer.worker_pids()

    async def listen(self, engine: str) -> tuple[str, int]:
        """As in `Transfer`."""
        self._joined.pop(engine, None)
        host, port, self.backend = await self._call(self._trainer.listen, engine)
        self._ports[engine] = port
        return host, port

    async def join(self, engine: str, world_size: int, timeout_s: float) -> None:
        """As in `Transfer`."""
        name = group_name(engine, self._ports[engine])
        await self._call(self._trainer.join, engine, name, world_size, timeout_s)
        self._joined[engine] = self._trainer.worker_pids()

    async def send(self, engine: str, number: int) -> None:
        """As in `Transfer`."""
        try:
            await self._call(self._trainer.send, engine, self.buckets[number])
        except BaseException:
            self._joined.pop(engine, None)
            raise

    async def _call(self, work: Callable[..., T], *args: Any) -> T:
        """Run a call of the trainer in its turn. One that is cancelled holds the turn until it has ended."""
        async with self._turn:
            call = asyncio.ensure_future(asyncio.to_thread(work, *args))
            try:
                return await asyncio.shield(call)
            except asyncio.CancelledError:
                await asyncio.wait({call})
                raise
