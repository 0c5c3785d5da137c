"""Safetensors in a Hugging Face directory -> checked and fused tensors.

Everything is read and checked before anything is returned, so that a load either gives complete weights or raises.
Shape letters: H query heads, K key-value heads, D head_dim, I mlp_size, V vocab_size, N hidden_size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from reef.engines.embedded.architecture import Architecture
from reef.engines.embedded.errors import ModelError
from reef.errors import ConfigError
from reef.faults import reach
from reef.headers import read_headers

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
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


class Source(Protocol):
    """Tensors by the names that they have in files."""

    @property
    def title(self) -> str:
        """What messages call it."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of all its tensors."""

    def fill(self, name: str, out: torch.Tensor) -> None:
        """Write a tensor, which has as many numbers, into `out`. Raises ModelError where it cannot be had."""


class Files:
    """The safetensors files of a directory, read straight to where the numbers are wanted.

    Read, not mapped: a file that is truncated later must not kill the server with SIGBUS.
    """

    def __init__(self, path: Path) -> None:
        """Raises ModelError: no files, or one that is missing or no safetensors file."""
        self.title = str(path)
        try:
            headers = read_headers(path)
        except ConfigError as error:
            raise ModelError(error.message) from None
        self._places = {
            name: (path / file, tensor)
            for file, header in headers.items()
            for name, tensor in header.tensors.items()
            if not name.endswith("rotary_emb.inv_freq")
        }
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tensor.shape for name, (_, tensor) in self._places.items()}

    def fill(self, name: str, out: torch.Tensor) -> None:
        """As in `Source`."""
        file, tensor = self._places[name]
        dtype = DTYPES[tensor.dtype]
        direct = out.dtype is dtype and out.is_contiguous()
        read = out if direct else torch.empty(tensor.shape, dtype=dtype)
        _read_into(file, tensor.begin, read.view(-1).view(torch.uint8).numpy().data)
        if not direct:
            out.copy_(read.view(out.shape))


def _read_into(file: Path, begin: int, into: memoryview) -> None:
    try:
        with file.open("rb", buffering=0) as opened:
            opened.seek(begin)
            while len(into):
                if not (num_bytes := opened.readinto(into)):
                    raise ModelError(f"cannot read {file}: it ends before its last tensor")
                into = into[num_bytes:]
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error}") from error


@dataclass(frozen=True, slots=True)
class Received:
    """Tensors that are in memory already."""

    title: str
    tensors: Tensors

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """As in `Source`."""
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def fill(self, name: str, out: torch.Tensor) -> None:
        """As in `Source`."""
        out.copy_(self.tensors[name].view(out.shape))


def load_weights(path: Path, arch: Architecture, dtype: torch.dtype) -> Weights:
    """Reads the weights in `path` as `dtype`.

    Raises:
        ModelError: a file is missing, truncated or unreadable; a tensor is missing, unknown, of another shape, or holds
            a NaN or an infinity.
    """
    files = Files(path)
    reach("load.engine")
    return build_weights(files, arch, dtype)


