"""Which requests run, one step at a time, and what commands do to them.

    waiting --admit--> prefill --> rows --decode, decode, …--> finished
       ^                            |
       +---------- retract ---------+

Runs on one thread and knows nothing of threads or HTTP: `engine.py` calls it and takes what it sends.
Semantics of pause, load, abort and flush are SGLang's (0.5.23); where they differ a comment says so.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from reef.engines.embedded.cache import KVCache
from reef.engines.embedded.errors import ModelError
from reef.engines.embedded.model import Model
from reef.engines.embedded.prefill import Prefill
from reef.engines.embedded.request import FinishReason, Request, Snapshot
from reef.engines.embedded.rows import Rows
from reef.engines.embedded.sampling import sample, top_logprobs
from reef.engines.embedded.weights import Weights

log = logging.getLogger(__name__)

MAX_PREFILL_TOKENS = 8192
"""Prompt tokens admitted in one step (a longer prompt goes alone), so that prefill cannot starve decoding."""

ABORTED: FinishReason = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_WAITING: FinishReason = {"type": "abort", "message": "Abort in waiting queue"}


@dataclass(frozen=True, slots=True)
class Load:
    """A wish for other weights, waiting until no request that came before it is left (or the engine is paused)."""

    source: Path | Weights
    """A directory, or weights that are in memory already."""
    version: str | None
    """None: the version keeps its name."""
    flush_cache: bool
    arrival: int
    """Requests with a larger number wait for the load."""
    reply: Callable[[bool, str, int], None]
    """Called with success, message and the number of requests that were live."""


class Scheduler:
    """Owns the waiting queue, the rows, the cache and the name of the weights."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        max_rows: int,
        version: str,
        load: Callable[[Path | Weights], None],
        send: Callable[[Request, Snapshot], None],
    ) -> None:
        """`load` puts weights, or those of a directory, into `model`, or raises `ModelError` and leaves it as it was.

        `send` takes every snapshot: of a stream as it grows, of any request when it ends.
        """
        self.version = version
        self.paused = False
        self.waiting: deque[Request] = deque()
        self.rows = Rows(max_rows, cache, model.arch.vocab_size)
        self._model = model
        self._cache = cache
        self._prefill = Prefill(model, cache)
        self._load = load
        self._send = send
        self._loads: deque[Load] = deque()
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._loads) or (not self.paused and bool(self.waiting or self.rows.requests))

    # --- commands -----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Appends a request to the waiting queue."""
        self._arrivals += 1
        request.arrival = self._arrivals
        self.waiting.append(request)

    def abort(self, matches: Callable[[Request], bool]) -> int:
        """Ends the live requests that match, with the tokens they have. Returns how many.

        SGLang lets a running request do one more step, and none while paused in place; here it ends at once.
        """
        hit = [request for request in self.waiting if matches(request)]
        self.waiting = deque(request for request in self.waiting if not matches(request))
        for request in hit:
            self._send_final(request, ABORTED_WAITING)
        rows = [row for row, request in enumerate(self.rows.requests) if matches(request)]
        for row in reversed(rows):
            self._send_final(self.rows.remove(row), ABORTED)
        return len(hit) + len(rows)

    def pause(self, mode: str) -> None:
        """Stops stepping until `resume`.

        `abort` ends everything; `retract` sends running requests back to the queue with the tokens they have, their
        keys and values dropped; `in_place` keeps keys and values.
        """
        self.paused = True
        if mode == "abort":
            self.abort(lambda _: True)
        elif mode == "retract":
            running = [self.rows.remove(row) for row in reversed(range(len(self.rows)))]
            for request in running:
                request.num_retractions += 1
            # Rows are not in order of arrival; the queue is.
            self.waiting.extendleft(sorted(running, key=lambda request: -request.arrival))

    def resume(self) -> None:
        """Undoes `pause`; without one it does nothing."""
        self.paused = False

    def flush(self) -> bool:
        """Drops keys and values that no request needs.

        There are none, since this engine keeps no prefix cache: only the answer is SGLang's, false while requests run,
        or wait without a pause.
        """
        return not self.rows.requests and (self.paused or not self.waiting)

    def request_load(
        self,
        source: Path | Weights,
        version: str | None,
        flush_cache: bool,
        reply: Callable[[bool, str, int], None],
    ) -> None:
        """Queues a load. Paused: it runs at the next step. Else it waits for the requests that came before it."""
        self._loads.append(Load(source, version, flush_cache, self._arrivals, reply))

    def rename(self, version: str) -> None:
        """Gives the current weights another name; tokens sampled so far keep the old one."""
        if version == self.version:
            return
        for request in self.waiting:
            request.version_ends.append((self.version, len(request.output_ids)))
        for request, count in zip(self.rows.requests, self.rows.counts(0).tolist(), strict=True):
            request.version_ends.append((self.version, count))
        self.version = version

    def close(self) -> None:
        """Ends everything: requests as aborted, loads as failed."""
        self.abort(lambda _: True)
        while self._loads:
            self._loads.popleft().reply(False, "the engine is shutting down", 0)

    # --- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Runs due loads; then, unless paused, prefills what is admitted and decodes one token of every row."""
        while self._loads and self._load_is_due(self._loads[0]):
            self._run_load(self._loads.popleft())
        if self.paused:
            return
        admitted = self._admit()
        if admitted:
            self._guarded(lambda: self._start(admitted), admitted)
        if self.rows.requests:
            self._guarded(self._decode, self.rows.requests)

    def _load_is_due(self, load: Load) -> bool:
        older = self.waiting and self.waiting[0].arrival <= load.arrival
        return self.paused or (not self.rows.requests and not older)

    def _run_load(self, load: Load) -> None:
        num_live = len(self.waiting) + len(self.rows)
        if load.flush_cache and self.rows.requests:
            # SGLang loads the weights and then reports failure; refusing first leaves one state to reason about.
            load.reply(False, "flush_cache is set but requests are running: retract or finish them first", num_live)
            return
        try:
            self._load(load.source)
        except (ModelError, MemoryError, RuntimeError) as error:  # torch reports a failed allocation as RuntimeError
            log.error("load of %s failed: %s", load.version, error)
            load.reply(False, f"Failed to update weights: {error}. The weights before stay in use.", num_live)
            return
        message = "Succeeded to update model weights."
        if load.version is not None:
            self.rename(load.version)
            message += f" Weight version updated to {load.version}."
        load.reply(True, message, num_live)

    def _admit(self) -> list[Request]:
        """Takes requests from the queue, in order, while they fit rows, cache and the prefill bound."""
        admitted: list[Request] = []
        longest, tokens = self.rows.longest_bound, 0
        while self.waiting:
            request = self.waiting[0]
            if self._loads and request.arrival > self._loads[0].arrival:
                break
            longest = max(longest, request.length_bound)
            tokens += len(request.prompt) + len(request.output_ids)
            if not self._cache.fits(len(self.rows) + len(admitted) + 1, longest):
                break
            if admitted and tokens > MAX_PREFILL_TOKENS:
                break
            admitted.append(self.waiting.popleft())
        return admitted

    def _start(self, admitted: list[Request]) -> None:
        first = len(self.rows)
        longest = max(self.rows.longest_bound, *(request.length_bound for request in admitted))
        self._cache.reserve(first + len(admitted), longest, first)
        starting = [request for request in admitted if request.max_new_tokens]
        logits = self._prefill.run(admitted, starting, first)
        for request in admitted:
            if not request.max_new_tokens:
                self._send_final(request, {"type": "length", "length": 0})
        for request in starting:
            self.rows.add(request)
        if starting:
            self._sample(first, logits)

    def _decode(self) -> None:
        ids, positions, width = self.rows.inputs
        self._sample(0, self._model.decode(ids, positions, self._cache, width))

    def _sample(self, first: int, logits_BV: torch.Tensor) -> None:
        """Gives each row from `first` on its next token and ends those that are done."""
        rows = self.rows
        for row in rows.shaped:
            shaping = rows.requests[row].shaping
            if shaping and row >= first:
                shaping.apply(logits_BV[row - first], rows.output(row)[0])
        tokens, logprobs, table_BV = sample(logits_BV, rows.batch(first), rows.counts(first))
        ended = rows.append(first, tokens, logprobs)
        reasons = {row: self._end(row) for row in ended.tolist()}
        broken = np.isnan(logprobs)
        for row in rows.attended:
            if row >= first:
                self._attend(row, table_BV[row - first], reasons)
        if broken.any():
            for row in np.flatnonzero(broken).tolist():
                reasons[first + row] = _failure("the model gave logits that are not finite")
                self._cache.wipe(first + row, 1)
        for row in sorted(reasons, reverse=True):
            self._send_final(rows.remove(row), reasons[row])

    def _end(self, row: int) -> FinishReason:
        ids, _ = self.rows.output(row)
        last, request = int(ids[-1]), self.rows.requests[row]
        if last in request.end_ids:
            return {"type": "stop", "matched": last}
        return {"type": "length", "length": len(ids)}

    def _attend(self, row: int, logprobs_V: torch.Tensor, reasons: dict[int, FinishReason]) -> None:
        """The per-token work of the rows that ask for it. A stop string goes before a stop token or the length."""
        request = self.rows.requests[row]
        ids, logprobs = self.rows.output(row)
        if request.num_top_logprobs:
            request.output_top_logprobs.append(top_logprobs(logprobs_V, request.num_top_logprobs))
        if request.stop_strings:
            matched = request.stop_strings.match(ids)
            if matched is not None:
                reasons[row] = {"type": "stop", "matched": matched}
        if row in reasons or not request.stream or (len(ids) - 1) % request.params.stream_interval:
            return
        if request.stop_strings and request.stop_strings.may_follow(ids):
            return
        self._send(request, request.snapshot(self.version, ids.copy(), logprobs.copy()))

    def _send_final(self, request: Request, finish: FinishReason) -> None:
        request.finish = finish
        self._send(request, request.snapshot(self.version, request.output_ids, request.output_logprobs))

    def _guarded(self, work: Callable[[], None], requests: list[Request]) -> None:
        """Runs a forward pass; if it raises, the requests in it fail and the engine goes on."""
        affected = list(requests)
        try:
            work()
        except Exception as error:
            log.exception("a forward pass failed; %d requests end with it", len(affected))
            finish = _failure(f"forward pass failed: {type(error).__name__}: {error}")
            for row in reversed(range(len(self.rows))):
                if self.rows.requests[row] in affected:
                    self.rows.remove(row)
            self._cache.wipe(len(self.rows), self._cache.num_rows - len(self.rows))
            for request in affected:
                if request.finish is None:
                    self._send_final(request, finish)


def _failure(message: str) -> FinishReason:
    return {"type": "abort", "message": message, "status_code": 500, "err_type": "InternalServerError"}
