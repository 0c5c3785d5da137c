"""Rank 0's groups with engines: one for each, so that one that fails takes no other along.

Nobody is waited for longer than the time given to `join`: a peer that is gone is an EngineError here, and the trainer
goes on.
"""

from collections.abc import Mapping

import torch
from torch._C._distributed_c10d import TCPStore

from reef.engines.group import Group, open_store
from reef.errors import EngineError
from reef.training import device
from reef.types import Bucket

STORE_TIMEOUT_S = 60  # of the store's own calls, which answer at once


class Sender:
    """Groups by the name of their engine."""

    def __init__(self) -> None:
        self._stores: dict[str, TCPStore] = {}
        self._groups: dict[str, Group] = {}

    def listen(self, engine: str, host: str) -> tuple[str, int]:
        """Open the store of a new group, in the place of an older one; its host and port.

        Raises:
            EngineError: `host` is no address of this machine.
        """
        self.leave(engine)
        store = self._stores[engine] = open_store(host, STORE_TIMEOUT_S)
        return host, store.port

    def join(self, engine: str, group: str, world_size: int, timeout_s: float) -> None:
        """Join as rank 0; returns once all ranks have.

        Args:
            group: the name under which the engine's ranks join.
            timeout_s: for this, and for each bucket that is sent.

        Raises:
            EngineError: nobody listens for this engine, or not every rank came in time.
        """
        if engine not in self._stores:
            raise EngineError(f"the trainer does not listen for {engine}: begin a new group")
        try:
            self._groups[engine] = Group(self._stores[engine], group, 0, world_size, device.backend(), timeout_s)
        except EngineError:
            self.leave(engine)
            raise

    def send(self, engine: str, bucket: Bucket, tensors: Mapping[str, torch.Tensor]) -> None:
        """Broadcast a bucket's tensors, in its order and dtypes.

        Raises:
            EngineError: there is no group with this engine, or it failed and is no more.
        """
        if engine not in self._groups:
            raise EngineError(f"the trainer has no group with {engine}: begin a new one")
        parts = [
            tensors[name].to(device=device.current(), dtype=getattr(torch, dtype)).contiguous()
            for name, dtype in zip(bucket.names, bucket.dtypes, strict=True)
        ]
        try:
            self._groups[engine].broadcast(parts)
        except EngineError:
            self.leave(engine)
            raise

    def leave(self, engine: str) -> None:
        """End the group with this engine, if there is one, and stop listening for it."""
        group = self._groups.pop(engine, None)
        if group is not None:
            group.close()
        self._stores.pop(engine, None)

    def close(self) -> None:
        """End all groups."""
        for engine in list(self._stores):
            self.leave(engine)
