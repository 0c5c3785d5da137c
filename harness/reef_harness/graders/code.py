"""``code``: a Python program, run against tests in a sandbox. What is expected never enters the sandbox."""

import ast
import json
import math
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reef_harness.graders.base import BadGold, Grader, Verdict
from reef_harness.graders.pool import Pool
from reef_harness.graders.process import Finished
from reef_harness.graders.sandbox import Isolation, Limits, Sandbox, SandboxFailed
from reef_harness.types import Item

__all__ = ["CodeGrader", "Limits"]

# Indentation, the fence, a language and whatever else stands on its line, title=sum.py for instance.
_FENCE = re.compile(r"^([ \t]*+)(`{3,}+|~{3,}+)[ \t]*+([^\s`]*+)[^`\n]*+$", re.MULTILINE)
_PYTHON = ("", "python", "python3", "py", "py3")
_MAX_SOURCE = 200_000  # characters
_SHOWN = 200  # characters of an input or output in a verdict's detail


@dataclass(frozen=True, slots=True)
class _Test:
    """One test. ``given`` goes to stdin as it is; ``expected`` is text for a program, a value for a function."""

    given: bytes
    expected: Any
    hidden: bool


@dataclass(frozen=True, slots=True)
class _Gold:
    function: str  # "" for a program
    tests: tuple[_Test, ...]
    tolerance: float


class CodeGrader(Grader):
    """Wants one Python program (or function) that passes every test of gold.

    The answer is one fenced block of code (Python, or without a language), or nothing but code. Each test is a run of
    its own in a new sandbox; the first that fails decides. Expected results stay in this process and are compared
    here, so a solution cannot read hidden tests, change the checker, or pass by printing or exiting: it can only
    answer. ``isolation`` is described at :class:`.Sandbox`; ``parallel`` runs at a time (default: one for each CPU).

    Gold is JSON: ``{"tests": [{"input": "3 4\\n", "output": "7\\n"}, {..., "hidden": true}]}``, or with a function
    ``{"function": "add", "tests": [{"args": [3, 4], "returns": 7}], "tolerance": 1e-9}``.
    """

    id = "code"

    def __init__(
        self,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        *,
        isolation: Isolation = "namespaces",
        python: Path | None = None,
        parallel: int | None = None,
    ) -> None:
        self._sandbox = Sandbox(limits, isolation, python)
        self.version = "2" if isolation == "namespaces" else "2-process"
        self._pool = Pool(parallel or os.cpu_count() or 1, "reef-code")

    async def grade_later(self, item: Item, gold: str, text: str, finish_reason: str) -> Verdict:
        """As :meth:`grade`, without holding up the loop."""
        return await self._pool.run(self.grade, text, gold, finish_reason)

    def grade(self, text: str, gold: str, finish_reason: str) -> Verdict:
        """Judge one answer. Raises BadGold for a gold that is not as described."""
        wanted = _read_gold(gold)
        if finish_reason != "stop":
            return self.malformed("unfinished")
        blocks = _blocks(text)
        if len(blocks) != 1:
            return self.malformed("several_blocks" if blocks else "no_code", f"{len(blocks)} blocks of Python")
        if len(blocks[0]) > _MAX_SOURCE:
            return self.malformed("too_long", f"{len(blocks[0])} characters, at most {_MAX_SOURCE}")
        try:
            return self._tested(blocks[0], wanted)
        except SandboxFailed as error:
            return self.error("sandbox_failed", str(error))

    def _tested(self, source: str, gold: _Gold) -> Verdict:
        mode = "function" if gold.function else "program"
        for number, test in enumerate(gold.tests, 1):
            finished = self._sandbox.run(source, test.given, "function" if gold.function else "program", gold.function)
            fault = _fault(finished, test, gold)
            if fault:
                where = f"test {number} of {len(gold.tests)}"
                detail = f"{where} is hidden" if test.hidden else f"{where}: {_shown(test, finished, mode)}"
                return self.decided(False, fault, detail)
        return self.decided(True, "all_passed", f"{len(gold.tests)} tests")


def _blocks(text: str) -> list[str]:
    """The fenced blocks of Python; the whole text where it has no fences, or is a program with some in its strings.

    A fence that is not closed is none. A longer one of another language, ````markdown, may hold the answer's own.
    """
    opening: re.Match[str] | None = None
    around = ""  # the marks of a longer fence
    blocks, fenced = [], False
    for fence in _FENCE.finditer(text):
        if opening and (_indent(fence) > _indent(opening) or not fence[2].startswith(opening[2])):
            continue  # within the code, in a docstring for instance
        if opening and not fence[3]:
            if opening[3].lower() in _PYTHON:
                blocks.append(_dedented(text[opening.end() + 1 : fence.start()], opening[1]))
            opening = None
        elif around and not fence[3] and fence[2].startswith(around):
            around = ""
        else:  # one that was open before was never closed
            longer = len(fence[2]) > 3 and fence[3].lower() not in _PYTHON
            opening, around, fenced = (None, fence[2], True) if longer else (fence, around, True)
    return [text] if text.strip() and (not fenced or _only_code(text)) else blocks


