"""What losses and corrections share: ratios that masked positions cannot spoil, and sums over whole sequences.

Shapes: `...` any, the same for all arrays of a call. A NaN at a position that counts stays one, so that the step fails.
"""

import torch

# exp() of more than this is no longer a correction but a fault; beyond it a token keeps its loss and gets no gradient.
MAX_LOG_RATIO = 20.0


def where_masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`values` [...] with exactly 0, and exactly no gradient, where `mask` is False, whatever stood there."""
    return torch.where(mask, values, torch.zeros_like(values))


def log_ratio(logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """logprobs - old_logprobs [...]; 0 where `mask` is False, before any exp() can make a NaN of what stood there."""
    return where_masked(logprobs - old_logprobs, mask)


def bounded_exp(exponent: torch.Tensor) -> torch.Tensor:
    """exp [...] of an exponent held within +-MAX_LOG_RATIO; where it was held, there is no gradient."""
    return exponent.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@torch.no_grad()
def sequence_sum(values: torch.Tensor, mask: torch.Tensor, sequences: torch.Tensor, num_sequences: int) -> torch.Tensor:
    """The sum of `values` over the masked tokens of each sequence, on each of these tokens; 0 elsewhere. Detached.

    In float64: float32 loses the small terms of a long sum, and a GPU adds in an order that changes.

    Args:
        values: [...].
        mask: [...] bool, which tokens count.
        sequences: [...] int64, each token's sequence, from 0; read only where `mask` is True.
        num_sequences: how many there are.
    """
    index = where_masked(sequences, mask).flatten()
    counted = where_masked(values, mask).double().flatten()
    sums = counted.new_zeros(max(num_sequences, 1)).index_add_(0, index, counted)
    return where_masked(sums[index].view(mask.shape).to(values.dtype), mask)


@torch.no_grad()
def sequence_mean(
    values: torch.Tensor, mask: torch.Tensor, sequences: torch.Tensor, num_sequences: int
) -> torch.Tensor:
    """The mean of `values` over the masked tokens of each sequence, on each of these tokens; 0 elsewhere. Detached.

    Arguments as in `sequence_sum`.
    """
    counts = sequence_sum(torch.ones_like(values), mask, sequences, num_sequences)
    return sequence_sum(values, mask, sequences, num_sequences) / counts.clamp(min=1.0)
