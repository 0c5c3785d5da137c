"""Text as it comes, and readers that pause where they need more of it.

A reader is a generator: it reads a format straight down, and yields wherever the next piece of text is not there yet.
Everything read is read once, so a reply costs time in proportion to its length, however it is cut.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Sink = Callable[[str], object]

SPACE = re.compile(r"[ \t\r\n]*+")
NEWLINES = re.compile(r"\n*+")


class FormatError(Exception):
    """The text is not, or no longer, what the format says. Never leaves this package: the text is text then."""


class Markers:
    """Strings that end plain text, found also where only the beginning of one has come."""

    def __init__(self, *markers: str) -> None:
        self.strings = frozenset(markers)
        self._whole = re.compile("|".join(re.escape(marker) for marker in markers))
        self._begun = re.compile("(?:" + "|".join(_beginnings(marker) for marker in markers) + r")\Z")
        self._longest = max(len(marker) for marker in markers)

    def find(self, text: str, at: int) -> tuple[int, str | None]:
        """Where the first marker is, and which; else where one may have begun; else the end of the text."""
        if found := self._whole.search(text, at):
            return found.start(), found[0]
        begun = self._begun.search(text, max(at, len(text) - self._longest + 1))
        return (begun.start() if begun else len(text)), None


class Source:
    """Unread text. What is taken from it goes to `sink` too, which whoever owns the reader sets."""

    def __init__(self) -> None:
        self.sink: Sink = ignore
        self.ended = False
        self._text = ""
        self._at = 0

    @property
    def unread(self) -> int:
        """Characters that are here and not taken."""
        return len(self._text) - self._at

    @property
    def char(self) -> str:
        """The next character, which must be there."""
        return self._text[self._at]

    def push(self, text: str) -> None:
        """More text. Readers leave little unread (less than a marker), so that this stays cheap."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """Nothing follows."""
        self.ended = True

    def take(self, length: int) -> str:
        """The next `length` characters, which must be there."""
        piece = self._text[self._at : self._at + length]
        self._at += length
        self.sink(piece)
        return piece

    def take_rest(self) -> str:
        """All that is unread."""
        return self.take(self.unread)

    def run(self, pattern: re.Pattern[str]) -> str:
        """What the pattern, which may match nothing, matches of the text that is here already."""
        found = pattern.match(self._text, self._at)
        return self.take(found.end() - self._at) if found and found.end() > self._at else ""

    def more(self) -> Reading[bool]:
        """Waits for a character; false where none follows."""
        while self._at == len(self._text):
            if self.ended:
                return False
            yield
        return True

    def another(self) -> Reading[None]:
        """Waits for more text than there is now. Raises FormatError where none follows."""
        if self.ended:
            raise FormatError
        yield

    def peek(self) -> Reading[str]:
        """The next character, not taken; "" where none follows."""
        return self._text[self._at] if (yield from self.more()) else ""

    def skip(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Takes all that matches a pattern like SPACE."""
        pieces: list[str] = []
        while (yield from self.more()) and (piece := self.run(pattern)):
            pieces.append(piece)
        return "".join(pieces)

    def literal(self, *options: str, begun: bool = False) -> Reading[str | None]:
        """Takes whichever option comes next (none is the beginning of another); None where none does.

        With `begun`, the beginning of an option that the end of the text has cut is taken too.
        """
        longest = max(len(option) for option in options)
        while True:
            for option in options:
                if self._text.startswith(option, self._at):
                    return self.take(len(option))
            rest = self._text[self._at : self._at + longest]
            if not any(option.startswith(rest) for option in options):
                return None
            if self.ended:
                return self.take(len(rest)) if begun and rest else None
            yield

    def expect(self, *options: str) -> Reading[str]:
        """Takes whichever option comes next. Raises FormatError where none does."""
        found = yield from self.literal(*options)
        if found is None:
            raise FormatError
        return found

    def before(self, markers: Markers, keep: Sink | None = None) -> Reading[str | None]:
        """Takes the text before the next marker and returns the marker, not taken; None where the text ends first.

        `keep` gets the text as well, but not what may be the beginning of a marker that the end has cut.
        """
        while True:
            end, marker = markers.find(self._text, self._at)
            if end > self._at:
                piece = self.take(end - self._at)
                if keep is not None:
                    keep(piece)
            if marker is not None:
                return marker
            if self.ended:
                self.take_rest()
                return None
            yield


class HeldSpace:
    """Text whose trailing white space waits: whether it counts shows in what follows."""

    def __init__(self, characters: str) -> None:
        self._characters = characters
        self._held: list[str] = []

    def push(self, piece: str) -> str:
        """What may go: all up to the last character that is not white space."""
        body = piece.rstrip(self._characters)
        if not body:
            self._held.append(piece)
            return ""
        return self.release() + self._keep(body, piece)

    def release(self) -> str:
        """The white space that waited."""
        held = "".join(self._held)
        self._held.clear()
        return held

    def _keep(self, body: str, piece: str) -> str:
        if len(body) < len(piece):
            self._held.append(piece[len(body) :])
        return body


def ignore(piece: str) -> None:
    """A sink for what nobody wants."""


def _beginnings(marker: str) -> str:
    """A pattern of every proper beginning of a marker, but the empty one."""
    return re.escape(marker[0]) + "".join(f"(?:{re.escape(c)}" for c in marker[1:-1]) + ")?" * (len(marker) - 2)
