"""Does a configuration fit the devices it is for?

Config, Architecture, Hardware -> Plan: a line for each kind of rank and of device, and what does not fit
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby

from reef.cluster.address import Address
from reef.config import Config
from reef.errors import ConfigError
from reef.memory.advice import advice, cache_problem
from reef.memory.engine import EngineMemory, engine_memory, longest_request
from reef.memory.hardware import Device, Hardware, ranges, size_text
from reef.memory.lent import lent_lines
from reef.memory.placement import engines_on_gpu, place, trains_on_gpu
from reef.memory.trainer import TrainerMemory, largest_microbatch, trainer_memory
from reef.training.architecture import Architecture


@dataclass(frozen=True, slots=True)
class Plan:
    """Who takes how much of what."""

    lines: tuple[str, ...]
    problems: tuple[str, ...]  # each says what does not fit, and what to change


def plan(
    config: Config, architecture: Architecture, file_dtype: str, hardware: Hardware, cluster: Address | None
) -> Plan:
    """Add up what the trainer's ranks and the engines take.

    Args:
        file_dtype: of the model's config.json.
        cluster: the Ray cluster that is joined; None: all is on one machine.
    """
    stages, engine = _stages(config, architecture, hardware), _engine(config, architecture, file_dtype, hardware)
    lines = [*_trainer_lines(config, architecture, stages), *_engine_lines(config, architecture, engine)]
    problems = []
    if engine is not None and engine.cache_tokens < longest_request(architecture, config):
        problems.append(cache_problem(config, architecture, engine))
    if cluster is not None and not hardware.simulated:
        unknown = f"the nodes of the cluster at {cluster} are not known before it is joined: simulate them (--gpus)"
        return Plan((*lines, unknown), tuple(problems))
    if cluster is None and hardware.num_nodes > 1:
        several = f"{hardware.num_nodes} nodes need a Ray cluster that joins them: set training.ray-address"
        return Plan(tuple(lines), (several,))
    try:
        devices = place(config, architecture, stages, engine, hardware, cluster)
    except ConfigError as error:
        return Plan(tuple(lines), (error.message,))
    problems += [advice(config, architecture, device, stages) for device in devices if not device.fits]
    lines += lent_lines(config, engine, hardware, cluster, devices)
    return Plan((*lines, *_device_lines(devices)), tuple(problems))


def _stages(config: Config, architecture: Architecture, hardware: Hardware) -> list[TrainerMemory]:
    if config.training.backend == "none":
        return []
    on_gpu = trains_on_gpu(config, hardware)
    stages = range(config.training.layout.pipeline)
    return [trainer_memory(architecture, config, stage, on_gpu=on_gpu) for stage in stages]


def _engine(config: Config, architecture: Architecture, file_dtype: str, hardware: Hardware) -> EngineMemory | None:
    if config.inference.url is not None:
        return None
    on_gpu = engines_on_gpu(config, hardware)
    capacity = min(hardware.gpus) if on_gpu else hardware.memory
    return engine_memory(architecture, config, file_dtype, capacity, on_gpu=on_gpu)


def _trainer_lines(config: Config, architecture: Architecture, stages: Sequence[TrainerMemory]) -> Iterator[str]:
    layout = config.training.layout
    each = layout.world_size // layout.pipeline
    for stage, need in enumerate(stages):
        ranks = ranges(range(stage * each, (stage + 1) * each))
        tokens = largest_microbatch(architecture, config)
        yield f"trainer rank {ranks}: {size_text(need.total)}{' each' if each > 1 else ''}, {tokens} tokens at a time"
        yield _parts(asdict(need))


def _engine_lines(config: Config, architecture: Architecture, engine: EngineMemory | None) -> Iterator[str]:
    if engine is None:
        return
    names = f"engine {ranges(range(config.inference.replicas))}{' and the candidate' if config.evaluation.gate else ''}"
    tensor, longest = config.inference.tensor, longest_request(architecture, config)
    yield (
        f"{names}: {size_text(engine.total)}{f' on each of {tensor} ranks' if tensor > 1 else ''}, "
        f"{engine.cache_tokens} tokens in its cache: {engine.cache_tokens / longest:.1f} requests of {longest}"
    )
    yield _parts({"weights": engine.weights, "keys and values": engine.kv_cache, "runtime": engine.runtime})


def _parts(sizes: Mapping[str, int]) -> str:
    return "  " + ", ".join(f"{name} {size_text(size)}" for name, size in sizes.items() if size)


def _device_lines(devices: Sequence[Device]) -> Iterator[str]:
    """A line for each device; one for several in a row that hold the same."""
    for (capacity, used), alike in groupby(devices, lambda device: (device.capacity, _kinds(device))):
        first, *more = alike
        if more:
            numbers = [int(device.name.removeprefix("GPU ")) for device in (first, *more)]
            first = Device(f"GPU {ranges(numbers)}, each", capacity, used)
        yield str(first)


def _kinds(device: Device) -> list[tuple[str, int]]:
    """What a device holds, without the numbers of ranks and engines."""
    return [(who.split()[0], size) for who, size in device.used]
