"""Each ratio's vectors of METHODS 4.3, its bounds, and what masks and extremes do to it; and the reducers."""

from collections.abc import Callable
from math import exp, inf, log

import numpy as np
import pytest
import torch

from reef.methods.losses import (
    Loss,
    cispo,
    decoupled,
    dis,
    dppo,
    gspo,
    ppo_clip,
    proximal_logprobs,
    reinforce,
    sapo,
)

Ratio = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], Loss]


def run(
    ratio: Ratio, logprobs: list[float], old: list[float], advantages: list[float], mask: list[bool] | None = None
) -> tuple[list[float], list[float], dict[str, list[float]]]:
    """Loss, gradient of its sum by logprobs, and metrics."""
    leaf = torch.tensor(logprobs, requires_grad=True)
    counts = torch.ones(len(logprobs), dtype=torch.bool) if mask is None else torch.tensor(mask)
    loss, metrics = ratio(leaf, torch.tensor(old), torch.tensor(advantages), counts)
    loss.sum().backward()
    assert leaf.grad is not None
    assert not any(value.requires_grad or value.shape != loss.shape for value in metrics.values())
    return loss.tolist(), leaf.grad.tolist(), {name: value.tolist() for name, value in metrics.items()}


def clip(low: float, high: float, dual: float | None = None) -> Ratio:
    return lambda *arrays: ppo_clip(*arrays, clip_low=low, clip_high=high, dual_clip=dual)


def logs(ratios: list[float]) -> list[float]:
    return [log(ratio) for ratio in ratios]


def test_ppo_clip_is_the_published_vector_without_its_dual_clip() -> None:
    # METHODS: r [2, 2, .5], A [2, -2, 2], eps .2 gives [-2.4, 4, -1]; a dual clip of 1.5 would make the 4 a 3.
    loss, gradient, _ = run(clip(0.2, 0.2), logs([2, 2, 0.5]), [0.0] * 3, [2.0, -2, 2])
    np.testing.assert_allclose(loss, [-2.4, 4.0, -1.0], rtol=1e-6)
    np.testing.assert_allclose(gradient, [0.0, 4.0, -1.0], rtol=1e-6)


def test_ppo_clip_is_the_published_vector_with_its_dual_clip() -> None:
    loss, gradient, metrics = run(clip(0.2, 0.2, 1.5), logs([2, 2, 0.5]), [0.0] * 3, [2.0, -2, 2])
    np.testing.assert_allclose(loss, [-2.4, 3.0, -1.0], rtol=1e-6)
    np.testing.assert_allclose(gradient, [0.0, 0.0, -1.0], rtol=1e-6)
    assert metrics["pg_clipfrac"] == [1.0, 1.0, 0.0]
    assert metrics["effective_token_rate"] == [1.0, 1.0, 1.0]  # clipping is no rejection


def test_the_upper_bound_is_its_own() -> None:
    loss, gradient, _ = run(clip(0.2, 0.28), logs([1.25, 1.3, 0.7, 0.7]), [0.0] * 4, [1.0, 1, -1, 1])
    np.testing.assert_allclose(loss, [-1.25, -1.28, 0.8, -0.7], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-1.25, 0.0, 0.0, -0.7], rtol=1e-6)


LOG_RATIOS = torch.tensor([[0.1, 0.2, 0.05, 0.15], [0.15, 0.1, 0.2, 0.05]])
ADVANTAGES = torch.tensor([[1.0, 2, 3, 4], [4, 3, 2, 1]])
TWO_ROWS = torch.tensor([[0] * 4, [1] * 4])
ALL = torch.ones(2, 4, dtype=torch.bool)


def by_sequence(logprobs: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float) -> Loss:
    return gspo(logprobs, torch.zeros(2, 4), advantages, ALL, TWO_ROWS, 2, clip_low=clip_low, clip_high=clip_high)


