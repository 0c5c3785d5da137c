"""What runs in a worker process: a thin actor around `MegatronWorker`.

The driver imports this module and never the worker's, so that torch and Megatron are loaded in worker processes only.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker is told at its start."""

    rank: int
    world_size: int
    model_path: Path
    rendezvous: Path  # a file that all ranks can write, fresh for each start
    settings: Mapping[str, Any]  # as in Batch.settings: layout, dtype, seed, threads
    micro_batch_tokens: int


class WorkerActor:
    """Made cheaply, so that an error of the real start travels back as what it is."""

    def __init__(self) -> None:
        self._worker: Any = None

    def pid(self) -> int:
        """This process's id."""
        return os.getpid()

    def start(self, spec: WorkerSpec, log_path: Path, environment: Mapping[str, str]) -> None:
        """Send this process's output to `log_path`, then build the worker. Blocks until every rank is there."""
        _redirect_output(log_path)
        os.environ.update(environment)
        from reef.training.worker import MegatronWorker

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
