"""Monitoring: what a run did, on one page, and which of its checkpoints may be used."""

from reef_harness.monitor.gates import Gate, Gates, best, check, read_gates
from reef_harness.monitor.source import Run, from_file, from_service, with_rollouts
from reef_harness.monitor.statistics import Correlation, correlation

__all__ = [
    "Correlation",
    "Gate",
    "Gates",
    "Run",
    "best",
    "check",
    "correlation",
    "from_file",
    "from_service",
    "read_gates",
    "with_rollouts",
]
