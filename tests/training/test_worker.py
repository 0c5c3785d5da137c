"""One rank in this process against a plain PyTorch step of the same model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from reef.errors import StepFailedError
from reef.options import OptimizerOptions
from reef.training.worker import MegatronWorker
from reef.types import Batch, Sample

MakeModel = Callable[..., Path]
MakeBatch = Callable[..., Batch]

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def base_weights(worker: MegatronWorker) -> None:
    """Each test begins with the base model's weights and no moments."""
    worker.reset()


def weights(worker: MegatronWorker, tmp_path: Path) -> dict[str, torch.Tensor]:
    published = worker.publish("now", tmp_path / "weights")
    assert published is not None
    return load_file(Path(published.path) / "model.safetensors")


def reference_logprobs(model_path: Path, tokens: np.ndarray, temperature: float) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    return _logprobs(model, ids, temperature)[0]


def _logprobs(model: torch.nn.Module, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1] / temperature
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_transformers(
    worker: MegatronWorker, make_model: MakeModel, make_batch: MakeBatch, temperature: float
) -> None:
    sequences = [sample.tokens for sample in make_batch().samples]
    found = worker.logprobs(sequences, temperature)
    assert found is not None
    for tokens, logprobs in zip(sequences, found, strict=True):
        with torch.no_grad():
            expected = reference_logprobs(make_model(), tokens, temperature)
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_under_the_sampling_temperature_ratios_are_one(
    worker: MegatronWorker, make_batch: MakeBatch, temperature: float
) -> None:
    result = worker.step(make_batch(worker.logprobs, temperature=temperature))
    assert result.metrics["train_rollout_logprob_abs_diff_max"] < 1e-4
    assert result.metrics["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert result.metrics["pg_clipfrac"] == 0.0


@pytest.mark.parametrize("aggregation", ["rollout-mean", "token-mean"])
def test_three_steps_equal_three_of_plain_pytorch(
    worker: MegatronWorker, make_model: MakeModel, make_batch: MakeBatch, tmp_path: Path, aggregation: str
) -> None:
    batch = make_batch(worker.logprobs, noise=0.2, temperature=0.8)
    method = dict(batch.settings["method"]) | {"aggregation": aggregation}
    batch = replace(batch, settings=dict(batch.settings) | {"method": method})
    model = transformers.AutoModelForCausalLM.from_pretrained(make_model(), dtype=torch.float32)
    optimizer = reference_optimizer(model, OptimizerOptions.model_validate(batch.settings["optimizer"]))
    for _ in range(3):
        result = worker.step(batch)
        loss = reference_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), batch.settings["optimizer"]["clip_grad"])
        optimizer.step()
        assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
        assert result.metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    trained = weights(worker, tmp_path)
    for name, expected in model.state_dict().items():
        if name in trained:
            torch.testing.assert_close(trained[name], expected, atol=2e-5, rtol=1e-4)


