"""The choice grader, and the final grader's other two ways of comparing."""

import time

import pytest
from reef_harness.graders import ChoiceGrader, FinalGrader

BOUND_S = 20  # of this process's time: what grows faster than its input takes minutes or hours here


def grade(text: str, gold: str = "B", options: str = "ABCDE") -> tuple[str, str]:
    verdict = ChoiceGrader(options).grade(text, gold, "stop")
    return verdict.outcome, verdict.reason_code


@pytest.mark.parametrize(
    "text",
    ["B", "(B)", "B.", " B\n", "Since 2+2=4, the answer is B.", "Answer: B", "answer is (B)", "**Answer:** B",
     "Answer: **B**", "A is wrong.\n<final>B</final>", "\\boxed{B}", "\\boxed{\\text{B}}", "\\boxed{(B)}",
     "Answer: B\n\\boxed{B}"],
)  # fmt: skip
def test_each_documented_form_is_read(text: str) -> None:
    assert grade(text) == ("correct", "equal")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no_choice"),
        ("I would say so", "no_choice"),
        ("It is easy to see.\nI would say B", "no_choice"),
        ("the answer is a mess", "no_choice"),
        ("the answer is not easy", "no_choice"),
        ("The answer is Banana", "no_choice"),
        ("b", "no_choice"),
        ("Answer: A. No, answer: B", "several_choices"),
        ("<final>A</final><final>B</final>", "several_choices"),
        ("```\n<final>A</final>\n```\nAnswer: B", "several_choices"),
        ("\\boxed{A} \\boxed{B}", "several_choices"),
        ("\\boxed{A, B}", "several_choices"),
        ("\\boxed{AB}", "not_a_choice"),
        ("\\boxed{B} \\boxed{all}", "not_a_choice"),
        ("\\boxed{\u0412}", "not_a_choice"),  # Cyrillic
        ("\\boxed{\uff22}", "not_a_choice"),  # fullwidth
        ("\\boxed{B\u200b}", "not_a_choice"),
        ("\\boxed{F}", "not_a_choice"),
        ("<final>2</final>", "not_a_choice"),
        ("Answer: B or A", "several_choices"),
        ("Answer: B, A", "several_choices"),
        ("Answer: B|A|C|D", "several_choices"),
        ("Answer: (B) (A) (C)", "several_choices"),
        ("Answer: B\nA", "several_choices"),
        ("B or A", "several_choices"),
        ("Answer: F or B", "several_choices"),
        ("Answer: I do not know", "not_a_choice"),
        ("The answer is B\u0301", "not_a_choice"),
        ("\\boxed {A} then \\boxed{B}", "several_choices"),
        ("\\boxed{\\textit{A}} so \\boxed{B}", "several_choices"),
        ("\\boxed{A \\boxed{B}", "not_a_choice"),
        ("\\boxed A \\boxed{B}", "not_a_choice"),
        ("\\boxed{A" + " " * 300 + "} \\boxed{B}", "not_a_choice"),
        ("<final>A<x></final> <final>B</final>", "not_a_choice"),
        ("ANSWER: A. Answer: B", "several_choices"),
        ("Answer: \u0410\nAnswer: B", "not_a_choice"),
        ("Answer: \\boxed{B} or A", "several_choices"),
        ("Answer: the second\nAnswer: B", "not_a_choice"),
    ],
)
def test_an_answer_that_names_none_or_several_is_malformed(text: str, reason: str) -> None:
    assert grade(text) == ("incorrect", reason)


@pytest.mark.parametrize(
    "text", ["Answer: B, since 2+2=4", "Answer: B) Paris", "the answer is B because it fits", "Answer: option B"]
)
def test_a_letter_with_words_beside_it_is_for_a_person(text: str) -> None:
    assert grade(text) == ("review", "text_beside")
    assert grade(f"{text}\n\\boxed{{B}}") == ("correct", "equal")  # said once more, and clearly
    assert grade(f"{text}\n\\boxed{{C}}") == ("incorrect", "several_choices")


@pytest.mark.parametrize(
    "text",
    [
        "Answer: B, since A is false",
        "Answer: Not A, because 2+2=4, so B",
        "Answer: A is wrong, it must be B",
        "Answer: B. A triangle has three sides",
        "The answer is B bit tricky: it is A",
        "\\boxed{\\text{B, not A}}",
        "<final>B rather than A</final>",
        "B, since A is false",
        "Not A, because 2+2=4, so B",
        "The answer is not A, it is B",
        "We look at all of them.\nThe answer is not A but B\nbecause 2+2=4.",
    ],
)
def test_where_prose_names_several_a_person_looks_unless_another_place_says_which(text: str) -> None:
    for gold in "ABC":
        assert grade(text, gold) == ("review", "several_in_prose")
    assert ChoiceGrader().read(text) is None
    if text.startswith(("Answer:", "The answer is B")):
        begins = text.startswith(("Answer: B", "The answer is B"))  # with the letter that it says
        said = ("correct", "equal") if begins else ("review", "several_in_prose")
        assert grade(f"{text}\n<final>B</final>") == said
        assert grade(f"{text}\n<final>C</final>", "C") == ("incorrect", "several_choices")


