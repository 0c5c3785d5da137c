"""A conversation, whichever API it came through: what the chat template renders and what a turn is compared by."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

MAX_DEPTH = 64  # of lists and objects within one another in a call's arguments: what is read must be written again


def read_arguments(text: str) -> Any:
    """The JSON values of a call's arguments. Raises ValueError where it is no JSON, or nested over MAX_DEPTH."""
    values = orjson.loads(text)
    if text.count("[") + text.count("{") > MAX_DEPTH:  # else it cannot be that deep
        level = [values]
        for _ in range(MAX_DEPTH):
            level = [inner for value in level for inner in _inside(value)]
        if any(isinstance(value, dict | list) for value in level):
            raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    return values


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool by the assistant."""

    id: str
    name: str
    arguments: str  # JSON text, as the model or the client wrote it

    def values(self) -> Any:
        """The arguments as JSON values, {} where nothing is said; the text where `read_arguments` does not take it."""
        try:
            return read_arguments(self.arguments) if self.arguments.strip() else {}
        except ValueError:
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

    def rendered(self, arguments_as_text: bool = False) -> dict[str, Any]:
        """What chat templates expect: Hugging Face's names, arguments as values or text, nothing that is not there."""
        shown: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            shown["reasoning_content"] = self.reasoning
        if self.tool_calls:
            shown["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": call.arguments if arguments_as_text else call.values(),
                    },
                }
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
