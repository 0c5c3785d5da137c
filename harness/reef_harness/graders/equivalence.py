"""Whether two answers are the same, strictly: the same text, or the same number. A doubt is never a yes."""

import hashlib
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from reef_harness.graders.base import BadGold
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
from reef_harness.graders.notation import clean, grouped, spelled, ungrouped

TOLERANCE = Fraction(1, 10**6)  # relative, where one of the two is written with a decimal point
_CLOSED_FORM = Fraction(1, 10**50)  # relative, between two closed forms computed to 100 digits
_MAX_ELEMENTS = 40
_MAX_TEXT = 100_000  # characters; longer answers are compared as they are

Result = Literal["equal", "different", "review"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result and its reason code; ``detail`` is for people."""

    result: Result
    reason_code: str
    detail: str = ""


_SAME_TEXT = Comparison("equal", "same_text")
_SAME_VALUE = Comparison("equal", "same_value")
_DIFFERENT = Comparison("different", "different")


def compare(gold: str, answer: str) -> Comparison:
    """Compare an answer with gold, both LaTeX or plain text. Raises BadGold for a gold without content or value."""
    if not (right := clean(gold)):
        raise BadGold(f"the gold answer is empty: {gold!r}")
    if len(answer) > _MAX_TEXT:
        same = answer.strip() == gold.strip()
        return _SAME_TEXT if same else Comparison("review", "too_long", f"{len(answer)} characters")
    given = clean(answer)
    if given == right and not _listed(gold, right, answer, given):
        return _SAME_TEXT
    if not given:
        return Comparison("different", "empty")
    if right.isascii() and not given.isascii():
        return Comparison("different", "strange_characters", _strange(given))
    if max(len(given), len(right)) > MAX_LENGTH:
        return Comparison("review", "too_long", f"{len(given)} characters, gold has {len(right)}")
    found = _compare(right, given, 0)
    if found.result == "equal" and _listed(gold, right, answer, given):
        return Comparison("review", "ambiguous", "one number, or a list")
    if found == _DIFFERENT and (_QUAD.search(gold) is None) != (_QUAD.search(answer) is None):
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
    if text != "," and depth < MAX_NESTING and (found := _collection(text)):  # "," stands for an empty element
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
_THOUSANDS = re.compile(r"(?<![0-9])[1-9][0-9]{0,2}(?:[, ][0-9]{3})+(?![0-9])")


def _listed(gold: str, right: str, answer: str, given: str) -> bool:
    """Whether one may be a list, by its blanks, that is read as one number; ``right`` and ``given`` are clean."""
    apart = [_APART.search(side) is not None for side in (gold, answer)]
    if apart[0] == apart[1] or not (_THOUSANDS.search(right) or _THOUSANDS.search(given)):
        return False
    lists = _collection(right) is not None and _collection(given) is not None
    return not lists or _one_number(right) != right or "quad" in gold + answer


def _words(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z]+[A-Za-z .']+", text) is not None


def _strange(text: str) -> str:
    found = next(character for character in text if not character.isascii())
    return f"U+{ord(found):04X}"


# ---- lists, sets, tuples, intervals


@dataclass(frozen=True, slots=True)
class _Collection:
    opening: str
    closing: str
    elements: tuple[str, ...]

    @property
    def unordered(self) -> bool:
        return self.opening == "\\{"


@lru_cache(maxsize=2048)  # sets within sets are compared more than once: without it, twice as long at each level
def _compare(gold: str, answer: str, depth: int) -> Comparison:
    if depth > MAX_NESTING:
        return Comparison("review", "too_large", "nested too deep")
    if gold == answer:
        return _SAME_TEXT
    right, given = _collection(gold), _collection(answer)
    if right is None and given is None:
        return _compare_single(gold, answer)
    if right is None or given is None:
        return _compare_grouped(gold, answer, answer if given is None else gold, depth)
    found = _compare_collections(right, given, depth)
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
        found = _collection(listed)
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


def _compare_collections(gold: _Collection, answer: _Collection, depth: int) -> Comparison:
    if max(len(gold.elements), len(answer.elements)) > _MAX_ELEMENTS:
        return Comparison("review", "too_large", f"more than {_MAX_ELEMENTS} elements")
    if gold.unordered and answer.unordered:
        return _compare_sets(gold, answer, depth)
    if len(gold.elements) != len(answer.elements):
        return _compare_lengths(gold, answer, depth)
    if (gold.opening, gold.closing) != (answer.opening, answer.closing):
        if (
            gold.opening and answer.opening and "{" not in (gold.opening, answer.opening)
        ):  # an open interval is no closed one, a pair is no set
            return _DIFFERENT
        found = _matched(gold, answer, depth)
        return found if found is _DIFFERENT else Comparison("review", "delimiters_differ")
    pairs = zip(gold.elements, answer.elements, strict=True)
    found = _together([_compare(right, given, depth + 1) for right, given in pairs])
    if found.result == "different" and not gold.opening and _matched(gold, answer, depth).result != "different":
        return Comparison("review", "order_differs")
    return found


def _compare_lengths(gold: _Collection, answer: _Collection, depth: int) -> Comparison:
    """Of other lengths: the same where the commas within one element separate thousands, ``1,000, 2,000``."""
    texts = [",".join(side.elements) for side in (gold, answer)]
    joined = [_THOUSANDS.sub(lambda found: ungrouped(found[0]), text) for text in texts]
    for right, given in ((texts[0], joined[1]), (joined[0], texts[1]), (joined[0], joined[1])):
        sides = [_split(_PIECE.findall(side)) for side in (right, given)]
        if len(sides[0]) == len(sides[1]) and (right, given) != (texts[0], texts[1]):
            found = [_compare(*pair, depth + 1) for pair in zip(*sides, strict=True)]
            if _together(found).result != "different":
                return Comparison("review", "ambiguous", "commas between elements, or between thousands")
    return _DIFFERENT


def _compare_sets(gold: _Collection, answer: _Collection, depth: int) -> Comparison:
    """In any order. Strictly {1,1,2} is {1,2}, but who repeats an element may mean something else."""
    if len(gold.elements) == len(answer.elements):
        found = _matched(gold, answer, depth)
        if found.result != "different":
            return found
    table = [
        [_compare(right, given, depth + 1).result != "different" for given in answer.elements]
        for right in gold.elements
    ]
    if all(map(any, table)) and all(map(any, zip(*table, strict=True))):
        return Comparison("review", "repeated_elements")
    return _DIFFERENT


def _matched(gold: _Collection, answer: _Collection, depth: int) -> Comparison:
    """Every element of gold with an element of the answer, in any order."""
    left = list(answer.elements)
    found = []
    for right in gold.elements:
        results = [_compare(right, given, depth + 1) for given in left]
        best = min(range(len(left)), key=lambda i: ("equal", "review", "different").index(results[i].result))
        found.append(results[best])
        left.pop(best)
    return _together(found)


def _together(found: list[Comparison]) -> Comparison:
    for result in ("different", "review"):
        if some := [one for one in found if one.result == result]:
            return _DIFFERENT if result == "different" else some[0]
    return _SAME_VALUE if _SAME_VALUE in found else _SAME_TEXT


_PIECE = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_OPENING = frozenset({"(", "[", "{", "\\{"})
_CLOSING = frozenset({")", "]", "}", "\\}"})


def _collection(text: str) -> _Collection | None:
    """Its elements where it has commas between them, or is a set; None for a single thing."""
    pieces = _PIECE.findall(text)
    if pieces[0] in _OPENING and pieces[-1] in _CLOSING and _closes_at(pieces) == len(pieces) - 1:
        elements = _split(pieces[1:-1])
        if len(elements) > 1 or pieces[0] == "\\{":
            return _Collection(pieces[0], pieces[-1], elements)
        return None
    elements = _split(pieces)
    return _Collection("", "", elements) if len(elements) > 1 else None


def _closes_at(pieces: list[str]) -> int:
    depth = 0
    for position, piece in enumerate(pieces):
        depth += (piece in _OPENING) - (piece in _CLOSING)
        if depth == 0:
            return position
    return -1


def _split(pieces: list[str]) -> tuple[str, ...]:
    elements, depth = [""], 0
    for piece in pieces:
        depth += (piece in _OPENING) - (piece in _CLOSING)
        if piece == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += piece
    return tuple(clean(element) or "," for element in elements)  # an empty element equals no other text


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
        return _SAME_VALUE
    if _words(answer) and answer.casefold() == gold.casefold():
        return Comparison("review", "case_differs")
    (right, right_unit), (given, given_unit) = _unit(gold), _unit(answer)
    if right_unit != given_unit and right and given:
        return Comparison(
            "review", "unit_differs", f"gold {right_unit or 'has none'}, answer {given_unit or 'has none'}"
        )
    if right_unit and right == given:
        return _SAME_TEXT
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
        return _SAME_VALUE if (both[0][1] == "-") == (both[1][1] == "-") else _DIFFERENT
    try:
        evaluate(answer if both[0] else gold)
    except NotEvaluated as error:
        return _DIFFERENT if not error.maybe and not _BEYOND.search(answer) else Comparison("review", "not_evaluated")
    return _DIFFERENT


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
        return _SAME_VALUE if same_number(right, _evaluated(answer)) else _DIFFERENT
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
        return Comparison("review", "not_evaluated", "both are several") if several else _DIFFERENT
    return Comparison("review", "text_beside", "the same number, and more beside it") if same else _DIFFERENT


_RATIO = re.compile(r"(?<=[0-9]):(?=[0-9])")
_APOSTROPHE = re.compile(r"(?<=[0-9])'(?=[0-9]{3}(?![0-9]))")


def _bare(text: str) -> str:
    text = _RATIO.sub("/", _APOSTROPHE.sub("", text.replace("{}", "").replace("{,}", ".")))
    return clean(_BESIDE.sub(" ", text).strip(" ."))


def _formula(text: str) -> bool:
    """Whether it holds a digit, a command or a letter alone, as formulas do and words do not."""
    return re.search(r"[0-9\\]|(?<![A-Za-z])[A-Za-z](?![A-Za-z])", text) is not None
