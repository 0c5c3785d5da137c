"""What goes over the wire: arguments become bodies and headers, answers become nouns. Nothing here sends anything."""

import json
import math
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar
from urllib.parse import quote, urlsplit

import httpx

from reef_harness.errors import UnexpectedAnswer
from reef_harness.types import Choice, Completion, Json, Message, Release, ReportState, ToolCall

RECEIPT_HEADER = "x-reef-agent-record-id"
RELEASE_HEADER = "x-reef-release-id"


class Asking(TypedDict, total=False):
    """How an answer is asked for. All of it may be left out; None is the same as leaving it out."""

    n: int  # answers; 1
    temperature: float  # 1.0
    max_tokens: int | None  # of each answer; all that the context leaves
    seed: int | None
    logprobs: bool  # those of the sampled tokens come back in Choice.logprobs
    token_ids: bool  # sampled ids come back in Choice.token_ids, those of the prompt in Completion.prompt_token_ids
    scenario: str | None  # the client's own
    session: str | None
    purpose: str | None  # "eval" keeps the answers out of training
    release: str | None  # the one that must answer; the service refuses where it cannot
    parent: str | None  # the receipt that this turn continues; the service refuses where it does not
    tags: Mapping[str, str] | None  # x-reef-tag-NAME
    extra: Mapping[str, Any] | None  # further fields of the body: top_p, tools, stop, ...


class Grading(TypedDict, total=False):
    """What a report says beside its score. All of it may be left out."""

    outcome: str | None  # correct | incorrect | review | error; the last two never train
    reason_code: str | None
    rewards: Mapping[str, float] | None  # by component
    reference_scores: Sequence[float | None] | None  # one for each reference
    feedback: str | Mapping[str, Any] | None
    group: str | None  # whose rollouts are compared
    grader: tuple[str, str] | None  # id, version
    truncated: bool | None
    metadata: Mapping[str, Any] | None
    report_id: str | None  # made where it is not given


