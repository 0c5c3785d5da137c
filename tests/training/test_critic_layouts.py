"""A critic beside the policy under every kind of layout: steps as on one rank, checkpoints that go from one to another.

Two processes take one layout after another. Under each they step from the base model, and then go on from the
checkpoint that the layout before it left.
"""

import multiprocessing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from reef.config import Config
from reef.methods.base import build as build_method
from reef.training.actor import WorkerSpec
from reef.training.settings import settings
from reef.types import Batch, Floats
from tests.training.plain_sao import method_settings, sao_batch

MakeModel = Callable[..., Path]
MakeBatch = Callable[..., Batch]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SHARDED = {"use_distributed_optimizer": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
Layout = tuple[Mapping[str, Any], Mapping[str, Any]]
DENSE: dict[str, Layout] = {
    "one rank": ({}, {}),
    "tensor 2": ({"tensor": 2}, {}),
    "pipeline 2": ({"pipeline": 2}, {}),
    "data 2, distributed optimizer": ({"data": 2}, SHARDED),
    "tensor 2, sequence": ({"tensor": 2, "sequence_parallel": True}, {}),
    "data 2": ({"data": 2}, {}),
    "data 2, distributed optimizer, overlapped": ({"data": 2}, SHARDED | {"overlap_grad_reduce": True}),
    "one rank again, recomputed": ({}, RECOMPUTED),
}
FROZEN: dict[str, Layout] = {
    "one rank": ({}, {}),
    "data 2, distributed optimizer": ({"data": 2}, SHARDED),
    "tensor 2, sequence, recomputed": ({"tensor": 2, "sequence_parallel": True}, RECOMPUTED),
}
EXPERTS: dict[str, Layout] = {
    "one rank": ({}, {}),
    "expert 2, distributed optimizer": ({"data": 2, "expert": 2}, SHARDED),
    "tensor 2, sequence, expert 2": ({"tensor": 2, "sequence_parallel": True, "expert": 2}, {}),
}
HALF: dict[str, Layout] = {
    "one rank": ({}, {}),
    "data 2, distributed optimizer": ({"data": 2}, SHARDED),
    "tensor 2, sequence": ({"tensor": 2, "sequence_parallel": True}, {}),
}
FAMILIES = {"dense": DENSE, "frozen": FROZEN, "experts": EXPERTS, "half": HALF}


@dataclass(frozen=True)
class Task:
    """What every rank does under one layout."""

    family: str
    name: str
    before: str | None  # the layout whose checkpoint is gone on from; None: the one just written
    spec: WorkerSpec  # of rank 0
    batches: list[Batch]


@dataclass(frozen=True)
class Answer:
    """What a rank found."""

    metrics: list[dict[str, float]]  # of the steps from the base model
    values: list[Floats]  # of the critic after them
    tensors: dict[str, Any]  # of the checkpoint restored from, written again under this layout
    later: list[dict[str, float]]  # of steps from that checkpoint
    later_values: list[Floats]


def run_rank(rank: int, tasks: list[Task], root: Path, answers: Any) -> None:
    from megatron.core import dist_checkpointing

    from reef.training.worker import MegatronWorker

    for task in tasks:
        if rank >= task.spec.world_size:
            continue
        worker = MegatronWorker(replace(task.spec, rank=rank))
        here = root / f"{task.family} {task.name}"
        new = worker.digest()
        metrics = [dict(worker.step(batch).metrics) for batch in task.batches[:2]]
        learned = values_of(worker, task.batches[0])
        worker.publish(f"{task.family} {task.name}", root / "weights")
        if task.before is not None:
            worker.restore(root / f"{task.family} {task.before}")
        worker.save(here)
        saved = worker.digest()
        tensors = dist_checkpointing.load_plain_tensors(str(here))
        later = [dict(worker.step(batch).metrics) for batch in task.batches[2:]]
        later_values, trained = values_of(worker, task.batches[0]), worker.digest()
        worker.restore(here)
        assert worker.digest() == saved
        assert [dict(worker.step(batch).metrics) for batch in task.batches[2:]] == later
        assert worker.digest() == trained  # under the same layout, bit for bit
        worker.reset()
        assert worker.digest() == new
        held = {key: value.float().numpy() for key, value in tensors.items() if torch.is_tensor(value)}
        answers.put((task.family, task.name, rank, Answer(metrics, learned, held, later, later_values)))
        worker.close()


def values_of(worker: Any, batch: Batch) -> list[Floats]:
    """The critic's values after each token of each sample, which every rank has."""
    return [view.values for view in worker._learner._views(batch, build_method(batch.settings["method"]))]


Found = dict[str, dict[str, list[Answer]]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("critics")


@pytest.fixture(scope="module")
def found(make_model: MakeModel, make_batch: MakeBatch, config: Config, root: Path) -> Found:
    """The answers of all ranks, by family and layout."""
    dense = make_model(num_key_value_heads=4)
    experts = make_model("qwen3_moe", num_key_value_heads=4)
    kl = {"kl": "loss", "kl_coef": 0.05}
    tasks = [
        *plan("dense", dense, kl, make_batch, config, root),
        *plan("frozen", dense, {"critic_freeze": "attention"}, make_batch, config, root),
        *plan("experts", experts, {}, make_batch, config, root),
        *plan("half", make_model(num_key_value_heads=4, dtype="bfloat16"), kl, make_batch, config, root, "bfloat16"),
    ]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=run_rank, args=(rank, tasks, root, answers), daemon=True) for rank in (0, 1)]
    for process in processes:
        process.start()
    found: Found = {}
    for _ in range(sum(task.spec.world_size for task in tasks)):
        family, name, _, answer = answers.get(timeout=100)
        found.setdefault(family, {}).setdefault(name, []).append(answer)
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    return found