def reference_optimizer(model: torch.nn.Module, options: OptimizerOptions) -> torch.optim.AdamW:
    """AdamW as Megatron groups it: biases and norms do not decay."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=options.lr,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_eps,
    )


def reference_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """GRPO's loss written sample by sample, with Python's own means."""
    settings = batch.settings["method"]
    by_group: dict[str, list[Sample]] = {}
    for sample in batch.samples:
        by_group.setdefault(sample.group, []).append(sample)
    prompts, tokens = [], []
    for samples in by_group.values():
        rewards = np.array([sample.reward for sample in samples])
        rollouts = []
        for sample in samples:
            advantage = float((sample.reward - rewards.mean()) / np.sqrt(rewards.var() + 1e-6))
            ids = torch.from_numpy(sample.tokens.astype(np.int64))[None]
            new = _logprobs(model, ids, sample.temperature)[0][torch.from_numpy(sample.mask[1:])]
            ratio = (new - torch.from_numpy(sample.logprobs[sample.mask])).exp()
            clipped = ratio.clamp(1 - 0.2, 1 + 0.28)
            losses = -torch.minimum(ratio * advantage, clipped * advantage)
            rollouts.append(losses.mean())
            tokens.append(losses)
        prompts.append(torch.stack(rollouts).mean())
    if settings["aggregation"] == "token-mean":
        return torch.cat(tokens).mean()
    return torch.stack(prompts).mean()


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_batch_and_state_give_the_same_bits(
    worker: MegatronWorker, make_batch: MakeBatch, tmp_path: Path, threads: int
) -> None:
    batch = make_batch(noise=0.1, threads=threads)
    worker.save(tmp_path / "start")
    contents = []
    for attempt in range(2):
        worker.restore(tmp_path / "start")
        metrics = [worker.step(batch).metrics for _ in range(2)]
        published = worker.publish(f"r{attempt}", tmp_path)
        assert published is not None
        contents.append((metrics, published.content_id, published.probe))
    assert contents[0] == contents[1]


def test_a_step_is_the_same_however_it_is_split_into_microbatches(
    worker: MegatronWorker, make_batch: MakeBatch, tmp_path: Path
) -> None:
    worker.save(tmp_path / "start")
    found = []
    for budget in (4096, 60, 1):
        worker.restore(tmp_path / "start")
        batch = make_batch(worker.logprobs, noise=0.1, budget_tokens=budget)
        metrics = worker.step(batch).metrics
        found.append((len(batch.microbatches), metrics))
    assert [count for count, _ in found] == [1, found[1][0], 8]
    assert 1 < found[1][0] < 8
    for _, metrics in found[1:]:
        for name in ("loss", "grad_norm", "num_tokens", "ratio", "train_rollout_logprob_abs_diff_max"):
            assert metrics[name] == pytest.approx(found[0][1][name], rel=1e-5, abs=1e-7)


def test_padding_changes_no_log_probability(worker: MegatronWorker, make_batch: MakeBatch) -> None:
    sequences = [sample.tokens for sample in make_batch().samples]
    together = worker.logprobs(sequences, 1.0)
    assert together is not None
    for i, tokens in enumerate(sequences):
        alone = worker.logprobs([tokens], 1.0)
        assert alone is not None
        np.testing.assert_allclose(alone[0], together[i], atol=1e-5)


def test_a_gradient_that_is_not_finite_moves_nothing(
    worker: MegatronWorker, make_batch: MakeBatch, tmp_path: Path
) -> None:
    good = make_batch(noise=0.1)
    bad = replace(good, samples=(replace(good.samples[0], reward=float("nan")), *good.samples[1:]))
    worker.step(good)  # so that there are moments to lose
    worker.save(tmp_path / "start")
    expected = (worker.step(good), worker.publish("expected", tmp_path))

    worker.restore(tmp_path / "start")
    before = worker.publish("before", tmp_path)
    random_numbers = torch.get_rng_state()
    with pytest.raises(StepFailedError, match="nothing moved"):
        worker.step(bad)
    after = worker.publish("after", tmp_path)
    assert before is not None
    assert after is not None
    assert (after.content_id, after.probe) == (before.content_id, before.probe)
    assert torch.equal(torch.get_rng_state(), random_numbers)

    result, published = worker.step(good), worker.publish("again", tmp_path)
    assert published is not None
    assert expected[1] is not None
    assert (result.step, result.metrics) == (expected[0].step, expected[0].metrics)
    assert published.content_id == expected[1].content_id


def test_samples_that_do_not_train_count_in_advantages_only(worker: MegatronWorker, make_batch: MakeBatch) -> None:
    batch = make_batch(worker.logprobs)
    one = batch.samples[0]
    fewer = replace(batch, samples=(replace(one, trains=False), *batch.samples[1:]))
    whole = worker.step(batch).metrics
    metrics = worker.step(fewer).metrics
    assert metrics["num_tokens"] == whole["num_tokens"] - one.mask.sum()
    assert metrics["reward_mean"] == whole["reward_mean"]


def test_a_sample_without_sampled_tokens_contributes_nothing(worker: MegatronWorker, make_batch: MakeBatch) -> None:
    batch = make_batch(worker.logprobs)  # NeMo 158
    empty = replace(batch.samples[0], mask=np.zeros_like(batch.samples[0].mask))
    metrics = worker.step(replace(batch, samples=(empty, *batch.samples[1:]))).metrics
    assert np.isfinite(metrics["loss"])
    nothing = replace(batch, samples=tuple(replace(s, mask=np.zeros_like(s.mask)) for s in batch.samples))
    metrics = worker.step(nothing).metrics
    assert (metrics["loss"], metrics["grad_norm"], metrics["num_tokens"]) == (0.0, 0.0, 0.0)


def test_a_masked_token_with_a_huge_log_ratio_does_no_harm(worker: MegatronWorker, make_batch: MakeBatch) -> None:
    batch = make_batch(worker.logprobs)
    wild = batch.samples[0].logprobs.copy()
    wild[~batch.samples[0].mask] = -1000.0
    samples = (replace(batch.samples[0], logprobs=wild), *batch.samples[1:])

    def gradient(of: tuple[Sample, ...]) -> tuple[float, float]:
        worker.reset()
        metrics = worker.step(replace(batch, samples=of)).metrics
        return metrics["loss"], metrics["grad_norm"]

    assert gradient(samples) == gradient(batch.samples)
    assert np.isfinite(worker.step(replace(batch, samples=samples)).metrics["grad_norm"])


def test_the_schedule_is_a_function_of_the_steps_done(worker: MegatronWorker, make_batch: MakeBatch) -> None:
    options = OptimizerOptions(lr=1e-3, min_lr=1e-4, lr_warmup_steps=2, lr_decay_steps=4, lr_decay_style="linear")
    batch = make_batch(optimizer=options.model_dump(mode="json"))
    rates = [worker.step(batch).metrics["lr"] for _ in range(6)]
    np.testing.assert_allclose(rates, [0, 5e-4, 1e-3, 5.5e-4, 1e-4, 1e-4])


def test_a_step_obeys_its_batch_and_not_the_worker(
    worker: MegatronWorker, make_batch: MakeBatch, tmp_path: Path
) -> None:
    still = OptimizerOptions(lr=1e-12, weight_decay=0.0).model_dump(mode="json")
    before = weights(worker, tmp_path)
    worker.step(make_batch(optimizer=still))
    for name, tensor in weights(worker, tmp_path).items():
        torch.testing.assert_close(tensor, before[name], atol=1e-9, rtol=0)


def test_a_bfloat16_policy_trains(
    worker: MegatronWorker,
    make_model: MakeModel,
    make_batch: MakeBatch,
    make_worker: Callable[..., MegatronWorker],
    tmp_path: Path,
) -> None:
    worker.close()
    half = make_worker(make_model(dtype="bfloat16"), dtype="bfloat16")
    try:
        batch = make_batch(half.logprobs)
        half.step(batch)
        half.save(tmp_path / "half")
        expected = half.step(batch).metrics
        assert half.restore(tmp_path / "half") == 1
        assert half.step(batch).metrics == expected
        assert np.isfinite(expected["loss"])
        assert expected["grad_norm"] > 0
    finally:
        half.close()
