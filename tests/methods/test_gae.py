"""Vectors of METHODS 4.3 (skip-observation GAE, lambda, explained variance, multi-turn), and serial = vectorised."""

import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.methods.advantages import whiten
from reef.methods.gae import (
    adaptive_lambda,
    explained_variance,
    skip_observation_gae,
    suffix_sums,
    values_before,
)
from reef.types import Bools, Doubles


def bools(mask: str) -> Bools:
    return np.array([int(m) for m in mask], dtype=np.bool_)


def paid_at_the_end(mask: str, reward: float) -> Doubles:
    rewards = np.zeros(len(mask))
    rewards[np.flatnonzero(bools(mask))[-1]] = reward
    return rewards


def serial(
    values: Doubles, mask: Bools, rewards: Doubles, gamma: float, lam: float, bootstrap: float
) -> tuple[Doubles, Doubles]:
    """The definition as it is written: from the end, token by token, observations passed over."""
    advantages, returns = np.zeros(len(mask)), np.zeros(len(mask))
    next_value, next_advantage = bootstrap, 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            delta = rewards[t] + gamma * next_value - values[t]
            advantages[t] = delta + gamma * lam * next_advantage
            returns[t] = advantages[t] + values[t]
            next_value, next_advantage = values[t], advantages[t]
    return advantages, returns


@pytest.mark.parametrize(
    ("values", "mask", "reward", "gamma", "lam", "advantages", "returns"),
    [
        ([1, 2, 3], "111", 5, 1, 1, [4, 3, 2], [5, 5, 5]),
        ([10, 99, 99, 4], "1001", 1, 1, 1, [-9, 0, 0, -3], [1, 0, 0, 1]),
        ([1, 1, 1], "111", 8, 0.5, 0.5, [-0.1875, 1.25, 7], [0.8125, 2.25, 8]),
        (
            *([0.5, -0.5, 2, -1, 0], "10101", -2, 0.99, 0.95),
            *([-2.1700805, 0, -3.881, 0, -2], [-1.6700805, 0, -1.881, 0, -2]),
        ),
        ([1, 2, 3], "101", 5, 0.99, 0.9, [3.752, 0, 2], [4.752, 0, 5]),
        ([0.5, -0.5], "11", -1, 0.99, 0.9, [-1.4405, -0.5], [-0.9405, -1]),
    ],
)
def test_skip_observation_gae_gives_the_published_vectors(
    values: list[float],
    mask: str,
    reward: float,
    gamma: float,
    lam: float,
    advantages: list[float],
    returns: list[float],
) -> None:
    found = skip_observation_gae(values, bools(mask), paid_at_the_end(mask, reward), gamma=gamma, lam=lam)
    np.testing.assert_allclose(found, [advantages, returns], atol=1e-9)


@pytest.mark.parametrize(
    ("values", "reward", "advantages"),
    [
        ([1, 2, 3, 4], 2, [1.37037037, 0.44444444, -0.66666667, -2]),
        ([0.5, 1.5], -3, [-2, -4.5]),
    ],
)
def test_with_a_lambda_that_fits_the_length_it_gives_the_published_vectors(
    values: list[float], reward: float, advantages: list[float]
) -> None:
    mask = "1" * len(values)
    lam = adaptive_lambda(1.5, len(values))
    found, _ = skip_observation_gae(values, bools(mask), paid_at_the_end(mask, reward), gamma=1, lam=lam)
    np.testing.assert_allclose(found, advantages, atol=1e-8)


def test_policy_and_critic_have_a_lambda_of_their_own_in_the_published_vector() -> None:
    values, mask, paid = [1, -2, 3, 0.5], bools("1011"), paid_at_the_end("1011", 4)
    # here l counts the observation: 4 tokens
    advantages, _ = skip_observation_gae(values, mask, paid, gamma=1, lam=adaptive_lambda(1.5, 4))
    np.testing.assert_allclose(advantages, [2.34722222, 0, 0.41666667, 3.5], atol=1e-8)
    _, returns = skip_observation_gae(values, mask, paid, gamma=1, lam=1)
    np.testing.assert_allclose(returns, [4, 0, 4, 4], atol=1e-12)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        *((1, 0.333333), (2, 0.666667), (3, 0.777778), (4, 0.833333), (10, 0.933333), (1000, 0.99933333)),
        (131072, 0.99999491),
    ],
)
def test_lambda_grows_with_the_length_as_published(length: int, expected: float) -> None:
    assert adaptive_lambda(1.5, length) == pytest.approx(expected, abs=5e-7)


def test_lambda_stays_within_0_and_1() -> None:
    assert adaptive_lambda(1.5, 0) == 0.0
    assert adaptive_lambda(1.5, -3) == 0.0
    assert adaptive_lambda(0.05, 10) == 0.0  # VAPO's alpha: 1 - 1 / 0.5 would be -1
    assert adaptive_lambda(None, 0) == 1.0


REWARDS = [0, 0, 0.1, 0.1, 0.1, 0, 0, 0.1, 1, 0, 0]
MASK = "00111001100"


@pytest.mark.parametrize("elsewhere", [0.0, 1e6, np.nan])
@pytest.mark.parametrize(
    ("gamma", "lam", "raw", "returns"),
    [
        (1, 1, [-2.6, -3.7, -4.8, -5.9, -8], [1.4, 1.3, 1.2, 1.1, 1]),
        (
            *(0.99, 0.95, [-1.647956, -2.86864, -4.155917, -5.514, -8]),
            [2.352044, 2.13136, 1.844083, 1.486, 1],
        ),
    ],
)
def test_values_of_observations_do_not_matter(
    gamma: float, lam: float, raw: list[float], returns: list[float], elsewhere: float
) -> None:
    values = np.full(len(MASK), elsewhere)
    values[bools(MASK)] = [4, 5, 6, 7, 9]
    found = skip_observation_gae(values, bools(MASK), REWARDS, gamma=gamma, lam=lam)
    np.testing.assert_allclose(found[0][bools(MASK)], raw, atol=5e-7)
    np.testing.assert_allclose(found[1][bools(MASK)], returns, atol=5e-7)
    assert not found[0][~bools(MASK)].any()
    assert not found[1][~bools(MASK)].any()


