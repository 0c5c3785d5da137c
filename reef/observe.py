"""What the service tells about itself: a log, and Prometheus metrics. (Weights & Biases: `wandb_log.py`.)"""

import logging
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

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
        self.alarms = Counter(
            "reef_alarms", "Alarms that releases rang, by held-out metric", ["metric"], registry=registry
        )
        self.step_metrics = Gauge("reef_step", "Metrics of the newest step", ["name"], registry=registry)

    def ring(self, release_id: str, metric: str, message: str) -> None:
        """An alarm rings for the first time: a warning in the log, and counted."""
        self.alarms.labels(metric).inc()
        log.warning("alarm on release %s: %s", release_id, message)

    def render(self) -> bytes:
        """The text format of GET /metrics."""
        return generate_latest(self.registry)
