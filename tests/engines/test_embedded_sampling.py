"""Sampling on its own: the right distribution, the right support, random numbers that depend on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reef.engines.embedded.params import SamplingParams
from reef.engines.embedded.sampling import Batch, random_key, sample, top_logprobs, uniforms
from reef.engines.embedded.shaping import Shaping

V = 8
LOGITS = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5, 0.0])
DRAWS = 20_000


def draw(params: SamplingParams, num: int = DRAWS, logits: torch.Tensor = LOGITS) -> np.ndarray:
    """How often each token comes in `num` draws, as the successive tokens of one seed."""
    batch = Batch.of([(params, random_key(11, 0))] * num, V)
    tokens, _, _ = sample(logits.expand(num, -1).clone(), batch, np.arange(num))
    return np.bincount(tokens, minlength=V)


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    expected = probs * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_draws_follow_the_softmax(temperature) -> None:
    counts = draw(SamplingParams(temperature=temperature))
    probs = torch.softmax(LOGITS.double() / temperature, -1).numpy()
    assert chi_square(counts, probs) < 24.3  # 7 degrees of freedom, p = 0.001


def test_choices_of_one_seed_are_independent_draws() -> None:
    batch = Batch.of([(SamplingParams(), random_key(3, choice)) for choice in range(DRAWS)], V)
    tokens, _, _ = sample(LOGITS.expand(DRAWS, -1).clone(), batch, np.zeros(DRAWS, np.int64))
    probs = torch.softmax(LOGITS.double(), -1).numpy()
    assert chi_square(np.bincount(tokens, minlength=V), probs) < 24.3


def test_uniforms_fill_the_unit_interval_and_stay_below_one() -> None:
    numbers = uniforms(np.full(DRAWS, random_key(-5, 2), np.uint64), np.arange(DRAWS))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01
    assert np.histogram(numbers, 10, (0, 1))[0].min() > DRAWS / 10 * 0.9


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1])
def test_every_seed_has_random_numbers_of_its_own_zero_too(seed) -> None:
    """0 is the one number that the mixing leaves as it is: with seed 0 the first token was always token 0."""
    first = uniforms(np.array([random_key(seed, 0)], np.uint64), np.zeros(1, np.int64))[0]
    assert 1e-6 < first < 1 - 1e-6
    assert first not in uniforms(np.array([random_key(5, 0)], np.uint64), np.arange(100))


def test_a_row_s_token_does_not_depend_on_the_rows_around_it() -> None:
    mine = (SamplingParams(temperature=0.9), random_key(77, 0))
    others = [(SamplingParams(temperature=0), 1), (SamplingParams(top_k=2), 2), (SamplingParams(temperature=3), 3)]
    alone, logprob, _ = sample(LOGITS[None].clone(), Batch.of([mine], V), np.array([5]))
    batch = Batch.of([others[0], others[1], mine, others[2]], V)
    together, logprobs, _ = sample(LOGITS.expand(4, -1).clone(), batch, np.array([9, 9, 5, 9]))
    assert together[2] == alone[0]
    assert logprobs[2] == logprob[0]


def test_top_k_keeps_the_k_likeliest() -> None:
    assert set(np.flatnonzero(draw(SamplingParams(top_k=3)))) == {3, 6, 1}


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    probs = torch.softmax(LOGITS, -1)
    order = probs.argsort(descending=True)
    p = float(probs[order[:2]].sum()) + 0.01  # two are not enough, three are
    assert set(np.flatnonzero(draw(SamplingParams(top_p=p)))) == set(order[:3].tolist())


def test_min_p_drops_what_is_unlikely_beside_the_likeliest() -> None:
    probs = torch.softmax(LOGITS, -1)
    kept = torch.nonzero(probs >= 0.3 * probs.max()).flatten().tolist()
    assert set(np.flatnonzero(draw(SamplingParams(min_p=0.3)))) == set(kept)


def test_a_restricted_support_keeps_its_proportions_and_the_full_log_probabilities() -> None:
    counts = draw(SamplingParams(top_k=3))
    kept = torch.softmax(LOGITS[[1, 3, 6]].double(), -1).numpy()
    assert chi_square(counts[[1, 3, 6]], kept) < 13.8  # 2 degrees of freedom, p = 0.001
    _, logprobs, table = sample(LOGITS[None].clone(), Batch.of([(SamplingParams(top_k=1), 0)], V), np.array([0]))
    assert logprobs[0] == pytest.approx(torch.log_softmax(LOGITS, -1)[3].item())
    assert table.shape == (1, V)


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((V,), float("-inf"))
    logits[[2, 5]] = 0.0
    assert set(np.flatnonzero(draw(SamplingParams(), logits=logits))) == {2, 5}


def test_logits_that_are_not_finite_give_nan_and_no_exception() -> None:
    logits = torch.stack([LOGITS, torch.full((V,), float("nan"))])
    _, logprobs, _ = sample(logits, Batch.of([(SamplingParams(), 0), (SamplingParams(), 1)], V), np.zeros(2, np.int64))
    assert np.isfinite(logprobs[0])
    assert np.isnan(logprobs[1])


def test_minus_infinity_becomes_a_number_that_json_has() -> None:
    logits = LOGITS.clone()
    logits[0] = float("-inf")
    entries = top_logprobs(torch.log_softmax(logits, -1), V)
    assert entries[-1] == (pytest.approx(-3.4028234663852886e38), 0, None)


def test_penalties_count_output_tokens_only() -> None:
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=2.0)
    logits = torch.tensor([2.0, -1.0, 1.0, 0.0])
    Shaping(params, (), 4).apply(logits, np.array([0, 0, 1]))
    # token 0: (2 - 2 * 0.5 - 0.25) / 2; token 1: (-1 - 0.5 - 0.25) * 2; the others never came.
    assert logits.tolist() == pytest.approx([0.375, -3.5, 1.0, 0.0])


def test_bias_is_added_and_the_end_is_held_back_until_the_minimum() -> None:
    shaping = Shaping(SamplingParams(logit_bias={1: 3.0}, min_new_tokens=2), (3,), 4)
    logits = torch.zeros(4)
    shaping.apply(logits, np.array([0]))
    assert logits.tolist() == [0.0, 3.0, 0.0, float("-inf")]
    logits = torch.zeros(4)
    shaping.apply(logits, np.array([0, 0]))
    assert logits.tolist() == [0.0, 3.0, 0.0, 0.0]
