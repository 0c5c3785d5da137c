"""The tokenizer's three duties here: the text of an answer, stop strings, and the end-of-text id.

A server whose model directory has no tokenizer works on ids alone and refuses stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reef.engines.embedded.errors import ModelError
from reef.engines.embedded.sampling import Int64s

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
INCOMPLETE = "\ufffd"
"""What a decoder puts for bytes that do not form a character (yet)."""


class Tokenizer:
    """A Hugging Face tokenizer behind the few calls this engine makes."""

    def __init__(self, path: Path) -> None:
        """Loads the tokenizer in `path`.

        Raises:
            ModelError: its files are damaged.
        """
        from transformers import AutoTokenizer  # slow to import; a server without a tokenizer starts faster

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ModelError(f"cannot load the tokenizer in {path}: {error}") from error

    @staticmethod
    def exists(path: Path) -> bool:
        """Whether a model directory has a tokenizer."""
        return any((path / name).exists() for name in TOKENIZER_FILES)

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text, if the tokenizer names one."""
        return None if self._tokenizer.eos_token_id is None else int(self._tokenizer.eos_token_id)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of `ids`."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


class StopStrings:
    """Looks for stop strings at the end of a growing output."""

    def __init__(self, strings: Sequence[str], tokenizer: Tokenizer) -> None:
        self._strings = strings
        self._tokenizer = tokenizer
        # A token that adds text adds at least one byte, so this many last tokens cover the longest string; four more
        # because a character cut by the window's edge spoils the bytes around it.
        self._window = max(len(string.encode()) for string in strings) + 4

    def match(self, output_ids: Int64s) -> str | None:
        """The first stop string (in the request's order) that the last token completed."""
        tail = self._tail(output_ids)
        return next((string for string in self._strings if string in tail), None)

    def may_follow(self, output_ids: Int64s) -> bool:
        """Whether the output ends in the beginning of a stop string, so that a stream has to wait."""
        tail = self._tail(output_ids)
        return any(tail.endswith(string[:i]) for string in self._strings for i in range(1, len(string)))

    def _tail(self, output_ids: Int64s) -> str:
        return self._tokenizer.decode(output_ids[-self._window :].tolist(), skip_special_tokens=False)


def visible_text(
    tokenizer: Tokenizer, ids: Sequence[int], matched: str | int | None, finished: bool, trim: bool, skip_special: bool
) -> str:
    """The text of an answer so far: without its stop string or stop token, and without half a character."""
    if trim and isinstance(matched, int):
        ids = ids[:-1]
    text = tokenizer.decode(ids, skip_special)
    if isinstance(matched, str):
        end = text.find(matched)
        if end >= 0:
            text = text[: end if trim else end + len(matched)]
    return text if finished else text.rstrip(INCOMPLETE)


class GrowingText:
    """The visible text of an answer as it grows, each piece of it once, in time that does not grow with it.

    Only the last ids are decoded again; those before are settled once their text does not depend on what follows.
    """

    def __init__(self, tokenizer: Tokenizer, trim: bool, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._trim = trim
        self._skip_special = skip_special
        self._num_settled = 0
        self._settled = ""
        self._num_sent = 0

    def push(self, ids: Int64s, matched: str | int | None, finished: bool) -> str:
        """What the text of all `ids` so far has more than what was returned before."""
        if len(ids) - self._num_settled > 2 * _KEPT:
            self._settle(ids[self._num_settled :])
        tail = ids[self._num_settled :].tolist()
        if finished and isinstance(matched, str):  # it may begin before
            text = visible_text(self._tokenizer, ids.tolist(), matched, True, self._trim, self._skip_special)
        else:
            text = self._settled + visible_text(
                self._tokenizer, tail, matched, finished, self._trim, self._skip_special
            )
        new, self._num_sent = text[self._num_sent :], max(self._num_sent, len(text))
        return new

    def _settle(self, tail: Int64s) -> None:
        first, last = tail[:-_KEPT].tolist(), tail[-_KEPT:].tolist()
        text = self._tokenizer.decode(first, self._skip_special)
        whole = self._tokenizer.decode(first + last, self._skip_special)
        if text + self._tokenizer.decode(last, self._skip_special) == whole:
            self._settled += text
            self._num_settled += len(first)


_KEPT = 16  # ids: a character has four at most, and a word is seldom more
