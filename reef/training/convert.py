"""Hugging Face <-> Megatron: which tensors make up each parameter of a rank's GPTModel (local layer spec).

Every Hugging Face tensor is cut along one dimension over tensor ranks (or not at all), and a Megatron parameter joins
the parts of one rank: `qkv` interleaves query, key and value rows by key-value group, `glu` stacks gate and up
projection. So a rank reads only its slices, and export is the same table read backwards.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from reef.errors import ConfigError
from reef.training.architecture import Architecture

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"

Reader = Callable[[str, int | None, int, int], torch.Tensor]  # (name, split, rank, size), see WeightFiles.read


@dataclass(frozen=True, slots=True)
class Entry:
    """One Megatron parameter: Hugging Face names, how they join, and the dimension cut over tensor ranks."""

    names: tuple[str, ...]
    split: int | None = None
    join: Literal["one", "qkv", "glu"] = "one"


def entries(architecture: Architecture, parameters: Iterable[str], first_layer: int) -> dict[str, Entry]:
    """The entry of each parameter of one pipeline stage.

    Args:
        parameters: the names in this rank's GPTModel.
        first_layer: number of the stage's first layer in the whole model, from 0.
    """
    table = _table(architecture, first_layer)
    return {name: table[name] for name in parameters}


def check_names(architecture: Architecture, found: Iterable[str]) -> None:
    """Refuse a model directory that lacks a tensor of this architecture, or holds one that would be lost.

    Raises:
        ConfigError: names the first tensors that are missing or unknown.
    """
    table = _table(architecture, 0)
    if not architecture.qkv_bias:
        table = {name: entry for name, entry in table.items() if not name.endswith(".bias")}
    if not architecture.qk_norm:
        table = {
            name: entry for name, entry in table.items() if "q_layernorm" not in name and "k_layernorm" not in name
        }
    expected = {name for entry in table.values() for name in entry.names}
    missing = sorted(expected - set(found))
    unknown = sorted(set(found) - expected - {OUTPUT})  # a tied model may hold its output layer or not
    if missing or unknown:
        what, names = ("lacks", missing) if missing else ("holds tensors that Reef does not train:", unknown)
        raise ConfigError(
            f"the {architecture.model_type} model {what} {', '.join(names[:3])}", param="inference.model-path"
        )


def _table(architecture: Architecture, first_layer: int) -> dict[str, Entry]:
    """Entries of every parameter that a stage beginning at `first_layer` may have."""
    table = {
        "embedding.word_embeddings.weight": Entry((EMBEDDING,), 0),
        "decoder.final_layernorm.weight": Entry(("model.norm.weight",)),
        # With tied weights only a last stage apart from the first has this parameter: its copy of the embedding.
        "output_layer.weight": Entry((EMBEDDING if architecture.tied else OUTPUT,), 0),
    }
    for local in range(architecture.num_layers - first_layer):
        table |= _layer(f"decoder.layers.{local}.", f"model.layers.{first_layer + local}.")
    return table


def _layer(ours: str, theirs: str) -> dict[str, Entry]:
    attention, mlp = theirs + "self_attn.", theirs + "mlp."
    return {
        ours + "input_layernorm.weight": Entry((theirs + "input_layernorm.weight",)),
        ours + "pre_mlp_layernorm.weight": Entry((theirs + "post_attention_layernorm.weight",)),
        ours + "self_attention.linear_qkv.weight": Entry(tuple(f"{attention}{x}_proj.weight" for x in "qkv"), 0, "qkv"),
        ours + "self_attention.linear_qkv.bias": Entry(tuple(f"{attention}{x}_proj.bias" for x in "qkv"), 0, "qkv"),
        ours + "self_attention.q_layernorm.weight": Entry((attention + "q_norm.weight",)),
        ours + "self_attention.k_layernorm.weight": Entry((attention + "k_norm.weight",)),
        ours + "self_attention.linear_proj.weight": Entry((attention + "o_proj.weight",), 1),
        ours + "mlp.linear_fc1.weight": Entry((mlp + "gate_proj.weight", mlp + "up_proj.weight"), 0, "glu"),
        ours + "mlp.linear_fc2.weight": Entry((mlp + "down_proj.weight",), 1),
    }


@torch.no_grad()
def load(
    module: torch.nn.Module, architecture: Architecture, first_layer: int, read: Reader, rank: int, size: int
) -> None:
    """Fill a rank's GPTModel with its part of the weights.

    Args:
        rank, size: this rank among the tensor ranks.

    Raises:
        ConfigError: a tensor has another shape than the config says.
    """
    parameters = dict(module.named_parameters())
    for name, entry in entries(architecture, parameters, first_layer).items():
        parts = [read(part, entry.split, rank, size) for part in entry.names]
        try:
            parameters[name].copy_(_join(entry, parts, architecture))
        except RuntimeError as error:
            shapes = ", ".join(f"{n} {list(p.shape)}" for n, p in zip(entry.names, parts, strict=True))
            raise ConfigError(f"{shapes} do not fit config.json ({error})", param="inference.model-path") from None


@torch.no_grad()
def export(
    module: torch.nn.Module, architecture: Architecture, first_layer: int, tensor_group: dist.ProcessGroup
) -> dict[str, torch.Tensor]:
    """This stage's weights under Hugging Face names, whole: gathered over the tensor ranks (all must call)."""
    size = tensor_group.size()
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    exported: dict[str, torch.Tensor] = {}
    for name, entry in entries(architecture, parameters, first_layer).items():
        for part, tensor in zip(entry.names, _part(entry, parameters[name], architecture), strict=True):
            if entry.split is None or size == 1:
                exported[part] = tensor.contiguous()
                continue
            shards = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(size)]
            dist.all_gather(shards, tensor.contiguous(), group=tensor_group)
            exported[part] = torch.cat(shards, entry.split)
    return exported


def _join(entry: Entry, parts: list[torch.Tensor], architecture: Architecture) -> torch.Tensor:
    if entry.join == "one":
        return parts[0]
    if entry.join == "glu":
        return torch.cat(parts)
    tail = parts[0].shape[1:]  # () for a bias
    groups = parts[1].shape[0] // architecture.head_dim
    return torch.cat([part.reshape(groups, -1, *tail) for part in parts], 1).reshape(-1, *tail)


def _part(entry: Entry, tensor: torch.Tensor, architecture: Architecture) -> tuple[torch.Tensor, ...]:
    if entry.join == "one":
        return (tensor,)
    if entry.join == "glu":
        return tensor.chunk(2)
    tail, dim = tensor.shape[1:], architecture.head_dim
    query_rows = architecture.num_heads // architecture.num_kv_heads * dim
    groups = tensor.reshape(-1, query_rows + 2 * dim, *tail)
    return tuple(part.reshape(-1, *tail) for part in torch.split(groups, [query_rows, dim, dim], 1))
