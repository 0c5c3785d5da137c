"""A critic beside the policy, on one rank in this process: against plain PyTorch, and what it leaves alone."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

from reef.errors import ConfigError, LoadFailedError, StepFailedError
from reef.methods.base import build
from reef.shelf import GrpoConfig
from reef.training import megatron
from reef.training.counts import Counts
from reef.training.digest import digest
from reef.training.manifest import COMPLETE, dump_complete, vouch
from reef.training.worker import MegatronWorker
from reef.types import Batch, Sample
from tests.training.plain_sao import PlainSao, method_settings, sao_batch

MakeModel = Callable[..., Path]
MakeBatch = Callable[..., Batch]
MakeWorker = Callable[..., MegatronWorker]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]  # whole steps beside plain PyTorch


@contextmanager
def working(
    make_worker: MakeWorker, model: Path, method: dict[str, Any] | None = None, **changes: Any
) -> Iterator[MegatronWorker]:
    """A worker for SAO with these settings."""
    made = make_worker(model, method=method_settings(**method or {}), **changes)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def sao(make_worker: MakeWorker, make_model: MakeModel) -> Iterator[MegatronWorker]:
    """A worker on the tied Qwen3 with a critic."""
    with working(make_worker, make_model()) as worker:
        yield worker


def content(worker: MegatronWorker) -> str:
    published = worker.publish("now", Path("/nowhere"), on_disk=False)
    assert published is not None
    return published.content_id


def policy_of(worker: MegatronWorker) -> str:
    """The policy's weights, moments and the random state, as one name."""
    return digest(worker._policy, None, Counts())


def values_of(worker: MegatronWorker, batch: Batch) -> np.ndarray:
    """The critic's values after each token of each sample, joined."""
    learner = worker._learner
    views = learner._views(batch, _method(batch))
    found = [view.values for view in views if view.values is not None]
    assert len(found) == len(batch.samples)
    return np.concatenate(found)


def _method(batch: Batch) -> Any:
    return build(batch.settings["method"])


def critic_weights(worker: MegatronWorker) -> dict[str, torch.Tensor]:
    critic = worker._learner.critic
    assert critic is not None
    return {name: weight.detach().clone() for name, weight in critic.module.named_parameters()}


@pytest.mark.parametrize(
    "method",
    [
        {"critic_warmup_steps": 1, "critic_value_clip": 0.05},
        {"critic_warmup_steps": 1, "critic_value_clip": None},
        {"gamma": 0.9, "critic_lambda": 0.8, "lambda_alpha": 1.1},
        {"values_from": "after", "critic_updates": 3, "lambda_alpha": None},
        {"bootstrap_truncated": True, "gamma": 0.95},
    ],
    ids=["value clip", "no value clip", "gamma and lambda", "values from after", "bootstrap"],
)
def test_three_steps_of_sao_equal_three_of_plain_pytorch(
    make_worker: MakeWorker, make_model: MakeModel, make_batch: MakeBatch, tmp_path: Path, method: dict[str, Any]
) -> None:
    model = make_model()
    with working(make_worker, model, method) as worker:
        batch = sao_batch(make_batch, worker.logprobs, noise=0.2, temperature=0.8, method=method)
        cut = replace(batch.samples[1], truncated=True)
        batch = replace(batch, samples=(batch.samples[0], cut, *batch.samples[2:]))
        plain = PlainSao(batch, model)
        clipped = []
        for step in range(3):
            result, expected = worker.step(batch), plain.step(batch)
            metrics = result.metrics
            clipped.append(metrics["critic/clipfrac"])
            assert metrics["critic/loss"] == pytest.approx(expected.critic_loss, rel=1e-4)
            assert metrics["critic/grad_norm"] == pytest.approx(expected.critic_norm, rel=1e-3)
            assert metrics["critic/explained_variance"] == pytest.approx(
                expected.explained_variance, rel=1e-4, abs=1e-5
            )
            assert result.trained_policy == (expected.loss is not None) == (step >= plain.config.critic_warmup_steps)
            if result.trained_policy:
                assert metrics["loss"] == pytest.approx(expected.loss, rel=1e-3, abs=1e-5)
                assert metrics["grad_norm"] == pytest.approx(expected.norm, rel=1e-3)
        if plain.config.critic_value_clip == 0.05:
            assert any(clipped)  # so tight that it held some back
        values = values_of(worker, batch)
        worker.publish("now", tmp_path)
        head = critic_weights(worker)["output_layer.weight"]
    with torch.no_grad():
        wanted = torch.cat([plain.values(sample) for sample in batch.samples])
    np.testing.assert_allclose(values, wanted, atol=2e-4)
    torch.testing.assert_close(head, plain.head.weight.detach(), atol=1e-4, rtol=1e-3)
    trained = load_file(tmp_path / "now" / "model.safetensors")
    for name, expected_weight in plain.policy.state_dict().items():
        if name in trained:
            torch.testing.assert_close(trained[name], expected_weight, atol=2e-5, rtol=1e-4)


