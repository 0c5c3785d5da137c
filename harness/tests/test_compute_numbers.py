"""Votes, closed forms, sequence scores, shares, the knee: numbers worked out by hand."""

import asyncio
import math
import random
from collections import Counter
from itertools import product

import pytest
from reef_harness import FinalGrader, Item
from reef_harness.compute import (
    Candidate,
    Changes,
    Outcome,
    Spent,
    Votes,
    changes,
    knee,
    sequence_score,
    share_out,
)
from reef_harness.compute.closed_forms import (
    accepted,
    coverage,
    mean_coverage,
    precision_ceiling,
    verified_best_of,
)
from reef_harness.compute.coverage import counts, text_of


def whole_vote(answers: tuple[str | None, ...]) -> tuple[str, ...]:
    counts = Counter(answer for answer in answers if answer is not None)
    return tuple(a for a, count in counts.items() if count == max(counts.values()))


def test_stopping_once_decided_gives_the_whole_vote_for_every_sequence_of_up_to_five_answers() -> None:
    saved = 0
    for length in range(1, 6):
        for answers in product(("a", "b", "c", None), repeat=length):
            votes, drawn = Votes(), 0
            for answer in answers:
                if votes.decided(length - drawn):
                    break
                votes.add(answer)
                drawn += 1
            saved += length - drawn
            assert votes.leaders == whole_vote(answers), answers
    assert saved > 300


def test_a_vote_is_not_decided_while_the_rest_could_still_make_a_tie() -> None:
    votes = Votes(["a", "a", "b"])
    assert votes.lead == 1
    assert not votes.decided(1)  # another b makes 2 : 2
    votes.add("a")
    assert votes.decided(1)  # 3 : 1, one to come


def test_answers_that_cannot_be_read_are_drawn_and_vote_for_nothing() -> None:
    votes = Votes([None, "a", None, "b"])
    assert votes.leaders == ("a", "b")
    assert votes.lead == 0
    assert votes.entropy == pytest.approx(0.5 * math.log(2) + 2 * 0.25 * math.log(4))


def test_no_votes_have_no_leader_and_never_decide() -> None:
    assert Votes().leaders == ()
    assert Votes([None]).leaders == ()
    assert not Votes([None]).decided(0)
    assert Votes().entropy == 0.0


def test_the_entropy_of_agreement_is_zero_and_of_two_halves_ln_2() -> None:
    assert Votes(["a", "a"]).entropy == 0.0
    assert Votes(["a", "b"]).entropy == pytest.approx(math.log(2))


def test_coverage_by_hand() -> None:
    assert coverage(0.5, 3) == pytest.approx(0.875)  # 1 - 1/8
    assert coverage(0.0, 9) == 0.0
    assert coverage(1.0, 1) == 1.0


def test_items_of_different_difficulty_cover_less_than_their_mean() -> None:
    assert mean_coverage([0.0, 1.0], 5) == 0.5
    assert coverage(0.5, 5) == pytest.approx(0.96875)


def test_the_precision_ceiling_by_hand() -> None:
    assert accepted(0.5, 0.9, 0.2) == pytest.approx(0.55)
    assert precision_ceiling(0.5, 0.9, 0.2) == pytest.approx(0.45 / 0.55)
    assert precision_ceiling(0.3, 1.0, 0.0) == 1.0  # an exact verifier has none
    assert precision_ceiling(0.3, 0.5, 0.5) == pytest.approx(0.3)  # one that guesses brings nothing
    assert precision_ceiling(0.3, 0.0, 0.0) == pytest.approx(0.3)  # one that accepts nothing likewise
    assert precision_ceiling(0.0, 1.0, 0.0) == 0.0


def test_best_of_n_by_a_verifier_by_hand() -> None:
    assert verified_best_of(0.5, 0.9, 0.2, 1) == pytest.approx(0.5)
    # a = 0.55; n = 2: (1 - 0.45^2) * 0.45 / 0.55 + 0.45^2 * 0.05 / 0.45
    assert verified_best_of(0.5, 0.9, 0.2, 2) == pytest.approx(0.7975 * 9 / 11 + 0.0225)
    assert verified_best_of(0.5, 0.9, 0.2, 200) == pytest.approx(precision_ceiling(0.5, 0.9, 0.2))
    assert verified_best_of(0.25, 1.0, 0.0, 4) == pytest.approx(coverage(0.25, 4))
    assert verified_best_of(0.4, 1.0, 1.0, 5) == pytest.approx(0.4)  # it accepts everything


