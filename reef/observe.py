"""What the service tells about itself: a log, Prometheus metrics, and Weights & Biases when asked.

Nothing in here may stop the loop: a metric that cannot be written is a warning, once.
"""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from reef.config import Config

log = logging.getLogger("reef")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


def set_up_logging(level: str, path: Path) -> None:
    """Everything to `path`; warnings and errors to standard error too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(path)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    to_screen = logging.StreamHandler(sys.stderr)
    to_screen.setLevel(logging.WARNING)
    to_screen.setFormatter(logging.Formatter("reef: %(levelname)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [to_file, to_screen]
    root.setLevel(logging.WARNING)
    log.setLevel(level.upper())


class Metrics:
    """The Prometheus metrics of one service, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # memory, file descriptors, processor time
        self.in_flight = Gauge("reef_in_flight", "Inference requests in work", registry=registry)
        self.tasks = Gauge("reef_asyncio_tasks", "Tasks of the event loop", registry=registry)
        self.blocks = Gauge("reef_python_memory_blocks", "Blocks of memory of Python's objects", registry=registry)
        self.requests = Counter("reef_http_requests", "HTTP answers", ["route", "status"], registry=registry)
        self.request_seconds = Histogram(
            "reef_http_request_seconds", "Time to a whole answer", ["route"], buckets=_SECONDS, registry=registry
        )
        self.sampled_tokens = Counter("reef_sampled_tokens", "Tokens recorded in receipts", registry=registry)
        self.receipts = Counter("reef_receipts", "Receipts stored", registry=registry)
        self.deleted = Counter(
            "reef_receipts_deleted", "Receipts whose content was deleted, by why", ["reason"], registry=registry
        )
        self.reports = Counter("reef_reports", "Reports accepted, by their first state", ["state"], registry=registry)
        self.drops = Counter(
            "reef_dropped_reports",
            "Reports that selection dropped or a step left out, by reason",
            ["reason"],
            registry=registry,
        )
        self.neutralised = Counter(
            "reef_sampling_neutralised", "Requests whose sampling fields were overridden", registry=registry
        )
        self.releases = Counter("reef_releases", "Releases committed", registry=registry)
        self.failed_batches = Counter("reef_failed_batches", "Batches that ended failed", registry=registry)
        self.step_seconds = Histogram(
            "reef_step_seconds", "Time of a step by phase", ["phase"], buckets=_SECONDS, registry=registry
        )
        self.load_seconds = Histogram("reef_load_seconds", "Time of a weight load", buckets=_SECONDS, registry=registry)
        self.load_phases = Histogram(
            "reef_load_phase_seconds",
            "Time of a weight load by phase: pause (in which transfer lies), transfer, verify",
            ["phase"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.load_bytes = Counter("reef_load_bytes", "Bytes of weights loaded", registry=registry)
        self.load_failures = Counter("reef_load_failures", "Loads that failed at first", registry=registry)
        self.engine_restarts = Counter("reef_engine_restarts", "Engines restarted after they ended", registry=registry)
        self.step_metrics = Gauge("reef_step", "Metrics of the newest step", ["name"], registry=registry)

    def render(self) -> bytes:
        """The text format of GET /metrics."""
        return generate_latest(self.registry)


class WandbLog:
    """Writes each release's metrics to a Weights & Biases run; does nothing where that is not enabled."""

    def __init__(self, config: Config, scenario: str) -> None:
        self._run: Any = None
        settings = config.observability.wandb
        if not settings.enabled:
            return
        directory = settings.directory or config.reef.run_dir / "wandb"
        try:
            import wandb

            directory.mkdir(parents=True, exist_ok=True)
            quiet = wandb.Settings(silent=True, console="off")
            self._run = wandb.init(
                project=settings.project, name=scenario, dir=str(directory), mode="offline", settings=quiet
            )
        except Exception as error:  # noqa: BLE001 - metrics never stop the loop
            log.warning("no Weights & Biases: %s", error)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a release's metrics at `step`. A failure is a warning, and nothing more is written after it."""
        if self._run is None:
            return
        try:
            self._run.log(dict(metrics), step=step)
        except Exception as error:  # noqa: BLE001 - metrics never stop the loop
            log.warning("Weights & Biases stopped: %s", error)
            self._run = None

    def close(self) -> None:
        """End the run, so that its files are whole. A failure is a warning."""
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as error:  # noqa: BLE001 - metrics never stop the loop
            log.warning("Weights & Biases did not end well: %s", error)
