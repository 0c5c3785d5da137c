"""Changes to the logits of one row before sampling, for the requests that ask: penalties, bias, min_new_tokens.

Works on one row at a time: few requests use it, and the others must not pay for it. Everything is computed from the
output so far, so a retracted request needs no state restored.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from reef.engines.embedded.params import SamplingParams
from reef.engines.embedded.sampling import Int64s


class Shaping:
    """The changes one request asks for. As in SGLang, penalties look at output tokens only."""

    def __init__(self, params: SamplingParams, end_ids: Iterable[int], vocab_size: int) -> None:
        self._params = params
        self._end_ids = torch.tensor(sorted(i for i in end_ids if i < vocab_size), dtype=torch.int64)
        self._biased_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(params.logit_bias.values()))

    def apply(self, logits_V: torch.Tensor, output_ids: Int64s) -> None:
        """Changes `logits_V` in place, given the tokens sampled so far."""
        params = self._params
        counts = torch.bincount(torch.from_numpy(output_ids), minlength=len(logits_V))
        if params.frequency_penalty:
            logits_V -= params.frequency_penalty * counts
        if params.presence_penalty:
            logits_V -= params.presence_penalty * (counts > 0)
        if params.repetition_penalty != 1:
            rate = params.repetition_penalty
            penalised = torch.where(logits_V > 0, logits_V / rate, logits_V * rate)
            torch.where(counts > 0, penalised, logits_V, out=logits_V)
        if len(output_ids) < params.min_new_tokens:
            logits_V[self._end_ids] = float("-inf")
        if len(self._biased_ids):
            logits_V[self._biased_ids] += self._bias
