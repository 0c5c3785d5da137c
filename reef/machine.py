"""This machine: its devices, its disks, its ports, and the versions of what is installed. Starts nothing."""

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil

from reef.errors import ConfigError
from reef.memory.hardware import Hardware, ranges, size_text

LIBRARIES = (
    *("torch", "transformers", "megatron-core", "ray", "fastapi", "sqlalchemy", "wandb"),
    *("sglang", "sglang-kernel", "transformer-engine"),  # the last two on GPUs only
)
GIB = 2**30
TORCH_TIMEOUT_S = 120
GPUS = """
import json, torch.cuda as cuda
print(json.dumps([cuda.get_device_properties(index).total_memory for index in range(cuda.device_count())]))
"""


def hardware() -> Hardware:
    """The devices of this machine."""
    has_driver = any(Path("/dev").glob("nvidia[0-9]*"))
    return Hardware(visible_gpus() if has_driver else (), psutil.virtual_memory().total)


def visible_gpus() -> tuple[int, ...]:
    """Bytes of each GPU that torch sees; it is asked in a process of its own, since whoever asks takes some of them.

    Raises:
        ConfigError: torch cannot be asked.
    """
    done = subprocess.run([sys.executable, "-c", GPUS], capture_output=True, text=True, timeout=TORCH_TIMEOUT_S)
    if done.returncode != 0:
        raise ConfigError(f"torch cannot say which GPUs there are: {done.stderr.strip().splitlines()[-1:]}")
    return tuple(json.loads(done.stdout))


def simulated(num_gpus: int, gpu_memory_gib: float, num_nodes: int) -> Hardware:
    """The devices of a machine that is not here, or of several alike. Of its other parts nothing is known.

    Raises:
        ConfigError: no such machine can be.
    """
    if num_gpus < 1 or num_nodes < 1 or not gpu_memory_gib > 0:
        raise ConfigError(
            f"--gpus {num_gpus} --gpu-memory-gib {gpu_memory_gib:g} --nodes {num_nodes}: expected at least one of each"
        )
    gpus = (int(gpu_memory_gib * GIB),) * num_gpus
    return Hardware(gpus, psutil.virtual_memory().total, num_nodes, simulated=True)


def describe() -> list[str]:
    """Python, and cores, memory and disk, a line each."""
    memory = psutil.virtual_memory()
    return [
        f"python    {platform.python_version()} on {platform.platform()}",
        f"machine   {os.cpu_count()} cores, {size_text(memory.total)} memory ({size_text(memory.available)} free), "
        f"{size_text(shutil.disk_usage('.').free)} of disk free here",
    ]


def describe_gpus(found: Hardware) -> str:
    """The GPUs of a machine, or of each of several, in words."""
    alike = {size: [index for index, other in enumerate(found.gpus) if other == size] for size in found.gpus}
    gpus = "; ".join(f"{ranges(indices)} with {size_text(size)}" for size, indices in alike.items()) or "none"
    nodes = f" on each of {found.num_nodes} nodes" if found.num_nodes > 1 else ""
    return f"GPU       {gpus}{nodes}{' (simulated)' if found.simulated else ''}"


def version(library: str) -> str | None:
    """The installed version; None where it is not installed."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_port(host: str, port: int) -> None:
    """Whether the service could listen there now; it is let go at once.

    Raises:
        ConfigError: it could not.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen()
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror} (reef.host, reef.port; 0: the kernel chooses)"
            ) from None


def check_disks(needs: Mapping[Path, int]) -> list[str]:
    """What does not fit on the disks: bytes needed in each directory, which may not be there yet.

    What the directories hold already counts as part of it. Those on one file system are added up.
    """
    missing: dict[int, tuple[int, int, list[Path]]] = {}
    for directory, need in needs.items():
        place = next(parent for parent in (directory.absolute(), *directory.absolute().parents) if parent.exists())
        free, disk = shutil.disk_usage(place).free, place.stat().st_dev
        more = max(0, need - _size(directory))
        before, _, others = missing.get(disk, (0, 0, []))
        missing[disk] = (before + more, free, [*others, directory])
    return [
        f"the disk of {' and '.join(map(str, directories))} has {size_text(free)} free, and {size_text(need)} more are "
        "needed: lower storage.keep or storage.keep-checkpoints, or move reef.run-dir or storage.releases-dir"
        for need, free, directories in missing.values()
        if need > free
    ]


def _size(directory: Path) -> int:
    """Bytes of the files below a directory; those that go meanwhile count as nothing."""
    total = 0
    for path, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size  # noqa: PTH118 (os.walk's own words)
            except FileNotFoundError:
                continue
    return total
