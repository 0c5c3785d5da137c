"""Keys and values of the running rows: one rectangle of rows x length for every layer.

Row r of the cache belongs to row r of `Rows`; the token at position p of that sequence lies in column p. Running rows
are always 0..n-1, so a decode step reads plain slices. Shape letters: L layers, R rows, K key-value heads, T columns,
D head_dim, B running rows, S columns in use.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from reef.engines.embedded.architecture import Architecture

COLUMNS_STEP = 256
"""Columns are allocated in multiples of this, so that slowly growing requests rarely move the cache."""


class KVCache:
    """Holds at most `max_rows` rows and at most `max_tokens` = rows x columns tokens, padding included."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, max_rows: int, max_tokens: int) -> None:
        self._arch = arch
        self._dtype = dtype
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._allocate(1)

    def fits(self, num_rows: int, length: int) -> bool:
        """Whether `num_rows` sequences, the longest of `length` tokens, can be held at once."""
        return length <= self._max_tokens and num_rows <= self._rows_for(self._columns_for(length))

    def reserve(self, num_rows: int, length: int, live_rows: int) -> None:
        """Makes room for `num_rows` sequences of up to `length` tokens; keeps the contents of rows < `live_rows`.

        `length` covers the live rows too, and `fits(num_rows, length)` holds.
        """
        if length <= self._columns and num_rows <= self._rows:
            return
        old, old_columns = self._layers, self._columns
        self._allocate(length)
        kept = min(old_columns, self._columns)
        for layer, before in zip(self._layers, old, strict=True):
            layer[:, :live_rows, :, :kept] = before[:, :live_rows, :, :kept]

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of row `source` over row `target`."""
        for layer in self._layers:
            layer[:, target, :, :length] = layer[:, source, :, :length]

    def wipe(self, first_row: int, num_rows: int) -> None:
        """Sets rows to zero. Needed where they may hold a NaN: a masked column still meets it (see `_zeros`)."""
        for layer in self._layers:
            layer[:, first_row : first_row + num_rows].zero_()

    @property
    def num_rows(self) -> int:
        """Rows allocated."""
        return self._rows

    def store_prompts(self, layer: int, rows_R: torch.Tensor, prompts_R: torch.Tensor, kv: torch.Tensor) -> None:
        """Writes the keys and values of prompt `prompts_R[i]` into row `rows_R[i]`; `kv` is [2, prompts, K, P, D]."""
        self._layers[layer][:, :, :, : kv.shape[3]].index_copy_(1, rows_R, kv.index_select(1, prompts_R))

    def slots(self, positions_B: torch.Tensor) -> torch.Tensor:
        """[B * 2K]: where the keys and values of one new token a row go, for `append`."""
        return (self._bases[: len(positions_B)] + positions_B[:, None]).view(-1)

    def append(
        self, layer: int, slots: torch.Tensor, kv: torch.Tensor, num_rows: int, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores one token a row, `kv` [B * 2K, D], and returns keys and values as [B * K, S = width, D]."""
        self._flat[layer].index_copy_(0, slots, kv)
        rows = num_rows * self._arch.num_kv_heads
        keys, values = self._heads[layer]
        return keys[:rows, :width], values[:rows, :width]

    def _columns_for(self, length: int) -> int:
        return min(-(-length // COLUMNS_STEP) * COLUMNS_STEP, self._max_tokens)

    def _rows_for(self, columns: int) -> int:
        return min(self._max_rows, self._max_tokens // columns)

    def _allocate(self, length: int) -> None:
        heads, dim = self._arch.num_kv_heads, self._arch.head_dim
        columns = self._columns_for(length)
        rows = self._rows_for(columns)
        # One tensor a layer: [2, R, K, T, D].
        layers = [_zeros((2, rows, heads, columns, dim), self._dtype) for _ in range(self._arch.num_layers)]
        # Nothing is assigned before every allocation has succeeded.
        self._layers, self._rows, self._columns = layers, rows, columns
        self._flat = [layer.view(-1, dim) for layer in layers]
        self._heads = [(part[0], part[1]) for part in (layer.view(2, -1, columns, dim) for layer in layers)]
        first = torch.arange(2 * rows * heads).view(2, rows, heads) * columns
        self._bases = first.transpose(0, 1).reshape(rows, 2 * heads)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that are only mapped when touched (calloc; `torch.zeros` writes them), so an idle budget costs nothing.

    Zeros and not whatever memory holds: attention multiplies masked columns by 0, and 0 times NaN is NaN.
    """
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
