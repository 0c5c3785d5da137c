"""The critic's loss, in torch."""

import torch

from reef.methods.ratios import where_masked


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped value loss: max((V - R)^2, (old + clip(V - old, -clip, clip) - R)^2), without a half.

    Schulman et al. 2017 (1707.06347) as in slime; R are the targets. A value that left its old one by more than `clip`
    and came nearer to its target by that has no gradient. All arrays are [...]; where `mask` is False the loss is
    exactly 0, without gradient, whatever they hold there.

    Args:
        values: the critic's, with gradient.
        old_values: what it said before this step's updates.
        targets: what it should have said.
        mask: bool.
        clip: how far one step may move a value; None: the plain square.

    Returns:
        The loss [...], and the metric `clipfrac` [...]: 1 where the clip raised the loss.
    """
    errors = where_masked(values - targets, mask)
    plain = errors.square()
    if clip is None:
        return plain, {"clipfrac": torch.zeros_like(plain)}
    moved = where_masked(values - old_values, mask)
    at_bound = (moved.clamp(-clip, clip) + where_masked(old_values - targets, mask)).square()
    # Within the bounds the two squares are one but for rounding, which must not choose between them.
    raised = (moved.abs() > clip) & (at_bound > plain)
    return torch.where(raised, at_bound, plain), {"clipfrac": raised.float()}
