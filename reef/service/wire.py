"""Bodies that clients send, and how they become types. Unknown fields are refused by name."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reef.errors import BadRequestError
from reef.types import Sampling

MAX_N = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_REFERENCES = 1024


class Body(BaseModel):
    """A JSON body: strict types (no "1" for 1, no true for 1.0), finite numbers, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


B = TypeVar("B", bound=Body)
Name = Annotated[str, Field(min_length=1, max_length=256)]


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def rendered(self) -> dict[str, str]:
        """What the chat template sees."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        message = {"role": self.role, "content": text}
        return message if self.name is None else {**message, "name": self.name}


class StreamOptions(Body):
    include_usage: bool = False


class SamplingBody(Body):
    """The fields that both OpenAI inference routes share, and SGLang's and vLLM's names for the rest."""

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = Field(None, ge=0, lt=2**63)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    user: str | None = None
    metadata: dict[str, str] | None = None

    def sampling(self, max_tokens: int) -> Sampling:
        """What the engine is told; fields that were not given are neutral."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOPS or "" in stop:
            raise BadRequestError(f"stop: expected 1 to {MAX_STOPS} strings that are not empty", param="stop")
        return Sampling(
            max_tokens=max_tokens,
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

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(SamplingBody):
    """POST /v1/completions: `prompt` is text or token ids."""

    prompt: str | list[int]
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @property
    def limit(self) -> int | None:
        return self.max_tokens


class GraderBody(Body):
    id: str
    version: str


class ReportBody(Body):
    """POST /reef/report. `agent_record_id` is the report's own id: the key under which it is stored once."""

    agent_record_id: Name | None = None
    score: float | None = None
    outcome: Literal["correct", "incorrect", "review", "error"] | None = None
    reason_code: str | None = None
    rewards: dict[str, float] | None = None
    reference_scores: list[float | None] | None = None
    feedback: str | dict[str, Any] | None = None
    references: list[Name] = Field(max_length=MAX_REFERENCES)
    group: Name | None = None
    grader: GraderBody | None = None
    truncated: bool = False
    metadata: dict[str, Any] | None = None

    def check(self) -> None:
        """Raises BadRequestError where fields contradict one another."""
        if self.reference_scores is not None and len(self.reference_scores) != len(self.references):
            raise BadRequestError(
                f"reference_scores: expected one per reference ({len(self.references)}), "
                f"got {len(self.reference_scores)}",
                param="reference_scores",
            )
        if len(set(self.references)) != len(self.references):
            raise BadRequestError("references: a receipt is named twice", param="references")


class ScenarioBody(Body):
    """POST /reef/scenarios."""

    name: Name
    recipe: str | None = None


class UpdateBody(Body):
    """POST /reef/scenarios/{s}/update: set the mode, or train once now in manual mode (an empty body)."""

    mode: Literal["auto", "manual"] | None = None


def parse(model: type[B], raw: bytes) -> B:
    """Check a body. Raises BadRequestError naming the first field that is wrong."""
    try:
        return model.model_validate_json(raw or b"{}")
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "json_invalid":
        raise BadRequestError(f"the body is not JSON: {detail['ctx']['error']}", code="invalid_json")
    if detail["type"] == "extra_forbidden":
        raise BadRequestError(f"unknown field {field}", param=field, code="unknown_field")
    if detail["type"] == "missing":
        raise BadRequestError(f"{field} is missing", param=field, code="missing_field")
    shown = repr(detail["input"])
    message = detail["msg"][:1].lower() + detail["msg"][1:]
    raise BadRequestError(f"{field or 'the body'}: {message}, got {shown[:120]}", param=field or None)


def parse_json(raw: bytes) -> Mapping[str, Any]:
    """Any JSON object. Raises BadRequestError."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise BadRequestError(f"expected a JSON object, got {type(value).__name__}")
    return value
