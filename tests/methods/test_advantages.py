"""Vectors of METHODS 4.3 (GRPO, RLOO, MaxRL, leave-one-out, whitening) and the cases about ties."""

import numpy as np
import pytest

from reef.methods.advantages import (
    by_rms,
    centred_advantages,
    group_advantages,
    leave_one_out_advantages,
    maxrl_advantages,
    running_mean_advantages,
    tied,
    whiten,
)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0, 0, 0], [1.499997, -0.499999, -0.499999, -0.499999]),
        ([1, 1, 0, 0], [0.866024, 0.866024, -0.866024, -0.866024]),
        ([1, 0.5, 0.8], [0.927169, -1.059622, 0.132453]),
    ],
)
def test_unbiased_advantages_are_the_published_ones(rewards: list[float], expected: list[float]) -> None:
    found = group_advantages(rewards, std="unbiased", eps=1e-6, tie_tolerance=1e-6)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_population_advantages_divide_by_the_population_deviation() -> None:
    found = group_advantages([1, 0, 0, 0], std="population", eps=1e-6, tie_tolerance=1e-6)
    # variance 3/16, so 0.75 / sqrt(0.1875 + 1e-6)
    np.testing.assert_allclose(found, [1.732046, -0.577349, -0.577349, -0.577349], atol=1e-6)


@pytest.mark.parametrize("std", ["population", "unbiased"])
@pytest.mark.parametrize("rewards", [[0.3333333, 0.3333334], [1.0, 1.0, 1.0], [1.0]])
def test_rewards_that_tie_and_a_group_of_one_give_exactly_zero(std: str, rewards: list[float]) -> None:
    assert not group_advantages(rewards, std=std, eps=1e-6, tie_tolerance=1e-6).any()  # type: ignore[arg-type]


def test_with_a_tolerance_of_zero_only_equal_rewards_tie() -> None:
    assert tied([0.5, 0.5], 0.0)
    assert not tied([0.5, 0.5000001], 0.0)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        ([10, 20, 30], [-15, 0, 15]),
        ([1, 2, 3, 4], [-2, -2 / 3, 2 / 3, 2]),
        ([5], [0]),
    ],
)
def test_leave_one_out_advantages_are_the_published_ones(rewards: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(leave_one_out_advantages(rewards, tie_tolerance=1e-6), expected, atol=1e-12)


def test_leaving_one_out_compares_each_rollout_with_the_mean_of_the_others() -> None:
    rewards = [0.3, 1.7, -2.0, 0.9]
    by_hand = [r - (sum(rewards) - r) / 3 for r in rewards]
    np.testing.assert_allclose(leave_one_out_advantages(rewards, tie_tolerance=1e-6), by_hand, atol=1e-12)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([1, 0, 0, 0], [3, -1, -1, -1]), ([0, 0], [0, 0]), ([1, 1], [0, 0]), ([1], [0]), ([-1, 0.5], [0, 0])],
)
def test_maxrl_advantages_are_the_published_ones_and_0_without_a_mean_above_0(
    rewards: list[float], expected: list[float]
) -> None:
    np.testing.assert_allclose(maxrl_advantages(rewards, tie_tolerance=1e-6), expected, atol=1e-12)


def test_dr_grpo_s_advantages_are_distances_from_the_mean() -> None:
    np.testing.assert_allclose(centred_advantages([1, 0, 0, 0], tie_tolerance=1e-6), [0.75, -0.25, -0.25, -0.25])
    assert not centred_advantages([0.3333333, 0.3333334], tie_tolerance=1e-6).any()
    assert not centred_advantages([7.0], tie_tolerance=1e-6).any()


def test_a_running_mean_is_over_the_prompt_s_own_past() -> None:
    found = running_mean_advantages([1, 0], [[1, 0, 0, 0], [1]])
    assert found.tolist() == [0.75, -1.0]


def test_a_prompt_without_a_past_is_compared_with_the_batch_s_other_rollouts() -> None:
    found = running_mean_advantages([1, 0, 0.5, 1], [[], [], [0.25], []])
    np.testing.assert_allclose(found, [1 - 1.5 / 3, 0 - 2.5 / 3, 0.25, 1 - 1.5 / 3])


def test_a_prompt_without_a_past_that_is_alone_in_its_batch_gets_nothing() -> None:
    assert running_mean_advantages([1], [[]]).tolist() == [0.0]
    assert running_mean_advantages([], []).tolist() == []


def test_whitening_gives_the_published_vector() -> None:
    lengths = [48, 90, 12, 16, 30, 84, 20, 96]
    rewards = [1.5, -0.5, -1, 2, 0.25, -1.75, 0.75, -0.25]
    expected = [1.633087, -0.226589, -0.691508, 2.098006, 0.470789, -1.388887, 0.935708, 0.005870]
    advantages = [np.full(size, reward) for size, reward in zip(lengths, rewards, strict=True)]
    found = whiten(advantages, [np.ones(size, np.bool_) for size in lengths])
    for row, value in zip(found, expected, strict=True):
        np.testing.assert_allclose(row, value, atol=1e-6)


def test_whitening_does_not_hang_on_what_does_not_count() -> None:
    counted = [np.array([True, True, False]), np.array([True, False, False])]
    plain = whiten([np.array([1.0, 2, 3]), np.array([5.0, 1, 1])], counted)
    other = whiten([np.array([1.0, 2, 1e9]), np.array([5.0, -1e9, 1])], counted)
    for a, b, mask in zip(plain, other, counted, strict=True):
        np.testing.assert_array_equal(a[mask], b[mask])
    np.testing.assert_allclose(np.concatenate([a[m] for a, m in zip(plain, counted, strict=True)]).mean(), 0, atol=1e-9)


def test_advantages_that_are_all_the_same_whiten_to_nothing() -> None:
    (same,) = whiten([np.full(1000, 0.1)], [np.ones(1000, np.bool_)])
    assert np.abs(same).max() < 1e-9
    (alone,) = whiten([np.array([3.0, 4.0])], [np.array([True, False])])
    assert not alone.any()


def test_dividing_by_the_root_mean_square_keeps_signs() -> None:
    counted = [np.array([True, True]), np.array([True, False])]
    first, second = by_rms([np.array([3.0, -4.0]), np.array([5.0, 100.0])], counted)
    scale = np.sqrt(50 / 3)
    np.testing.assert_allclose(first, [3 / scale, -4 / scale], rtol=1e-8)
    np.testing.assert_allclose(second, [5 / scale, 100 / scale], rtol=1e-8)
    (nothing,) = by_rms([np.zeros(3)], [np.ones(3, np.bool_)])
    assert nothing.tolist() == [0, 0, 0]
    (none_counts,) = by_rms([np.ones(3)], [np.zeros(3, np.bool_)])
    assert none_counts.tolist() == [0, 0, 0]
