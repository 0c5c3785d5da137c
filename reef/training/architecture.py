"""What a Hugging Face model directory says the model is, and whether Reef can train it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reef.config import Layout
from reef.errors import ConfigError
from reef.options import OptimizerOptions

SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3_moe")
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron's rotary embedding takes for granted, and every Llama 3 has; only the factor is free."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in the place of the MLP: a router chooses some for each token."""

    num_experts: int
    num_per_token: int
    ffn_size: int  # of one expert
    weights_sum_to_1: bool  # the chosen experts' weights; else they keep the share that all experts' softmax gave them
    layers: tuple[bool, ...]  # which layers have them; the others have a dense MLP


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder with RMSNorm, rotary embeddings, grouped-query attention and gated SiLU MLPs, dense or experts."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_size: int  # of a dense MLP
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope_theta: float
    tied: bool  # the output layer is the embedding's transpose
    rope_factor: float | None = None  # Llama 3's stretching of the rotary embedding's long waves
    experts: Experts | None = None

    @property
    def qkv_bias(self) -> bool:
        return self.model_type == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.model_type in ("qwen3", "qwen3_moe")

    def has_experts(self, layer: int) -> bool:
        """Whether layer number `layer`, from 0, has a mixture of experts."""
        return self.experts is not None and self.experts.layers[layer]


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
            rope_factor=_llama3_factor(path, values),
            experts=_experts(path, values) if model_type == "qwen3_moe" else None,
        )
    except KeyError as error:
        raise _refused(path, f"{error.args[0]} is missing") from None


def _rope(values: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings: `rope_parameters` since transformers 5, `rope_scaling` before."""
    return values.get("rope_parameters") or values.get("rope_scaling") or {}


def _rope_type(values: dict[str, Any]) -> Any:
    return _rope(values).get("rope_type", _rope(values).get("type", "default"))


def _llama3_factor(path: Path, values: dict[str, Any]) -> float | None:
    if _rope_type(values) != "llama3":
        return None
    rope = _rope(values)
    for key, expected in LLAMA3_ROPE.items():
        if rope[key] != expected:
            raise _refused(path, f"rotary {key} is {rope[key]}; Megatron's 'llama3' has {expected}")
    return float(rope["factor"])


def _experts(path: Path, values: dict[str, Any]) -> Experts:
    num_layers, step = values["num_hidden_layers"], values.get("decoder_sparse_step", 1)
    dense = values.get("mlp_only_layers") or []
    # Transformers 5 writes num_local_experts, those before num_experts.
    num_experts = values["num_local_experts"] if "num_local_experts" in values else values["num_experts"]
    experts = Experts(
        num_experts=num_experts,
        num_per_token=values["num_experts_per_tok"],
        ffn_size=values["moe_intermediate_size"],
        weights_sum_to_1=bool(values.get("norm_topk_prob", False)),
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
    )
    if not any(experts.layers):
        raise _refused(path, "no layer has experts; Reef trains such a model as 'qwen3'")
    if not 1 <= experts.num_per_token <= num_experts:
        raise _refused(path, f"num_experts_per_tok is {experts.num_per_token}, expected 1 to {num_experts}")
    if experts.num_per_token == 1 and experts.weights_sum_to_1:
        raise _refused(path, "norm_topk_prob is set with one expert per token, so that its router could not learn")
    return experts


def _refuse_unsupported(path: Path, values: dict[str, Any]) -> None:
    if _rope_type(values) not in ("default", "llama3"):
        raise _refused(path, f"rotary type is {_rope_type(values)!r}; Reef trains 'default' and 'llama3'")
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
    """Refuse a layout that does not divide the model, or that Reef cannot train in.

    Raises:
        ConfigError: names the field, with the size and the number of ranks that do not fit.
    """
    if layout.context > 1:
        raise _unfit("context", f"is {layout.context}: Reef has no context parallelism yet; leave it 1")
    divided = {
        "attention heads": (architecture.num_heads, layout.tensor, "tensor"),
        "key-value heads": (architecture.num_kv_heads, layout.tensor, "tensor"),
        "vocabulary entries": (architecture.vocab_size, layout.tensor, "tensor"),
        "layers": (architecture.num_layers, layout.pipeline, "pipeline"),
    }
    experts = architecture.experts
    if experts is None or not all(experts.layers):
        divided["MLP columns"] = (architecture.ffn_size, layout.tensor, "tensor")
    if experts is not None:
        divided["experts"] = (experts.num_experts, layout.expert, "expert")
        if layout.expert == 1:  # else each is whole on its expert rank
            divided["MLP columns of an expert"] = (experts.ffn_size, layout.tensor, "tensor")
    for what, (size, ranks, dimension) in divided.items():
        if size % ranks:
            raise _unfit(dimension, f"is {ranks}, which does not divide the model's {size} {what}")
    _check_expert_ranks(architecture, layout)


def _check_expert_ranks(architecture: Architecture, layout: Layout) -> None:
    stage = layout.world_size // layout.pipeline
    if layout.expert > 1 and architecture.experts is None:
        raise _unfit("expert", f"is {layout.expert}, but a {architecture.model_type} model has no experts: leave it 1")
    if stage % layout.expert:
        raise _unfit("expert", f"is {layout.expert}, which does not divide the {stage} ranks of a pipeline stage")
    if architecture.experts is not None and layout.tensor > 1 and not layout.sequence_parallel:
        raise _unfit("tensor", f"is {layout.tensor}: with experts it needs training.layout.sequence-parallel: true")


def check_recompute(architecture: Architecture, layout: Layout, options: OptimizerOptions) -> None:
    """Refuse units of layers, to be computed again, that do not fill up a pipeline stage: Megatron runs past its end.

    Raises:
        ConfigError: names the field, with the number of layers that a stage has.
    """
    layers, unit = architecture.num_layers // layout.pipeline, options.recompute_num_layers
    if options.recompute_method == "uniform" and unit is not None and layers % unit:
        field = "training.options.recompute-num-layers"
        raise ConfigError(
            f"{field} is {unit}, which does not divide the {layers} layers of a pipeline stage (uniform)", param=field
        )


def _unfit(dimension: str, reason: str) -> ConfigError:
    field = f"training.layout.{dimension}"
    return ConfigError(f"{field} {reason}", param=field)
