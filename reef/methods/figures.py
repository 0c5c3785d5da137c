"""What a batch says of itself before any model has seen it: how old its samples are, how long they lay, of what parts
their rewards were made. Part of a release's metrics: docs/metrics.md."""

from collections.abc import Sequence

import numpy as np

from reef.types import Batch, Sample


def batch_figures(name: str, batch: Batch) -> dict[str, float]:
    """Figures of the rollouts of a batch. A report that gave several sequences counts once, with its oldest.

    `NAME/policy_lag_*` (policy updates) and `NAME/queue_age_s_*` (seconds from report to reservation) are of those that
    train; where none does, they are left out. `reward/COMPONENT` is the mean over all rollouts whose report names it.

    Args:
        name: of the method; of a class of your own (my_pkg.file:Class) the figures bear the class's name.
    """
    name = name.rpartition(":")[2]
    found: dict[str, float] = {}
    rollouts = _rollouts([sample for sample in batch.samples if sample.trains])
    if rollouts:
        lags = [max(sample.lag for sample in rollout) for rollout in rollouts]
        ages = [batch.reserved_at - rollout[0].accepted_at for rollout in rollouts]
        for figure, values in (("policy_lag", lags), ("queue_age_s", ages)):
            found[f"{name}/{figure}_mean"] = float(np.mean(values))
            found[f"{name}/{figure}_max"] = float(np.max(values))
    parts: dict[str, list[float]] = {}
    for rollout in _rollouts(batch.samples):
        for part, value in rollout[0].components.items():
            parts.setdefault(part, []).append(value)
    return found | {f"reward/{part}": float(np.mean(values)) for part, values in sorted(parts.items())}


def _rollouts(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The sequences of each report."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.report_id, []).append(sample)
    return list(found.values())
