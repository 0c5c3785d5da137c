"""A frozen reference beside the policy: its KL in the loss and in the reward, on one rank, against plain PyTorch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from reef.errors import ConfigError
from reef.methods.base import build as build_method
from reef.shelf import GrpoConfig
from reef.training.worker import MegatronWorker
from reef.types import Batch, Floats
from tests.training.plain_sao import PlainSao, method_settings, sao_batch
from tests.training.test_critic import like

MakeModel = Callable[..., Path]
MakeBatch = Callable[..., Batch]
MakeWorker = Callable[..., MegatronWorker]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]  # whole steps beside plain PyTorch


@contextmanager
def working(make_worker: MakeWorker, model: Path, method: dict[str, Any]) -> Iterator[MegatronWorker]:
    made = make_worker(model, method=method)
    try:
        yield made
    finally:
        made.close()


def grpo(**changes: Any) -> dict[str, Any]:
    """Settings of GRPO with a KL in the loss."""
    values = {"batch_size": 8, "group_size": 4, "kl": "loss", "kl_coef": 0.1} | changes
    return {**GrpoConfig.model_validate(values).model_dump(mode="json"), "name": "grpo"}


def reference_logprobs(worker: MegatronWorker, batch: Batch) -> list[Floats]:
    views = worker._learner._views(batch, build_method(batch.settings["method"]))
    found = [view.reference_logprobs for view in views if view.reference_logprobs is not None]
    assert len(found) == len(batch.samples)
    return found


@pytest.mark.parametrize("where", ["loss", "reward"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_steps_with_a_kl_equal_those_of_plain_pytorch(
    make_worker: MakeWorker, make_model: MakeModel, make_batch: MakeBatch, tmp_path: Path, where: str, estimator: str
) -> None:
    method = {"kl": where, "kl_coef": 0.3, "kl_estimator": estimator, "critic_value_clip": None}
    with working(make_worker, make_model(), method_settings(**method)) as worker:
        batch = sao_batch(make_batch, worker.logprobs, noise=0.2, temperature=0.8, method=method)
        plain = PlainSao(batch, make_model())
        for _ in range(2):  # at the first there is no distance yet, and no gradient of k2 and k3
            metrics, expected = worker.step(batch).metrics, plain.step(batch)
            assert metrics["critic/loss"] == pytest.approx(expected.critic_loss, rel=2e-4)
            assert metrics["loss"] == pytest.approx(expected.loss, rel=1e-3, abs=1e-5)
            assert metrics["grad_norm"] == pytest.approx(expected.norm, rel=1e-3)
            assert ("kl" in metrics) == (where == "loss")
        worker.publish("now", tmp_path)
    trained = load_file(tmp_path / "now" / "model.safetensors")
    for name, weight in plain.policy.state_dict().items():
        if name in trained:
            torch.testing.assert_close(trained[name], weight, atol=5e-5, rtol=1e-3)


def test_a_kl_moves_the_step(make_worker: MakeWorker, make_model: MakeModel, make_batch: MakeBatch) -> None:
    found = []
    for coefficient in (0.001, 1.0):
        with working(make_worker, make_model(), grpo(kl_coef=coefficient)) as worker:
            batch = make_batch(worker.logprobs, noise=0.1, method=grpo(kl_coef=coefficient))
            found.append([worker.step(batch).metrics["kl"] for _ in range(6)][-1])
    assert 0 < found[1] < found[0] / 2


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_first_step_is_no_distance_from_the_base_model_and_the_reference_never_moves(
    make_worker: MakeWorker, make_model: MakeModel, make_batch: MakeBatch, tmp_path: Path, estimator: str
) -> None:
    with working(make_worker, make_model(), grpo(kl_estimator=estimator)) as worker:
        batch = make_batch(worker.logprobs, temperature=0.7, budget_tokens=60, method=grpo(kl_estimator=estimator))
        before = reference_logprobs(worker, batch)
        for sample, logprobs in zip(batch.samples, before, strict=True):
            np.testing.assert_allclose(logprobs[sample.mask], sample.logprobs[sample.mask], atol=1e-5)
        distances = [worker.step(batch).metrics["kl"] for _ in range(3)]
        assert distances[0] == pytest.approx(0.0, abs=1e-6)
        assert min(abs(distance) for distance in distances[1:]) > 1e-5
        worker.save(tmp_path / "one")
        worker.publish("a", tmp_path)
        for move in (
            lambda: worker.restore(tmp_path / "one"),
            lambda: worker.load_weights(tmp_path / "a"),
            worker.reset,
        ):
            move()
            for now, then in zip(reference_logprobs(worker, batch), before, strict=True):
                np.testing.assert_array_equal(now, then)


def test_a_reference_of_another_path_is_what_the_policy_is_compared_with(
    make_worker: MakeWorker, make_model: MakeModel, make_batch: MakeBatch, tmp_path: Path
) -> None:
    other = like(make_model(), tmp_path / "other")
    method = {"kl": "loss", "kl_coef": 0.2, "kl_reference": str(other), "critic_value_clip": None}
    with working(make_worker, make_model(), method_settings(**method)) as worker:
        batch = sao_batch(make_batch, worker.logprobs, method=method)
        plain = PlainSao(batch, make_model(), reference=other)
        for sample, found in zip(batch.samples, reference_logprobs(worker, batch), strict=True):
            np.testing.assert_allclose(found, plain.reference_logprobs(sample), atol=1e-4)
        for _ in range(2):
            metrics, expected = worker.step(batch).metrics, plain.step(batch)
            assert metrics["loss"] == pytest.approx(expected.loss, rel=1e-3, abs=1e-5)
            assert metrics["grad_norm"] == pytest.approx(expected.norm, rel=1e-3)
            assert metrics["kl"] > 0.01


def test_a_reference_is_no_part_of_checkpoint_or_digest(
    make_worker: MakeWorker, make_model: MakeModel, make_batch: MakeBatch, tmp_path: Path
) -> None:
    with working(make_worker, make_model(), grpo()) as worker:
        batch = make_batch(worker.logprobs, noise=0.1, method=grpo())
        worker.step(batch)
        worker.save(tmp_path / "one")
        saved = worker.digest()
    other = like(make_model(), tmp_path / "other")
    with working(make_worker, make_model(), grpo(kl_reference=str(other))) as worker:
        assert worker.restore(tmp_path / "one") == 1
        assert worker.digest() == saved


def test_a_method_without_a_kl_asks_no_reference(
    make_worker: MakeWorker, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    with working(make_worker, make_model(), grpo()) as worker:
        batch = make_batch(worker.logprobs, noise=0.1)
        views = worker._learner._views(batch, build_method(batch.settings["method"]))
        assert all(view.reference_logprobs is None for view in views)
        assert "kl" not in worker.step(batch).metrics


def test_samples_that_do_not_train_need_no_reference(
    make_worker: MakeWorker, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    with working(make_worker, make_model(), grpo()) as worker:
        batch = make_batch(worker.logprobs, noise=0.1, method=grpo())
        stale = replace(batch, samples=(replace(batch.samples[0], trains=False), *batch.samples[1:]))
        found = reference_logprobs(worker, stale)
        assert not found[0].any()
        assert all(logprobs[1:].all() for logprobs in found[1:])
        assert np.isfinite(worker.step(stale).metrics["loss"])


def test_a_reference_that_is_built_otherwise_is_refused_before_ranks_meet(
    make_worker: MakeWorker, make_model: MakeModel
) -> None:
    method = grpo(kl_reference=str(make_model(num_hidden_layers=3)))
    with pytest.raises(ConfigError, match=r"kl-reference: .*: num_layers is 3, expected 2") as error:
        make_worker(make_model(), method=method)
    assert error.value.param == "recipe.config.kl-reference"
    assert not dist.is_initialized()


def test_a_reference_in_bfloat16_scores(make_worker: MakeWorker, make_model: MakeModel, make_batch: MakeBatch) -> None:
    made = make_worker(make_model(dtype="bfloat16"), method=grpo(), dtype="bfloat16")
    try:
        batch = make_batch(made.logprobs, method=grpo())
        assert made.step(batch).metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    finally:
        made.close()