def test_while_the_critic_warms_up_the_policy_is_bit_equal_and_then_it_moves(
    sao: MegatronWorker, make_batch: MakeBatch
) -> None:
    method = {"critic_warmup_steps": 2}
    batch = sao_batch(make_batch, sao.logprobs, noise=0.1, method=method)
    base, policy, weights = content(sao), policy_of(sao), critic_weights(sao)
    found = {sao.digest()}
    for step in (1, 2):
        result = sao.step(batch)
        assert (result.step, result.trained_policy, result.metrics["sao/actor_trained"]) == (step, False, 0.0)
        assert (content(sao), policy_of(sao)) == (base, policy)
        found.add(sao.digest())
        assert {"critic/loss", "critic/grad_norm", "reward_mean", "num_tokens", "num_samples"} <= result.metrics.keys()
        assert result.metrics["num_tokens"] == sum(sample.mask.sum() for sample in batch.samples)
        assert result.metrics["sao/queue_age_s_mean"] == 2.0
        assert not {"loss", "grad_norm", "ratio", "lr"} & result.metrics.keys()
    assert len(found) == 3
    assert all(not torch.equal(weight, weights[name]) for name, weight in critic_weights(sao).items())
    result = sao.step(batch)
    assert (result.step, result.trained_policy, result.metrics["sao/actor_trained"]) == (3, True, 1.0)
    assert {"loss", "grad_norm", "ratio", "lr", "entropy", "pg_clipfrac"} <= result.metrics.keys()
    assert content(sao) != base


def test_warm_up_and_schedules_count_steps_of_their_own(sao: MegatronWorker, make_batch: MakeBatch) -> None:
    rising = {"lr": 4e-4, "lr_warmup_steps": 4}
    method = {"critic_warmup_steps": 2, "critic_options": rising}
    batch = sao_batch(make_batch, method=method, optimizer={"lr": 2e-3, "lr_warmup_steps": 2})
    metrics = [sao.step(batch).metrics for _ in range(5)]
    np.testing.assert_allclose([m["critic/lr"] for m in metrics], [0.0, 1e-4, 2e-4, 3e-4, 4e-4])
    np.testing.assert_allclose([m["lr"] for m in metrics[2:]], [0.0, 1e-3, 2e-3])


def test_the_critic_expects_nothing_at_first_and_then_what_was_paid(sao: MegatronWorker, make_batch: MakeBatch) -> None:
    batch = sao_batch(make_batch, sao.logprobs, method={"critic_warmup_steps": 100, "critic_value_clip": None})
    assert not values_of(sao, batch).any()
    first = sao.step(batch).metrics
    assert (first["critic/explained_variance"], first["critic/value_mean"]) == (0.0, 0.0)
    for _ in range(25):
        last = sao.step(batch).metrics
    assert last["critic/explained_variance"] > 0.8
    assert last["critic/loss"] < first["critic/loss"] / 5


def test_what_a_tool_said_has_no_gradient_of_its_own_and_conditions_what_comes_after(
    sao: MegatronWorker, make_batch: MakeBatch
) -> None:
    batch = sao_batch(make_batch, sao.logprobs, noise=0.1)
    sample = batch.samples[0]
    assert not sample.mask[7:9].any()
    assert sample.mask[9]
    wild = np.where(sample.mask, sample.logprobs, np.float32(-1000.0))

    def steps(changed: Sample) -> tuple[list[Any], np.ndarray]:
        sao.reset()
        of_batch = replace(batch, samples=(changed, *batch.samples[1:]))
        metrics = [sao.step(of_batch).metrics for _ in range(2)]
        return [metrics, sao.digest()], values_of(sao, of_batch)[: len(sample.tokens)]

    expected, values = steps(sample)
    assert steps(replace(sample, logprobs=wild))[0] == expected
    tokens = sample.tokens.copy()
    tokens[7] = (tokens[7] + 1) % 96
    learned = sao.digest()
    assert learned == expected[1]
    views = sao._learner._views(
        replace(batch, samples=(replace(sample, tokens=tokens), *batch.samples[1:])), _method(batch)
    )
    assert views[0].values is not None
    np.testing.assert_allclose(views[0].values[:7], values[:7], atol=1e-6)
    assert (np.abs(views[0].values[7:] - values[7:]) > 1e-4).all()
    assert steps(replace(sample, tokens=tokens))[0] != expected


