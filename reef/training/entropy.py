"""Entropy of the policy's next-token distributions, as a figure: nothing is trained on it."""

import torch
import torch.distributed as dist
from megatron.core import parallel_state

ROWS = 128  # distributions at once: a vocabulary is large, and each takes two float32 copies of its part


@torch.no_grad()
def entropies(logits_NV: torch.Tensor, temperature_N: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Entropy [rows] in nats of softmax(logits / temperature), whose vocabulary is cut over tensor ranks.

    Every tensor rank must call, with the same rows.

    Args:
        rows: int64, those of N that are asked for; None: all.
    """
    if rows is None:
        rows = torch.arange(len(logits_NV), device=logits_NV.device)
    found = [
        _entropy(logits_NV[some].float().div_(temperature_N[some, None]))
        for some in (rows[start : start + ROWS] for start in range(0, len(rows), ROWS))
    ]
    return torch.cat(found) if found else temperature_N.new_zeros(0)


def _entropy(logits_NV: torch.Tensor) -> torch.Tensor:
    """log(sum(e)) - sum(e * x) / sum(e), with x the distance from the largest logit and e = exp(x). Overwrites."""
    group = parallel_state.get_tensor_model_parallel_group()
    largest = logits_NV.max(-1).values
    if group.size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    below = logits_NV.sub_(largest[:, None])
    weights = below.exp()
    total = weights.sum(-1)
    sums = torch.stack([total, weights.mul_(below.nan_to_num_(neginf=0.0)).sum(-1)])
    if group.size() > 1:
        dist.all_reduce(sums, group=group)
    return sums[0].log() - sums[1] / sums[0]