def test_token_and_sequence_ratios_give_the_published_means() -> None:
    loss, _ = ppo_clip(LOG_RATIOS, torch.zeros(2, 4), ADVANTAGES, ALL, clip_low=0.2, clip_high=0.2)
    assert loss.mean().item() == pytest.approx(-2.840055, abs=1e-6)
    loss, _ = by_sequence(LOG_RATIOS, ADVANTAGES, clip_low=0.2, clip_high=0.2)
    assert loss.mean().item() == pytest.approx(-2.832871, abs=1e-6)


def test_each_sequence_has_the_ratio_of_its_mean() -> None:
    sequences = torch.tensor([0, 0, 1, 1, 1])
    mask = torch.tensor([True, True, True, False, True])
    log_ratios = torch.tensor([0.25, 0.75, 1.5, 100.0, 0.5])
    _, metrics = gspo(log_ratios, torch.zeros(5), torch.ones(5), mask, sequences, 2, clip_low=0.5, clip_high=9.0)
    np.testing.assert_allclose(metrics["ratio"], [exp(0.5), exp(0.5), exp(1), 1.0, exp(1)], rtol=1e-6)


def test_a_ratio_of_one_gives_the_mean_advantage() -> None:
    advantages = torch.tensor([[1.0, 2, 3, 4], [0.5] * 4])
    loss, _ = by_sequence(torch.zeros(2, 4), advantages, clip_low=3e-4, clip_high=4e-4)
    assert loss.mean().item() == -1.5


def test_gspo_s_gradient_is_that_through_the_sequence_s_ratio_where_its_tokens_share_an_advantage() -> None:
    advantages = torch.tensor([[2.0] * 4, [-0.5] * 4])
    mine, theirs = LOG_RATIOS.clone().requires_grad_(), LOG_RATIOS.clone().requires_grad_()
    loss, _ = by_sequence(mine, advantages, clip_low=0.3, clip_high=0.3)
    loss.sum().backward()
    (-theirs.mean(1, keepdim=True).exp() * advantages).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)


def test_gspo_s_gradient_is_each_token_s_own_where_they_do_not() -> None:
    logprobs = LOG_RATIOS.clone().requires_grad_()
    loss, _ = by_sequence(logprobs, ADVANTAGES, clip_low=0.2, clip_high=0.2)
    loss.sum().backward()
    torch.testing.assert_close(logprobs.grad, -exp(0.125) * ADVANTAGES)


def test_gspo_clips_the_side_that_the_advantage_pushes_to() -> None:
    logprobs = torch.full((2, 4), 0.01).requires_grad_()
    advantages = torch.tensor([[1.0] * 4, [-1.0] * 4])
    loss, metrics = by_sequence(logprobs, advantages, clip_low=3e-4, clip_high=4e-4)
    loss.sum().backward()
    assert metrics["pg_clipfrac"].tolist() == [[1.0] * 4, [0.0] * 4]
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0] * 4, [exp(0.01)] * 4]))


CISPO_LOGPROBS = [-0.7, -1.2, -0.4, -2.1]
CISPO_ADVANTAGES = [1.0, -0.5, 2.0, -1.0]


@pytest.mark.parametrize(
    ("low", "high", "ratios", "loss", "gradient", "clipped"),
    [
        (0.2, 0.28, [1, 1.14, 1.56, 0.4], [0.7, -0.684, 1.024, -1.68], [-1, 0.57, -2.56, 0.8], [0, 0, 1, 1]),
        (1.0, 4.0, [1, 3, 9, 0.4], [0.7, -1.8, 4, -0.84], [-1, 1.5, -10, 0.4], [0, 0, 1, 0]),
    ],
)
def test_cispo_is_the_published_vector(
    low: float, high: float, ratios: list[float], loss: list[float], gradient: list[float], clipped: list[float]
) -> None:
    old = [logprob - log_ratio for logprob, log_ratio in zip(CISPO_LOGPROBS, logs(ratios), strict=True)]
    found = run(lambda *arrays: cispo(*arrays, clip_low=low, clip_high=high), CISPO_LOGPROBS, old, CISPO_ADVANTAGES)
    np.testing.assert_allclose(found[0], loss, rtol=2e-6)
    np.testing.assert_allclose(found[1], gradient, rtol=2e-6)
    assert found[2]["pg_clipfrac"] == clipped


