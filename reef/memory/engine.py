"""Memory of one engine rank, from the model's sizes and the engine's own options: nothing is started or allocated."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reef.config import Config
from reef.engines.sglang.launch import CPU_CACHE_BYTES
from reef.memory import parameters
from reef.memory.trainer import ITEM_BYTES, bucket_bytes
from reef.training.architecture import Architecture

EMBEDDED_RUNTIME_BYTES = 384 * 2**20
"""Python and torch: the embedded engine on the starter model takes 380 MiB (docs/performance.md)."""

EMBEDDED_CACHE_TOKENS, EMBEDDED_CACHE_BYTES = 65536, 2 * 2**30
"""The embedded engine's own bounds where `max-total-tokens` is not set; it stays below both."""

SGLANG_CPU_RUNTIME_BYTES = 1400 * 2**20
"""SGLang's three processes on a CPU, with a model of next to no size."""

_SGLANG_DEFAULTS = (  # GPUs below this GiB: tokens of a prefill chunk, requests of the largest CUDA graph
    (20, 2048, 8),
    (35, 4096, 48),
    (60, 4096, 32),
    (160, 8192, 256),
    (float("inf"), 16384, 512),
)


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes of one engine rank, and the tokens that its cache of keys and values holds."""

    weights: int
    kv_cache: int
    runtime: int
    cache_tokens: int

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.runtime


def engine_memory(
    architecture: Architecture, config: Config, file_dtype: str, capacity: int, *, on_gpu: bool
) -> EngineMemory:
    """What each rank of an engine takes.

    Args:
        file_dtype: of the model's config.json.
        capacity: bytes of the rank's GPU, or of the machine without one: SGLang fills a share of it.
    """
    inference = config.inference
    options = {name.replace("_", "-"): value for name, value in inference.options.items()}
    item = _item_bytes(config, options, file_dtype)
    weights = item * parameters.on_engine(architecture, inference.tensor)
    per_token = cache_bytes_per_token(architecture, inference.tensor, item)
    limit = options.get("max-total-tokens")
    if on_gpu:
        working = _sglang_working(options, inference.tensor, capacity)
        tokens = max(0, _sglang_static(options, working, capacity) - weights) // per_token
        tokens = tokens if limit is None else min(tokens, int(limit))
    elif inference.backend == "sglang":
        working = SGLANG_CPU_RUNTIME_BYTES
        if limit is None and "mem-fraction-static" in options:
            tokens = max(0, _sglang_static(options, working, capacity) - weights) // per_token
        else:
            tokens = int(limit or _cpu_cache_tokens(architecture, config))
    else:
        working = EMBEDDED_RUNTIME_BYTES
        tokens = int(limit or min(EMBEDDED_CACHE_TOKENS, EMBEDDED_CACHE_BYTES // per_token))
    return EngineMemory(weights, tokens * per_token, working + bucket_bytes(config), tokens)


def longest_request(architecture: Architecture, config: Config) -> int:
    """Tokens of the longest prompt with its answer."""
    return config.inference.context_length or architecture.context_length


def cache_bytes_per_token(architecture: Architecture, tensor: int, item: int) -> int:
    """Bytes of one token's keys and values on one of `tensor` ranks: 2 * layers * key columns * item."""
    return 2 * architecture.num_layers * parameters.key_columns(architecture, tensor) * item


def _item_bytes(config: Config, options: Mapping[str, Any], file_dtype: str) -> int:
    """Bytes of a served weight. SGLang serves the trained precision; `auto` is the file's, but float16 for float32."""
    backend, training = config.inference.backend, config.training
    preferred = "float32" if backend == "embedded" else "auto" if training.backend == "none" else training.dtype
    dtype = str(options.get("dtype", preferred))
    if dtype == "auto":
        dtype = "float16" if (backend, file_dtype) == ("sglang", "float32") else file_dtype
    return ITEM_BYTES.get(dtype, 4 if dtype == "float" else 2)  # "float" and "half" are SGLang's other names


def _cpu_cache_tokens(architecture: Architecture, config: Config) -> int:
    """What Reef asks SGLang for on a CPU: CPU_CACHE_BYTES of float32, and at least one request of full length."""
    tokens = CPU_CACHE_BYTES // cache_bytes_per_token(architecture, 1, 4)
    return max(tokens, architecture.context_length, config.inference.context_length or 0)


def _sglang_working(options: Mapping[str, Any], tensor: int, capacity: int) -> int:
    """What SGLang 0.5.23 keeps free beside weights and cache, by its own rule (`memory_hook.py`).

    512 MiB, 1.5 MiB a token of a prefill chunk (at least 2048), 128 MiB a rank, 2 MiB a request of the largest graph.
    """
    of_size = next((chunk, graph) for limit, chunk, graph in _SGLANG_DEFAULTS if capacity < limit * 2**30)
    chunk = int(options.get("chunked-prefill-size", of_size[0]))
    graph = min(of_size[1], int(options.get("max-running-requests", of_size[1])))
    mib = 512 + 1.5 * max(chunk, 2048) + 128 * tensor + 2 * (0 if options.get("disable-cuda-graph") else graph)
    return int(mib * 2**20)


def _sglang_static(options: Mapping[str, Any], working: int, capacity: int) -> int:
    """Weights and cache: `mem-fraction-static` of a GPU, else all but the working memory (of 60 GiB, at least 10)."""
    fraction = options.get("mem-fraction-static")
    if fraction is not None:
        return int(capacity * float(fraction))
    return capacity - (max(working, 10 * 2**30) if capacity > 60 * 2**30 else working)
