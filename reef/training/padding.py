"""The padded arrays that a microbatch becomes.

Shape letters: B rows of a microbatch, T its padded length or the tokens of one sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from reef.types import Floats, Ids, Sample


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """Padded arrays of one microbatch. Position t of each array is about the prediction of token t + 1.

    Rows are padded on the right: attention is causal, so no real position sees the padding.
    """

    ids: torch.Tensor  # [B, T] int64
    positions: torch.Tensor  # [B, T] int64
    targets: torch.Tensor  # [B, T] int64, the next token; 0 in the last column
    temperature: torch.Tensor  # [B, 1] float32
    mask: torch.Tensor  # [B, T] bool, True where the next token was sampled
    old_logprobs: torch.Tensor  # [B, T] float32
    advantages: torch.Tensor  # [B, T] float32
    weights: torch.Tensor  # [B, T] float32


def collate(
    samples: Sequence[Sample], advantages: Sequence[Floats], weights: Sequence[Floats], device: torch.device
) -> Microbatch:
    """Pad samples to one width. Without samples: one row of one masked token, so that a rank still joins the call."""
    rows, width = max(1, len(samples)), max((len(s.tokens) for s in samples), default=1)
    ids = np.zeros((rows, width), np.int64)
    mask = np.zeros((rows, width), np.bool_)
    floats = np.zeros((3, rows, width), np.float32)
    temperature = np.ones((rows, 1), np.float32)
    for row, sample in enumerate(samples):
        end = len(sample.tokens)
        ids[row, :end] = sample.tokens
        mask[row, : end - 1] = sample.mask[1:]
        for plane, values in zip(floats, (sample.logprobs, advantages[row], weights[row]), strict=True):
            plane[row, : end - 1] = values[1:]
        temperature[row] = sample.temperature
    return _microbatch(ids, temperature, mask, floats, device)


def collate_ids(sequences: Sequence[Ids], temperature: float, device: torch.device) -> Microbatch:
    """Pad bare sequences, for log-probabilities alone."""
    width = max(len(sequence) for sequence in sequences)
    ids = np.zeros((len(sequences), width), np.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
    temperatures = np.full((len(sequences), 1), temperature, np.float32)
    return _microbatch(ids, temperatures, np.zeros(ids.shape, np.bool_), np.zeros((3, *ids.shape), np.float32), device)


def _microbatch(
    ids: np.ndarray, temperature: np.ndarray, mask: np.ndarray, floats: np.ndarray, device: torch.device
) -> Microbatch:
    targets = np.zeros_like(ids)
    targets[:, :-1] = ids[:, 1:]
    positions = np.tile(np.arange(ids.shape[1]), (len(ids), 1))
    old_logprobs, advantages, weights = floats

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    return Microbatch(
        ids=tensor(ids),
        positions=tensor(positions),
        targets=tensor(targets),
        temperature=tensor(temperature),
        mask=tensor(mask),
        old_logprobs=tensor(old_logprobs),
        advantages=tensor(advantages),
        weights=tensor(weights),
    )
