"""Passes over microbatches through Megatron's schedule: those that train, and those that only score.

Shape letters: B rows, T their length, V vocabulary entries of this tensor rank.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from reef.faults import reach
from reef.methods.base import Method, Tokens
from reef.methods.value import value_loss
from reef.training import device
from reef.training.entropy import entropies
from reef.training.megatron import Network
from reef.training.padding import Microbatch
from reef.types import Floats

Loss = Callable[[Microbatch, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]


def train_pass(policy: Network, microbatches: Sequence[Microbatch], method: Method) -> dict[str, float]:
    """Accumulate the gradient of sum(weight * token_loss) over all microbatches of all ranks.

    Every rank must bring the same number of microbatches, with the planes `engine_logprobs`, `advantages`, `weights`
    and `lags`, and `reference_logprobs` where the method uses a reference.

    Returns:
        `loss`, `num_tokens`, the method's metrics and `entropy` averaged over trained tokens, and the distance between
        the engine's and the trainer's log-probabilities (`train_rollout_logprob_abs_diff`, `..._max`): the same on
        every rank.
    """
    policy.model.train()
    passed = _run(policy, microbatches, partial(_policy_loss, method), forward_only=False)
    return _reduce(passed, largest="train_rollout_logprob_abs_diff_max")


def critic_pass(critic: Network, microbatches: Sequence[Microbatch], clip: float | None) -> dict[str, float]:
    """Accumulate the gradient of the critic's loss, averaged over all sampled tokens of all ranks.

    Every rank must bring the same number of microbatches, with the planes `old_values`, `targets` and `weights`.

    Returns:
        `loss`, `num_tokens`, and `value` and `clipfrac` averaged over those tokens.
    """
    critic.model.train()
    return _reduce(_run(critic, microbatches, partial(_critic_loss, clip), forward_only=False))


@torch.no_grad()
def score_pass(network: Network, microbatches: Sequence[Microbatch]) -> list[Floats] | None:
    """Log-probabilities [B, T] of each position's next token; None on ranks without the last pipeline stage."""
    network.model.eval()
    passed = _run(network, microbatches, _score, forward_only=True)
    return [reported["logprobs"].cpu().numpy() for reported in passed] or None


@torch.no_grad()
def value_pass(critic: Network, microbatches: Sequence[Microbatch]) -> list[Floats] | None:
    """The critic's values [B, T] after each position's token; None on ranks without the last pipeline stage."""
    critic.model.eval()
    passed = _run(critic, microbatches, _value, forward_only=True)
    return [reported["values"].cpu().numpy() for reported in passed] or None


def _run(
    network: Network, microbatches: Sequence[Microbatch], loss: Loss, *, forward_only: bool
) -> list[dict[str, torch.Tensor]]:
    """Megatron's schedule; returns what `loss` reported per microbatch, on the last pipeline stage."""

    def forward_step(batches: Iterator[Microbatch], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        microbatch = next(batches)
        with device.model_calls():
            output = model(microbatch.ids, microbatch.positions, None, packed_seq_params=microbatch.packed)
        return output, partial(_apply, loss, microbatch)

    with device.megatron_calls():
        passed: list[dict[str, torch.Tensor]] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches),
            model=[network.model],
            num_microbatches=len(microbatches),
            seq_length=microbatches[0].ids.shape[1],
            micro_batch_size=microbatches[0].ids.shape[0],
            forward_only=forward_only,
        )
    return passed


