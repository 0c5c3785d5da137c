"""Drivers: keep rollouts in flight, grade them, report them, at the pace of the training."""

from reef_harness.drivers.groups import GRADABLE, GroupsDriver, Progress, Rollout, finish_on_sigint

__all__ = ["GRADABLE", "GroupsDriver", "Progress", "Rollout", "finish_on_sigint"]