def build_weights(source: Source, arch: Architecture, dtype: torch.dtype) -> Weights:
    """Checks and fuses a source's tensors.

    Raises:
        ModelError: a tensor is missing, unknown, of another shape, or holds a NaN or an infinity.
    """
    _check_shapes(source, arch)
    build = _Build(source, arch, dtype)
    embedding = build.take("model.embed_tokens.weight")
    return Weights(
        embedding=embedding,
        layers=tuple(build.layer(f"model.layers.{i}.") for i in range(arch.num_layers)),
        norm=build.take("model.norm.weight"),
        head=embedding if arch.tied else build.take("lm_head.weight"),
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


def _check_shapes(source: Source, arch: Architecture) -> None:
    found, expected = dict(source.shapes), expected_shapes(arch)
    if arch.tied:
        found.pop("lm_head.weight", None)  # a copy of the embedding that some writers keep
    for problem, names in (
        ("lacks", sorted(expected.keys() - found.keys())),
        ("holds unexpected", sorted(found.keys() - expected.keys())),
    ):
        if names:
            more = f" and {len(names) - MAX_NAMES_IN_MESSAGE} more" if len(names) > MAX_NAMES_IN_MESSAGE else ""
            raise ModelError(f"{source.title} {problem} tensors: {', '.join(names[:MAX_NAMES_IN_MESSAGE])}{more}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelError(f"{source.title}: {name} has shape {found[name]}, expected {shape}")


class _Build:
    """Puts each tensor of a source into its place, in memory that is the weights' own."""

    def __init__(self, source: Source, arch: Architecture, dtype: torch.dtype) -> None:
        self._source = source
        self._arch = arch
        self._dtype = dtype

    def take(self, name: str) -> torch.Tensor:
        return self._fill(name, self._empty(self._source.shapes[name]))

    def layer(self, prefix: str) -> LayerWeights:
        arch = self._arch
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return LayerWeights(
            attention_norm=self.take(prefix + "input_layernorm.weight"),
            qkv=self._qkv(attention, "weight"),
            qkv_bias=self._qkv(attention, "bias") if arch.qkv_bias else None,
            qk_norm=self._qk_norm(attention) if arch.qk_norm else None,
            out=self.take(attention + "o_proj.weight"),
            out_bias=self.take(attention + "o_proj.bias") if arch.out_bias else None,
            mlp_norm=self.take(prefix + "post_attention_layernorm.weight"),
            gate_up=self._gate_up(mlp, "weight"),
            gate_up_bias=self._gate_up(mlp, "bias") if arch.mlp_bias else None,
            down=self.take(mlp + "down_proj.weight"),
            down_bias=self.take(mlp + "down_proj.bias") if arch.mlp_bias else None,
        )

    def _empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype)

    def _fill(self, name: str, out: torch.Tensor) -> torch.Tensor:
        self._source.fill(name, out)
        if not all(map(torch.isfinite, torch.aminmax(out))):  # which a NaN passes through
            raise ModelError(f"{self._source.title}: {name} holds a NaN or an infinity")
        return out

    def _qkv(self, prefix: str, kind: str) -> torch.Tensor:
        arch = self._arch
        rows = [arch.num_heads * arch.head_dim, *[arch.num_kv_heads * arch.head_dim] * 2]
        fused = self._empty((sum(rows), *self._source.shapes[f"{prefix}q_proj.{kind}"][1:]))
        query, key, value = torch.split(fused, rows)
        query.copy_(_interleave(self.take(f"{prefix}q_proj.{kind}"), arch.head_dim))
        key.copy_(_interleave(self.take(f"{prefix}k_proj.{kind}"), arch.head_dim))
        self._fill(f"{prefix}v_proj.{kind}", value)
        return fused

    def _gate_up(self, prefix: str, kind: str) -> torch.Tensor:
        rows, *rest = self._source.shapes[f"{prefix}gate_proj.{kind}"]
        fused = self._empty((2 * rows, *rest))
        for name, part in zip(("gate_proj", "up_proj"), fused.chunk(2), strict=True):
            self._fill(f"{prefix}{name}.{kind}", part)
        return fused

    def _qk_norm(self, prefix: str) -> torch.Tensor:
        arch = self._arch
        query = _interleave(self.take(prefix + "q_norm.weight"), arch.head_dim).expand(arch.num_heads, -1)
        key = _interleave(self.take(prefix + "k_norm.weight"), arch.head_dim).expand(arch.num_kv_heads, -1)
        return torch.cat([query, key])


def _interleave(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorders each head's rows from (all first halves, all second halves) to pairs.

    Hugging Face rotates dimension i with i + D/2. With the pair side by side the rotation is one complex product, and
    the scores do not change, because queries and keys are reordered alike.
    """
    order = torch.arange(head_dim).view(2, head_dim // 2).T.flatten()
    return rows.view(-1, head_dim, *rows.shape[1:])[:, order].reshape(rows.shape)
