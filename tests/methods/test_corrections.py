"""Corrections of engine against trainer, and the off-policy sequence mask: vectors of METHODS 4.3, worked by hand."""

from math import exp, log

import numpy as np
import pytest
import torch

from reef.methods.corrections import Level, icepop, level_ratios, mis, off_policy_sequence_mask, tis
from reef.methods.kl import kl

BIG = 1e30


def rows(values: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Log-ratios as the arguments that corrections begin with: one sequence a row, all of it counted."""
    logprobs = torch.tensor(values)
    sequences = torch.arange(len(values))[:, None].expand(logprobs.shape)
    return logprobs, torch.zeros_like(logprobs), torch.ones_like(logprobs, dtype=torch.bool), sequences, len(values)


@pytest.mark.parametrize(
    ("log_ratios", "low", "high", "kept"),
    [([0.0, 1, 0], 0.0, 2.0, [1, 0, 1]), ([0.0, -1, 0], 0.5, 2.0, [1, 0, 1]), ([0.0, 2, -0.5], 0.0, 5.0, [1, 0, 1])],
)
def test_masking_by_token_is_the_published_vector(
    log_ratios: list[float], low: float, high: float, kept: list[int]
) -> None:
    weights = mis(*rows([log_ratios]), level="token", low=low, high=high)
    np.testing.assert_allclose(weights[0], np.array(kept) * np.exp(log_ratios), rtol=1e-6)
    same = icepop(level_ratios(*rows([log_ratios]), "token"), torch.ones(1, 3, dtype=torch.bool), low=low, high=high)
    assert torch.equal(weights, same)


def test_the_geometric_mean_of_a_sequence_is_the_published_vector() -> None:
    weights = mis(*rows([[0.0, 0.5, 1.0]]), level="geometric", low=0.5, high=2.0)
    np.testing.assert_allclose(weights, [[exp(0.5)] * 3], rtol=1e-6)


def test_truncating_a_geometric_mean_is_the_published_vector() -> None:
    ratios = level_ratios(*rows([[0.0, 4.0, 0.0]]), "geometric")
    np.testing.assert_allclose(ratios, [[exp(4 / 3)] * 3], rtol=1e-6)
    assert tis(ratios, torch.ones(1, 3, dtype=torch.bool), low=0.0, high=3.0).tolist() == [[3.0] * 3]


def test_a_far_sequence_is_rejected_and_the_other_keeps_its_weights() -> None:
    weights = mis(*rows([[-1.0, -1.0], [0.25, 0.75]]), level="geometric", low=0.5, high=2.0)
    np.testing.assert_allclose(weights, [[0.0, 0.0], [exp(0.5)] * 2], rtol=1e-6)


def test_the_mean_of_k2_is_the_published_one() -> None:
    logprobs, reference, mask, _, _ = rows([[0.0, 2.0, 0.0]])
    assert kl(logprobs, reference, mask, "k2").mean().item() == pytest.approx(2 / 3)


def test_the_product_over_a_sequence_decides_for_all_its_tokens() -> None:
    log_ratios = [[0.2, 0.3, 0.1], [0.5, 0.5, -0.2], [3.0, -3.0, 0.0]]
    weights = mis(*rows(log_ratios), level="sequence", low=0.5, high=2.0)
    np.testing.assert_allclose(weights, [[exp(0.6)] * 3, [0.0] * 3, [1.0] * 3], rtol=1e-6)


def test_tis_clips_on_both_sides() -> None:
    ratios = level_ratios(*rows([[log(3), log(0.25), log(1.5)]]), "token")
    weights = tis(ratios, torch.tensor([[True, True, True]]), low=0.5, high=2.0)
    np.testing.assert_allclose(weights, [[2.0, 0.5, 1.5]], rtol=1e-6)


def test_the_bounds_of_icepop_are_inside() -> None:
    ratios = torch.tensor([0.5, 5.0, 0.49999, 5.00001])
    assert icepop(ratios, torch.ones(4, dtype=torch.bool), low=0.5, high=5.0).tolist() == [0.5, 5.0, 0.0, 0.0]


def test_one_vetoed_token_rejects_its_whole_sequence_and_no_other() -> None:
    log_ratios = [[0.1, log(1e-5), 0.2], [0.1, log(1e-3), 0.2]]
    assert mis(*rows(log_ratios), level="token", low=0.0, high=9.0, veto=1e-4)[0].tolist() == [0.0] * 3
    np.testing.assert_allclose(
        mis(*rows(log_ratios), level="token", low=0.0, high=9.0, veto=1e-4)[1], np.exp(log_ratios[1]), rtol=1e-6
    )
    balanced = [[9.0, -9.5, 0.5], [0.0, 0.0, 0.0]]  # each product is 1, one of them by way of a token of e^-9.5
    weights = mis(*rows(balanced), level="sequence", low=0.5, high=2.0, veto=1e-4)
    assert weights.tolist() == [[0.0] * 3, [1.0] * 3]


def test_a_masked_token_vetoes_nothing_and_counts_in_no_mean() -> None:
    logprobs, engine, mask, sequences, num = rows([[0.5, -99.0, 0.5]])
    mask = torch.tensor([[True, False, True]])
    for level, weight in (("token", 0.5), ("geometric", 0.5), ("sequence", 1.0)):
        found = mis(logprobs, engine, mask, sequences, num, level=level, low=0.5, high=3.0, veto=1e-4)  # type: ignore[arg-type]
        np.testing.assert_allclose(found, [[exp(weight), 0.0, exp(weight)]], rtol=1e-6)


def drop(means: list[float], advantages: list[float], delta: float) -> list[float]:
    """The mask for sequences of one token each, whose mean of engine - trainer is `means`."""
    engine = torch.tensor(means)
    mask = torch.ones(len(means), dtype=torch.bool)
    kept = off_policy_sequence_mask(
        torch.zeros_like(engine),
        engine,
        torch.tensor(advantages),
        mask,
        torch.arange(len(means)),
        len(means),
        delta=delta,
    )
    return list(kept.tolist())


def test_the_off_policy_sequence_mask_is_the_published_vector() -> None:
    assert drop([2.0, 0.5, 2.0], [1.0, -1.0, -1.0], 1.0) == [1.0, 1.0, 0.0]


def test_a_sequence_at_the_threshold_or_without_advantage_is_kept() -> None:
    assert drop([1.0, 2.0], [-1.0, 0.0], 1.0) == [1.0, 1.0]


def test_the_sequence_mask_looks_at_means_over_the_tokens_that_count() -> None:
    logprobs, engine, _, sequences, num = rows([[-3.0, BIG, -1.0], [-3.0, BIG, -0.5]])
    mask = torch.tensor([[True, False, True]] * 2)
    advantages = torch.tensor([[0.5, BIG, -1.0]] * 2)  # a critic's: their mean is negative
    kept = off_policy_sequence_mask(logprobs, engine, advantages, mask, sequences, num, delta=1.9)
    assert kept.tolist() == [[0.0] * 3, [1.0, 0.0, 1.0]]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_weights_are_detached_and_zero_where_masked(level: Level) -> None:
    logprobs, engine, mask, sequences, num = rows([[0.1, 0.2, 0.3]])
    logprobs.requires_grad_()
    mask[0, 2] = False
    weights = mis(logprobs, engine, mask, sequences, num, level=level, low=0.0, high=9.0)
    assert not weights.requires_grad
    assert weights[0, 2] == 0.0
    assert (weights[0, :2] > 0).all()


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0, BIG, -BIG])
def test_an_extreme_ratio_is_rejected_without_a_nan(level: Level, log_ratio: float) -> None:
    weights = mis(*rows([[log_ratio, log_ratio], [0.0, 0.0]]), level=level, low=0.5, high=2.0, veto=1e-4)
    assert weights.tolist() == [[0.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_log_probability_that_is_not_a_number_is_not_rejected_in_silence(level: Level) -> None:
    weights = mis(*rows([[float("nan"), 0.0]]), level=level, low=0.5, high=2.0)
    assert weights[0, 0].isnan()


def test_a_mean_over_many_tokens_is_exact_though_they_are_float32() -> None:
    size = 200_000
    values = torch.full((1, size), 0.1)
    values[0, 0] = 1e4  # float32 sums would lose a part of each of the others
    ratios = level_ratios(
        values, torch.zeros(1, size), torch.ones(1, size, dtype=torch.bool), torch.zeros(1, size).long(), 1, "geometric"
    )
    expected = exp((1e4 + float(np.float32(0.1)) * (size - 1)) / size)
    assert ratios[0, 0].item() == pytest.approx(expected, rel=1e-7)
