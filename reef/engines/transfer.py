"""How the trainer's tensors reach an engine without a disk: what a replica asks of whoever carries them.

    port = listen(engine) -> engine joins, and so does the trainer: join(engine)
    for each bucket: the engine is told its names, and the trainer sends it: send(engine, number)

Each engine has a process group of its own with the trainer's first rank, so that one that fails takes no other along.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

from reef.engines.client import EngineClient
from reef.errors import EngineError, ReefError
from reef.types import Bucket, Published

GIVE_UP_TIMEOUT_S = 5  # for each call to an engine that has failed already
# Of a transfer's time, what the trainer waits for an engine to join, and then to take a bucket: it serves one engine at
# a time, and one that stands still must leave the others theirs.
PATIENCE = 1 / 4


class Transfer(Protocol):
    """The trainer's side, for engines by name. Calls of several engines may overlap; each is done in its turn."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """What is sent, in order: every tensor of the model once."""

    @property
    def backend(self) -> str:
        """torch.distributed's: `gloo` or `nccl`; known once `listen` has answered."""

    def joined(self, engine: str) -> bool:
        """Whether there is a group with this engine on the trainer's side."""

    async def listen(self, engine: str) -> tuple[str, int]:
        """Begin a group for this engine, in the place of an earlier one; the address at which its ranks meet."""

    async def join(self, engine: str, world_size: int, timeout_s: float) -> None:
        """Join the group as rank 0; returns once all ranks have. Raises EngineError where they do not in time.

        `timeout_s` is for this, and for each bucket.
        """

    async def send(self, engine: str, number: int) -> None:
        """Broadcast bucket `number` from rank 0. Raises EngineError where the group failed or is no more."""


async def transfer_weights(
    client: EngineClient,
    engine: str,
    num_ranks: int,
    transfer: Transfer,
    published: Published,
    flush_cache: bool,
    timeout_s: float,
) -> None:
    """Send a release into one engine, which is paused.

    The group is made with the first transfer and used again by later ones.

    Args:
        engine: the name of its group.
        num_ranks: its tensor ranks.
        flush_cache: drop the keys and values of the weights before.
        timeout_s: for the whole.

    Raises:
        EngineError: the engine or the group failed; its group has ended, and the next try makes another. What the
            engine holds then may be a mixture of two releases: only `published` entire may make it answer again.
    """
    try:
        async with asyncio.timeout(timeout_s):
            if client.group is None or not transfer.joined(engine):
                await _meet(client, engine, num_ranks, transfer, timeout_s)
            await client.begin_update(timeout_s)
            last = len(transfer.buckets) - 1
            for number, bucket in enumerate(transfer.buckets):
                version = published.release_id if number == last else None
                await _both(
                    client.receive(bucket, version, flush_cache and number == last, timeout_s),
                    transfer.send(engine, number),
                    on_failure=lambda: _give_up(client),
                )
            await client.end_update(timeout_s)
    except TimeoutError:
        await _give_up(client)
        raise EngineError(f"{engine} did not receive {published.release_id} in {timeout_s:g} s") from None
    except BaseException:
        await _give_up(client)
        raise


def group_name(engine: str, port: int) -> str:
    """The name of the group that meets at this port: no other group of this engine has it."""
    return f"reef-{engine}-{port}"


async def _meet(client: EngineClient, engine: str, num_ranks: int, transfer: Transfer, timeout_s: float) -> None:
    """Make a group of the trainer's rank 0 and the engine's ranks, in the place of an older one."""
    await _give_up(client)
    host, port = await transfer.listen(engine)
    await _both(
        client.join_group(group_name(engine, port), host, port, 1 + num_ranks, transfer.backend, timeout_s),
        transfer.join(engine, 1 + num_ranks, timeout_s * PATIENCE),
        on_failure=lambda: _give_up(client),
    )


async def _both(
    on_engine: Coroutine[Any, Any, None],
    on_trainer: Coroutine[Any, Any, None],
    on_failure: Callable[[], Awaitable[None]],
) -> None:
    """Run both sides at once. The first error is the one that counts; it ends the other side too."""
    sides = [asyncio.create_task(on_engine), asyncio.create_task(on_trainer)]
    try:
        await asyncio.wait(sides, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        failed = [side for side in sides if side.done() and side.exception() is not None]
        if failed or not all(side.done() for side in sides):
            sides[0].cancel()
            await on_failure()
            await asyncio.gather(*sides, return_exceptions=True)
    for side in failed:
        side.result()


async def _give_up(client: EngineClient) -> None:
    """End what an engine may still wait for, as far as it answers. With that the trainer's side fails too."""
    if client.group is None:
        return
    with contextlib.suppress(ReefError):
        await client.leave_group(GIVE_UP_TIMEOUT_S)
    with contextlib.suppress(ReefError):
        await client.end_update(GIVE_UP_TIMEOUT_S)
