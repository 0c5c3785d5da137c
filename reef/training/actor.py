"""What runs in a worker process: a thin actor around `MegatronWorker`.

The driver imports this module and never the worker's, so that torch and Megatron are loaded in worker processes only.
"""

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reef.cluster.node import check_shared, speak_over
from reef.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker is told at its start."""

    rank: int
    world_size: int
    model_path: Path
    rendezvous: Path  # a file that all ranks can write, fresh for each start
    settings: Mapping[str, Any]  # as in Batch.settings: layout, dtype, seed, threads
    micro_batch_tokens: int


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a worker's process is told before its start."""

    log_path: Path
    address: str  # of its node, over whose interface it speaks to other ranks
    visible_devices: str | None  # the GPU that it may use, "" for none; None: as Ray set it
    shared: Mapping[str, Path]  # directories that every rank must see, by the setting that names each


class WorkerActor:
    """Made cheaply, so that an error of the real start travels back as what it is."""

    def __init__(self) -> None:
        self._worker: Any = None

    def pid(self) -> int:
        """This process's id."""
        return os.getpid()

    def settle(self, surroundings: Surroundings) -> None:
        """Send this process's output to the log; choose interface and GPU.

        Raises:
            ConfigError: the files or the GPU are not on this machine.
        """
        check_shared(surroundings.shared, "a training worker")
        _redirect_output(surroundings.log_path)
        speak_over(surroundings.address)
        if surroundings.visible_devices is not None:
            _use_gpu(surroundings.visible_devices)

    def start(self, spec: WorkerSpec) -> None:
        """Build the worker. Blocks until every rank is there."""
        # Megatron imports wandb where that is installed, which makes two directories at once and removes them at the
        # end of the process: Ray ends this one by a kill. Where the ranks meet goes with them, however they end.
        tempfile.tempdir = str(spec.rendezvous.parent)
        from reef.training.worker import MegatronWorker

        tempfile.tempdir = None
        self._worker = MegatronWorker(spec)

    def call(self, method: str, *args: Any) -> Any:
        """Call one of the worker's public methods."""
        return getattr(self._worker, method)(*args)


def _redirect_output(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _use_gpu(number: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = number  # before torch is imported: it looks once
    if number:
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(
                f"training.devices gives GPU {number} to a worker, but torch finds none of that number here; "
                "train on CPUs with training.devices: []"
            )
