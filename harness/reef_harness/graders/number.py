"""``number``: one number, compared as the exact rational that it is."""

import re
from collections import deque
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from reef_harness.graders.base import BadGold, Grader, Verdict
from reef_harness.graders.boxed import last_box
from reef_harness.graders.lone import Fault, fault_beside
from reef_harness.graders.notation import spelled, ungrouped
from reef_harness.graders.places import only_final

Where = Literal["final", "boxed", "last"]

_MAX_DIGITS = 4_000  # of a number that must be computed with: a fraction, or one compared with a tolerance
_MAX_EXPONENT = 4_000
_UNSIGNED = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(
    rf"(?P<sign>[-+\u2212]?)(?P<number>{_UNSIGNED})(?:[eE](?P<exponent>[-+]?[0-9]{{1,18}}))?"
    r"(?:/(?P<below>[0-9]+))?(?P<percent>\\?%)?"
)
# In a text: a sign belongs to a number only where it cannot be a minus between two of them.
_IN_TEXT = re.compile(
    r"(?<![0-9.,/])(?:(?<![A-Za-z0-9_)\]}])[-+\u2212])?(?=\.?[0-9])[0-9.][0-9.,]*"
    r"(?:[eE][-+]?[0-9]+)?(?:/[0-9]+)*(?:\\?%)?"
)


class NotANumber(ValueError):  # noqa: N818
    """Not one well-formed number."""


class TooManyDigits(ValueError):  # noqa: N818
    """A number that is too long to be computed with."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number as written, in one form: ``sign`` * ``digits`` * 10 ** ``exponent`` / ``below``.

    ``digits`` has no zeros at either end ("" is zero), so that two decimals are equal where these are, at any length.
    """

    sign: int
    digits: str
    exponent: int
    below: str
    percent: bool

    @property
    def value(self) -> Fraction:
        """As a fraction. Raises TooManyDigits, and NotANumber for a division by zero."""
        if max(len(self.digits), len(self.below)) > _MAX_DIGITS or abs(self.exponent) > _MAX_EXPONENT:
            raise TooManyDigits(f"more than {_MAX_DIGITS} digits, or an exponent beyond {_MAX_EXPONENT}")
        if not self.below.strip("0"):
            raise NotANumber("division by zero")
        return self.sign * int(self.digits or "0") * Fraction(10) ** self.exponent / int(self.below)


def read_number(text: str) -> Number:
    """The number that the whole text is, but for white space around it.

    An optional sign (a minus may be U+2212), ASCII digits, thousands in well-formed groups, a decimal point, an
    exponent, "/" and a whole denominator, a per cent sign. Raises NotANumber for anything else.
    """
    found = _NUMBER.fullmatch(text.strip(" \t\r\n$"))
    if not found:
        raise NotANumber(f"not one well-formed number: {text[:80]!r}")
    whole, _, decimals = ungrouped(found["number"]).partition(".")
    written = (whole + decimals).lstrip("0")
    digits = written.rstrip("0")
    exponent = int(found["exponent"] or 0) - len(decimals) + len(written) - len(digits) if digits else 0
    sign = -1 if digits and found["sign"] in ("-", "\u2212") else 1
    return Number(sign, digits, exponent, (found["below"] or "1").lstrip("0") or "0", found["percent"] is not None)


