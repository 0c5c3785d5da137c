"""Several engines are sent a release by one trainer, which serves one at a time: fakes of both."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from reef.engines.transfer import PATIENCE, transfer_weights
from reef.errors import EngineError
from reef.training.transfer import TrainerTransfer
from reef.types import Bucket, Published

MODEL = Path("recipes/arithmetic/starter")
TIMEOUT_S = 2.0
STILL = "engine-1"  # takes its first bucket and no more


class Workers:
    """A trainer that waits for an engine as long as it was told when it joined, by a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.patience_s: dict[str, float] = {}
        self.num_sent = {"engine-0": 0, STILL: 0}

    def worker_pids(self) -> list[int]:
        return [1]

    def listen(self, _engine: str) -> tuple[str, int, str]:
        return "127.0.0.1", 1, "gloo"

    def join(self, engine: str, _group: str, _world_size: int, timeout_s: float) -> None:
        self.patience_s[engine] = timeout_s

    def send(self, engine: str, _bucket: Bucket) -> None:
        if engine == STILL and self.num_sent[engine] == 1:
            self.now_s += self.patience_s[engine]
            raise EngineError("a rank did not keep up")
        self.num_sent[engine] += 1


class Client:
    """An engine; STILL answers nothing after its first bucket."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.group: str | None = None
        self.num_received = 0

    async def join_group(self, name: str, *_where: Any) -> None:
        self.group = name

    async def begin_update(self, _timeout_s: float) -> None: ...

    async def receive(self, *_bucket: Any) -> None:
        if self.name == STILL and self.num_received == 1:
            await asyncio.sleep(3600)
        self.num_received += 1

    async def end_update(self, _timeout_s: float) -> None:
        if self.name == STILL:
            raise EngineError("no answer")

    async def leave_group(self, timeout_s: float) -> None:
        self.group = None
        await self.end_update(timeout_s)


def test_an_engine_that_stands_still_is_given_up_before_the_others_are_late() -> None:
    workers: Any = Workers()

    async def send(engine: str, transfer: TrainerTransfer) -> float:
        began = workers.now_s
        client: Any = Client(engine)
        release = Published("r1", "/nowhere", "sha256:0", 1, None, on_disk=False)
        await transfer_weights(client, engine, 1, transfer, release, True, TIMEOUT_S)
        return workers.now_s - began

    async def main() -> None:
        asyncio.get_running_loop().time = lambda: workers.now_s  # type: ignore[method-assign]
        transfer = TrainerTransfer(workers, MODEL, 300_000)
        outcomes = await asyncio.gather(*(send(name, transfer) for name in workers.num_sent), return_exceptions=True)
        took_s, failure = outcomes
        assert isinstance(took_s, float), took_s
        assert TIMEOUT_S * PATIENCE <= took_s < TIMEOUT_S
        assert isinstance(failure, EngineError)
        assert "did not keep up" in failure.message
        assert workers.num_sent == {"engine-0": len(transfer.buckets), STILL: 1}

    asyncio.run(main())
