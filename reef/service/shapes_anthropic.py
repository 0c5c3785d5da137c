"""How Anthropic's answers look: a message's content, whole and block by block, and why it ended."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import from_json

from reef.chat.reply import Delta, ReasoningDelta, Reply, TextDelta, ToolCallArguments, ToolCallBegin
from reef.types import FinishReason, Generation

HOLD = 16  # arguments go on when they have grown by a 16th: all of them are read again each time


def content(reply: Reply, shows_thinking: bool) -> list[dict[str, Any]]:
    """The blocks of a whole message: thinking, text, calls; those that are there."""
    blocks: list[dict[str, Any]] = []
    if reply.reasoning is not None:
        thinking = reply.reasoning if shows_thinking else ""
        blocks.append({"type": "thinking", "thinking": thinking, "signature": signature(reply.reasoning)})
    if reply.content:
        blocks.append({"type": "text", "text": reply.content})
    for call in reply.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": call.values()})
    return blocks


def stop_reason(reply: Reply, generation: Generation, max_tokens: int) -> dict[str, str | None]:
    """Why a message ended, and the stop sequence that ended it. `max_tokens` is the client's, whatever the context."""
    reason, sequence = "end_turn", None
    if generation.finish_reason == FinishReason.LENGTH:
        at_limit = len(generation.output_ids) >= max_tokens
        reason = "max_tokens" if at_limit else "model_context_window_exceeded"
    elif isinstance(generation.matched, str):
        reason, sequence = "stop_sequence", generation.matched
    elif reply.tool_calls:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": sequence}


def usage(num_prompt: int, num_sampled: int) -> dict[str, int]:
    """Tokens in and out. Nothing counts as read from a cache: `input_tokens` is all of the prompt."""
    return {
        "input_tokens": num_prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": num_sampled,
    }


def signature(thinking: str) -> str:
    """What comes with thinking, for clients that want one: it follows from the words and proves nothing."""
    return hashlib.blake2b(thinking.encode(), digest_size=24).hexdigest()


class Blocks:
    """A message's content as it comes: the events that begin, continue and end its blocks, one after the other."""

    def __init__(self, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._index = -1
        self._open: str | None = None  # the type of the block that has not ended
        self._thinking: list[str] = []
        self._input = _Input()

    def add(self, deltas: Sequence[Delta]) -> Iterator[dict[str, Any]]:
        """What more of the reply adds."""
        for delta in deltas:
            match delta:
                case TextDelta(text):
                    yield from self._ensure({"type": "text", "text": ""})
                    yield self._delta({"type": "text_delta", "text": text})
                case ReasoningDelta(text):
                    yield from self._ensure({"type": "thinking", "thinking": "", "signature": ""})
                    self._thinking.append(text)
                    if self._shows_thinking:
                        yield self._delta({"type": "thinking_delta", "thinking": text})
                case ToolCallBegin(_, id, name):
                    yield from self.end()
                    yield from self._ensure({"type": "tool_use", "id": id, "name": name, "input": {}})
                    self._input = _Input()
                case ToolCallArguments(_, text):
                    if ready := self._input.push(text):
                        yield self._input_delta(ready)

    def end(self) -> Iterator[dict[str, Any]]:
        """Ends the block that is open, if one is."""
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": signature("".join(self._thinking))})
        elif self._open == "tool_use" and (rest := self._input.take()):
            yield self._input_delta(rest)
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}

    def _ensure(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The block is open: it was, or it begins and the one before ends."""
        if self._open == block["type"]:
            return
        yield from self.end()
        self._index += 1
        self._open = block["type"]
        self._thinking.clear()
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _input_delta(self, text: str) -> dict[str, Any]:
        return self._delta({"type": "input_json_delta", "partial_json": text})


class _Input:
    """The JSON text of one call, as far as it can be the beginning of JSON.

    A stream begins to send a call before it is known to be one. Clients read what they have so far, and Anthropic's
    Python SDK raises where it cannot be read: of a call that turns out to be none, they get no more than the beginning.
    """

    def __init__(self) -> None:
        self._sent = ""
        self._held = ""
        self._next = 0  # the length at which all is read again

    def push(self, text: str) -> str:
        """What may go by now."""
        self._held += text
        return self.take() if len(self._sent) + len(self._held) >= self._next else ""

    def take(self) -> str:
        """What was held, if it can be read together with what went before."""
        whole = self._sent + self._held
        self._next = len(whole) + len(whole) // HOLD
        try:
            from_json(whole, allow_partial=True)
        except ValueError:
            return ""
        ready, self._held, self._sent = self._held, "", whole
        return ready
