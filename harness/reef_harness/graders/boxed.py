"""``boxed``: the last balanced ``\\boxed{}``, compared as text or as a number."""

import re

from reef_harness.graders.base import BadGold, Grader, Verdict
from reef_harness.graders.comparison import Comparison
from reef_harness.graders.equivalence import canonical, compare

_MARK = re.compile(r"\\boxed[ \t\r\n]{0,8}\{|\\.|[{}]", re.DOTALL)


def last_box(text: str) -> str | None:
    """What stands in the last ``\\boxed{}`` whose braces balance; None where there is none. Linear in the text.

    Of a box within a box it is the outer one. Escaped braces, ``\\{`` and ``\\}``, do not count.
    """
    found = _closed(text)
    return text[slice(*found[-1])] if found else None


def boxes(text: str, at_most: int) -> list[str | None]:
    """What stands in every ``\\boxed{}`` whose braces balance; None for more than ``at_most`` characters.

    Also of those within another box. Linear in the text.
    """
    return [text[start:end] if end - start <= at_most else None for start, end in _closed(text)]


def _closed(text: str) -> list[tuple[int, int]]:
    opened: list[int | None] = []  # where a box's content starts; None for another brace
    found: list[tuple[int, int]] = []
    for mark in _MARK.finditer(text):
        if mark[0].startswith("\\boxed"):
            opened.append(mark.end())
        elif mark[0] == "{":
            opened.append(None)
        elif mark[0] == "}" and opened and (start := opened.pop()) is not None:
            found.append((start, mark.start()))
    return found


class BoxedGrader(Grader):
    """Wants the answer in ``\\boxed{}``; the last one that is closed counts, whatever stands around it.

    Right: the same text as gold but for white space and looks, or the same number (:mod:`.equivalence`). What may be
    right and cannot be computed is for a person: ``review``, without a score.
    """

    id = "boxed"
    version = "3"

    def grade(self, text: str, gold: str, finish_reason: str) -> Verdict:
        """Judge one answer. Raises BadGold for a gold that is empty or divides by zero."""
        if not gold.strip():
            raise BadGold("the gold answer is empty")
        if finish_reason != "stop":
            return self.malformed("unfinished")
        box = last_box(text)
        if box is None:
            return self.malformed("no_box")
        return verdict_of(self, compare(gold, box), box)

    def read(self, text: str) -> str | None:
        """What is in the box: a number's value, or the text."""
        box = last_box(text)
        return None if box is None else canonical(box)


def verdict_of(grader: Grader, found: Comparison, answer: str) -> Verdict:
    """A comparison as a verdict."""
    detail = f"read {answer[:200]!r}" + (f": {found.detail}" if found.detail else "")
    match found.result:
        case "review":
            return grader.review(found.reason_code, detail)
        case "different" if found.reason_code in ("empty", "strange_characters"):
            return grader.malformed(found.reason_code, detail)
        case result:
            return grader.decided(result == "equal", found.reason_code, detail)