def _only_code(text: str) -> bool:
    """Whether it is Python with its fences: they stand in strings, since a backtick elsewhere is no Python."""
    if len(text) > _MAX_SOURCE:
        return False
    try:
        lines = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return not all(isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) for line in lines)  # only quoted


def _indent(fence: "re.Match[str]") -> int:
    return len(fence[1].expandtabs(4))


def _dedented(code: str, indent: str) -> str:
    """Without the blanks that a list puts before each line."""
    return re.sub(rf"^(?:{re.escape(indent)}| {{0,{len(indent)}}})", "", code, flags=re.MULTILINE) if indent else code


# ---- one run's result


def _fault(finished: Finished, test: _Test, gold: _Gold) -> str | None:
    """The reason code of what is wrong with a run; None where it passed."""
    if finished.ended != "exit":
        return "timed_out" if finished.ended == "time" else "too_much_output"
    if finished.code in (-signal.SIGXCPU, 128 + signal.SIGXCPU):
        return "timed_out"
    if finished.code != 0:
        return "crashed"
    if not gold.function:
        return None if _lines(finished.stdout.decode(errors="replace")) == _lines(test.expected) else "wrong_output"
    try:
        value = json.loads(finished.stdout, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return "no_result"
    return None if _same(test.expected, value, gold.tolerance) else "wrong_output"


def _lines(text: str) -> list[str]:
    """Without white space at the ends of lines, and without empty lines at the end."""
    return "\n".join(line.rstrip() for line in text.split("\n")).rstrip("\n").split("\n")


def _same(expected: Any, value: Any, tolerance: float) -> bool:
    """Equal as JSON: numbers by their value, true and false only to themselves, lists in order."""
    if isinstance(expected, bool) or isinstance(value, bool):
        return expected is value
    if isinstance(expected, int | float) and isinstance(value, int | float):
        return expected == value or (tolerance > 0 and _near(expected, value, tolerance))
    if isinstance(expected, list) and isinstance(value, list):
        return len(expected) == len(value) and all(map(_same, expected, value, [tolerance] * len(value)))
    if isinstance(expected, Mapping) and isinstance(value, Mapping):
        return expected.keys() == value.keys() and all(_same(expected[k], value[k], tolerance) for k in expected)
    return type(expected) is type(value) and bool(expected == value)


def _near(expected: float, value: float, tolerance: float) -> bool:
    try:
        return math.isclose(expected, value, rel_tol=tolerance, abs_tol=tolerance)
    except OverflowError:  # an integer beyond floats
        return False


def _shown(test: _Test, finished: Finished, mode: str) -> str:
    """What a public test gave, wanted and got."""
    given = test.given.decode(errors="replace")[:_SHOWN]
    expected = (test.expected if mode == "program" else json.dumps(test.expected))[:_SHOWN]
    got = finished.stdout.decode(errors="replace")[:_SHOWN]
    complaint = finished.stderr.decode(errors="replace").strip()[-_SHOWN:]
    return f"given {given!r}, expected {expected!r}, got {got!r}" + (f", stderr {complaint!r}" if complaint else "")


# ---- gold


def _read_gold(gold: str) -> _Gold:
    try:
        raw = json.loads(gold, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise BadGold(f"the gold of code must be JSON with tests: {error}") from error
    if not isinstance(raw, dict):
        raise BadGold(f"the gold of code must be a JSON object with tests, got {raw!r:.200}")
    if unknown := raw.keys() - {"tests", "function", "tolerance"}:
        raise BadGold(f"the gold of code has tests, function and tolerance, not {', '.join(sorted(unknown))}")
    function, tolerance, tests = raw.get("function", ""), raw.get("tolerance", 0), raw.get("tests")
    if not isinstance(function, str) or (function and not function.isidentifier()):
        raise BadGold(f"gold: function must be a name, got {function!r}")
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < 1:
        raise BadGold(f"gold: tolerance must be a number from 0 to below 1, got {tolerance!r}")
    if not isinstance(tests, list) or not tests:
        raise BadGold("gold: tests must be a list of at least one test")
    # Public ones first: then a failure that can be shown is shown.
    read = sorted((_read_test(test, function) for test in tests), key=lambda test: test.hidden)
    return _Gold(function, tuple(read), float(tolerance))


def _read_test(test: Any, function: str) -> _Test:
    wanted: Sequence[str] = ("args", "returns") if function else ("input", "output")
    if not isinstance(test, dict) or not set(wanted) <= test.keys() <= {*wanted, "hidden"}:
        raise BadGold(f"gold: a test must have {' and '.join(wanted)}, and may have hidden; got {test!r:.200}")
    hidden = test.get("hidden", False)
    if not isinstance(hidden, bool):
        raise BadGold(f"gold: hidden must be true or false, got {hidden!r}")
    given, expected = test[wanted[0]], test[wanted[1]]
    if function:
        if not isinstance(given, list):
            raise BadGold(f"gold: args must be a list, got {given!r:.200}")
        return _Test(json.dumps(given).encode(), expected, hidden)
    if not isinstance(given, str) or not isinstance(expected, str):
        raise BadGold("gold: input and output must be text")
    return _Test(given.encode(), expected, hidden)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
