"""Whether two answers are the same, strictly: the same text, or the same number. A doubt is never a yes."""

import hashlib
import re
from fractions import Fraction
from functools import lru_cache

from reef_harness.graders.base import BadGold
from reef_harness.graders.collection import compare_collections, read_collection
from reef_harness.graders.comparison import DIFFERENT, SAME_TEXT, SAME_VALUE, Comparison
from reef_harness.graders.latex import (
    MAX_LENGTH,
    MAX_NESTING,
    NotEvaluated,
    TooLarge,
    Undefined,
    Unreadable,
    Value,
    close,
    evaluate,
    long,
)
from reef_harness.graders.notation import THOUSANDS, clean, grouped, spelled, ungrouped

TOLERANCE = Fraction(1, 10**6)  # relative, where one of the two is written with a decimal point
_CLOSED_FORM = Fraction(1, 10**50)  # relative, between two closed forms computed to 100 digits
_MAX_TEXT = 100_000  # characters; longer answers are compared as they are


def compare(gold: str, answer: str) -> Comparison:
    """Compare an answer with gold, both LaTeX or plain text. Raises BadGold for a gold without content or value."""
    if not (right := clean(gold)):
        raise BadGold(f"the gold answer is empty: {gold!r}")
    if len(answer) > _MAX_TEXT:
        same = answer.strip() == gold.strip()
        return SAME_TEXT if same else Comparison("review", "too_long", f"{len(answer)} characters")
    given = clean(answer)
    if given == right and not _listed(gold, right, answer, given):
        return SAME_TEXT
    if not given:
        return Comparison("different", "empty")
    if right.isascii() and not given.isascii():
        return Comparison("different", "strange_characters", _strange(given))
    if max(len(given), len(right)) > MAX_LENGTH:
        return Comparison("review", "too_long", f"{len(given)} characters, gold has {len(right)}")
    found = _compare(right, given, 0)
    if found.result == "equal" and _listed(gold, right, answer, given):
        return Comparison("review", "ambiguous", "one number, or a list")
    if found == DIFFERENT and (_QUAD.search(gold) is None) != (_QUAD.search(answer) is None):
        return Comparison("review", "not_evaluated", "a wide blank may part the elements of a list")
    return found


def canonical(answer: str) -> str | None:
    """One text for answers that are the same number or the same text, for voting; None for an empty one."""
    if len(answer) > _MAX_TEXT or not (text := clean(answer)):
        return None
    listed = _APART.search(answer) and _one_number(text) != text
    return text if listed or len(text) > MAX_LENGTH else _canonical(text, 0)


def _canonical(text: str, depth: int) -> str:
    if depth < MAX_NESTING and (named := _ASSIGNED.match(text)):  # x=2 is not y=2
        return named[0] + _canonical(text[named.end() :], depth + 1)
    text = _one_number(text)
    if text != "," and depth < MAX_NESTING and (found := read_collection(text)):  # "," stands for an empty element
        elements = [_canonical(element, depth + 1) for element in found.elements]
        inside = ",".join(sorted(elements) if found.unordered else elements)
        return found.opening + inside + found.closing
    try:
        value = evaluate(text)
    except NotEvaluated:
        return text.removeprefix("+") if _INFINITE.fullmatch(text) else text
    return spelled(value.number) if isinstance(value.number, Fraction) else f"{value.number:.12g}"


# Between digits a blank beside a comma, and a wide blank, part the elements of a list; without it they part thousands.
_BLANK = r"(?:\s|~|\\[,;: ])"
_QUAD = re.compile(r"\\q?quad(?![A-Za-z])")
_APART = re.compile(rf"[0-9]{_BLANK}*,{_BLANK}+[0-9]|[0-9]{_BLANK}+,|{_QUAD.pattern}")


def _listed(gold: str, right: str, answer: str, given: str) -> bool:
    """Whether one may be a list, by its blanks, that is read as one number; ``right`` and ``given`` are clean."""
    apart = [_APART.search(side) is not None for side in (gold, answer)]
    if apart[0] == apart[1] or not (THOUSANDS.search(right) or THOUSANDS.search(given)):
        return False
    lists = read_collection(right) is not None and read_collection(given) is not None
    return not lists or _one_number(right) != right or "quad" in gold + answer