class NumberGrader(Grader):
    """Wants one number equal to gold: 0.5, 1/2, 5e-1 and 0.50 are the same, 0.3333 and 1/3 are not.

    ``where`` the number stands: "final", alone in the one ``<final>`` field that ends the text; "boxed", alone in the
    last ``\\boxed{}``; "last", the last number of the text, where it stands alone: a part of a power or a root is
    none, one with a doubtful sign is for a person where it may be right, and one that belongs to something else (12m,
    x12, 12!) always is. ``tolerance`` is relative to gold and exact (as ``Fraction("0.001")``); 0 by default: nothing
    is rounded. A percentage equals a percentage only; 50% for 50 or 0.5, or the reverse, is for a person.
    """

    id = "number"

    def __init__(self, where: Where = "final", tolerance: Fraction | int = 0) -> None:
        if where not in ("final", "boxed", "last"):
            raise ValueError(f"where must be final, boxed or last, got {where!r}")
        if not 0 <= tolerance < 1:
            raise ValueError(f"tolerance must be a share of gold from 0 to below 1, got {tolerance}")
        self.where, self.tolerance = where, Fraction(tolerance)
        self.version = ("3-last" if where == "last" else f"2-{where}") + (f"-{self.tolerance}" if tolerance else "")

    def grade(self, text: str, gold: str, finish_reason: str) -> Verdict:
        """Judge one answer. Raises BadGold for a gold that is not a number, or has too many digits to compute."""
        try:
            right = read_number(gold)
            if right.below != "1" or self.tolerance:
                _ = right.value
        except ValueError as error:
            raise BadGold(f"the gold answer must be a number: {error}") from error
        if finish_reason != "stop":
            return self.malformed("unfinished")
        found, fault = self._find(text)
        if found is None:
            return self.malformed(fault)
        beside = self._beside(text) if self.where == "last" else None
        if beside == "not_a_number":
            return self.malformed(beside, f"{found[:200]!r} is part of something else")
        verdict = self._compare(right, found)
        if beside == "not_alone" or (beside and (verdict.correct or self._may_be(right, found))):
            return self.review(beside, f"read {found[:200]!r}")
        return verdict

    def read(self, text: str) -> str | None:
        """The number, as a fraction in lowest terms."""
        found, _ = self._find(text)
        if self.where == "last" and self._beside(text):
            return None
        try:
            number = read_number(found or "")
            return spelled(number.value) + ("%" if number.percent else "")
        except ValueError:
            return None

    def _find(self, text: str) -> tuple[str | None, str]:
        """The place that should be a number, or None and why."""
        if self.where == "final":
            field = only_final(text)
            return field.content, field.fault or ""
        if self.where == "boxed":
            return last_box(text), "no_box"
        if not text.isascii() and any(character.isdecimal() and not character.isascii() for character in text):
            return None, "strange_characters"
        last = _last(text)
        return (text[slice(*last)], "") if last else (None, "no_number")

    def _beside(self, text: str) -> Fault | None:
        last = _last(text)
        return fault_beside(text, *last) if last else None

    def _may_be(self, gold: Number, found: str) -> bool:
        """Whether it is gold with the other sign."""
        try:
            given = read_number(found)
            return gold.percent != given.percent or self._equal(gold, replace(given, sign=-given.sign))
        except ValueError:  # NotANumber, TooManyDigits
            return False

    def _compare(self, gold: Number, found: str) -> Verdict:
        detail = f"read {found[:200]!r}"
        try:
            given = read_number(found)
            if gold.percent != given.percent:
                return self._percent_differs(gold, given, detail)
            right = self._equal(gold, given)
        except NotANumber:
            return self.malformed("not_a_number", detail)
        except TooManyDigits as error:
            return self.review("too_large", f"{detail}: {error}")
        return self.decided(right, "equal" if right else "wrong_value", detail)

    def _percent_differs(self, gold: Number, given: Number, detail: str) -> Verdict:
        """One of the two is a percentage: 50% may be right where gold is 50, or 0.5; other numbers are wrong."""
        as_written, as_values = ((_plain(gold, by), _plain(given, by)) for by in (0, 2))
        if self._equal(*as_written) or self._equal(*as_values):
            return self.review("percent_differs", detail)
        return self.decided(False, "percent_differs", detail)

    def _equal(self, gold: Number, given: Number) -> bool:
        return given == gold or self._computed_equal(gold, given)

    def _computed_equal(self, gold: Number, given: Number) -> bool:
        if gold.below == given.below == "1" and not self.tolerance:
            return False  # two decimals, told apart by their digits
        return abs(given.value - gold.value) <= self.tolerance * abs(gold.value)


def _plain(number: Number, places: int) -> Number:
    """Without a per cent sign: a percentage's decimal point goes ``places`` to the left."""
    moved = places if number.percent and number.digits else 0
    return replace(number, percent=False, exponent=number.exponent - moved)


def _last(text: str) -> tuple[int, int] | None:
    """Where the last number of a text begins and ends."""
    last = deque(_IN_TEXT.finditer(text), maxlen=1)
    return (last[0].start(), last[0].start() + len(last[0][0].rstrip(".,"))) if last else None
