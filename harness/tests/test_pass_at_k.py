"""pass@k by hand, and picking one answer of several: by majority with ties kept, by a grader's score."""

import math

import pytest
from reef_harness.evaluation.intervals import wilson
from reef_harness.evaluation.pass_at_k import curve, ks_up_to, pass_at_k
from reef_harness.evaluation.selection import best_of, majority


def test_two_right_of_five_give_seven_tenths_at_two() -> None:
    """Of the 10 pairs of 5 answers, 3 have none of the 2 right ones."""
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7)


@pytest.mark.parametrize(("n", "correct", "k", "chance"), [(1, 1, 1, 1), (4, 0, 4, 0), (4, 1, 4, 1), (10, 3, 1, 0.3)])
def test_the_ends_are_exact(n: int, correct: int, k: int, chance: float) -> None:
    assert pass_at_k(n, correct, k) == pytest.approx(chance, abs=1e-15)


def test_it_is_the_quotient_of_binomials_also_where_these_overflow() -> None:
    exact = 1 - math.comb(180, 50) / math.comb(200, 50)
    assert pass_at_k(200, 20, 50) == pytest.approx(exact, abs=1e-12)
    assert pass_at_k(100_000, 10, 100) == pytest.approx(1 - (1 - 100 / 100_000) ** 10, abs=1e-6)


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 2, 5), (4, 5, 2), (4, -1, 2), (4, 2, 0), (0, 0, 1)])
def test_more_answers_than_there_are_are_refused(n: int, correct: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} needs"):
        pass_at_k(n, correct, k)


def test_the_reported_k_are_powers_of_two_and_the_last() -> None:
    assert [ks_up_to(n) for n in (1, 2, 8, 12)] == [[1], [1, 2], [1, 2, 4, 8], [1, 2, 4, 8, 12]]


def test_a_curve_is_the_mean_over_items_and_says_over_how_many() -> None:
    """Three items of 4 answers with 0, 2, 4 right: pass@1 = 1/2, pass@2 = (0 + 5/6 + 1) / 3, pass@4 = 2/3."""
    found = curve([(4, 0), (4, 2), (4, 4)], [1, 2, 4])
    assert [found[k].value for k in (1, 2, 4)] == pytest.approx([1 / 2, 11 / 18, 2 / 3])
    assert (found[4].low, found[4].high) == wilson(2, 3)  # one yes or no an item
    assert curve([(4, 0), (4, 2), (4, 4)], [1, 2, 4]) == found


def test_an_item_with_too_few_judged_answers_is_left_out_of_that_k_only() -> None:
    found = curve([(4, 4), (1, 0)], [1, 2, 4])
    assert [(k, figure.value, figure.items) for k, figure in found.items()] == [(1, 0.5, 2), (2, 1.0, 1), (4, 1.0, 1)]
    assert curve([(1, 1)], [1, 2]).keys() == {1}
    assert curve([], [1]) == {}


@pytest.mark.parametrize(
    ("answers", "correct", "pick", "expected"),
    [
        (["7", "7", "3"], [True, True, False], "right", 1.0),
        (["3", "7", "3"], [False, True, False], "wrong", 0.0),
        (["7", "3"], [True, False], "tie", 0.5),
        (["7", "3", "5", "7", "3"], [True, False, False, True, False], "tie", 0.5),
        (["3", "5"], [False, False], "wrong", 0.0),  # whichever wins, it is wrong
        ([None, None, "7"], [False, False, True], "right", 1.0),  # what cannot be read does not vote
        ([None, None], [False, False], "none", 0.0),
        ([], [], "none", 0.0),
    ],
)
def test_a_majority_wins_and_a_tie_stays_a_tie(
    answers: list[str | None], correct: list[bool], pick: str, expected: float
) -> None:
    vote = majority(answers, correct)
    assert (vote.pick, vote.expected) == (pick, expected)


def test_the_best_answer_is_the_first_of_those_with_the_highest_score() -> None:
    best = best_of([0.2, None, 0.9, 0.9])
    assert (best.positions, best.pick) == ((2, 3), 2)
    assert best.expected([True, True, False, True]) == 0.5
    nothing = best_of([None, None])
    assert (nothing.pick, nothing.expected([True, True])) == (None, 0.0)
