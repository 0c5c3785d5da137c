"""Weights that come over a process group: who sends, and what has come so far.

    join -> begin -> receive, receive, … -> take -> leave

Methods block, and run one at a time. As in SGLang (0.5.23) tensors come between `begin` and `take`; unlike there none
of them is in use before all are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reef.engines.embedded.architecture import Architecture
from reef.engines.embedded.errors import ModelError
from reef.engines.embedded.weights import Received, Tensors, Weights, build_weights, expected_shapes
from reef.engines.group import Group, find_store
from reef.errors import EngineError

BACKEND = "gloo"
RECEIVE_TIMEOUT_S = 300.0
"""For one bucket. A sender that is gone is seen at once."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SOURCE = "the weights received"


class Receiver:
    """The groups of one engine, and its session of receiving."""

    def __init__(self, arch: Architecture, dtype: torch.dtype) -> None:
        """`arch` and `dtype` are the served model's."""
        self._arch = arch
        self._dtype = dtype
        self._shapes = expected_shapes(arch)
        if arch.tied:
            self._shapes["lm_head.weight"] = self._shapes["model.embed_tokens.weight"]
        self._groups: dict[str, Group] = {}
        self._received: Tensors | None = None
        """None: no session is open."""

    def join(self, name: str, host: str, port: int, rank: int, world_size: int, backend: str) -> None:
        """Joins a group whose rank 0 keeps the store at this address.

        Raises:
            ModelError: there is such a group already, the backend is not gloo, or not every rank came in time.
        """
        if backend != BACKEND:
            raise ModelError(f"backend is {backend!r}; this engine runs on a CPU and speaks {BACKEND!r}")
        if name in self._groups:
            raise ModelError(f"there is a group {name!r} already")
        try:
            store = find_store(host, port, RECEIVE_TIMEOUT_S)
            self._groups[name] = Group(store, name, rank, world_size, backend, RECEIVE_TIMEOUT_S)
        except EngineError as error:
            raise ModelError(error.message) from None

    def leave(self, name: str) -> None:
        """Ends a group. Raises ModelError where there is none of this name."""
        if name not in self._groups:
            raise ModelError(f"there is no group {name!r}")
        self._groups.pop(name).close()

    def begin(self) -> None:
        """Opens a session. Raises ModelError where one is open."""
        if self._received is not None:
            raise ModelError("a weight-update session is already open; call end_weight_update first")
        self._received = {}

    def receive(self, group: str, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Receives tensors in this order and keeps them.

        Raises:
            ModelError: no session is open, there is no such group, a tensor is not one of this model's, or rank 0 is
                gone. The group has ended: its ranks no longer agree about what comes next.
        """
        if self._received is None:
            raise ModelError("no weight-update session is open; call begin_weight_update first")
        if group not in self._groups:
            raise ModelError(f"there is no group {group!r}; call init_weights_update_group first")
        try:
            self._refuse_strange(names, dtypes, shapes)
            tensors = [torch.empty(shape, dtype=DTYPES[d]) for shape, d in zip(shapes, dtypes, strict=True)]
            self._groups[group].broadcast(tensors)
        except (ModelError, EngineError) as error:
            self.leave(group)
            raise ModelError(str(error)) from None
        self._received |= zip(names, tensors, strict=True)

    def take(self) -> Weights | None:
        """Closes the session: the weights, checked and fused; None where no tensor came.

        Raises:
            ModelError: no session is open, or what came is not the whole model.
        """
        if self._received is None:
            raise ModelError("no weight-update session is open; call begin_weight_update first")
        received, self._received = self._received, None
        return build_weights(Received(SOURCE, received), self._arch, self._dtype) if received else None

    def _refuse_strange(self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> None:
        """Before any memory is taken for it."""
        assert self._received is not None
        if not len(names) == len(dtypes) == len(shapes) == len(set(names)):
            raise ModelError(
                f"expected as many dtypes and shapes as names, which differ: got {len(dtypes)}, {len(shapes)} and "
                f"{len(names)} ({len(set(names))} different)"
            )
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            if name not in self._shapes or name in self._received:
                raise ModelError(f"{SOURCE}: {name} came twice, or is not a tensor of this model")
            if tuple(shape) != self._shapes[name]:
                raise ModelError(f"{SOURCE}: {name} has shape {tuple(shape)}, expected {self._shapes[name]}")
            if dtype not in DTYPES:
                raise ModelError(f"{SOURCE}: {name} is {dtype}, expected one of {', '.join(DTYPES)}")
