"""The math-verify grader: what sympy finds equal, and what it must not be left alone with."""

import time
from pathlib import Path

import pytest
from reef_harness.graders.apart import ScriptFailed
from reef_harness.graders.math_verify import MathVerifyGrader
from reef_harness.graders.served import Servers

pytest.importorskip("math_verify", reason="the extra math-verify is not installed")
pytestmark = pytest.mark.slow  # sympy is loaded in a process of its own


@pytest.fixture(scope="module")
def grader() -> MathVerifyGrader:
    return MathVerifyGrader(timeout_s=60)


def boxed(grader: MathVerifyGrader, answer: str, gold: str) -> tuple[str, str]:
    verdict = grader.grade(f"\\boxed{{{answer}}}", gold, "stop")
    assert verdict.version == "2-0.9.0"
    return verdict.outcome, verdict.reason_code


@pytest.mark.parametrize(
    ("answer", "gold", "outcome", "reason"),
    [
        ("3", "\\log_2 8", "correct", "equal"),
        ("\\frac{2^{u}}{4}", "2^{u-2}", "correct", "equal"),
        ("2^{u-1}", "2^{u-2}", "incorrect", "different"),
        ("x", "x", "correct", "same_text"),
        ("__import__('os').system('touch /tmp/reef-was-here')", "5", "incorrect", "unreadable"),
        ("\\frac{1}{0}", "5", "incorrect", "different"),
        ("", "5", "incorrect", "empty"),
        ("9" * 6_000, "5", "review", "too_long"),
    ],
)
def test_sympy_decides(grader: MathVerifyGrader, answer: str, gold: str, outcome: str, reason: str) -> None:
    assert boxed(grader, answer, gold) == (outcome, reason)


def test_what_takes_too_long_or_too_much_is_reviewed() -> None:
    begun = time.perf_counter()
    outcome, reason = boxed(MathVerifyGrader(timeout_s=4), "10^{10^{10}}", "5")
    assert (outcome, reason) in [("review", "timed_out"), ("review", "too_large")]
    assert time.perf_counter() - begun < 60


def test_a_copy_that_died_is_an_error_once_and_started_again() -> None:
    grader = MathVerifyGrader(parallel=1, timeout_s=60)
    server = grader._servers._free.queue[0]
    assert boxed(grader, "2", "5") == ("incorrect", "different")
    first = server._process
    assert boxed(grader, "\\frac{10}{2}", "5") == ("correct", "equal")
    assert server._process is first  # one process for many answers
    first.kill()
    first.wait()
    assert boxed(grader, "4", "5") == ("incorrect", "different")
    assert server._process is not first


def test_a_script_that_does_not_start_is_told(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit('no sympy here')")
    with pytest.raises(ScriptFailed, match="no sympy here"):
        Servers(tmp_path / "broken.py", 1).ask({}, timeout_s=60, memory_mib=100)


def test_a_gold_that_it_cannot_read_and_a_text_without_a_box(grader: MathVerifyGrader) -> None:
    with pytest.raises(ValueError, match="gold"):
        boxed(grader, "5", "?")
    assert grader.grade("5", "5", "stop").reason_code == "no_box"
    assert grader.grade("\\boxed{5}", "5", "length").reason_code == "unfinished"
    assert grader.read("\\boxed{ x + 1 }") == "x+1"
