"""One sequence on its way through the engine, and what is sent back about it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reef.engines.embedded.params import SamplingParams
from reef.engines.embedded.sampling import Float32s, Int64s
from reef.engines.embedded.shaping import Shaping
from reef.engines.embedded.text import StopStrings

FinishReason = dict[str, Any]
"""`{"type": "stop", "matched": id or string}`, `{"type": "length", "length": n}`, `{"type": "abort", "message": …}`."""

TopLogprobs = list[tuple[float, int, None]]


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens [start, end) were sampled by the weights named `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a request's output at one moment. Produced by the scheduler, read by `wire.py`."""

    output_ids: Int64s
    output_logprobs: Float32s
    weight_version: str
    spans: tuple[VersionSpan, ...]
    """Cover every output token, in order."""
    finish: FinishReason | None


@dataclass(slots=True, eq=False)
class Request:
    """One prompt to be continued once. n choices are n requests.

    The fields above the line are set by `wire.py` and never change; those below belong to the generation thread, which
    keeps running outputs in `Rows` and writes them here when the request leaves its row.
    """

    rid: str
    call_rid: str
    """The id of the HTTP request this is one sequence of."""
    prompt: Int64s
    params: SamplingParams
    max_new_tokens: int
    """`params.max_new_tokens`, or what the context leaves where that is None."""
    random_key: int
    end_ids: frozenset[int]
    """Tokens that finish the sequence."""
    return_logprob: bool
    logprob_start: int
    """First prompt position whose log-probability is wanted; the prompt's length for none."""
    num_top_logprobs: int
    stream: bool
    sink: Callable[[Request, Snapshot], None]
    """Called on the event loop with snapshots: the last one always, those before only where `stream`."""
    stop_strings: StopStrings | None = None
    shaping: Shaping | None = None
    arrival_s: float = field(default_factory=time.monotonic)

    # ------------------------------------------------------------------------------------------------------------------
    arrival: int = 0
    """Order of arrival, counted by the scheduler."""
    output_ids: Int64s = field(default_factory=lambda: np.zeros(0, np.int64))
    output_logprobs: Float32s = field(default_factory=lambda: np.zeros(0, np.float32))
    output_top_logprobs: list[TopLogprobs] = field(default_factory=list)
    input_logprobs: Float32s | None = None
    """[prompt length - logprob_start - 1] of the tokens after `logprob_start`; None until the prompt has run."""
    input_top_logprobs: list[TopLogprobs] = field(default_factory=list)
    version_ends: list[tuple[str, int]] = field(default_factory=list)
    """(version, number of output tokens when it was replaced), oldest first."""
    num_retractions: int = 0
    finish: FinishReason | None = None

    @property
    def length_bound(self) -> int:
        """Tokens the sequence may come to; what is reserved for it in the cache."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the next prefill has to return log-probabilities of the prompt."""
        return self.input_logprobs is None and self.logprob_start < len(self.prompt)

    def snapshot(self, version: str, ids: Int64s, logprobs: Float32s) -> Snapshot:
        """What to send, given the output so far and the version that sampled its end."""
        spans = version_spans([*self.version_ends, (version, len(ids))], len(ids))
        # An answer is named after the weights of its last token, or of the engine where it has none.
        return Snapshot(ids, logprobs, spans[-1].version if len(ids) else version, spans, self.finish)


def version_spans(ends: list[tuple[str, int]], num_tokens: int) -> tuple[VersionSpan, ...]:
    """Turns (version, number of tokens at its end) into spans; versions that sampled nothing vanish.

    An output without tokens has one empty span, as in SGLang.
    """
    spans: list[VersionSpan] = []
    for version, end in ends:
        start = spans[-1].end if spans else 0
        if min(end, num_tokens) <= start:
            continue
        if spans and spans[-1].version == version:
            start = spans.pop().start
        spans.append(VersionSpan(version, start, min(end, num_tokens)))
    return tuple(spans) or (VersionSpan(ends[-1][0], 0, 0),)
