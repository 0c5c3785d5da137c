"""The body of OpenAI's Responses: every field of the API is taken or refused by name."""

from collections.abc import Sequence
from typing import Any, Final, Literal

import orjson
from pydantic import Field

from reef.chat.conversation import Conversation, Message
from reef.errors import BadRequestError
from reef.service import wire_tools
from reef.service.wire import MAX_INT, Body, JsonObject, ListOf
from reef.service.wire_items import Item, to_messages, unsupported
from reef.service.wire_openai import MAX_STOPS
from reef.service.wire_tools import Tool, Tools
from reef.types import Sampling

INCLUDE: Final = "reasoning.encrypted_content"  # always null: nothing here is encrypted
_REFUSED: Final = (
    "access_programs",
    "background_options",
    "context_management",
    "conversation",
    "image",
    "moderation",
    "prompt",
    "prompt_cache_options",
)


class Reasoning(Body):
    """How much the model is to think. No summary is made of it: the thinking itself is in the answer."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None  # its older name
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class TextFormat(Body):
    """What the text must be: anything, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None

    def grammar(self) -> str | None:
        """The JSON schema that the engine holds the answer to; None: anything goes."""
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise BadRequestError(
                f"text.format.schema: type is {self.type}, and json_schema alone needs it", param="text.format.schema"
            )
        if self.schema_ is not None:
            return orjson.dumps(self.schema_).decode()
        return '{"type":"object"}' if self.type == "json_object" else None


class TextSettings(Body):
    """The `text` field."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class StreamOptions(Body):
    """The `stream_options` field; no padding is sent."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(Body):
    """POST /v1/responses."""

    input: str | ListOf[Item] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: ListOf[Tool] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextSettings | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include: ListOf[str] | None = None
    metadata: dict[str, str] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None  # the receipt has those of every token
    max_tool_calls: int | None = Field(None, ge=0)  # of the provider's own tools, of which there are none
    store: bool | None = None  # every answer is
    service_tier: Literal["auto", "default"] | None = None
    user: str | None = None  # hints and notes that change no answer
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    client_metadata: JsonObject | None = None
    seed: int | None = Field(None, ge=0, lt=2**63)  # what engines know beyond the API
    top_k: int | None = Field(None, ge=-1, le=MAX_INT)
    min_p: float | None = Field(None, ge=0, le=1)
    stop: str | ListOf[str] | None = None
    chat_template_kwargs: JsonObject | None = None
    access_programs: Any = None
    background_options: Any = None
    context_management: Any = None
    conversation_: Any = Field(None, alias="conversation")
    image: Any = None
    moderation: Any = None
    prompt: Any = None
    prompt_cache_options: Any = None

    def functions(self) -> Tools:
        """The tools that the model is told of."""
        return Tools(self.tools or () if self.tool_choice != "none" else ())

    def check(self) -> None:
        """Raises BadRequestError for what nothing here does, and for fields that contradict one another."""
        for field in _REFUSED:
            if getattr(self, "conversation_" if field == "conversation" else field) is not None:
                raise unsupported(field, "it")
        for name in self.include or ():
            if name != INCLUDE:
                raise unsupported("include", name)
        if self.stream_options is not None and not self.stream:
            raise BadRequestError("stream_options needs stream: true", param="stream_options")
        if not self.input and self.previous_response_id is None:
            raise BadRequestError("input is missing", param="input", code="missing_field")
        self._check_tools()

    def _check_tools(self) -> None:
        wire_tools.check(self.tools or ())
        if self.parallel_tool_calls is False and self.tools:
            raise unsupported("parallel_tool_calls", "false")
        if self.tool_choice in (None, "none", "auto"):
            return
        if isinstance(self.tool_choice, str) and self.tool_choice != "required":
            raise BadRequestError(
                f"tool_choice: expected none, auto, required or an object, got {self.tool_choice[:80]!r}",
                param="tool_choice",
            )
        shown = self.tool_choice if isinstance(self.tool_choice, str) else self.tool_choice.get("type", "an object")
        raise unsupported("tool_choice", str(shown)[:80])

    def sampling(self) -> Sampling:
        """What the engine is told; fields that were not given are neutral. `max_tokens` 0: all that the context has."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOPS or "" in stop:
            raise BadRequestError(f"stop: expected 1 to {MAX_STOPS} strings that are not empty", param="stop")
        wanted = self.text.format if self.text is not None else None
        return Sampling(
            max_tokens=self.max_output_tokens or 0,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or -1,
            min_p=self.min_p or 0.0,
            stop=tuple(stop),
            seed=self.seed,
            json_schema=wanted.grammar() if wanted is not None else None,
        )

    def messages(self) -> list[Message]:
        """The input alone, without the instructions. Raises BadRequestError where an item cannot be a message."""
        if isinstance(self.input, str):
            return [Message("user", self.input)]
        return to_messages(self.input or ())

    def conversation(self, before: Sequence[Message] = ()) -> Conversation:
        """What is rendered. `before`: the messages of the responses that this one continues.

        Their instructions are not among them: the API says that each response has its own.
        """
        options = dict(self.chat_template_kwargs or {})
        effort = self.reasoning.effort if self.reasoning is not None else None
        if effort is not None:
            options.setdefault("reasoning_effort", effort)
            options.setdefault("enable_thinking", effort != "none")
        system = [Message("system", self.instructions)] if self.instructions else []
        return Conversation((*system, *before, *self.messages()), tuple(self.functions().told), options)
