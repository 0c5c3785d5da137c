"""Bodies that clients send, and how they become types. Unknown fields are refused by name."""

from collections.abc import Mapping, Sequence
from reprlib import Repr
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from reef.errors import BadRequestError
from reef.types import Report

MAX_REFERENCES = 1024
MAX_DEPTH = 64  # of lists and objects within one another in a field that takes any JSON
MAX_INT = 2**31 - 1
MAX_SHOWN = 120  # characters of a wrong value that its error repeats


class Body(BaseModel):
    """A JSON body: strict types (no "1" for 1, no true for 1.0), finite numbers, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


B = TypeVar("B", bound=Body)
Name = Annotated[str, Field(min_length=1, max_length=256)]
T = TypeVar("T")
ListOf = Annotated[list[T], Field(fail_fast=True)]
"""A list that is refused at its first wrong item: an error for each of a million would take gigabytes."""
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]


def _shallow(value: Any, levels: int = MAX_DEPTH) -> Any:
    """Refuses what could be read here and not written again."""
    if levels == 0:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for item in inner:
        _shallow(item, levels - 1)
    return value


JsonObject = Annotated[dict[str, Any], AfterValidator(_shallow)]


class GraderBody(Body):
    """Which grader made a report, by id and version."""

    id: str
    version: str


class ReportBody(Body):
    """POST /reef/report. `agent_record_id` is the report's own id: the key under which it is stored once."""

    agent_record_id: Name | None = None
    score: float | None = None
    outcome: Literal["correct", "incorrect", "review", "error"] | None = None
    reason_code: str | None = None
    rewards: dict[str, float] | None = None
    reference_scores: ListOf[float | None] | None = None
    feedback: str | JsonObject | None = None
    references: ListOf[Name] = Field(max_length=MAX_REFERENCES)
    group: Name | None = None
    grader: GraderBody | None = None
    truncated: bool = False
    metadata: JsonObject | None = None

    def check(self) -> None:
        """Raises BadRequestError where fields contradict one another."""
        if self.reference_scores is not None and len(self.reference_scores) != len(self.references):
            raise BadRequestError(
                f"reference_scores: expected one per reference ({len(self.references)}), "
                f"got {len(self.reference_scores)}",
                param="reference_scores",
            )
        if len(set(self.references)) != len(self.references):
            twice = next(item for item in self.references if self.references.count(item) > 1)
            raise BadRequestError(f"references: receipt {twice} is named twice", param="references")

    def report(self, id: str, scenario: str, now: float) -> Report:
        """The report that it is, under its id."""
        return Report(
            id=id,
            scenario=scenario,
            references=tuple(self.references),
            body=self.model_dump(exclude_unset=True),
            score=self.score,
            outcome=self.outcome,
            group=self.group,
            truncated=self.truncated,
            created_at=now,
        )


class ScenarioBody(Body):
    """POST /reef/scenarios."""

    name: Name
    recipe: str | None = None


class UpdateBody(Body):
    """POST /reef/scenarios/{s}/update: set the mode, or train once now in manual mode (an empty body)."""

    mode: Literal["auto", "manual"] | None = None


class RollbackBody(Body):
    """POST /reef/scenarios/{s}/rollback: the release to go back to."""

    release_id: Name


class PromoteBody(Body):
    """POST /reef/scenarios/{s}/promote: the release to serve; `force`: though its gate rejected it."""

    release_id: Name
    force: bool = False


class LoanBody(Body):
    """POST /reef/scenarios/{s}/releases/{r}/engine: the name of the loan; None: one is made."""

    loan: Name | None = None


def parse(model: type[B], raw: bytes) -> B:
    """Check a body. Raises BadRequestError naming the first field that is wrong."""
    broken: BadRequestError | None = None
    try:
        value = orjson.loads(raw or b"{}")
    except orjson.JSONDecodeError as error:
        broken = BadRequestError(f"the body is not JSON: {error}", code="invalid_json")
        try:  # with NaN and Infinity, as Python's json writes them: then the field's name says more
            value = from_json(raw)
        except ValueError:
            raise broken from None
    if not isinstance(value, dict):
        raise BadRequestError(f"expected a JSON object, got {type(value).__name__}")
    try:
        checked = model.model_validate(value)
    except ValidationError as error:
        raise _explained(error, value) from None
    if broken is not None:
        raise broken
    return checked


class _Shown(Repr):
    """A wrong value in an error, however large or deep it is."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxstring = self.maxother = MAX_SHOWN

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if x.bit_length() < MAX_SHOWN else f"an integer of {x.bit_length()} bits"


_SHOWN = _Shown()


def _explained(error: ValidationError, body: Any) -> BadRequestError:
    details = error.errors(include_url=False)
    fields = [_field(detail["loc"], detail["type"], body) for detail in details]
    # A field with several types has an error for each: the one that got furthest, past the type, says most.
    same = (i for i, field in enumerate(fields) if f"{field}.".startswith(f"{fields[0]}."))
    index = max(same, key=lambda i: (len(fields[i]), not details[i]["type"].endswith("_type")))
    detail, field = details[index], fields[index]
    if detail["type"] == "extra_forbidden":
        return BadRequestError(f"unknown field {field}", param=field, code="unknown_field")
    if detail["type"] == "missing":
        return BadRequestError(f"{field} is missing", param=field, code="missing_field")
    message = detail["msg"].removeprefix("Value error, ")
    shown = _SHOWN.repr(detail["input"])[:MAX_SHOWN]
    return BadRequestError(f"{field}: {message[:1].lower()}{message[1:]}, got {shown}", param=field)


def _field(location: Sequence[int | str], kind: str, body: Any) -> str:
    """`messages.0.content`: pydantic's location without the names of types, which are in no body."""
    parts: list[str] = []
    for part in location:
        inside = part in body if isinstance(body, dict) else isinstance(body, list) and isinstance(part, int)
        if inside:
            body = body[part]
        if inside or (kind == "missing" and part == location[-1]):
            parts.append(str(part))
    return ".".join(parts)


def parse_json(raw: bytes) -> Mapping[str, Any]:
    """Any JSON object. Raises BadRequestError."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequestError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise BadRequestError(f"expected a JSON object, got {type(value).__name__}")
    try:
        _shallow(value)
    except ValueError as error:
        raise BadRequestError(str(error)) from None
    return value
