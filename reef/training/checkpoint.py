"""Checkpoints of the trainer: weights, moments, step count and random state, by Megatron's `dist_checkpointing`.

A checkpoint is written beside its place and renamed; the file COMPLETE comes last. One without it is not a checkpoint.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from reef.errors import LoadFailedError
from reef.training import device, durable
from reef.training.manifest import COMPLETE
from reef.training.megatron import Policy, set_optimizer_steps


class _InProcess(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's format, written by torch's own writer in this process.

    Megatron's writer starts a manager and forks a writer for each save: seconds, where a small model needs
    milliseconds, and a fork of a process that holds threads.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        save_state_dict(
            mcore_to_pyt_state_dict(by_key, False),
            storage_writer=FileSystemWriter(checkpoint_dir, thread_count=1, sync_files=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def is_complete(directory: Path) -> bool:
    """True where a save came to its end."""
    return (directory / COMPLETE).is_file()


def save(directory: Path, policy: Policy, steps_done: int) -> None:
    """Write a checkpoint. Every rank must call; all see it complete afterwards (on a shared file system)."""
    partial = directory.with_name(f".{directory.name}.partial")
    if dist.get_rank() == 0:
        durable.begin(directory)
    dist.barrier()
    with device.megatron_calls():
        state = _state(policy, loading=False)
        state["steps_done"] = steps_done
        dist_checkpointing.save(state, str(partial), sharded_strategy=_InProcess())
    dist.barrier()
    if dist.get_rank() == 0:
        for path in partial.iterdir():
            durable.sync(path)
        durable.finish(partial, directory)
        durable.write(directory / COMPLETE, json.dumps({"steps_done": steps_done}).encode())
        durable.sync(directory)
    dist.barrier()


def restore(directory: Path, policy: Policy) -> int:
    """Put weights, moments and random state back; return the steps done. Every rank must call.

    Raises:
        LoadFailedError: there is no complete checkpoint.
    """
    if not is_complete(directory):
        raise LoadFailedError(f"{directory} is not a complete checkpoint: it has no {COMPLETE}")
    with device.megatron_calls():
        state = dist_checkpointing.load(_state(policy, loading=True), str(directory))
        steps_done = int(state["steps_done"])
        # Megatron leaves out the count of steps while it is 0, and torch's optimizer insists on one.
        inner = state["optimizer"].get("optimizer", state["optimizer"])  # bfloat16 keeps its main weights beside it
        inner["state"]["common_step"] = torch.tensor(float(steps_done))
        policy.module.load_state_dict(state["model"])
        policy.optimizer.load_state_dict(state["optimizer"])
    set_optimizer_steps(policy.optimizer, steps_done)
    set_rng_state(state["rng"])
    return steps_done


def _state(policy: Policy, *, loading: bool) -> dict[str, Any]:
    model = policy.module.sharded_state_dict()
    return {
        "model": model,
        "optimizer": policy.optimizer.sharded_state_dict(model, is_loading=loading),
        "rng": _sharded_rng(),
    }


def _sharded_rng() -> ShardedObject:
    """This rank's random state: one per pipeline stage and tensor rank, data ranks hold replicas."""
    return ShardedObject(
        "rng",
        rng_state(),
        (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
        ),
        (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()),
        replica_id=parallel_state.get_data_parallel_rank(),
    )


def rng_state() -> dict[str, Any]:
    """The random numbers of this rank: torch's own and those Megatron tracks for its parallel regions."""
    return {"torch": torch.get_rng_state(), "tracked": get_cuda_rng_tracker().get_states()}


def set_rng_state(state: dict[str, Any]) -> None:
    """Undo what was drawn since `rng_state`."""
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tracked"])
