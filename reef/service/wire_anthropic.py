"""Bodies of Anthropic's Messages API: every field is taken or refused by name, and messages become a Conversation.

The same conversation sent to /v1/chat/completions becomes the same Conversation, so a turn may be continued through
either. Blocks of one text are joined by a newline, but for the assistant's: those are pieces of what it wrote.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from reef.chat.conversation import Conversation, Message, ToolCall
from reef.errors import BadRequestError
from reef.service.wire import MAX_INT, Body, JsonObject, ListOf, Name
from reef.service.wire_openai import MAX_STOPS, check_tools, shown_tool
from reef.types import Sampling

MIN_BUDGET_TOKENS = 1024  # of thinking, as Anthropic's API has it

# Claude Code puts an account of each request before the system prompt, for Anthropic's billing and not for the model.
# With it in the prompt no turn would be continued: it is another one each time.
BILLING = "x-anthropic-billing-header:"

CacheHint = JsonObject | None  # `cache_control`: a hint that changes no answer, and engines cache by themselves


class TextBlock(Body):
    """A piece of text. `citations` are of documents, which are not taken."""

    type: Literal["text"]
    text: str
    cache_control: CacheHint = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ThinkingBlock(Body):
    """What the assistant thought. The signature is not looked at: whether the words are the model's is compared."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Body):
    """Thinking that another service hid. Nobody here can read it: it counts as not sent."""

    type: Literal["redacted_thinking"]
    data: str


class Caller(Body):
    """Who made a call: the model itself."""

    type: Literal["direct"]


class ToolUseBlock(Body):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: Name
    name: str
    input: JsonObject
    cache_control: CacheHint = None
    caller: Caller | None = None
    toolset_name: None = None


class OtherBlock(BaseModel):
    """A block of another type. It is taken here to be refused with words that say more."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str


_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")  # no set: a list can be looked for


def _tag(block: Any) -> str:
    """Tags stand in the locations of errors; these are in no body, so that they can be told from fields."""
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return f"<{kind}>" if kind in _BLOCKS else "<other>"


def _text_tag(block: Any) -> str:
    tag = _tag(block)
    return tag if tag == "<text>" else "<other>"


TextOrOther = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[OtherBlock, Tag("<other>")], Discriminator(_text_tag)
]
Texts = str | ListOf[TextOrOther]


class ToolResultBlock(Body):
    """What a tool answered."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Texts | None = None
    is_error: bool | None = None
    cache_control: CacheHint = None
    toolset_name: None = None

    def message(self, at: str) -> Message:
        """The flag `is_error` has no place in a chat template: it is said in words, unless the text says it already."""
        text = _joined(self.content or "", f"{at}.content")
        if self.is_error and "error" not in text.casefold():
            text = f"Error: {text}"
        return Message("tool", text, tool_call_id=self.tool_use_id)


AnyBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock | OtherBlock
Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[OtherBlock, Tag("<other>")],
    Discriminator(_tag),
]
Placed = tuple[str, AnyBlock]  # where a block stands in the body, and the block


class MessageBody(Body):
    """One message; text alone stands for one text block."""

    role: Literal["user", "assistant", "system"]
    content: str | ListOf[Block]

    def blocks(self, at: str) -> list[Placed]:
        """Its blocks. Raises BadRequestError where the user or the system says nothing."""
        if isinstance(self.content, str):
            return [(f"{at}.content", TextBlock(type="text", text=self.content))]
        if not self.content and self.role != "assistant":  # the assistant's may be: a turn without a word
            raise BadRequestError(f"{at}.content: expected text or blocks, got an empty list", param=f"{at}.content")
        return [(f"{at}.content.{index}", block) for index, block in enumerate(self.content)]


class ToolBody(Body):
    """A tool that the client runs; `input_schema` is a JSON schema."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None
    cache_control: CacheHint = None
    eager_input_streaming: bool | None = None  # inputs are always streamed as they come
    allowed_callers: ListOf[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    input_examples: Annotated[list[Any], Field(max_length=0)] | None = None

    def shown(self) -> dict[str, Any]:
        """As the chat API's `function`."""
        described = {} if self.description is None else {"description": self.description}
        return {"name": self.name, **described, "parameters": self.input_schema}


