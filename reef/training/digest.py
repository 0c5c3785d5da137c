"""A name for all that decides the next step: equal exactly where two trainers' states are bit-equal.

Counted are weights, the optimizer's parameters (float32 copies for bfloat16) and moments, the count of steps and the
random state, on every rank. The schedule is a function of the count and of a batch's own settings, so it adds nothing.
"""

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from reef.training import checkpoint
from reef.training.megatron import Policy


def digest(policy: Policy, steps_done: int) -> str:
    """The sha256 (hex) over the state of all ranks in their order. Every rank must call, and has the same answer."""
    mine = hashlib.sha256(f"steps {steps_done}".encode())
    for name, weight in policy.module.named_parameters():
        _add(mine, name, weight)
    for part in policy.optimizer.chained_optimizers:
        for parameter in (p for group in part.optimizer.param_groups for p in group["params"]):
            _add(mine, "main", parameter)
            for name, value in sorted(part.optimizer.state[parameter].items()):
                _add(mine, name, value)
    random = checkpoint.rng_state()
    for name, value in [("torch", random["torch"]), *sorted(random["tracked"].items())]:
        _add(mine, name, value)
    ranks = [""] * dist.get_world_size()
    dist.all_gather_object(ranks, mine.hexdigest())
    return hashlib.sha256("\n".join(ranks).encode()).hexdigest()


def _add(found: Any, name: str, tensor: torch.Tensor) -> None:
    found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
    found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
