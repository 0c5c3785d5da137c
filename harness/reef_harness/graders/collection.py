"""Lists, sets, tuples and intervals: their elements, and whether two of them have the same."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from reef_harness.graders.comparison import DIFFERENT, SAME_TEXT, SAME_VALUE, Comparison
from reef_harness.graders.notation import THOUSANDS, clean, ungrouped

_MAX_ELEMENTS = 40
_PIECE = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_OPENING = frozenset({"(", "[", "{", "\\{"})
_CLOSING = frozenset({")", "]", "}", "\\}"})

Compare = Callable[[str, str], Comparison]  # an element of gold with one of the answer


@dataclass(frozen=True, slots=True)
class Collection:
    """Elements between delimiters; a list by its commas alone has none."""

    opening: str
    closing: str
    elements: tuple[str, ...]

    @property
    def unordered(self) -> bool:
        """Whether it is a set."""
        return self.opening == "\\{"


def read_collection(text: str) -> Collection | None:
    """Its elements where it has commas between them, or is a set; None for a single thing."""
    pieces = _PIECE.findall(text)
    if pieces[0] in _OPENING and pieces[-1] in _CLOSING and _closes_at(pieces) == len(pieces) - 1:
        elements = _split(pieces[1:-1])
        if len(elements) > 1 or pieces[0] == "\\{":
            return Collection(pieces[0], pieces[-1], elements)
        return None
    elements = _split(pieces)
    return Collection("", "", elements) if len(elements) > 1 else None


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


def compare_collections(gold: Collection, answer: Collection, compare: Compare) -> Comparison:
    """Compare two; ``compare`` is for their elements."""
    if max(len(gold.elements), len(answer.elements)) > _MAX_ELEMENTS:
        return Comparison("review", "too_large", f"more than {_MAX_ELEMENTS} elements")
    if gold.unordered and answer.unordered:
        return _compare_sets(gold, answer, compare)
    if len(gold.elements) != len(answer.elements):
        return _compare_lengths(gold, answer, compare)
    if (gold.opening, gold.closing) != (answer.opening, answer.closing):
        if (
            gold.opening and answer.opening and "{" not in (gold.opening, answer.opening)
        ):  # an open interval is no closed one, a pair is no set
            return DIFFERENT
        found = _matched(gold, answer, compare)
        return found if found is DIFFERENT else Comparison("review", "delimiters_differ")
    pairs = zip(gold.elements, answer.elements, strict=True)
    found = _together([compare(right, given) for right, given in pairs])
    if found.result == "different" and not gold.opening and _matched(gold, answer, compare).result != "different":
        return Comparison("review", "order_differs")
    return found


def _compare_lengths(gold: Collection, answer: Collection, compare: Compare) -> Comparison:
    """Of other lengths: the same where the commas within one element separate thousands, ``1,000, 2,000``."""
    texts = [",".join(side.elements) for side in (gold, answer)]
    joined = [THOUSANDS.sub(lambda found: ungrouped(found[0]), text) for text in texts]
    for right, given in ((texts[0], joined[1]), (joined[0], texts[1]), (joined[0], joined[1])):
        sides = [_split(_PIECE.findall(side)) for side in (right, given)]
        if len(sides[0]) == len(sides[1]) and (right, given) != (texts[0], texts[1]):
            found = [compare(*pair) for pair in zip(*sides, strict=True)]
            if _together(found).result != "different":
                return Comparison("review", "ambiguous", "commas between elements, or between thousands")
    return DIFFERENT


def _compare_sets(gold: Collection, answer: Collection, compare: Compare) -> Comparison:
    """In any order. Strictly {1,1,2} is {1,2}, but who repeats an element may mean something else."""
    if len(gold.elements) == len(answer.elements):
        found = _matched(gold, answer, compare)
        if found.result != "different":
            return found
    table = [[compare(right, given).result != "different" for given in answer.elements] for right in gold.elements]
    if all(map(any, table)) and all(map(any, zip(*table, strict=True))):
        return Comparison("review", "repeated_elements")
    return DIFFERENT


def _matched(gold: Collection, answer: Collection, compare: Compare) -> Comparison:
    """Every element of gold with an element of the answer, in any order."""
    left = list(answer.elements)
    found = []
    for right in gold.elements:
        results = [compare(right, given) for given in left]
        best = min(range(len(left)), key=lambda i: ("equal", "review", "different").index(results[i].result))
        found.append(results[best])
        left.pop(best)
    return _together(found)


def _together(found: list[Comparison]) -> Comparison:
    for result in ("different", "review"):
        if some := [one for one in found if one.result == result]:
            return DIFFERENT if result == "different" else some[0]
    return SAME_VALUE if SAME_VALUE in found else SAME_TEXT