def test_lambda_and_gamma_reach_the_step(sao: MegatronWorker, make_batch: MakeBatch) -> None:
    found = []
    for changes in ({}, {"lambda_alpha": 0.7}, {"gamma": 0.8}, {"critic_lambda": 0.5}):
        sao.reset()
        batch = sao_batch(make_batch, sao.logprobs, method={"critic_value_clip": None, **changes})
        metrics = [sao.step(batch).metrics for _ in range(2)]
        found.append((metrics[1]["critic/loss"], metrics[1]["grad_norm"]))
    losses, norms = zip(*found, strict=True)
    assert losses[1] == losses[0]  # the policy's lambda is the policy's alone
    assert len({*losses}) == 3
    assert len({*norms}) == 4


def test_frozen_attention_stays_and_all_else_learns(
    make_worker: MakeWorker, make_model: MakeModel, make_batch: MakeBatch, tmp_path: Path
) -> None:
    method = {"critic_freeze": "attention"}
    with working(make_worker, make_model(), method) as worker:
        batch = sao_batch(make_batch, worker.logprobs, noise=0.1, method=method)
        before = critic_weights(worker)
        worker.step(batch)
        worker.step(batch)
        still = {name for name, weight in critic_weights(worker).items() if torch.equal(weight, before[name])}
        assert still == {name for name in before if ".self_attention." in name}
        assert len(still) == 8
        worker.save(tmp_path / "frozen")
        saved = worker.digest()
        expected = worker.step(batch).metrics
        worker.reset()
        worker.restore(tmp_path / "frozen")
        assert worker.digest() == saved
        assert worker.step(batch).metrics == expected
    with working(make_worker, make_model()) as worker:
        worker.save(tmp_path / "whole")
        before_refused = worker.digest()
        with pytest.raises(LoadFailedError, match="another trainer: critic is all but attention, expected all of it"):
            worker.restore(tmp_path / "frozen")
        assert worker.digest() == before_refused
    with working(make_worker, make_model(), method) as worker:
        worker.step(batch)
        before_refused = worker.digest()
        with pytest.raises(LoadFailedError, match="another trainer: critic is all of it, expected all but attention"):
            worker.restore(tmp_path / "whole")
        assert worker.digest() == before_refused


def test_a_restored_critic_goes_on_bit_for_bit_and_a_reset_one_begins_anew(
    sao: MegatronWorker, make_batch: MakeBatch, tmp_path: Path
) -> None:
    batches = [sao_batch(make_batch, seed=seed, noise=0.1, method={"critic_warmup_steps": 2}) for seed in range(4)]
    new = sao.digest()
    first = [sao.step(batch) for batch in batches[:1]]
    sao.save(tmp_path / "one")  # in the middle of the warm-up
    saved = sao.digest()
    later = [sao.step(batch) for batch in batches[1:]]
    trained, served = sao.digest(), content(sao)
    assert sao.restore(tmp_path / "one") == 1
    assert sao.digest() == saved
    again = [sao.step(batch) for batch in batches[1:]]
    assert [(r.step, r.trained_policy, r.metrics) for r in again] == [
        (r.step, r.trained_policy, r.metrics) for r in later
    ]
    assert (sao.digest(), content(sao)) == (trained, served)
    sao.reset()
    assert sao.digest() == new
    assert not values_of(sao, batches[0]).any()
    assert sao.step(batches[0]).metrics == first[0].metrics


