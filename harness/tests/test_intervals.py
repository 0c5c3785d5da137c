"""Intervals and tests by known values, and by values worked out by hand."""

import math

import pytest
from reef_harness.evaluation.differences import exact_p, mcnemar, paired_difference, tango
from reef_harness.evaluation.intervals import Figure, bootstrap, by_item, columns_by_item, quantile, wilson
from reef_harness.evaluation.table import difference


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),  # Newcombe (1998), Statistics in Medicine 17, table I, method 3
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (8, 10, 0.4902, 0.9433),  # (0.8 + 0.19207 ± 1.95996 sqrt(0.016 + 0.0096036)) / 1.384146
    ],
)
def test_wilson_gives_the_published_intervals(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_wilson_is_symmetric_and_stays_within_bounds() -> None:
    assert wilson(20, 20) == pytest.approx((1 - 0.1611, 1.0), abs=5e-5)
    low, high = wilson(3, 10)
    assert wilson(7, 10) == pytest.approx((1 - high, 1 - low))


@pytest.mark.parametrize(("successes", "trials"), [(0, 0), (-1, 5), (6, 5)])
def test_wilson_refuses_impossible_counts(successes: int, trials: int) -> None:
    with pytest.raises(ValueError, match="wilson"):
        wilson(successes, trials)


def test_quantiles_are_linear_between_neighbours() -> None:
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0, 0.5, 0.9, 1)] == pytest.approx([1, 2.5, 3.7, 4])
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


def test_one_yes_or_no_an_item_gets_wilsons_interval_even_where_all_are_right() -> None:
    assert by_item([1.0] * 8 + [0.0] * 2) == Figure(0.8, *wilson(8, 10), 10)
    all_right = by_item([1.0] * 10)
    assert all_right is not None and all_right.low == wilson(10, 10)[0] < 0.75
    assert by_item([]) is None


def test_shares_of_several_answers_are_bootstrapped_by_item_not_by_answer() -> None:
    """Ten items answered all right or all wrong are ten trials, however often each was answered."""
    halves = [0.0, 0.25, 0.5, 0.75, 1.0] * 20
    figure = by_item(halves, seed=1)
    assert figure is not None
    standard_error = math.sqrt(0.125 / 100)  # the variance of these five values is 1/8
    assert figure.value == 0.5
    assert figure.low == pytest.approx(0.5 - 1.96 * standard_error, abs=0.01)
    assert figure.high == pytest.approx(0.5 + 1.96 * standard_error, abs=0.01)


def test_a_bootstrap_is_the_same_for_the_same_seed_and_draws_all_columns_from_the_same_items() -> None:
    rows = [(x / 10, 1 - x / 10) for x in range(10)]
    first, second = bootstrap(rows, seed=3)
    assert bootstrap(rows, seed=3) == [first, second]
    assert bootstrap(rows, seed=4) != [first, second]
    assert (1 - second[1], 1 - second[0]) == pytest.approx(first)  # the columns sum to 1 in every resample
    assert [figure.value for figure in columns_by_item(rows)] == pytest.approx([0.45, 0.55])
    with pytest.raises(ValueError, match="at least one item"):
        bootstrap([])


def test_a_paired_difference_is_as_narrow_as_the_differences_are() -> None:
    """Items differ a lot, their gains are 1/16 or 3/16: unpaired intervals overlap, the paired one is narrow."""
    before = [0.0, 0.1, 0.2, 0.5, 0.6, 0.7] * 5
    after = [value + (0.0625 if i % 2 else 0.1875) for i, value in enumerate(before)]
    found = paired_difference(before, after)
    half = 1.96 * 0.0625 / math.sqrt(30)
    assert (found.value, found.items) == pytest.approx((0.125, 30))
    assert (found.low, found.high) == pytest.approx((0.125 - half, 0.125 + half), abs=0.005)
    one, other = by_item(before), by_item(after)
    assert one is not None and other is not None and one.high > other.low
    with pytest.raises(ValueError, match="same items on both sides, got 2 and 1"):
        paired_difference([1, 0], [1])


SQUARE = 1.959964**2


@pytest.mark.parametrize("items", [1, 5, 20, 200])
def test_items_that_all_differ_by_the_same_have_an_interval_all_the_same(items: int) -> None:
    """No difference: items d² = z² d (1 - d). All gained: items (1 - d)² = z² (1 - d) (1 + d). Solved for d."""
    same = paired_difference([1.0] * items, [1.0] * items)
    end = SQUARE / (items + SQUARE)
    assert (same.value, same.low, same.high) == pytest.approx((0.0, -end, end))
    gained = paired_difference([0.0] * items, [1.0] * items)
    end = (items - SQUARE) / (items + SQUARE)
    assert (gained.value, gained.low, gained.high) == pytest.approx((1.0, end, 1.0))
    lost = paired_difference([1.0] * items, [0.0] * items)
    assert (lost.value, lost.low, lost.high) == pytest.approx((-1.0, -1.0, -end))


