"""Runs admitted prompts: equal ones once, in chunks of like length, with the log-probabilities that were asked for.

Shape letters: B prompts of a chunk, P padded length, N hidden size, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from reef.engines.embedded.cache import KVCache
from reef.engines.embedded.model import Model
from reef.engines.embedded.request import Request
from reef.engines.embedded.sampling import LOWEST, Int64s, top_logprobs

MAX_PADDED_TOKENS = 8192
"""Tokens of one forward pass, padding included (a longer prompt goes alone)."""

LOGPROB_POSITIONS = 256
"""Prompt positions whose logits exist at once: a vocabulary of 150,000 makes 256 of them 150 MB."""


class Prefill:
    """Fills cache rows with prompts (and, after a retraction, with the output so far)."""

    def __init__(self, model: Model, cache: KVCache) -> None:
        self._model = model
        self._cache = cache

    def run(self, admitted: list[Request], starting: list[Request], first_row: int) -> torch.Tensor:
        """Runs `admitted`; `starting`, those of them that go on to sample, get the cache rows from `first_row` on.

        Returns the logits [len(starting), V] of each one's next token, and sets `input_logprobs` where wanted.
        """
        groups: dict[bytes, list[Request]] = {}
        for request in admitted:
            groups.setdefault(_sequence(request).tobytes(), []).append(request)
        row_of = {id(request): first_row + i for i, request in enumerate(starting)}
        logits = torch.empty(len(starting), self._model.arch.vocab_size)
        for chunk in _chunks(list(groups.values())):
            rows = [(row_of[id(r)], i) for i, group in enumerate(chunk) for r in group if id(r) in row_of]
            hidden_BPN, lengths = self._forward(chunk, rows)
            for prompt, group in enumerate(chunk):
                self._score_prompts(group, hidden_BPN[prompt])
            if rows:
                last = hidden_BPN[torch.arange(len(chunk)), lengths - 1]
                targets, prompts = (torch.tensor(column) for column in zip(*rows, strict=True))
                logits[targets - first_row] = self._model.logits(last)[prompts]
        return logits

    def _forward(self, chunk: list[list[Request]], rows: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        sequences = [_sequence(group[0]) for group in chunk]
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        ids_BP = np.zeros((len(chunk), int(lengths.max())), np.int64)
        for row, sequence in enumerate(sequences):
            ids_BP[row, : len(sequence)] = sequence
        table = torch.tensor(rows, dtype=torch.int64).view(-1, 2)
        return self._model.prefill(torch.from_numpy(ids_BP), self._cache, table[:, 0], table[:, 1]), lengths

    def _score_prompts(self, group: list[Request], hidden_PN: torch.Tensor) -> None:
        """Log-probabilities of the prompt's own tokens, at temperature 1, for the requests of equal prompts."""
        wanting = [request for request in group if request.wants_prompt_logprobs]
        if not wanting:
            return
        prompt = torch.from_numpy(wanting[0].prompt)
        start = min(request.logprob_start for request in wanting)
        num_top = max(request.num_top_logprobs for request in wanting)
        values: list[torch.Tensor] = []
        tops = []
        for begin in range(start, len(prompt) - 1, LOGPROB_POSITIONS):
            end = min(begin + LOGPROB_POSITIONS, len(prompt) - 1)
            table = torch.log_softmax(self._model.logits(hidden_PN[begin:end]), -1)
            values.append(table.gather(1, prompt[begin + 1 : end + 1, None])[:, 0])
            if num_top:
                tops += [top_logprobs(row, num_top) for row in table]
        scores = torch.cat(values).clamp_min(LOWEST).numpy() if values else np.zeros(0, np.float32)
        for request in wanting:
            skipped = request.logprob_start - start
            request.input_logprobs = scores[skipped:]
            if request.num_top_logprobs:
                request.input_top_logprobs = [top[: request.num_top_logprobs] for top in tops[skipped:]]


def _sequence(request: Request) -> Int64s:
    return np.concatenate([request.prompt, request.output_ids])


def _chunks(groups: list[list[Request]]) -> list[list[list[Request]]]:
    """Splits groups of equal prompts into forward passes, short with short, to keep padding small."""
    ordered = sorted(groups, key=lambda group: len(group[0].prompt) + len(group[0].output_ids))
    chunks: list[list[list[Request]]] = []
    for group in ordered:
        length = len(group[0].prompt) + len(group[0].output_ids)
        if not chunks or (len(chunks[-1]) + 1) * length > MAX_PADDED_TOKENS:
            chunks.append([])
        chunks[-1].append(group)
    return chunks
