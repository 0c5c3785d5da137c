"""Whether held-out prompts are among those trained on: by hashes, in memory linear in the held-out set."""

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappush, heappushpop
from pathlib import Path

from reef_harness.evaluation.table import counted, short, table

WORDS = 13  # of an n-gram
CHARACTERS = 24  # of an n-gram of a prompt of fewer words
COMMON = 64  # held-out prompts: an n-gram that more of them have is boilerplate, and names no pair
PAIRS = 10  # that are kept of each kind for a held-out prompt; the others are counted
SHOWN = 20  # pairs in the text; a file may have all

Named = tuple[str, str]  # a prompt's name, its text


@dataclass(frozen=True, slots=True)
class Overlap:
    """What of the training side one held-out prompt is like.

    ``exact`` holds the first names of equal prompts, of ``num_exact``; ``near`` the closest (share of the held-out
    prompt's n-grams that the training prompt has too, name), of ``num_near``, falling.
    """

    held_out: str
    exact: tuple[str, ...]
    num_exact: int
    near: tuple[tuple[float, str], ...]
    num_near: int


def text_of(found: Sequence[Overlap], file: Path | None = None) -> str:
    """The first pairs in a table; ``file`` has them all. Empty where there are none."""
    pairs = [(share, each.held_out, name) for each in found for share, name in _pairs(each)]
    if not pairs:
        return ""
    rows = [(share, short(held_out, 60), short(name, 60)) for share, held_out, name in pairs[:SHOWN]]
    more, unkept = len(pairs) - len(rows), sum(each.num_exact + each.num_near for each in found) - len(pairs)
    lines = [table(("shared", "held out", "trained on"), rows)]
    if more:
        lines.append(f"and {more} more in {file}\n" if file else f"and {more} more: --out FILE has all\n")
    if unkept:
        lines.append(
            f"{counted(unkept, 'other pair')} not listed: for a held-out prompt the closest {PAIRS} of each kind are.\n"
        )
    return "\n".join(lines)


def _pairs(of: Overlap) -> list[Named]:
    return [("exact", name) for name in of.exact] + [(f"{share:.2f}", name) for share, name in of.near]


@dataclass(slots=True)
class _Seen:
    """What was found so far for one held-out prompt."""

    size: int = 0  # n-grams that are not boilerplate
    exact: list[str] = field(default_factory=list)
    num_exact: int = 0
    near: list[tuple[float, str]] = field(default_factory=list)  # a heap, the farthest first
    num_near: int = 0


def overlaps(train: Iterable[Named], held_out: Sequence[Named], *, at_least: float = 0.5) -> list[Overlap]:
    """The held-out prompts that are equal to a training prompt, or share ``at_least`` of their n-grams with one.

    Prompts are compared in :func:`normal` form. N-grams are 13 words long (as in Brown et al., Language Models are
    Few-Shot Learners (2020), appendix C); of a held-out prompt of fewer words 24 characters, and one that is shorter
    than that is compared as a whole only. Only the held-out side is indexed, so ``train`` may be a stream. Those with
    exact matches come first, then by falling share. Raises ValueError unless 0 < at_least <= 1.
    """
    if not 0 < at_least <= 1:
        raise ValueError(f"at_least must be above 0 and at most 1, got {at_least}")
    index = _Index(held_out)
    for name, prompt in train:
        index.compare(name, normal(prompt), at_least)
    found = [
        Overlap(name, tuple(of.exact), of.num_exact, tuple(sorted(of.near, reverse=True)), of.num_near)
        for (name, _), of in zip(held_out, index.seen, strict=True)
        if of.num_exact or of.num_near
    ]
    return sorted(found, key=lambda each: (not each.num_exact, -max((share for share, _ in each.near), default=0.0)))


def normal(text: str) -> str:
    """The form in which prompts are compared: Unicode NFKC, lower case, no punctuation, one space between words."""
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    return " ".join(words) or text.strip()


# A number with its separators, a word, or any other character that is not punctuation: "3-4" is "3 - 4", not "3 4".
_WORD = re.compile(r"""\d+(?:[.,]\d+)+|[^\W_]+|[^\w\s.,;:!?"'`()\[\]{}]""")


class _Index:
    """The held-out side: whose whole prompt a digest is, whose n-gram, and what was seen of each, all by position.

    Names are for people: two prompts may have the same one.
    """

    def __init__(self, held_out: Sequence[Named]) -> None:
        self.seen = [_Seen() for _ in held_out]
        self._wholes: dict[bytes, list[int]] = {}
        self._grams: dict[bytes, list[int]] = {}
        self._some_are_short = False
        for position, (_, prompt) in enumerate(held_out):
            text = normal(prompt)
            self._wholes.setdefault(_digest(text), []).append(position)
            grams = set(_word_grams(text))
            if not grams:
                grams, self._some_are_short = set(_character_grams(text)), True
            for gram in grams:
                self._grams.setdefault(gram, []).append(position)
        for gram in [gram for gram, positions in self._grams.items() if len(positions) > COMMON]:
            del self._grams[gram]
        for positions in self._grams.values():
            for position in positions:
                self.seen[position].size += 1

    def compare(self, name: str, text: str, at_least: float) -> None:
        """Compare one training prompt, in normal form, with all held-out ones."""
        same = self._wholes.get(_digest(text), [])
        for position in same:
            of = self.seen[position]
            of.num_exact += 1
            if len(of.exact) < PAIRS:
                of.exact.append(name)
        grams = {*_word_grams(text), *(_character_grams(text) if self._some_are_short else ())}
        shared = Counter(position for gram in grams for position in self._grams.get(gram, ()))
        for position, count in shared.items():
            of = self.seen[position]
            share = count / of.size
            if share >= at_least and position not in same:
                of.num_near += 1
                push = heappush if len(of.near) < PAIRS else heappushpop
                push(of.near, (share, name))


def _word_grams(text: str) -> Iterator[bytes]:
    words = text.split(" ")
    return (_digest(" ".join(words[start : start + WORDS])) for start in range(len(words) - WORDS + 1))


def _character_grams(text: str) -> Iterator[bytes]:
    return (_digest(text[start : start + CHARACTERS]) for start in range(len(text) - CHARACTERS + 1))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
