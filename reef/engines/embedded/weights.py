"""Safetensors in a Hugging Face directory -> checked and fused tensors.

Everything is read and checked before anything is returned, so that a load either gives complete weights or raises.
Shape letters: H query heads, K key-value heads, D head_dim, I mlp_size, V vocab_size, N hidden_size.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from reef.engines.embedded.architecture import Architecture
from reef.engines.embedded.errors import ModelError
from reef.faults import reach

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_NAMES_IN_MESSAGE = 5

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Query and key rows are interleaved for complex rotation (see `_interleave`)."""

    attention_norm: torch.Tensor
    """[N]"""
    qkv: torch.Tensor
    """[(H + 2K) * D, N]: queries, keys, values."""
    qkv_bias: torch.Tensor | None
    """[(H + 2K) * D]"""
    qk_norm: torch.Tensor | None
    """[H + K, D]: Qwen3's norm weights, repeated for each head."""
    out: torch.Tensor
    """[N, H * D]"""
    out_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    """[N]"""
    gate_up: torch.Tensor
    """[2I, N]"""
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    """[N, I]"""
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model, ready for `Model`."""

    embedding: torch.Tensor
    """[V, N]"""
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    """[N]"""
    head: torch.Tensor
    """[V, N]; the embedding itself where tied."""

    @property
    def num_bytes(self) -> int:
        """Size of all tensors, tied ones once."""
        total = self.embedding.nbytes + self.norm.nbytes
        if self.head is not self.embedding:
            total += self.head.nbytes
        for layer in self.layers:
            parts = (layer.attention_norm, layer.qkv, layer.out, layer.mlp_norm, layer.gate_up, layer.down)
            total += sum(part.nbytes for part in parts)
        return total


def load_weights(path: Path, arch: Architecture, dtype: torch.dtype) -> Weights:
    """Reads the weights in `path` as `dtype`.

    Raises:
        ModelError: a file is missing, truncated or unreadable; a tensor is missing, unknown, of another shape, or holds
            a NaN or an infinity.
    """
    tensors = _read(path)
    reach("load.engine")
    return build_weights(tensors, str(path), arch, dtype)


def build_weights(tensors: Tensors, source: str, arch: Architecture, dtype: torch.dtype) -> Weights:
    """Checks and fuses tensors by their names in files; `source` is how messages call where they came from.

    Raises:
        ModelError: a tensor is missing, unknown, of another shape, or holds a NaN or an infinity.
    """
    if arch.tied:
        tensors.pop("lm_head.weight", None)  # a copy of the embedding that some writers keep
    _check(source, tensors, expected_shapes(arch))
    return Weights(
        embedding=tensors["model.embed_tokens.weight"].to(dtype, copy=True),
        layers=tuple(_fuse_layer(tensors, f"model.layers.{i}.", arch, dtype) for i in range(arch.num_layers)),
        norm=tensors["model.norm.weight"].to(dtype, copy=True),
        head=tensors["model.embed_tokens.weight" if arch.tied else "lm_head.weight"].to(dtype, copy=True),
    )


def expected_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a directory of this architecture must hold, and of no other."""
    n, d, i = arch.hidden_size, arch.head_dim, arch.mlp_size
    q, kv = arch.num_heads * d, arch.num_kv_heads * d
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (arch.vocab_size, n), "model.norm.weight": (n,)}
    if not arch.tied:
        shapes["lm_head.weight"] = (arch.vocab_size, n)
    linear = {
        "self_attn.q_proj": (q, n, arch.qkv_bias),
        "self_attn.k_proj": (kv, n, arch.qkv_bias),
        "self_attn.v_proj": (kv, n, arch.qkv_bias),
        "self_attn.o_proj": (n, q, arch.out_bias),
        "mlp.gate_proj": (i, n, arch.mlp_bias),
        "mlp.up_proj": (i, n, arch.mlp_bias),
        "mlp.down_proj": (n, i, arch.mlp_bias),
    }
    for layer in range(arch.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{norm}_layernorm.weight": (n,) for norm in ("input", "post_attention")}
        for name, (rows, columns, bias) in linear.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        if arch.qk_norm:
            shapes |= {f"{prefix}self_attn.{norm}.weight": (d,) for norm in ("q_norm", "k_norm")}
    return shapes


def _read(path: Path) -> Tensors:
    tensors: Tensors = {}
    for file in _files(path):
        try:
            # Bytes, not a memory map: a file that is truncated later must not kill the server with SIGBUS.
            part = load(file.read_bytes())
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read {file}: {error}") from error
        tensors |= {name: tensor for name, tensor in part.items() if not name.endswith("rotary_emb.inv_freq")}
    return tensors


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        raise ModelError(f"{path} is not a directory")
    index = path / INDEX
    if not index.exists():
        if not (path / SINGLE).exists():
            raise ModelError(f"{path} holds neither {SINGLE} nor {INDEX}")
        return [path / SINGLE]
    try:
        names = json.loads(index.read_text())["weight_map"].values()
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index} is not an index of shards: {error!r}") from error
    return [path / name for name in sorted(set(names))]