def test_each_tensor_of_a_critic_decides_the_digest(sao: MegatronWorker, make_batch: MakeBatch) -> None:
    sao.step(sao_batch(make_batch))
    critic = sao._learner.critic
    assert critic is not None
    (part,) = critic.optimizer.chained_optimizers
    tensors = [*critic.module.parameters()]
    tensors += [state[name] for state in part.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq", "step")]
    found = {sao.digest()}
    with torch.no_grad():
        for tensor in tensors:
            tensor.view(-1)[-1] += 1.0
            found.add(sao.digest())
    sao._learner.counts.critic_updates += 1
    found.add(sao.digest())
    assert len(found) == 2 + len(tensors)


def test_with_a_checkpoint_that_has_no_critic_the_policy_is_whole_and_the_critic_begins_anew(
    make_worker: MakeWorker, make_model: MakeModel, make_batch: MakeBatch, tmp_path: Path
) -> None:
    worker = make_worker(make_model())
    worker.step(make_batch(seed=1))
    worker.save(tmp_path / "grpo")
    policy, served = policy_of(worker), content(worker)
    worker.close()
    with working(make_worker, make_model()) as sao:
        base = values_of(sao, batch := sao_batch(make_batch, seed=2, method={"critic_warmup_steps": 1}))
        fresh = critic_weights(sao)
        for _ in range(2):
            sao.step(batch)
        assert sao.restore(tmp_path / "grpo") == 1
        assert (policy_of(sao), content(sao)) == (policy, served)
        assert all(torch.equal(weight, fresh[name]) for name, weight in critic_weights(sao).items())
        np.testing.assert_array_equal(values_of(sao, batch), base)
        results = [sao.step(batch) for _ in range(2)]
        assert [(result.step, result.trained_policy) for result in results] == [(2, False), (3, True)]
        sao.save(tmp_path / "sao")
        policy, served = policy_of(sao), content(sao)
        sao.step(batch)
    plain = make_worker(make_model())
    try:
        assert plain.restore(tmp_path / "sao") == 3
        assert (policy_of(plain), content(plain)) == (policy, served)
        assert plain.step(make_batch(seed=3)).step == 4
    finally:
        plain.close()


def test_a_checkpoint_of_a_reef_before_the_critic_goes_on(
    make_worker: MakeWorker, make_model: MakeModel, make_batch: MakeBatch, tmp_path: Path
) -> None:
    worker = make_worker(make_model())
    try:
        rising = {"lr": 1e-3, "lr_warmup_steps": 8}
        worker.step(make_batch(seed=1, optimizer=rising))
        worker.step(make_batch(seed=2, optimizer=rising))
        worker.save(tmp_path / "old")
        saved = worker.digest()
        expected = worker.step(make_batch(seed=3, optimizer=rising)).metrics
        without(tmp_path / "old", "counts", "critic_learns")
        assert worker.restore(tmp_path / "old") == 2
        assert worker.digest() == saved
        assert worker.step(make_batch(seed=3, optimizer=rising)).metrics == expected
    finally:
        worker.close()


def without(checkpoint: Path, *keys: str) -> None:
    """Take away what a checkpoint says besides its tensors, and have it vouch for what is left."""
    common = torch.load(checkpoint / "common.pt", weights_only=False)
    for key in keys:
        del common[key]
    torch.save(common, checkpoint / "common.pt")
    (checkpoint / COMPLETE).unlink()
    found = {path.name: vouch(path) for path in checkpoint.iterdir()}
    (checkpoint / COMPLETE).write_bytes(dump_complete(common["steps_done"], found))


@pytest.mark.parametrize("reward", [1e38, -1e30, float("nan")])
def test_a_critic_whose_gradient_is_not_finite_moves_nothing(
    sao: MegatronWorker, make_batch: MakeBatch, reward: float
) -> None:
    good = sao_batch(make_batch, noise=0.1)
    sao.step(good)
    before = sao.digest()
    bad = replace(good, samples=(replace(good.samples[0], reward=reward), *good.samples[1:]))
    with pytest.raises(StepFailedError, match=r"critic: the gradient norm is (inf|nan)") as error:
        sao.step(bad)
    assert not error.value.moved
    assert sao.digest() == before


def test_a_policy_that_fails_after_the_critic_says_that_something_moved(
    sao: MegatronWorker, make_batch: MakeBatch, tmp_path: Path
) -> None:
    good = sao_batch(make_batch, noise=0.1)
    sao.save(tmp_path / "before")
    before, expected = policy_of(sao), sao.step(good).metrics
    sao.restore(tmp_path / "before")
    untouched = sao.digest()
    broken = good.samples[0].logprobs.copy()
    broken[6] = np.nan  # which no target is made of
    bad = replace(good, samples=(replace(good.samples[0], logprobs=broken), *good.samples[1:]))
    with pytest.raises(StepFailedError, match="policy: the gradient norm is nan") as error:
        sao.step(bad)
    assert error.value.moved
    assert sao.digest() != untouched
    assert policy_of(sao) == before
    sao.restore(tmp_path / "before")
    assert sao.digest() == untouched
    assert sao.step(good).metrics == expected


def test_after_a_batch_of_grpo_the_critic_begins_anew_as_where_no_critic_was_there(
    sao: MegatronWorker, make_batch: MakeBatch
) -> None:
    first = critic_weights(sao)
    sao.step(sao_batch(make_batch))
    base = content(sao)
    result = sao.step(make_batch(noise=0.1))
    assert result.trained_policy
    assert not [name for name in result.metrics if name.startswith(("critic/", "sao/"))]
    assert content(sao) != base
    assert all(torch.equal(weight, first[name]) for name, weight in critic_weights(sao).items())
    after = sao._learner.counts
    assert (after.steps, after.policy_updates, after.critic_steps, after.critic_updates) == (2, 2, 0, 0)


def test_a_batch_that_needs_what_the_worker_lacks_is_refused(
    make_worker: MakeWorker, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    grpo_with_kl = GrpoConfig(batch_size=8, group_size=4, kl="loss", kl_coef=0.1).model_dump(mode="json")
    worker = make_worker(make_model())
    try:
        before = worker.digest()
        for method, message in (
            (method_settings(), "reserved for a method with a critic, and the workers have none"),
            ({**grpo_with_kl, "name": "grpo"}, "reserved for a KL to a reference, and the workers have none"),
        ):
            with pytest.raises(StepFailedError, match=message) as error:
                worker.step(make_batch(method=method))
            assert not error.value.moved
        assert worker.digest() == before
    finally:
        worker.close()


def test_a_critic_takes_the_body_of_another_model(
    make_worker: MakeWorker, make_model: MakeModel, make_batch: MakeBatch, tmp_path: Path
) -> None:
    other = like(make_model(), tmp_path / "other")
    method = {"critic_path": str(other), "critic_value_clip": None}
    with working(make_worker, make_model(), method) as worker:
        batch = sao_batch(make_batch, worker.logprobs, noise=0.1, method=method)
        plain = PlainSao(batch, make_model(), critic=other)
        assert not values_of(worker, batch).any()
        for _ in range(2):
            metrics, expected = worker.step(batch).metrics, plain.step(batch)
            assert metrics["critic/loss"] == pytest.approx(expected.critic_loss, rel=1e-4)
            assert metrics["loss"] == pytest.approx(expected.loss, rel=1e-3, abs=1e-5)
        of_other = values_of(worker, batch)
        new = content(worker)
        worker.reset()
        worker.step(batch)
        worker.step(batch)
        np.testing.assert_array_equal(values_of(worker, batch), of_other)
        assert content(worker) == new
    with working(make_worker, make_model(), {"critic_value_clip": None}) as worker:
        worker.step(batch)
        worker.step(batch)
        assert np.abs(values_of(worker, batch) - of_other).max() > 1e-2


def like(model: Path, path: Path) -> Path:
    """A model directory built as `model` is, with other weights."""
    found = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    found.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, r"critic-path: .* is not built as the policy is: num_layers is 3, expected 2"),
        ({"intermediate_size": 64}, "ffn_size is 64, expected 48"),
        ({"vocab_size": 128}, "vocab_size is 128, expected 96"),
    ],
)
def test_a_critic_that_is_not_built_as_the_policy_is_refused_before_ranks_meet(
    make_worker: MakeWorker, make_model: MakeModel, changes: dict[str, int], message: str
) -> None:
    method = method_settings(critic_path=str(make_model(**changes)))
    with pytest.raises(ConfigError, match=message) as error:
        make_worker(make_model(), method=method)
    assert error.value.param == "recipe.config.critic-path"
    assert not dist.is_initialized()


