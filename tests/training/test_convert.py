"""Hugging Face -> Megatron -> Hugging Face, and what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from reef.config import Layout
from reef.errors import ConfigError
from reef.training.architecture import check_layout, read_architecture
from reef.training.manifest import content_id_of
from reef.training.weights import open_weights
from reef.training.worker import MegatronWorker

MakeModel = Callable[..., Path]
MakeWorker = Callable[..., MegatronWorker]
IDS = np.arange(20, dtype=np.int32) * 3


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
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
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(IDS.astype(np.int64))[None]).logits[0, :-1]
    expected = logits.log_softmax(-1).gather(-1, torch.from_numpy(IDS[1:].astype(np.int64))[:, None])[:, 0]
    assert found is not None
    assert published is not None
    np.testing.assert_allclose(found[0], expected, atol=1e-4)
    assert published.content_id == content_id_of(path)
    assert ("lm_head.weight" in load_file(tmp_path / "r1" / "model.safetensors")) is not tied


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
        ({"model_type": "mamba"}, "model_type is 'mamba'; Reef trains llama, qwen2, qwen3"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary type is 'yarn'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is set"),
        ({"use_sliding_window": True}, "use_sliding_window is set"),
        ({"vocab_size": None}, "vocab_size is missing"),
    ],
)
def test_a_model_that_cannot_be_converted_is_refused_by_name(
    make_model: MakeModel, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    values = json.loads((make_model() / "config.json").read_text()) | changes
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


def test_weights_that_contradict_the_config_are_refused(
    make_model: MakeModel, make_worker: MakeWorker, tmp_path: Path
) -> None:
    path = tmp_path / "base"
    shutil.copytree(make_model(), path)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"intermediate_size": 64}))
    with pytest.raises(ConfigError, match=r"mlp\.gate_proj\.weight \[48, 32\].* do not fit config\.json"):
        make_worker(path)


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
    with pytest.raises(ConfigError, match=r"qwen3 model lacks model\.layers\.1\.self_attn\.q_norm\.weight"):
        make_worker(path)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tensor": 4}, r"tensor is 4, which does not divide the model's 2 key-value heads"),
        ({"pipeline": 3}, r"pipeline is 3, which does not divide the model's 2 layers"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(
    make_model: MakeModel, layout: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_layout(read_architecture(make_model()), Layout.model_validate(layout))
