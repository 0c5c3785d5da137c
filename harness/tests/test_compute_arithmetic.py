"""The verifier of the arithmetic task, by hand; and the methods on the real service with the starter model."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reef_harness import Client, FinalGrader, Item
from reef_harness.compute import Asker, Beam, Budget, Outcome, Partial, Sample, beam_search, best_of, by_verifier
from reef_harness.compute.consistency import self_consistency

from recipes.arithmetic.service import ROOT, running_service
from recipes.arithmetic.task import Problem, held_out_set, solution
from recipes.arithmetic.verifier import Noisy, answer_right, fault, partial_right, problem_of, told

PROBLEM = Problem(9, (("-", 4), ("+", 3), ("-", 9)))  # 5, 8, -1
ITEM = Item.from_text("p", PROBLEM.text, "-1")
RIGHT = "9-4=5, 5+3=8, 8-9=-1. <final>-1</final>"
GRADER = FinalGrader()


def sample(text: str, seed: int = 0) -> Sample:
    return Sample(text, "stop", len(text), seed, 0, "c", "r")


def test_a_problem_is_read_out_of_its_item() -> None:
    assert problem_of(ITEM) == PROBLEM
    with pytest.raises(ValueError, match="expected a chain"):
        problem_of(Item.from_text("p", "Start at 9. Multiply by 2.", "18"))


@pytest.mark.parametrize(
    ("text", "whole", "found"),
    [
        (RIGHT, True, None),
        ("9-4=5, ", False, None),
        ("9-4=5, 5+3=8,", False, None),
        ("", False, None),
        ("9-4=6, ", False, "Line 1 is wrong: 9-4 is not 6."),
        ("9-4=5, 5-3=2,", False, "Line 2 should begin with 5+3."),
        ("9-4=5, 6+3=9,", False, "Line 2 should begin with 5+3."),
        ("9-4=5, five,", False, "Line 2 cannot be read."),
        ("9-4=5, 5+3", False, None),  # the beginning of a line
        ("9-4=5, -", False, None),
        ("9-4=5, 5+3=8, 8-9=-1. <final>1</final>", True, "The final value should be -1."),
        ("9-4=5, 5+3=8. <final>8</final>", True, "Step 3 is missing."),
        ("9-4=5, 5+3=8, 8-9=-1, -1+1=0. <final>0</final>", True, "There is no step 4."),
        ("9-4=6, 6+3=8, 8-9=-1. <final>-1</final>", True, "Line 1 is wrong: 9-4 is not 6."),  # right value, wrong line
        ("9-4=5, 5+3=8, 8-9=-1", True, "The answer does not end with a final value."),
        ("9-4=５,", False, "Line 1 cannot be read."),  # a look-alike digit
    ],
)
def test_the_first_fault_is_found(text: str, whole: bool, found: str | None) -> None:
    assert fault(PROBLEM, text, whole) == found


def test_every_right_solution_has_no_fault_and_every_beginning_of_it_neither() -> None:
    for problem in held_out_set(8, 20):
        text = solution(problem)
        assert fault(problem, text, whole=True) is None
        for end in (position + 1 for position, character in enumerate(text) if character == ","):
            assert fault(problem, text[:end], whole=False) is None


def test_the_checker_tells_what_it_found_and_the_problem_once_more() -> None:
    assert told(ITEM, sample(RIGHT)) is None
    assert told(ITEM, sample("9-4=6")) == f"The answer does not end with a final value. {PROBLEM.text}"


def test_a_noisy_verifier_errs_at_its_rates_and_says_the_same_again() -> None:
    noisy, wrong = Noisy(t=0.9, f=0.2), RIGHT.replace(">-1<", ">1<")
    accepted = [noisy.answer(ITEM, sample(RIGHT, seed)) for seed in range(4000)]
    assert sum(accepted) / 4000 == pytest.approx(0.9, abs=0.02)  # 4 standard errors
    assert sum(noisy.answer(ITEM, sample(wrong, seed)) for seed in range(4000)) / 4000 == pytest.approx(0.2, abs=0.026)
    assert accepted == [noisy.answer(ITEM, sample(RIGHT, seed)) for seed in range(4000)]
    assert Noisy(t=1.0, f=0.0).told(ITEM, sample(RIGHT)) is None
    assert Noisy(t=0.0, f=0.0).told(ITEM, sample(RIGHT)) == f"A line is wrong. {PROBLEM.text}"


# ---- on the real service


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    directory = tmp_path_factory.mktemp("compute")
    flags = ["--training.backend", "none"]
    with running_service(ROOT / "serve.yaml", directory / "run", flags, say=lambda text: None) as url:
        yield url, directory / "run" / "api-key"


def ask(arithmetic: tuple[str, Path], method: Any, count: int, **settings: Any) -> list[Outcome]:
    url, key_file = arithmetic

    async def call() -> list[Outcome]:
        async with Client(url, scenario="arithmetic", key_file=key_file) as client:
            await client.create_scenario("arithmetic")
            items = [Item.from_text(p.text, p.text, str(p.answer)) for p in held_out_set(4, count)]
            askers = [Asker(client, Budget(256), **{"logprobs": True, **settings}) for _ in items]
            return list(await asyncio.gather(*map(method, askers, items)))

    return asyncio.run(call())


@pytest.mark.slow
def test_an_answer_built_of_segments_is_the_answer_given_at_once(arithmetic: tuple[str, Path]) -> None:
    """Greedy, one beam: continued by exact ids it must come to the same text and the same number of tokens."""
    how = Beam(",", width=1, expansions=1)
    parts = ask(
        arithmetic, lambda a, i: beam_search(a, i, GRADER.read, lambda item, partial: 0.0, how), 8, temperature=0.0
    )
    whole = ask(arithmetic, lambda a, i: self_consistency(a, i, GRADER.read, 1), 8, temperature=0.0)
    assert [each.text for each in parts] == [each.text for each in whole]
    assert [each.spent.sampled_tokens for each in parts] == [each.spent.sampled_tokens for each in whole]
    assert all(each.spent.requests == 4 for each in parts)


@pytest.mark.slow
def test_a_verifier_finds_right_answers_within_the_budget(arithmetic: tuple[str, Path]) -> None:
    one = ask(arithmetic, lambda a, i: self_consistency(a, i, GRADER.read, 1), 16)
    best = ask(arithmetic, lambda a, i: best_of(a, i, GRADER.read, by_verifier(answer_right), 8, accept=1.0), 16)
    search = Beam(",", 2, 2, floor=1.0, accept=1.0)
    beam = ask(arithmetic, lambda a, i: beam_search(a, i, GRADER.read, partial_right, search), 16)
    accepted = [each for each in (*best, *beam) if each.stopped_by == "accepted"]
    assert all(each.text and fault(problem_of(_item(each)), each.text, whole=True) is None for each in accepted)
    assert all(each.spent.sampled_tokens <= 256 for each in (*one, *best, *beam))
    assert sum(each.stopped_by == "accepted" for each in best) > sum(map(_right, one))


def _item(outcome: Outcome) -> Item:
    return Item.from_text(outcome.item, outcome.item, None)


def _right(outcome: Outcome) -> bool:
    return outcome.answer == str(problem_of(_item(outcome)).answer)


def test_partial_answers_score_one_while_nothing_is_wrong() -> None:
    partial = Partial("9-4=5, ", (1, 2), False)
    assert partial_right(ITEM, partial) == 1.0
    assert partial_right(ITEM, replace(partial, text="9-4=6, ")) == 0.0