_T = TypeVar("_T")
_TAG_NAME = re.compile(r"[A-Za-z0-9._-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ASKING = frozenset(Asking.__annotations__)
_GRADING = frozenset(Grading.__annotations__)


# ---- out


def chat_body(messages: str | Sequence[Message], asking: Asking, **more: Any) -> Json:
    """The body of a chat; a string is one user message. Raises TypeError for an argument that there is not."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    logprobs = True if asking.get("logprobs") else None
    return _body({"messages": list(messages)}, asking, {"logprobs": logprobs, **more})


def completion_body(prompt: str | Sequence[int], asking: Asking) -> Json:
    """The body of a completion over text or ids. Raises TypeError for an argument that there is not."""
    logprobs = 0 if asking.get("logprobs") else None  # beside the sampled token's, those of so many others
    return _body({"prompt": prompt if isinstance(prompt, str) else list(prompt)}, asking, {"logprobs": logprobs})


def ask_headers(asking: Asking, scenario: str | None) -> dict[bytes, bytes]:
    """What a request for answers says in headers; ``scenario`` is the client's own. Text goes as UTF-8.

    Raises ValueError for a tag whose name cannot be part of a header's, and for line breaks and the like in values.
    """
    headers = {
        "x-reef-scenario": asking.get("scenario") or scenario,
        "x-reef-session": asking.get("session"),
        "x-reef-purpose": asking.get("purpose"),
        "x-reef-release": asking.get("release"),
        "x-reef-parent": asking.get("parent"),
    }
    for name, value in (asking.get("tags") or {}).items():
        if not _TAG_NAME.fullmatch(name):
            raise ValueError(f"tags: a name has letters, digits, '-', '_' and '.', got {name!r}")
        headers[f"x-reef-tag-{name}"] = value
    for name, value in given(headers).items():
        if _CONTROL.search(value) or value != value.strip():
            raise ValueError(f"{name}: expected a line of text without blanks around it, got {value!r}")
    return {name.encode(): value.encode() for name, value in given(headers).items()}


def report_body(references: str | Sequence[str], score: float | None, grading: Grading) -> Json:
    """The body of a report, with an id. Raises ValueError for a number that is not finite, TypeError as above."""
    _check_names(grading, _GRADING)
    _check_finite("score", [score])
    _check_finite("rewards", (grading.get("rewards") or {}).values())
    _check_finite("reference_scores", grading.get("reference_scores") or ())
    grader, scores = grading.get("grader"), grading.get("reference_scores")
    return given(
        {
            "agent_record_id": grading.get("report_id") or f"report-{uuid.uuid4().hex}",
            "references": [references] if isinstance(references, str) else list(references),
            "score": score,
            "outcome": grading.get("outcome"),
            "reason_code": grading.get("reason_code"),
            "rewards": grading.get("rewards"),
            "reference_scores": None if scores is None else list(scores),
            "feedback": grading.get("feedback"),
            "group": grading.get("group"),
            "grader": {"id": grader[0], "version": grader[1]} if grader else None,
            "truncated": grading.get("truncated"),
            "metadata": grading.get("metadata"),
        }
    )


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that were given: the service refuses nulls and unknown fields alike."""
    return {name: value for name, value in fields.items() if value is not None}


def part(name: str) -> str:
    """A name as one segment of a path, whatever is in it."""
    return quote(name, safe="")


def service_url(url: str) -> str:
    """A service's URL without the slash at its end. Raises ValueError where no request could be sent to it."""
    expected = f"expected a service's URL, http://HOST:PORT or https://HOST, got {url!r}"
    if not url.startswith(("http://", "https://")):
        raise ValueError(expected)
    try:
        parts = urlsplit(url)
        if not parts.hostname or parts.port == 0:  # reading the port refuses what is none
            raise ValueError("there is no host" if not parts.hostname else "port 0 is none")
        parts.hostname.encode("idna")
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL) as error:
        raise ValueError(f"{expected}: {error}") from None
    return url.rstrip("/")


def _body(prompt: Json, asking: Asking, more: Json) -> Json:
    _check_names(asking, _ASKING)
    fields = {
        "n": asking.get("n", 1),
        "temperature": asking.get("temperature", 1.0),
        "max_tokens": asking.get("max_tokens"),
        "seed": asking.get("seed"),
        "return_token_ids": True if asking.get("token_ids") else None,
        **more,
        **(asking.get("extra") or {}),
    }
    return prompt | given(fields)


def _check_names(arguments: Mapping[str, Any], known: frozenset[str]) -> None:
    if unknown := sorted(arguments.keys() - known):
        raise TypeError(f"unexpected argument {unknown[0]!r}: there are {', '.join(sorted(known))}")


def _check_finite(what: str, values: Iterable[float | None]) -> None:
    for value in values:
        if value is not None and not math.isfinite(value):
            raise ValueError(f"{what}: expected finite numbers, got {value}")


# ---- in


def json_object(response: httpx.Response) -> Json:
    """The JSON object that an answer holds. Raises UnexpectedAnswer where it holds something else."""
    try:
        body = json.loads(response.content)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise UnexpectedAnswer(
            f"{response.request.url} answered {response.status_code} without a JSON object: {response.text[:200]!r}"
        )
    return body


def listed(body: Json, name: str) -> list[Json]:
    """The objects that an answer lists as ``name``. Raises UnexpectedAnswer where it lists none."""
    found = body.get(name)
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise UnexpectedAnswer(f"expected a list of objects as {name!r}, got {found!r:.200}: is it a Reef service?")
    return found


def completion(response: httpx.Response) -> Completion:
    """A whole answer, of a chat or of a completion. Raises UnexpectedAnswer where it is not one of Reef's."""
    headers = response.headers
    return completion_of(
        json_object(response), headers.get(RECEIPT_HEADER), headers.get(RELEASE_HEADER), str(response.request.url)
    )