def soft(positive: float, negative: float) -> Ratio:
    return lambda *arrays: sapo(*arrays, tau_positive=positive, tau_negative=negative)


def test_sapo_at_a_ratio_of_one_is_the_published_vector() -> None:
    loss, gradient, _ = run(soft(1.0, 1.05), [-0.3], [-0.3], [1.0])
    assert loss == [-2.0]
    assert gradient == [-1.0]  # that of the plain policy gradient


def test_sapo_has_a_temperature_for_either_sign() -> None:
    loss, gradient, _ = run(soft(1.0, 2.0), logs([1.5, 1.5]), [0.0, 0.0], [1.0, -1.0])
    gates = [1 / (1 + exp(-0.5)), 1 / (1 + exp(-1.0))]
    np.testing.assert_allclose(loss, [-4 * gates[0], 2 * gates[1]], rtol=1e-6)
    slopes = [-4 * gates[0] * (1 - gates[0]) * 1.5, 4 * gates[1] * (1 - gates[1]) * 1.5]
    np.testing.assert_allclose(gradient, slopes, rtol=1e-6)


def double_sided(low: float, high: float) -> Ratio:
    return lambda *arrays: dis(*arrays, clip_low=low, clip_high=high)


DIS_LOGPROBS = [0.0, 0.4, -0.7, 1.5, 0.2]
DIS_ENGINE = [0.0, -1.0, 0.5, -2.0, 0.1]
DIS_ADVANTAGES = [1.0, -2.0, 0.5, 3.0, -1.0]


@pytest.mark.parametrize(
    ("low", "high", "loss", "rejected"),
    [
        (0.3, 5.0, [0, 3.24416, 0, 0, 0.221034], [0, 0, 1, 1, 0]),
        (0.3, 3.0, [0, 0, 0, 0, 0.221034], [0, 1, 1, 1, 0]),
        (0.8, 5.0, [0, 3.24416, 0.105418, 0, 0.221034], [0, 0, 0, 1, 0]),
        (0.8, 3.0, [0, 0, 0.105418, 0, 0.221034], [0, 1, 0, 1, 0]),
    ],
)
def test_dis_is_the_published_table(low: float, high: float, loss: list[float], rejected: list[float]) -> None:
    found, gradient, metrics = run(double_sided(low, high), DIS_LOGPROBS, DIS_ENGINE, DIS_ADVANTAGES)
    np.testing.assert_allclose(found, loss, rtol=2e-6)
    np.testing.assert_allclose(metrics["ratio"], [1, 4.0552, 0.301194, 33.115452, 1.105171], rtol=2e-6)
    assert metrics["pg_clipfrac"] == rejected
    assert metrics["effective_token_rate"] == [1 - value for value in rejected]
    kept = np.array(metrics["effective_token_rate"])
    np.testing.assert_allclose(gradient, -kept * metrics["ratio"] * np.array(DIS_ADVANTAGES), rtol=1e-6)


def test_dis_has_the_published_gradient() -> None:
    _, gradient, _ = run(double_sided(0.3, 5.0), DIS_LOGPROBS, DIS_ENGINE, DIS_ADVANTAGES)
    np.testing.assert_allclose(gradient, [-1, 8.1104, 0, 0, 1.105171], rtol=2e-6)


def test_dis_rejects_the_published_far_tokens() -> None:
    assert run(double_sided(0.3, 5.0), [5.0], [0.0], [10.0])[0] == [0.0]
    _, gradient, metrics = run(double_sided(0.3, 5.0), logs([1, 0.69, 6.1]), [0.0] * 3, [1.0, -1, 1])
    assert metrics["effective_token_rate"] == [1.0, 0.0, 0.0]
    assert gradient == [-1.0, 0.0, 0.0]


