"""An assistant's reply in parts, as a parser finds them in its text: whole, and piece by piece while it streams.

    text -> ReplyParser.push -> deltas ... -> ReplyParser.finish -> the last deltas -> ReplyParser.reply

The APIs (OpenAI's, Anthropic's) turn deltas into their own events and the reply into their own message.
"""

from dataclasses import dataclass
from typing import Protocol

from reef.chat.conversation import Message, ToolCall


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the visible text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """Call number `index` (0, 1, ... within the reply) begins; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of call number `index`."""

    index: int
    text: str


Delta = TextDelta | ReasoningDelta | ToolCallBegin | ToolCallArguments


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole reply. A tool call that was cut or is not valid is text here, as the model wrote it."""

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self) -> Message:
        """The reply as a message of the conversation."""
        return Message("assistant", self.content, self.reasoning, self.tool_calls)


class ReplyParser(Protocol):
    """Finds reasoning and tool calls in the text of one choice. Used once."""

    def push(self, text: str) -> list[Delta]:
        """What is certain after this much more text; text that may be the beginning of a marker waits."""

    def finish(self) -> list[Delta]:
        """What still waited, now that nothing follows."""

    @property
    def reply(self) -> Reply:
        """The whole reply, after `finish`."""


class PlainParser:
    """Of a model without markers: everything is text."""

    def __init__(self) -> None:
        self._text: list[str] = []

    def push(self, text: str) -> list[Delta]:
        self._text.append(text)
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Delta]:
        return []

    @property
    def reply(self) -> Reply:
        return Reply("".join(self._text))
