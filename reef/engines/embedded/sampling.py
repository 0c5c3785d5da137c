"""Logits of all rows -> one token and its log-probability a row.

Random numbers are a function of (seed, choice, index of the output token) and of nothing else, so other requests in
the batch change a token only through float rounding in the forward pass. Shape letters: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from reef.engines.embedded.params import SamplingParams

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]
Float32s = npt.NDArray[np.float32]

LOWEST = float(np.finfo(np.float32).min)
"""Log-probabilities are clamped to this, as SGLang does: JSON has no infinity."""

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def random_key(seed: int, choice: int) -> int:
    """The 64-bit key of one sequence's random numbers, never 0: `_mix` leaves 0 as it is, and so would be the first."""
    return int(_mix(np.array([((seed & _MASK) * _GOLDEN + choice) & _MASK], dtype=np.uint64))[0]) or _GOLDEN


def uniforms(keys_B: UInt64s, indices_B: Int64s) -> npt.NDArray[np.float64]:
    """One number in [0, 1 - 2^-52] a row, from its key and the index of the token to be sampled."""
    counters = keys_B + indices_B.astype(np.uint64) * np.uint64(_GOLDEN)
    # Twelve bits are dropped: the largest result stays below 1 by one unit in the last place, so that its product
    # with the total mass is below the total and never selects a token of probability zero.
    return (_mix(_mix(counters)) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(x: UInt64s) -> UInt64s:
    """splitmix64's finalizer (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Support:
    """Rows that sample from a part of their distribution."""

    rows: torch.Tensor
    top_k: torch.Tensor
    """[rows, 1]; the vocabulary size where off."""
    top_p: torch.Tensor
    min_p: torch.Tensor

    def apply(self, probs_BV: torch.Tensor) -> None:
        """Sets to zero, in place, what top-k, top-p or min-p exclude. Each is judged on the full distribution."""
        ranked, order = probs_BV[self.rows].sort(stable=True, dim=-1, descending=True)
        before = ranked.cumsum(-1) - ranked
        rank = torch.arange(ranked.shape[-1])
        out = (rank >= self.top_k) | (before > self.top_p) | (ranked < ranked[:, :1] * self.min_p)
        kept = ranked.masked_fill_(out, 0.0)
        probs_BV[self.rows] = torch.empty_like(kept).scatter_(1, order, kept)


@dataclass(frozen=True, slots=True)
class Batch:
    """Sampling settings of some rows as columns; made once whenever the rows change, used at every step."""

    keys: UInt64s
    temperature: torch.Tensor | None
    """[B, 1]; 1 for greedy rows. None where all are 1."""
    greedy: torch.Tensor | None
    """[B] bool. None where no row is greedy."""
    all_greedy: bool
    support: Support | None

    @staticmethod
    def of(rows: Sequence[tuple[SamplingParams, int]], vocab_size: int) -> Batch:
        """Columns of (parameters, random key) pairs."""
        params = [row[0] for row in rows]
        greedy = [p.temperature == 0 for p in params]
        scales = [p.temperature or 1.0 for p in params]
        return Batch(
            keys=np.array([row[1] for row in rows], dtype=np.uint64),
            temperature=None if all(scale == 1 for scale in scales) else torch.tensor(scales)[:, None],
            greedy=torch.tensor(greedy) if any(greedy) else None,
            all_greedy=all(greedy),
            support=_support(params, vocab_size),
        )


def sample(logits_BV: torch.Tensor, batch: Batch, indices_B: Int64s) -> tuple[Int64s, Float32s, torch.Tensor]:
    """Draws a token a row by inverting the cumulative distribution.

    Returns tokens [B], their log-probabilities [B], and the whole log-softmax [B, V] of logits / temperature (top-k,
    top-p and min-p are not applied to log-probabilities, as in SGLang). A row whose logits are not finite gets NaN.
    """
    scaled = logits_BV if batch.temperature is None else logits_BV / batch.temperature
    logprobs_BV = torch.log_softmax(scaled, -1)
    if batch.all_greedy:
        tokens = logits_BV.argmax(-1)
    else:
        tokens = _invert(logprobs_BV.exp(), batch, indices_B)
        if batch.greedy is not None:
            tokens = torch.where(batch.greedy, logits_BV.argmax(-1), tokens)
    chosen = logprobs_BV.gather(1, tokens[:, None])[:, 0].clamp_min(LOWEST)
    return tokens.numpy(), chosen.numpy(), logprobs_BV


def top_logprobs(logprobs_V: torch.Tensor, count: int) -> list[tuple[float, int, None]]:
    """The `count` likeliest tokens as (log-probability, id, None), likeliest first."""
    values, ids = logprobs_V.topk(min(count, len(logprobs_V)))
    return [(value, token, None) for value, token in zip(values.clamp_min(LOWEST).tolist(), ids.tolist(), strict=True)]


def _invert(probs_BV: torch.Tensor, batch: Batch, indices_B: Int64s) -> torch.Tensor:
    if batch.support is not None:
        batch.support.apply(probs_BV)
    mass_BV = probs_BV.cumsum(-1, dtype=torch.float64)
    targets = torch.from_numpy(uniforms(batch.keys, indices_B))[:, None] * mass_BV[:, -1:]
    # The clamp only matters for a row of NaN, whose NaN log-probability tells the scheduler.
    return torch.searchsorted(mass_BV, targets, right=True)[:, 0].clamp_max_(probs_BV.shape[-1] - 1)


def _support(params: Sequence[SamplingParams], vocab_size: int) -> Support | None:
    rows = [(i, p) for i, p in enumerate(params) if p.filtered]
    if not rows:
        return None

    def column(values: list[Any]) -> torch.Tensor:
        return torch.tensor(values)[:, None]

    return Support(
        rows=torch.tensor([i for i, _ in rows]),
        top_k=column([p.top_k or vocab_size for _, p in rows]),
        top_p=column([p.top_p for _, p in rows]),
        min_p=column([p.min_p for _, p in rows]),
    )