def _tool_tag(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "<custom>" if kind in ("custom", None) else "<other>"


Tool = Annotated[Annotated[ToolBody, Tag("<custom>")] | Annotated[OtherBlock, Tag("<other>")], Discriminator(_tool_tag)]


class ToolChoice(Body):
    """Whether tools are used: as the model likes, or not at all."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model thinks before it answers. `display: omitted` keeps what it thought out of the answer."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None

    def check(self, max_tokens: int | None) -> None:
        """Raises BadRequestError. A budget within its bounds is taken: as with Anthropic it is an aim, no limit."""
        budget, at = self.budget_tokens, "thinking.budget_tokens"
        if self.type == "between_tools":
            _refuse("thinking.type", self.type)
        if self.type != "enabled":
            if budget is not None:
                raise BadRequestError(f"{at}: only thinking.type enabled has it, got {self.type}", param=at)
        elif budget is None:
            raise BadRequestError(f"{at} is missing: thinking.type enabled needs it", param=at, code="missing_field")
        elif budget < MIN_BUDGET_TOKENS or (max_tokens is not None and budget >= max_tokens):
            below = "" if max_tokens is None else f" and less than max_tokens ({max_tokens})"
            raise BadRequestError(f"{at}: expected at least {MIN_BUDGET_TOKENS}{below}, got {budget}", param=at)


class JsonFormat(Body):
    """The JSON schema that an answer must follow."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Body):
    """How much effort the model makes, and the form of its answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class ContextManagement(Body):
    """Edits of the history before it is read."""

    edits: ListOf[JsonObject] | None = None


_NO_EDITS = tuple({"type": "clear_thinking_20251015", "keep": keep} for keep in ("all", {"type": "all"}))


class Metadata(Body):
    """Whose request it is; kept with the body."""

    user_id: str | None = None


class CountBody(Body):
    """POST /v1/messages/count_tokens: what makes a prompt."""

    model: Name
    messages: ListOf[MessageBody] = Field(min_length=1)
    system: Texts | None = None
    tools: ListOf[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # an older name of `output_config.format`
    cache_control: CacheHint = None
    speed: Literal["standard"] | None = None
    context_management: ContextManagement | None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None
    thread: JsonObject | None = None

    def check(self) -> None:
        """Raises BadRequestError for what no engine here does, and for fields that contradict one another."""
        if self.messages[-1].role == "assistant":
            raise BadRequestError(
                f"messages.{len(self.messages) - 1}: the last message is the assistant's; beginning the answer for the "
                "model (prefill) is not supported, the last message must be the user's",
                param="messages",
                code="unsupported_prefill",
            )
        if self.thread is not None:  # with this code Anthropic's SDK goes on without: it sends the whole history
            raise BadRequestError(
                "thread: conversations are not held here for clients; send all messages, the turn before is found",
                param="thread",
                code="thread_unsupported_request",
            )
        if self.thinking is not None:
            self.thinking.check(self._limit)
        self._check_edits()
        self._check_tools()

    def conversation(self) -> Conversation:
        """What is rendered. Raises BadRequestError where a message cannot be."""
        options: dict[str, Any] = {}
        if self.output_config is not None and self.output_config.effort is not None:
            options["reasoning_effort"] = self.output_config.effort
        if self.thinking is not None:
            options["enable_thinking"] = self.thinking.type != "disabled"
        system = _without_billing(_joined(self.system, "system")) if self.system else ""
        hidden = self.tool_choice is not None and self.tool_choice.type == "none"
        return Conversation(
            messages=(*([Message("system", system)] if system else []), *_messages(self.messages)),
            tools=tuple(shown_tool(tool.shown()) for tool in self._custom_tools()) if not hidden else (),
            options=options,
        )

    @property
    def _limit(self) -> int | None:
        """Of what is sampled, thinking included; None: nothing is."""
        return None

    def _custom_tools(self) -> list[ToolBody]:
        return [tool for tool in self.tools or () if isinstance(tool, ToolBody)]

    def _check_tools(self) -> None:
        for index, tool in enumerate(self.tools or ()):
            if isinstance(tool, OtherBlock):
                raise BadRequestError(
                    f"tools.{index}: {tool.type[:80]} is not supported; expected type custom, with an input_schema",
                    param=f"tools.{index}.type",
                    code="unsupported_field",
                )
        check_tools([tool.name for tool in self._custom_tools()], "tools")
        choice = self.tool_choice
        if choice is None:
            return
        if (choice.type == "tool") != (choice.name is not None):
            raise BadRequestError(f"tool_choice.name: type {choice.type}; type tool alone has it", param="tool_choice")
        if choice.type in ("any", "tool"):
            _refuse("tool_choice.type", choice.type)
        if choice.disable_parallel_tool_use and self.tools:
            _refuse("tool_choice.disable_parallel_tool_use", "true")

    def _check_edits(self) -> None:
        """One is taken: that which leaves all as it is, and which agents send."""
        edits = (self.context_management and self.context_management.edits) or ()
        for index, edit in enumerate(edits):
            if edit not in _NO_EDITS:
                at = f"context_management.edits.{index}"
                raise BadRequestError(
                    f"{at}: edits of the history are not supported, but for clear_thinking_20251015 with keep: all",
                    param=at,
                    code="unsupported_field",
                )


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, le=MAX_INT)
    stop_sequences: ListOf[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MAX_INT)
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: Any = None
    diagnostics: Any = None
    inference_geo: Any = None

    @property
    def shows_thinking(self) -> bool:
        """Whether an answer says what the model thought, or only that it did."""
        return self.thinking is None or self.thinking.display != "omitted"

    def check(self) -> None:
        """Raises BadRequestError for what no engine here does, and for fields that contradict one another."""
        super().check()
        for field in ("container", "diagnostics", "inference_geo"):
            if getattr(self, field) is not None:
                _refuse(field, "it")
        if len(self.stop_sequences or ()) > MAX_STOPS or "" in (self.stop_sequences or ()):
            raise BadRequestError(
                f"stop_sequences: expected at most {MAX_STOPS} strings that are not empty", param="stop_sequences"
            )

    @property
    def _limit(self) -> int | None:
        return self.max_tokens

    def sampling(self) -> Sampling:
        """What the engine is told; fields that were not given are neutral."""
        form = (self.output_config and self.output_config.format) or self.output_format
        return Sampling(
            max_tokens=self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or -1,
            stop=tuple(self.stop_sequences or ()),
            json_schema=None if form is None else orjson.dumps(form.schema_).decode(),
        )


def _messages(bodies: Sequence[MessageBody]) -> Iterator[Message]:
    """Neighbours of one role are one message, as Anthropic's API has it."""
    for role, group in groupby(enumerate(bodies), key=lambda item: item[1].role):
        blocks = [placed for index, body in group for placed in body.blocks(f"messages.{index}")]
        if role == "assistant":
            yield _assistants(blocks)
        elif role == "user":
            yield from _users(blocks)
        else:
            yield Message("system", "\n".join(_text_of(at, block, role) for at, block in blocks))


def _users(blocks: Sequence[Placed]) -> Iterator[Message]:
    """What tools answered, which belongs to the assistant's calls right before; then what the user says."""
    results = [(at, block) for at, block in blocks if isinstance(block, ToolResultBlock)]
    texts = [_text_of(at, block, "user") for at, block in blocks if not isinstance(block, ToolResultBlock)]
    yield from (block.message(at) for at, block in results)
    if texts:
        yield Message("user", "\n".join(texts))


def _assistants(blocks: Sequence[Placed]) -> Message:
    texts, thoughts, calls = [], [], []
    for at, block in blocks:
        match block:
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                calls.append(ToolCall(block.id, block.name, orjson.dumps(block.input).decode()))
            case RedactedThinkingBlock():
                pass
            case _:
                texts.append(_text_of(at, block, "assistant"))
    return Message("assistant", "".join(texts), "".join(thoughts) or None, tuple(calls))


def _joined(content: Texts, at: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_text_of(f"{at}.{index}", block, None) for index, block in enumerate(content))


def _without_billing(system: str) -> str:
    return system.partition("\n")[2] if system.startswith(BILLING) else system


def _text_of(at: str, block: AnyBlock, role: str | None) -> str:
    """`role`: whose message it is in; None: of a text that nothing else can be in."""
    if isinstance(block, TextBlock):
        return block.text
    kind = block.type[:80]
    if isinstance(block, OtherBlock) and kind not in _BLOCKS:
        why = f"{kind} is not supported, this model reads text"
    else:
        why = f"{kind} has no place {'here' if role is None else f'in a message of the {role}'}"
    raise BadRequestError(f"{at}: {why}", param=f"{at}.type", code="unsupported_content")


def _refuse(field: str, value: str) -> None:
    raise BadRequestError(f"{field}: {value} is not supported", param=field, code="unsupported_field")
