"""Losses of single tokens, in torch. Shapes: `...` any, the same for all arrays of a call."""

import torch

# exp() of more than this is no longer a correction but a fault; beyond it a token keeps its loss and gets no gradient.
MAX_LOG_RATIO = 20.0


def ppo_clip(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped loss per token: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logprobs - old).

    Schulman et al. 2017 (1707.06347); two bounds as in DAPO (2503.14476). Arrays are [...] and of one shape. Where
    `mask` is False the log-ratio is replaced before exp(), so that loss and gradient are 0 there even if it is huge.
    """
    log_ratio = torch.where(mask, logprobs - old_logprobs, torch.zeros_like(logprobs))
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    gains = torch.where(mask, advantages, torch.zeros_like(advantages))
    plain = -ratio * gains
    clipped = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * gains
    loss = torch.maximum(plain, clipped)
    metrics = {"pg_clipfrac": (clipped > plain).float(), "ratio": ratio.detach()}
    return loss, metrics
