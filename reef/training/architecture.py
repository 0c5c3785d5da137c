"""What a Hugging Face model directory says the model is, and whether Reef can train it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reef.config import Layout
from reef.errors import ConfigError

SUPPORTED = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Architecture:
    """A dense decoder with RMSNorm, rotary embeddings, grouped-query attention and a gated SiLU MLP."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope_theta: float
    tied: bool  # the output layer is the embedding's transpose

    @property
    def qkv_bias(self) -> bool:
        return self.model_type == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.model_type == "qwen3"


def read_architecture(model_path: Path) -> Architecture:
    """Read `config.json` of a model directory.

    Raises:
        ConfigError: it is not there, or describes a model that cannot be converted to Megatron.
    """
    path = model_path / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no model at {model_path}: {path} is missing", param="inference.model-path") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}", param="inference.model-path") from None
    model_type = values.get("model_type")
    if model_type not in SUPPORTED:
        raise _refused(path, f"model_type is {model_type!r}; Reef trains {', '.join(SUPPORTED)}")
    _refuse_unsupported(path, values)
    try:
        return Architecture(
            model_type=model_type,
            num_layers=values["num_hidden_layers"],
            hidden_size=values["hidden_size"],
            ffn_size=values["intermediate_size"],
            num_heads=values["num_attention_heads"],
            num_kv_heads=values.get("num_key_value_heads") or values["num_attention_heads"],
            head_dim=values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"],
            vocab_size=values["vocab_size"],
            context_length=values["max_position_embeddings"],
            norm_eps=values["rms_norm_eps"],
            rope_theta=float(_rope(values).get("rope_theta", values.get("rope_theta", 10000.0))),
            tied=bool(values.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise _refused(path, f"{error.args[0]} is missing") from None


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings: `rope_parameters` since transformers 5, `rope_scaling` before."""
    return values.get("rope_parameters") or values.get("rope_scaling") or {}


def _refuse_unsupported(path: Path, values: dict[str, Any]) -> None:
    rope_type = _rope(values).get("rope_type", _rope(values).get("type", "default"))
    if rope_type != "default":
        raise _refused(path, f"rotary type is {rope_type!r}; Reef trains 'default'")
    if values.get("hidden_act", "silu") != "silu":
        raise _refused(path, f"hidden_act is {values['hidden_act']!r}; Reef trains 'silu'")
    for key in ("use_sliding_window", "mlp_bias"):
        if values.get(key):
            raise _refused(path, f"{key} is set; Reef trains models without")
    if values.get("attention_bias") and values["model_type"] != "qwen2":
        raise _refused(path, "attention_bias is set; Reef trains models without")


def _refused(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"{path}: {reason}", param="inference.model-path")


def check_layout(architecture: Architecture, layout: Layout) -> None:
    """Refuse a layout that does not divide the model.

    Raises:
        ConfigError: names the size and the number of ranks that do not fit.
    """
    divided = {
        "attention heads": (architecture.num_heads, layout.tensor, "tensor"),
        "key-value heads": (architecture.num_kv_heads, layout.tensor, "tensor"),
        "MLP columns": (architecture.ffn_size, layout.tensor, "tensor"),
        "vocabulary entries": (architecture.vocab_size, layout.tensor, "tensor"),
        "layers": (architecture.num_layers, layout.pipeline, "pipeline"),
    }
    for what, (size, ranks, dimension) in divided.items():
        if size % ranks:
            raise ConfigError(
                f"training.layout.{dimension} is {ranks}, which does not divide the model's {size} {what}",
                param=f"training.layout.{dimension}",
            )
