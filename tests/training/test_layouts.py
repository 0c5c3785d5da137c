"""Two ranks in two processes over gloo against one, on the same batches."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from reef.errors import LoadFailedError
from reef.training.actor import WorkerSpec
from reef.training.manifest import read_manifest
from reef.training.settings import settings
from reef.types import Batch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

LAYOUTS = {"tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}, "data": {"data": 2}}
HALF = {"half": {"pipeline": 2}}  # in bfloat16, which one rank in float32 says nothing about


def run_rank(rank: int, specs: list[WorkerSpec], batches: list[Batch], directory: Path, answers: Any) -> None:
    """Take the batches in each layout in turn; one pair of processes serves them all."""
    from reef.training.worker import MegatronWorker

    for spec in specs:
        worker = MegatronWorker(spec)
        name = spec.rendezvous.stem
        scored = worker.logprobs([sample.tokens for sample in batches[0].samples], 0.7)
        metrics = [worker.step(batch).metrics for batch in batches]
        worker.publish(name, directory)
        worker.save(directory / f"checkpoint-{name}")
        again = worker.step(batches[0]).metrics
        assert worker.restore(directory / f"checkpoint-{name}") == len(batches)
        resumed = worker.step(batches[0]).metrics
        go_back(worker, batches, name, directory)
        answers.put((name, rank, scored, metrics, again, resumed))
        worker.close()


def go_back(worker: Any, batches: list[Batch], name: str, directory: Path) -> None:
    """Forth and back again by each of the ways: every rank finds the same, and no rank waits for another in vain."""
    trained = worker.digest()
    worker.load_weights(directory / name)
    same_content(worker, name, directory)
    worker.reset()
    new = worker.digest()
    for batch in batches:
        worker.step(batch)
    same_content(worker, name, directory)
    worker.restore(directory / f"checkpoint-{name}")
    saved = worker.digest()
    worker.step(batches[0])
    assert worker.digest() == trained
    for load in (worker.restore, worker.load_weights):
        with pytest.raises(LoadFailedError, match=r"nowhere: no .*, so it was never finished"):
            load(directory / "nowhere")
    worker.restore(directory / f"checkpoint-{name}")
    assert worker.digest() == saved
    worker.reset()
    assert worker.digest() == new
    assert len({trained, saved, new}) == 3


def same_content(worker: Any, name: str, directory: Path) -> None:
    published = worker.publish(f"{name}-again", directory)
    assert published is None or published.content_id == read_manifest(directory / name).content_id


def spec_of(rank: int, world_size: int, layout: dict[str, int], rendezvous: Path, model: Path, base: Any) -> WorkerSpec:
    whole = {"tensor": 1, "pipeline": 1, "data": 1} | layout
    dtype = "bfloat16" if rendezvous.stem in HALF else "float32"
    return WorkerSpec(rank, world_size, model, rendezvous, base | {"layout": whole, "dtype": dtype}, 4096)


def test_two_ranks_equal_one_in_every_layout(
    make_model: Callable[..., Path], make_batch: Callable[..., Batch], config: Any, tmp_path: Path
) -> None:
    model, base = make_model(), settings(config)
    # Seven samples on two data ranks (rLLM 506), and a single microbatch that leaves one rank empty.
    batches = [
        make_batch(seed=1, num_samples=7, budget_tokens=60),
        make_batch(seed=2, data_ranks=2),
        make_batch(seed=3),
    ]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()

    def start(rank: int, world_size: int, layouts: dict[str, dict[str, int]]) -> Any:
        specs = [
            spec_of(rank, world_size, layout, tmp_path / f"{n}.store", model, base) for n, layout in layouts.items()
        ]
        process = context.Process(target=run_rank, args=(rank, specs, batches, tmp_path, answers), daemon=True)
        process.start()
        return process

    processes = [start(0, 2, LAYOUTS | HALF), start(1, 2, LAYOUTS | HALF), start(0, 1, {"one": {}})]
    found: dict[str, dict[int, Any]] = {}
    for _ in range(2 * len(LAYOUTS | HALF) + 1):
        name, rank, *rest = answers.get(timeout=120)
        found.setdefault(name, {})[rank] = rest
    for process in processes:
        process.join(20)
        assert process.exitcode == 0

    expected_scores, expected_metrics, *_ = found["one"][0]
    start_weights = load_file(model / "model.safetensors")
    expected_weights = load_file(tmp_path / "one" / "model.safetensors")
    for name in LAYOUTS:
        scores = next(answer[0] for answer in found[name].values() if answer[0] is not None)
        for a, b in zip(scores, expected_scores, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        for _, metrics, again, resumed in found[name].values():
            assert again == resumed  # bit for bit
            for step, reference in zip(metrics, expected_metrics, strict=True):
                assert step.keys() == reference.keys()
                for key, value in reference.items():
                    assert step[key] == pytest.approx(value, rel=1e-5, abs=1e-6), (name, key)
        weights = load_file(tmp_path / name / "model.safetensors")
        assert weights.keys() == expected_weights.keys()
        change = np.concatenate([(expected_weights[n] - start_weights[n]).ravel() for n in start_weights])
        gap = np.concatenate([(expected_weights[n] - weights[n]).ravel() for n in start_weights])
        assert np.linalg.norm(gap) < 1e-3 * np.linalg.norm(change), name
