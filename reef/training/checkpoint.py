"""Checkpoints of the trainer: weights, moments, step count and random state, by Megatron's `dist_checkpointing`.

A checkpoint is written beside its place and renamed; the file COMPLETE comes last and vouches for every byte of the
others. One without it is not a checkpoint.
"""

from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from reef.errors import LoadFailedError
from reef.faults import reach
from reef.training import device, durable
from reef.training.manifest import COMPLETE, check_checkpoint, dump_complete
from reef.training.megatron import Policy, set_optimizer_steps
from reef.training.ranks import from_rank_0

ROOM_BYTES = 2**20  # more than common.pt takes


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


def save(directory: Path, policy: Policy, steps_done: int) -> None:
    """Write a checkpoint. Every rank must call; all see it complete afterwards (on a shared file system)."""
    partial = from_rank_0(lambda: _begin(directory))
    with device.megatron_calls():
        state = _state(policy, loading=False)
        state["steps_done"] = steps_done
        state["trains"] = _trains(policy)
        dist_checkpointing.save(state, str(partial), sharded_strategy=_InProcess())
    dist.barrier()
    from_rank_0(lambda: _finish(partial, directory, steps_done))


def _begin(directory: Path) -> Path:
    """On a full disk fail here, where all ranks learn of it: Megatron's first file is rank 0's alone."""
    partial = durable.begin(directory)
    room = partial / "room"
    durable.write(room, bytes(ROOM_BYTES))
    room.unlink()
    return partial


def _finish(partial: Path, directory: Path, steps_done: int) -> None:
    for path in partial.iterdir():
        durable.sync(path)
    vouched = dump_complete(partial, steps_done)
    durable.finish(partial, directory)
    reach("checkpoint.writing")
    durable.write(directory / COMPLETE, vouched)
    durable.sync(directory)
    reach("checkpoint.complete")


def restore(directory: Path, policy: Policy) -> int:
    """Put weights, moments and random state back; return the steps done. Every rank must call.

    Raises:
        LoadFailedError: the checkpoint is not complete, damaged, or of another model, dtype or layout: nothing has
            moved. Or it is as it was written and Megatron, having begun to load, cannot read it (another version wrote
            it): then the policy is undefined until another `restore` or a `MegatronWorker.reset`.
    """
    from_rank_0(lambda: _check(directory, policy))
    with device.megatron_calls():
        try:
            state = dist_checkpointing.load(_state(policy, loading=True), str(directory))
        except (CheckpointingException, CheckpointException) as error:
            raise _unreadable(directory, error) from None
        steps_done = int(state["steps_done"])
        # Megatron leaves out the count of steps while it is 0, and torch's optimizer insists on one.
        inner = state["optimizer"].get("optimizer", state["optimizer"])  # bfloat16 keeps its main weights beside it
        inner["state"]["common_step"] = torch.tensor(float(steps_done))
        policy.module.load_state_dict(state["model"])
        policy.optimizer.load_state_dict(state["optimizer"])
    set_optimizer_steps(policy.optimizer, steps_done)
    set_rng_state(state["rng"])
    return steps_done


def _check(directory: Path, policy: Policy) -> None:
    check_checkpoint(directory)
    try:
        dist_checkpointing.load_tensors_metadata(str(directory))
        found = dist_checkpointing.load_common_state_dict(str(directory)).get("trains", {})
    except (CheckpointingException, UnpicklingError) as error:
        raise _unreadable(directory, error) from None
    expected = _trains(policy)
    differ = [
        f"{key} is {found.get(key)}, expected {expected[key]}" for key in expected if found.get(key) != expected[key]
    ]
    if differ:
        raise LoadFailedError(f"checkpoint {directory} is of another trainer: {'; '.join(differ)}")


def _unreadable(directory: Path, error: BaseException) -> LoadFailedError:
    return LoadFailedError(f"checkpoint {directory}: Megatron cannot read it: {str(error).splitlines()[-1]}")


def _trains(policy: Policy) -> dict[str, Any]:
    """What a checkpoint must have been taken of to fit. Data ranks hold replicas, so that their number may change."""
    return {
        **asdict(policy.architecture),
        "dtype": str(policy.module.config.params_dtype),
        "tensor ranks": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline stages": parallel_state.get_pipeline_model_parallel_world_size(),
    }


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
    """Undo what was drawn since `rng_state`. The same state may be set again: Megatron gets a copy to go on with."""
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(dict(state["tracked"]))
