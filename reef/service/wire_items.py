"""Items of OpenAI's Responses, as clients send them, and the messages that they are.

What one reply consists of (reasoning, text, calls) comes as items of its own and is put together again:

    reasoning, message, function_call, function_call  ->  one message of the assistant
    function_call_output                              ->  one message of a tool
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Discriminator, Field, Tag

from reef.chat.conversation import Message, ToolCall
from reef.errors import BadRequestError
from reef.service.wire import Body, JsonObject, ListOf


class TextContent(Body):
    """One part of text, as a client writes it or as it got it from us."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: JsonObject | None = None  # a hint that changes no answer
    parsed: Any = None  # what OpenAI's SDK read out of the text


class RefusalContent(Body):
    """A refusal that the assistant sent as a part."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class Other(BaseModel):
    """A part, item or tool of a kind that is not taken. It is read to be refused by its name."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str


def kind_of(known: Sequence[str], default: str | None = None) -> Discriminator:
    """Tells items apart by their type: one of `known`, else `other`; what has no type is a `default`.

    Tags stand in the locations of errors; in brackets they are in no body, so that they can be told from fields.
    """

    def kind(value: Any) -> str:
        name = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)
        return f"<{name}>" if name in known else "<other>"

    return Discriminator(kind)


def _part_kind(value: Any) -> str:
    name = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if name == "refusal":
        return "<refusal>"
    texts = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
    return "<text>" if name in texts else "<other>"


Part = Annotated[
    Annotated[TextContent, Tag("<text>")]
    | Annotated[RefusalContent, Tag("<refusal>")]
    | Annotated[Other, Tag("<other>")],
    Discriminator(_part_kind),
]
Status = Literal["in_progress", "completed", "incomplete"] | None


class MessageItem(Body):
    """A message, with or without its type."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | ListOf[Part]
    id: str | None = None
    status: Status = None
    phase: str | None = None


class FunctionCallItem(Body):
    """A call that the assistant made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status = None
    # The second name is what OpenAI's SDK makes of it in `model_dump()`.
    async_: Literal[False] | None = Field(None, validation_alias=AliasChoices("async", "async_"))
    caller: JsonObject | None = None
    namespace: str | None = None
    parsed_arguments: Any = None  # what OpenAI's SDK read out of `arguments`


class FunctionOutputItem(Body):
    """A tool's result."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | ListOf[Part]
    id: str | None = None
    status: Status = None
    name: str | None = None
    caller: JsonObject | None = None
    namespace: str | None = None


class ReasoningItem(Body):
    """What the assistant thought. Only `content` is that; a summary says it in other words, and is not rendered."""

    type: Literal["reasoning"]
    summary: ListOf[Part] = Field(default_factory=list)
    content: ListOf[Part] | None = None
    id: str | None = None
    encrypted_content: str | None = None
    status: Status = None


AnyItem = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem | Other
Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[Other, Tag("<other>")],
    kind_of(("message", "function_call", "function_call_output", "reasoning"), default="message"),
]


def to_messages(items: Sequence[AnyItem]) -> list[Message]:
    """The conversation that items are. Raises BadRequestError, naming the item that cannot be a message."""
    made: list[Message] = []
    reply: _Reply | None = None  # the assistant's message that the next item may belong to
    for index, item in enumerate(items):
        at = f"input.{index}"
        if isinstance(item, Other):
            raise _refused_item(item, at)
        assistants = not isinstance(item, FunctionOutputItem) and getattr(item, "role", "assistant") == "assistant"
        if reply is not None and not (assistants and reply.takes(item)):
            made.append(reply.message())
            reply = None
        if assistants:
            reply = reply or _Reply()
            reply.add(item, at)
        elif isinstance(item, FunctionOutputItem):
            made.append(Message("tool", _text(item.output, f"{at}.output"), tool_call_id=item.call_id, name=item.name))
        elif isinstance(item, MessageItem):
            made.append(Message(item.role, _text(item.content, f"{at}.content")))
    return [*made, reply.message()] if reply is not None else made


class _Reply:
    """One message of the assistant, out of its items."""

    def __init__(self) -> None:
        self._reasoning: list[str] = []
        self._texts: list[str] = []
        self._calls: list[ToolCall] = []

    def takes(self, item: object) -> bool:
        """Whether an item belongs to it: thinking begins a new message, and so does text that follows text."""
        if isinstance(item, ReasoningItem):
            return not self._texts and not self._calls
        return not isinstance(item, MessageItem) or not self._texts or bool(self._calls)

    def add(self, item: object, at: str) -> None:
        if isinstance(item, ReasoningItem):
            if item.encrypted_content:
                raise unsupported(f"{at}.encrypted_content", "thinking that another service encrypted")
            self._reasoning.append(_text(item.content or (), f"{at}.content"))
        elif isinstance(item, MessageItem):
            self._texts.append(_text(item.content, f"{at}.content"))
        elif isinstance(item, FunctionCallItem):
            name = qualified(item.namespace, item.name)
            self._calls.append(ToolCall(item.call_id, name, item.arguments))

    def message(self) -> Message:
        return Message("assistant", "".join(self._texts), "".join(self._reasoning) or None, tuple(self._calls))


def _text(content: str | Sequence[TextContent | RefusalContent | Other], at: str) -> str:
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if isinstance(part, Other):
            raise BadRequestError(
                f"{at}.{index}: {part.type[:80]} is not supported, this model reads text",
                param=f"{at}.{index}.type",
                code="unsupported_content",
            )
    return "".join(part.text for part in content if not isinstance(part, Other))


def _refused_item(item: Other, at: str) -> BadRequestError:
    if item.type == "item_reference":
        return unsupported(at, "item_reference", "send the item itself, or previous_response_id")
    return unsupported(at, f"an item of type {item.type[:80]}")


def qualified(namespace: str | None, name: str) -> str:
    """The one name by which a model knows a function of a namespace."""
    return name if namespace is None else f"{namespace}.{name}"


def unsupported(field: str, shown: str, instead: str | None = None) -> BadRequestError:
    """The refusal of a field by its name."""
    more = f": {instead}" if instead else ""
    return BadRequestError(f"{field}: {shown} is not supported{more}", param=field, code="unsupported_field")
