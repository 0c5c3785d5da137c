"""How much each token counts: the reducers of METHODS 4.3, and what is in no denominator."""

import numpy as np
import pytest

from reef.methods.weights import Aggregation, token_weights
from reef.types import Sample
from tests.methods.samples import make_sample

AGGREGATIONS: tuple[Aggregation, ...] = ("rollout-mean", "token-mean", "token-sum", "sequence-mean")
VALUES = [[1.0, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]


def weights_of(samples: list[Sample], aggregation: Aggregation, *, overlong_filter: bool = False) -> list[list[float]]:
    constant = 10 if aggregation == "token-sum" else None
    found = token_weights(samples, aggregation, aggregation_tokens=constant, overlong_filter=overlong_filter)
    assert all(weights.dtype == np.float32 for weights in found)
    return [weights.tolist() for weights in found]


def total(samples: list[Sample], values: list[list[float]], aggregation: Aggregation) -> float:
    weights = weights_of(samples, aggregation)
    return float(sum(np.dot(w, v) for w, v in zip(weights, values, strict=True)))


def test_the_reducers_are_the_published_ones() -> None:
    # Three samples of one rollout share its denominator of 9, another rollout has 3: (45 / 9 + 33 / 3) / 2 = 8.
    shared = [make_sample("a", "111") for _ in range(3)] + [make_sample("b", "111")]
    assert total(shared, VALUES, "rollout-mean") == pytest.approx(8.0)
    assert total(shared, VALUES, "token-mean") == pytest.approx(6.5)
    assert total(shared, VALUES, "sequence-mean") == pytest.approx((2 + 5 + 8 + 11) / 4)
    assert total(shared, VALUES, "token-sum") == pytest.approx(78 / (2 * 10))  # two rollouts, the constant is 10
    assert 3 * total(shared[:3], VALUES[:3], "sequence-mean") == pytest.approx(15.0)  # their means, summed


def test_four_rollouts_of_growing_size_give_the_mean_of_means() -> None:
    values = [[float(n * 10**k) for n in range(1, 9)] for k in range(4)]
    samples = [make_sample(str(k), "1" * 8) for k in range(4)]
    assert total(samples, values, "rollout-mean") == pytest.approx(1249.875, rel=1e-6)
    assert total(samples, values, "sequence-mean") == pytest.approx(1249.875, rel=1e-6)


def test_a_masked_mean_is_the_published_one() -> None:
    for aggregation in ("rollout-mean", "token-mean", "sequence-mean"):
        assert total([make_sample("a", "1001")], [[1, 2, 3, 4]], aggregation) == pytest.approx(2.5)
        assert total([make_sample("a", "101")], [[0.1, 0.5, 0.2]], aggregation) == pytest.approx(0.15)


def test_rollout_mean_weighs_prompts_alike_and_sequence_mean_sequences() -> None:
    samples = [make_sample("a", "11"), make_sample("b", "01"), make_sample("c", "11", group="h")]
    by_rollout = weights_of(samples, "rollout-mean")
    np.testing.assert_allclose(by_rollout, [[1 / 8, 1 / 8], [0, 1 / 4], [1 / 4, 1 / 4]])
    by_sequence = weights_of(samples, "sequence-mean")
    np.testing.assert_allclose(by_sequence, [[1 / 6, 1 / 6], [0, 1 / 3], [1 / 6, 1 / 6]], rtol=1e-6)


def test_dr_grpo_s_sum_weighs_every_token_alike_whatever_its_rollout_s_length() -> None:
    samples = [make_sample("a", "111"), make_sample("a", "100"), make_sample("b", "010", group="h")]
    np.testing.assert_allclose(weights_of(samples, "token-sum"), np.array([[1, 1, 1], [1, 0, 0], [0, 1, 0]]) / 20)


def test_a_sum_without_its_constant_is_an_error() -> None:
    with pytest.raises(ValueError, match="token-sum: expected aggregation_tokens"):
        token_weights([make_sample("a", "1")], "token-sum")


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_samples_that_do_not_train_or_hold_no_token_are_in_no_denominator(aggregation: Aggregation) -> None:
    samples = [
        make_sample("a", "01"),
        make_sample("stale", "11", trains=False),
        make_sample("empty", "00"),
        make_sample("alone", "00", group="h"),
    ]
    one = 1.0 if aggregation != "token-sum" else pytest.approx(0.1)
    assert weights_of(samples, aggregation) == [[0, one], [0, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_with_the_overlong_filter_rollouts_that_length_cut_are_in_no_denominator(aggregation: Aggregation) -> None:
    kept = [make_sample("a", "011"), make_sample("b", "001", group="h")]
    cut = [make_sample("cut", "111"), make_sample("cut", "010", truncated=True)]  # both are of the rollout that was cut
    assert weights_of([*kept, *cut], aggregation, overlong_filter=True) == [
        *weights_of(kept, aggregation),
        [0, 0, 0],
        [0, 0, 0],
    ]
    assert all(any(row) for row in weights_of([*kept, *cut], aggregation))  # without the filter they count


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_batch_of_which_everything_is_filtered_has_no_weight_and_no_error(aggregation: Aggregation) -> None:
    assert weights_of([make_sample("a", "0")], aggregation) == [[0]]
    assert weights_of([make_sample("a", "1", truncated=True)], aggregation, overlong_filter=True) == [[0]]
    assert weights_of([], aggregation) == []


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_weights_do_not_hang_on_the_order_in_which_samples_lie(aggregation: Aggregation) -> None:
    rng = np.random.default_rng(1)
    samples = [
        make_sample(
            f"{k // 2}", rng.integers(0, 2, 9).tolist(), group=f"g{k // 6}", trains=k % 5 > 0, truncated=k % 7 == 0
        )
        for k in range(24)
    ]
    order = rng.permutation(len(samples))
    plain = weights_of(samples, aggregation, overlong_filter=True)
    moved = weights_of([samples[k] for k in order], aggregation, overlong_filter=True)
    assert moved == [plain[k] for k in order]
