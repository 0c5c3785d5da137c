"""The boxed grader: pairs written by hand, and answers that try to pass, or to stop it."""

import time

import pytest
from reef_harness.graders import BoxedGrader
from reef_harness.graders.boxed import last_box

from harness.tests.grader_table import outcomes, pairs


def grade(text: str, gold: str, finish_reason: str = "stop") -> tuple[str, str]:
    verdict = BoxedGrader().grade(text, gold, finish_reason)
    assert (verdict.score is None) == (verdict.outcome == "review")
    assert (verdict.grader, verdict.version) == ("boxed", "1")
    return verdict.outcome, verdict.reason_code


def boxed(answer: str, gold: str) -> tuple[str, str]:
    return grade(f"\\boxed{{{answer}}}", gold)


def test_the_hand_written_pairs_are_many_and_none_is_judged_the_wrong_way() -> None:
    assert len(pairs()) == 258
    found = outcomes(BoxedGrader())
    assert found[False, "correct"] == 0  # nothing that differs is accepted
    assert found[True, "incorrect"] == 0  # nothing that is the same gets a score of 0
    assert found[True, "correct"] == 108
    assert found[False, "incorrect"] == 118
    assert found[True, "bad gold"] == found[False, "bad gold"] == 0


@pytest.mark.parametrize(
    ("text", "box"),
    [
        ("\\boxed{5}", "5"),
        ("so \\boxed{5}, or rather \\boxed{6}.", "6"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed {5}", "5"),
        ("\\boxed{5} and \\boxed{6", "5"),
        ("{ \\boxed{5}", "5"),
        ("} \\boxed{5} }", "5"),
        ("\\boxed{1 \\} \\boxed{2}", "2"),
        ("\\boxed{\\boxed{7}}", "\\boxed{7}"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("```\n\\boxed{5}\n```", "5"),
        ("\\boxed{}", ""),
    ],
)
def test_the_last_box_that_balances_is_read(text: str, box: str) -> None:
    assert last_box(text) == box


@pytest.mark.parametrize(
    "text", ["", "5", "\\boxed{5", "boxed{5}", "\\boxed 5", "\\fbox{5}", "\\\\boxed{5}", "\\boxed{" * 1000]
)
def test_without_a_closed_box_the_answer_is_malformed(text: str) -> None:
    assert grade(text, "5") == ("incorrect", "no_box")


@pytest.mark.parametrize("reason", ["length", "tool_calls", ""])
def test_an_unfinished_answer_is_incorrect_even_if_it_looks_right(reason: str) -> None:
    assert grade("\\boxed{5}", "5", reason) == ("incorrect", "unfinished")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("10^{10^{10}}", "too_large"),
        ("10^10^10", "ambiguous"),
        ("9^{9^{9^{9^{9}}}}", "too_large"),
        ("1.0000001^{10^{30}}", "too_large"),
        ("\\pi^{10^{30}}", "too_large"),
        ("\\sqrt{2}^{10^{9}}", "too_large"),
        ("(" * 500 + "5" + ")" * 500, "too_large"),
        ("{" * 500 + "5" + "}" * 500, "too_large"),
        ("9" * 1_000_000, "too_long"),
        ("(" * 100_000 + "5" + ")" * 100_000, "too_long"),
        ("+".join(["1"] * 5_000), "too_long"),
        ("\\sqrt{-25}", "not_real"),
        ("(-8)^{1/3}", "not_real"),
        ("0^0", "ambiguous"),
        ("1/2x", "ambiguous"),
        ("1/2/3", "ambiguous"),
        ("2e3", "ambiguous"),
        ("\\sum_{n=1}^{5} 1", "not_evaluated"),
        ("5\\%", "unit_differs"),
    ],
)
def test_what_may_be_right_and_cannot_be_computed_is_reviewed_at_once(answer: str, reason: str) -> None:
    begun = time.perf_counter()
    assert boxed(answer, "5") == ("review", reason)
    assert time.perf_counter() - begun < 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("\\frac{1}{0}", "undefined"),
        ("\\frac{5}{\\sqrt{2}-\\sqrt{2}}", "undefined"),
        ("0^{-1}", "undefined"),
        ("", "empty"),
        ("  ", "empty"),
        ("５", "strange_characters"),
        ("5\u200b", "strange_characters"),
        ("\u0665", "strange_characters"),
        ("5\u0301", "strange_characters"),
        ("__import__('os').system('id')", "different"),
        ("5; drop table", "different"),
        ("9" * 1_500, "different"),
        ("\\frac{}{}", "different"),
        ("((((", "different"),
    ],
)
def test_what_no_number_equals_is_incorrect(answer: str, reason: str) -> None:
    assert boxed(answer, "5") == ("incorrect", reason)


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 140_000 + "5",
        "\\boxed{5}" * 110_000,
        "{" * 1_000_000,
        "}" * 1_000_000 + "\\boxed{5}",
        "\\" * 1_000_000,
        "\\boxed{" + "\\text{a}" * 120_000 + "}",
        "\\boxed{" + " " * 90_000 + "x}",
        "\\boxed{" + "1," * 49_000 + "}",
        "\\boxed{" + "\\left(" * 16_000 + "}",
    ],
    ids=range(9),
)
def test_a_megabyte_takes_no_longer_than_its_length(text: str) -> None:
    begun = time.perf_counter()
    BoxedGrader().grade(text, "5", "stop")
    assert time.perf_counter() - begun < 3


def test_a_long_answer_that_is_gold_to_the_letter_is_correct() -> None:
    assert boxed("9" * 1_000_000, "9" * 1_000_000) == ("correct", "same_text")


def test_a_set_that_repeats_an_element_is_reviewed() -> None:
    assert boxed("\\{1,1,2\\}", "\\{1,2\\}") == ("review", "repeated_elements")
    assert boxed("\\{1,1,1\\}", "\\{1,2,3\\}") == ("incorrect", "different")
    assert boxed("\\{" + "1," * 200 + "2\\}", "\\{1,2\\}") == ("review", "too_large")


def test_words_of_another_alphabet_are_compared_as_text() -> None:
    assert boxed("\\text{Poincaré}", "Poincaré") == ("correct", "same_text")
    assert boxed("Pоincaré", "Poincaré") == ("incorrect", "different")  # the o is Cyrillic


@pytest.mark.parametrize("gold", ["", "  ", "$ $", "\\frac{1}{0}"])
def test_a_gold_without_a_value_is_an_error(gold: str) -> None:
    with pytest.raises(ValueError, match="gold"):
        boxed("5", gold)


def test_answers_that_are_the_same_number_vote_together() -> None:
    read = BoxedGrader().read
    assert read("\\boxed{0.5}") == read("\\boxed{\\frac{1}{2}}") == "1/2"
    assert read("\\boxed{\\sqrt{8}}") == read("\\boxed{2\\sqrt{2}}") == "2.82842712475"
    assert read("\\boxed{1,000}") == read("\\boxed{10^{3}}") == "1000"
    assert read("\\boxed{ x+1 }") == "x+1"
    assert read("5") is None
    assert read("\\boxed{}") is None
