"""Entropy of the policy's next-token distributions, as a figure: nothing is trained on it."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state

ROWS = 1024  # distributions at once: a vocabulary is large, and each takes a float32 copy of its part


@torch.no_grad()
def entropies(logits_NV: torch.Tensor, temperature_N: torch.Tensor) -> torch.Tensor:
    """Entropy [N] in nats of softmax(logits / temperature), whose vocabulary is cut over tensor ranks.

    Every tensor rank must call, with the same rows.
    """
    found = [
        _entropy(logits_NV[start : start + ROWS].float() / temperature_N[start : start + ROWS, None])
        for start in range(0, len(logits_NV), ROWS)
    ]
    return torch.cat(found) if found else logits_NV.new_zeros(0, dtype=torch.float32)


def _entropy(logits_NV: torch.Tensor) -> torch.Tensor:
    """log(sum(e)) - sum(e * x) / sum(e), with x the distance from the largest logit and e = exp(x)."""
    group = parallel_state.get_tensor_model_parallel_group()
    largest = logits_NV.max(-1).values
    if group.size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    below = logits_NV - largest[:, None]
    weights = below.exp()
    sums = torch.stack([weights.sum(-1), (weights * below.nan_to_num(neginf=0.0)).sum(-1)])
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
    return sums[0].log() - sums[1] / sums[0]
