"""The arithmetic task: right answers, apart by construction, the same for the same seed."""

import itertools
import random

import pytest
from reef_harness import FinalGrader

from recipes.arithmetic.task import HELD_OUT_SHARE, Problem, draw, held_out_set, solution, train_stream


def first(count: int, steps: int, seed: int) -> list[Problem]:
    return list(itertools.islice(train_stream(steps, seed), count))


def test_a_problem_reads_as_documented() -> None:
    problem = Problem(9, (("-", 4), ("+", 3)))
    assert problem.text == "Start at 9. Subtract 4. Add 3."
    assert problem.values == [5, 8]
    assert solution(problem) == "9-4=5, 5+3=8. <final>8</final>"


def test_solutions_go_below_zero_and_can_be_written_wrongly() -> None:
    problem = Problem(2, (("-", 7), ("+", 1)))
    assert solution(problem) == "2-7=-5, -5+1=-4. <final>-4</final>"
    assert solution(problem, [5, 6]) == "2-7=5, 5+1=6. <final>6</final>"


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
def test_solutions_are_right_and_pass_the_grader(steps: int) -> None:
    for problem in first(200, steps, seed=0):
        assert problem.answer == problem.start + sum(a if sign == "+" else -a for sign, a in problem.steps)
        assert FinalGrader().grade(solution(problem), str(problem.answer), "stop").correct


@pytest.mark.parametrize("steps", [2, 4, 8])
def test_training_and_held_out_problems_are_apart(steps: int) -> None:
    held_out = {problem.text for problem in held_out_set(steps, 250)}
    trained = {problem.text for problem in first(5000, steps, seed=1)}
    assert len(held_out) == 250
    assert not held_out & trained
    assert all(problem.held_out for problem in held_out_set(steps, 250))
    assert not any(problem.held_out for problem in first(5000, steps, seed=1))


def test_about_one_problem_in_ten_is_held_out() -> None:
    moves = list(itertools.product("+-", range(1, 10)))
    problems = [Problem(start, pair) for start in range(1, 10) for pair in itertools.product(moves, repeat=2)]
    share = sum(problem.held_out for problem in problems) / len(problems)
    assert share == pytest.approx(HELD_OUT_SHARE, abs=0.02)


def test_the_same_seed_gives_the_same_problems_and_another_seed_others() -> None:
    assert first(100, 4, seed=3) == first(100, 4, seed=3)
    assert first(100, 4, seed=3) != first(100, 4, seed=4)
    assert held_out_set(4, 100) == held_out_set(4, 250)[:100]
    assert held_out_set(4, 100, seed=1) != held_out_set(4, 100)


def test_streams_are_the_ones_the_committed_numbers_were_measured_on() -> None:
    assert first(1, 4, seed=0)[0].text == "Start at 9. Subtract 8. Add 5. Add 2. Subtract 9."
    assert held_out_set(4, 1)[0].text == "Start at 7. Subtract 7. Add 8. Subtract 5. Subtract 6."


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 step"):
        draw(random.Random(0), 0)
    with pytest.raises(ValueError, match="asked for 100 held-out problems of 1 steps, found only"):
        held_out_set(1, 100)