def _words(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z]+[A-Za-z .']+", text) is not None


def _strange(text: str) -> str:
    found = next(character for character in text if not character.isascii())
    return f"U+{ord(found):04X}"


# ---- a list, a set, a tuple or an interval, or a single thing


@lru_cache(maxsize=2048)  # sets within sets are compared more than once: without it, twice as long at each level
def _compare(gold: str, answer: str, depth: int) -> Comparison:
    if depth > MAX_NESTING:
        return Comparison("review", "too_large", "nested too deep")
    if gold == answer:
        return SAME_TEXT
    right, given = read_collection(gold), read_collection(answer)
    if right is None and given is None:
        return _compare_single(gold, answer)
    if right is None or given is None:
        return _compare_grouped(gold, answer, answer if given is None else gold, depth)
    found = compare_collections(right, given, lambda one, other: _compare(one, other, depth + 1))
    if found.result == "different" and (_MANY.search(gold) or _MANY.search(answer)):
        return Comparison("review", "not_evaluated", "an element may be several")
    return found


def _compare_grouped(gold: str, answer: str, single: str, depth: int) -> Comparison:
    """One is a list by its commas, ``single`` is not; perhaps they only separate thousands, or it says a list too."""
    if single != gold and grouped(_ASSIGNED.sub("", gold)):
        return Comparison("review", "ambiguous", f"gold {gold} is one number, or a list")
    if (one := _one_number(answer)) != answer or _one_number(gold) != gold:
        return _compare_single(_one_number(gold), one)
    if _BEYOND.search(single) or _SEVERAL.search(single):
        return Comparison("review", "not_evaluated", f"{single[:80]!r} may be a list, a set or an interval")
    for listed, other in ((gold, answer), (answer, gold)):
        found = read_collection(listed)
        if found and len(found.elements) == 1 and _compare(found.elements[0], other, depth + 1).result != "different":
            return Comparison("review", "delimiters_differ")
    pointed = [side.replace(",", ".") if _DECIMAL_COMMA.fullmatch(side) else side for side in (gold, answer)]
    if pointed != [gold, answer] and _compare(*pointed, depth + 1).result == "equal":
        return Comparison("review", "ambiguous", "a list, or a decimal comma")
    return _compare_bare(gold, answer)


_DECIMAL_COMMA = re.compile(r"[-+]?[0-9]+,[0-9]+")


def _one_number(text: str) -> str:
    """Without the commas and blanks of thousands where it is one number, with a name, a currency or a unit beside."""
    named = _ASSIGNED.sub("", text)
    number, _ = _unit(named)
    return text.replace(number, ungrouped(number)) if grouped(number) else text


# ---- single things

_UNIT = re.compile(r"(?:\\?%|\^\{?\\circ\}?|\\(?:text|textrm|mathrm|mbox)\{[^{}]*\})$")
# A list, a vector or a set in other words: words between the elements, a semicolon, a matrix, a name beside it.
_SEVERAL = re.compile(r"^\]|\[$|;|&|\\\\|\\(?:land|lor|wedge|vee|text|textrm|mathrm|mbox)(?![A-Za-z])|\b(?:and|or)\b")
# What stands for several elements among others.
_MANY = re.compile(
    r";|[0-9]:[0-9]+:|\.\.\.|\b(?:and|or)\b|\\(?:pm|mp|dots|ldots|cdots|land|lor|wedge|vee|cup|in)(?![A-Za-z])"
)
# What may stand beside a number without changing it: words, commands that are not computed with, what they take.
_BESIDE = re.compile(
    r"(?:\\(?:text[a-z]*|mathrm|mbox|operatorname|color)\{[^{}0-9]*\}|\\(?!frac|sqrt|pi|cdot|times|div)[A-Za-z]+|\\[^A-Za-z]"
    r"|(?<![A-Za-z\\])[A-Za-z]{2,}|(?<= )[A-Za-z]\b)(?:\^(?:\{-?[0-9]\}|[0-9]))?|:"
)
_CURRENCY = re.compile(r"^\\?\$")
_ASSIGNED = re.compile(r"^[A-Za-z]=(?=[^=])")
_INFINITE = re.compile(r"([-+]?)\\infty")
# Notation that has a value and is not computed here: an answer that holds it may be right.
_BEYOND = re.compile(
    r"!|_|\||=|<|>|\.\.\.|[A-Za-z]\([^()]*,|(?<![A-Za-z\\])(?:sqrt|[A-Za-z]{3,}\()"
    r"|\\(?:log|ln|lg|exp|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|binom|dbinom|tbinom|sum"
    r"|prod|int|lim|max|min|gcd|bmod|pmod|mod|lfloor|rfloor|lceil|rceil|cup|cap|infty|pm|mp|overline|dots|ldots|cdots"
    r"|arctg|arcctg|tg|ctg|arccot|coth|sech|csch|Gamma|operatorname|bar|dot|over|atop|choose|ast|bullet|deg|det|arg|Re|Im"
    r"|le|ge|ne|in|mathbb|begin|setminus|emptyset|varnothing)(?![A-Za-z])"
)


def _compare_single(gold: str, answer: str) -> Comparison:
    gold, answer = _without_name(gold, answer)
    gold, answer = _one_number(gold), _one_number(answer)
    if gold == answer:
        return SAME_VALUE
    if _words(answer) and answer.casefold() == gold.casefold():
        return Comparison("review", "case_differs")
    (right, right_unit), (given, given_unit) = _unit(gold), _unit(answer)
    if right_unit != given_unit and right and given:
        return Comparison(
            "review", "unit_differs", f"gold {right_unit or 'has none'}, answer {given_unit or 'has none'}"
        )
    if right_unit and right == given:
        return SAME_TEXT
    if right_unit and right and given:
        gold, answer = right, given
    if infinite := _INFINITE.fullmatch(gold) or _INFINITE.fullmatch(answer):
        return _compare_infinite(gold, answer, infinite)
    return _compare_values(gold, answer)


def _without_name(gold: str, answer: str) -> tuple[str, str]:
    """``x=5`` beside ``5`` is 5; two names must be the same."""
    names = [found[0] if (found := _ASSIGNED.match(side)) else "" for side in (gold, answer)]
    if names[0] and names[1] and names[0] != names[1]:
        return gold, answer
    return gold[len(names[0]) :], answer[len(names[1]) :]


def _unit(text: str) -> tuple[str, str]:
    """The text without a currency before it and a per cent, a degree or words after it; and these."""
    unit = ""
    if found := _CURRENCY.match(text):
        unit, text = "$", text[found.end() :]
    while (found := _UNIT.search(text)) and len(unit) < MAX_LENGTH:
        unit, text = found[0].removeprefix("\\") + unit, text[: found.start()]
    return text.strip(), re.sub(r"[\s{}]", "", unit)


def _compare_infinite(gold: str, answer: str, found: "re.Match[str]") -> Comparison:
    both = [_INFINITE.fullmatch(side) for side in (gold, answer)]
    if both[0] and both[1]:
        return SAME_VALUE if (both[0][1] == "-") == (both[1][1] == "-") else DIFFERENT
    try:
        evaluate(answer if both[0] else gold)
    except NotEvaluated as error:
        return DIFFERENT if not error.maybe and not _BEYOND.search(answer) else Comparison("review", "not_evaluated")
    return DIFFERENT


_evaluated = lru_cache(maxsize=256)(evaluate)  # each element of a set is compared with each of the other


def _compare_values(gold: str, answer: str) -> Comparison:
    try:
        right = _evaluated(gold)
    except Unreadable:
        return _compare_symbols(gold, answer)
    except Undefined as error:
        raise BadGold(f"the gold answer has no value: {gold!r}, {error}") from error
    except NotEvaluated as error:
        return Comparison("review", error.reason, f"gold: {error}")
    try:
        return SAME_VALUE if same_number(right, _evaluated(answer)) else DIFFERENT
    except Unreadable:
        return _compare_symbols(gold, answer)
    except NotEvaluated as error:
        return Comparison("review" if error.maybe else "different", error.reason, str(error))


def same_number(gold: Value, answer: Value) -> bool:
    """Whether two numbers are the same.

    Two fractions must be equal, at any length; closed forms of which one is irrational, to 50 digits. Where one of the
    two is written with a decimal point, the answer may be off by 1e-6 of gold; by no more than 1e-6 altogether where
    gold is an integer; not at all where both are. Raises TooLarge where 50 digits do not tell a long fraction from
    what is irrational.
    """
    if isinstance(gold.number, Fraction) and isinstance(answer.number, Fraction):
        if gold.number == answer.number:
            return True
    elif not (gold.decimal or answer.decimal) and close(answer.number, gold.number, _CLOSED_FORM):
        if long(gold.number) or long(answer.number):
            raise TooLarge("a number too long to be compared with one that is irrational")
        return True
    if not (gold.decimal or answer.decimal) or (gold.whole and answer.whole):
        return False
    if not close(answer.number, gold.number, TOLERANCE):
        return False
    size = abs(Fraction(gold.number)) if gold.whole else Fraction(1)
    return size <= 1 or close(answer.number, gold.number, TOLERANCE / size)


# ---- formulas with letters: never equal by their values, but different by them

_POINTS = ("a", "b", "c")
# Words, not products of letters; no names of functions and environments.
_WORD = re.compile(r"(?<![A-Za-z\\])(?<!\\begin\{)(?<!\\end\{)(?<!\\operatorname\{)(?!sqrt)[A-Za-z]{4,}(?![A-Za-z(])")
# A function, and no product, though it may be read as one.
_FUNCTION = re.compile(
    r"(?<![A-Za-z\\])(?:sqrt|log|ln|exp|sin|cos|tan)|\\(?:zeta|phi|varphi|sigma|tau|mu|lambda)\([0-9]+\)"
)


def _compare_symbols(gold: str, answer: str) -> Comparison:
    """Formulas in other words: values at three points can tell that they differ, a person that they are the same."""
    if _WORD.search(gold) or _WORD.search(answer):
        return _compare_bare(gold, answer)
    for point in _POINTS:
        letters = _Letters(point)
        try:
            same = same_number(evaluate(gold, letters.value), evaluate(answer, letters.value))
        except Unreadable as error:
            beyond = _BEYOND.search(answer) or (_BEYOND.search(gold) and _BEYOND.search(gold + answer))
            return (
                Comparison("review", "not_evaluated", str(error))
                if beyond and _formula(answer)
                else _compare_bare(gold, answer)
            )
        except NotEvaluated as error:
            return Comparison("review", error.reason, str(error))
        if not same and _FUNCTION.search(answer):
            return Comparison("review", "not_evaluated", f"{answer[:80]!r} may be a function's value")
        if not same:
            return _compare_bare(gold, answer)
    return Comparison("review", "may_be_equal", "the same at three points")


class _Letters:
    """Values for letters at one point: from 2 to 98, no two the same, and without a pattern that a formula has."""

    def __init__(self, point: str) -> None:
        self._point = point
        self._values: dict[str, int] = {}

    def value(self, name: str) -> Fraction:
        if name not in self._values:
            value = 2 + int(hashlib.sha256(f"{self._point}{name}".encode()).hexdigest(), 16) % 97
            while value in self._values.values():
                value += 1
            self._values[name] = value
        return Fraction(self._values[name])


def _compare_bare(gold: str, answer: str) -> Comparison:
    """Words or commands stand beside a number: where the numbers are equal, a person must say what these mean."""
    try:
        right, given = (_evaluated(ungrouped(bare) if grouped(bare) else bare) for bare in map(_bare, (gold, answer)))
        same = same_number(right, given)
    except NotEvaluated:
        several = _MANY.search(gold) and _MANY.search(answer)
        return Comparison("review", "not_evaluated", "both are several") if several else DIFFERENT
    return Comparison("review", "text_beside", "the same number, and more beside it") if same else DIFFERENT


_RATIO = re.compile(r"(?<=[0-9]):(?=[0-9])")
_APOSTROPHE = re.compile(r"(?<=[0-9])'(?=[0-9]{3}(?![0-9]))")


def _bare(text: str) -> str:
    text = _RATIO.sub("/", _APOSTROPHE.sub("", text.replace("{}", "").replace("{,}", ".")))
    return clean(_BESIDE.sub(" ", text).strip(" ."))


def _formula(text: str) -> bool:
    """Whether it holds a digit, a command or a letter alone, as formulas do and words do not."""
    return re.search(r"[0-9\\]|(?<![A-Za-z])[A-Za-z](?![A-Za-z])", text) is not None
