"""Which rank is on which device.

Trainer rank r has the r-th of `training.devices`, engine ranks in turn those of `inference.devices`, a candidate those
after all replicas, one that is lent the next; without devices both count from GPU 0, so that a trainer and an engine on
a machine's only GPU share it. On a Ray cluster each rank has a GPU of its own. The embedded engine, and whatever was
told to do without a GPU, shares the machine's own memory.
"""

from collections.abc import Collection, Iterator, Sequence

from reef.cluster.address import Address
from reef.cluster.room import check_room
from reef.config import Config
from reef.errors import ConfigError
from reef.memory.engine import EngineMemory
from reef.memory.hardware import Device, Hardware, ranges
from reef.memory.trainer import TrainerMemory, checkpoint_bytes
from reef.training.architecture import Architecture

SERVICE_BYTES, RAY_BYTES = 440 * 2**20, 520 * 2**20
"""The service and Ray's own processes: 435 and 512 MiB (docs/performance.md)."""


def place(
    config: Config,
    architecture: Architecture,
    stages: Sequence[TrainerMemory],
    engine: EngineMemory | None,
    hardware: Hardware,
    cluster: Address | None,
) -> list[Device]:
    """The devices that are asked for something, with who asks for how much.

    Args:
        stages: what a rank of each pipeline stage takes; [] where nothing trains.
        engine: what each rank of an engine takes; None where none is started.

    Raises:
        ConfigError: more GPUs are needed than there are, or trainer and engines share one where they must not.
    """
    devices = _devices(hardware)
    _check_there_are_any(config, hardware)
    if cluster is None:
        trainer_gpus, engine_gpus = _trainer_gpus(config, hardware), _engine_gpus(config, hardware)
    else:
        trainer_gpus, engine_gpus = _on_cluster(config, hardware, cluster)
    _check_numbers("training", "training.layout", trainer_gpus, hardware)
    _check_numbers("inference", "inference.replicas, inference.tensor", engine_gpus, hardware)
    _check_apart(config, set(trainer_gpus) & set(engine_gpus))
    _fill(devices, trainer_gpus, _trainer_ranks(config, stages))
    _fill(devices, engine_gpus, _engine_ranks(config, engine))
    if cluster is None:
        devices[-1].used.extend(_others(config, architecture))
    if hardware.simulated:
        devices.pop()  # how much memory that machine has, nobody has said
    return [device for device in devices if device.used]


def trains_on_gpu(config: Config, hardware: Hardware) -> bool:
    return bool(hardware.gpus) and config.training.devices != []


def engines_on_gpu(config: Config, hardware: Hardware) -> bool:
    inference = config.inference
    return bool(hardware.gpus) and inference.backend == "sglang" and inference.options.get("device") != "cpu"


def num_engines(config: Config) -> int:
    """Engines that Reef starts: the replicas, and one for the candidate where a gate holds releases."""
    return 0 if config.inference.url is not None else config.inference.replicas + bool(config.evaluation.gate)


def gpus_of_lent(config: Config, hardware: Hardware, cluster: Address | None) -> list[int]:
    """The GPUs of one engine more, which is lent for an evaluation; [] where engines use none.

    Raises:
        ConfigError: there are none left for it.
    """
    if not engines_on_gpu(config, hardware):
        return []
    tensor, there = config.inference.tensor, len(hardware.gpus) * hardware.num_nodes
    begin = num_engines(config) * tensor
    if cluster is not None:
        begin = sum(map(len, _on_cluster(config, hardware, cluster)))
    named = config.inference.devices if cluster is None else None
    gpus = list(range(begin, begin + tensor)) if named is None else named[begin : begin + tensor]
    if len(gpus) < tensor:
        raise ConfigError("inference.devices names no GPU for one more")
    if max(gpus) >= there:
        raise ConfigError(f"it takes GPU {ranges(gpus)}, and there is GPU {ranges(range(there))}")
    return gpus


def _devices(hardware: Hardware) -> list[Device]:
    """Every GPU there is, and the machine's own memory last."""
    gpus = hardware.gpus * hardware.num_nodes
    return [*(Device(f"GPU {index}", size) for index, size in enumerate(gpus)), Device("memory", hardware.memory)]


