"""Bodies of OpenAI's routes: every field of the API is taken or refused by name, and messages become a Conversation."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

import orjson
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from reef.chat.conversation import Conversation, Message, ToolCall
from reef.errors import BadRequestError
from reef.service.wire import MAX_INT, Body, JsonObject, ListOf, TokenId
from reef.types import Sampling

MAX_N = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_IDS = 256
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class TextPart(Body):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """A refusal that the assistant sent as a part."""

    type: Literal["refusal"]
    refusal: str


class MediaPart(BaseModel):
    """A part that is not text. It is taken here to be refused with words that say more."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: Literal["image_url", "input_audio", "file"]


MEDIA = get_args(MediaPart.model_fields["type"].annotation)


def _kind_of_part(part: Any) -> str:
    """Names that stand in no body, so that they are not taken for fields of one."""
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return "a refusal" if kind == "refusal" else "media" if kind in MEDIA else "a text"


Part = Annotated[
    Annotated[TextPart, Tag("a text")] | Annotated[RefusalPart, Tag("a refusal")] | Annotated[MediaPart, Tag("media")],
    Discriminator(_kind_of_part),
]


class FunctionCall(Body):
    """A function's name and the JSON text of its arguments."""

    name: str
    arguments: str
    parsed_arguments: Any = None  # OpenAI's SDK: its reading of them


class ToolCallBody(Body):
    """A call that the assistant made; `index` is what clients keep of a stream."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class MessageBody(Body):
    """One message, as a client wrote it or as it got it from us: what is always null in our answers may come back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | ListOf[Part] | None = None
    name: str | None = None
    tool_calls: ListOf[ToolCallBody] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    provider_specific_fields: JsonObject | None = None  # LiteLLM's own notes
    parsed: Any = None  # OpenAI's SDK: its reading of the content

    def message(self, at: str) -> Message:
        """Raises BadRequestError, naming the field below `at`."""
        if self.role != "assistant":
            for field in ("tool_calls", "reasoning_content", "reasoning", "refusal"):
                if getattr(self, field):
                    raise BadRequestError(f"{at}.{field}: only the assistant has it", param=f"{at}.{field}")
        if self.role == "tool" and self.tool_call_id is None:
            raise BadRequestError(
                f"{at}.tool_call_id is missing: whose result is this?", param=f"{at}.tool_call_id", code="missing_field"
            )
        says_else = self.tool_calls or self._reasoning or self.refusal
        if self.content is None and not (self.role == "assistant" and says_else):
            raise BadRequestError(
                f"{at}.content: expected text or parts of text, got None", param=f"{at}.content", code="missing_field"
            )
        content = _text(self.content, f"{at}.content") if self.content is not None else self.refusal or ""
        reasoning = self._reasoning
        if reasoning is not None and reasoning.strip() == content.strip():
            reasoning = None  # some clients send one text as both: it was said once
        return Message(
            role=self.role,
            content=content,
            reasoning=reasoning or None,
            tool_calls=tuple(
                ToolCall(call.id, call.function.name, call.function.arguments) for call in self.tool_calls or ()
            ),
            tool_call_id=self.tool_call_id,
            name=self.name,
        )

    @property
    def _reasoning(self) -> str | None:
        return self.reasoning_content if self.reasoning_content is not None else self.reasoning


def _text(content: str | Sequence[TextPart | RefusalPart | MediaPart], at: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, MediaPart):
            raise BadRequestError(
                f"{at}.{index}: {part.type} is not supported, this model reads text",
                param=f"{at}.{index}.type",
                code="unsupported_content",
            )
        texts.append(part.text if isinstance(part, TextPart) else part.refusal)
    return "".join(texts)


