"""How the trainer's tensors reach an engine without a disk: what a replica asks of whoever carries them.

    port = listen(engine) -> engine joins, and so does the trainer: join(engine)
    for each bucket: the engine is told its names, and the trainer sends it: send(engine, number)

Each engine has a process group of its own with the trainer's first rank, so that one that fails takes no other along.
"""

from collections.abc import Sequence
from typing import Protocol

from reef.types import Bucket


class Transfer(Protocol):
    """The trainer's side, for engines by name. Calls of several engines may overlap; each is done in its turn."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """What is sent, in order: every tensor of the model once."""

    @property
    def backend(self) -> str:
        """torch.distributed's: `gloo` or `nccl`."""

    async def listen(self, engine: str) -> tuple[str, int]:
        """Begin a group for this engine, in the place of an earlier one; the address at which its ranks meet."""

    async def join(self, engine: str, world_size: int, timeout_s: float) -> None:
        """Join the group as rank 0; returns once all ranks have. Raises EngineError where they do not in time."""

    async def send(self, engine: str, number: int) -> None:
        """Broadcast bucket `number` from rank 0. Raises EngineError where the group failed or is no more."""
