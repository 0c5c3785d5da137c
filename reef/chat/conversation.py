"""A conversation, whichever API it came through: what the chat template renders and what a turn is compared by."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool by the assistant."""

    id: str
    name: str
    arguments: str  # JSON text, as the model or the client wrote it

    def values(self) -> Any:
        """The arguments as JSON values; the text itself where it is not JSON."""
        try:
            return orjson.loads(self.arguments)
        except orjson.JSONDecodeError:
            return self.arguments


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `content` is text: parts are joined, other media is refused before it gets here."""

    role: str  # system | developer | user | assistant | tool
    content: str = ""
    reasoning: str | None = None  # of the assistant
    tool_calls: tuple[ToolCall, ...] = ()  # of the assistant
    tool_call_id: str | None = None  # of a tool's result: the call that it answers
    name: str | None = None

    def rendered(self) -> dict[str, Any]:
        """What chat templates expect: Hugging Face's names, arguments as values, nothing that is not there."""
        shown: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            shown["reasoning_content"] = self.reasoning
        if self.tool_calls:
            shown["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.values()}}
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            shown["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            shown["name"] = self.name
        return shown


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is rendered to a prompt."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # {"type": "function", "function": {"name", "description", "parameters"}}
    options: Mapping[str, Any] = field(default_factory=dict)  # variables of the template, e.g. enable_thinking
