"""Mistral: [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], and since 2025 [TOOL_CALLS]name[ARGS]{...} for each.

The newer form may have [CALL_ID]id before [ARGS], and some models leave [ARGS] out. Ids that the model writes are not
kept: its templates demand 9 letters and digits, which the ids made here have.
"""

import re

from reef.chat.parsing.calls import Calls, ToolFormat
from reef.chat.parsing.json_call import read_arguments, read_call
from reef.chat.parsing.source import SPACE, FormatError, Markers, Reading, Source

CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NAME = re.compile(r"[^\[{\n]*+")


def _read(source: Source, calls: Calls, marker: str) -> Reading[None]:
    yield from source.skip(SPACE)
    first = yield from source.peek()
    if first == "[":
        yield from _array(source, calls)
    elif first == "{":
        yield from read_call(source, calls)
    else:
        yield from _named(source, calls)


def _array(source: Source, calls: Calls) -> Reading[None]:
    yield from source.expect("[")
    while True:
        yield from source.skip(SPACE)
        yield from read_call(source, calls)
        yield from source.skip(SPACE)
        if (yield from source.peek()) != ",":
            break
        calls.attempt()
        yield from source.expect(",")
    yield from calls.close("]")


def _named(source: Source, calls: Calls) -> Reading[None]:
    name = yield from source.skip(NAME)
    if (yield from source.peek()) not in ("[", "{"):
        raise FormatError
    calls.begin(name.strip())
    if (yield from source.literal(CALL_ID)):
        yield from source.skip(NAME)
    yield from source.literal(ARGS)
    yield from source.skip(SPACE)
    yield from read_arguments(source, calls)
    calls.end()


MISTRAL = ToolFormat(starts=Markers(CALLS), special=frozenset({CALLS, CALL_ID, ARGS}), read=_read, short_ids=True)
