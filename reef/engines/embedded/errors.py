"""Errors of the embedded engine, one class per boundary."""

from __future__ import annotations


class ModelError(Exception):
    """A model directory cannot be served: missing, damaged, unsupported or not the served architecture."""


class BadRequestError(ValueError):
    """A request body is wrong; the message names the field, what was expected and what came. Answered with 400."""


class QueueFullError(Exception):
    """The waiting queue is at `--max-queued-requests`. Answered with 503."""


class EngineStoppedError(Exception):
    """The generation thread has ended: the server is shutting down or has failed. Answered with 503."""
