"""Text of one choice as its tokens come: what the next token may still change waits."""

import functools
from collections.abc import Sequence

from reef.chat.template import Template

_CONTEXT = 8  # ids that are decoded again with the next ones: a character spans at most 4 bytes, so at most 4 ids


class Detokenizer:
    """Text deltas of one choice as its tokens come; holds back what the next token may still change.

    Bytes of a character that is not complete yet decode to U+FFFD, so text that ends in one waits. Text that may be the
    beginning of a stop string waits too.
    """

    def __init__(self, template: Template, stop: Sequence[str] = (), keep: frozenset[int] = frozenset()) -> None:
        self._decode = functools.partial(template.decode, keep=keep)
        self._longest_stop = max((len(text) for text in stop), default=1)
        self._unsettled = template.unsettled(keep)
        self._ids: list[int] = []
        self._end = 0  # ids from it on wait
        self._prefix = 0  # ids before it are settled
        self._text = ""  # of settled ids
        self._sent = 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain after these ids, which are not the last, and was not returned before."""
        self._extend(ids)
        tail = self._decode(self._ids[self._prefix : self._end])
        if not tail.endswith("�") and self._end - self._prefix > _CONTEXT:
            keep = self._end - _CONTEXT
            settled = self._decode(self._ids[self._prefix : keep])
            rest = self._decode(self._ids[keep : self._end])
            if settled + rest == tail:
                self._text += settled
                self._prefix, tail = keep, rest
        whole = self._text + tail.rstrip("�")
        return self._take(whole, len(whole) - (self._longest_stop - 1))

    def finish(self, ids: Sequence[int], matched: int | str | None) -> str:
        """The rest of the text with the last ids, cut at the stop string that ended it."""
        self._ids.extend(ids)
        whole = cut_at_stop(self._text + self._decode(self._ids[self._prefix :]), matched)
        return self._take(whole, len(whole))

    def _extend(self, ids: Sequence[int]) -> None:
        if not self._unsettled:
            self._ids.extend(ids)
            self._end = len(self._ids)
            return
        for token in ids:
            self._ids.append(token)
            if token not in self._unsettled:
                self._end = len(self._ids)

    def _take(self, whole: str, end: int) -> str:
        """What of `whole` before `end` was not returned yet; nothing where `end` lies before that."""
        start, self._sent = self._sent, max(self._sent, end)
        return whole[start : self._sent]


def cut_at_stop(text: str, matched: int | str | None) -> str:
    """Text before the stop string that ended it; all of it where an id or nothing did."""
    if isinstance(matched, str):
        at = text.find(matched)
        return text if at < 0 else text[:at]
    return text
