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
from reef.types import FinishReason, Generation, Span

_MINUS_INF = float("-inf")  # null in an engine's JSON, which has no name for it
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
    """What a stream has brought of one choice: ids, and as many log-probabilities."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[float, int], ...]] = field(default_factory=list)  # as many, or none
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


def check_prompt(answer: Mapping[str, Any], num_prompt_tokens: int) -> None:
    """The engine has read all of the prompt and nothing else, where it says how much it has read.

    One that is attached may cut what is too long for it, or put a token before the first. What it then sampled follows
    another prompt than the receipt would hold.

    Raises:
        EngineError: it has read another number of tokens.
    """
    meta = answer["meta_info"]
    told = meta.get("prompt_tokens") if meta.get("completion_tokens") else None  # of none sampled nothing is recorded
    if told is not None and told != num_prompt_tokens:
        raise EngineError(f"the engine read {told} prompt tokens, it was sent {num_prompt_tokens}")


def chunk_of(answer: Mapping[str, Any], choices: Sequence[Progress], reproducible: bool, undisturbed: bool) -> Chunk:
    """One server-sent event: all tokens of a choice so far, or those that are new; moves its progress.

    Which of the two it is its counts say. With `--incremental-streaming-output`, which Reef starts its engines with,
    each token comes once, and a stream takes time in proportion to its length.

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
    finish = meta.get("finish_reason")
    new = _new_tokens(answer, choice)
    choice.ids += new.ids
    choice.logprobs += new.logprobs
    choice.top_logprobs += new.top_logprobs
    spans = _spans if finish is not None else _spans_so_far
    choice.spans = spans(meta, len(choice.ids), undisturbed, choice)
    choice.ended = finish is not None
    return Chunk(
        choice=index,
        ids=new.ids,
        logprobs=new.logprobs,
        top_logprobs=new.top_logprobs,
        spans=choice.spans,
        reproducible=reproducible,
        generation=_generation(choice, finish, reproducible) if choice.ended else None,
    )


def generation_of(answer: Mapping[str, Any], reproducible: bool, undisturbed: bool) -> Generation:
    """A choice that has ended, in one answer; as `chunk_of`."""
    chunk = chunk_of({**answer, "index": 0}, [choice := Progress()], reproducible, undisturbed)
    return chunk.generation or _generation(choice, None, reproducible)


def _generation(choice: Progress, finish: Mapping[str, Any] | None, reproducible: bool) -> Generation:
    finish = finish or {}
    try:
        reason = FinishReason(str(finish.get("type")))
    except ValueError:
        raise EngineError(f"the engine returned no known finish reason: {finish!r}") from None
    if choice.top_logprobs and len(choice.top_logprobs) != len(choice.ids):
        raise EngineError(
            f"the engine returned {len(choice.ids)} ids and {len(choice.top_logprobs)} lists of top log-probabilities"
        )
    return Generation(
        output_ids=np.asarray(choice.ids, dtype=np.int32),
        logprobs=np.asarray(choice.logprobs, dtype=np.float32),
        finish_reason=reason,
        spans=choice.spans,
        matched=finish.get("matched"),
        top_logprobs=tuple(choice.top_logprobs),
        reproducible=reproducible,
    )


@dataclass(frozen=True, slots=True)
class _Tokens:
    """What one event adds to a choice: ids, a log-probability for each; top log-probabilities for each, or none."""

    ids: list[int]
    logprobs: list[float]
    top_logprobs: list[tuple[tuple[float, int], ...]]


def _new_tokens(answer: Mapping[str, Any], choice: Progress) -> _Tokens:
    """Those before were checked when an earlier event of the stream brought them."""
    ids, meta, start = answer.get("output_ids"), answer["meta_info"], len(choice.ids)
    if not isinstance(ids, list):
        raise EngineError("the engine returned no token ids")
    total = meta.get("completion_tokens", len(ids))
    if _repeats_its_last(ids, meta, choice):
        return _Tokens([], [], [])
    if start and start + len(ids) == total:
        first = 0  # only what is new
    elif len(ids) == total:
        first = start
        if total < start or (meta.get("finish_reason") is not None and ids[:start] != choice.ids):
            raise EngineError(f"the engine streamed {start} ids and then {total} that do not begin with them")
    else:
        before = f", after {start}" if start else ""
        raise EngineError(f"the engine returned {len(ids)} of {total} ids{before}")
    entries = meta.get("output_token_logprobs") or []
    if len(entries) != len(ids):
        raise EngineError(f"the engine returned {len(ids)} ids and {len(entries)} log-probabilities")
    ids, entries = ids[first:], entries[first:]
    if [entry[1] for entry in entries] != ids or not set(map(type, ids)) <= {int}:
        raise EngineError("the engine's log-probabilities belong to other ids than those it returned")
    tops = meta.get("output_top_logprobs") or []
    if tops and len(tops) != first + len(ids):
        raise EngineError(f"the engine returned {first + len(ids)} ids and {len(tops)} lists of top log-probabilities")
    return _Tokens(
        ids,
        [_MINUS_INF if entry[0] is None else float(entry[0]) for entry in entries],
        [_top(entry) for entry in tops[first:]],
    )


def _repeats_its_last(ids: Sequence[int], meta: Mapping[str, Any], choice: Progress) -> bool:
    """How SGLang ends an incremental stream that it aborts while the request waits: nothing new, the last id again."""
    finish = meta.get("finish_reason")
    aborted = isinstance(finish, dict) and finish.get("type") == FinishReason.ABORT.value
    return aborted and len(choice.ids) > 1 and len(ids) == 1 and meta.get("completion_tokens") == len(choice.ids)


def _logprob(entry: Sequence[Any]) -> float:
    return _MINUS_INF if entry[0] is None else float(entry[0])


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
    return _spans(meta, num_tokens, undisturbed, choice)


def _spans(meta: Mapping[str, Any], num_tokens: int, undisturbed: bool, _choice: Progress) -> tuple[Span, ...]:
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
