"""Qwen3-Coder: <tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>.

Values are bare text: the tool's schema says what they are, and the arguments' JSON is built here. A string goes on as
it comes, other values once they are whole.

What the models get wrong is read as they mean it: the first <tool_call> left out, and </parameter> left out before
another parameter of the tool (on a line of its own) or before </function></tool_call>. Elsewhere a value may hold all
of these markers: </parameter>, say, ends it only before <parameter= or </function>.
"""

import json
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from reef.chat.parsing.calls import Calls, ToolFormat
from reef.chat.parsing.schema import TEXT, as_json, types_of
from reef.chat.parsing.source import SPACE, FormatError, Markers, Reading, Sink, Source

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
NAME = re.compile(r"[^<>\n]*+")
INSIDE = Markers(PARAMETER_END, FUNCTION_END, PARAMETER)


def _read(source: Source, calls: Calls, marker: str) -> Reading[None]:
    if marker == OPEN:
        yield from source.skip(SPACE)
        yield from source.expect(FUNCTION)
    function = yield from _name(source)
    calls.begin(function)
    calls.arguments("{")
    yield from _parameters(source, calls, calls.tools.get(function, {}))
    calls.arguments("}")
    calls.end()
    yield from calls.close(CLOSE)


def _parameters(source: Source, calls: Calls, schema: Mapping[str, Any]) -> Reading[None]:
    properties = schema.get("properties")
    missing = set(properties) if isinstance(properties, Mapping) else set()
    seen: set[str] = set()
    yield from source.skip(SPACE)
    key = yield from _next_key(source, (yield from source.expect(PARAMETER, FUNCTION_END)))
    while key is not None:
        if key in seen:
            raise FormatError
        calls.arguments((", " if seen else "") + json.dumps(key, ensure_ascii=False) + ": ")
        seen.add(key)
        missing.discard(key)
        key = yield from _typed_value(source, calls, types_of(schema, key), missing)


def _typed_value(source: Source, calls: Calls, types: frozenset[str], missing: AbstractSet[str]) -> Reading[str | None]:
    if types == TEXT:
        calls.arguments('"')
        key = yield from _value(source, lambda piece: calls.arguments(_escaped(piece)), missing)
        calls.arguments('"')
        return key
    pieces: list[str] = []
    key = yield from _value(source, pieces.append, missing)
    calls.arguments(as_json("".join(pieces), types))
    return key


def _value(source: Source, keep: Sink, missing: AbstractSet[str]) -> Reading[str | None]:
    """Takes a value and what ends it; the next parameter's key, or None after the last.

    The newline after <parameter=...> and the one before the end are not the value's.
    """
    value = _Value(keep)
    yield from source.literal("\n")
    while True:
        marker = yield from source.before(INSIDE, value.push)
        if marker is None:
            raise FormatError
        source.take(len(marker))
        if marker == PARAMETER:
            key = yield from source.skip(NAME)
            closed = yield from source.literal(">")
            if closed and key in missing and value.at_line_start:
                return key
            value.push(marker + key + (closed or ""))
            continue
        blank = yield from source.skip(SPACE)
        after = (CLOSE,) if marker == FUNCTION_END else (PARAMETER, FUNCTION_END)
        if following := (yield from source.literal(*after)):
            return (yield from _next_key(source, following))
        value.push(marker + blank)


def _next_key(source: Source, marker: str) -> Reading[str | None]:
    """The key after <parameter=; None after another marker."""
    return (yield from _name(source)) if marker == PARAMETER else None


class _Value:
    """Passes a value on, but for a newline at its end."""

    def __init__(self, keep: Sink) -> None:
        self.at_line_start = True
        self._keep = keep
        self._newline = ""

    def push(self, piece: str) -> None:
        piece = self._newline + piece
        self.at_line_start = piece.endswith("\n")
        self._newline = "\n" if self.at_line_start else ""
        self._keep(piece.removesuffix("\n"))


def _name(source: Source) -> Reading[str]:
    name = yield from source.skip(NAME)
    yield from source.expect(">")
    return name.strip()


def _escaped(piece: str) -> str:
    return json.dumps(piece, ensure_ascii=False)[1:-1]


QWEN3_CODER = ToolFormat(starts=Markers(OPEN, FUNCTION), special=frozenset({OPEN, CLOSE}), read=_read)
