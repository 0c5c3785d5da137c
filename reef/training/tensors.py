"""The tensors that make up a Hugging Face model of an architecture, and whether a model directory has them."""

from collections.abc import Iterator
from pathlib import Path

from reef.errors import ConfigError
from reef.headers import read_headers
from reef.training.architecture import Architecture

Shape = tuple[int, ...]
OUTPUT = "lm_head.weight"


def expected_tensors(architecture: Architecture) -> dict[str, Shape]:
    """The shape of every tensor by its name, an untied output layer's too."""
    whole = (architecture.vocab_size, architecture.hidden_size)
    tensors: dict[str, Shape] = {"model.embed_tokens.weight": whole, "model.norm.weight": (architecture.hidden_size,)}
    if not architecture.tied:
        tensors[OUTPUT] = whole
    for layer in range(architecture.num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= {prefix + name: shape for name, shape in _layer(architecture, layer)}
    return tensors


def _layer(architecture: Architecture, layer: int) -> Iterator[tuple[str, Shape]]:
    hidden, dim = architecture.hidden_size, architecture.head_dim
    query, key_value = architecture.num_heads * dim, architecture.num_kv_heads * dim
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    for part, size in (("q", query), ("k", key_value), ("v", key_value)):
        yield f"self_attn.{part}_proj.weight", (size, hidden)
        if architecture.qkv_bias:
            yield f"self_attn.{part}_proj.bias", (size,)
    if architecture.qk_norm:
        yield "self_attn.q_norm.weight", (dim,)
        yield "self_attn.k_norm.weight", (dim,)
    yield "self_attn.o_proj.weight", (hidden, query)
    experts = architecture.experts
    if experts is None or not experts.layers[layer]:
        yield from _mlp("mlp.", hidden, architecture.ffn_size)
        return
    yield "mlp.gate.weight", (experts.num_experts, hidden)
    for number in range(experts.num_experts):
        yield from _mlp(f"mlp.experts.{number}.", hidden, experts.ffn_size)


def _mlp(prefix: str, hidden: int, ffn: int) -> Iterator[tuple[str, Shape]]:
    yield prefix + "gate_proj.weight", (ffn, hidden)
    yield prefix + "up_proj.weight", (ffn, hidden)
    yield prefix + "down_proj.weight", (hidden, ffn)


def check_weights(model_path: Path, architecture: Architecture) -> None:
    """Refuse a model directory whose weights are not those of its config. Reads the files' headers alone.

    Raises:
        ConfigError: as `read_headers`; or a tensor is missing, would be lost, or has another shape than config.json
            says: names the first ones.
    """
    found = {name: tensor for file in read_headers(model_path).values() for name, tensor in file.tensors.items()}
    expected = expected_tensors(architecture)
    if OUTPUT in found and architecture.tied:  # a tied model may hold its output layer or not
        expected[OUTPUT] = expected["model.embed_tokens.weight"]
    kind = f"the {architecture.model_type} model {model_path}"
    if missing := sorted(expected.keys() - found.keys()):
        raise _refused(f"{kind} lacks {_first(missing)}")
    if unknown := sorted(found.keys() - expected.keys()):
        raise _refused(f"{kind} holds tensors that Reef does not train: {_first(unknown)}")
    differ = [
        f"{name} is {list(found[name].shape)}, config.json says {list(shape)}"
        for name, shape in sorted(expected.items())
        if found[name].shape != shape
    ]
    if differ:
        raise _refused(f"{kind}: {_first(differ, '; ')}")


def _first(items: list[str], separator: str = ", ") -> str:
    more = f"{separator}and {len(items) - 3} more" if len(items) > 3 else ""
    return separator.join(items[:3]) + more


def _refused(reason: str) -> ConfigError:
    return ConfigError(reason, param="inference.model-path")
