"""The running requests as columns of arrays, so that a step touches no Python object per request.

Rows 0..n-1 are running; row r of every array and of the cache is `requests[r]`. A row that ends is replaced by the
last one. Shape letters: R capacity, B running rows, W output width.
"""

from __future__ import annotations

import numpy as np
import torch

from reef.engines.embedded.cache import KVCache
from reef.engines.embedded.request import Request
from reef.engines.embedded.sampling import Batch, Float32s, Int64s

NO_TOKEN = -1


class Rows:
    """Output, position and bounds of each running row."""

    def __init__(self, capacity: int, cache: KVCache, vocab_size: int) -> None:
        self.requests: list[Request] = []
        self._cache = cache
        self._vocab_size = vocab_size
        self._last = np.zeros(capacity, np.int64)
        self._position = np.zeros(capacity, np.int64)
        self._count = np.zeros(capacity, np.int64)
        self._max_count = np.zeros(capacity, np.int64)
        self._ends = np.full((capacity, 1), NO_TOKEN, np.int64)
        self._ids = np.zeros((capacity, 0), np.int64)
        self._logprobs = np.zeros((capacity, 0), np.float32)
        # Views on the same memory: a step passes columns to the model without copies.
        self._last_tensor = torch.from_numpy(self._last)
        self._position_tensor = torch.from_numpy(self._position)
        self._batch: Batch | None = None
        self._attended: list[int] | None = None
        self._shaped: list[int] | None = None

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def longest_bound(self) -> int:
        """The largest `length_bound` of the running requests; 0 without any."""
        return max((request.length_bound for request in self.requests), default=0)

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """What `Model.decode` takes: the last tokens [B], their positions [B] and the number of columns in use."""
        B = len(self)
        return self._last_tensor[:B], self._position_tensor[:B], int(self._position[:B].max()) + 1

    def batch(self, first: int) -> Batch:
        """Sampling settings of the rows from `first` on."""
        if first:
            return Batch.of([(r.params, r.random_key) for r in self.requests[first:]], self._vocab_size)
        if self._batch is None:
            self._batch = Batch.of([(r.params, r.random_key) for r in self.requests], self._vocab_size)
        return self._batch

    @property
    def shaped(self) -> list[int]:
        """Rows whose logits are changed before sampling."""
        if self._shaped is None:
            self._shaped = [row for row, request in enumerate(self.requests) if request.shaping]
        return self._shaped

    @property
    def attended(self) -> list[int]:
        """Rows that need Python at every token: streams, stop strings, top log-probabilities."""
        if self._attended is None:
            self._attended = [
                row
                for row, request in enumerate(self.requests)
                if request.stream or request.stop_strings or request.num_top_logprobs
            ]
        return self._attended

    def counts(self, first: int) -> Int64s:
        """[B - first] number of output tokens of the rows from `first` on."""
        return self._count[first : len(self)]

    def add(self, request: Request) -> None:
        """Puts a request, with the output it already has, into the next row. Its prompt is in the cache."""
        row = len(self)
        self._widen(request)
        count = len(request.output_ids)
        self._count[row] = count
        self._position[row] = len(request.prompt) + count - 1
        self._max_count[row] = request.max_new_tokens
        self._ends[row] = NO_TOKEN
        self._ends[row, : len(request.end_ids)] = list(request.end_ids)
        self._ids[row, :count] = request.output_ids
        self._logprobs[row, :count] = request.output_logprobs
        self.requests.append(request)
        self._changed()

    def append(self, first: int, tokens: Int64s, logprobs: Float32s) -> Int64s:
        """Appends one token to each row from `first` on; returns the rows that met an end token or their length."""
        last = len(self)
        rows = np.arange(first, last)
        count = self._count[first:last]
        self._ids[rows, count] = tokens
        self._logprobs[rows, count] = logprobs
        self._last[first:last] = tokens
        self._position[first:last] += 1
        count += 1
        ended = (self._ends[first:last] == tokens[:, None]).any(-1) | (count >= self._max_count[first:last])
        return np.flatnonzero(ended) + first

    def output(self, row: int) -> tuple[Int64s, Float32s]:
        """Views of a row's output ids and log-probabilities, valid until the next step."""
        count = self._count[row]
        return self._ids[row, :count], self._logprobs[row, :count]

    def remove(self, row: int) -> Request:
        """Takes a request out, writes its output into it, and moves the last row into its place."""
        request = self.requests[row]
        ids, logprobs = self.output(row)
        request.output_ids, request.output_logprobs = ids.copy(), logprobs.copy()
        last = len(self) - 1
        if row != last:
            self._cache.move(last, row, int(self._position[last]))
            for column in (self._last, self._position, self._count, self._max_count, self._ends):
                column[row] = column[last]
            count = self._count[row]
            self._ids[row, :count] = self._ids[last, :count]
            self._logprobs[row, :count] = self._logprobs[last, :count]
            self.requests[row] = self.requests[last]
        self.requests.pop()
        self._changed()
        return request

    def _changed(self) -> None:
        self._batch = None
        self._attended = None
        self._shaped = None

    def _widen(self, request: Request) -> None:
        width = self._ids.shape[1]
        if request.max_new_tokens > width:
            grow = ((0, 0), (0, max(request.max_new_tokens, 2 * width) - width))
            self._ids = np.pad(self._ids, grow)
            self._logprobs = np.pad(self._logprobs, grow)
        missing = len(request.end_ids) - self._ends.shape[1]
        if missing > 0:
            self._ends = np.pad(self._ends, ((0, 0), (0, missing)), constant_values=NO_TOKEN)
