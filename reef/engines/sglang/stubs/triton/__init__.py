"""Triton, in whose language SGLang declares kernels all over: an import stub.

What a kernel is declared with works, so that modules that hold kernels can be imported. Launching one raises.
"""

from collections.abc import Callable
from typing import Any

from reef.engines.sglang.import_only import missing, stub

__version__ = "3.0+stub"  # torch reads the number


def jit(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
    """`@triton.jit` and `@triton.jit(...)`: the kernel, which cannot be launched."""
    return jit if function is None else missing(function.__module__, function.__qualname__)


def autotune(*_arguments: Any, **_options: Any) -> Callable[[Any], Any]:
    """`@triton.autotune(...)`, which leaves what it decorates as it is; so does `@triton.heuristics(...)`."""
    return lambda kernel: kernel


heuristics = autotune


class Config:
    """`triton.Config({...}, num_warps=4)`: what `autotune` would choose from."""

    def __init__(self, *_arguments: Any, **_options: Any) -> None: ...


stub(__name__)
