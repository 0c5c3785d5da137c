"""``choice``: one letter out of several."""

import re

from reef_harness.graders.base import Grader, Verdict

_FINAL = re.compile(r"<final>([^<]*)</final>")
_BOXED = re.compile(r"\\boxed\{((?:\\(?:text|mathrm|textbf|mathbf)\{[^{}]*\})|[^{}]*)\}")
_SAID = re.compile(
    r"\b[Aa]nswer(?:[ \t]{1,4}is|[ \t]{0,4}:)[ \t]{0,4}:?(?:\*\*)?[ \t]{0,4}(?:\*\*)?(\(?[A-Z]\)?)(?![A-Za-z0-9'])"
)
_LETTER = re.compile(r"(?:\\(?:text|mathrm|textbf|mathbf)\{)?\(?([A-Z])\)?\.?\}?")


class ChoiceGrader(Grader):
    """Wants one capital letter out of ``options``, equal to gold's.

    Read are ``<final>B</final>``, ``\\boxed{B}`` (also ``\\boxed{\\text{B}}``), "Answer: B" or "answer is (B)", and an
    answer that is nothing but "B", "(B)" or "B.". All that are there must name the same letter: an answer that says
    two is wrong, whichever comes last. Look-alikes of other alphabets are no letters.
    """

    id = "choice"

    def __init__(self, options: str = "ABCDE") -> None:
        if not re.fullmatch(r"[A-Z]{2,26}", options) or len(set(options)) != len(options):
            raise ValueError(f"options must be 2 to 26 different capital letters, got {options!r}")
        self.options = options
        self.version = "1" if options == "ABCDE" else f"1-{options}"

    def grade(self, text: str, gold: str, finish_reason: str) -> Verdict:
        """Judge one answer. Raises ValueError for a gold that is none of the letters."""
        if len(gold) != 1 or gold not in self.options:
            raise ValueError(f"the gold answer must be one of the letters {self.options}, got {gold!r}")
        if finish_reason != "stop":
            return self.malformed("unfinished")
        said = self._said(text)
        if not said:
            return self.malformed("no_choice")
        letters = {letter for letter in said if letter is not None and letter in self.options}
        if len(letters) > 1:
            return self.malformed("several_choices", f"read {' and '.join(sorted(letters))}")
        if not letters or len(letters) < len(set(said)):
            return self.malformed("not_a_choice")
        right = letters == {gold}
        return self.decided(right, "equal" if right else "wrong_choice", f"read {letters.pop()}")

    def read(self, text: str) -> str | None:
        """The one letter that the answer names."""
        said = set(self._said(text))
        letter = said.pop() if len(said) == 1 else None
        return letter if letter is not None and letter in self.options else None

    def _said(self, text: str) -> list[str | None]:
        """The letter of every place that should name one; None for a place that holds something else."""
        places = [found[1] for pattern in (_FINAL, _BOXED, _SAID) for found in pattern.finditer(text)]
        if not places and len(text) <= 100 and _LETTER.fullmatch(text.strip()):
            places = [text]
        return [found[1] if (found := _LETTER.fullmatch(place.strip())) else None for place in places]