@pytest.mark.parametrize(("low", "high"), [(0.5, 1.0), (0.3, 5.0)])
def test_dis_rejects_a_ratio_that_lies_on_either_bound(low: float, high: float) -> None:
    bounds = np.array([1 - low, 1 + high], np.float32)
    logprobs = torch.tensor(bounds).log()
    assert logprobs.exp().tolist() == bounds.tolist()  # so that they do lie on them
    _, _, metrics = run(double_sided(low, high), logprobs.tolist(), [0.0, 0.0], [1.0, 1.0])
    assert metrics["pg_clipfrac"] == [1.0, 1.0]
    inside = [log(bounds[0]) + 1e-5, log(bounds[1]) - 1e-5]
    assert run(double_sided(low, high), inside, [0.0, 0.0], [1.0, 1.0])[2]["pg_clipfrac"] == [0.0, 0.0]


@pytest.mark.parametrize("advantage", [3.0, -3.0])
def test_a_token_that_dis_rejects_has_no_loss_and_no_gradient_whatever_its_advantage(advantage: float) -> None:
    far = [-0.5, -0.5, -100.0, -1e30, -inf, -0.5]
    engine = [-9.0, -0.1, -0.1, -0.1, -0.1, -1e30]
    loss, gradient, metrics = run(double_sided(0.3, 5.0), far, engine, [advantage] * 6)
    assert loss == gradient == [0.0] * 6
    assert metrics["pg_clipfrac"] == [1.0] * 6
    assert np.isfinite(metrics["ratio"]).all()


@pytest.mark.parametrize(
    "ratio",
    [double_sided(0.3, 5.0), clip(0.2, 0.28), soft(1.0, 1.05), reinforce],
    ids=["dis", "ppo-clip", "sapo", "none"],
)
def test_a_log_probability_that_is_not_a_number_is_not_hidden(ratio: Ratio) -> None:
    loss, _, _ = run(ratio, [float("nan")], [0.0], [1.0])
    assert np.isnan(loss).all()


@pytest.mark.parametrize(
    ("behaviour", "current", "behaviour_version", "version", "expected"),
    [
        (-1.0, -1.5, 0, 2, -1.25),
        (-1.0, -1.5, 0, 4, -1.375),
        (-2.0, -2.2, 2, 4, -2.1),
        (-1.0, -1.5, 3, 4, -1.0),  # one version behind: the sampler
        (-1.0, -1.5, 4, 4, -1.0),  # and what is no older than the policy itself
    ],
)
def test_the_proximal_policy_is_the_published_vector(
    behaviour: float, current: float, behaviour_version: float, version: float, expected: float
) -> None:
    versions = torch.tensor([float(behaviour_version)])
    found = proximal_logprobs(torch.tensor([behaviour]), torch.tensor([current]), versions, version)
    assert found.tolist() == pytest.approx([expected])


def test_the_proximal_policy_between_probabilities_is_the_published_vector() -> None:
    behaviour, current = torch.tensor([log(0.5)]), torch.tensor([log(0.25)], requires_grad=True)
    found = proximal_logprobs(behaviour, current, torch.tensor([0.0]), 2.0, space="linear")
    assert found.tolist() == pytest.approx([log(0.375)])
    assert not found.requires_grad


def from_proximal(proximal: list[float], cap: float) -> Ratio:
    return lambda logprobs, engine, advantages, mask: decoupled(
        logprobs, engine, torch.tensor(proximal), advantages, mask, clip_low=0.2, clip_high=0.28, behaviour_cap=cap
    )


