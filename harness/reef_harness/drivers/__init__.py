"""Drivers: keep rollouts in flight, grade them, report them, at the pace of the training."""

from reef_harness.drivers.driver import Driver, Options, Progress, Rewards
from reef_harness.drivers.groups import GroupsDriver
from reef_harness.drivers.interrupts import finish_on_sigint
from reef_harness.drivers.records import Rollout, read_rollouts
from reef_harness.drivers.rollout import GRADABLE
from reef_harness.drivers.stream import StreamDriver

__all__ = [
    "GRADABLE",
    "Driver",
    "GroupsDriver",
    "Options",
    "Progress",
    "Rewards",
    "Rollout",
    "StreamDriver",
    "finish_on_sigint",
    "read_rollouts",
]
