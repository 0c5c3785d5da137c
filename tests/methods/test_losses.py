"""Vectors of METHODS 4.3 (PPO clip, reducers) and the numeric cases."""

import numpy as np
import pytest
import torch

from reef.methods.losses import ppo_clip
from reef.methods.weights import token_weights
from reef.types import Sample


def make_sample(
    report: str, group: str, mask: list[int], *, trains: bool = True, receipt: str = "r", reward: float = 1.0
) -> Sample:
    size = len(mask)
    return Sample(
        report_id=report,
        receipt_id=receipt,
        group=group,
        reward=reward,
        tokens=np.arange(size, dtype=np.int32),
        mask=np.array(mask, dtype=np.bool_),
        logprobs=np.zeros(size, np.float32),
        temperature=1.0,
        trains=trains,
    )


def loss_of(ratios: list[float], advantages: list[float], low: float, high: float) -> tuple[list[float], list[float]]:
    logprobs = torch.tensor(ratios).log().requires_grad_()
    zeros = torch.zeros(len(ratios))
    mask = torch.ones(len(ratios), dtype=torch.bool)
    loss, metrics = ppo_clip(logprobs, zeros, torch.tensor(advantages), mask, clip_low=low, clip_high=high)
    loss.sum().backward()
    assert logprobs.grad is not None
    assert metrics["pg_clipfrac"].shape == loss.shape
    return loss.tolist(), logprobs.grad.tolist()


def test_ppo_clip_is_the_published_vector_without_its_dual_clip() -> None:
    # METHODS: r [2, 2, .5], A [2, -2, 2], eps .2 gives [-2.4, 4, -1]; a dual clip of 1.5 would make the 4 a 3.
    loss, gradient = loss_of([2, 2, 0.5], [2, -2, 2], 0.2, 0.2)
    np.testing.assert_allclose(loss, [-2.4, 4.0, -1.0], rtol=1e-6)
    np.testing.assert_allclose(gradient, [0.0, 4.0, -1.0], rtol=1e-6)


def test_the_upper_bound_is_its_own() -> None:
    loss, gradient = loss_of([1.25, 1.3, 0.7, 0.7], [1, 1, -1, 1], 0.2, 0.28)
    np.testing.assert_allclose(loss, [-1.25, -1.28, 0.8, -0.7], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-1.25, 0.0, 0.0, -0.7], rtol=1e-6)


def test_token_mean_of_the_clip_is_the_published_vector() -> None:
    log_ratios = torch.tensor([[0.1, 0.2, 0.05, 0.15], [0.15, 0.1, 0.2, 0.05]])
    advantages = torch.tensor([[1.0, 2, 3, 4], [4, 3, 2, 1]])
    mask = torch.ones(2, 4, dtype=torch.bool)
    loss, _ = ppo_clip(log_ratios, torch.zeros(2, 4), advantages, mask, clip_low=0.2, clip_high=0.2)
    assert loss.mean().item() == pytest.approx(-2.840055, abs=1e-6)


def test_a_masked_token_with_a_huge_log_ratio_has_no_loss_and_no_gradient() -> None:
    logprobs = torch.tensor([100.0, float("inf"), 0.0], requires_grad=True)
    mask = torch.tensor([False, False, True])
    loss, metrics = ppo_clip(logprobs, torch.zeros(3), torch.ones(3), mask, clip_low=0.2, clip_high=0.2)
    loss.sum().backward()
    assert loss.tolist() == [0.0, 0.0, -1.0]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0, -1.0]
    assert metrics["ratio"].isfinite().all()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_huge_log_ratio_that_counts_stays_finite(advantage: float) -> None:
    logprobs = torch.tensor([100.0, -100.0], requires_grad=True)
    advantages = torch.full((2,), advantage)
    mask = torch.ones(2, dtype=torch.bool)
    loss, _ = ppo_clip(logprobs, torch.zeros(2), advantages, mask, clip_low=0.2, clip_high=0.2)
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


def total(samples: list[Sample], values: list[list[float]], aggregation: str) -> float:
    weights = token_weights(samples, aggregation)  # type: ignore[arg-type]
    return float(sum((w * np.array(v)).sum() for w, v in zip(weights, values, strict=True)))


VALUES = [[1.0, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]


def test_the_reducers_are_the_published_ones() -> None:
    # Three samples of one rollout share its denominator of 9, another rollout has 3: (45 / 9 + 33 / 3) / 2 = 8.
    shared = [make_sample("a", "g", [1, 1, 1]) for _ in range(3)] + [make_sample("b", "g", [1, 1, 1])]
    assert total(shared, VALUES, "rollout-mean") == pytest.approx(8.0)
    assert total(shared, VALUES, "token-mean") == pytest.approx(6.5)
    three = [make_sample(name, "g", [1, 1, 1]) for name in "abc"]
    assert 3 * total(three, VALUES[:3], "rollout-mean") == pytest.approx(15.0)  # their means, summed


def test_four_rollouts_of_growing_size_give_the_mean_of_means() -> None:
    values = [[float(n * 10**k) for n in range(1, 9)] for k in range(4)]
    samples = [make_sample(str(k), "g", [1] * 8) for k in range(4)]
    assert total(samples, values, "rollout-mean") == pytest.approx(1249.875, rel=1e-6)


def test_rollout_mean_weighs_prompts_alike() -> None:
    samples = [make_sample("a", "g", [1, 1]), make_sample("b", "g", [0, 1]), make_sample("c", "h", [1, 1])]
    weights = token_weights(samples, "rollout-mean")
    np.testing.assert_allclose(weights[0], [1 / 8, 1 / 8])
    np.testing.assert_allclose(weights[1], [0, 1 / 4])
    np.testing.assert_allclose(weights[2], [1 / 4, 1 / 4])


@pytest.mark.parametrize("aggregation", ["rollout-mean", "token-mean"])
def test_samples_that_do_not_train_or_hold_no_token_are_in_no_denominator(aggregation: str) -> None:
    samples = [
        make_sample("a", "g", [0, 1]),
        make_sample("stale", "g", [1, 1], trains=False),
        make_sample("empty", "g", [0, 0]),
        make_sample("alone", "h", [0, 0]),
    ]
    weights = token_weights(samples, aggregation)  # type: ignore[arg-type]
    assert [w.tolist() for w in weights] == [[0, 1], [0, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize("aggregation", ["rollout-mean", "token-mean"])
def test_a_batch_without_any_token_has_no_weight_and_no_error(aggregation: str) -> None:
    assert token_weights([make_sample("a", "g", [0])], aggregation)[0].tolist() == [0.0]  # type: ignore[arg-type]
