"""The client's side of Reef: a client, drivers, graders, evaluation. Speaks HTTP only and never imports the service."""

from reef_harness.client import Client, Retry
from reef_harness.drivers import GroupsDriver, Progress, Rollout, finish_on_sigint
from reef_harness.evaluation import Evaluation, evaluate, wilson
from reef_harness.graders import FinalGrader, Grader, Verdict
from reef_harness.types import Choice, Completion, Item, Release, ReportState

__all__ = [
    "Choice",
    "Client",
    "Completion",
    "Evaluation",
    "FinalGrader",
    "Grader",
    "GroupsDriver",
    "Item",
    "Progress",
    "Release",
    "ReportState",
    "Retry",
    "Rollout",
    "Verdict",
    "evaluate",
    "finish_on_sigint",
    "wilson",
]