def _apply(
    loss: Loss, microbatch: Microbatch, logits_BTV: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    with device.model_calls():
        total, reported = loss(microbatch, logits_BTV)
        # The count of tokens is Megatron's way to a mean; the weights have made the mean already.
        return total, torch.zeros((), dtype=torch.int, device=total.device), reported


def token_logprobs(microbatch: Microbatch, logits_BTV: torch.Tensor) -> torch.Tensor:
    """Log-probability [B, T] of each next token at its own temperature, in float32; over all tensor ranks."""
    # The division also makes the copy that Megatron's cross-entropy needs: it overwrites float32 logits.
    scaled = logits_BTV.float() / microbatch.temperature[..., None]
    loss: torch.Tensor = vocab_parallel_cross_entropy(scaled, microbatch.targets)
    return -loss


def _score(microbatch: Microbatch, logits_BTV: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logprobs = token_logprobs(microbatch, logits_BTV)
    return logprobs.sum(), {"logprobs": logprobs}


def _value(microbatch: Microbatch, values_BT1: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    values = values_BT1[..., 0].float()
    return values.sum(), {"values": values}


def _policy_loss(
    method: Method, microbatch: Microbatch, logits_BTV: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    reach("step.microbatch")
    mask, planes = microbatch.mask, microbatch.planes
    rows = mask.flatten().nonzero().squeeze(-1)
    entropy = entropies(logits_BTV.detach().flatten(0, 1), microbatch.temperature.flatten(), rows)
    logprobs = token_logprobs(microbatch, logits_BTV)
    tokens = Tokens(
        logprobs=logprobs,
        engine_logprobs=planes["engine_logprobs"],
        advantages=planes["advantages"],
        mask=mask,
        sequences=microbatch.sequences,
        num_sequences=len(microbatch.starts),
        lags=planes["lags"],
        reference_logprobs=planes.get("reference_logprobs"),
    )
    losses, values = method.token_loss(tokens)
    total = (losses * planes["weights"]).sum()
    gap = (logprobs.detach() - planes["engine_logprobs"]).abs() * mask
    sums = {name: (value * mask).sum(dtype=torch.float64) for name, value in values.items()}
    return total, {
        "loss": total.detach().double(),
        "num_tokens": mask.sum(dtype=torch.float64),
        "entropy": entropy.sum(dtype=torch.float64),
        "train_rollout_logprob_abs_diff": gap.sum(dtype=torch.float64),
        "train_rollout_logprob_abs_diff_max": gap.max().double(),
        **sums,
    }


def _critic_loss(
    clip: float | None, microbatch: Microbatch, values_BT1: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    reach("critic.microbatch")
    mask, planes = microbatch.mask, microbatch.planes
    values = values_BT1[..., 0].float()
    losses, figures = value_loss(values, planes["old_values"], planes["targets"], mask, clip)
    total = (losses * planes["weights"]).sum()
    figures = {"value": values.detach(), **figures}
    sums = {name: torch.where(mask, value, 0.0).sum(dtype=torch.float64) for name, value in figures.items()}
    return total, {"loss": total.detach().double(), "num_tokens": mask.sum(dtype=torch.float64), **sums}


def _reduce(passed: list[dict[str, torch.Tensor]], largest: str | None = None) -> dict[str, float]:
    """Add up over microbatches and ranks. A sum is counted once: by the last stage's first tensor rank.

    `loss` and `num_tokens` stay sums, `largest` names what is a maximum, all else becomes a mean over tokens.
    """
    counts = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
    names = _agree(list(passed[0]) if passed else [])
    rows = [[reported[name] for name in names] for reported in passed] if counts else []
    table = torch.tensor(rows or [[0.0] * len(names)], dtype=torch.float64, device=device.current())
    sums, maxima = table.sum(0), table.max(0).values
    dist.all_reduce(sums)
    dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
    totals = dict(zip(names, sums.tolist(), strict=True))
    tokens = max(totals["num_tokens"], 1.0)
    means = {name: total / tokens for name, total in totals.items() if name not in ("loss", "num_tokens")}
    if largest is not None:
        means[largest] = maxima.tolist()[names.index(largest)]
    return {"loss": totals["loss"], "num_tokens": totals["num_tokens"], **means}


def _agree(names: list[str]) -> list[str]:
    """The metrics' names on every rank: stages before the last have none of their own."""
    if dist.get_world_size() == 1:
        return names
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, names)
    return next(found for found in gathered if found)
