"""A release's bytes: what safetensors would write of the same tensors, however few are in memory at once."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from reef.training.gather import gather
from reef.training.publish import publish
from reef.training.worker import MegatronWorker
from reef.types import Batch, Published

MakeModel = Callable[..., Path]
MakeWorker = Callable[..., MegatronWorker]


@pytest.fixture(scope="module")
def trained(
    make_model: MakeModel, make_worker: MakeWorker, make_batch: Callable[..., Batch]
) -> Iterator[MegatronWorker]:
    """A worker on several files of bfloat16 that has trained one step in float32."""
    worker = make_worker(make_model("qwen3_moe", dtype="bfloat16", shard="20KB"))
    worker.step(make_batch(worker.logprobs, noise=0.2))
    yield worker
    worker.close()


def published(worker: MegatronWorker, release_id: str, directory: Path, part_bytes: int) -> Published:
    found = publish(worker._policy, worker._weights, None, release_id, directory, part_bytes=part_bytes)
    assert found is not None
    return found


def test_every_file_is_as_safetensors_writes_it(trained: MegatronWorker, tmp_path: Path) -> None:
    found = trained.publish("r1", tmp_path)
    assert found is not None
    files = sorted((tmp_path / "r1").glob("*.safetensors"))
    assert len(files) > 3
    for path in files:
        with safe_open(path, framework="pt") as file:
            assert path.read_bytes() == save(load_file(path), file.metadata())
    base = {name for name in trained._weights.files if not torch.equal(*both(trained, name, tmp_path / "r1"))}
    assert len(base) > 20  # it did train


def both(worker: MegatronWorker, name: str, release: Path) -> tuple[torch.Tensor, torch.Tensor]:
    return load_file(release / worker._weights.files[name])[name], worker._weights.read(name, None, 0, 1)


@pytest.mark.parametrize("part_bytes", [1, 5000])
def test_parts_of_any_size_give_the_same_release(trained: MegatronWorker, tmp_path: Path, part_bytes: int) -> None:
    whole, parts = (published(trained, f"r{size}", tmp_path, size) for size in (2**30, part_bytes))
    assert whole.content_id == parts.content_id
    assert whole.size_bytes == parts.size_bytes
    names = sorted(path.name for path in Path(whole.path).iterdir())
    assert names == sorted(path.name for path in Path(parts.path).iterdir())
    for name in set(names) - {"manifest.json"}:
        assert (Path(whole.path) / name).read_bytes() == (Path(parts.path) / name).read_bytes()


def test_without_the_disk_a_release_has_the_same_name_and_leaves_nothing(
    trained: MegatronWorker, tmp_path: Path
) -> None:
    written = trained.publish("r1", tmp_path / "on")
    hashed = trained.publish("r1", tmp_path / "off", False)
    assert written is not None
    assert hashed is not None
    assert hashed.content_id == written.content_id
    assert hashed.size_bytes == written.size_bytes
    assert hashed.probe == written.probe
    assert (hashed.on_disk, written.on_disk) == (False, True)
    assert hashed.path == str(tmp_path / "off" / "r1")
    assert not (tmp_path / "off").exists()


def test_tensors_are_gathered_by_name_in_the_order_asked_for(trained: MegatronWorker) -> None:
    names = [
        "model.norm.weight",
        "lm_head.weight",  # tied: not in the base's files, and nobody's parameter
        "model.layers.1.mlp.experts.3.up_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.embed_tokens.weight",
    ]
    found = gather(trained._policy, names)
    assert found is not None
    assert list(found) == names
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert found["model.layers.1.mlp.experts.3.up_proj.weight"].shape == (24, 32)
    assert found["model.layers.0.self_attn.k_proj.weight"].shape == (32, 32)
    with pytest.raises(KeyError):
        gather(trained._policy, ["model.layers.2.input_layernorm.weight"])
