"""A checkpoint that one layout wrote goes on under another: the same weights and moments, and the same next steps."""

import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from reef.errors import LoadFailedError
from reef.training.actor import WorkerSpec
from reef.training.settings import settings
from reef.types import Batch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

Move = tuple[str, int, dict[str, int], bool]
"""The checkpoint that is gone on from, ranks, layout, whether the optimizer is distributed."""
FLOAT32: dict[str, Move] = {
    "tensor": ("", 2, {"tensor": 2}, False),
    "one": ("tensor", 1, {}, False),
    "pipeline": ("one", 2, {"pipeline": 2}, False),
    "forth": ("pipeline", 2, {"tensor": 2}, False),
    "shared": ("forth", 2, {"data": 2}, True),
    "data": ("shared", 2, {"data": 2}, False),
    "again": ("data", 2, {"data": 2}, True),
    "back": ("again", 2, {"tensor": 2}, False),
}
BFLOAT16: dict[str, Move] = {
    "tensor": ("", 2, {"tensor": 2}, False),
    "one": ("tensor", 1, {}, False),
    "shared": ("one", 2, {"data": 2}, True),
    "pipeline": ("shared", 2, {"pipeline": 2}, False),
    "back": ("pipeline", 2, {"tensor": 2}, False),
}
MOVES = {"float32": FLOAT32, "bfloat16": BFLOAT16}


@dataclass(frozen=True)
class Answer:
    """What a rank found under one layout."""

    digest: str  # right after the restore
    tensors: dict[str, Any]  # of the checkpoint written then, whole, as Megatron itself reads them
    metrics: list[dict[str, float]]  # of the steps that followed
    refused: str  # what was said of a checkpoint of the other dtype


def run_rank(rank: int, plan: list[tuple[str, WorkerSpec]], batches: list[Batch], root: Path, answers: Any) -> None:
    from megatron.core import dist_checkpointing

    from reef.training.worker import MegatronWorker

    for name, spec in plan:
        if rank >= spec.world_size:
            continue
        worker = MegatronWorker(spec)
        dtype, _, move = name.partition("-")
        before, here = MOVES[dtype][move][0], root / name
        if before:
            assert worker.restore(root / f"{dtype}-{before}") == 2
        else:
            for batch in batches[:2]:
                worker.step(batch)
        worker.save(here)
        found = dist_checkpointing.load_plain_tensors(str(here))
        restored = worker.digest()
        metrics = [worker.step(batch).metrics for batch in batches[2:]]
        trained = worker.digest()
        assert worker.restore(here) == 2
        assert worker.digest() == restored
        assert [worker.step(batch).metrics for batch in batches[2:]] == metrics
        assert worker.digest() == trained  # under the same layout, bit for bit
        refused = ""
        if dtype == "bfloat16" and move == "one":
            with pytest.raises(LoadFailedError) as error:
                worker.restore(root / "float32-one")
            refused = error.value.message
            assert worker.digest() == trained
        tensors = {key: value.float().numpy() for key, value in found.items() if torch.is_tensor(value)}
        answers.put((name, rank, Answer(restored, tensors, metrics, refused)))
        worker.close()


def test_weights_and_moments_survive_every_change_of_layout_and_the_next_steps_are_the_same(
    make_model: Callable[..., Path], make_batch: Callable[..., Batch], config: Any, tmp_path: Path
) -> None:
    batches = [make_batch(seed=seed, data_ranks=2, noise=0.05) for seed in range(4)]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = []
    for rank in (0, 1):
        plan = [
            (f"{dtype}-{name}", spec_of(rank, f"{dtype}-{name}", dtype, move, make_model(), config, tmp_path))
            for dtype, moves in MOVES.items()
            for name, move in moves.items()
        ]
        args = (rank, plan, batches, tmp_path, answers)
        processes.append(context.Process(target=run_rank, args=args, daemon=True))
        processes[-1].start()
    found: dict[str, dict[int, Answer]] = {}
    for _ in range(sum(ranks for moves in MOVES.values() for _, ranks, _, _ in moves.values())):
        name, rank, answer = answers.get(timeout=60)
        found.setdefault(name, {})[rank] = answer
    for process in processes:
        process.join(20)
        assert process.exitcode == 0

    for dtype, rel in (("float32", 1e-5), ("bfloat16", 0.05)):
        first = found[f"{dtype}-tensor"][0]
        assert sum(".exp_avg." in key for key in first.tensors) == sum(".exp_avg_sq." in key for key in first.tensors)
        assert any(".fp32_param." in key for key in first.tensors) == (dtype == "bfloat16")
        for move in MOVES[dtype]:
            for answer in found[f"{dtype}-{move}"].values():
                assert answer.tensors.keys() == first.tensors.keys()
                for key, value in first.tensors.items():
                    assert (answer.tensors[key] == value).all(), (dtype, move, key)
                for step, reference in zip(answer.metrics, first.metrics, strict=True):
                    for key, value in reference.items():
                        assert step[key] == pytest.approx(value, rel=rel, abs=rel), (dtype, move, key)
            if MOVES[dtype][move][1:] == MOVES[dtype]["tensor"][1:]:
                assert found[f"{dtype}-{move}"][0].digest == first.digest  # and the state of each rank is what it was
    refused = found["bfloat16-one"][0].refused
    assert "float32-one is of another trainer: dtype is torch.float32, expected torch.bfloat16" in refused


def spec_of(rank: int, name: str, dtype: str, move: Move, model: Path, config: Any, root: Path) -> WorkerSpec:
    _, ranks, layout, shared = move
    base = settings(config)
    changed = {
        "layout": base["layout"] | {"tensor": 1, "pipeline": 1, "data": 1} | layout,
        "optimizer": base["optimizer"] | {"use_distributed_optimizer": shared},
        "dtype": dtype,
    }
    return WorkerSpec(rank, ranks, model, root / f"{name}.store", base | changed, 4096)
