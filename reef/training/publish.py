"""Writing a release: the policy's weights as a Hugging Face model directory, under the base's file names and dtypes."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save

from reef.faults import reach
from reef.training import convert, durable, manifest
from reef.training.megatron import Policy
from reef.training.weights import WeightFiles
from reef.types import Probe, Published


def gather(policy: Policy) -> dict[str, torch.Tensor] | None:
    """The whole policy under Hugging Face names, on rank 0; None elsewhere. Every rank must call."""
    mine = convert.export(
        policy.module, policy.architecture, policy.first_layer, parallel_state.get_tensor_model_parallel_group()
    )
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if stages == 1:
        return mine if dist.get_rank() == 0 else None
    # Only the group of stages that rank 0 belongs to speaks: the others hold the same weights.
    group = parallel_state.get_pipeline_model_parallel_group()
    ranks = dist.get_process_group_ranks(group)
    if 0 not in ranks:
        return None
    gathered: list[dict[str, torch.Tensor]] | None = [{} for _ in ranks] if dist.get_rank() == 0 else None
    dist.gather_object(mine, gathered, dst=0, group=group)
    if gathered is None:
        return None
    return {name: tensor for stage in gathered for name, tensor in stage.items()}


def publish(
    tensors: Mapping[str, torch.Tensor], base: WeightFiles, probe: Probe, release_id: str, directory: Path
) -> Published:
    """Write `directory`/`release_id` beside its place, wait for the disk, and rename it into place.

    Args:
        tensors: the whole policy under Hugging Face names.
        base: the model that training began with; its other files (config, tokenizer) are copied.
        directory: where releases live.
    """
    target = directory / release_id
    partial = durable.begin(target)
    files: dict[str, tuple[str, int]] = {}

    def write(name: str, data: bytes) -> None:
        durable.write(partial / name, data)
        reach("publish.writing")
        files[name] = (hashlib.sha256(data).hexdigest(), len(data))

    for name in sorted(base.metadata):
        members = [tensor for tensor, file in base.files.items() if file == name]
        content = {member: _tensor(tensors, member, base.dtypes[member]) for member in members}
        write(name, save(content, base.metadata[name]))
    for path in sorted(base.directory.iterdir()):
        if _belongs_to_model(path) and path.name not in files:
            write(path.name, path.read_bytes())

    published = Published(
        release_id=release_id,
        path=str(target),
        content_id=manifest.content_id({name: sha for name, (sha, _) in files.items()}),
        size_bytes=sum(size for _, size in files.values()),
        probe=probe,
    )
    durable.write(partial / manifest.MANIFEST, manifest.dump_manifest(published, files))
    durable.finish(partial, target)
    reach("publish.renamed")
    return published


def _tensor(tensors: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype) -> torch.Tensor:
    if name == convert.OUTPUT and name not in tensors:  # a tied base may still hold its output layer
        return _tensor(tensors, convert.EMBEDDING, dtype).clone()
    return tensors[name].to(device="cpu", dtype=dtype).contiguous()


def _belongs_to_model(path: Path) -> bool:
    """Config, tokenizer, templates and the weights' index; not weights, notes or manifests."""
    return (
        path.is_file()
        and not path.name.startswith(".")
        and path.name != manifest.MANIFEST
        and path.suffix in (".json", ".jinja", ".txt", ".model")
    )
