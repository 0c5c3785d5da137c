"""The verifier of a task: ``python3 check.py FORM ANSWER GOLD REWARD``, files but for FORM; standard library only.

A task's verifier runs where `reef_harness` is not installed, and its graders are some 800 lines that change with it.
This file is small and strict instead: it finds a ``boxed`` or ``final`` answer and compares it with gold as text, or as
a rational number in simple LaTeX. It never takes for right what the grader of that name does not (a test holds them
against each other); what that grader leaves to a person (``review``) is worth 0 here: a verifier must say a number.
`write_tasks.py` copies it into each task as ``tests/check.py``.

REWARD gets 1 or 0. An answer file that is missing or cannot be read as text is 0; a broken gold ends with status 1 and
no reward: a verifier that fails says nothing of the answer.
"""

import re
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

MAX_ANSWER = 200  # characters; so nesting stays shallow
MAX_FILE = 16 * 2**20  # bytes of an answer file: far more than any model writes
MAX_BITS = 4096  # of a power's numerator or denominator
_MARK = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)
_LOOK = re.compile(r"\\(?:left|right)(?![A-Za-z])")
_FRACTION = re.compile(r"\\[dt]frac(?![A-Za-z])")
_SPACE = re.compile(r"(?:\\[,; ]|[ \t\r\n])+")
_AFTER_COMMAND = re.compile(r"(\\[A-Za-z]+) (?=[0-9])")
_TOKEN = re.compile(r"\\frac|\\cdot|\\times|[0-9]+(?:\.[0-9]+)?|[-+*/^(){}]")
_FINAL = re.compile(r"-?[1-9][0-9]*|0")


class Unreadable(ValueError):  # noqa: N818
    """A text that is no number of the kind that is read here."""


def boxed(text: str) -> str | None:
    r"""What is inside the last ``\boxed{...}`` of a text, the outer one of a box within a box.

    None where there is none, or the last one never closes. Escaped braces do not count.
    """
    start: int | None = None
    depth = 0
    found: str | None = None
    for mark in _MARK.finditer(text):
        if start is None:
            if mark[0] == "\\boxed{":
                start, depth = mark.end(), 1
        elif mark[0] in ("{", "\\boxed{"):
            depth += 1
        elif mark[0] == "}":
            depth -= 1
            if depth == 0:
                found, start = text[start : mark.start()], None
    return found if start is None else None


def final(text: str) -> str | None:
    """The integer of the one ``<final>INT</final>`` that ends a text."""
    body = text.rstrip(" \t\r\n")
    if text.count("<final>") != 1 or text.count("</final>") != 1 or not body.endswith("</final>"):
        return None
    value = body[body.index("<final>") :].removeprefix("<final>").removesuffix("</final>")
    return value if _FINAL.fullmatch(value) else None


def trimmed(answer: str) -> str:
    """An answer without what only changes how it looks; one space stays where it keeps letters or digits apart."""
    answer = _LOOK.sub("", answer.replace("\\!", "").strip())
    if len(answer) > 2 and answer[0] == answer[-1] == "$":
        answer = answer[1:-1]
    answer = _FRACTION.sub(r"\\frac", answer)
    return _SPACE.sub(_space, answer.strip())


def _space(found: "re.Match[str]") -> str:
    before = found.string[max(0, found.start() - 1) : found.start()]
    after = found.string[found.end() : found.end() + 1]
    return " " if before.isalnum() and after.isalnum() else ""


def number(answer: str) -> Fraction:
    """The exact value of a rational number in simple LaTeX. Raises Unreadable."""
    answer = _AFTER_COMMAND.sub(r"\1", trimmed(answer))
    if not 0 < len(answer) <= MAX_ANSWER:
        raise Unreadable(f"expected 1 to {MAX_ANSWER} characters, got {len(answer)}")
    tokens = _TOKEN.findall(answer)
    if "".join(tokens) != answer:
        raise Unreadable("it has something that is no number, sign, power, fraction or bracket")
    return _Reader(tokens).whole()


