"""Schulman's estimators of the KL divergence to a frozen reference, from the sampled token alone.

With d = logprobs - reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (http://joschu.net/blog/kl-approx.html).
Averaged over what the policy samples, k1 and k3 are KL(policy || reference), and k2 is nearly. Their gradients in a
loss are another matter:

- k1: that of nothing. E[grad log p] = 0, so it adds noise and holds nothing back. It is for rewards.
- k2: that of KL(policy || reference), the one that is meant: E[d grad log p].
- k3: that of KL(reference || policy): E[(1 - exp(-d)) grad log p]. Near the reference the two agree.
"""

from typing import Literal

import torch

from reef.methods.ratios import MAX_LOG_RATIO, log_ratio

Estimator = Literal["k1", "k2", "k3"]


def kl(
    logprobs: torch.Tensor, reference_logprobs: torch.Tensor, mask: torch.Tensor, estimator: Estimator
) -> torch.Tensor:
    """The estimate [...] for each token, with gradient through `logprobs`; exactly 0 where `mask` is False.

    k3 holds d at -MAX_LOG_RATIO or above; a token below that has no gradient. Use `logprobs.detach()` for rewards.

    Args:
        logprobs: [...], the policy's.
        reference_logprobs: [...], the reference's, at the same temperature.
        mask: [...] bool.
        estimator: `k1`, `k2` or `k3`.
    """
    difference = log_ratio(logprobs, reference_logprobs, mask)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2.0
    held = difference.clamp(min=-MAX_LOG_RATIO)
    return torch.expm1(-held) + held
