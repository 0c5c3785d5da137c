"""Calls written as JSON: {"name": ..., "arguments": {...}}. Arguments go on as they come, in the model's own text."""

import re
from typing import Any

import orjson

from reef.chat.parsing.calls import Calls
from reef.chat.parsing.source import SPACE, FormatError, Reading, Sink, Source

BETWEEN = re.compile(r"[-+.,:0-9Eaeflnrstu \t\r\n]*+")  # numbers, true, false, null and what stands between values
SCALAR = re.compile(r"[-+.0-9Eaeflnrstu]*+")
CHARACTERS = re.compile(r'(?:[^"\\\x00-\x1f]++|\\["\\/bfnrtu])*+')
CLOSERS = {"{": "}", "[": "]"}
ARGUMENTS = frozenset({"arguments", "parameters"})
KEYS = ARGUMENTS | {"name", "id", "type"}  # what models write of a call


def read_call(source: Source, calls: Calls, *, strict: bool = False) -> Reading[None]:
    """Reads one call and ends it.

    `strict` gives up at the first sign that the object is another one than a call: a key that calls do not have, or a
    name that no tool has. For formats in which nothing but the JSON says that this is a call.
    """
    yield from source.expect("{")
    yield from source.skip(SPACE)
    more = not (yield from source.literal("}"))
    while more:
        key = yield from _string(source)
        if strict and key not in KEYS:
            raise FormatError
        yield from source.skip(SPACE)
        yield from source.expect(":")
        yield from source.skip(SPACE)
        yield from _member(source, calls, key, strict)
        yield from source.skip(SPACE)
        more = (yield from source.expect(",", "}")) == ","
        if more:
            yield from source.skip(SPACE)
    calls.end()


def read_arguments(source: Source, calls: Calls) -> Reading[None]:
    """Reads the arguments: a JSON object, and one only."""
    if calls.has_arguments or (yield from source.peek()) != "{":
        raise FormatError
    yield from _container(source, calls.arguments)


def _member(source: Source, calls: Calls, key: str, strict: bool) -> Reading[None]:
    if key == "name":
        name = yield from _string(source)
        if strict and name not in calls.tools:
            raise FormatError
        calls.begin(name)
    elif key in ARGUMENTS:
        yield from read_arguments(source, calls)
    else:
        yield from _value(source)


def _string(source: Source) -> Reading[str]:
    pieces = ['"']
    yield from source.expect('"')
    yield from _characters(source, pieces.append)
    return str(_loads("".join(pieces)))


def _value(source: Source) -> Reading[None]:
    """A value that nobody needs, but for being JSON."""
    pieces: list[str] = []
    first = yield from source.peek()
    if first == '"':
        yield from _string(source)
    elif first in CLOSERS:
        yield from _container(source, pieces.append)
        _loads("".join(pieces))
    else:
        _loads((yield from source.skip(SCALAR)))


def _container(source: Source, keep: Sink) -> Reading[None]:
    """Takes an object or an array, which comes next, to its end. Brackets and strings are right then, no more."""
    closers: list[str] = []
    while (yield from source.more()):
        if piece := source.run(BETWEEN):
            keep(piece)
            continue
        char = source.char
        if char == '"':
            keep(source.take(1))
            yield from _characters(source, keep)
        elif char in CLOSERS:
            keep(source.take(1))
            closers.append(CLOSERS[char])
        elif closers and char == closers[-1]:
            keep(source.take(1))
            closers.pop()
            if not closers:
                return
        else:
            raise FormatError
    raise FormatError


def _characters(source: Source, keep: Sink) -> Reading[None]:
    """Takes the rest of a string, with the quotation mark that ends it."""
    while (yield from source.more()):
        if piece := source.run(CHARACTERS):
            keep(piece)
        elif source.char == '"':
            keep(source.take(1))
            return
        elif source.char == "\\" and source.unread == 1:
            yield from source.another()  # what it escapes
        else:
            raise FormatError
    raise FormatError


def _loads(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        raise FormatError from None
