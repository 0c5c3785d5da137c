"""Agent trajectories in ATIF 1.8, the format that Harbor and other trainers read: one conversation, turn by turn.

    turns -> trajectory(...) -> a dict of JSON values

Messages become steps: system, user, agent; a tool's result is an observation of the step that called it. A step that
the model answered has the ids and log-probabilities that were sampled, one for each id. `is_copied_context` marks what
must not be trained on here: turns that another trajectory holds as its own, and what a client says that the assistant
said though no receipt does. The specification: RFC 0001 of harbor-framework/harbor.

Harbor's own validator asks for more than the package `atif` does: at least one step, and `source_call_id` only where
the same step has that call. Both hold here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from reef.chat.conversation import Conversation, Message, ToolCall
from reef.chat.reply import Reply
from reef.errors import DamagedError
from reef.types import Receipt

SCHEMA_VERSION = "ATIF-v1.8"
LOWEST_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have
UNKNOWN = "unknown"  # agents do not say who they are; tags may

Step = dict[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class AgentTurn:
    """What was asked and answered in one turn."""

    receipt: Receipt
    conversation: Conversation
    reply: Reply
    repeats: bool = True  # the conversation holds the turns before it again; False: only what was added to them
    copied: bool = False  # another trajectory holds it as its own
    grades: Sequence[Mapping[str, Any]] = ()  # JSON values: the reports that reference its receipt


def trajectory(turns: Sequence[AgentTurn], model_name: str | None = None, notes: Sequence[str] = ()) -> dict[str, Any]:
    """One conversation as ATIF.

    Args:
        turns: each continues the one before it; at least one.
        model_name: of the model that answered.
        notes: what a reader should know of it.

    Raises:
        DamagedError: a receipt has not one log-probability for each id.
    """
    steps = _Steps()
    told = [*notes, *_tell(turns, steps)]
    last = turns[-1]
    own = [turn.receipt for turn in turns if not turn.copied]
    whole: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "trajectory_id": last.receipt.id,
        "agent": _agent(last, model_name),
        "steps": steps.numbered(),
        "final_metrics": {
            "total_prompt_tokens": sum(len(receipt.prompt_ids) for receipt in own),
            "total_completion_tokens": sum(len(receipt.generation.output_ids) for receipt in own),
            "total_steps": len(steps.made),
        },
        "extra": {"reef": {"scenario": last.receipt.scenario, "purpose": last.receipt.purpose}},
    }
    if last.receipt.session is not None:
        whole["session_id"] = last.receipt.session
    if told:
        whole["notes"] = "; ".join(told)
    return whole


def _tell(turns: Sequence[AgentTurn], steps: "_Steps") -> list[str]:
    """Every turn as steps; what is unusual about it."""
    notes = []
    num_before = 0  # messages so far, those that were sent and those that were answered
    for turn in turns:
        messages = turn.conversation.messages
        if turn.repeats and num_before:
            if len(messages) >= num_before and messages[num_before - 1].role == "assistant":
                messages = messages[num_before:]
            else:
                notes.append(f"the messages of {turn.receipt.id} do not repeat those before it: all of them are shown")
                num_before = 0
        for message in messages:
            steps.add(message, turn.copied)
        steps.answer(turn)
        num_before += len(messages) + 1
    return notes


def _agent(last: AgentTurn, model_name: str | None) -> dict[str, Any]:
    tags = last.receipt.tags
    shown: dict[str, Any] = {"name": tags.get("agent") or UNKNOWN, "version": tags.get("agent-version") or UNKNOWN}
    if model_name is not None:
        shown["model_name"] = model_name
    if last.conversation.tools:
        shown["tool_definitions"] = [dict(tool) for tool in last.conversation.tools]
    return shown


class _Steps:
    """Steps, one after the other."""

    def __init__(self) -> None:
        self.made: list[Step] = []

    def numbered(self) -> list[Step]:
        """The steps with their ids, 1, 2, ..."""
        return [{"step_id": number, **step} for number, step in enumerate(self.made, start=1)]

    def add(self, message: Message, copied: bool) -> None:
        """A message that the client sent."""
        if message.role == "tool":
            self._observe(message, copied)
            return
        step: Step = {"source": "user" if message.role == "user" else "system", "message": message.content}
        if message.role == "assistant":
            step = _said(message.content, message.reasoning, message.tool_calls)
        if message.name is not None:
            step["extra"] = {"name": message.name}
        self._append(step, copied or message.role == "assistant")

    def answer(self, turn: AgentTurn) -> None:
        """What the model answered, with what is recorded of it where it is not copied."""
        receipt, reply = turn.receipt, turn.reply
        step = {
            "timestamp": datetime.fromtimestamp(receipt.created_at, UTC).isoformat(),
            **_said(reply.content, reply.reasoning, reply.tool_calls),
            "extra": {"reef": {**_provenance(receipt), "reports": [dict(grade) for grade in turn.grades]}},
        }
        if not turn.copied:
            step |= {"llm_call_count": 1, "metrics": _metrics(receipt)}
        self._append(step, turn.copied)

    def _append(self, step: Step, copied: bool) -> None:
        self.made.append({**step, "is_copied_context": True} if copied else step)

    def _observe(self, message: Message, copied: bool) -> None:
        result: Step = {"content": message.content}
        if message.name is not None:
            result["extra"] = {"name": message.name}
        for step in reversed(self.made):
            if message.tool_call_id in [call["tool_call_id"] for call in step.get("tool_calls", ())]:
                results = step.setdefault("observation", {"results": []})["results"]
                results.append({"source_call_id": message.tool_call_id, **result})
                return
        # No step has such a call (a client may send any): the result stands by itself.
        result["extra"] = {**result.get("extra", {}), "tool_call_id": message.tool_call_id}
        self._append({"source": "system", "message": "", "observation": {"results": [result]}}, copied)


def _said(content: str, reasoning: str | None, calls: Iterable[ToolCall]) -> Step:
    step: Step = {"source": "agent", "message": content}
    if reasoning is not None:
        step["reasoning_content"] = reasoning
    if shown := [_call(call) for call in calls]:
        step["tool_calls"] = shown
    return step


def _call(call: ToolCall) -> Step:
    """Arguments must be an object; text that is none is kept beside an empty one."""
    shown: Step = {"tool_call_id": call.id, "function_name": call.name}
    arguments = call.values()
    if isinstance(arguments, dict):
        return {**shown, "arguments": arguments}
    return {**shown, "arguments": {}, "extra": {"arguments": call.arguments}}


def _metrics(receipt: Receipt) -> Step:
    ids, logprobs = receipt.generation.output_ids, receipt.generation.logprobs
    if len(ids) != len(logprobs):
        raise DamagedError(receipt.id, f"it has {len(ids)} ids and {len(logprobs)} log-probabilities")
    metrics: Step = {
        "prompt_tokens": len(receipt.prompt_ids),
        "completion_tokens": len(ids),
        "prompt_token_ids": receipt.prompt_ids.tolist(),
        "completion_token_ids": ids.tolist(),
    }
    if np.isnan(logprobs).any() or (logprobs == np.inf).any():  # nothing a number could stand for
        return metrics
    return {**metrics, "logprobs": np.maximum(logprobs, np.float32(LOWEST_LOGPROB)).tolist()}


def _provenance(receipt: Receipt) -> Step:
    generation = receipt.generation
    return {
        "agent_record_id": receipt.id,
        "request_id": receipt.request_id,
        "continued_by": receipt.continued_by,
        "release_ids": list(dict.fromkeys(span.release_id for span in generation.spans)),
        "finish_reason": generation.finish_reason.value,
        "temperature": receipt.sampling.temperature,
        "exact": receipt.inexact_reason is None,
        "inexact_reason": receipt.inexact_reason,
    }
