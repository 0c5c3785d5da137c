"""A streamed answer: server-sent events in, deltas out, and the whole answer that they add up to."""

import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from reef_harness import wire
from reef_harness.errors import BrokenStream, UnexpectedAnswer
from reef_harness.types import Completion, Delta, Json, ReasoningDelta, TextDelta, ToolCallDelta

DONE = b"[DONE]"


async def event_data(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event. Lines end at LF or CRLF only: JSON text may hold other line ends."""
    rest, lines = b"", []
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                lines.append(line[5:].removeprefix(b" "))
            elif not line and lines:
                yield b"\n".join(lines)
                lines = []


@dataclass(slots=True)
class _Part:
    """One choice so far."""

    text: str = ""
    reasoning: str | None = None
    calls: dict[int, Json] = field(default_factory=dict)
    token_ids: list[int] | None = None
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
        self._done = False

    def take(self, data: bytes) -> Iterator[Delta]:
        """What a chunk adds. Raises BrokenStream where the service says it failed, UnexpectedAnswer for no chunk."""
        if data == DONE:
            self._done = True
            return
        try:
            chunk = json.loads(data)
            if "error" in chunk:
                raise BrokenStream(f"{self._url}: {chunk['error']['message']}", chunk["error"].get("code"))
            self._note(chunk)
            for choice in chunk["choices"]:
                yield from self._grow(choice)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UnexpectedAnswer(f"{self._url} sent a chunk that is none of a chat's: {data[:200]!r}") from error

    def completion(self) -> Completion:
        """The whole answer. Raises BrokenStream where it is not whole."""
        missing = [f"why choice {index} ended" for index, part in self._parts.items() if part.finish_reason is None]
        if not self._parts:
            missing.append("a choice")
        if any(index >= len(self._receipts) for index in self._parts):
            missing.append("the receipts")
        if not self._done:
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
            part.token_ids = (part.token_ids or []) + ids
        if logprobs := choice.get("logprobs"):
            part.logprobs = (part.logprobs or []) + list(wire.sampled_logprobs(logprobs))
        part.finish_reason = choice.get("finish_reason") or part.finish_reason
        if reasoning := delta.get("reasoning_content"):
            part.reasoning = (part.reasoning or "") + reasoning
            yield ReasoningDelta(index, reasoning)
        if text := delta.get("content"):
            part.text += text
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
                **({} if part.token_ids is None else {"token_ids": part.token_ids}),
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
    """A call that was begun and cut is none: its arguments are no JSON."""
    message: Json = {"role": "assistant", "content": part.text}
    if part.reasoning is not None:
        message["reasoning_content"] = part.reasoning
    calls = [
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for _, call in sorted(part.calls.items())
        if _is_json(call["arguments"])
    ]
    return message | ({"tool_calls": calls} if calls else {})


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