def test_a_critic_path_that_is_no_model_is_refused_by_its_own_name(
    make_worker: MakeWorker, make_model: MakeModel, tmp_path: Path
) -> None:
    shutil.copytree(make_model(), tmp_path / "cut")
    with (tmp_path / "cut" / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    (tmp_path / "empty").mkdir()
    for name, message in (("empty", "no model at .*empty"), ("cut", "model.safetensors")):
        with pytest.raises(ConfigError, match=rf"recipe\.config\.critic-path: .*{message}") as error:
            make_worker(make_model(), method=method_settings(critic_path=str(tmp_path / name)))
        assert error.value.param == "recipe.config.critic-path"
        assert not dist.is_initialized()


def test_a_step_of_sao_is_the_same_however_it_is_split(sao: MegatronWorker, make_batch: MakeBatch) -> None:
    found = []
    for budget, ranks in ((4096, 1), (60, 1), (60, 2), (1, 1)):
        sao.reset()
        batch = sao_batch(make_batch, sao.logprobs, noise=0.1, budget_tokens=budget, data_ranks=ranks)
        found.append((len(batch.microbatches), [sao.step(batch).metrics for _ in range(2)]))
    assert (found[0][0], found[-1][0]) == (1, 8)
    for _, metrics in found[1:]:
        for step, expected in zip(metrics, found[0][1], strict=True):
            for name, value in expected.items():
                assert step[name] == pytest.approx(value, rel=2e-4, abs=1e-6), name


def test_a_sample_that_does_not_train_is_nothing_to_the_critic(sao: MegatronWorker, make_batch: MakeBatch) -> None:
    batch = sao_batch(make_batch, sao.logprobs, noise=0.1)
    fewer = replace(batch, samples=batch.samples[:-1], microbatches=(tuple(range(7)),))
    stale = replace(batch, samples=(*batch.samples[:-1], replace(batch.samples[-1], trains=False)))
    found = []
    for taken in (fewer, stale):
        sao.reset()
        metrics = [sao.step(taken).metrics for _ in range(2)]
        found.append([{name: step[name] for name in step if name.startswith("critic/")} for step in metrics])
    for of_fewer, of_stale in zip(*found, strict=True):
        assert of_stale == pytest.approx(of_fewer, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("what", ["no token was sampled", "all are stale"])
def test_a_batch_in_which_nothing_trains_teaches_nothing(sao: MegatronWorker, make_batch: MakeBatch, what: str) -> None:
    decays_nothing = {"lr": 1e-3, "weight_decay": 0.0}
    batch = sao_batch(
        make_batch, sao.logprobs, method={"critic_options": decays_nothing}, optimizer={"lr": 1e-3, "weight_decay": 0.0}
    )
    if what == "all are stale":
        samples = [replace(sample, trains=False) for sample in batch.samples]
    else:
        samples = [replace(sample, mask=np.zeros_like(sample.mask), turns=()) for sample in batch.samples]
    base, weights = content(sao), critic_weights(sao)
    metrics = sao.step(replace(batch, samples=tuple(samples))).metrics
    assert all(np.isfinite(value) for value in metrics.values())
    for name in ("critic/loss", "critic/grad_norm", "critic/explained_variance", "loss", "grad_norm", "num_tokens"):
        assert metrics[name] == 0.0, name
    assert content(sao) == base
    assert all(torch.equal(weight, weights[name]) for name, weight in critic_weights(sao).items())


def test_a_bfloat16_critic_trains_and_leaves_what_is_served(
    make_worker: MakeWorker, make_model: MakeModel, make_batch: MakeBatch, tmp_path: Path
) -> None:
    method = {"critic_warmup_steps": 2}
    with working(make_worker, make_model(dtype="bfloat16"), method, dtype="bfloat16") as worker:
        batch = sao_batch(make_batch, worker.logprobs, noise=0.1, method=method)
        base = content(worker)
        for _ in range(2):
            result = worker.step(batch)
            assert not result.trained_policy
            assert all(np.isfinite(value) for value in result.metrics.values())
            assert content(worker) == base
        worker.save(tmp_path / "half")
        saved, expected = worker.digest(), worker.step(batch)
        assert expected.trained_policy
        assert all(np.isfinite(value) for value in expected.metrics.values())
        assert content(worker) != base
        worker.reset()
        assert content(worker) == base
        worker.restore(tmp_path / "half")
        assert worker.digest() == saved
        assert worker.step(batch).metrics == expected.metrics


def test_the_norm_before_attention_is_no_part_of_it_by_either_name() -> None:
    layer = "decoder.layers.0."
    assert megatron._is_attention(layer + "self_attention.linear_qkv.weight")
    assert megatron._is_attention(layer + "self_attention.q_layernorm.weight")
    assert not megatron._is_attention(layer + "input_layernorm.weight")
    assert not megatron._is_attention(layer + "self_attention.linear_qkv.layer_norm_weight")  # Transformer Engine
