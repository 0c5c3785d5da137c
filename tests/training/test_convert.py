"""Hugging Face -> Megatron -> Hugging Face, and what is refused."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from reef.errors import ConfigError
from reef.headers import read_header
from reef.training.architecture import LLAMA3_ROPE, read_architecture
from reef.training.manifest import content_id_of
from reef.training.tensors import check_weights
from reef.training.weights import open_weights
from reef.training.worker import MegatronWorker

MakeModel = Callable[..., Path]
MakeWorker = Callable[..., MegatronWorker]
IDS = np.arange(20, dtype=np.int32) * 3


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama", "qwen3_moe"])
def test_a_model_comes_back_bit_for_bit_and_computes_the_same(
    make_model: MakeModel, make_worker: MakeWorker, tmp_path: Path, architecture: str, tied: bool
) -> None:
    path = make_model(architecture, tied=tied)
    worker = make_worker(path)
    try:
        found = worker.logprobs([IDS], 1.0)
        published = worker.publish("r1", tmp_path)
    finally:
        worker.close()
    assert found is not None
    assert published is not None
    np.testing.assert_allclose(found[0], transformers_logprobs(path, IDS), atol=1e-4)
    assert published.content_id == content_id_of(path)
    assert ("lm_head.weight" in load_file(tmp_path / "r1" / "model.safetensors")) is not tied


def transformers_logprobs(path: Path, ids: np.ndarray, **changes: Any) -> np.ndarray:
    """Log-probabilities [T-1] of ids[1:], by transformers in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **changes)
    ids_T = torch.from_numpy(ids.astype(np.int64))
    with torch.no_grad():
        logits_TV = model(input_ids=ids_T[None]).logits[0, :-1]
    found: np.ndarray = logits_TV.log_softmax(-1).gather(-1, ids_T[1:, None])[:, 0].numpy()
    return found


def test_llama_3s_rotary_embedding_is_that_of_transformers(make_model: MakeModel, make_worker: MakeWorker) -> None:
    plain = {"rope_type": "default", "rope_theta": 5e5}
    rope = plain | LLAMA3_ROPE | {"rope_type": "llama3", "factor": 32.0}
    ids = np.random.default_rng(0).integers(0, 96, 1200).astype(np.int32)
    path = make_model("llama", max_position_embeddings=131072, rope_parameters=rope)
    worker = make_worker(path)
    try:
        found = worker.logprobs([ids], 1.0)
    finally:
        worker.close()
    assert found is not None
    expected = transformers_logprobs(path, ids)
    np.testing.assert_allclose(found[0], expected, atol=1e-4)
    assert abs(transformers_logprobs(path, ids, rope_parameters=plain) - expected).max() > 1e-2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_files_and_dtypes_of_the_base_are_kept(
    make_model: MakeModel, make_worker: MakeWorker, tmp_path: Path, dtype: str
) -> None:
    path = make_model(dtype=dtype, shard="20KB")
    worker = make_worker(path)
    try:
        published = worker.publish("r1", tmp_path)
    finally:
        worker.close()
    assert published is not None
    names = {file.name for file in path.glob("*.safetensors*")}
    assert len(names) > 3
    assert names == {file.name for file in (tmp_path / "r1").glob("*.safetensors*")}
    assert published.content_id == content_id_of(path)


