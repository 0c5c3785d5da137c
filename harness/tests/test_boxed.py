"""The boxed grader: pairs written by hand, and answers that try to pass, or to stop it."""

import time

import pytest
from reef_harness.graders import BoxedGrader
from reef_harness.graders.boxed import last_box

from harness.tests.grader_table import outcomes, pairs

BOUND_S = 20  # of this process's time: what grows faster than its input takes minutes or hours here


def grade(text: str, gold: str, finish_reason: str = "stop") -> tuple[str, str]:
    verdict = BoxedGrader().grade(text, gold, finish_reason)
    assert (verdict.score is None) == (verdict.outcome == "review")
    assert (verdict.grader, verdict.version) == ("boxed", "3")
    return verdict.outcome, verdict.reason_code


def boxed(answer: str, gold: str) -> tuple[str, str]:
    return grade(f"\\boxed{{{answer}}}", gold)


def test_the_hand_written_pairs_are_many_and_none_is_judged_the_wrong_way() -> None:
    assert len(pairs()) == 258
    found = outcomes(BoxedGrader())
    assert found[False, "correct"] == 0  # nothing that differs is accepted
    assert found[True, "incorrect"] == 0  # nothing that is the same gets a score of 0
    assert found[True, "correct"] == 108
    assert found[False, "incorrect"] == 117
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
    begun = time.process_time()
    assert boxed(answer, "5") == ("review", reason)
    assert time.process_time() - begun < BOUND_S


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
    begun = time.process_time()
    BoxedGrader().grade(text, "5", "stop")
    assert time.process_time() - begun < BOUND_S


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("2^{2024}-1", "2^{2024}"),
        ("3^{1000}-2^{1000}", "3^{1000}"),
        ("1-\\frac{1}{2^{200}}", "1"),
        ("\\frac{2^{2024}-1}{3}", "\\frac{2^{2024}+1}{3}"),
        ("10^{60}", "10^{60}+7"),
        ("10^{60}", "10^{60}+7.0"),
        ("\\{10^{60},1\\}", "\\{10^{60}+7,1\\}"),
    ],
)
def test_long_integers_and_fractions_are_equal_only_exactly(gold: str, answer: str) -> None:
    assert boxed(answer, gold) == ("incorrect", "different")


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("2^{2024}", "2^{2024}-\\sqrt{2}"),
        ("2^{1012}", "\\sqrt{2^{2024}+1}"),
        ("\\sqrt{2}", "\\sqrt{2}+10^{-60}"),
        ("1", "(2^{1/10^{30}})^{1/10^{30}}"),
    ],
)
def test_what_rounding_would_make_equal_is_reviewed(gold: str, answer: str) -> None:
    assert boxed(answer, gold) == ("review", "too_large")


