"""Hugging Face <-> Megatron: which tensors make up each parameter of a rank's GPTModel.

Every Hugging Face tensor is cut along one dimension over tensor ranks (or not at all), and a Megatron parameter joins
the parts of one rank: `qkv` interleaves query, key and value rows by key-value group, `glu` stacks gate and up
projection. So a rank reads only its slices, each straight into its place in the parameter, and export reads them back
out of the same places. Where experts are spread over expert ranks, a rank has some of them, each whole.

A parameter has one name in Megatron's local layer spec and may have another in Transformer Engine's, which puts a norm
into the linear layer that follows it and keeps a layer's experts in one module. Both are known here.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

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
    spread: bool = False  # one expert's, whole on its expert rank


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank keeps its part of one Hugging Face tensor."""

    parameter: str
    entry: Entry
    index: int  # of the tensor among the entry's names


_INPUT_NORM = Entry(("input_layernorm.weight",))
_MLP_NORM = Entry(("post_attention_layernorm.weight",))
_GATE_UP = Entry(("gate_proj.weight", "up_proj.weight"), 0, "glu")
_DOWN = Entry(("down_proj.weight",), 1)

_WHOLE_MODEL: Mapping[str, Entry] = {
    "embedding.word_embeddings.weight": Entry((EMBEDDING,), 0),
    "decoder.final_layernorm.weight": Entry(("model.norm.weight",)),
    "output_layer.weight": Entry((OUTPUT,), 0),
}
_LAYER: Mapping[str, Entry] = {
    "input_layernorm.weight": _INPUT_NORM,
    "self_attention.linear_qkv.layer_norm_weight": _INPUT_NORM,  # Transformer Engine
    "pre_mlp_layernorm.weight": _MLP_NORM,
    "mlp.linear_fc1.layer_norm_weight": _MLP_NORM,  # Transformer Engine, before a dense MLP
    "self_attention.linear_qkv.weight": Entry(tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), 0, "qkv"),
    "self_attention.linear_qkv.bias": Entry(tuple(f"self_attn.{x}_proj.bias" for x in "qkv"), 0, "qkv"),
    "self_attention.q_layernorm.weight": Entry(("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": Entry(("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": Entry(("self_attn.o_proj.weight",), 1),
    "mlp.linear_fc1.weight": replace(_GATE_UP, names=tuple("mlp." + name for name in _GATE_UP.names)),
    "mlp.linear_fc2.weight": replace(_DOWN, names=tuple("mlp." + name for name in _DOWN.names)),
    "mlp.router.weight": Entry(("mlp.gate.weight",)),
}
_EXPERT: Mapping[str, Entry] = {"linear_fc1": _GATE_UP, "linear_fc2": _DOWN}

_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(?P<number>\d+)\.(?P<linear>linear_fc[12])\.weight")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(?P<linear>linear_fc[12])\.weight(?P<number>\d+)")  # Transformer Engine


def entry_of(architecture: Architecture, parameter: str, first_layer: int, first_expert: int | None = None) -> Entry:
    """The entry of one parameter of a rank's GPTModel, by its name.

    Args:
        first_layer: number of the stage's first layer in the whole model, from 0.
        first_expert: number of the rank's first expert in each layer, from 0, where experts are spread over expert
            ranks. None: every rank has its cut of each.

    Raises:
        KeyError: no model that Reef converts has such a parameter.
    """
    if parameter == "output_layer.weight" and architecture.tied:
        # Only a last stage apart from the first has this parameter: its copy of the embedding.
        return Entry((EMBEDDING,), 0)
    if not (layer := _LAYER_NAME.fullmatch(parameter)):
        return _WHOLE_MODEL[parameter]
    prefix = f"model.layers.{first_layer + int(layer[1])}."
    if expert := _LOCAL_EXPERT.fullmatch(layer[2]) or _GROUPED_EXPERT.fullmatch(layer[2]):
        entry = _EXPERT[expert["linear"]]
        if first_expert is not None:
            entry = replace(entry, split=None, spread=True)
        prefix += f"mlp.experts.{(first_expert or 0) + int(expert['number'])}."
    else:
        entry = _LAYER[layer[2]]
    return replace(entry, names=tuple(prefix + name for name in entry.names))


def places(
    architecture: Architecture, parameters: Iterable[str], first_layer: int, first_expert: int | None = None
) -> dict[str, Place]:
    """Where a rank with these parameters keeps which Hugging Face tensors, by their names.

    The copy of a tied embedding on a last stage is none: the first stage answers for it.
    """
    found: dict[str, Place] = {}
    for parameter in parameters:
        if parameter == "output_layer.weight" and architecture.tied:
            continue
        entry = entry_of(architecture, parameter, first_layer, first_expert)
        found |= {name: Place(parameter, entry, index) for index, name in enumerate(entry.names)}
    return found


@torch.no_grad()
def load(
    module: torch.nn.Module,
    architecture: Architecture,
    first_layer: int,
    read: Reader,
    rank: int,
    size: int,
    first_expert: int | None = None,
    skip: str | None = None,
) -> None:
    """Fill a rank's GPTModel with its part of the weights, one Hugging Face tensor's slice in memory at a time.

    Args:
        rank, size: this rank among the tensor ranks.
        first_layer, first_expert: as `entry_of`.
        skip: parameters whose names begin with it stay as they are.

    Raises:
        ConfigError: a tensor has another shape than the config says (`check_weights` finds that before any load).
    """
    for parameter, values in module.named_parameters():
        if skip is not None and parameter.startswith(skip):
            continue
        entry = entry_of(architecture, parameter, first_layer, first_expert)
        for index, name in enumerate(entry.names):
            place = _view(Place(parameter, entry, index), values, architecture)
            _fill(place, name, read(name, entry.split, rank, size))


def _fill(place: torch.Tensor, name: str, part: torch.Tensor) -> None:
    if part.numel() != place.numel():
        raise ConfigError(
            f"{name} {list(part.shape)} does not fit config.json: {place.numel()} numbers were expected",
            param="inference.model-path",
        )
    place.copy_(part.reshape(place.shape))


def part(place: Place, parameter: torch.Tensor, architecture: Architecture) -> torch.Tensor:
    """This rank's part of a Hugging Face tensor, contiguous; shares the parameter's memory where it can."""
    view = _view(place, parameter.detach(), architecture)
    return view.reshape(-1, *parameter.shape[1:]).contiguous()


def _view(place: Place, parameter: torch.Tensor, architecture: Architecture) -> torch.Tensor:
    """The numbers of one tensor within a parameter: [rows, ...], for `qkv` [groups, rows of a group, ...]."""
    if place.entry.join == "one":
        return parameter
    if place.entry.join == "glu":
        return parameter.chunk(2)[place.index]
    tail, dim = parameter.shape[1:], architecture.head_dim  # () for a bias
    query_rows = architecture.num_heads // architecture.num_kv_heads * dim
    groups = parameter.view(-1, query_rows + 2 * dim, *tail)
    return torch.split(groups, [query_rows, dim, dim], 1)[place.index]
