"""The client's side of Reef: a client, drivers, graders, evaluation. Speaks HTTP only and never imports the service."""

from reef_harness.client import Client, Retry
from reef_harness.conversation import Conversation
from reef_harness.drivers import GroupsDriver, Progress, Rollout, StreamDriver, finish_on_sigint
from reef_harness.evaluation import Evaluation, evaluate, wilson
from reef_harness.graders import FinalGrader, Grader, Verdict
from reef_harness.sync import SyncClient
from reef_harness.types import Choice, Completion, Explanation, Item, Release, ReportState

__all__ = [
    "Choice",
    "Client",
    "Completion",
    "Conversation",
    "Evaluation",
    "Explanation",
    "FinalGrader",
    "Grader",
    "GroupsDriver",
    "Item",
    "Progress",
    "Release",
    "ReportState",
    "Retry",
    "Rollout",
    "StreamDriver",
    "SyncClient",
    "Verdict",
    "evaluate",
    "finish_on_sigint",
    "wilson",
]