def _check_there_are_any(config: Config, hardware: Hardware) -> None:
    for section, numbers in (("training", config.training.devices), ("inference", config.inference.devices)):
        if numbers and not hardware.gpus:
            raise ConfigError(
                f"{section}.devices names GPU {ranges(numbers)}, and there is none: leave it out on a CPU"
            )


def _trainer_gpus(config: Config, hardware: Hardware) -> list[int]:
    """The GPU of each trainer rank on one machine; [] where they use none."""
    if config.training.backend == "none" or not trains_on_gpu(config, hardware):
        return []
    return _first("training", config.training.devices, config.training.layout.world_size)


def _engine_gpus(config: Config, hardware: Hardware) -> list[int]:
    """The GPU of each engine rank on one machine, engine by engine; [] where they use none."""
    if not engines_on_gpu(config, hardware):
        return []
    return _first("inference", config.inference.devices, num_engines(config) * config.inference.tensor)


def _first(section: str, devices: Sequence[int] | None, num_ranks: int) -> list[int]:
    """The GPUs of `num_ranks` ranks: in the order of `devices`, else of their numbers."""
    if devices is not None and len(devices) < num_ranks:
        raise ConfigError(f"{section}.devices names {len(devices)} GPUs, and its {num_ranks} ranks take one each")
    return list(range(num_ranks) if devices is None else devices[:num_ranks])


def _on_cluster(config: Config, hardware: Hardware, cluster: Address) -> tuple[list[int], list[int]]:
    """The GPUs of trainer ranks and of engine ranks where each has one of its own.

    Raises:
        ConfigError: the nodes have no room for them.
    """
    if not hardware.gpus:
        return [], []
    node = {"CPU": float("inf"), "GPU": float(len(hardware.gpus))}
    with_engines = config.inference.url is None
    check_room(config, [node] * hardware.num_nodes, True, cluster, with_engines=with_engines)
    trainers = config.training.layout.world_size if config.training.backend != "none" else 0
    engines = num_engines(config) * config.inference.tensor if engines_on_gpu(config, hardware) else 0
    return list(range(trainers)), list(range(trainers, trainers + engines))


def _check_numbers(section: str, ranks: str, numbers: Sequence[int], hardware: Hardware) -> None:
    there = len(hardware.gpus) * hardware.num_nodes
    if missing := sorted({number for number in numbers if number >= there}):
        raise ConfigError(
            f"{section} takes GPU {ranges(missing)}, and there is GPU {ranges(range(there))}: change "
            f"{section}.devices, or ask for fewer ranks ({ranks})"
        )


def _trainer_ranks(config: Config, stages: Sequence[TrainerMemory]) -> list[tuple[str, int]]:
    layout = config.training.layout
    ranks = range(layout.world_size if stages else 0)
    return [(f"trainer rank {rank}", stages[rank * layout.pipeline // layout.world_size].total) for rank in ranks]


def _engine_ranks(config: Config, engine: EngineMemory | None) -> list[tuple[str, int]]:
    if engine is None:
        return []
    names = [_engine_name(config, index) for index in range(num_engines(config))]
    return [(name, engine.total) for name in names for _ in range(config.inference.tensor)]


def _fill(devices: Sequence[Device], gpus: Sequence[int], ranks: Sequence[tuple[str, int]]) -> None:
    """Put each rank on its GPU, or where they use none into the machine's own memory."""
    for index, rank in enumerate(ranks):
        devices[gpus[index] if gpus else -1].used.append(rank)


def _others(config: Config, architecture: Architecture) -> Iterator[tuple[str, int]]:
    """What else takes the machine's memory."""
    yield "service", SERVICE_BYTES
    if config.training.backend != "none":
        yield "Ray", RAY_BYTES
        yield "a checkpoint being written", checkpoint_bytes(architecture, config)


def _check_apart(config: Config, shared: Collection[int]) -> None:
    """NCCL refuses two ranks of one group on one GPU, and weights are sent in a group of trainer and engines."""
    if shared and config.training.sync.transport == "distributed":
        raise ConfigError(
            f"trainer and engines share GPU {ranges(sorted(shared))}, where NCCL cannot send weights from one to the "
            "other: set training.sync.transport: disk, or give each its own (inference.devices, training.devices)"
        )


def _engine_name(config: Config, index: int) -> str:
    return f"engine {index}" if index < config.inference.replicas else "engine of the candidate"
