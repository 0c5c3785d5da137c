"""Weights against the mismatch of engine and trainer, and against sequences that the policy has moved away from.

Each returns weights [...], detached, that multiply a policy gradient loss: 0 for what is rejected and where `mask` is
False. Rejected tokens stay in the aggregation's denominator, and weights are not scaled to a mean of 1: that would need
the whole batch, and make a step depend on how it is split. Below, r = exp(trainer's - engine's log-probability).
"""

from typing import Literal

import torch

from reef.methods.ratios import bounded_exp, log_ratio, sequence_mean, sequence_sum, where_masked

Level = Literal["token", "sequence", "geometric"]


@torch.no_grad()
def level_ratios(
    logprobs: torch.Tensor,
    engine_logprobs: torch.Tensor,
    mask: torch.Tensor,
    sequences: torch.Tensor,
    num_sequences: int,
    level: Level,
) -> torch.Tensor:
    """r [...] of each token (`token`), or on each token that of its sequence; detached, 1 where `mask` is False.

    `sequence` is the product over the sequence's tokens, `geometric` their geometric mean. Held within
    exp(+-MAX_LOG_RATIO). A sequence must lie whole in the call; arguments as in `ratios.sequence_sum`.
    """
    logs = log_ratio(logprobs, engine_logprobs, mask)
    if level == "sequence":
        logs = sequence_sum(logs, mask, sequences, num_sequences)
    elif level == "geometric":
        logs = sequence_mean(logs, mask, sequences, num_sequences)
    return bounded_exp(logs)


def tis(ratios: torch.Tensor, mask: torch.Tensor, *, low: float, high: float) -> torch.Tensor:
    """Truncated importance sampling: clip(r, low, high) [...] (Yao et al. 2025). Nothing is rejected.

    Args:
        ratios: [...], from `level_ratios`.
        mask: [...] bool.
    """
    return where_masked(ratios.clamp(low, high), mask)


def icepop(ratios: torch.Tensor, mask: torch.Tensor, *, low: float, high: float) -> torch.Tensor:
    """IcePop: r [...] where low <= r <= high, else 0 (Ring-1T, 2510.18855). Arguments as in `tis`, by token."""
    # Asked this way round, a NaN is kept and the step fails.
    return where_masked(ratios, mask & ~((ratios < low) | (ratios > high)))


def mis(
    logprobs: torch.Tensor,
    engine_logprobs: torch.Tensor,
    mask: torch.Tensor,
    sequences: torch.Tensor,
    num_sequences: int,
    *,
    level: Level,
    low: float,
    high: float,
    veto: float | None = None,
) -> torch.Tensor:
    """Masked importance sampling: the level's r [...] where low <= r <= high, else 0 (Liu, Li et al. 2025; slime).

    At the levels `sequence` and `geometric` a whole sequence is weighed or rejected; by token it is IcePop. With
    `veto`, one token of r < veto rejects its whole sequence, at any level.
    """
    ratios = level_ratios(logprobs, engine_logprobs, mask, sequences, num_sequences, level)
    weights = icepop(ratios, mask, low=low, high=high)
    if veto is None:
        return weights
    by_token = level_ratios(logprobs, engine_logprobs, mask, sequences, num_sequences, "token")
    num_vetoes = sequence_sum((by_token < veto).float(), mask, sequences, num_sequences)
    return where_masked(weights, num_vetoes == 0)


@torch.no_grad()
def off_policy_sequence_mask(
    logprobs: torch.Tensor,
    engine_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    sequences: torch.Tensor,
    num_sequences: int,
    *,
    delta: float,
) -> torch.Tensor:
    """1 [...] for each token of a kept sequence, 0 for one that is dropped (DeepSeek-V3.2, 2512.02556).

    A sequence is dropped iff its advantage is negative and the mean over its tokens of engine_logprobs - logprobs is
    above `delta`: the policy has left it already. Its advantage is the mean of its tokens', which a critic's may need.
    """
    moved = sequence_mean(log_ratio(engine_logprobs, logprobs, mask), mask, sequences, num_sequences)
    advantage = sequence_mean(advantages, mask, sequences, num_sequences)
    return (mask & ~((advantage < 0) & (moved > delta))).to(logprobs.dtype)
