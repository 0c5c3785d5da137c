"""What a checkpoint of the trainer holds, by Megatron's `dist_checkpointing`: weights, moments, counts, random state.

Of a critic too, where there is one, under names that begin with `critic.`.

    copy      every rank copies its share to the CPU, and all agree on who writes what -> `reef.training.saving`
    restore   under the layout that wrote it, bit for bit; or under another one: the same weights and moments

The learning-rate schedule is a function of the step count and of a batch's own settings, so nothing is kept of it.
"""

import io
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from reef.errors import LoadFailedError
from reef.training import device, optimizer_state
from reef.training.counts import Counts
from reef.training.manifest import check_checkpoint
from reef.training.megatron import Network
from reef.training.random_state import rng_state, set_rng_state
from reef.training.ranks import from_rank_0

RNG = "rng"
CRITIC = "critic."


class CopyPlanner(MCoreSavePlanner):  # type: ignore[misc]
    """Megatron's planner, which then answers from copies: what it hands out to be written, no step moves."""

    def __init__(self) -> None:
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._copies: dict[MetadataIndex, Any] = {}

    def copy(self, plan: SavePlan) -> None:
        """Copy what `plan` writes, and let go of the state itself."""
        self.finish_plan(plan)
        for item in plan.items:
            data = self.resolve_data(item)
            self._copies[item.index] = data if isinstance(data, io.BytesIO) else data.to("cpu", copy=True)
        self.state_dict: dict[str, Any] = {}

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The copy, once there is one."""
        return self._copies[index] if index in self._copies else super().lookup_object(index)


@dataclass(frozen=True, slots=True)
class Copy:
    """One rank's share of a checkpoint, in memory of its own, and what this rank is to write of it."""

    steps_done: int
    plan: SavePlan
    planner: CopyPlanner
    metadata: Metadata | None  # of all ranks' tensors; rank 0's
    common: bytes  # what is no tensor, as common.pt holds it; rank 0 writes it


def copy(policy: Network, critic: Network | None, counts: Counts) -> Copy:
    """Copy this rank's share of the state. Every rank must call; nothing touches the disk."""
    with device.megatron_calls():
        state = {
            **_state(policy, critic, loading=False),
            "steps_done": counts.steps,
            "counts": asdict(counts),
            "trains": _trains(policy),
            "critic_learns": None if critic is None else _learns(critic),
        }
        sharded, common = save_preprocess(state)
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)  # of replicas, the first alone
        planner = CopyPlanner()
        planner.set_up_planner(mcore_to_pyt_state_dict(by_key), is_coordinator=dist.get_rank() == 0)
        plan = planner.create_local_plan()
        metadata = _gather_metadata(planner, plan)
        plan = FileSystemWriter("").prepare_global_plan([plan] * dist.get_world_size())[dist.get_rank()]  # file names
        planner.copy(plan)
        common_pt = io.BytesIO()
        torch.save(common, common_pt)
    return Copy(counts.steps, plan, planner, metadata, common_pt.getvalue())


def _gather_metadata(planner: CopyPlanner, plan: SavePlan) -> Metadata | None:
    """What the ranks together write; rank 0's answer, others have None."""
    plans = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(plan, plans, dst=0)
    if plans is None:
        return None
    metadata: Metadata = planner.create_global_plan(plans)[1]
    return metadata


def restore(
    directory: Path, policy: Network, critic: Network | None, seeded_rng: dict[str, Any]
) -> tuple[Counts, bool]:
    """Put weights, moments and random state back. Every rank must call.

    The layout may be another than the one that wrote it. Then random numbers begin again at the seed: there is one
    state for each pipeline stage and tensor rank, and these are others.

    Args:
        critic: where there is one. It stays as it is if the checkpoint has none.
        seeded_rng: this rank's random state when it was made.

    Returns:
        How far training was, and whether the checkpoint has a critic.

    Raises:
        LoadFailedError: the checkpoint is not complete, damaged, or of another model or dtype: nothing has moved. Or
            it is as it was written and Megatron, having begun to load, cannot read it (another version wrote it): then
            the trainer is undefined until another `restore` or a `MegatronWorker.reset`.
    """
    same_ranks, has_critic = from_rank_0(lambda: _check(directory, policy, critic))
    found = critic if has_critic else None
    with device.megatron_calls():
        wanted = _state(policy, found, loading=True)
        if not same_ranks:
            del wanted[RNG]
        try:
            state = dist_checkpointing.load(wanted, str(directory))
        except (CheckpointingException, CheckpointException) as error:
            raise _unreadable(directory, error) from None
        steps = int(state["steps_done"])
        counts = Counts(**state.get("counts", {"steps": steps, "policy_updates": steps}))
        _load(policy, state, "", counts.policy_updates)
        if found is not None:
            _load(found, state["critic"], CRITIC, counts.critic_updates)
        else:
            counts.critic_steps = counts.critic_updates = 0
    set_rng_state(state[RNG] if same_ranks else seeded_rng)
    return counts, has_critic


def _load(network: Network, state: dict[str, Any], prefix: str, updates: int) -> None:
    network.module.load_state_dict({name.removeprefix(prefix): value for name, value in state["model"].items()})
    optimizer_state.load(network.optimizer, state["optimizer"], updates)


def _check(directory: Path, policy: Network, critic: Network | None) -> tuple[bool, bool]:
    """Refuse a checkpoint that does not fit; whether it has the random state of as many ranks, and our critic."""
    check_checkpoint(directory)
    try:
        common = dist_checkpointing.load_common_state_dict(str(directory))
        held = load_sharded_metadata(str(directory))
    except (CheckpointingException, UnpicklingError) as error:
        raise _unreadable(directory, error) from None
    expected, found = _trains(policy), common.get("trains", {})
    learns = common.get("critic_learns")
    if critic is not None and learns is not None:
        expected, found = {**expected, "critic": _learns(critic)}, {**found, "critic": learns}
    differ = [
        f"{key} is {found.get(key)}, expected {expected[key]}" for key in expected if found.get(key) != expected[key]
    ]
    if differ:
        raise LoadFailedError(f"checkpoint {directory} is of another trainer: {'; '.join(differ)}")
    return _sharded_rng().unique_key in held, critic is not None and learns is not None


def _unreadable(directory: Path, error: BaseException) -> LoadFailedError:
    return LoadFailedError(f"checkpoint {directory}: Megatron cannot read it: {str(error).splitlines()[-1]}")


def _trains(policy: Network) -> dict[str, Any]:
    """What a checkpoint must have been taken of to fit. How it was spread over ranks does not matter."""
    return {**asdict(policy.architecture), "dtype": str(policy.module.config.params_dtype)}


def _learns(critic: Network) -> str:
    """What of a critic has moments, in words."""
    frozen = any(not parameter.requires_grad for parameter in critic.module.parameters())
    return "all but attention" if frozen else "all of it"


def _state(policy: Network, critic: Network | None, *, loading: bool) -> dict[str, Any]:
    found = {**_share(policy, "", loading), RNG: _sharded_rng()}
    return found if critic is None else {**found, "critic": _share(critic, CRITIC, loading)}


def _share(network: Network, prefix: str, loading: bool) -> dict[str, Any]:
    model = network.module.sharded_state_dict(prefix=prefix)
    return {"model": model, "optimizer": optimizer_state.sharded(network.optimizer, model, loading=loading)}


def _sharded_rng() -> ShardedObject:
    """This rank's random state: one per pipeline stage and tensor rank, data ranks hold replicas."""
    return ShardedObject(
        RNG,
        rng_state(),
        (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
        ),
        (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
