"""Every layout against one rank, on the same batches: Ray actors over gloo, which take one layout after another."""

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import transformers
from safetensors.torch import load_file

from reef.config import Config
from reef.errors import LoadFailedError
from reef.training.actor import WorkerSpec
from reef.training.cluster import Trainer
from reef.training.manifest import read_manifest
from reef.training.settings import settings
from reef.types import Batch, Floats, StepResult

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

NUM_RANKS = 4
SHARDED: Mapping[str, Any] = {"use-distributed-optimizer": True}
RECOMPUTE: Mapping[str, Mapping[str, Any]] = {
    "uniform": {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 2},
    "block": {"recompute-granularity": "full", "recompute-method": "block", "recompute-num-layers": 1},
    "selective": {"recompute-granularity": "selective"},
}
LAYOUTS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "tensor 2": ({"tensor": 2}, {}),
    "pipeline 2": ({"pipeline": 2}, {}),
    "data 2": ({"data": 2}, {}),
    "data 2, distributed optimizer": ({"data": 2}, SHARDED),
    "data 2, overlapped": ({"data": 2}, {"overlap-grad-reduce": True}),
    "data 2, distributed optimizer, overlapped": ({"data": 2}, SHARDED | {"overlap-grad-reduce": True}),
    "one rank, distributed optimizer": ({}, SHARDED),
    "tensor 2, sequence": ({"tensor": 2, "sequence-parallel": True}, {}),
    "tensor 2, sequence, recomputed": ({"tensor": 2, "sequence-parallel": True}, RECOMPUTE["uniform"]),
    "tensor 4": ({"tensor": 4}, {}),
    "tensor 4, sequence": ({"tensor": 4, "sequence-parallel": True}, {}),
    "pipeline 4": ({"pipeline": 4}, {}),
    "data 4": ({"data": 4}, {}),
    "data 4, distributed optimizer": ({"data": 4}, SHARDED),
    "tensor 2 x pipeline 2": ({"tensor": 2, "pipeline": 2}, {}),
    "tensor 2 x pipeline 2, sequence": ({"tensor": 2, "pipeline": 2, "sequence-parallel": True}, {}),
    "tensor 2 x data 2": ({"tensor": 2, "data": 2}, {}),
    "tensor 2 x data 2, distributed optimizer": ({"tensor": 2, "data": 2}, SHARDED),
    "pipeline 2 x data 2": ({"pipeline": 2, "data": 2}, {}),
    "pipeline 2 x data 2, distributed optimizer, overlapped": (
        {"pipeline": 2, "data": 2},
        SHARDED | {"overlap-grad-reduce": True},
    ),
}
EXPERT_LAYOUTS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "expert 2, distributed optimizer, overlapped": (
        {"data": 2, "expert": 2},
        SHARDED | {"overlap-grad-reduce": True},
    ),
    "tensor 2 x data 2, expert 2, distributed optimizer": (
        {"tensor": 2, "sequence-parallel": True, "data": 2, "expert": 2},
        SHARDED,
    ),
    "tensor 2 x pipeline 2, sequence, expert 2, recomputed": (
        {"tensor": 2, "pipeline": 2, "sequence-parallel": True, "expert": 2},
        {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1},
    ),
}
HALF_LAYOUTS = (
    "tensor 2, sequence",
    "pipeline 2",
    "data 2, distributed optimizer",
    "tensor 2 x data 2, distributed optimizer",
)
MakeBatch = Callable[..., Batch]


@dataclass(frozen=True, slots=True)
class Group:
    """Actors that are the ranks of one layout."""

    workers: list[Any]
    config: Config
    model: Path

    def call(self, method: str, *args: Any) -> list[Any]:
        """Every rank's answer."""
        return ray.get([worker.call.remote(method, *args) for worker in self.workers], timeout=60)  # type: ignore[no-any-return]

    def first(self, method: str, *args: Any) -> Any:
        """The answer of the first rank that has one."""
        return next(answer for answer in self.call(method, *args) if answer is not None)


