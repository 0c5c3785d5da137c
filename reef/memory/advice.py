"""What to change where a configuration does not fit: the settings that weigh most, the largest first."""

from collections.abc import Iterator, Sequence

from reef.config import Config
from reef.memory.engine import EngineMemory, longest_request
from reef.memory.hardware import Device, size_text
from reef.memory.trainer import TrainerMemory, largest_microbatch
from reef.training.architecture import Architecture

WORTH_NAMING = 0.1  # share of a rank's memory


def advice(config: Config, architecture: Architecture, device: Device, stages: Sequence[TrainerMemory]) -> str:
    """One sentence about a device that is asked for more than it has."""
    trains = any(who.startswith("trainer") for who, _ in device.used)
    serves = any(who.startswith("engine") for who, _ in device.used)
    on_gpu = device.name.startswith("GPU")
    changes: list[str] = []
    if trains:
        changes += _trainer(config, architecture, max(stages, key=lambda need: need.total), on_gpu)
    if serves:
        changes += _engine(config, on_gpu)
    if trains and serves and on_gpu:
        changes.append("give engines and trainer different GPUs (inference.devices, training.devices)")
    return f"{device}. To change: {'; '.join(changes)}"


def cache_problem(config: Config, architecture: Architecture, engine: EngineMemory) -> str:
    """One sentence about a cache that does not hold one request of full length."""
    holds, longest = engine.cache_tokens, longest_request(architecture, config)
    more = "inference.options.mem-fraction-static" if config.inference.backend == "sglang" else None
    raised = f"raise {more or 'inference.options.max-total-tokens'}"
    return (
        f"an engine's cache holds {holds} tokens, and one request may take {longest}: lower inference.context-length, "
        f"or {raised}{', or use more inference.tensor ranks' if more else ''}"
    )


def _trainer(config: Config, architecture: Architecture, need: TrainerMemory, on_gpu: bool) -> Iterator[str]:
    training = config.training
    layout, options = training.layout, training.options
    of_tokens = need.activations + need.logits
    if of_tokens > WORTH_NAMING * need.total:
        tokens = largest_microbatch(architecture, config)
        if tokens > training.micro_batch_tokens:
            setting = f"inference.context-length: a sequence of {tokens} tokens goes through the model alone"
        else:
            setting = f"training.micro-batch-tokens ({tokens})"
        yield f"lower {setting} (logits {size_text(need.logits)}, activations {size_text(need.activations)})"
    if need.activations > WORTH_NAMING * need.total and options.recompute_granularity != "full":
        yield (
            "compute activations again: training.options.recompute-granularity: full, recompute-method: uniform, "
            "recompute-num-layers: 1"
        )
    if layout.data * layout.context > 1 and not options.use_distributed_optimizer:
        yield "divide the optimizer over data ranks: training.options.use-distributed-optimizer: true"
    if on_gpu:
        yield "use more ranks: training.layout.tensor or pipeline, or data with the distributed optimizer"
    else:
        yield "use a smaller model, or a machine with more memory"


def _engine(config: Config, on_gpu: bool) -> Iterator[str]:
    options = {name.replace("_", "-"): value for name, value in config.inference.options.items()}
    if on_gpu:
        fraction = options.get("mem-fraction-static")
        now = f"now {fraction}" if fraction is not None else "not set: SGLang takes the whole GPU"
        yield f"lower inference.options.mem-fraction-static ({now})"
    else:
        yield "lower inference.options.max-total-tokens"
