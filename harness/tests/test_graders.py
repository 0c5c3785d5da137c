"""The final grader against honest and hostile answers."""

import pytest
from reef_harness import FinalGrader


def grade(text: str, gold: str = "12", finish_reason: str = "stop") -> tuple[str, str, bool]:
    verdict = FinalGrader().grade(text, gold, finish_reason)
    assert verdict.score == (1.0 if verdict.correct else 0.0)
    assert (verdict.grader, verdict.version) == ("final", "1")
    return verdict.outcome, verdict.reason_code, verdict.format_valid


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("9+3=12. <final>12</final>", "12"),
        ("<final>12</final>\n", "12"),
        ("<final>-3</final>", "-3"),
        ("<final>0</final>", "0"),
        ("<final>" + "9" * 1_000_000 + "</final>", "9" * 1_000_000),
    ],
)
def test_right_answers_are_correct(text: str, gold: str) -> None:
    assert grade(text, gold) == ("correct", "equal", True)


@pytest.mark.parametrize("value", ["13", "-12", "1" * 1_000_000, "0"])
def test_another_integer_is_wrong_but_well_formed(value: str) -> None:
    assert grade(f"<final>{value}</final>") == ("incorrect", "wrong_value", True)


@pytest.mark.parametrize(
    "value",
    [
        "",
        " 12",
        "12 ",
        "+12",
        "012",
        "00",
        "-0",
        "--12",
        "12.0",
        "1e1",
        "0xc",
        "1_2",
        "1,2",
        "12\n",
        "twelve",
        "6+6",
        "10**10**10",
        "__import__('os')",
        "１２",
        "١٢",
        "1\u06f2",
        "\u221212",
        "12\u200b",
        "1\u00002",
        "<b>12</b>",
        "²",
    ],
)
def test_whatever_is_not_a_plain_integer_is_malformed(value: str) -> None:
    assert grade(f"<final>{value}</final>") == ("incorrect", "not_an_integer", False)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no_final"),
        ("12", "no_final"),
        ("<final>12", "no_final"),
        ("12</final>", "no_final"),
        ("<FINAL>12</FINAL>", "no_final"),
        ("<final >12</final >", "no_final"),
        ("<final>12</final><final>12</final>", "several_finals"),
        ("<final>11</final> no: <final>12</final>", "several_finals"),
        ("<final><final>12</final>", "several_finals"),
        ("<final>12</final></final>", "several_finals"),
        ("<final>12</final> and so on", "text_after_final"),
        ("<final>12</final>.", "text_after_final"),
        ("<final>12</final>\u00a0", "text_after_final"),
        ("</final>12<final>", "text_after_final"),
    ],
)
def test_anything_but_one_terminal_field_is_malformed(text: str, reason: str) -> None:
    assert grade(text) == ("incorrect", reason, False)


@pytest.mark.parametrize("finish_reason", ["length", "abort", "tool_calls", ""])
def test_an_unfinished_answer_is_incorrect_even_if_it_looks_right(finish_reason: str) -> None:
    assert grade("<final>12</final>", finish_reason=finish_reason) == ("incorrect", "unfinished", False)


@pytest.mark.parametrize("gold", ["", "012", "+1", "1.5", "twelve", "12\n"])
def test_a_gold_that_nothing_could_equal_is_an_error(gold: str) -> None:
    with pytest.raises(ValueError, match="gold"):
        FinalGrader().grade("<final>12</final>", gold, "stop")
