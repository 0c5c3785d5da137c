"""What `training.options` do, against formulas; which of them contradict each other; what a batch stores of them."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from reef.config import load
from reef.errors import ConfigError
from reef.options import OptimizerOptions
from reef.training import optimizer
from reef.training.settings import built_with, layout_of, options_of, taken_again
from reef.training.worker import MegatronWorker
from reef.types import Batch

MakeModel = Callable[..., Path]
MakeBatch = Callable[..., Batch]
MakeWorker = Callable[..., MegatronWorker]

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", params=[False, True], ids=["whole", "distributed"])
def worker(make_model: MakeModel, make_worker: MakeWorker, request: pytest.FixtureRequest) -> Iterator[MegatronWorker]:
    """Of a model with every kind of weight (matrices, embedding, output, norms, biases), with either optimizer."""
    built = OptimizerOptions(use_distributed_optimizer=request.param).model_dump(mode="json")
    made = make_worker(make_model("qwen2", tied=False), optimizer=built)
    yield made
    made.close()


def rates(worker: MegatronWorker, num_steps: int, **options: Any) -> list[float]:
    """The learning rates of the first steps."""
    built = worker._policy.optimizer
    return [optimizer.apply_options(built, OptimizerOptions(**options), done) for done in range(num_steps)]


DECAY = {"lr": 1.0, "min_lr": 0.1, "lr_decay_steps": 8}


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("constant", lambda n: 1.0),
        ("linear", lambda n: 1 - 0.9 * min(n / 8, 1)),
        ("cosine", lambda n: 0.1 + 0.45 * (1 + math.cos(math.pi * min(n / 8, 1)))),
        ("inverse-square-root", lambda n: 0.1 if n > 8 else max(0.1, 1 / math.sqrt(max(n, 1)))),
    ],
)
def test_the_learning_rate_decays_by_its_formula(
    worker: MegatronWorker, style: str, expected: Callable[[int], float]
) -> None:
    found = rates(worker, 11, lr_decay_style=style, **DECAY)
    np.testing.assert_allclose(found, [expected(n) for n in range(11)], rtol=1e-12)


@pytest.mark.parametrize(
    ("style", "share"),
    [
        ("linear", lambda x: 1 - x),
        ("cosine", lambda x: 0.5 * (1 + math.cos(math.pi * x))),
        ("exponential", lambda x: 2 * 0.5**x - 1),
        ("minus_sqrt", lambda x: 1 - math.sqrt(x)),
    ],
)
def test_wsd_is_constant_until_its_own_decay(
    worker: MegatronWorker, style: str, share: Callable[[float], float]
) -> None:
    found = rates(worker, 10, lr_decay_style="WSD", wsd_decay_steps=4, lr_wsd_decay_style=style, **DECAY)
    np.testing.assert_allclose(found, [0.1 + 0.9 * share(min(max(n - 4, 0) / 4, 1)) for n in range(10)], rtol=1e-12)


def test_a_warm_up_rises_from_its_first_rate_and_moves_the_decay_back(worker: MegatronWorker) -> None:
    found = rates(worker, 9, lr_warmup_steps=4, lr_warmup_init=0.2, lr_decay_style="linear", **DECAY)
    np.testing.assert_allclose(found, [0.2, 0.4, 0.6, 0.8, 1, 0.775, 0.55, 0.325, 0.1], rtol=1e-12)
    found = rates(worker, 9, lr_warmup_steps=4, lr_decay_style="inverse-square-root", **DECAY)
    np.testing.assert_allclose(found, [0, 0.25, 0.5, 0.75, *(2 / math.sqrt(n) for n in range(4, 9))], rtol=1e-12)


def without_gradient(batch: Batch, **options: Any) -> Batch:
    """The batch with no token to train: a step of it is weight decay alone."""
    nothing = tuple(replace(sample, mask=np.zeros_like(sample.mask)) for sample in batch.samples)
    return replace(batch, samples=nothing, settings=batch.settings | {"optimizer": options})


def shrunk(worker: MegatronWorker, batch: Batch, directory: Path) -> dict[str, float]:
    """By which factor a step multiplies each weight."""
    found = []
    for name in ("before", "after"):
        published = worker.publish(name, directory)
        assert published is not None
        found.append(load_file(directory / name / "model.safetensors"))
        if name == "before":
            assert worker.step(batch).metrics["grad_norm"] == 0.0
    return {
        name: float((found[1][name].norm() / weight.norm()).double())
        for name, weight in found[0].items()
        if weight.any()
    }


def test_matrices_and_embeddings_decay_and_norms_and_biases_do_not(
    worker: MegatronWorker, make_batch: MakeBatch, tmp_path: Path
) -> None:
    worker.reset()
    factors = shrunk(worker, without_gradient(make_batch(), lr=0.01, weight_decay=0.5), tmp_path)
    vectors = {name for name in factors if "norm" in name or name.endswith(".bias")}
    assert len(vectors) == 2 * (2 + 3) + 1
    assert {name for name, factor in factors.items() if factor == 1.0} == vectors
    assert {round(factor, 6) for name, factor in factors.items() if name not in vectors} == {1 - 0.01 * 0.5}


@pytest.mark.parametrize(
    ("style", "share"), [("linear", lambda x: x), ("cosine", lambda x: 0.5 * (1 - math.cos(math.pi * x)))]
)
def test_weight_decay_moves_by_its_formula(
    worker: MegatronWorker, make_batch: MakeBatch, tmp_path: Path, style: str, share: Callable[[float], float]
) -> None:
    worker.reset()
    moves = {"weight_decay_incr_style": style, "start_weight_decay": 0.2, "end_weight_decay": 1.0, "wd_incr_steps": 2}
    batch = without_gradient(make_batch(), lr=0.01, **moves)
    for done in range(4):
        factors = shrunk(worker, batch, tmp_path / str(done))
        expected = 1 - 0.01 * (0.2 + 0.8 * share(min(done / 2, 1)))
        assert factors["lm_head.weight"] == pytest.approx(expected, abs=1e-6)
        assert factors["model.norm.weight"] == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min-lr": 1}, r"min-lr is 1\.0, above lr \(0\.0001\)"),
        ({"lr-warmup-init": 1, "lr-warmup-steps": 2}, r"lr-warmup-init is 1\.0, above lr"),
        ({"lr-warmup-init": 1e-5}, "lr-warmup-init starts a warm-up, and lr-warmup-steps is 0"),
        ({"lr-decay-style": "cosine", "lr-warmup-steps": 1000}, r"lr-warmup-steps is 1000; .* below lr-decay-steps"),
        ({"lr-decay-style": "WSD"}, "wsd-decay-steps is None and lr-decay-style is WSD: WSD needs it"),
        ({"wsd-decay-steps": 4}, "wsd-decay-steps is 4 and lr-decay-style is constant: .* no other style"),
        ({"lr-decay-style": "WSD", "wsd-decay-steps": 1001}, r"wsd-decay-steps is 1001, more than lr-decay-steps"),
        ({"lr-decay-style": "wsd"}, "lr-decay-style: .*'WSD', got 'wsd'"),
        ({"weight-decay-incr-style": "linear"}, "start-weight-decay is None and weight-decay-incr-style is linear"),
        ({"end-weight-decay": 1}, r"end-weight-decay is 1\.0 and weight-decay-incr-style is constant"),
        (
            {"weight-decay-incr-style": "cosine", "start-weight-decay": 2, "end-weight-decay": 1, "wd-incr-steps": 2},
            r"start-weight-decay is 2\.0, above end-weight-decay \(1\.0\)",
        ),
        (
            {
                "weight-decay": 0.1,
                "weight-decay-incr-style": "cosine",
                "start-weight-decay": 0,
                "end-weight-decay": 1,
                "wd-incr-steps": 2,
            },
            r"weight-decay is 0\.1, but .* leave it out",
        ),
        ({"recompute-method": "uniform"}, "recompute-method is uniform and recompute-granularity is None: full needs"),
        ({"recompute-granularity": "full"}, "recompute-method is None and recompute-granularity is full"),
        (
            {"recompute-granularity": "full", "recompute-method": "block"},
            "recompute-num-layers is None and recompute-granularity is full",
        ),
        (
            {"recompute-granularity": "selective", "recompute-num-layers": 1},
            "recompute-num-layers is 1 and .*selective",
        ),
    ],
)
def test_options_that_contradict_each_other_are_named_at_load(options: Mapping[str, Any], message: str) -> None:
    flags = [word for name, value in options.items() for word in (f"--training.options.{name}", str(value))]
    with pytest.raises(ConfigError, match=f"training.options.{message}"):
        load(None, flags)


def test_a_batch_of_an_earlier_version_has_the_defaults_of_what_came_later(make_batch: MakeBatch) -> None:
    stored = make_batch().settings
    earlier = stored | {
        "layout": {"tensor": 1, "pipeline": 1, "data": 1},
        "optimizer": {name: stored["optimizer"][name] for name in ("lr", "min_lr", "lr_decay_style", "weight_decay")},
    }
    assert layout_of(earlier) == layout_of(stored)
    assert options_of(earlier).lr == options_of(stored).lr
    assert built_with(earlier) == built_with(stored)


def test_what_workers_are_built_with_and_what_a_batch_may_change(make_batch: MakeBatch) -> None:
    stored = make_batch().settings
    other = stored["optimizer"] | {
        "lr": 1.0,
        "recompute_granularity": "selective",
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
    }
    changed = stored | {"optimizer": other, "layout": {"tensor": 2, "sequence_parallel": True}, "seed": 7, "threads": 2}
    differ = {name for name, value in built_with(changed).items() if built_with(stored)[name] != value}
    assert differ == {
        "training.layout.tensor",
        "training.layout.sequence-parallel",
        "training.options.use-distributed-optimizer",
        "training.options.overlap-grad-reduce",
        "training.seed",
    }


def test_a_batch_that_is_taken_again_tells_of_the_workers_that_train_it_and_else_stays_as_it_is(
    make_batch: MakeBatch,
) -> None:
    stored = make_batch().settings
    assert taken_again(stored, stored) == stored
    other = stored["optimizer"] | {"lr": 1.0, "use_distributed_optimizer": True}
    layout = stored["layout"] | {"data": 2}
    now = stored | {"optimizer": other, "layout": layout, "dtype": "bfloat16", "seed": 7, "threads": 2}
    now["method"] = stored["method"] | {"clip_high": 9.0}
    found = taken_again(stored, now)
    assert built_with(found) == built_with(now)
    assert found["optimizer"] == stored["optimizer"] | {"use_distributed_optimizer": True}
    assert (found["method"], found["threads"]) == (stored["method"], stored["threads"])
