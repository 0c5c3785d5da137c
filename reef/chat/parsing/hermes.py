"""Hermes, Qwen2.5 and Qwen3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, one block a call.

Text that comes after the object and is not the closing marker is text of the reply; the object is a call all the same.
"""

from reef.chat.parsing.calls import Calls, ToolFormat
from reef.chat.parsing.json_call import read_call
from reef.chat.parsing.source import SPACE, Markers, Reading, Source

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _read(source: Source, calls: Calls, marker: str) -> Reading[None]:
    yield from source.skip(SPACE)
    yield from read_call(source, calls)
    yield from calls.close(CLOSE)


HERMES = ToolFormat(starts=Markers(OPEN), special=frozenset({OPEN, CLOSE}), read=_read)