@dataclass(slots=True)
class Actors:
    """Four processes, and the model that they train if no other is named."""

    workers: list[Any]
    model: Path
    directory: Path
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @contextmanager
    def take(
        self,
        layout: Mapping[str, Any],
        options: Mapping[str, Any] = {},
        dtype: str = "float32",
        model: Path | None = None,
    ) -> Iterator[Group]:
        """The first of them in a layout."""
        training = {
            "layout": layout,
            "dtype": dtype,
            "options": {"lr": 1e-3, "weight-decay": 0.1, "clip-grad": 0.5, **options},
        }
        recipe = {"config": {"group-size": 4, "batch-size": 8}}
        config = Config.model_validate({"recipe": recipe, "training": training})
        group = Group(self.workers[: config.training.layout.world_size], config, model or self.model)
        store = self.directory / f"{next(self.numbers)}.store"
        specs = [
            WorkerSpec(rank, len(group.workers), group.model, store, settings(config), 4096)
            for rank in range(len(group.workers))
        ]
        ray.get([w.start.remote(s) for w, s in zip(group.workers, specs, strict=True)], timeout=60)
        yield group
        group.call("close")


@pytest.fixture(scope="module")
def actors(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Actors]:
    """Four of the trainer's own actors, with the model's base weights as they start."""
    directory = tmp_path_factory.mktemp("layouts")
    model = directory / "model"
    # Float32 files of bfloat16 numbers, so that both precisions begin at the same ones.
    half = make_model(num_hidden_layers=4, num_key_value_heads=4, dtype="bfloat16")
    transformers.AutoModelForCausalLM.from_pretrained(half, dtype="float32").save_pretrained(model)
    shutil.copy(half / "tokenizer.json", model)
    training = {"layout": {"data": NUM_RANKS}, "ready-timeout": 400}
    trainer = Trainer(Config.model_validate({"reef": {"run-dir": directory}, "training": training}), model)
    trainer.start()
    try:
        made = Actors(trainer._workers, model, directory)
        Group(made.workers, Config(), model).call("close")
        yield made
    finally:
        trainer.stop()


