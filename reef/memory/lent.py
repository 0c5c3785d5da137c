"""What an engine that is lent for an evaluation takes: one more, where and whenever somebody borrows it."""

from collections.abc import Iterator, Sequence

from reef.cluster.address import Address
from reef.config import Config
from reef.errors import ConfigError
from reef.memory.engine import EngineMemory
from reef.memory.hardware import Device, Hardware, ranges, size_text
from reef.memory.placement import gpus_of_lent


def lent_lines(
    config: Config,
    engine: EngineMemory | None,
    hardware: Hardware,
    cluster: Address | None,
    devices: Sequence[Device],
) -> Iterator[str]:
    """A line about one engine beside those that are placed; never a problem, for nobody need borrow it.

    Args:
        engine: what each of its ranks takes; None: none is started, so none is lent.
        devices: those in use, filled.
    """
    if engine is None:
        return
    try:
        gpus = gpus_of_lent(config, hardware, cluster)
    except ConfigError as error:
        yield f"  lent for an evaluation: none can be, {error.message}"
        return
    size = engine.total if gpus else config.inference.tensor * engine.total
    if gpus and cluster is not None:  # Ray chooses the node
        yield f"  lent for an evaluation: one more, {size_text(size)} of {len(gpus)} GPU of a node that has them free"
        return
    if gpus:
        where = f"GPU {ranges(gpus)}{', each' if len(gpus) > 1 else ''}"
        left = [hardware.gpus[gpu % len(hardware.gpus)] - _used(devices, f"GPU {gpu}") for gpu in gpus]
    else:
        where = "memory"
        left = [] if hardware.simulated else [hardware.memory - _used(devices, "memory")]
    yield f"  lent for an evaluation: one more, {size_text(size)} of {where}{_left(min(left) - size) if left else ''}"


def _used(devices: Sequence[Device], name: str) -> int:
    return sum(device.total for device in devices if device.name == name)


def _left(size: int) -> str:
    return f", {size_text(size)} left then" if size >= 0 else f", {size_text(-size)} too much then"
