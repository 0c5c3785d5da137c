"""An optimizer's tensors by parameter, under names that no layout changes: what checkpoints hold of it.

    optimizer.state.exp_avg.PARAMETER, optimizer.state.exp_avg_sq.PARAMETER    moments
    optimizer.state.fp32_param.PARAMETER                                       the main copy of a bfloat16 weight

Megatron's own state dicts name and nest these differently for each kind of optimizer, so that one kind could not read
what another wrote. Settings and counts of steps are not among them: the trainer sets both before each step.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from reef.training import optimizer as training_optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
MAIN = "fp32_param"


def sharded(optimizer: Any, model: dict[str, Any], *, loading: bool) -> dict[str, Any]:
    """The optimizer's tensors for Megatron's `dist_checkpointing`. Every rank must call.

    Args:
        model: the model's sharded state dict, whose tensors are the parameters themselves.
        loading: they are to be read into, so their values do not matter.
    """
    return {
        str(index): _sharded_shares(part, model, loading) if _is_distributed(part) else _sharded_whole(part, model)
        for index, part in enumerate(optimizer.chained_optimizers)
    }


def load(optimizer: Any, loaded: dict[str, Any], steps: int) -> None:
    """Take what a checkpoint's load made of `sharded`; the model has taken its weights before.

    Args:
        steps: the optimizer steps done by then.
    """
    for index, part in enumerate(optimizer.chained_optimizers):
        (_load_shares if _is_distributed(part) else _load_whole)(part, loaded[str(index)])
    training_optimizer.set_steps(optimizer, steps)


def _is_distributed(part: Any) -> bool:
    return isinstance(part, DistributedOptimizer)


def _sharded_whole(part: Any, model: dict[str, Any]) -> dict[str, Any]:
    """Of an optimizer that keeps all moments of this rank's weights."""
    parameters = list(_parameters(part))
    by_position = get_param_id_to_sharded_param_map(model, (weight for weight, _ in parameters))
    return {
        str(position): {
            name: make_sharded_optimizer_tensor(by_position[position], tensor, f"optimizer.state.{name}")
            for name, tensor in _tensors(part, weight, main).items()
        }
        for position, (weight, main) in enumerate(parameters)
    }


def _load_whole(part: Any, loaded: dict[str, Any]) -> None:
    with torch.no_grad():
        for position, (weight, main) in enumerate(_parameters(part)):
            for name, tensor in _tensors(part, weight, main).items():
                tensor.copy_(loaded[str(position)][name])


def _parameters(part: Any) -> Iterator[tuple[Any, Any]]:
    """Each weight with what the optimizer steps in its place: a float32 copy, or in float32 the weight itself."""
    if isinstance(part, Float16OptimizerWithFloat16Params):
        for weights, mains in (
            *zip(part.float16_groups, part.fp32_from_float16_groups, strict=True),
            *zip(part.fp32_from_fp32_groups, part.fp32_from_fp32_groups, strict=True),
        ):
            yield from zip(weights, mains, strict=True)
    else:
        yield from ((weight, weight) for weight in part.get_parameters())


def _tensors(part: Any, weight: Any, main: Any) -> dict[str, Any]:
    moments = {name: part.optimizer.state[main][name] for name in MOMENTS}
    return moments if main is weight else {MAIN: main, **moments}


def _sharded_shares(part: Any, model: dict[str, Any], loading: bool) -> dict[str, Any]:
    """Of a distributed optimizer: data ranks hand their shares to the first of them, which has all then.

    That takes memory for whole moments on one rank of each, and less time than writing them.
    """
    state = part.sharded_param_state_fully_reshardable(
        model, loading, {"distrib_optim_fully_reshardable_mem_efficient": True}
    )
    found: dict[str, Any] = {}
    for position, tensors in (state or {}).items():  # None on the other data ranks, unless they load
        main = tensors.pop("param")
        if _weights(part)[position].dtype is not torch.float32:
            key = main.key.replace("optimizer.state.param.", f"optimizer.state.{MAIN}.", 1)
            tensors[MAIN] = replace(main, key=key)
        found[str(position)] = tensors
    return found


def _load_shares(part: Any, loaded: dict[str, Any]) -> None:
    """Megatron takes this rank's shares out of whole tensors.

    0.16.1 looks for AdamW's counts of steps among them and would fail: they are taken away meanwhile.
    """
    for state in part.optimizer.state.values():
        state.pop("step", None)
    weights = _weights(part)
    part.load_parameter_state_from_fully_reshardable(
        {int(position): {MAIN: weights[int(position)].data, **tensors} for position, tensors in loaded.items()}
    )


def _weights(part: Any) -> list[Any]:
    """In the order in which Megatron numbers what it shares out."""
    return [weight for buffer in part.buffers for weight in buffer.param_index_map]
