"""Whether the last number of a text stands alone, or belongs to something of another value: ``-$6``, ``10^10``."""

import re
import unicodedata
from typing import Literal

Fault = Literal["not_a_number", "sign_unclear", "not_alone"]

_WINDOW = 200  # characters before a number within which its sign is looked for
_DASHES = "-\u2212\u207b\u02d7\u2796\u00af"  # and everything of the category Pd: en dash, em dash, fullwidth
_LOOKS = re.compile(
    r"(?:[\s$\u20ac\u00a3\u00a5({\[*~]|\\[,;:! $(\[]"
    r"|\\(?:boxed|text|textrm|textbf|mathbf|mathrm|left|quad)(?![A-Za-z]))+"
)
_NEGATED = re.compile(r"(?i:\b(?:minus|negative))\Z")
_COMMAND = re.compile(r"\\[A-Za-z]+(?:\[[^\]]*\])?\Z")
_FUNCTION = re.compile(r"\\(?:sqrt|[dt]?frac|log|ln|exp|sin|cos|tan|cdot|times|div)(?:\[[^\]]*\])?\Z")
# Before a number: not that number, or about. "->" and "=>" lead to one, ">" ends a tag or begins a quoted line.
_BOUND = re.compile(r"[<\u2264\u2265\u2248\u00b1\u2213]\Z|(?<=[^-=\n])>\Z")
_TAG = re.compile(r"<[^<>]*>\Z")
_FIRST_OF_TWO = re.compile(r"[0-9)\]}%]")  # before a dash: it stands between two, a minus or a range
_BLANK_GROUP = re.compile(r"[0-9][ \u00a0\u2009\u202f]\Z")
_GAP = r"(?:[ \t}{$*~]|\\[,;:! $]|\\(?:text|textrm|textbf|textit|mathrm|mathbf|mathit|quad)(?![A-Za-z])){0,12}"
_GLUE = re.compile(r"(?:[}{$*]|\\(?:text|textrm|textbf|textit|mathrm|mathbf|mathit)(?![A-Za-z])){0,12}")
_DEGREES = re.compile(rf"{_GAP}\^{_GAP}\\circ(?![A-Za-z])")
_FACTOR = re.compile(rf"{_GAP}(?:\^|\\(?:pi|sqrt|frac|cdot|times|sum|log|ln|sin|cos|tan)(?![A-Za-z])|[\u03c0\u221a])")
_UNCLEAR = re.compile(
    rf"{_GAP}-?(?:[!\u00a2\u00b0\u2030\u2103\u2109]|\\?%|(?:[kKMB]|bn|mn|pi|squared|cubed)\b"
    r"|(?i:(?:percent|dozen|hundred|thousand|million|billion|trillion)s?\b))"
)
_CALLED = re.compile(r"(?i:\b(?:sqrt|root(?: of)?|log|ln|exp|sin|cos|tan)[ \t]?\Z)")
_PARTED = re.compile(r"[0-9]:\Z")
_OPERATED = re.compile(
    r"[0-9)\]}%$](?:[ \t]*[/+\u00d7\u00f7\u00b7\u22c5][ \t$]*|\*|[ \t]+\*[ \t]+)\Z"
)  # not 1 *2*, of Markdown
_RAISED = re.compile(r"[A-Za-z}]\^\Z")  # cm^2


def fault_beside(text: str, start: int, end: int) -> Fault | None:
    """What is wrong with reading ``text[start:end]`` as the number that is meant; None for nothing.

    "not_a_number": it is part of a power or a root. "sign_unclear": a dash stands before it, over blanks or a currency.
    "not_alone": what stands beside it may change its value, be a unit, or make a name of both: a letter without a
    blank between (12m, 3rd, 12x, x12), a degree sign, ``!``, "million", the group before (12 000), a whole (1 1/2), a
    colon (1:12), another operand (5 / 12), the base of a power (cm^2), a function (sqrt(12)), a bound (< 12), a LaTeX
    command (\\approx 12).
    """
    before, after = text[max(0, start - _WINDOW) : start], text[end : end + _WINDOW]
    number = text[start:end]
    if _glued(before, after) or _DEGREES.match(after):
        return "not_alone"
    if _is_fraction(before[-1:]) or _is_fraction(after[:1]) or _FACTOR.match(after):
        return "not_a_number"
    if _BLANK_GROUP.search(before) and ((len(number) == 3 and number.isdigit()) or "/" in number):
        return "not_alone"  # 12 000, 1 1/2
    bare = _without_looks(before)
    if len(before) == _WINDOW and not bare:
        return "sign_unclear"
    if bare.endswith("}") and before[len(bare) :].lstrip().startswith("{"):
        return "not_a_number"  # \\frac{1}{6}
    if _RAISED.search(bare) or _OPERATED.search(before):
        return "not_alone"
    if bare.endswith(("^", "\u221a")) or _FUNCTION.search(bare) or re.search(r"[0-9}]\s?\*\*$", before):
        return "not_a_number"
    if bare.endswith("_") or _PARTED.search(before) or _is_call(before):
        return "not_alone"
    if _CALLED.search(bare) or _COMMAND.search(bare) or (_BOUND.search(bare) and not _TAG.search(bare)):
        return "not_alone"
    two = not number.startswith(("-", "+", "\u2212")) and _FIRST_OF_TWO.match(bare[:-1].rstrip()[-1:])
    if _NEGATED.search(bare) or (_dash(bare[-1:]) and not two):
        return "sign_unclear"
    return "not_alone" if _UNCLEAR.match(after) else None


def _glued(before: str, after: str) -> bool:
    """Whether a letter stands beside it without a blank. Scripts that set no blanks have no upper and lower case."""
    glue = _GLUE.match(after)
    sides = (before[-1:], after[glue.end() if glue else 0 :][:1])
    return "_" in sides or any(map(_is_cased, sides)) or _is_ideographic_number(sides[1])


def _is_ideographic_number(character: str) -> bool:
    """Whether it multiplies the digits before it, as the ten thousand of Chinese and Japanese does."""
    return character != "" and unicodedata.category(character) == "Lo" and unicodedata.numeric(character, 0.0) != 0


def _is_cased(character: str) -> bool:
    return character.lower() != character.upper()


def _is_call(before: str) -> bool:
    """Whether it is the first argument of something: a name, and a bracket without a blank between."""
    return before[-1:] == "(" and _is_cased(before[-2:-1])


def _without_looks(before: str) -> str:
    """Without the blanks, currencies and opening brackets at its end."""
    ends = [found for found in _LOOKS.finditer(before) if found.end() == len(before)]
    return before[: ends[0].start()] if ends else before


def _dash(character: str) -> bool:
    return character != "" and (character in _DASHES or unicodedata.category(character) == "Pd")


def _is_fraction(character: str) -> bool:
    """Whether it is a vulgar fraction, a superscript or another numeral that is no decimal digit."""
    return character != "" and unicodedata.category(character) in ("No", "Nl")
