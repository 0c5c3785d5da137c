"""Published models as directories that take no disk: their real config.json, and weights that are all header.

A safetensors file begins with the names, dtypes and shapes of its tensors; the numbers themselves are a hole in a
sparse file of the full length. Whatever only looks at a model directory sees the real one.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_QWEN = {
    "vocab_size": 151936,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "Qwen3-0.6B": _QWEN
    | {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "Qwen3-1.7B": _QWEN
    | {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "Qwen2.5-1.5B-Instruct": _QWEN
    | {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "max_position_embeddings": 32768,
        "num_attention_heads": 12,
        "num_hidden_layers": 28,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    },
    "Qwen3-30B-A3B": _QWEN
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
    },
}
# As published: what the files on the hub hold.
NUM_PARAMETERS = {
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen3-30B-A3B": 30_532_122_624,
}
SHARD_BYTES = 4 * 10**9


def make(directory: Path, name: str) -> Path:
    """Write the directory of a published model, and return it."""
    config = CONFIGS[name]
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    shards = list(_shards(config))
    weight_map = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        _write(directory / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def _shards(config: Mapping[str, Any]) -> Iterator[dict[str, list[int]]]:
    shard: dict[str, list[int]] = {}
    size = 0
    for name, shape in _shapes(config):
        bytes_of_tensor = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        if shard and size + bytes_of_tensor > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = shape
        size += bytes_of_tensor
    yield shard


def _write(path: Path, shapes: Mapping[str, list[int]]) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of the tensors, as `transformers` writes them."""
    h, vocab = config["hidden_size"], config["vocab_size"]
    head = config.get("head_dim") or h // config["num_attention_heads"]
    columns = {"q": head * config["num_attention_heads"], "k": head * config["num_key_value_heads"]}
    columns["v"] = columns["k"]
    yield "model.embed_tokens.weight", [vocab, h]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for projection, width in columns.items():
            yield f"{prefix}self_attn.{projection}_proj.weight", [width, h]
            if config["model_type"] == "qwen2":
                yield f"{prefix}self_attn.{projection}_proj.bias", [width]
        yield f"{prefix}self_attn.o_proj.weight", [h, columns["q"]]
        if config["model_type"] != "qwen2":
            yield from ((f"{prefix}self_attn.{name}_norm.weight", [head]) for name in ("q", "k"))
        if num_experts := config.get("num_experts"):
            yield f"{prefix}mlp.gate.weight", [num_experts, h]
            for number in range(num_experts):
                yield from _mlp(f"{prefix}mlp.experts.{number}.", h, config["moe_intermediate_size"])
        else:
            yield from _mlp(f"{prefix}mlp.", h, config["intermediate_size"])
        yield from ((f"{prefix}{name}_layernorm.weight", [h]) for name in ("input", "post_attention"))
    yield "model.norm.weight", [h]
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", [vocab, h]


def _mlp(prefix: str, h: int, columns: int) -> Iterator[tuple[str, list[int]]]:
    for name in ("gate", "up"):
        yield f"{prefix}{name}_proj.weight", [columns, h]
    yield f"{prefix}down_proj.weight", [h, columns]
