"""ATIF: what the `atif` package validates, with what was sampled on the steps that the model answered."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from atif import Trajectory
from hypothesis import given
from hypothesis import strategies as st

from reef.atif import LOWEST_LOGPROB, AgentTurn, trajectory
from reef.chat.conversation import Conversation, Message, ToolCall
from reef.chat.reply import Reply
from reef.errors import DamagedError
from reef.types import FinishReason, Generation, Receipt, Sampling, Span

TOOLS = ({"type": "function", "function": {"name": "ls", "description": "", "parameters": {}}},)


def receipt(number: int, prompt: list[int], output: list[int], **changes: Any) -> Receipt:
    made = Receipt(
        id=f"rcp_{number}",
        request_id=f"req_{number}",
        scenario="s",
        choice=0,
        prompt_ids=np.array(prompt, np.int32),
        generation=Generation(
            output_ids=np.array(output, np.int32),
            logprobs=-np.linspace(0.25, 1, len(output), dtype=np.float32),
            finish_reason=FinishReason.STOP,
            spans=(Span(0, len(output), "r3"),) if output else (),
        ),
        sampling=Sampling(max_tokens=8, temperature=0.7),
        purpose="train",
        session=None,
        parent=None,
        tags={},
        template_digest=None,
        tokenizer_digest=None,
        engine_build="e",
        created_at=1_700_000_000.25,
        inexact_reason=None,
        digest="",
    )
    return dataclasses.replace(made, **changes)


def turn(
    number: int, messages: list[Message], reply: Reply, prompt: list[int], output: list[int], **changes: Any
) -> Any:
    fields = {name: changes.pop(name) for name in ("repeats", "copied") if name in changes}
    conversation = Conversation(tuple(messages), TOOLS)
    return AgentTurn(receipt(number, prompt, output, **changes), conversation, reply, **fields)


def valid(turns: list[AgentTurn], **options: Any) -> dict[str, Any]:
    """The trajectory, once the package has validated what a file of it would hold."""
    made = trajectory(turns, **options)
    text = json.dumps(made, allow_nan=False)
    checked = Trajectory.model_validate_json(text)
    assert checked.to_json_dict() == json.loads(text)
    return made


SYSTEM, ASK = Message("system", "be brief"), Message("user", "what is here?")
CALLS = Reply(
    "let me see", "I need ls", (ToolCall("c1", "ls", '{"path": "/"}'), ToolCall("c2", "ls", '{"path": "/x"}'))
)
RESULTS = [Message("tool", "a b", tool_call_id="c1"), Message("tool", "no such", tool_call_id="c2", name="ls")]
DONE = Reply("a and b")


def conversation() -> list[AgentTurn]:
    first = turn(1, [SYSTEM, ASK], CALLS, [1, 2, 3], [10, 11])
    second = turn(
        2, [SYSTEM, ASK, CALLS.message(), *RESULTS], DONE, [1, 2, 3, 10, 11, 4], [12], continued_by="messages"
    )
    return [first, second]


def test_a_conversation_with_tools_becomes_steps_with_their_ids_log_probabilities_and_observations() -> None:
    first, second = conversation()
    graded = dataclasses.replace(second, grades=[{"agent_record_id": "rep_1", "score": 0.5, "state": "trained"}])
    made = valid([first, graded], model_name="starter")
    assert made["schema_version"] == "ATIF-v1.8"
    assert made["trajectory_id"] == "rcp_2"
    assert made["agent"] == {
        "name": "unknown",
        "version": "unknown",
        "model_name": "starter",
        "tool_definitions": [dict(TOOLS[0])],
    }
    assert made["final_metrics"] == {"total_prompt_tokens": 9, "total_completion_tokens": 3, "total_steps": 4}
    assert "notes" not in made and "session_id" not in made
    system, user, calls, done = made["steps"]
    assert (system["source"], system["message"]) == ("system", "be brief")
    assert (user["source"], user["message"]) == ("user", "what is here?")
    assert (calls["source"], calls["message"], calls["reasoning_content"]) == ("agent", "let me see", "I need ls")
    assert calls["tool_calls"] == [
        {"tool_call_id": "c1", "function_name": "ls", "arguments": {"path": "/"}},
        {"tool_call_id": "c2", "function_name": "ls", "arguments": {"path": "/x"}},
    ]
    assert calls["observation"]["results"] == [
        {"source_call_id": "c1", "content": "a b"},
        {"source_call_id": "c2", "content": "no such", "extra": {"name": "ls"}},
    ]
    assert calls["metrics"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "prompt_token_ids": [1, 2, 3],
        "completion_token_ids": [10, 11],
        "logprobs": [-0.25, -1.0],
    }
    assert calls["timestamp"] == "2023-11-14T22:13:20.250000+00:00"
    assert done["metrics"]["prompt_token_ids"] == [1, 2, 3, 10, 11, 4]
    assert done["extra"]["reef"] == {
        "agent_record_id": "rcp_2",
        "request_id": "req_2",
        "continued_by": "messages",
        "release_ids": ["r3"],
        "finish_reason": "stop",
        "temperature": 0.7,
        "exact": True,
        "inexact_reason": None,
        "reports": [{"agent_record_id": "rep_1", "score": 0.5, "state": "trained"}],
    }
    assert not any(step.get("is_copied_context") for step in made["steps"])


def test_turns_that_another_trajectory_holds_are_copied_context_without_metrics() -> None:
    first, second = conversation()
    made = valid([dataclasses.replace(first, copied=True), second])
    assert [step.get("is_copied_context", False) for step in made["steps"]] == [True, True, True, False]
    assert ["metrics" in step for step in made["steps"]] == [False, False, False, True]
    assert made["final_metrics"]["total_completion_tokens"] == 1


def test_what_only_the_client_says_the_assistant_said_is_copied_context() -> None:
    shots = [Message("user", "1+1"), Message("assistant", "2", reasoning="easy"), Message("user", "2+2", name="ada")]
    made = valid([turn(1, shots, Reply("4"), [1], [2])])
    assert [step.get("is_copied_context", False) for step in made["steps"]] == [False, True, False, False]
    assert made["steps"][1]["reasoning_content"] == "easy"
    assert made["steps"][2]["extra"] == {"name": "ada"}


def test_a_turn_that_holds_only_what_was_added_is_not_searched_for_what_came_before() -> None:
    first = turn(1, [ASK], Reply("one"), [1], [2])
    second = turn(2, [Message("user", "and?")], Reply("two"), [1, 2, 3], [4], repeats=False)
    third = turn(
        3,
        [ASK, Message("assistant", "one"), Message("user", "and?"), Message("assistant", "two"), ASK],
        DONE,
        [1, 2, 3, 4, 5],
        [6],
    )
    made = valid([first, second, third])
    assert [step["message"] for step in made["steps"]] == [
        *("what is here?", "one"),
        *("and?", "two"),
        *("what is here?", "a and b"),
    ]
    assert "notes" not in made


def test_messages_that_do_not_repeat_those_before_are_shown_whole_and_noted() -> None:
    first = turn(1, [ASK], Reply("one"), [1], [2])
    second = turn(2, [Message("user", "other")], Reply("two"), [1, 2, 3], [4])
    made = valid([first, second], notes=["from a test"])
    assert [step["message"] for step in made["steps"]] == ["what is here?", "one", "other", "two"]
    assert made["notes"] == "from a test; the messages of rcp_2 do not repeat those before it: all of them are shown"


def test_a_result_of_a_call_that_no_step_has_stands_by_itself() -> None:
    made = valid([turn(1, [Message("tool", "?", tool_call_id="c9"), ASK], DONE, [1], [2])])
    assert made["steps"][0]["source"] == "system"
    assert made["steps"][0]["observation"]["results"] == [{"content": "?", "extra": {"tool_call_id": "c9"}}]


def test_a_call_id_used_again_is_answered_at_the_newest_call() -> None:
    call = Reply("", None, (ToolCall("c", "ls", "{}"),))
    result = Message("tool", "x", tool_call_id="c")
    first = turn(1, [ASK], call, [1], [2])
    second = turn(2, [ASK, call.message(), result], call, [1, 2], [3])
    third = turn(3, [ASK, call.message(), result, call.message(), result], DONE, [1, 2, 3], [4])
    steps = valid([first, second, third])["steps"]
    assert [len(step["observation"]["results"]) for step in steps if "observation" in step] == [1, 1]


@pytest.mark.parametrize("arguments", ["[1]", "{cut", '"text"'])
def test_arguments_that_are_no_object_are_kept_as_text_beside_an_empty_one(arguments: str) -> None:
    made = valid([turn(1, [ASK], Reply("", None, (ToolCall("c", "ls", arguments),)), [1], [2])])
    (call,) = made["steps"][1]["tool_calls"]
    assert (call["arguments"], call["extra"]) == ({}, {"arguments": arguments})


def test_a_log_probability_of_minus_infinity_is_clamped_and_what_is_no_number_is_left_out() -> None:
    def logprobs(*values: float) -> Any:
        made = turn(1, [ASK], DONE, [1], [2, 3], inexact_reason="logprob_not_finite")
        generation = dataclasses.replace(made.receipt.generation, logprobs=np.array(values, np.float32))
        changed = dataclasses.replace(made.receipt, generation=generation)
        return valid([dataclasses.replace(made, receipt=changed)])["steps"][-1]["metrics"].get("logprobs")

    assert logprobs(-0.5, -np.inf) == [-0.5, LOWEST_LOGPROB]
    assert logprobs(-0.5, np.nan) is None
    assert logprobs(np.inf, -0.5) is None


def test_ids_without_a_log_probability_each_are_refused() -> None:
    made = turn(1, [ASK], DONE, [1], [2, 3])
    generation = dataclasses.replace(made.receipt.generation, logprobs=np.zeros(1, np.float32))
    broken = dataclasses.replace(made, receipt=dataclasses.replace(made.receipt, generation=generation))
    with pytest.raises(DamagedError, match="2 ids and 1 log-probabilities"):
        trajectory([broken])


def test_tags_say_which_agent_it_was_and_the_session_is_its_own() -> None:
    made = valid([turn(1, [ASK], DONE, [1], [2], tags={"agent": "codex", "agent-version": "1.2"}, session="t1")])
    assert (made["agent"]["name"], made["agent"]["version"], made["session_id"]) == ("codex", "1.2", "t1")


ROLES = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
CALL = st.builds(ToolCall, st.sampled_from(["c1", "c2"]), st.text(max_size=3), st.text(max_size=8))
MESSAGES = st.lists(
    st.builds(
        Message,
        ROLES,
        st.text(max_size=5),
        tool_calls=st.lists(CALL, max_size=2).map(tuple),
        tool_call_id=st.sampled_from(["c1", "c3", None]),
    ),
    max_size=6,
)


@given(st.lists(st.tuples(MESSAGES, st.lists(CALL, max_size=2), st.booleans(), st.booleans()), min_size=1, max_size=4))
def test_whatever_messages_a_client_sends_the_package_takes_the_trajectory(turns: Any) -> None:
    said = [
        turn(index, messages, Reply("r", None, tuple(calls)), [1], [2], repeats=repeats, copied=copied)
        for index, (messages, calls, repeats, copied) in enumerate(turns)
    ]
    steps = valid(said)["steps"]
    assert steps
    for step in steps:
        calls = [call["tool_call_id"] for call in step.get("tool_calls", ())]
        results = step.get("observation", {}).get("results", ())
        assert all(result.get("source_call_id") in (None, *calls) for result in results)