def plan(
    family: str,
    model: Path,
    method: dict[str, Any],
    make_batch: MakeBatch,
    config: Config,
    root: Path,
    dtype: str = "float32",
) -> list[Task]:
    """The tasks of a family's layouts: each goes on from the checkpoint of the one before."""
    tasks: list[Task] = []
    for name, (layout, options) in FAMILIES[family].items():
        base = settings(config)
        changed = base | {
            "method": method_settings(**method),
            "layout": base["layout"] | {"tensor": 1, "pipeline": 1, "data": 1} | layout,
            "optimizer": base["optimizer"] | options,
            "dtype": dtype,
        }
        shapes = ({"num_samples": 7, "budget_tokens": 60}, {"data_ranks": 2}, {"budget_tokens": 30, "num_samples": 7})
        batches = [
            sao_batch(make_batch, seed=seed, noise=0.1, method=method, optimizer=changed["optimizer"], **shape)
            for seed, shape in enumerate(shapes)
        ]
        ranks = 2 if any(size == 2 for size in layout.values()) else 1
        spec = WorkerSpec(0, ranks, model, root / f"{family} {name}.store", changed, 4096)
        tasks.append(Task(family, name, tasks[-1].name if tasks else None, spec, batches))
    return tasks


CASES = [(family, name) for family, layouts in FAMILIES.items() for name in layouts]


@pytest.mark.parametrize(("family", "name"), CASES)
def test_policy_and_critic_learn_under_a_layout_as_on_one_rank(
    found: Found, root: Path, family: str, name: str
) -> None:
    expected = found[family]["one rank"][0]
    rel, close = (1e-5, 1e-4) if family != "half" else (0.05, 0.05)
    first = found[family][name][0]
    for answer in found[family][name]:
        assert answer.metrics == first.metrics  # the same on every rank
        agree(answer.metrics, expected.metrics, rel)
        np.testing.assert_allclose(np.concatenate(answer.values), np.concatenate(expected.values), atol=close)
    assert all("critic/explained_variance" in step and "entropy" in step for step in first.metrics)
    if family != "half":
        trained, reference = (
            load_file(root / "weights" / f"{family} {layout}" / "model.safetensors") for layout in (name, "one rank")
        )
        for weight, tensor in reference.items():
            torch.testing.assert_close(trained[weight], tensor, atol=5e-5, rtol=1e-3)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_critic_goes_on_from_a_checkpoint_of_another_layout(found: Found, family: str, name: str) -> None:
    expected = found[family]["one rank"][0]
    rel, close = (1e-5, 1e-4) if family != "half" else (0.05, 0.05)
    assert {key.split(".")[0] for key in expected.tensors} >= {"critic", "decoder", "embedding", "optimizer"}
    assert any(key.startswith("optimizer.state.exp_avg.critic.output_layer") for key in expected.tensors)
    for answer in found[family][name]:
        assert answer.tensors.keys() == expected.tensors.keys()
        for key, value in expected.tensors.items():
            np.testing.assert_array_equal(answer.tensors[key], value, err_msg=key)
        agree(answer.later, expected.later, rel)
        np.testing.assert_allclose(
            np.concatenate(answer.later_values), np.concatenate(expected.later_values), atol=close
        )


def agree(metrics: list[dict[str, float]], expected: list[dict[str, float]], rel: float) -> None:
    for step, reference in zip(metrics, expected, strict=True):
        assert step.keys() == reference.keys()
        for key, value in reference.items():
            assert step[key] == pytest.approx(value, rel=rel, abs=1e-6 if rel < 1e-3 else rel), key
