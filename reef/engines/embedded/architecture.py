"""What a forward pass needs to know about a model, read from its `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from reef.engines.embedded.errors import ModelError

SUPPORTED = ("qwen3", "qwen2", "llama")
"""Dense families whose forward pass `model.py` implements."""

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)

SCALED_ROPE = ("linear", "llama3", "yarn")
"""Rope types whose frequencies do not depend on the length of the sequence (`dynamic` and `longrope` do)."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes and switches of a dense decoder. Two directories with equal architectures have exchangeable weights."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    context_length: int
    rope_frequencies: tuple[float, ...]
    """[head_dim / 2] radians a position."""
    rope_scale: float
    """Factor on cosine and sine (yarn); 1 elsewhere."""

    def cache_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values that one token of one sequence holds."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize


def read_architecture(path: Path) -> Architecture:
    """Reads `path/config.json`.

    Raises:
        ModelError: no or broken config, another model family, or a feature the forward pass does not have.
    """
    config_file = path / "config.json"
    try:
        raw = json.loads(config_file.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"cannot read {config_file}: {error}") from error
    model_type = raw.get("model_type") if isinstance(raw, dict) else None
    if model_type not in SUPPORTED:
        raise ModelError(
            f"{config_file}: model_type {model_type!r} is not supported by the embedded engine; "
            f"supported: {', '.join(SUPPORTED)} (serve other models with SGLang)"
        )
    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise ModelError(f"{config_file} is not a valid {model_type} config: {error}") from error
    _refuse_impossible(config, config_file)
    _refuse_unsupported(config, config_file)
    frequencies, scale = _rope(config, config_file)
    qwen2 = model_type == "qwen2"
    bias = qwen2 or bool(config.attention_bias)
    return Architecture(
        model_type=model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=_head_dim(config),
        mlp_size=config.intermediate_size,
        norm_eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        qkv_bias=bias,
        out_bias=bias and not qwen2,
        mlp_bias=model_type == "llama" and bool(config.mlp_bias),
        qk_norm=model_type == "qwen3",
        context_length=config.max_position_embeddings,
        rope_frequencies=frequencies,
        rope_scale=scale,
    )


def _head_dim(config: Any) -> int:
    # Qwen2 configs have no head_dim; elsewhere it may be null.
    explicit = config.to_dict().get("head_dim")
    return int(explicit) if explicit else int(config.hidden_size // max(1, config.num_attention_heads))


def _refuse_impossible(config: Any, source: Path) -> None:
    sizes = {name: config.to_dict()[name] for name in SIZES} | {"head_dim": _head_dim(config)}
    for name, size in sizes.items():
        if size < 1:
            raise ModelError(f"{source}: {name} must be at least 1, got {size}")
    if sizes["head_dim"] % 2:
        raise ModelError(f"{source}: head_dim must be even, got {sizes['head_dim']}")


def _refuse_unsupported(config: Any, source: Path) -> None:
    if config.hidden_act != "silu":
        raise ModelError(f"{source}: hidden_act {config.hidden_act!r} is not supported, expected 'silu'")
    layer_types = set(config.to_dict().get("layer_types") or ())
    if layer_types - {"full_attention"}:
        raise ModelError(f"{source}: layer types {sorted(layer_types)} are not supported, expected full attention only")
    if config.num_attention_heads % config.num_key_value_heads:
        raise ModelError(
            f"{source}: {config.num_attention_heads} attention heads do not divide into "
            f"{config.num_key_value_heads} key-value heads"
        )


def _rope(config: Any, source: Path) -> tuple[tuple[float, ...], float]:
    parameters = config.rope_parameters
    rope_type = parameters.get("rope_type", "default")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(f"{source}: partial_rotary_factor {parameters['partial_rotary_factor']} is not supported")
    if rope_type == "default":
        half = torch.arange(0, _head_dim(config), 2, dtype=torch.int64).float() / _head_dim(config)
        return tuple((1.0 / parameters["rope_theta"] ** half).tolist()), 1.0
    if rope_type not in SCALED_ROPE:
        raise ModelError(
            f"{source}: rope type {rope_type!r} is not supported; supported: default, {', '.join(SCALED_ROPE)}"
        )
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](config, device=torch.device("cpu"))
    return tuple(frequencies.tolist()), float(scale)