def test_multi_turn_advantages_whiten_to_the_published_vector() -> None:
    values = np.zeros(len(MASK))
    values[bools(MASK)] = [4, 5, 6, 7, 9]
    raw, _ = skip_observation_gae(values, bools(MASK), REWARDS, gamma=1, lam=1)
    (found,) = whiten([raw], [bools(MASK)])
    np.testing.assert_allclose(found[bools(MASK)], [1.154033, 0.625101, 0.096169, -0.432762, -1.442541], atol=1e-6)


@dataclass(frozen=True)
class Case:
    """A sequence of any length, sampled here and there."""

    values: Doubles
    mask: Bools
    rewards: Doubles


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size, share = draw(st.integers(0, 300)), draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return Case(rng.normal(size=size) * 10, rng.random(size) < share, rng.normal(size=size))


@given(cases(), st.floats(0.01, 1), st.floats(0, 1), st.floats(-100, 100))
def test_all_at_once_is_the_serial_definition(case: Case, gamma: float, lam: float, bootstrap: float) -> None:
    found = skip_observation_gae(case.values, case.mask, case.rewards, gamma=gamma, lam=lam, bootstrap=bootstrap)
    expected = serial(case.values, case.mask, case.rewards, gamma, lam, bootstrap)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.99999491), (0.99, 0.95), (1.0, 0.0)])
def test_32k_tokens_are_the_serial_definition_and_take_milliseconds(gamma: float, lam: float) -> None:
    rng = np.random.default_rng(0)
    values, rewards, mask = rng.normal(size=32768), rng.normal(size=32768), rng.random(32768) < 0.7
    seconds = []
    for _ in range(7):
        started = time.perf_counter()
        found = skip_observation_gae(values, mask, rewards, gamma=gamma, lam=lam, bootstrap=0.3)
        seconds.append(time.perf_counter() - started)
    np.testing.assert_allclose(found, serial(values, mask, rewards, gamma, lam, 0.3), rtol=1e-6, atol=1e-6)
    assert min(seconds) < 0.01


@given(cases(), st.integers(0, 9), st.integers(0, 9))
def test_padding_changes_nothing(case: Case, before: int, after: int) -> None:
    padding = (before, after)
    plain = skip_observation_gae(case.values, case.mask, case.rewards, gamma=0.9, lam=0.8)
    padded = skip_observation_gae(
        np.pad(case.values, padding, constant_values=7.0),
        np.pad(case.mask, padding),
        np.pad(case.rewards, padding, constant_values=7.0),
        gamma=0.9,
        lam=0.8,
    )
    for short, long in zip(plain, padded, strict=True):
        np.testing.assert_array_equal(np.pad(short, padding), long)


def test_a_sequence_without_sampled_tokens_has_no_advantages() -> None:
    found = skip_observation_gae([1, 2], bools("00"), [3, 4], gamma=1, lam=1, bootstrap=5)
    np.testing.assert_array_equal(found, np.zeros((2, 2)))


def test_the_critic_speaks_after_the_last_token_of_a_sequence_that_goes_on() -> None:
    # lambda 1: every token is worth what is still to come, 2 + 10, minus what was expected before it
    advantages, returns = skip_observation_gae([1, 5, 3], bools("101"), [0, 0, 2], gamma=1, lam=1, bootstrap=10)
    assert (advantages.tolist(), returns.tolist()) == ([11, 0, 9], [12, 0, 12])


def test_suffix_sums_leave_what_they_were_given_alone() -> None:
    steps = np.ones(5)
    assert suffix_sums(steps, 0.5).tolist() == [1.9375, 1.875, 1.75, 1.5, 1]
    assert suffix_sums(steps, 0.0).tolist() == [1] * 5
    assert steps.tolist() == [1] * 5
    assert suffix_sums([], 1.0).tolist() == []


def test_the_value_before_a_token_is_what_the_critic_said_after_the_one_before() -> None:
    assert values_before(np.array([1, 2, 3], np.float32)).tolist() == [0, 1, 2]


def test_explained_variance_is_the_published_one_and_sees_sampled_tokens_only() -> None:
    assert explained_variance([[1, 2, 5, 4]], [[1.2, 1.8, 4, 4.5]], [bools("1111")]) == pytest.approx(0.87325)
    returns, values = [1, 0, 5, 4, 0], [1.2, 9, 4, 4.5, -9]
    assert explained_variance([returns], [values], [bools("10110")]) == pytest.approx(0.8546154, abs=1e-7)
    assert explained_variance([returns], [values], [bools("11111")]) == pytest.approx(-6.4214545, abs=1e-7)


def test_explained_variance_is_over_all_samples_of_a_batch() -> None:
    split = explained_variance([[1, 2], [5, 4]], [[1.2, 1.8], [4, 4.5]], [bools("11")] * 2)
    assert split == pytest.approx(0.87325)


def test_returns_that_do_not_vary_have_no_variance_to_explain() -> None:
    assert explained_variance([[0.1] * 7], [[1, 2, 3, 4, 5, 6, 7]], [bools("1111111")]) == 0.0
    assert explained_variance([[1, 2]], [[1, 2]], [bools("00")]) == 0.0
    assert explained_variance([], [], []) == 0.0
