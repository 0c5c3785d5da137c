"""A streamed answer: server-sent events in, deltas out, and the whole answer that they add up to."""

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from io import StringIO

from reef_harness import wire
from reef_harness.errors import BrokenStream, UnexpectedAnswer
from reef_harness.types import Completion, Delta, Json, ReasoningDelta, TextDelta, ToolCallDelta

DONE = b"[DONE]"
_BOM = b"\xef\xbb\xbf"  # may come before the first line, and is none of it


async def event_data(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event. Lines end at LF or CRLF only: JSON text may hold other line ends."""
    begun: list[bytes] = []  # pieces of a line: joined once, however many it comes in
    lines: list[bytes] = []
    skipped = _BOM
    async for chunk in chunks:
        piece, *more = chunk.split(b"\n")
        begun.append(piece)
        if not more:
            continue
        whole, begun = [b"".join(begun), *more[:-1]], more[-1:]
        for line in whole:
            line = line.removeprefix(skipped).removesuffix(b"\r")
            skipped = b""
            if line.startswith(b"data:"):
                lines.append(line[5:].removeprefix(b" "))
            elif not line and lines:
                yield b"\n".join(lines)
                lines = []


@dataclass(slots=True)
class _Part:
    """One choice so far."""

    text: StringIO = field(default_factory=StringIO)
    reasoning: StringIO = field(default_factory=StringIO)
    calls: dict[int, Json] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] | None = None
    finish_reason: str | None = None


class Assembly:
    """The answer of a chat as its chunks come. ``receipt`` and ``release`` are those that headers name, or None."""

    def __init__(self, url: str, receipt: str | None, release: str | None) -> None:
        self._url = url
        self._receipts: list[str] = [receipt] if receipt else []
        self._release = release
        self._parts: dict[int, _Part] = {}
        self._rest: Json = {}  # what is said once: id, model, usage, prompt_token_ids
        self.done = False  # [DONE] came: there is no more

    def take(self, data: bytes) -> Iterator[Delta]:
        """What a chunk adds. Raises BrokenStream where the service says it failed, UnexpectedAnswer for no chunk."""
        if data == DONE:
            self.done = True
            return
        try:
            chunk = json.loads(data)
            if error := chunk.get("error"):
                raise BrokenStream(f"{self._url}: {error['message']}", error.get("code"))
            self._note(chunk)
            for choice in chunk["choices"]:
                yield from self._grow(choice)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UnexpectedAnswer(f"{self._url} sent a chunk that is none of a chat's: {data[:200]!r}") from error

    def completion(self) -> Completion:
        """The whole answer. Raises BrokenStream where it is not whole."""
        missing = [f"why choice {index} ended" for index, part in self._parts.items() if part.finish_reason is None]
        if not self._parts:
            missing.append("a choice")
        if any(index >= len(self._receipts) for index in self._parts):
            missing.append("the receipts")
        if not self.done:
            missing.append("[DONE]")
        if missing:
            raise BrokenStream(f"{self._url}: the stream ended without {', '.join(missing)}")
        return wire.completion_of(self._body(), None, self._release, self._url)

    def _note(self, chunk: Json) -> None:
        for name in ("id", "created", "model", "usage", "prompt_token_ids"):
            if chunk.get(name) is not None:
                self._rest[name] = chunk[name]
        if reef := chunk.get("reef"):
            self._receipts = reef.get("agent_record_ids") or [reef["agent_record_id"]]
            self._release = reef.get("release_id") or self._release

    def _grow(self, choice: Json) -> Iterator[Delta]:
        index, delta = choice["index"], choice["delta"]
        if not isinstance(index, int) or index < 0:
            raise TypeError(f"a choice's index is {index!r}")
        part = self._parts.setdefault(index, _Part())
        if ids := choice.get("token_ids"):
            if not isinstance(ids, list):
                raise TypeError(f"token_ids are {ids!r}")
            part.token_ids += ids
        if logprobs := choice.get("logprobs"):
            part.logprobs = part.logprobs or []
            part.logprobs += wire.sampled_logprobs(logprobs)
        part.finish_reason = choice.get("finish_reason") or part.finish_reason
        if reasoning := delta.get("reasoning_content"):
            part.reasoning.write(reasoning)
            yield ReasoningDelta(index, reasoning)
        if text := delta.get("content"):
            part.text.write(text)
            yield TextDelta(index, text)
        for piece in delta.get("tool_calls") or ():
            yield _grow_call(part, index, piece)

    def _body(self) -> Json:
        """As the service answers a request that asks for no stream."""
        choices = [
            {
                "index": index,
                "message": _message(part),
                "finish_reason": part.finish_reason,
                "logprobs": None
                if part.logprobs is None
                else {"content": [{"logprob": value} for value in part.logprobs]},
                "reef_agent_record_id": self._receipts[index],
                **({"token_ids": part.token_ids} if part.token_ids else {}),
            }
            for index, part in sorted(self._parts.items())
        ]
        return {**self._rest, "object": "chat.completion", "choices": choices}


def _grow_call(part: _Part, choice: int, piece: Json) -> ToolCallDelta:
    function = piece.get("function") or {}
    call = part.calls.setdefault(piece["index"], {"id": "", "name": "", "arguments": ""})
    call["id"] = piece.get("id") or call["id"]
    call["name"] = function.get("name") or call["name"]
    arguments = function.get("arguments") or ""
    call["arguments"] += arguments
    return ToolCallDelta(choice, piece["index"], piece.get("id"), function.get("name"), arguments)


def _message(part: _Part) -> Json:
    message: Json = {"role": "assistant", "content": part.text.getvalue()}
    if reasoning := part.reasoning.getvalue():
        message["reasoning_content"] = reasoning
    calls = [
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in _whole_calls(part)
    ]
    return message | ({"tool_calls": calls} if calls else {})


def _whole_calls(part: _Part) -> list[Json]:
    """A call that was begun and cut is none: its arguments are no JSON.

    Calls that need no arguments may come without any; they are whole where the choice ended with them and no others.
    """
    calls = [part.calls[index] for index in sorted(part.calls)]
    whole = [call for call in calls if _is_json(call["arguments"])]
    if not whole and part.finish_reason == "tool_calls":
        whole = [call for call in calls if not call["arguments"].strip()]
    return whole


def _is_json(text: str) -> bool:
    """Whether it is JSON, not nested deeper than Python reads: the service takes 64 levels in arguments."""
    try:
        json.loads(text, parse_int=str)  # of any length
    except (ValueError, RecursionError):
        return False
    return True
