"""Releases on disk: complete or refused."""

import json
import shutil
from pathlib import Path

import pytest

from reef.errors import LoadFailedError
from reef.training import durable
from reef.training.manifest import content_id, read_manifest, verify
from reef.training.worker import MegatronWorker


@pytest.fixture
def release(worker: MegatronWorker, tmp_path: Path) -> Path:
    published = worker.publish("r1", tmp_path)
    assert published is not None
    return Path(published.path)


def test_a_release_is_a_complete_model_with_a_manifest(worker: MegatronWorker, release: Path) -> None:
    published = verify(release)
    assert published == read_manifest(release)
    assert published.release_id == "r1"
    assert published.probe == worker.probe()
    assert published.probe is not None
    assert len(published.probe.ids) == len(published.probe.logprobs) + 1 == 32
    names = {file.name for file in release.iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "manifest.json"}
    assert published.size_bytes == sum(f.stat().st_size for f in release.iterdir() if f.name != "manifest.json")


def test_equal_weights_have_equal_ids(worker: MegatronWorker, tmp_path: Path) -> None:
    first, second = worker.publish("r1", tmp_path), worker.publish("r2", tmp_path)
    assert first is not None
    assert second is not None
    assert first.content_id == second.content_id
    assert first.content_id.startswith("sha256:")
    assert content_id({"a.safetensors": "1"}) != content_id({"a.safetensors": "2"})
    assert content_id({"a.safetensors": "1", "config.json": "x"}) == content_id({"a.safetensors": "1"})


def test_publishing_again_replaces_what_was_left(worker: MegatronWorker, release: Path, tmp_path: Path) -> None:
    (release / "left over").write_text("by a crash before the commit")
    (tmp_path / ".r1.partial").mkdir()
    (tmp_path / ".r1.partial" / "half").write_text("by a crash during a publication")
    worker.publish("r1", tmp_path)
    assert not (release / "left over").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["r1"]
    verify(release)


def test_a_half_written_release_is_refused(release: Path) -> None:
    (release / "manifest.json").unlink()
    with pytest.raises(LoadFailedError, match=r"no manifest\.json, so it was never finished"):
        read_manifest(release)
    with pytest.raises(LoadFailedError, match="never finished"):
        read_manifest(release.parent / "not there")


def test_a_missing_and_a_cut_file_are_refused(release: Path) -> None:
    weights = release / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-10])
    with pytest.raises(LoadFailedError, match=rf"model\.safetensors has {len(data) - 10} bytes, expected {len(data)}"):
        read_manifest(release)
    weights.unlink()
    with pytest.raises(LoadFailedError, match=r"model\.safetensors is missing"):
        read_manifest(release)


def test_a_changed_byte_is_found_by_verification(release: Path) -> None:
    weights = release / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    read_manifest(release)
    with pytest.raises(LoadFailedError, match=r"model\.safetensors has sha256 .*, expected"):
        verify(release)


@pytest.mark.parametrize(("text", "message"), [("{", "cannot read"), ("{}", "lacks content_id, files, probe")])
def test_a_broken_manifest_is_refused(release: Path, text: str, message: str) -> None:
    (release / "manifest.json").write_text(text)
    with pytest.raises(LoadFailedError, match=message):
        read_manifest(release)


def test_a_manifest_that_contradicts_itself_is_refused(release: Path) -> None:
    path = release / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"content_id": "sha256:0"}))
    with pytest.raises(LoadFailedError, match="contradicts itself"):
        verify(release)


def test_a_directory_takes_its_name_only_when_finished(tmp_path: Path) -> None:
    partial = durable.begin(tmp_path / "x")
    durable.write(partial / "file", b"new")
    assert not (tmp_path / "x").exists()
    durable.finish(partial, tmp_path / "x")
    assert (tmp_path / "x" / "file").read_bytes() == b"new"
    shutil.rmtree(tmp_path / "x")