@pytest.mark.parametrize(
    "answer",
    [
        "+".join(["\\sqrt{9^{6000}+1}"] * 110),
        "+".join(["\\sqrt[3]{9^{6000}+1}"] * 94),
        "+".join(["(9^{6000}+1)^{1/2}"] * 105),
        "+".join(["\\sqrt[3]{9^{6000}}"] * 99),
        "\\{" + ",".join(["\\sqrt[3]{9^{6300}}"] * 40) + "\\}",
    ],
    ids=range(5),
)
def test_roots_of_long_numbers_cost_little(answer: str) -> None:
    begun = time.process_time()
    boxed(answer, "5")
    boxed(answer, "\\{" + ",".join(map(str, range(40))) + "\\}")
    BoxedGrader().read(f"\\boxed{{{answer}}}")
    assert time.process_time() - begun < BOUND_S


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("-2,2", "\\pm 2"),
        ("1,2", "{1,2}"),
        ("1,2", "1\\text{ and }2"),
        ("\\{1,2\\}", "x\\in\\{1,2\\}"),
        ("(1,2)", "(x,y)=(1,2)"),
        ("(-\\infty,2)", "x<2"),
        ("[0,1]", "0\\le x\\le 1"),
        ("\\emptyset", "\\{\\}"),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "(1,2)"),
        ("5", "\\approx 5"),
        ("5", "5\\textbf{ cm}"),
        ("5", "\\text{Answer: }5"),
        ("5", "the answer is 5"),
        ("5", "5 \\\\"),
        ("8", "\\mathbf 8"),
        ("8", "{\\bf 8}"),
        ("10", "\\underline{10}"),
        ("10", "\\textcolor{red}{10}"),
        ("12", "12 cm"),
        ("12 cm", "12"),
        ("12", "12\\text{ cm}^2"),
        ("\\frac{1}{2}", "\\textbf{\\frac{1}{2}}"),
        ("1/2", "2^-1"),
        ("0.5", "2^-1"),
        # thousands beside a name, a unit or words, and between elements
        ("1000", "\\$1,000"),
        ("\\$12,500", "12500"),
        ("1000", "1,000\\text{ m}"),
        ("1234", "\\approx 1,234"),
        ("10000", "10'000"),
        ("1000, 2000", "1,000, 2,000"),
        ("1.5", "1,5"),
        # matrices and functions
        ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix} 1&2 \\\\ 6/2&4 \\end{pmatrix}"),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{bmatrix}1\\\\2\\end{bmatrix}"),
        ("\\frac{\\pi}{4}", "\\operatorname{arctan}(1)"),
        ("\\sqrt{2}", "sqrt(2)"),
        ("2\\sqrt{3}", "2*sqrt(3)"),
        ("\\frac{\\pi^2}{6}", "\\zeta(2)"),
        ("12", "\\operatorname{lcm}(4,6)"),
        ("252", "C(10,5)"),
        # lists whose elements are several
        ("-1,0,1", "0, \\pm 1"),
        ("-2,1,3", "-2, 1 \\text{ and } 3"),
        ("1,2,3,4,5", "1,2,\\dots,5"),
        ("(0,1),(0,-1)", "(0,\\pm 1)"),
        ("1\\text{ and }2", "2\\text{ and }1"),
        ("2", "\\{2\\}"),
        ("\\{2\\}", "2"),
        ("(0,1)", "]0,1["),
        # decimals that repeat, fractions, ratios, capitals
        ("\\frac13", "0.\\bar{3}"),
        ("\\frac13", "0.\\dot3"),
        ("\\frac13", "0.(3)"),
        ("\\frac13", "0.3(3)"),
        ("\\frac13", "0.333..."),
        ("\\frac12", "{1 \\over 2}"),
        ("\\frac34", "3:4"),
        ("3:4", "6:8"),
        ("1:2:3", "2:4:6"),
        ("yes", "Yes"),
        ("yes, no", "Yes, No"),
        ("yes, no", "No, Yes"),
        ("Paris, France", "paris, france"),
        # decimal commas, lists parted by wide blanks
        ("1.5", "1,5"),
        ("1,5", "1.5"),
        ("1,5", "\\frac32"),
        ("5,6", "5 \\quad 6"),
        ("5 \\quad 6", "5,6"),
        ("-1,1", "-1\\qquad 1"),
    ],
)
def test_what_is_right_in_other_words_is_reviewed_and_never_scored_as_wrong(gold: str, answer: str) -> None:
    assert boxed(answer, gold)[0] == "review"


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("5", "\\approx 6"),
        ("5", "6 cm"),
        ("5", "5x"),
        ("1,2", "3"),
        ("8", "\\mathbf 9"),
        ("12 cm", "13"),
        ("123", "0,123"),
        ("1000", "01,000"),
        ("1234", "x=1,235"),
        ("1234", "\\approx 1,235"),
        ("5", "1, 234"),
        ("1000, 2001", "1,000, 2,000"),
        ("-1,0,1", "0, 1"),
        ("2", "\\{3\\}"),
        ("\\frac34", "3:5"),
        ("e^2", "\\mathrm{e}^3"),
        ("yes", "No"),
        ("A", "a"),
        ("yes, no", "Yes, Yes"),
        ("1,5", "1.6"),
        ("1.5", "1,6"),
        ("5 \\quad", "6 \\quad"),
    ],
)
def test_another_number_is_wrong_whatever_stands_beside_it(gold: str, answer: str) -> None:
    assert boxed(answer, gold) == ("incorrect", "different")


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("\\$1000", "\\$1,000"),
        ("1234", "x=1,234"),
        ("1 234", "1,234"),
        ("(1,234)", "(1, 234)"),
        ("1234", "1\\ 234"),
        ("e^2", "\\mathrm{e}^2"),
        ("\\mathrm{e}^2", "e^2"),
        ("2\\pi e", "2\\pi\\mathrm{e}"),
        ("x+1", "\\mathbf{x}+1"),
        ("\\frac12", "\\nicefrac{1}{2}"),
        ("\\frac12", "\\sfrac{1}{2}"),
        ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}"),
    ],
)
def test_what_is_only_written_otherwise_is_correct(gold: str, answer: str) -> None:
    assert boxed(answer, gold)[0] == "correct"


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1234", "1, 234"),
        ("1234567", "1, 234, 567"),
        ("1234", "x = 1, 234"),
        ("12345", "12,\\ 345"),
        ("1234", "1 \\quad 234"),
        ("1,234", "1, 234"),
        ("1, 234", "1234"),
    ],
)
def test_blanks_between_what_may_be_elements_or_thousands_are_reviewed(gold: str, answer: str) -> None:
    assert boxed(answer, gold) == ("review", "ambiguous")
    assert boxed(gold, gold)[0] == "correct"