@pytest.fixture(scope="module")
def batches(make_batch: MakeBatch) -> list[Batch]:
    """Five: some with one microbatch, which leaves data ranks without any, some with 7 samples (rLLM 506)."""
    return [
        make_batch(seed=1, num_samples=7, budget_tokens=60),
        make_batch(seed=2, data_ranks=2),
        make_batch(seed=3),
        make_batch(seed=4, num_samples=7, data_ranks=4),
        make_batch(seed=5, budget_tokens=30),
    ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a layout made of the batches."""

    logprobs: Floats  # before the first step, all sequences joined
    steps: list[StepResult]
    change: dict[str, np.ndarray]  # of each weight, by the steps
    trained_logprobs: Floats  # after the last step: every rank's weights have a part in them


def train(batches: list[Batch], group: Group, directory: Path) -> Outcome:
    """Score, take a step on each batch, publish."""
    sequences = [sample.tokens for sample in batches[0].samples]
    scored = group.first("logprobs", sequences, 0.7)
    steps = []
    for batch in batches:
        of_batch = replace(batch, settings=settings(group.config))
        found: list[StepResult] = group.call("step", of_batch)
        assert len({(answer.step, tuple(answer.metrics.items())) for answer in found}) == 1  # the same on every rank
        steps.append(found[0])
    group.call("publish", "trained", directory)
    before, after = weights(group.model), weights(directory / "trained")
    assert before.keys() == after.keys()
    change = {name: after[name] - before[name] for name in before}
    return Outcome(np.concatenate(scored), steps, change, np.concatenate(group.first("logprobs", sequences, 0.7)))


def weights(path: Path) -> dict[str, np.ndarray]:
    return {name: tensor.float().numpy() for name, tensor in load_file(path / "model.safetensors").items()}


def distance(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> float:
    """Norm of the difference over the norm of b, all weights taken together."""
    return float(np.linalg.norm(joined(a) - joined(b)) / np.linalg.norm(joined(b)))


def cosine(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> float:
    return float(joined(a) @ joined(b) / np.linalg.norm(joined(a)) / np.linalg.norm(joined(b)))


def joined(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([arrays[name].ravel() for name in sorted(arrays)])


@pytest.fixture(scope="module")
def one_rank(actors: Actors, batches: list[Batch], tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    with actors.take({}) as group:
        return train(batches, group, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def moe_model(make_model: Callable[..., Path]) -> Path:
    return make_model("qwen3_moe", num_key_value_heads=4)


@pytest.fixture(scope="module")
def experts_on_one_rank(
    actors: Actors, batches: list[Batch], moe_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Outcome:
    with actors.take({}, model=moe_model) as group:
        return train(batches, group, tmp_path_factory.mktemp("experts"))


def agree(outcome: Outcome, one_rank: Outcome) -> None:
    """The same, as far as float32 sums in another order allow."""
    np.testing.assert_allclose(outcome.logprobs, one_rank.logprobs, atol=1e-5)
    for step, expected in zip(outcome.steps, one_rank.steps, strict=True):
        assert step.metrics.keys() == expected.metrics.keys()
        for key, value in expected.metrics.items():
            assert step.metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-7), key
    assert distance(outcome.change, one_rank.change) < 1e-3
    np.testing.assert_allclose(outcome.trained_logprobs, one_rank.trained_logprobs, atol=1e-4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_as_one_rank_does(
    actors: Actors, batches: list[Batch], one_rank: Outcome, name: str, tmp_path: Path
) -> None:
    with actors.take(*LAYOUTS[name]) as group:
        outcome = train(batches, group, tmp_path)
    agree(outcome, one_rank)


@pytest.mark.parametrize("name", EXPERT_LAYOUTS)
def test_a_layout_trains_experts_as_one_rank_does(
    actors: Actors, batches: list[Batch], experts_on_one_rank: Outcome, moe_model: Path, name: str, tmp_path: Path
) -> None:
    with actors.take(*EXPERT_LAYOUTS[name], model=moe_model) as group:
        outcome = train(batches, group, tmp_path)
    agree(outcome, experts_on_one_rank)


@pytest.mark.parametrize("name", HALF_LAYOUTS)
def test_bfloat16_moves_weights_in_the_same_direction(
    actors: Actors, batches: list[Batch], one_rank: Outcome, name: str, tmp_path: Path
) -> None:
    with actors.take(*LAYOUTS[name], dtype="bfloat16") as group:
        outcome = train(batches, group, tmp_path)
    assert cosine(outcome.change, one_rank.change) >= 0.99


@pytest.mark.parametrize("name", RECOMPUTE)
def test_activations_that_are_computed_again_change_no_number(
    actors: Actors, batches: list[Batch], one_rank: Outcome, name: str, tmp_path: Path
) -> None:
    with actors.take({}, RECOMPUTE[name]) as group:
        outcome = train(batches, group, tmp_path)
    assert [step.metrics for step in outcome.steps] == [step.metrics for step in one_rank.steps]
    assert distance(outcome.change, one_rank.change) == 0.0


@pytest.mark.parametrize("name", ["tensor 2, sequence", "pipeline 2", "data 2, distributed optimizer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_way_back_finds_the_same_on_every_rank(
    actors: Actors, batches: list[Batch], name: str, dtype: str, tmp_path: Path
) -> None:
    with actors.take(*LAYOUTS[name], dtype=dtype) as group:
        (new,) = set(group.call("digest"))
        group.call("step", batches[0])
        group.call("save", tmp_path / "saved")
        (saved,) = set(group.call("digest"))
        group.call("publish", "a", tmp_path)
        expected = group.first("step", batches[1]).metrics
        (trained,) = set(group.call("digest"))
        assert set(group.call("restore", tmp_path / "saved")) == {1}
        assert set(group.call("digest")) == {saved}
        assert group.first("step", batches[1]).metrics == expected  # bit for bit
        assert set(group.call("digest")) == {trained}
        group.call("load_weights", tmp_path / "a")
        again = group.first("publish", "again", tmp_path)
        assert again.content_id == read_manifest(tmp_path / "a").content_id
        for load in ("restore", "load_weights"):
            refused = [worker.call.remote(load, tmp_path / "nowhere") for worker in group.workers]
            for call in refused:
                with pytest.raises(LoadFailedError, match=r"nowhere: no .*, so it was never finished"):
                    ray.get(call, timeout=60)
        group.call("reset")
        assert set(group.call("digest")) == {new}
        assert len({new, saved, trained}) == 3
