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
_LIST = re.compile(r"(?:[\s,;:./|&+()]|(?i:or|and)\b|[A-Z](?![A-Za-z0-9']))+")
_END = " \t\r\n.:)"


@dataclass(frozen=True, slots=True)
class _Place:
    """The letters that a place names; none where it holds something else. ``prose``: words stand beside them.

    ``first`` is the letter that it begins with, "" where that is a word.
    """

    letters: frozenset[str] = frozenset()
    prose: bool = False
    first: str = ""

    def says(self, letter: str) -> bool:
        """Whether it says this one, and not perhaps another: "B, since A is false" says B."""
        return len(self.letters) == 1 or self.first == letter


class ChoiceGrader(Grader):
    """Wants one capital letter out of ``options``, equal to gold's.

    Read are ``<final>B</final>``, ``\\boxed{B}`` (also ``\\boxed{\\text{B}}``), "Answer: B" or "answer is (B)" up to
    the end of the line, and an answer that is nothing but "B", "(B)" or "B.". All that are there must name the same
    letter, and nothing else: an answer that says two is wrong, whichever comes last, and so is one with a place that
    holds no letter. Where words stand beside letters ("Answer: B, since A is false", "Answer: Not A, so B"), and no
    other place says clearly which of them, a person must look. Look-alikes of other alphabets are no letters.
    """

    id = "choice"

    def __init__(self, options: str = "ABCDE") -> None:
        if not re.fullmatch(r"[A-Z]{2,26}", options) or len(set(options)) != len(options):
            raise ValueError(f"options must be 2 to 26 different capital letters, got {options!r}")
        self.options = options
        self.version = "3" if options == "ABCDE" else f"3-{options}"

    def grade(self, text: str, gold: str, finish_reason: str) -> Verdict:
        """Judge one answer. Raises BadGold for a gold that is none of the letters."""
        if len(gold) != 1 or gold not in self.options:
            raise BadGold(f"the gold answer must be one of the letters {self.options}, got {gold!r}")
        if finish_reason != "stop":
            return self.malformed("unfinished")
        places = self._places(text)
        if not places:
            return self.malformed("no_choice")
        named = [place.letters for place in places if place.letters]
        letters = frozenset[str]().union(*named)
        agreed = letters.intersection(*named)
        if (letters and not agreed) or any(len(place.letters) > 1 and not place.prose for place in places):
            return self.malformed("several_choices", f"read {' and '.join(sorted(letters))}")
        if len(named) < len(places) or not agreed <= set(self.options):
            return self.malformed("not_a_choice")
        letter = min(agreed)  # one, unless all are prose
        if all(place.prose for place in places) or not all(place.says(letter) for place in places):
            reason = "text_beside" if len(letters) == 1 else "several_in_prose"
            return self.review(reason, f"read {' and '.join(sorted(letters))}, and words beside")
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
        if places:  # a second letter below "Answer: A"
            return places + [
                _Place(frozenset(line[1])) for line in _BARE_LINE.finditer(text) if line[1] in self.options
            ]
        if len(text) <= 100 and "\n" not in text.strip():
            places = [self._place(text)]
        return [place for place in places or self._said(text, prose=True) if place.letters]

    def _said(self, text: str, *, prose: bool = False) -> list[_Place]:
        """What stands behind each "answer:" and "answer is", to the next one or the end of the line.

        With ``prose`` also where no letter is named at once: "the answer is not A but B".
        """
        places, line = [], 0
        marks = list(_MARK.finditer(text))
        for mark, following in zip(marks, [*marks[1:], None], strict=False):
            colon, start = mark[1] or mark[2], mark.end()
            if start > line:  # else they are on one line
                line = text.find("\n", start)
                line = len(text) if line < 0 else line
            end = min(line, following.start()) if following else line
            # "the answer is not easy" is prose; behind a colon something is named
            begins = _plain(text[start : min(start + 40, end)])
            if not begins or not (prose or colon or _LETTER.match(begins) or not begins[0].isascii()):
                continue
            place = self._place(text[start:end])
            if place.letters or end == line:  # not "Answer: the answer is B"
                places.append(place)
        return places

    def _place(self, content: str) -> _Place:
        plain = _plain(content)
        first = _LETTER.match(plain)
        behind = plain[first.end() :] if first else ""
        if first and not behind.strip(_END):
            return _Place(frozenset(first[1]))
        if behind and not behind[0].isascii() and unicodedata.category(behind[0])[0] not in "PSZ":
            return _Place()  # an accent on the letter, or a word of another alphabet that begins with it
        named = frozenset(_ALONE.findall(plain))
        if len(named) > 1 and _LIST.fullmatch(plain):
            return _Place(named)
        return _Place(named & set(self.options), prose=True, first=first[1] if first else "")


def _plain(text: str) -> str:
    return _LOOKS.sub("", text).strip()