def test_no_two_letters_have_the_same_value() -> None:
    letters = "abcdfghjklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    for gold in letters:
        for answer in letters:
            assert boxed(answer, gold)[0] == ("correct" if gold == answer else "incorrect")
    assert boxed("b", "a+2")[0] == "incorrect"


def test_a_long_answer_that_is_gold_to_the_letter_is_correct() -> None:
    assert boxed("9" * 1_000_000, "9" * 1_000_000) == ("correct", "same_text")


def test_a_set_that_repeats_an_element_is_reviewed() -> None:
    assert boxed("\\{1,1,2\\}", "\\{1,2\\}") == ("review", "repeated_elements")
    assert boxed("\\{1,1,1\\}", "\\{1,2,3\\}") == ("incorrect", "different")
    assert boxed("\\{" + "1," * 200 + "2\\}", "\\{1,2\\}") == ("review", "too_large")


def test_sets_within_sets_cost_no_more_than_their_depth() -> None:
    begun = time.process_time()
    assert boxed("\\{" * 30 + "1" + "\\}" * 30, "\\{" * 30 + "2" + "\\}" * 30) == ("incorrect", "different")
    assert time.process_time() - begun < BOUND_S


def test_empty_elements_vote_at_once() -> None:
    assert BoxedGrader().read("\\boxed{,1,}") == ",,1,,"  # an empty element is a comma


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
    assert read("\\boxed{1, 234}") == "1,234"  # a list
    assert read("\\boxed{ x+1 }") == "x+1"
    assert read("\\boxed{x=5}") == read("\\boxed{x = 5.0}") == "x=5"
    assert read("\\boxed{y=5}") == "y=5"  # compared with x=5 it is for a person
    assert read("\\boxed{x=\\{2,1.0\\}}") == "x=\\{1,2\\}"
    assert read("\\boxed{" + "x=" * 900 + "1}") == "x=" * 900 + "1"
    assert read("\\boxed{\\{2, 0.5\\}}") == read("\\boxed{\\{\\frac12,2\\}}") == "\\{1/2,2\\}"
    assert read("\\boxed{(2, 1)}") == "(2,1)"
    assert read("\\boxed{+\\infty}") == read("\\boxed{\\infty}") != read("\\boxed{-\\infty}")
    assert read("5") is None
    assert read("\\boxed{}") is None
    assert read("\\boxed{2^{15000}}") == read("\\boxed{4^{7500}}") == f"{2**15000:#x}/0x1"  # beyond 4,300 digits
    assert read("\\boxed{\\frac{1}{2^{15000}}}") not in (None, read("\\boxed{2^{15000}}"))
