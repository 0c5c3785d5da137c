"""Bringing the policy's tensors to rank 0 under their Hugging Face names, some at a time."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from reef.training import convert, device
from reef.training.megatron import Network


def gather(policy: Network, names: Iterable[str]) -> dict[str, torch.Tensor] | None:
    """Whole tensors by their Hugging Face names, on rank 0; None elsewhere. Every rank must call with the same names.

    The tensors are on the policy's device, in its dtype and in the order of `names`; a parameter that one rank has
    whole shares the policy's memory. A rank sends only what it holds, its own layers and experts.

    Raises:
        KeyError: no rank holds a tensor of this name.
    """
    wanted = list(names)
    answers_for = _is_first()
    parameters = dict(policy.module.named_parameters())
    mine: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(_stored(policy, name) for name in wanted):
        place = policy.places.get(name)
        if place is None or not answers_for[place.entry.spread]:
            continue
        whole = _join_tensor_ranks(convert.part(place, parameters[place.parameter], policy.architecture), place.entry)
        if whole is not None:
            mine[name] = whole
    found = _to_rank_0(mine)
    if found is None:
        return None
    return {name: found[_stored(policy, name)] for name in wanted}


def _stored(policy: Network, name: str) -> str:
    """A tied base may still hold its output layer."""
    return convert.EMBEDDING if policy.architecture.tied and name == convert.OUTPUT else name


def _is_first() -> dict[bool, bool]:
    """Whether this rank is the first of those that hold the same, for tensors that are spread and for all others."""
    return {
        True: parallel_state.get_expert_data_parallel_rank() == 0,
        False: parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0,
    }


def _join_tensor_ranks(tensor: torch.Tensor, entry: convert.Entry) -> torch.Tensor | None:
    """The whole tensor on the first tensor rank, None on the others."""
    if entry.spread:
        return tensor
    group = parallel_state.get_tensor_model_parallel_group()
    first = group.rank() == 0
    if entry.split is None or group.size() == 1:
        return tensor if first else None
    parts = [torch.empty_like(tensor) for _ in range(group.size())] if first else None
    dist.gather(tensor, parts, group=group, group_dst=0)
    return None if parts is None else torch.cat(parts, entry.split)


def _to_rank_0(mine: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
    """What all ranks bring, on rank 0; None elsewhere. Each tensor travels by itself, from whom holds it."""
    if dist.get_world_size() == 1:
        return mine
    rank = dist.get_rank()
    kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in mine.items()} if rank else {}
    announced: list[dict[str, tuple[torch.Size, torch.dtype]]] | None = (
        [{} for _ in range(dist.get_world_size())] if rank == 0 else None
    )
    dist.gather_object(kinds, announced, dst=0)
    if announced is None:
        for tensor in mine.values():
            dist.send(tensor, dst=0)
        return None
    for sender, kinds in enumerate(announced):
        for name, (shape, dtype) in kinds.items():
            mine[name] = torch.empty(shape, dtype=dtype, device=device.current())
            dist.recv(mine[name], src=sender)
    return mine
