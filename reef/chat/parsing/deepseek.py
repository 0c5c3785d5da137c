"""DeepSeek, between <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜>.

V3, R1   <｜tool▁call▁begin｜>function<｜tool▁sep｜>name\\n```json\\n{...}\\n```<｜tool▁call▁end｜>
V3.1     <｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>
"""

import re

from reef.chat.parsing.calls import Calls, ToolFormat
from reef.chat.parsing.json_call import read_arguments
from reef.chat.parsing.source import SPACE, FormatError, Markers, Reading, Source

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
WORD = re.compile(r"[^<\n]*+")


def _read(source: Source, calls: Calls, marker: str) -> Reading[None]:
    if marker == CALLS_BEGIN:
        yield from source.skip(SPACE)
        yield from source.expect(CALL_BEGIN)
    word = yield from source.skip(WORD)
    yield from source.expect(SEPARATOR)
    yield from source.skip(SPACE)
    if (yield from source.peek()) == "{":
        calls.begin(word.strip())
        yield from read_arguments(source, calls)
        calls.end()
    else:
        yield from _fenced(source, calls)
    yield from calls.close(CALL_END)
    yield from calls.close(CALLS_END)


def _fenced(source: Source, calls: Calls) -> Reading[None]:
    name = yield from source.skip(WORD)
    if (yield from source.peek()) != "\n":
        raise FormatError
    calls.begin(name.strip())
    yield from source.skip(SPACE)
    yield from source.expect("```json")
    yield from source.skip(SPACE)
    yield from read_arguments(source, calls)
    calls.end()
    yield from calls.close("```")


DEEPSEEK = ToolFormat(
    starts=Markers(CALLS_BEGIN, CALL_BEGIN),
    special=frozenset({CALLS_BEGIN, CALLS_END, CALL_BEGIN, SEPARATOR, CALL_END}),
    read=_read,
)
