"""What an engine answers, checked before it can become a record.

As many log-probabilities as ids, spans without gaps, a finish reason, a whole that begins with what was streamed.
Anything else is an EngineError (502), never mended.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from reef.errors import BadRequestError, EngineError
from reef.types import FinishReason, Generation, Ids, Span

MAX_ERROR_CHARS = 500  # of an engine's error body that is passed on


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """What one choice gained since the last chunk; `generation` is the whole of it, on its last chunk only."""

    choice: int
    ids: Sequence[int]
    logprobs: Sequence[float]
    top_logprobs: Sequence[tuple[tuple[float, int], ...]]
    spans: tuple[Span, ...]  # of the choice so far, as far as it is certain; of all tokens on its last chunk
    reproducible: bool  # as in Generation
    generation: Generation | None


@dataclass(slots=True)
class Progress:
    """What a stream has brought of one choice."""

    ids: list[int] = field(default_factory=list)
    spans: tuple[Span, ...] = ()
    ended: bool = False


def message_of(body: Any) -> str:
    """SGLang and ours answer {"error": {"message"}} or {"message"}."""
    inner = body.get("error", body) if isinstance(body, dict) else body
    return str(inner.get("message", inner)) if isinstance(inner, dict) else str(inner)


@contextlib.contextmanager
def expected_shape() -> Iterator[None]:
    """Reading a field that is not there, or not what it should be, is the engine's fault and no other's."""
    try:
        yield
    except orjson.JSONDecodeError:
        raise
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"the engine's answer has not the expected shape: {type(error).__name__}: {error}") from error


def raise_for_event(answer: Mapping[str, Any]) -> None:
    """SGLang begins every stream with status 200, and refuses a request in its first event."""
    if "error" not in answer:
        return
    error, message = answer["error"], message_of(answer)[:MAX_ERROR_CHARS]
    if isinstance(error, dict) and error.get("code") == 400:
        raise BadRequestError(f"the engine refused the request: {message}", code="engine_refused")
    raise EngineError(f"the engine failed: {message}")


def chunk_of(answer: Mapping[str, Any], choices: Sequence[Progress], reproducible: bool, undisturbed: bool) -> Chunk:
    """One server-sent event, whose ids and log-probabilities count from the start of the choice; moves its progress.

    Args:
        reproducible: as in Generation.
        undisturbed: no pause began since the request was sent.

    Raises:
        EngineError: it contradicts itself or the events before it.
    """
    index = int(answer.get("index", 0))
    if not 0 <= index < len(choices) or choices[index].ended:
        raise EngineError(f"the engine streamed choice {index}, which was not asked for or had ended")
    choice, meta = choices[index], answer["meta_info"]
    start = len(choice.ids)
    ids, entries, tops = _tokens(answer, start)
    ends = meta.get("finish_reason") is not None
    if len(ids) < start or (ends and ids[:start] != choice.ids):
        raise EngineError(f"the engine streamed {start} ids and then {len(ids)} that do not begin with them")
    choice.spans = _spans(meta, len(ids), undisturbed) if ends else _spans_so_far(meta, len(ids), undisturbed, choice)
    choice.ids += ids[start:]
    choice.ended = ends
    return Chunk(
        choice=index,
        ids=ids[start:],
        logprobs=[_logprob(entry) for entry in entries[start:]],
        top_logprobs=[_top(entry) for entry in tops[start:]],
        spans=choice.spans,
        reproducible=reproducible,
        generation=generation_of(answer, reproducible, undisturbed) if ends else None,
    )


def generation_of(answer: Mapping[str, Any], reproducible: bool, undisturbed: bool) -> Generation:
    """A choice that has ended; as `chunk_of`."""
    ids, entries, tops = _tokens(answer)
    meta = answer["meta_info"]
    finish: Mapping[str, Any] = meta.get("finish_reason") or {}
    try:
        reason = FinishReason(str(finish.get("type")))
    except ValueError:
        raise EngineError(f"the engine returned no known finish reason: {finish!r}") from None
    return Generation(
        output_ids=_ids(ids),
        logprobs=np.asarray([_logprob(entry) for entry in entries], dtype=np.float32),
        finish_reason=reason,
        spans=_spans(meta, len(ids), undisturbed),
        matched=finish.get("matched"),
        top_logprobs=tuple(_top(entry) for entry in tops),
        reproducible=reproducible,
    )


def _tokens(answer: Mapping[str, Any], start: int = 0) -> tuple[list[int], list[Any], list[Any]]:
    """Ids, and an entry (log-probability, id, ...) for each; top log-probabilities for each, or none at all.

    Those before `start` were checked when an earlier event of the stream brought them.
    """
    ids, meta = answer.get("output_ids"), answer["meta_info"]
    if not isinstance(ids, list):
        raise EngineError("the engine returned no token ids")
    if meta.get("completion_tokens", len(ids)) != len(ids):
        raise EngineError(f"the engine returned {len(ids)} of {meta['completion_tokens']} ids")
    entries = meta.get("output_token_logprobs") or []
    if len(entries) != len(ids):
        raise EngineError(f"the engine returned {len(ids)} ids and {len(entries)} log-probabilities")
    new = zip(entries[start:], ids[start:], strict=True)
    if any(type(token) is not int or entry[1] != token for entry, token in new):
        raise EngineError("the engine's log-probabilities belong to other ids than those it returned")
    tops = meta.get("output_top_logprobs") or []
    if tops and len(tops) != len(ids):
        raise EngineError(f"the engine returned {len(ids)} ids and {len(tops)} lists of top log-probabilities")
    return ids, entries, tops


def _ids(ids: Sequence[int]) -> Ids:
    return np.asarray(ids, dtype=np.int32)


def _logprob(entry: Sequence[Any]) -> float:
    """An engine that writes JSON has no -inf: it is null there."""
    return float("-inf") if entry[0] is None else float(entry[0])


def _top(entry: Sequence[Sequence[Any]] | None) -> tuple[tuple[float, int], ...]:
    return tuple((_logprob(item), int(item[1])) for item in entry or ())


def _spans_so_far(meta: Mapping[str, Any], num_tokens: int, undisturbed: bool, choice: Progress) -> tuple[Span, ...]:
    """Those of a choice that goes on, as far as they are certain.

    SGLang lists them at the end only. Until then it says which weights are loaded now: they made the tokens so far
    where no load came in between.
    """
    changed = any(span.release_id != meta.get("weight_version") for span in choice.spans)
    if not meta.get("weight_versions") and (changed or not undisturbed):
        return choice.spans
    return _spans(meta, num_tokens, undisturbed)


def _spans(meta: Mapping[str, Any], num_tokens: int, undisturbed: bool) -> tuple[Span, ...]:
    """Those of all tokens. `undisturbed`: no pause began since they were asked for, so one version made all."""
    listed = meta.get("weight_versions")
    if not listed:
        version = meta.get("weight_version")
        if version is None or not undisturbed:
            raise EngineError("the engine does not say which weights it used")
        return (Span(0, num_tokens, str(version)),) if num_tokens else ()
    spans = tuple(Span(int(item["start"]), int(item["end"]), str(item["version"])) for item in listed)
    spans = tuple(span for span in spans if span.end > span.start)
    edges = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != edges[:-1] or edges[-1] != num_tokens:
        raise EngineError(f"the engine's weight spans {listed} do not cover its {num_tokens} tokens")
    return spans