def test_a_tied_model_that_holds_its_output_layer_keeps_it(
    make_model: MakeModel, make_worker: MakeWorker, tmp_path: Path
) -> None:
    path = tmp_path / "base"
    shutil.copytree(make_model(), path)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    worker = make_worker(path)
    try:
        published = worker.publish("r1", tmp_path)
    finally:
        worker.close()
    assert published is not None
    assert published.content_id == content_id_of(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'; Reef trains llama, qwen2, qwen3, qwen3_moe"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary type is 'yarn'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is set"),
        ({"use_sliding_window": True}, "use_sliding_window is set"),
        ({"vocab_size": None}, "vocab_size is missing"),
        (
            {"rope_parameters": LLAMA3_ROPE | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}},
            "rotary low_freq_factor is 2.0; Megatron's 'llama3' has 1.0",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
    ],
)
def test_a_model_that_cannot_be_converted_is_refused_by_name(
    make_model: MakeModel, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    refused(make_model() / "config.json", tmp_path, changes, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_local_experts": None}, "num_experts is missing"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5, expected 1 to 4"),
        ({"num_experts_per_tok": 1}, "norm_topk_prob is set with one expert per token"),
        ({"mlp_only_layers": [0, 1]}, "no layer has experts"),
    ],
)
def test_experts_that_cannot_be_converted_are_refused_by_name(
    make_model: MakeModel, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    refused(make_model("qwen3_moe") / "config.json", tmp_path, changes, message)


def test_experts_are_counted_by_the_name_of_either_transformers(make_model: MakeModel, tmp_path: Path) -> None:
    values = json.loads((make_model("qwen3_moe") / "config.json").read_text())
    values["num_experts"] = values.pop("num_local_experts")  # as every Qwen3-MoE on the hub has it
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_architecture(tmp_path) == read_architecture(make_model("qwen3_moe"))


def refused(config: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    values = json.loads(config.read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    with pytest.raises(ConfigError, match=message):
        read_architecture(tmp_path)


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no model at .*config\.json is missing"):
        read_architecture(tmp_path)
    with pytest.raises(ConfigError, match="holds neither"):
        open_weights(tmp_path)


def test_a_missing_part_of_the_weights_is_named(make_model: MakeModel, tmp_path: Path) -> None:
    path = tmp_path / "base"
    shutil.copytree(make_model(shard="20KB"), path)
    next(path.glob("*.safetensors")).unlink()
    with pytest.raises(ConfigError, match="which is missing"):
        open_weights(path)


@pytest.mark.parametrize("damage", ["cut short", "no safetensors", "an index without its map", "integers"])
def test_a_damaged_directory_is_refused_by_the_name_of_the_file(
    make_model: MakeModel, tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "base"
    shutil.copytree(make_model(shard="20KB"), path)
    first = min(path.glob("*.safetensors"))
    if damage == "cut short":
        os.truncate(first, first.stat().st_size - 1)
        message = f"{first.name}: it has .* bytes, its header says .*: fetch it again"
    elif damage == "no safetensors":
        first.write_bytes(b"version https://git-lfs.github.com/spec/v1")
        message = f"cannot read .*{first.name}: it is not a safetensors file"
    elif damage == "integers":
        save_file({"model.norm.weight": torch.zeros(32, dtype=torch.int64)}, first)
        message = f"{first.name}: model.norm.weight is I64; Reef trains F32, F16, BF16"
    else:
        (path / "model.safetensors.index.json").write_text("[]")
        message = r"cannot read .*index\.json.* expected a weight_map"
    with pytest.raises(ConfigError, match=message):
        check_weights(path, read_architecture(path))


def test_a_whole_directory_passes_and_no_tensor_is_read(make_model: MakeModel, tmp_path: Path) -> None:
    path = tmp_path / "base"
    shutil.copytree(make_model("qwen3_moe", tied=False, shard="20KB"), path)
    for file in path.glob("*.safetensors"):
        header = file.read_bytes()[: len(read_header(file).raw)]
        size = file.stat().st_size
        file.write_bytes(header)
        os.truncate(file, size)
    check_weights(path, read_architecture(path))


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (
            "qwen3",
            {"intermediate_size": 64},
            r"0\.mlp\.down_proj\.weight is \[32, 48\], config\.json says \[32, 64\];.* and 3 more",
        ),
        ("qwen3", {"num_hidden_layers": 1}, r"does not train: model\.layers\.1\..* and 8 more"),
        ("qwen3", {"num_hidden_layers": 3}, r"lacks model\.layers\.2\.input_layernorm\.weight"),
        ("qwen3", {"tie_word_embeddings": False}, r"lacks lm_head\.weight"),
        ("qwen3_moe", {"num_local_experts": 6}, r"lacks model\.layers\.0\.mlp\.experts\.4\.down_proj\.weight"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"lacks model\.layers\.1\.mlp\.down_proj\.weight"),
        ("qwen3_moe", {"moe_intermediate_size": 8}, r"0\.mlp\.experts\.0\.down_proj\.weight is \[32, 24\]"),
    ],
)
def test_weights_that_contradict_the_config_are_refused_from_their_headers(
    make_model: MakeModel, tmp_path: Path, architecture: str, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "base"
    shutil.copytree(make_model(architecture), path)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | changes))
    with pytest.raises(ConfigError, match=message) as found:
        check_weights(path, read_architecture(path))
    assert found.value.param == "inference.model-path"


def test_tensors_that_are_missing_or_would_be_lost_are_named(
    make_model: MakeModel, make_worker: MakeWorker, tmp_path: Path
) -> None:
    path = tmp_path / "base"
    shutil.copytree(make_model(), path)
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"adapter.weight": torch.zeros(2)}, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"holds tensors that Reef does not train: adapter\.weight"):
        make_worker(path)
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"qwen3 model .* lacks model\.layers\.1\.self_attn\.q_norm\.weight"):
        make_worker(path)
