"""``choice``: one letter out of several."""

import re
import unicodedata
from dataclasses import dataclass

from reef_harness.graders.base import BadGold, Grader, Verdict
from reef_harness.graders.boxed import boxes

_FINAL = re.compile(r"<final>([^<]*)</final>")
_MARK = re.compile(r"\banswers?(?:[ \t*_]{1,4}is\b[ \t*_]{0,4}([:\uff1a]?)|[ \t*_]{0,4}([:=\uff1a]))", re.IGNORECASE)
_LOOKS = re.compile(r"\\(?:boxed|text|textrm|textbf|textit|mathrm|mathbf|mathit|emph)[ \t]{0,4}\{|</?final>|[}$*_]")
_LETTER = re.compile(r"\(?([A-Z])(?![A-Za-z0-9'])\)?")
_ALONE = re.compile(r"(?<![A-Za-z0-9])([A-Z])(?![A-Za-z0-9'])")
_BARE_LINE = re.compile(r"^[ \t]{0,8}\(?([A-Z])\)?\.?[ \t]{0,8}\r?$", re.MULTILINE)
_END = " \t\r\n.:)"


@dataclass(frozen=True, slots=True)
class _Place:
    """The letters that a place names; none where it holds something else. ``clean``: one letter and nothing else."""

    letters: frozenset[str] = frozenset()
    clean: bool = False


class ChoiceGrader(Grader):
    """Wants one capital letter out of ``options``, equal to gold's.

    Read are ``<final>B</final>``, ``\\boxed{B}`` (also ``\\boxed{\\text{B}}``), "Answer: B" or "answer is (B)" up to
    the end of the line, and an answer that is nothing but "B", "(B)" or "B.". All that are there must name the same
    letter, and nothing else: an answer that says two is wrong, whichever comes last, and so is one with a place that
    holds no letter. Where only words follow the one letter ("Answer: B, since ...") a person must look. Look-alikes of
    other alphabets are no letters.
    """

    id = "choice"

    def __init__(self, options: str = "ABCDE") -> None:
        if not re.fullmatch(r"[A-Z]{2,26}", options) or len(set(options)) != len(options):
            raise ValueError(f"options must be 2 to 26 different capital letters, got {options!r}")
        self.options = options
        self.version = "2" if options == "ABCDE" else f"2-{options}"

    def grade(self, text: str, gold: str, finish_reason: str) -> Verdict:
        """Judge one answer. Raises BadGold for a gold that is none of the letters."""
        if len(gold) != 1 or gold not in self.options:
            raise BadGold(f"the gold answer must be one of the letters {self.options}, got {gold!r}")
        if finish_reason != "stop":
            return self.malformed("unfinished")
        places = self._places(text)
        if not places:
            return self.malformed("no_choice")
        letters = frozenset[str]().union(*(place.letters for place in places))
        if len(letters) > 1:
            return self.malformed("several_choices", f"read {' and '.join(sorted(letters))}")
        if not all(place.letters for place in places) or not letters <= set(self.options):
            return self.malformed("not_a_choice")
        letter = min(letters)
        if not any(place.clean for place in places):
            return self.review("text_after_choice", f"read {letter}, and more behind it")
        right = letter == gold
        return self.decided(right, "equal" if right else "wrong_choice", f"read {letter}")

    def read(self, text: str) -> str | None:
        """The one letter that the answer names, where it would be judged by it."""
        verdict = self.grade(text, self.options[0], "stop")
        return verdict.detail.removeprefix("read ") if verdict.format_valid and verdict.graded else None

    def _places(self, text: str) -> list[_Place]:
        """Every place that should name one letter."""
        found, closed = _FINAL.findall(text), boxes(text, at_most=200)
        places = [_Place() if content is None else self._place(content) for content in (*found, *closed)]
        if max(text.count("<final>"), text.count("</final>")) > len(found) or text.count("\\boxed") > len(closed):
            places.append(_Place())  # one that is not closed, or holds another tag
        places += self._said(text)
        if not places and len(text) <= 100 and "\n" not in text.strip():
            places = [place for place in [self._place(text)] if place.clean]
        elif places:  # a second letter below "Answer: A"
            places += [
                _Place(frozenset(line[1]), True) for line in _BARE_LINE.finditer(text) if line[1] in self.options
            ]
        return places

    def _said(self, text: str) -> list[_Place]:
        """What stands behind "answer:" and "answer is", to the end of its line."""
        places, end = [], 0
        for mark in _MARK.finditer(text):
            if mark.start() < end:
                continue  # within the line that was read
            colon, start = mark[1] or mark[2], mark.end()
            # "the answer is not easy" is prose; behind a colon something is named
            begins = _plain(text[start : start + 40].split("\n", 1)[0])
            if not begins or not (colon or _LETTER.match(begins) or not begins[0].isascii()):
                continue
            end = text.find("\n", start)
            end = len(text) if end < 0 else end
            places.append(self._place(text[start:end]))
        return places

    def _place(self, content: str) -> _Place:
        plain = _plain(content)
        first = _LETTER.match(plain)
        if not first:
            return _Place()
        behind = plain[first.end() :]
        if not behind.strip(_END):
            return _Place(frozenset(first[1]), True)
        if not behind[0].isascii() and unicodedata.category(behind[0])[0] not in "PSZ":
            return _Place()  # an accent on the letter, or a word of another alphabet that begins with it
        others = {letter for letter in _ALONE.findall(behind) if letter in self.options}
        return _Place(frozenset(first[1]) | others)


def _plain(text: str) -> str:
    return _LOOKS.sub("", text).strip()