def _check(source: str, tensors: Tensors, shapes: dict[str, tuple[int, ...]]) -> None:
    for problem, names in (
        ("lacks", sorted(shapes.keys() - tensors.keys())),
        ("holds unexpected", sorted(tensors.keys() - shapes.keys())),
    ):
        if names:
            more = f" and {len(names) - MAX_NAMES_IN_MESSAGE} more" if len(names) > MAX_NAMES_IN_MESSAGE else ""
            raise ModelError(f"{source} {problem} tensors: {', '.join(names[:MAX_NAMES_IN_MESSAGE])}{more}")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise ModelError(f"{source}: {name} has shape {tuple(tensors[name].shape)}, expected {shape}")
        if not bool(torch.isfinite(tensors[name]).all()):
            raise ModelError(f"{source}: {name} holds a NaN or an infinity")


def _fuse_layer(tensors: Tensors, prefix: str, arch: Architecture, dtype: torch.dtype) -> LayerWeights:
    def take(name: str) -> torch.Tensor:
        return tensors[prefix + name].to(dtype, copy=True)  # not a view of the file

    def qkv(kind: str) -> torch.Tensor:
        query, key, value = (take(f"self_attn.{part}_proj.{kind}") for part in "qkv")
        return torch.cat([_interleave(query, arch.head_dim), _interleave(key, arch.head_dim), value])

    def gate_up(kind: str) -> torch.Tensor:
        return torch.cat([take(f"mlp.gate_proj.{kind}"), take(f"mlp.up_proj.{kind}")])

    return LayerWeights(
        attention_norm=take("input_layernorm.weight"),
        qkv=qkv("weight"),
        qkv_bias=qkv("bias") if arch.qkv_bias else None,
        qk_norm=_qk_norm(take, arch) if arch.qk_norm else None,
        out=take("self_attn.o_proj.weight"),
        out_bias=take("self_attn.o_proj.bias") if arch.out_bias else None,
        mlp_norm=take("post_attention_layernorm.weight"),
        gate_up=gate_up("weight"),
        gate_up_bias=gate_up("bias") if arch.mlp_bias else None,
        down=take("mlp.down_proj.weight"),
        down_bias=take("mlp.down_proj.bias") if arch.mlp_bias else None,
    )


def _qk_norm(take: Callable[[str], torch.Tensor], arch: Architecture) -> torch.Tensor:
    query = _interleave(take("self_attn.q_norm.weight"), arch.head_dim).expand(arch.num_heads, -1)
    key = _interleave(take("self_attn.k_norm.weight"), arch.head_dim).expand(arch.num_kv_heads, -1)
    return torch.cat([query, key])


def _interleave(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorders each head's rows from (all first halves, all second halves) to pairs.

    Hugging Face rotates dimension i with i + D/2. With the pair side by side the rotation is one complex product, and
    the scores do not change, because queries and keys are reordered alike.
    """
    order = torch.arange(head_dim).view(2, head_dim // 2).T.flatten()
    return rows.view(-1, head_dim, *rows.shape[1:])[:, order].reshape(rows.shape)
