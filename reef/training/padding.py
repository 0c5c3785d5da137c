"""The arrays that a microbatch becomes: a padded row for each sequence, or one row of all of them end to end.

End to end (`thd`, as Megatron calls it) needs an attention that keeps the sequences apart: Transformer Engine's.
Shape letters: B rows of a microbatch, T its length.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from reef.types import Floats, Ids, Sample


@dataclass(frozen=True, slots=True)
class Form:
    """How sequences lie in a microbatch."""

    packed: bool = False  # all in one row
    divisor: int = 1  # of a row's length: the tensor ranks that share it out (sequence parallelism)


@dataclass(frozen=True, slots=True, eq=False)
class Microbatch:
    """Arrays of one microbatch. Position t of each array is about the prediction of token t + 1 of its sequence.

    Rows are padded on the right: attention is causal, so no real position sees the padding.
    """

    ids: torch.Tensor  # [B, T] int64
    positions: torch.Tensor  # [B, T] int64, from 0 in each sequence
    targets: torch.Tensor  # [B, T] int64, the next token; 0 where a row ends
    temperature: torch.Tensor  # [B, T] float32
    mask: torch.Tensor  # [B, T] bool, True where the next token was sampled
    sequences: torch.Tensor  # [B, T] int64, which sequence it belongs to, from 0; that of its row in padding
    planes: Mapping[str, torch.Tensor]  # [B, T] float32 each, by name; 0 in padding and where a row ends
    starts: tuple[tuple[int, int], ...]  # row and first position of each sequence
    packed: PackedSeqParams | None  # where sequences begin in the one row; None: a row each


def collate(
    samples: Sequence[Sample],
    planes: Mapping[str, Sequence[Floats]],
    device: torch.device,
    form: Form = Form(),
) -> Microbatch:
    """Lay samples out. Without samples: one row of masked tokens, so that a rank still joins the call.

    Args:
        planes: by name, [T] for each sample: about each of its tokens.
    """
    lengths = [len(sample.tokens) for sample in samples] or [1]
    starts, shape = _lay(lengths, form)
    ids = np.zeros(shape, np.int64)
    mask = np.zeros(shape, np.bool_)
    laid = {name: np.zeros(shape, np.float32) for name in planes}
    temperature = np.ones(shape, np.float32)
    for i, sample in enumerate(samples):
        row, start = starts[i]
        here, last = slice(start, start + lengths[i]), slice(start, start + lengths[i] - 1)
        ids[row, here] = sample.tokens
        temperature[row, here] = sample.temperature
        mask[row, last] = sample.mask[1:]
        for name, values in planes.items():
            laid[name][row, last] = values[i][1:]
    return _microbatch(ids, temperature, mask, laid, starts, lengths, form, device)


def collate_ids(sequences: Sequence[Ids], temperature: float, device: torch.device, form: Form = Form()) -> Microbatch:
    """Lay bare sequences out, for log-probabilities alone."""
    lengths = [len(sequence) for sequence in sequences]
    starts, shape = _lay(lengths, form)
    ids = np.zeros(shape, np.int64)
    for (row, start), sequence in zip(starts, sequences, strict=True):
        ids[row, start : start + len(sequence)] = sequence
    temperatures = np.full(shape, temperature, np.float32)
    return _microbatch(ids, temperatures, np.zeros(shape, np.bool_), {}, starts, lengths, form, device)


def _lay(lengths: Sequence[int], form: Form) -> tuple[tuple[tuple[int, int], ...], tuple[int, int]]:
    """Row and first position of each sequence, and the arrays' shape."""
    length = sum(lengths) if form.packed else max(lengths)
    length += -length % form.divisor
    if not form.packed:
        return tuple((row, 0) for row in range(len(lengths))), (len(lengths), length)
    ends = np.cumsum(lengths).tolist()
    return tuple((0, start) for start in [0, *ends[:-1]]), (1, length)


def _microbatch(
    ids: np.ndarray,
    temperature: np.ndarray,
    mask: np.ndarray,
    planes: Mapping[str, np.ndarray],
    starts: tuple[tuple[int, int], ...],
    lengths: Sequence[int],
    form: Form,
    device: torch.device,
) -> Microbatch:
    rows, length = ids.shape
    targets = np.zeros_like(ids)
    targets[:, :-1] = ids[:, 1:]
    if form.packed:  # what fills the row up is a sequence too, so that attention covers the whole row
        lengths = [*lengths, length - sum(lengths)] if sum(lengths) < length else lengths
        positions = np.concatenate([np.arange(n) for n in lengths])[None]
    else:
        positions = np.tile(np.arange(length), (rows, 1))
    sequences = np.zeros(ids.shape, np.int64)
    for i, (row, start) in enumerate(starts):
        sequences[row, start:] = i

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    return Microbatch(
        ids=tensor(ids),
        positions=tensor(positions),
        targets=tensor(targets),
        temperature=tensor(temperature),
        mask=tensor(mask),
        sequences=tensor(sequences),
        planes={name: tensor(values) for name, values in planes.items()},
        starts=starts,
        packed=_packed(tensor(np.cumsum([0, *lengths], dtype=np.int32)), max(lengths)) if form.packed else None,
    )


def _packed(bounds: torch.Tensor, longest: int) -> PackedSeqParams:
    """What Megatron tells attention and rotary embedding: bounds [sequences + 1] int32."""
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )
