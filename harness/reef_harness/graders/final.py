"""``final``: one field at the end of the answer, compared as text."""

import re
from typing import Literal

from reef_harness.graders.base import BadGold, Grader, Verdict
from reef_harness.graders.boxed import verdict_of
from reef_harness.graders.equivalence import canonical, compare
from reef_harness.graders.places import only_final

Comparing = Literal["integer", "text", "latex"]


class FinalGrader(Grader):
    """Wants exactly one ``<final>INT</final>``, at the very end of the text, equal to the gold integer.

    INT is ASCII digits with an optional minus sign: no plus sign, leading zeros, "-0", spaces, separators or look-alike
    digits. Whitespace after the field is allowed, anything else is not. Numbers are compared as text, so that an
    answer of a million digits costs nothing.

    With ``comparing="text"`` the field may hold any text, compared exactly but for white space around it; with
    ``"latex"`` it is compared as ``boxed`` compares what is in a box.
    """

    id = "final"

    _integer = re.compile(r"-?[1-9][0-9]*|0")

    def __init__(self, comparing: Comparing = "integer") -> None:
        if comparing not in ("integer", "text", "latex"):
            raise ValueError(f"comparing must be integer, text or latex, got {comparing!r}")
        self.comparing = comparing
        self.version = {"integer": "1", "text": "1-text", "latex": "3-latex"}[comparing]

    def grade(self, text: str, gold: str, finish_reason: str) -> Verdict:
        """Judge one answer; but for "latex" every verdict is correct (score 1) or incorrect (score 0).

        Raises BadGold for a gold that no answer could ever equal: here an integer is wanted, or at least some text.
        """
        self._check(gold)
        if finish_reason != "stop":
            return self.malformed("unfinished")
        field = only_final(text)
        if field.content is None:
            return self.malformed(field.fault or "no_final")
        match self.comparing:
            case "latex":
                return verdict_of(self, compare(gold, field.content), field.content)
            case "text":
                right = field.content.strip() == gold.strip()
            case "integer":
                if not self._integer.fullmatch(field.content):
                    return self.malformed("not_an_integer")
                right = field.content == gold
        return self.decided(right, "equal" if right else "wrong_value")

    def read(self, text: str) -> str | None:
        """What the one field at the end of the text holds, where it is in the form that is compared."""
        content = only_final(text).content
        if content is None:
            return None
        match self.comparing:
            case "latex":
                return canonical(content)
            case "text":
                return content.strip() or None
            case "integer":
                return content if self._integer.fullmatch(content) else None

    def _check(self, gold: str) -> None:
        if self.comparing == "integer" and not self._integer.fullmatch(gold):
            raise BadGold(f"the gold answer must be an integer without leading zeros, got {gold!r}")
        if not gold.strip():
            raise BadGold("the gold answer is empty")