def test_decoupled_ppo_weighs_the_clipped_loss_by_proximal_over_engine() -> None:
    proximal = [-1.0, -1.0, -1.0]
    logprobs = [-1.0 + value for value in logs([1.1, 1.5, 0.5])]
    engine = [-1.0 - value for value in logs([2.0, 3.0, 0.5])]
    loss, gradient, metrics = run(from_proximal(proximal, 5.0), logprobs, engine, [1.0, 1.0, -2.0])
    np.testing.assert_allclose(loss, [-2.0 * 1.1, -3.0 * 1.28, 0.5 * 0.8 * 2], rtol=2e-6)
    np.testing.assert_allclose(gradient, [-2.0 * 1.1, 0.0, 0.0], rtol=2e-6)
    assert metrics["pg_clipfrac"] == [0.0, 1.0, 1.0]
    assert metrics["effective_token_rate"] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_decoupled_ppo_rejects_above_its_cap_alone(advantage: float) -> None:
    engine = logs([0.5, 0.25, 1e-9, 4.0])  # weights 2, 4, 1e9 and 0.25; the cap itself is kept
    loss, gradient, metrics = run(from_proximal([0.0] * 4, 4.0), [0.0] * 4, engine, [advantage] * 4)
    np.testing.assert_allclose(loss, [-2 * advantage, -4 * advantage, 0.0, -0.25 * advantage], rtol=1e-6)
    assert gradient == loss
    assert loss[2] == 0.0
    assert metrics["effective_token_rate"] == [1.0, 1.0, 0.0, 1.0]
    assert metrics["pg_clipfrac"] == [0.0, 0.0, 1.0, 0.0]


def test_dppo_rejects_by_how_far_the_probability_moved_and_keeps_its_pull_back() -> None:
    probabilities, engine = [0.75, 0.75, 0.55, 0.25, 0.25], [0.5] * 5
    advantages = [1.0, -1.0, 1.0, -1.0, 1.0]  # up and up: rejected; up and down: kept; not far: kept; ...
    loss, gradient, metrics = run(
        lambda *arrays: dppo(*arrays, clip_low=0.2, clip_high=0.2, kl=0.01),
        logs(probabilities),
        logs(engine),
        advantages,
    )
    kept = np.array([0.0, 1.0, 1.0, 0.0, 1.0])
    ratios = np.array(probabilities) / 0.5
    np.testing.assert_allclose(loss, -kept * ratios * advantages + 0.01 * np.log(ratios) ** 2, rtol=2e-6)
    np.testing.assert_allclose(gradient, -kept * ratios * advantages + 0.02 * np.log(ratios), rtol=2e-6)
    assert metrics["effective_token_rate"] == kept.tolist()
    assert metrics["pg_clipfrac"] == (1 - kept).tolist()


def test_dppo_counts_an_advantage_of_zero_among_the_negative_ones() -> None:
    ratio: Ratio = lambda *arrays: dppo(*arrays, clip_low=0.2, clip_high=0.2, kl=0.0)  # noqa: E731
    _, _, metrics = run(ratio, logs([0.25, 0.75]), logs([0.5, 0.5]), [0.0, 0.0])
    assert metrics["effective_token_rate"] == [0.0, 1.0]


def test_without_a_ratio_the_loss_is_the_plain_policy_gradient() -> None:
    loss, gradient, metrics = run(reinforce, [-0.5, -2.0], [-9.0, -0.1], [2.0, -3.0])
    assert loss == [1.0, -6.0]
    assert gradient == [-2.0, 3.0]
    assert metrics["pg_clipfrac"] == [0.0, 0.0]


def test_a_masked_token_with_a_huge_log_ratio_has_no_loss_and_no_gradient() -> None:
    mask = [False, False, True]
    loss, gradient, metrics = run(clip(0.2, 0.2), [100.0, inf, 0.0], [0.0] * 3, [1.0] * 3, mask)
    assert loss == gradient == [0.0, 0.0, -1.0]
    assert np.isfinite(metrics["ratio"]).all()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_huge_log_ratio_that_counts_stays_finite(advantage: float) -> None:
    loss, gradient, _ = run(clip(0.2, 0.2), [100.0, -100.0], [0.0] * 2, [advantage] * 2)
    assert np.isfinite(loss).all()
    assert np.isfinite(gradient).all()