def test_differences_that_floats_round_otherwise_are_the_same() -> None:
    found = paired_difference([0.1, 0.2, 0.3, 0.6] * 5, [0.2, 0.3, 0.4, 0.7] * 5)
    assert (found.low, found.high) == pytest.approx(tango(2, 0, 20))


def test_tangos_interval_is_the_published_one() -> None:
    """Seven of 21 against one: Fagerland, Lydersen and Laake, Statistics in Medicine 33 (2014) 2850."""
    assert tango(7, 1, 21) == pytest.approx((0.026, 0.517), abs=5e-4)


def test_a_few_items_that_differ_exclude_no_difference_where_mcnemars_test_does() -> None:
    """Of 20 items g are gained: g² > 3.8415 g from 4 on."""
    for gained, excluded in ((1, False), (3, False), (4, True), (9, True)):
        found = paired_difference([0.0] * 20, [1.0] * gained + [0.0] * (20 - gained))
        assert (found.low > 0) == excluded
        assert found.low < gained / 20 < found.high


@pytest.mark.parametrize(("gained", "lost", "items"), [(7, 1, 21), (2, 5, 30), (3.5, 0, 12), (0, 0.5, 9)])
def test_the_ends_are_where_the_score_test_with_the_likeliest_shares_just_rejects(
    gained: float, lost: float, items: int
) -> None:
    for end in tango(gained, lost, items):
        step = 1e-5
        shares = [(q + end, q) for q in (i * step for i in range(100_000)) if q + end > 0 and 2 * q + end < 1 and q > 0]
        best = max(shares, key=lambda of: likelihood(gained, of[0]) + likelihood(lost, of[1])
                   + likelihood(items - gained - lost, 1 - sum(of)))  # fmt: skip
        variance = items * (sum(best) - end * end)
        assert (gained - lost - items * end) ** 2 / variance == pytest.approx(SQUARE, rel=0.01)


def likelihood(count: float, share: float) -> float:
    return count * math.log(share) if count else 0.0


def test_scores_without_bounds_have_no_interval_where_all_differ_by_the_same() -> None:
    found = paired_difference([5.0] * 20, [7.0] * 20)
    assert difference(found) == "+2.000 [no interval]"


def test_mcnemar_is_the_exact_binomial_test_of_the_discordant_pairs() -> None:
    """b = 1, c = 9: 2 (C(10,0) + C(10,1)) / 2^10 = 22 / 1024."""
    first = [True] + [False] * 9 + [True] * 5 + [False] * 5
    second = [False] + [True] * 9 + [True] * 5 + [False] * 5
    found = mcnemar(first, second)
    assert (found.only_first, found.only_second) == (1, 9)
    assert found.p == 22 / 1024 == pytest.approx(0.0215, abs=5e-5)


@pytest.mark.parametrize(("b", "c", "p"), [(0, 0, 1.0), (5, 5, 1.0), (0, 5, 2 / 32), (5, 0, 2 / 32), (1, 2, 1.0)])
def test_mcnemars_p_is_two_sided_and_at_most_one(b: int, c: int, p: float) -> None:
    assert exact_p(b, c) == p


def test_mcnemars_p_of_thousands_of_pairs_neither_overflows_nor_vanishes() -> None:
    assert exact_p(2400, 2600) == pytest.approx(math.erfc(199 / math.sqrt(2 * 5000)), rel=0.01)  # normal, continuity
    assert 0 < exact_p(0, 900) < 1e-200


@pytest.mark.parametrize(
    ("values", "share", "items"),
    [
        ([0.875], 0.875, 1),
        ([0.5] * 5, 0.5, 5),
        ([0.0, 0.25, 0.5, 0.75, 1.0], 0.5, 5),
        ([1.0] * 99 + [0.5], 0.995, 100),  # nearly nothing was seen of what makes items differ
        ([0.5] * 200, 0.5, 200),
    ],
)
def test_too_few_items_that_differ_get_the_interval_of_as_many_trials(
    values: list[float], share: float, items: int
) -> None:
    figure = by_item(values)
    assert figure is not None
    assert (figure.value, figure.low, figure.high) == pytest.approx((share, *wilson(share * items, items)))
    assert figure.high - figure.low > 0.02


def test_one_item_alone_can_be_almost_anything() -> None:
    """One trial of share 0.875: (0.875 + 1.92073 - 1.95996 sqrt(0.109375 + 0.960365)) / 4.84146 and its mirror."""
    figure = by_item([0.875])
    assert figure is not None
    assert (figure.low, figure.high) == pytest.approx((0.15875, 0.99616), abs=5e-6)


def test_values_up_to_another_bound_have_the_interval_of_their_shares_of_it() -> None:
    figure = by_item([30.0] * 5, most=60)
    assert figure is not None
    low, high = wilson(2.5, 5)
    assert (figure.value, figure.low, figure.high) == pytest.approx((30.0, 60 * low, 60 * high))
    outside = by_item([-2.0, 5.0], most=1)  # of scores without bounds nothing is known but what was seen
    assert outside is not None and (outside.value, outside.low, outside.high) == (1.5, -2.0, 5.0)
