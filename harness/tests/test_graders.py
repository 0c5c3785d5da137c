"""The final grader against honest and hostile answers; what every grader does with its own failures."""

import asyncio
from pathlib import Path

import pytest
from reef_harness import FinalGrader, Grader, Item, Verdict
from reef_harness.graders import BadGold, grader_of


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


class Failing(Grader):
    """Raises what it is made with."""

    id = "failing"
    version = "1"

    def __init__(self, error: Exception) -> None:
        self._error = error

    def grade(self, text: str, gold: str, finish_reason: str) -> Verdict:
        raise self._error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BadGold("no integer"), "bad_gold"),
        (ValueError("a digit too many"), "grader_failed"),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"), "grader_failed"),
        (KeyError("x"), "grader_failed"),
    ],
)
def test_only_a_bad_gold_is_called_one(error: Exception, reason: str) -> None:
    verdict = asyncio.run(Failing(error).judge(Item.from_text("q", "?", "12"), "12", "stop"))
    assert (verdict.outcome, verdict.score, verdict.reason_code) == ("error", None, reason)


@pytest.mark.parametrize(
    ("spec", "wrong"),
    [
        ("code:wall_s=inf", "wall_s"),
        ("code:cpu_s=1e300", "cpu_s"),
        ("code:memory_mib=1.5", "memory_mib"),
        ("number:tolerance=x", "tolerance"),
        ("number:tolerance=1/0", "tolerance"),
        ("judge:http://127.0.0.1:9,model=m,rubric=RUBRIC,needs_gold=false", "needs_gold"),
        ("judge:http://127.0.0.1:9,model=m,rubric=RUBRIC,threshold=nan", "threshold"),
        ("judge:http://127.0.0.1:9,model=m,rubric=/nowhere", "rubric"),
    ],
)
def test_an_option_out_of_range_is_refused_by_its_name(spec: str, wrong: str, tmp_path: Path) -> None:
    (tmp_path / "rubric").write_text("1 if right")
    with pytest.raises(ValueError, match=f"option {wrong} must"):
        grader_of(spec.replace("RUBRIC", str(tmp_path / "rubric")))


@pytest.mark.parametrize("timeout", ["abc", "-1", "0", "nan", "inf"])
def test_a_time_that_is_none_is_refused_by_its_name(timeout: str) -> None:
    pytest.importorskip("jsonschema", reason="the extra json-schema is not installed")
    with pytest.raises(ValueError, match="option timeout_s must"):
        grader_of(f"json-schema:timeout_s={timeout}")
