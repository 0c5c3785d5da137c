"""Graders: text in, a verdict out. They look at characters only; nothing a model writes is ever evaluated."""

import re
from dataclasses import dataclass
from typing import Literal, Protocol

Outcome = Literal["correct", "incorrect", "review", "error"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A grade. A client posts ``score`` with ``outcome`` and ``reason_code``; a verdict without a score trains nothing.

    ``format_valid`` says whether the answer could be read at all, right or wrong.
    """

    outcome: Outcome
    score: float | None
    reason_code: str
    format_valid: bool
    grader: str
    version: str

    @property
    def correct(self) -> bool:
        """Whether the answer is right."""
        return self.outcome == "correct"


class Grader(Protocol):
    """What the drivers and the evaluation need of a grader."""

    @property
    def id(self) -> str:
        """The grader's name, as reports carry it."""
        ...

    @property
    def version(self) -> str:
        """Changes whenever the grader could judge the same answer differently."""
        ...

    def grade(self, text: str, gold: str, finish_reason: str) -> Verdict:
        """Judge one answer. ``finish_reason`` is the service's: "stop" when the model ended its turn itself."""
        ...


class FinalGrader:
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
            return self._malformed("unfinished")
        opened, closed = text.count("<final>"), text.count("</final>")
        if opened == 0 or closed == 0:
            return self._malformed("no_final")
        if opened > 1 or closed > 1:
            return self._malformed("several_finals")
        body = text.rstrip(" \t\r\n")
        if not body.endswith("</final>"):
            return self._malformed("text_after_final")
        value = body[body.index("<final>") :].removeprefix("<final>").removesuffix("</final>")
        if not self._integer.fullmatch(value):
            return self._malformed("not_an_integer")
        right = value == gold
        return Verdict(
            "correct" if right else "incorrect",
            float(right),
            "equal" if right else "wrong_value",
            True,
            self.id,
            self.version,
        )

    def _malformed(self, reason_code: str) -> Verdict:
        return Verdict("incorrect", 0.0, reason_code, False, self.id, self.version)
