"""Samples made by hand for tests of methods."""

from collections.abc import Sequence

import numpy as np

from reef.types import Sample, Turn


def make_sample(
    report: str,
    mask: Sequence[int] | str,
    reward: float = 1.0,
    *,
    group: str = "g",
    logprobs: Sequence[float] | None = None,
    trains: bool = True,
    truncated: bool = False,
    turns: Sequence[Turn] = (),
) -> Sample:
    """One sequence; `mask` is [T], as numbers or as in "0110"."""
    taken = np.array([int(m) for m in mask], dtype=np.bool_)
    known = np.zeros(len(taken)) if logprobs is None else np.array(logprobs)
    return Sample(
        report_id=report,
        receipt_id=report,
        group=group,
        reward=reward,
        tokens=np.arange(len(taken), dtype=np.int32),
        mask=taken,
        logprobs=np.where(taken, known, 0.0).astype(np.float32),
        temperature=1.0,
        trains=trains,
        truncated=truncated,
        turns=tuple(turns),
    )
