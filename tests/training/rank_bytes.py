"""`python -m tests.training.rank_bytes RANK SPECS`: what one of several ranks holds, under one layout after another.

SPECS is a JSON list of {model_path, rendezvous, settings}; the answer, on standard output, a JSON list of
{weights, gradients, optimizer}, in bytes.
"""

import json
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

with warnings.catch_warnings():  # Megatron says at import that it has no Transformer Engine and no Apex
    warnings.simplefilter("ignore")
    from reef.training.megatron import Network
    from reef.training.worker import MegatronWorker

from reef.config import Layout
from reef.training.actor import WorkerSpec


def measure(worker: MegatronWorker) -> dict[str, int]:
    """Bytes of a worker's parameters, of its gradient buffers, and of what the optimizer holds beside them."""
    return measure_network(worker._policy)


def measure_network(policy: Network) -> dict[str, int]:
    """The same of one model that learns."""
    parameters = list(policy.module.parameters())
    theirs = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    states: list[torch.Tensor] = []
    for part in policy.optimizer.chained_optimizers:
        stepped = [tensor for group in part.optimizer.param_groups for tensor in group["params"]]
        moments = [part.optimizer.state[tensor][name] for tensor in stepped for name in ("exp_avg", "exp_avg_sq")]
        states += moments + [tensor for tensor in stepped if tensor.untyped_storage().data_ptr() not in theirs]
    buffers = policy.model.buffers + policy.model.expert_parallel_buffers
    return {
        "weights": _size(parameters),
        "gradients": _size(buffer.grad_data for buffer in buffers),
        "optimizer": _size(states),
    }


def _size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main(rank: int, specs: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Build one worker after another, as the other ranks do meanwhile."""
    found = []
    for spec in specs:
        world_size = Layout.model_validate(spec["settings"]["layout"]).world_size
        paths = {"model_path": Path(spec["model_path"]), "rendezvous": Path(spec["rendezvous"])}
        worker = MegatronWorker(WorkerSpec(rank, world_size, **paths, settings=spec["settings"], micro_batch_tokens=64))
        found.append(measure(worker))
        worker.close()
    return found


if __name__ == "__main__":
    answer = main(int(sys.argv[1]), json.loads(sys.argv[2]))
    sys.stdout.write(f"\n{json.dumps(answer)}\n")