@pytest.mark.parametrize(("p", "t", "f", "n"), [(0.5, 0.9, 0.2, 4), (0.2, 0.6, 0.3, 8), (0.8, 0.3, 0.05, 3)])
def test_best_of_n_by_a_verifier_agrees_with_drawing(p: float, t: float, f: float, n: int) -> None:
    rng, right, trials = random.Random(7), 0, 40_000
    for _ in range(trials):
        drawn = [rng.random() < p for _ in range(n)]
        passed = [answer for answer in drawn if rng.random() < (t if answer else f)]
        right += (passed or drawn)[0]  # the first accepted, or the first where none is
    assert right / trials == pytest.approx(verified_best_of(p, t, f, n), abs=4 * 0.5 / math.sqrt(trials))


@pytest.mark.parametrize("call", [lambda: coverage(1.5, 2), lambda: coverage(0.5, 0), lambda: accepted(0.5, -1, 0)])
def test_impossible_chances_and_counts_are_refused(call: object) -> None:
    with pytest.raises(ValueError, match=r"must lie between 0 and 1|at least one answer"):
        call()  # type: ignore[operator]


def test_sequence_scores_by_hand() -> None:
    score = sequence_score((-0.5, -0.25, -0.75))
    assert (score.sum, score.mean, score.num_tokens) == (-1.5, -0.5, 3)
    assert sequence_score(()).sum == 0.0
    with pytest.raises(ValueError, match="no mean"):
        _ = sequence_score(()).mean


def test_shares_are_whole_proportional_and_never_more_than_there_is() -> None:
    assert share_out([0.0, 1.0, 3.0], 100) == [0, 25, 75]
    assert share_out([1.0, 1.0, 1.0], 100) == [33, 33, 33]
    assert share_out([0.0, 0.0], 100) == [0, 0]
    with pytest.raises(ValueError, match="negative"):
        share_out([1.0, -1.0], 10)


def test_the_knee_is_the_point_furthest_above_the_chord() -> None:
    # scaled: (0, 0) (0.25, 0.8) (0.5, 0.9) (1, 1); above the chord: 0.55, 0.4
    assert knee([0, 1, 2, 4], [0.0, 8.0, 9.0, 10.0]) == 1
    assert knee([0, 1, 2, 4], [5.0, 5.25, 5.9, 6.0]) == 2  # 0, 0.4
    assert knee([0, 1, 2], [0.0, 1.0, 2.0]) is None  # straight
    assert knee([0, 1, 2], [0.0, 0.1, 2.0]) is None  # it gets steeper
    assert knee([0, 1, 2], [1.0, 1.0, 1.0]) is None
    with pytest.raises(ValueError, match="rising xs"):
        knee([0, 0], [0.0, 1.0])


def test_changes_are_counted_apart() -> None:
    pairs = [(True, True), (True, False), (False, True), (False, True), (False, False)]
    assert changes(pairs) == Changes(right_to_right=1, right_to_wrong=1, wrong_to_right=2, wrong_to_wrong=1)


def test_the_coverage_table_holds_the_unbiased_estimate_beside_the_closed_form() -> None:
    text = text_of([(2, 1), (2, 0)])  # pass@1 = 1/4, pass@2 = 1/2; p = 1/4
    assert "2 items, 2 answers each, mean chance p = 0.250" in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert [(row[0], row[1].split()[0], row[2], row[3]) for row in rows[1:]] == [
        ("1", "0.250", "0.250", "2"),
        ("2", "0.500", "0.438", "2"),
    ]


def test_one_item_with_fewer_answers_does_not_shorten_the_curve_of_the_others() -> None:
    """pass@2 is of the item that has two answers: 1. Over both items pass@1 is (1/2 + 0) / 2."""
    text = text_of([(2, 1), (1, 0)])
    assert "2 items, 1 to 2 answers each" in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert [(row[1].split()[0], row[3]) for row in rows[1:]] == [("0.250", "2"), ("1.000", "1")]


def test_no_coverage_is_told_of_draws_that_a_budget_ended() -> None:
    item, drawn = Item.from_text("i", "?", "1"), Candidate("<final>1", "length", None, 3)
    outcome = Outcome("i", (), Spent(), "budget", (drawn,))
    with pytest.raises(ValueError, match="draw them without a budget"):
        asyncio.run(counts([item], [outcome], FinalGrader()))
