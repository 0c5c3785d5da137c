"""Vectors of METHODS 4.3 (GRPO) and the cases about ties."""

import numpy as np
import pytest

from reef.methods.advantages import group_advantages, tied


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