def completion_of(body: Json, receipt: str | None, release: str | None, url: str) -> Completion:
    """The body of a whole answer as a noun. ``receipt`` and ``release`` are those that headers name.

    Raises UnexpectedAnswer where a field is missing, where there is no choice, and where one has no receipt: nothing
    could grade it.
    """
    try:
        usage = body.get("usage") or {}
        if not body["choices"]:
            raise UnexpectedAnswer(f"{url} answered without any choice: is it a Reef service?")
        return Completion(
            choices=tuple(_choice(choice, receipt, url) for choice in body["choices"]),
            release=release or "",
            prompt_tokens=_checked(int, "usage.prompt_tokens", usage.get("prompt_tokens") or 0),
            completion_tokens=_checked(int, "usage.completion_tokens", usage.get("completion_tokens") or 0),
            raw=body,
            prompt_token_ids=_tuple(body.get("prompt_token_ids")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UnexpectedAnswer(f"{url} answered without {error}: is it a Reef service?") from error


def _choice(choice: Json, receipt: str | None, url: str) -> Choice:
    index = _checked(int, "a choice's index", choice["index"])
    own = choice.get("reef_agent_record_id") or (receipt if index == 0 else None)
    if own is None:
        field = f"choices[{index}].reef_agent_record_id"
        asked = f"{RECEIPT_HEADER} or {field}" if index == 0 else f"{field} (ask it for one answer at a time)"
        raise UnexpectedAnswer(f"{url} answered without {asked}: is it a Reef service?")
    message: Json = choice["message"] if "message" in choice else {"content": choice["text"]}
    logprobs = choice.get("logprobs")
    return Choice(
        index,
        _checked(str, f"choices[{index}]'s text", message["content"] or ""),
        choice["finish_reason"],
        _checked(str, f"choices[{index}]'s receipt", own),
        _tuple(choice.get("token_ids")),
        None if logprobs is None else sampled_logprobs(logprobs),
        message.get("reasoning_content"),
        tuple(_tool_call(call) for call in message.get("tool_calls") or ()),
    )


def sampled_logprobs(logprobs: Json) -> tuple[float, ...]:
    """Log-probabilities [N] of the sampled tokens, out of the shape of chats or that of completions."""
    if "token_logprobs" in logprobs:
        return tuple(map(float, logprobs["token_logprobs"]))
    return tuple(float(token["logprob"]) for token in logprobs["content"] or ())


def _checked(kind: type[_T], what: str, value: Any) -> _T:
    if not isinstance(value, kind):
        raise TypeError(f"{kind.__name__} as {what}: {value!r:.50}")
    return value


def _tool_call(call: Json) -> ToolCall:
    return ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])


def _tuple(values: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def report_state(body: Json) -> ReportState:
    """Where a report stands. Raises UnexpectedAnswer where a field is missing."""
    try:
        return ReportState(
            _checked(str, "agent_record_id", body["agent_record_id"]),
            _checked(str, "state", body["state"]),
            body.get("reason"),
            body.get("step"),
            body.get("release_id"),
            body,
        )
    except (KeyError, TypeError) as error:
        raise UnexpectedAnswer(f"a report's state came without {error}: {body}") from error


def release(entry: Json) -> Release:
    """One link of a chain. Raises UnexpectedAnswer where a field is missing."""
    try:
        return Release(
            _checked(str, "release_id", entry["release_id"]),
            entry["parent_release_id"],
            entry["content_id"],
            entry["operation"],
            _checked(int, "step", entry["step"]),
            entry["checkpoint"],
            entry["restorable"],
            entry["current"],
            entry["created_at"],
            entry["metrics"] or {},
            entry.get("number"),
            entry.get("policy_version"),
            entry.get("state"),
            entry,
        )
    except (KeyError, TypeError) as error:
        raise UnexpectedAnswer(f"a release came without {error}: {entry}") from error