class FunctionBody(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ToolBody(Body):
    """One tool. Functions are the only kind."""

    type: Literal["function"]
    function: FunctionBody


class NamedFunction(Body):
    """Which function must be called."""

    name: str


class NamedTool(Body):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    function: NamedFunction


class StreamOptions(Body):
    """OpenAI's `stream_options`: whether the usage is sent at the end of a stream."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class JsonSchemaFormat(Body):
    """The schema of a `response_format`."""

    name: str
    description: str | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """What the text must be: anything, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def grammar(self) -> str | None:
        """The JSON schema that the engine holds the answer to; None: anything goes."""
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise BadRequestError(
                f"response_format.json_schema: type is {self.type}, and json_schema alone needs it",
                param="response_format.json_schema",
            )
        if self.json_schema is not None:
            return orjson.dumps(self.json_schema.schema_).decode()
        return '{"type":"object"}' if self.type == "json_object" else None


class SamplingBody(Body):
    """The fields that both OpenAI inference routes share, and SGLang's and vLLM's names for the rest."""

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_INT)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    stop: str | ListOf[str] | None = None
    stop_token_ids: ListOf[TokenId] | None = Field(None, max_length=MAX_STOP_IDS)
    ignore_eos: bool = False
    seed: int | None = Field(None, ge=0, lt=2**63)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    user: str | None = None
    metadata: dict[str, str] | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def include_usage(self) -> bool:
        """Whether the usage comes at the end of a stream."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        """Raises BadRequestError for what no engine here does."""
        _refuse("logit_bias", self.logit_bias or None)
        if self.stream_options is not None and not self.stream:
            raise BadRequestError("stream_options needs stream: true", param="stream_options")

    def sampling(self) -> Sampling:
        """What the engine is told; fields that were not given are neutral. `max_tokens` 0: all that the context has."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOPS or "" in stop:
            raise BadRequestError(f"stop: expected 1 to {MAX_STOPS} strings that are not empty", param="stop")
        return Sampling(
            max_tokens=self.max_tokens or 0,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or -1,
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            min_tokens=self.min_tokens or 0,
            stop=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            seed=self.seed,
        )


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: ListOf[MessageBody] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    tools: ListOf[ToolBody] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: JsonObject | None = None
    prompt_cache_key: str | None = None  # hints that change no answer
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None  # every answer is
    service_tier: Literal["auto", "default"] | None = None
    modalities: ListOf[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None

    def check(self) -> None:
        """Raises BadRequestError for what no engine here does, and for fields that contradict one another."""
        super().check()
        for field in ("audio", "prediction", "web_search_options", "functions", "function_call"):
            _refuse(field, getattr(self, field))
        if self.top_logprobs and not self.logprobs:
            raise BadRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.parallel_tool_calls is False and self.tools:
            _refuse("parallel_tool_calls", "false")
        check_tools([tool.function.name for tool in self.tools or ()], "tools")
        if self.tool_choice in ("none", "auto", None):
            return
        if not self.tools:
            raise BadRequestError("tool_choice needs tools", param="tool_choice")
        _refuse("tool_choice", "required" if self.tool_choice == "required" else "a named function")

    def sampling(self) -> Sampling:
        """As the engine is told; `max_completion_tokens` is the newer name of `max_tokens`."""
        changes: dict[str, Any] = {"max_tokens": self.max_completion_tokens or self.max_tokens or 0}
        if self.response_format is not None:
            changes["json_schema"] = self.response_format.grammar()
        return replace(super().sampling(), **changes)

    def conversation(self) -> Conversation:
        """What is rendered. Raises BadRequestError where a message cannot be."""
        options = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            options.setdefault("reasoning_effort", self.reasoning_effort)
            options.setdefault("enable_thinking", self.reasoning_effort != "none")
        tools = self.tools if self.tool_choice != "none" else None
        return Conversation(
            messages=tuple(body.message(f"messages.{index}") for index, body in enumerate(self.messages)),
            tools=tuple(shown_tool(tool.function.model_dump(exclude_none=True)) for tool in tools or ()),
            options=options,
        )


class CompletionBody(SamplingBody):
    """POST /v1/completions: `prompt` is text or token ids."""

    prompt: str | ListOf[TokenId]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        """Raises BadRequestError for what no engine here does, and for fields that contradict one another."""
        super().check()
        _refuse("suffix", self.suffix)
        if self.best_of not in (None, self.n or 1):
            _refuse("best_of", f"{self.best_of} with n {self.n or 1}")
        if self.echo and self.logprobs is not None:
            _refuse("logprobs", f"{self.logprobs} with echo (the prompt was not sampled)")


def check_tools(names: Sequence[str], at: str) -> None:
    """Raises BadRequestError for a name that no model could write, and for one that stands twice."""
    known: set[str] = set()
    for index, name in enumerate(names):
        if not TOOL_NAME.fullmatch(name):
            raise BadRequestError(
                f"{at}.{index}: a function's name has 1-128 letters, digits, '_', '-' or '.', got {name[:80]!r}",
                param=f"{at}.{index}",
            )
        if name in known:
            raise BadRequestError(f"{at}.{index}: {name} is there twice", param=f"{at}.{index}")
        known.add(name)


def shown_tool(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """A function as chat templates expect it: OpenAI's shape, without `strict`."""
    return {"type": "function", "function": {name: value for name, value in function.items() if name != "strict"}}


def _refuse(field: str, value: Any) -> None:
    if value is not None:
        shown = value if isinstance(value, str) else "it"
        raise BadRequestError(f"{field}: {shown} is not supported", param=field, code="unsupported_field")
