"""``final``: one field at the end of the answer, compared as text."""

import re

from reef_harness.graders.base import Grader, Verdict


class FinalGrader(Grader):
    """Wants exactly one ``<final>INT</final>``, at the very end of the text, equal to the gold integer.

    INT is ASCII digits with an optional minus sign: no plus sign, leading zeros, "-0", spaces, separators or look-alike
    digits. Whitespace after the field is allowed, anything else is not. Numbers are compared as text, so that an
    answer of a million digits costs nothing.
    """

    id = "final"
    version = "1"

    _integer = re.compile(r"-?[1-9][0-9]*|0")

    def grade(self, text: str, gold: str, finish_reason: str) -> Verdict:
        """Judge one answer; every verdict is correct (score 1) or incorrect (score 0).

        Raises ValueError for a gold that is not such an integer itself: no answer could ever equal it.
        """
        if not self._integer.fullmatch(gold):
            raise ValueError(f"the gold answer must be an integer without leading zeros, got {gold!r}")
        if finish_reason != "stop":
            return self.malformed("unfinished")
        opened, closed = text.count("<final>"), text.count("</final>")
        if opened == 0 or closed == 0:
            return self.malformed("no_final")
        if opened > 1 or closed > 1:
            return self.malformed("several_finals")
        body = text.rstrip(" \t\r\n")
        if not body.endswith("</final>"):
            return self.malformed("text_after_final")
        value = body[body.index("<final>") :].removeprefix("<final>").removesuffix("</final>")
        if not self._integer.fullmatch(value):
            return self.malformed("not_an_integer")
        right = value == gold
        return self.decided(right, "equal" if right else "wrong_value")
