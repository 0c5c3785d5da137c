"""Megatron-Core on a machine without CUDA: the one place where anything is patched. With CUDA nothing here acts.

Megatron-Core 0.16.1 asks for CUDA in three ways, and runs unchanged on a CPU once each has an answer:

- it calls functions of `torch.cuda` (current device, synchronise, random state, a stream for the experts' counts):
  `install` gives them CPU ones;
- its schedule, DDP and optimizer write `device="cuda"`, `.cuda()`, and check `.type()` against CUDA names:
  `megatron_calls` translates those while such code runs;
- neither happens inside the model's own forward pass, and a function mode costs a little on every torch call, so
  `model_calls` switches the translation off again around it.

Numbers are computed by the same Megatron code as on a GPU, in the same order of calls.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}


def has_cuda() -> bool:
    """True where training runs on GPUs."""
    return torch.cuda.is_available()


def has_transformer_engine() -> bool:
    """True where NVIDIA's kernels are installed for the GPU that trains."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return has_cuda() and bool(HAVE_TE)


def current() -> torch.device:
    """The device of this process."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else CPU


def backend() -> str:
    """The torch.distributed backend that fits the device."""
    return "nccl" if has_cuda() else "gloo"


def install() -> None:
    """Answer Megatron's calls into `torch.cuda` on a CPU. Once per process is enough; again does no harm.

    Without Transformer Engine, on any device, the router of Megatron's experts lacks a name: it gets it.
    """
    from megatron.core.transformer.moe import moe_utils

    if not moe_utils.HAVE_TE:
        _patch(moe_utils, te_general_gemm=None)  # 0.16.1 asks whether it is None, and imports it with the rest alone
    if has_cuda():
        return
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    def nothing(*_args: Any, **_kwargs: Any) -> None:
        return None

    def get_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
        torch.set_rng_state(state)

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(value)

    # `current_device` answers with a device, not a number: every caller hands it on as `device=`.
    _patch(
        torch.cuda,
        current_device=lambda: CPU,
        synchronize=nothing,
        get_rng_state=get_state,
        set_rng_state=set_state,
        manual_seed=seed,
    )
    _patch(megatron_random, _get_cuda_rng_state=get_state, _set_cuda_rng_state=set_state)
    # Experts: there is no stream on which counts of tokens would be copied to the CPU; they are there.
    _patch(MoEAlltoAllTokenDispatcher, cuda_dtoh_stream=CPU, _maybe_dtoh_and_synchronize=_counts_are_here)


def _patch(owner: Any, **values: Any) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def _counts_are_here(dispatcher: Any, _point: str, tokens_per_expert: Any = None) -> Any:
    """What Megatron makes of counts once they are on the CPU: sizes of messages as numbers."""
    for name in ("input_splits", "output_splits"):
        if isinstance(sizes := getattr(dispatcher, name), torch.Tensor):
            setattr(dispatcher, name, sizes.tolist())
    return tokens_per_expert


class _CudaAsCpu(TorchFunctionMode):
    """Translates the requests for CUDA that Megatron writes down literally."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        elif _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return _CUDA_TYPE_NAMES.get(args[0].dtype, "torch.cuda.Tensor")
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return device is not None and str(device).split(":")[0] == "cuda"


@contextlib.contextmanager
def megatron_calls() -> Iterator[None]:
    """Around Megatron's schedule, DDP, optimizer and checkpointing. Thread-local, so enter it in every method."""
    if has_cuda():
        yield
    else:
        with _CudaAsCpu():
            yield


@contextlib.contextmanager
def model_calls() -> Iterator[None]:
    """Around the model's forward pass and the loss, inside `megatron_calls`: torch without the translation."""
    if has_cuda():
        yield
    else:
        with torch._C.DisableTorchFunction():
            yield