class _Reader:
    """Reads tokens from left to right: sums of products of powers."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = [*tokens, ""]
        self._at = 0

    def whole(self) -> Fraction:
        value = self._sum()
        if self._next():
            raise Unreadable(f"{self._next()!r} is not expected there")
        return value

    def _next(self) -> str:
        return self._tokens[self._at]

    def _take(self, *wanted: str) -> str:
        """Go past the next token if it is one of ``wanted``; "" otherwise."""
        found = self._next() if self._next() in wanted else ""
        self._at += bool(found)
        return found

    def _sum(self) -> Fraction:
        sign = -1 if self._take("+", "-") == "-" else 1
        value = sign * self._product()
        while taken := self._take("+", "-"):
            sign = -1 if taken == "-" else 1
            value += sign * self._product()
        return value

    def _product(self) -> Fraction:
        value = self._power()
        divided = False
        while sign := self._take("*", "\\cdot", "\\times", "/"):
            if sign != "/":
                value *= self._power()
                continue
            if divided:
                raise Unreadable("a/b/c can be read in two ways")
            value, divided = _divided(value, self._power()), True
        return value

    def _power(self) -> Fraction:
        base = self._atom()
        if not self._take("^"):
            return base
        if self._next() != "{" and not (self._next().isdigit() and len(self._next()) == 1):
            raise Unreadable("an exponent must be in braces, or one digit")
        exponent = self._atom()
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if exponent.denominator != 1 or abs(exponent) * size > MAX_BITS:
            raise Unreadable("an exponent must be a whole number that is not too large")
        if base == 0 and exponent <= 0:
            raise Unreadable("0 to a power that is not positive")
        return base ** int(exponent)

    def _atom(self) -> Fraction:
        if opened := self._take("(", "{"):
            value = self._sum()
            if not self._take(")" if opened == "(" else "}"):
                raise Unreadable("a bracket that is not closed")
            return value
        if self._take("\\frac"):
            return _divided(self._part(), self._part())
        digits = self._next()
        if not digits[:1].isdigit():
            raise Unreadable(f"expected a number, got {digits or 'the end'!r}")
        self._at += 1
        return Fraction(digits)

    def _part(self) -> Fraction:
        r"""A part of ``\frac``: in braces, or one digit, as LaTeX has it."""
        if self._next() == "{":
            return self._atom()
        digits = self._next()
        if not digits.isdigit():
            raise Unreadable("a part of a fraction must be in braces, or a digit")
        self._tokens[self._at] = digits[1:]
        self._at += len(digits) == 1
        return Fraction(digits[0])


def _divided(value: Fraction, by: Fraction) -> Fraction:
    if by == 0:
        raise Unreadable("a division by zero")
    return value / by


def equivalent(answer: str, gold: str) -> bool:
    """Whether an answer is the gold: as text after trimming, or as a rational number. One that rambles is not."""
    if len(answer) > max(MAX_ANSWER, 2 * len(gold)):
        return False
    if trimmed(answer) == trimmed(gold):
        return True
    try:
        return number(answer) == number(gold)
    except Unreadable:
        return False


FORMS: dict[str, Callable[[str], str | None]] = {"boxed": boxed, "final": final}


def judge(form: str, text: str, gold: str) -> tuple[bool, str]:
    """Whether a text answers ``gold``, and why, for people."""
    answer = FORMS[form](text)
    if answer is None:
        return False, f"there is no {form} answer in it"
    return equivalent(answer, gold), f"it says {answer[:MAX_ANSWER]!r}"


def read_answer(path: Path) -> str:
    """The text of an answer file. Raises OSError where it is too large to be one."""
    if path.stat().st_size > MAX_FILE:
        raise OSError(f"{path} has more than {MAX_FILE} bytes")
    return path.read_text(encoding="utf-8")


def main() -> None:
    form, answer_file, gold_file, reward_file = sys.argv[1:]
    gold = Path(gold_file).read_text(encoding="utf-8").strip()
    if not gold:
        sys.exit(f"{gold_file} holds no gold answer")
    try:
        right, why = judge(form, read_answer(Path(answer_file)), gold)
    except (OSError, UnicodeDecodeError) as error:
        right, why = False, f"no answer can be read: {error}"
    print(f"{'right' if right else 'wrong'}: {why}")
    Path(reward_file).write_text(f"{int(right)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
