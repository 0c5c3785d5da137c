"""A name for all that decides the next step: equal exactly where two trainers' states are bit-equal.

Counted are weights, the optimizer's parameters (float32 copies for bfloat16) and moments, those of a critic too, the
counts of steps and the random state, on every rank. The schedule is a function of the counts and of a batch's own
settings, so it adds nothing.
"""

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from reef.training.counts import Counts
from reef.training.megatron import Network
from reef.training.random_state import rng_state


def digest(policy: Network, critic: Network | None, counts: Counts) -> str:
    """The sha256 (hex) over the state of all ranks in their order. Every rank must call, and has the same answer."""
    mine = hashlib.sha256(str(counts).encode())
    for network in (policy, critic):
        if network is not None:
            _add_network(mine, network)
    random = rng_state()
    for name, value in [("torch", random["torch"]), *sorted(random["tracked"].items())]:
        _add(mine, name, value)
    ranks = [""] * dist.get_world_size()
    dist.all_gather_object(ranks, mine.hexdigest())
    return hashlib.sha256("\n".join(ranks).encode()).hexdigest()


def _add_network(found: Any, network: Network) -> None:
    for name, weight in network.module.named_parameters():
        _add(found, name, weight)
    for part in network.optimizer.chained_optimizers:
        for parameter in (p for group in part.optimizer.param_groups for p in group["params"]):
            _add(found, "main", parameter)
            for name, value in sorted(part.optimizer.state[parameter].items()):
                _add(found, name, value)


def _add(found: Any, name: str, tensor: torch.Tensor) -> None:
    found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
    found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
