"""The forward pass against transformers, and model directories that must be refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file, save_file

from reef.engines.embedded.architecture import read_architecture
from reef.engines.embedded.cache import KVCache
from reef.engines.embedded.errors import ModelError
from reef.engines.embedded.model import Model
from reef.engines.embedded.weights import expected_shapes, load_weights

FAMILIES = ("qwen3-a", "qwen3-untied", "qwen2", "qwen2-tied", "llama", "llama3")
PROMPTS = [[(5 * i + j * j) % 290 for j in range(4 + 90 * i)] for i in range(3)]


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_prefill_and_decode_agree_with_transformers(name, model_dir, reference) -> None:
    path = model_dir(name)
    arch = read_architecture(path)
    model = Model(arch, load_weights(path, arch, torch.float32))
    cache = KVCache(arch, torch.float32, 4, 4096)
    cache.reserve(3, 300, 0)
    ids = torch.zeros(3, max(map(len, PROMPTS)), dtype=torch.int64)
    for row, prompt in enumerate(PROMPTS):
        ids[row, : len(prompt)] = torch.tensor(prompt)
    hidden = model.prefill(ids, cache, torch.tensor([0, 1, 2]), torch.tensor([0, 1, 2]))
    sequences = [list(prompt) for prompt in PROMPTS]
    last = torch.tensor([len(prompt) - 1 for prompt in PROMPTS])
    logits = model.logits(hidden[torch.arange(3), last])
    for step in range(4):
        for row, sequence in enumerate(sequences):
            ours = torch.log_softmax(logits[row], -1)
            assert torch.allclose(ours, reference(path, sequence)[-1], atol=1e-4)
        tokens = torch.tensor([17, 200, 3 + step])
        last = last + 1
        logits = model.decode(tokens, last, cache, int(last.max()) + 1)
        for sequence, token in zip(sequences, tokens.tolist(), strict=True):
            sequence.append(token)


@torch.inference_mode()
def test_growing_and_moving_the_cache_keeps_its_contents(model_dir) -> None:
    arch = read_architecture(model_dir("qwen3-a"))
    cache = KVCache(arch, torch.float32, 4, 2048)
    cache.reserve(2, 100, 0)
    kv = torch.arange(2 * 2 * arch.num_kv_heads * 5 * arch.head_dim).float()
    kv = kv.view(2, 2, arch.num_kv_heads, 5, arch.head_dim)
    for layer in range(arch.num_layers):
        cache.store_prompts(layer, torch.tensor([0, 1]), torch.tensor([0, 1]), kv)
    cache.reserve(2, 1000, 2)
    cache.move(1, 0, 5)
    new = torch.zeros(2 * arch.num_kv_heads, arch.head_dim)
    keys, values = cache.append(0, cache.slots(torch.tensor([5])), new, 1, 6)
    assert torch.equal(keys[:, :5], kv[0, 1])
    assert torch.equal(values[:, :5], kv[1, 1])
    assert not keys[:, 5].any()
    assert not cache.append(0, cache.slots(torch.tensor([5])), new, 1, 900)[0][:, 6:].any()  # never garbage


def test_the_cache_is_bounded_by_rows_and_by_padded_tokens(model_dir) -> None:
    cache = KVCache(read_architecture(model_dir("qwen3-a")), torch.float32, 4, 1000)
    assert cache.fits(3, 256)
    assert not cache.fits(4, 256)  # 4 x 256 > 1000
    assert cache.fits(1, 1000)
    assert not cache.fits(1, 1001)


def test_bfloat16_runs_and_stays_near_float32(model_dir, reference) -> None:
    path = model_dir("qwen3-a")
    arch = read_architecture(path)
    model = Model(arch, load_weights(path, arch, torch.bfloat16))
    none = torch.zeros(0, dtype=torch.int64)
    with torch.inference_mode():
        hidden = model.prefill(torch.tensor([PROMPTS[1]]), KVCache(arch, torch.bfloat16, 1, 256), none, none)
        ours = torch.log_softmax(model.logits(hidden[0]), -1)
    assert ours.dtype == torch.float32
    assert (ours - reference(path, PROMPTS[1])).abs().mean() < 0.1


def test_shards_are_put_together(copy_model, model_dir) -> None:
    path = copy_model("qwen3-a")
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    index = {}
    for shard, part in (("one.safetensors", names[::2]), ("two.safetensors", names[1::2])):
        save_file({name: tensors[name] for name in part}, path / shard)
        index |= dict.fromkeys(part, shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    arch = read_architecture(path)
    whole = load_weights(model_dir("qwen3-a"), arch, torch.float32)
    sharded = load_weights(path, arch, torch.float32)
    assert torch.equal(whole.embedding, sharded.embedding)
    assert torch.equal(whole.layers[1].qkv, sharded.layers[1].qkv)
    (path / "two.safetensors").unlink()
    with pytest.raises(ModelError, match=r"two\.safetensors"):
        load_weights(path, arch, torch.float32)


def test_every_tensor_of_a_saved_model_is_expected(model_dir) -> None:
    for name in FAMILIES:
        saved = load_file(model_dir(name) / "model.safetensors")
        shapes = {key: tuple(value.shape) for key, value in saved.items()}
        assert shapes == expected_shapes(read_architecture(model_dir(name)))


def _edit_config(path, **changes) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mixtral"}, "supported: qwen3, qwen2, llama"),
        ({"model_type": None}, "supported: qwen3, qwen2, llama"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "dynamic"),
    ],
)
def test_what_the_forward_pass_has_not_is_refused(copy_model, changes, said) -> None:
    path = copy_model("qwen3-a")
    _edit_config(path, **changes)
    with pytest.raises(ModelError, match=said):
        read_architecture(path)


def test_a_directory_without_or_with_a_broken_config_is_refused(tmp_path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        read_architecture(tmp_path)


def test_damaged_weights_are_refused_with_the_reason(copy_model) -> None:
    path = copy_model("qwen3-a")
    arch = read_architecture(path)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    tensors = load(whole)  # a copy: load_file maps the file that is damaged below
    name = "model.layers.1.mlp.down_proj.weight"

    def refused(match: str) -> None:
        with pytest.raises(ModelError, match=match):
            load_weights(path, arch, torch.float32)

    file.write_bytes(whole[: len(whole) // 2])
    refused("cannot read")
    file.write_bytes(b"")
    refused("cannot read")
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    refused(f"lacks tensors: {name}")
    save_file({**tensors, "model.layers.9.extra": torch.zeros(1)}, file)
    refused("unexpected tensors: model.layers.9.extra")
    save_file({**tensors, name: torch.zeros(3, 3)}, file)
    refused("shape")
    save_file({**tensors, name: tensors[name] * np.nan}, file)
    refused("NaN")
    file.unlink()
    refused("neither")