@pytest.mark.parametrize("text", ["I would say B", "the answer is not B"])
def test_a_short_answer_in_words_is_for_a_person(text: str) -> None:
    assert grade(text) == ("review", "text_beside")


def test_a_clear_letter_does_not_turn_the_words_before_it_round() -> None:
    text = "The answer is B because A is impossible.\n\n\\boxed{A}"
    assert grade(text, "A") == grade(text, "B") == ("review", "several_in_prose")
    assert grade("Answer: option B, since A is false\n<final>A</final>", "A") == ("review", "several_in_prose")
    assert grade("Answer: not B, so A\n\\boxed{B}") == ("review", "several_in_prose")


def test_two_marks_on_a_line_are_two_places() -> None:
    assert grade("Answer: the answer is B") == ("correct", "equal")
    assert grade("Answer: B, so the answer is: B") == ("correct", "equal")
    assert grade("Answer: A, no, the answer is: B") == ("incorrect", "several_choices")


def test_another_letter_is_wrong_but_well_formed() -> None:
    verdict = ChoiceGrader().grade("C", "B", "stop")
    assert (verdict.outcome, verdict.reason_code, verdict.format_valid) == ("incorrect", "wrong_choice", True)
    assert ChoiceGrader().grade("B", "B", "length").reason_code == "unfinished"


def test_there_may_be_other_letters() -> None:
    assert grade("J", "J", "ABCDEFGHIJ") == ("correct", "equal")
    for options in ("A", "ab", "AA", "ABĆ"):
        with pytest.raises(ValueError, match="options"):
            ChoiceGrader(options)
    for gold in ("", "F", "b", "AB"):
        with pytest.raises(ValueError, match="gold"):
            grade("B", gold)


@pytest.mark.parametrize(
    "unit",
    [
        "<final>",
        "\\boxed{",
        "Answer:",
        "Answer: ",
        " ",
        "answer is ",
        "\\boxed{\\text{",
        "(",
        "answer\t",
        "\\boxed{A}",
        "A\n",
        "Answer: A\n",
    ],
)
def test_a_megabyte_takes_no_longer_than_its_length(unit: str) -> None:
    begun = time.process_time()
    assert grade(unit * (1_000_000 // len(unit)), "C")[0] == "incorrect"
    assert grade("Answer:" + unit * (1_000_000 // len(unit)), "C")[0] == "incorrect"
    assert time.process_time() - begun < BOUND_S


def test_choices_vote_by_their_letter() -> None:
    assert ChoiceGrader().read("Answer: (C)") == "C"
    assert ChoiceGrader().read("Answer: C. Answer: D") is None
    assert ChoiceGrader().read("Answer: C or D") is None
    assert ChoiceGrader().read("") is None


def final(comparing: str, answer: str, gold: str) -> tuple[str, str]:
    verdict = FinalGrader(comparing).grade(answer, gold, "stop")  # type: ignore[arg-type]
    return verdict.outcome, verdict.reason_code


def test_a_final_field_may_be_compared_as_text_or_as_latex() -> None:
    assert final("text", "<final> Paris\n</final>", "Paris") == ("correct", "equal")
    assert final("text", "<final>paris</final>", "Paris") == ("incorrect", "wrong_value")
    assert final("latex", "<final>\\frac12</final>", "0.5") == ("correct", "same_value")
    assert final("latex", "<final>10^{10^{10}}</final>", "0.5") == ("review", "too_large")
    assert final("latex", "<final>1</final> <final>0.5</final>", "0.5") == ("incorrect", "several_finals")
    assert final("latex", "```\n<final>0.5</final>\n```", "0.5") == ("incorrect", "text_after_final")
    with pytest.raises(ValueError, match="gold"):
        final("text", "<final></final>", " ")
    with pytest.raises(ValueError, match="comparing"):
        FinalGrader("eval")  # type: ignore[arg-type]
    assert {FinalGrader().version, FinalGrader("text").version, FinalGrader("latex").version} == {
        "1",
        "1-text",
        "3-latex",
    }


def test_final_fields_vote_by_what_they_hold() -> None:
    assert FinalGrader().read("so <final>12</final>\n") == "12"
    assert FinalGrader().read("<final>012</final>") is None
    assert FinalGrader("latex").read("<final>\\frac12</final>") == "1/2"
    assert FinalGrader("text").read("<final> Paris </final>") == "Paris"
