"""What a trial's ``result.json`` says to report: the verifier's reward against the trial's receipts, or why nothing.

Knows Harbor's result as JSON only, so that it reads a job's folder without Harbor.
"""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass

from reef_harness.types import Json

REWARD_KEY = "reward"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A report to be made. The same trial gives the same one, id included, however often it is read."""

    id: str
    trial: str
    task: str
    references: tuple[str, ...]
    score: float
    rewards: Mapping[str, float]

    @property
    def metadata(self) -> Json:
        """What the report says of where it comes from."""
        return {"source": "harbor", "trial": self.trial, "task": self.task}


@dataclass(frozen=True, slots=True)
class NotGraded:
    """A trial of which nothing is reported, and why."""

    trial: str
    task: str
    reason: str


def verdict_of(
    result: Json, reward_key: str = REWARD_KEY, graded_exceptions: Set[str] = frozenset()
) -> Verdict | NotGraded:
    """Judge a finished trial. Its score is the reward named ``reward_key``, else the only one there is.

    A trial in which anything was raised is not graded, though Harbor may call its reward valid: an agent that crashed
    after it wrote an answer was not seen to its end. ``graded_exceptions`` names types that count nevertheless, as
    AgentTimeoutError where running out of time is the policy's own fault. Raises KeyError for what is no trial's
    result.
    """
    trial, task = str(result["trial_name"]), str(result["task_name"])

    def no(reason: str) -> NotGraded:
        return NotGraded(trial, task, reason)

    raised = [each for each in _exceptions(result) if each["exception_type"] not in graded_exceptions]
    if raised:
        said = str(raised[0]["exception_message"]).strip().splitlines()
        return no(f"the trial ended with {raised[0]['exception_type']}{': ' + said[0][:200] if said else ''}")
    rewards = (result.get("verifier_result") or {}).get("rewards")
    if not rewards:
        return no("the verifier gave no reward")
    if not result["reward_valid"]:
        return no("Harbor calls its reward invalid")
    score = rewards.get(reward_key, next(iter(rewards.values())) if len(rewards) == 1 else None)
    if score is None:
        return no(
            f"no reward is named {reward_key!r}, only {', '.join(sorted(rewards))} (reward_key says which counts)"
        )
    if not all(map(_is_number, rewards.values())):
        return no(f"a reward is no finite number: {rewards}")
    references = _references(result)
    if not references:
        return no("its agent kept no receipts (terminus-2 does with collect_rollout_details=true)")
    return Verdict(report_id(result), trial, task, references, float(score), {k: float(v) for k, v in rewards.items()})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def report_id(result: Json) -> str:
    """One for each trial of a job: a retry of the trial has another id of Harbor's, and this one again."""
    job = (result.get("config") or {}).get("job_id") or "no-job"
    return f"harbor-{job}-{result['trial_name']}"[:256]  # the longest id the service takes


def _exceptions(result: Json) -> list[Json]:
    steps = [step.get("exception_info") for step in result.get("step_results") or ()]
    return [each for each in (result.get("exception_info"), *steps) if each]


def _references(result: Json) -> tuple[str, ...]:
    """The receipts of all turns, in order: as HarborAgent left them, or as terminus-2 keeps them for each turn."""
    steps = [step.get("agent_result") for step in result.get("step_results") or ()]
    found: list[str] = []
    for context in filter(None, (result.get("agent_result"), *steps)):
        ours = (context.get("metadata") or {}).get("reef")
        if ours is not None:
            found += ours["references"]
            continue
        for detail in context.get("rollout_details") or ():
            found += filter(None, (detail.get("extra") or {}).get("reef_agent_record_id") or ())
    return tuple(dict.fromkeys(found))
