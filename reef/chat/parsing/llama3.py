"""Llama 3: {"name": ..., "parameters": {...}}, after <|python_tag|> or where the reply begins; several with ; between.

A reply that begins with JSON is a call only if it has the keys of a call and the name of a tool: it streams as text
from the first key or name that says otherwise.
"""

from reef.chat.parsing.calls import Calls, ToolFormat
from reef.chat.parsing.json_call import read_call
from reef.chat.parsing.source import SPACE, Markers, Reading, Source

TAG = "<|python_tag|>"


def _opening(source: Source, calls: Calls) -> Reading[None]:
    yield from source.skip(SPACE)
    if (yield from source.peek()) == "{":
        calls.attempt()
        yield from _objects(source, calls, strict=True)


def _read(source: Source, calls: Calls, marker: str) -> Reading[None]:
    yield from source.skip(SPACE)
    yield from _objects(source, calls, strict=False)


def _objects(source: Source, calls: Calls, *, strict: bool) -> Reading[None]:
    while True:
        yield from read_call(source, calls, strict=strict)
        yield from source.skip(SPACE)
        following = yield from source.peek()
        if not following or following not in ";{":
            return
        calls.attempt()
        yield from source.literal(";")
        yield from source.skip(SPACE)


LLAMA3 = ToolFormat(starts=Markers(TAG), special=frozenset({TAG}), read=_read, opening=_opening)
