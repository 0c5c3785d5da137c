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
_FIRST_OF_TWO = re.compile(r"[0-9)\]}%]")  # before a dash: it stands between two, a minus or a range
_BLANK_GROUP = re.compile(r"[0-9][ \u00a0\u2009\u202f]\Z")
_FACTOR = re.compile(
    r"[ \t}$*]{0,8}(?:\^|_|\\(?:pi|sqrt|frac|cdot|times|sum|log|ln|sin|cos|tan)(?![A-Za-z])|[\u03c0\u221a])"
)
_UNCLEAR = re.compile(
    r"[ \t}$*]{0,8}!|[abeiknxyzKMB](?![A-Za-z])|[ \t}$*\\]{0,8}%|[xX]"
    r"|[ \t}$*]{0,8}(?i:(?:percent|hundred|thousand|million|billion|trillion)s?\b)"
)


def fault_beside(text: str, start: int, end: int) -> Fault | None:
    """What is wrong with reading ``text[start:end]`` as the number that is meant; None for nothing.

    "not_a_number": it is part of a power, a root, a mixed number. "sign_unclear": a dash stands before it, over blanks
    or a currency. "not_alone": a letter, ``!`` or a word beside it may change its value, or be a unit.
    """
    before, after = text[max(0, start - _WINDOW) : start], text[end : end + _WINDOW]
    number = text[start:end]
    if _is_fraction(before[-1:]) or _is_fraction(after[:1]) or _FACTOR.match(after) or after[:1] in ("x", "X"):
        return "not_a_number"
    if len(number) == 3 and number.isdigit() and _BLANK_GROUP.search(before):
        return "not_alone"  # 12 000
    bare = _without_looks(before)
    if len(before) == _WINDOW and not bare:
        return "sign_unclear"
    if bare.endswith("}") and before[len(bare) :].lstrip().startswith("{"):
        return "not_a_number"  # \\frac{1}{6}
    if bare.endswith(("^", "_", "\u221a")) or _COMMAND.search(bare) or re.search(r"[0-9}]\s?\*\*$", before):
        return "not_a_number"
    two = not number.startswith(("-", "+", "\u2212")) and _FIRST_OF_TWO.match(bare[:-1].rstrip()[-1:])
    if _NEGATED.search(bare) or (_dash(bare[-1:]) and not two):
        return "sign_unclear"
    return "not_alone" if _UNCLEAR.match(after) else None


def _without_looks(before: str) -> str:
    """Without the blanks, currencies and opening brackets at its end."""
    ends = [found for found in _LOOKS.finditer(before) if found.end() == len(before)]
    return before[: ends[0].start()] if ends else before


def _dash(character: str) -> bool:
    return character != "" and (character in _DASHES or unicodedata.category(character) == "Pd")


def _is_fraction(character: str) -> bool:
    """Whether it is a vulgar fraction, a superscript or another numeral that is no decimal digit."""
    return character != "" and unicodedata.category(character) in ("No", "Nl")
