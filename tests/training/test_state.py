"""Going back without new processes, and the digest that says whether two trainers are the same."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from reef.errors import LoadFailedError
from reef.training.worker import MegatronWorker
from reef.types import Batch

MakeModel = Callable[..., Path]
MakeBatch = Callable[..., Batch]
MakeWorker = Callable[..., MegatronWorker]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def worker(request: pytest.FixtureRequest, make_model: MakeModel, make_worker: MakeWorker) -> Iterator[MegatronWorker]:
    """A worker of each dtype, on a model stored in that dtype."""
    made = make_worker(make_model(dtype=request.param), dtype=request.param)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def base_weights(worker: MegatronWorker) -> None:
    worker.reset()


def content(worker: MegatronWorker, release_id: str, directory: Path) -> str:
    published = worker.publish(release_id, directory)
    assert published is not None
    return published.content_id


def moments(worker: MegatronWorker) -> list[torch.Tensor]:
    (part,) = worker._policy.optimizer.chained_optimizers
    return [state[name] for state in part.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq", "step")]


def main_weights(worker: MegatronWorker) -> list[torch.Tensor]:
    (part,) = worker._policy.optimizer.chained_optimizers
    return [parameter for group in part.optimizer.param_groups for parameter in group["params"]]


def test_a_releases_weights_come_back_and_nothing_else_moves(
    worker: MegatronWorker, make_batch: MakeBatch, tmp_path: Path
) -> None:
    for seed in (1, 2):
        worker.step(make_batch(seed=seed))
    first = content(worker, "a", tmp_path)
    for seed in (3, 4):
        worker.step(make_batch(seed=seed))
    assert content(worker, "b", tmp_path) != first
    kept, random = [value.clone() for value in moments(worker)], torch.get_rng_state()

    worker.load_weights(tmp_path / "a")
    assert content(worker, "again", tmp_path) == first
    assert all(torch.equal(now, before) for now, before in zip(moments(worker), kept, strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    names = [parameter for _, parameter in worker._policy.module.named_parameters()]
    held = {tuple(weight.flatten()[:8].float().tolist()) for weight in names}
    assert {tuple(weight.flatten()[:8].tolist()) for weight in main_weights(worker)} == held  # float32 copies followed
    assert worker.step(make_batch(seed=5)).step == 5
    assert content(worker, "c", tmp_path) != first


def test_only_a_complete_release_of_this_model_is_loaded(worker: MegatronWorker, tmp_path: Path) -> None:
    content(worker, "a", tmp_path)
    before = worker.digest()
    for name, damage, message in (
        ("cut", lambda path: (path / "manifest.json").unlink(), "never finished"),
        ("changed", lambda path: flip(path / "model.safetensors"), "has sha256"),
    ):
        shutil.copytree(tmp_path / "a", tmp_path / name)
        damage(tmp_path / name)
        with pytest.raises(LoadFailedError, match=f"release .*{name}: .*{message}"):
            worker.load_weights(tmp_path / name)
    assert worker.digest() == before


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_after_a_reset_a_worker_is_as_if_new(worker: MegatronWorker, make_batch: MakeBatch, tmp_path: Path) -> None:
    new, base = worker.digest(), content(worker, "base", tmp_path)
    results = [worker.step(make_batch(seed=seed)) for seed in (1, 2)]
    torch.rand(1)
    expected, trained = worker.digest(), content(worker, "trained", tmp_path)
    worker.step(make_batch(seed=3))

    worker.reset()
    assert (worker.digest(), content(worker, "again", tmp_path)) == (new, base)
    assert not any(value.any() for value in moments(worker))
    again = [worker.step(make_batch(seed=seed)) for seed in (1, 2)]
    torch.rand(1)
    assert [(r.step, r.metrics) for r in again] == [(r.step, r.metrics) for r in results]
    assert (worker.digest(), content(worker, "once more", tmp_path)) == (expected, trained)


def test_a_second_reset_undoes_what_was_drawn_since_the_first(worker: MegatronWorker) -> None:
    new = worker.digest()
    for _ in range(2):
        with get_cuda_rng_tracker().fork():
            torch.rand(1)
        assert worker.digest() != new
        worker.reset()
        assert worker.digest() == new


def test_a_restored_worker_has_the_digest_that_was_saved(
    worker: MegatronWorker, make_batch: MakeBatch, tmp_path: Path
) -> None:
    worker.step(make_batch(seed=1))
    worker.save(tmp_path / "one")
    saved = worker.digest()
    worker.step(make_batch(seed=2))
    later = worker.digest()
    assert later != saved
    worker.reset()
    worker.restore(tmp_path / "one")
    assert worker.digest() == saved
    worker.step(make_batch(seed=2))
    assert worker.digest() == later


def test_scoring_and_publishing_leave_the_digest(worker: MegatronWorker, make_batch: MakeBatch, tmp_path: Path) -> None:
    before = worker.digest()
    worker.probe()
    content(worker, "a", tmp_path)
    worker.save(tmp_path / "one")
    assert worker.digest() == before


@pytest.mark.parametrize("pick", [moments, main_weights])
def test_one_element_changes_the_digest(
    worker: MegatronWorker, make_batch: MakeBatch, pick: Callable[[MegatronWorker], list[Any]]
) -> None:
    worker.step(make_batch())
    found = {worker.digest()}
    tensors = pick(worker)
    with torch.no_grad():
        for tensor in tensors:
            tensor.view(-1)[-1] += 1.0
            found.add(worker.digest())
    assert len(found) == 1 + len(tensors)
    torch.rand(1)
    assert worker.digest() not in found
