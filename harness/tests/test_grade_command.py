"""Graders by name, and ``reef-harness grade``."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
from reef_harness import FinalGrader, Verdict
from reef_harness.cli import main
from reef_harness.graders import BoxedGrader, ChoiceGrader, Grader, NumberGrader, grader_of
from reef_harness.graders.judge import JudgeGrader
from reef_harness.graders.named import _MAKERS


class Polite(Grader):
    """Wants a thank-you: one's own grader, as the documentation shows it."""

    id = "polite"
    version = "1"

    def grade(self, text: str, gold: str, finish_reason: str) -> Verdict:
        return self.decided("thank" in text, "polite" if "thank" in text else "rude")


def test_a_name_gives_its_grader_with_its_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(grader_of("final"), FinalGrader)
    assert isinstance(grader_of("boxed"), BoxedGrader)
    assert isinstance(grader_of("choice:options=ABCDEFGHIJ"), ChoiceGrader)
    assert grader_of("final:comparing=latex").version == "3-latex"
    number = grader_of("number:where=last,tolerance=0.001")
    assert isinstance(number, NumberGrader)
    assert number.version == "3-last-1/1000"
    (tmp_path / "rubric.md").write_text("Be fair.")
    monkeypatch.setenv("REEF_JUDGE_KEY", "sk-secret")
    judge = grader_of(f"judge:http://127.0.0.1:9/v1,model=m,rubric={tmp_path / 'rubric.md'},threshold=0.7")
    assert isinstance(judge, JudgeGrader)
    assert (judge.url, judge.rubric, judge.threshold) == ("http://127.0.0.1:9/v1", "Be fair.", 0.7)


def test_a_dotted_path_gives_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my_graders.py").write_text(
        "from reef_harness.graders import FinalGrader as Mine\nready = Mine('text')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert isinstance(grader_of("my_graders:Mine"), FinalGrader)
    assert grader_of("my_graders:ready").version == "1-text"


def test_ones_own_is_found_in_the_current_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "graders_right_here.py").write_text("from reef_harness.graders import FinalGrader as Mine\n")
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    monkeypatch.chdir(tmp_path)
    assert isinstance(grader_of("graders_right_here:Mine"), FinalGrader)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("banana", "known are final, boxed, number, choice, math-verify, json-schema, code, judge"),
        ("", "known are"),
        ("final:how=well", "no option 'how'"),
        ("final:text", "option=value"),
        ("final:comparing=a,comparing=b", "option=value once"),
        ("number:tolerance=x", "x"),
        ("judge:http://127.0.0.1:9", "model, rubric"),
        ("no_such_module:Thing", "no_such_module"),
        ("json:nothing", "nothing"),
        ("json:dumps", "no Grader"),
    ],
)
def test_a_name_that_is_wrong_is_told_with_what_is_known(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grader_of(spec)


def run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stdin: str, *arguments: str
) -> tuple[int, list[dict[str, object]], str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    status = main(["grade", *arguments])
    out, err = capsys.readouterr()
    return status, [json.loads(line) for line in out.splitlines()], err


def test_one_text_is_graded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    options = ("--grader", "boxed", "--gold", "1/2")
    status, verdicts, err = run(capsys, monkeypatch, "so \\boxed{0.5}\n", *options)
    assert (status, err) == (0, "")
    assert verdicts == [
        {"id": "1", "outcome": "correct", "score": 1.0, "reason_code": "same_value", "format_valid": True,
         "grader": "boxed", "version": "3", "detail": "read '0.5'"}
    ]  # fmt: skip
    (tmp_path / "answer").write_text("\\boxed{0.6}")
    assert run(capsys, monkeypatch, "", *options, str(tmp_path / "answer"))[1][0]["outcome"] == "incorrect"
    assert (
        run(capsys, monkeypatch, "\\boxed{0.5}", *options, "--finish-reason", "length")[1][0]["reason_code"]
        == "unfinished"
    )


def test_a_bad_row_is_named_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        '{"text": "<final>12</final>", "gold": "12", "id": "a"}',
        "{",
        '{"text": "<final>12</final>"}',
        "",
        '{"text": 12, "gold": "12"}',
        '{"text": "x", "gold": "12", "answer": "13"}',
        '{"text": "<final>12</final>", "gold": "twelve"}',
        '{"text": "<final>12</final>", "gold": null}',
        '{"text": "<final>12</final>", "gold": "12", "finish_reason": "length"}',
    ]
    status, verdicts, err = run(capsys, monkeypatch, "\n".join(rows), "--grader", "final")
    assert status == 1
    assert [(v["id"], v["outcome"], v["score"], v["reason_code"]) for v in verdicts] == [
        ("a", "correct", 1.0, "equal"),
        ("3", "error", None, "no_gold"),
        ("7", "error", None, "bad_gold"),
        ("8", "error", None, "no_gold"),
        ("9", "incorrect", 0.0, "unfinished"),
    ]
    assert [line.split(":")[0] for line in err.splitlines()] == ["line 2", "line 5", "line 6"]


def test_no_rows_are_refused_and_an_empty_text_is_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, verdicts, err = run(capsys, monkeypatch, " \n", "--grader", "final")
    assert (status, verdicts) == (1, [])
    assert "standard input has no rows" in err
    status, verdicts, _ = run(capsys, monkeypatch, "", "--grader", "final", "--gold", "12")
    assert (status, [each["reason_code"] for each in verdicts]) == (0, ["no_final"])


def test_a_byte_order_mark_is_no_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = '{"text": "<final>12</final>", "gold": "12"}\n'
    (tmp_path / "rows.jsonl").write_text(row, encoding="utf-8-sig")
    for stdin, named in (("\ufeff" + row, []), ("", [str(tmp_path / "rows.jsonl")])):
        status, verdicts, err = run(capsys, monkeypatch, stdin, "--grader", "final", *named)
        assert (status, [each["outcome"] for each in verdicts], err) == (0, ["correct"], "")


def test_an_unknown_grader_is_one_message(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    status, verdicts, err = run(capsys, monkeypatch, "", "--grader", "banana")
    assert (status, verdicts) == (1, [])
    assert err.startswith("reef-harness grade: no grader is named 'banana'")


def test_every_grader_that_is_listed_is_there_and_every_one_there_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graders"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["grader", "versions", "reads"]
    listed = [re.split(r"[\[:]", line.split()[0])[0] for line in lines]
    assert listed.pop() == "module"
    with pytest.raises(ValueError, match=f"known are {', '.join(listed)}, or your own"):
        grader_of("nobody")


def test_every_grader_is_listed_with_its_versions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_sandbox(options: dict[str, str]) -> Grader:
        raise ValueError("this machine cannot make a sandbox")

    monkeypatch.setattr("reef_harness.graders.named._MAKERS", {**_MAKERS, "math-verify": no_sandbox})
    assert main(["graders"]) == 0
    listed = [re.split(r"  +", line)[:2] for line in capsys.readouterr().out.splitlines()]
    versions = {re.split(r"[\[:]", spelling)[0]: version for spelling, version in listed}
    assert versions["final"] == "1, 1-text, 3-latex"
    assert versions["number"] == ", ".join(
        grader_of(f"number:where={where}").version for where in ("final", "boxed", "last")
    )
    assert versions["boxed"] == BoxedGrader.version
    assert (versions["judge"], versions["math-verify"], versions["module"]) == ("1-HASH", "-", "-")
