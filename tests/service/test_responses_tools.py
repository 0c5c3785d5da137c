"""Reasoning and function calls over /v1/responses, as codex uses them, with a Qwen3-like template and engine."""

from __future__ import annotations

import json

import pytest

from tests.service.says import Says
from tests.service.test_responses import Client, continues

pytestmark = pytest.mark.slow

SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List."}]}


@pytest.fixture(scope="module")
def says(qwen3):
    return Says(*qwen3, "qwen3")


@pytest.fixture
def client(says, scenario):
    return Client(says.service, scenario)


def asked(client, stream, input, **fields):
    if stream:
        return client.stream(input, tools=[SHELL], max_output_tokens=None, **fields)[-1]["response"]
    return client.ask(input, tools=[SHELL], max_output_tokens=None, **fields)


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_text_and_calls_are_items_of_their_own(says, client, stream) -> None:
    says(f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}\n{CALL.replace('ls', 'pwd')}")
    response = asked(client, stream, [USER])
    assert response["status"] == "completed"
    thinking, message, first, second = response["output"]
    assert thinking["type"] == "reasoning"
    assert thinking["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert (thinking["summary"], thinking["encrypted_content"]) == ([], None)
    assert message["content"][0]["text"].strip() == "Let me see."
    for call, command in ((first, "ls"), (second, "pwd")):
        assert (call["type"], call["name"], call["status"]) == ("function_call", "shell", "completed")
        assert json.loads(call["arguments"]) == {"command": command}
    assert first["call_id"] != second["call_id"]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == len(says.encode("Hm."))


def test_a_stream_says_every_part_in_order(says, client) -> None:
    says(f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}")
    events = client.stream([USER], tools=[SHELL], max_output_tokens=None)
    kinds = [event["type"].removeprefix("response.") for event in events]
    folded = [kind for i, kind in enumerate(kinds) if not (kind.endswith(".delta") and kinds[i - 1] == kind)]
    assert folded == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    output = events[-1]["response"]["output"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == output
    assert [event["output_index"] for event in done] == [0, 1, 2]
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == output[event["output_index"]]["id"]

    def joined(kind):
        return "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")

    assert joined("reasoning_text") == "Hm."
    assert joined("output_text") == output[1]["content"][0]["text"]
    assert joined("function_call_arguments") == output[2]["arguments"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_the_result_of_a_call_continues_the_turn_that_made_it(says, client, stream, named) -> None:
    """Also without the thinking, which codex does not send back."""
    says(f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}")
    first = asked(client, stream, [USER])
    call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "README.md"}
    says("There is one file.")
    if named:
        second = asked(client, stream, [result], previous_response_id=first["id"])
    else:
        kept = [{**item, "content": None} if item["type"] == "reasoning" else item for item in first["output"]]
        for item in kept:
            del item["id"]
        second = asked(client, stream, [USER, *kept, result])
    receipts = [client.receipt(response) for response in (first, second)]
    assert continues(receipts[1], receipts[0], "response" if named else "messages")
    added = says.decode(receipts[1]["prompt_token_ids"][len(receipts[0]["prompt_token_ids"]) :])
    assert "<think>\nHm.\n</think>" in added  # as it was sampled, though the template would drop it
    assert "<tool_response>\nREADME.md\n</tool_response>" in added
    assert second["output"][0]["content"][0]["text"] == "There is one file."


def test_arguments_that_a_client_writes_in_another_way_are_the_same_turn(says, client) -> None:
    says('<tool_call>\n{"name": "shell", "arguments": {"command": "ls", "in": "/"}}\n</tool_call>')
    first = asked(client, False, [USER])
    (call,) = first["output"]
    call["arguments"] = '{ "in":"/","command":"ls" }'
    says("Done.")
    result = {
        "type": "function_call_output",
        "call_id": call["call_id"],
        "output": [{"type": "input_text", "text": "a"}],
    }
    second = asked(client, False, [USER, call, result])
    assert continues(client.receipt(second), client.receipt(first), "messages")


def test_thinking_that_was_changed_begins_a_new_branch(says, client) -> None:
    says("<think>\nHm.\n</think>\n\nYes.")
    first = asked(client, False, [USER])
    thinking, message = first["output"]
    thinking["content"][0]["text"] = "Something else."
    says("Good.")
    second = asked(client, False, [USER, thinking, message, {"role": "user", "content": "Sure?"}])
    assert client.receipt(second)["parent"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_leaves_no_call_that_seems_whole(says, client, stream) -> None:
    says('<tool_call>\n{"name": "shell", "arguments": {"command": "l', cut=True)
    response = asked(client, stream, [USER])
    assert response["status"] == "incomplete"
    assert [
        item for item in response["output"] if (item["type"], item["status"]) == ("function_call", "completed")
    ] == []
    assert response["output"][-1]["status"] == "incomplete"


def test_with_tool_choice_none_the_model_is_not_told_of_tools(says, client) -> None:
    says("No tools.")
    asked(client, False, [USER])
    asked(client, False, [USER], tool_choice="none")
    with_tools, without = says.prompts[-2:]
    assert "Runs a command." in says.decode(with_tools)
    assert "Runs a command." not in says.decode(without)


def test_effort_none_turns_the_thinking_off_in_the_template(says, client) -> None:
    says("No thoughts.")
    asked(client, False, [USER], reasoning={"effort": "none"})
    assert says.decode(says.prompts[-1]).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_a_function_in_a_namespace_is_called_by_both_its_names(says, client, stream) -> None:
    """As codex has those of its sub-agents and of MCP servers."""
    space = {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [{**SHELL, "name": "close"}]}
    tools = [SHELL, space]
    says(CALL.replace("shell", "agents.close") + "\n" + CALL)
    ask = (lambda *args, **fields: client.stream(*args, **fields)[-1]["response"]) if stream else client.ask
    first = ask([USER], tools=tools, max_output_tokens=None)
    assert '"agents.close"' in says.decode(says.prompts[-1])
    spaced, plain = first["output"]
    assert (spaced["namespace"], spaced["name"]) == ("agents", "close")
    assert (plain.get("namespace"), plain["name"]) == (None, "shell")
    assert first["tools"][1]["tools"][0]["name"] == "close"
    says("Done.")
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "ok"} for call in (spaced, plain)]
    second = ask([USER, *first["output"], *results], tools=tools, max_output_tokens=None)
    assert continues(client.receipt(second), client.receipt(first), "messages")


def test_two_turns_as_codex_asks_them_continue_each_other(says, scenario) -> None:
    """What codex 0.171 sends to a provider of its user's: every field, header, tool and item that it has."""
    asked = {
        "model": "m",
        "tools": [
            SHELL,
            {
                "type": "namespace",
                "name": "agents",
                "description": "Sub-agents.",
                "tools": [{**SHELL, "name": "close"}],
            },
            {"type": "web_search", "external_web_access": True},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": f"{scenario}-thread",
        "client_metadata": {"thread_id": f"{scenario}-thread", "x-codex-window-id": "0"},
        "max_output_tokens": None,
    }
    client = Client(says.service, scenario)
    client.headers |= {"session-id": f"{scenario}-thread", "thread-id": f"{scenario}-thread"}

    def message(role, text):
        content = [{"type": "input_text", "text": text}]
        return {"type": "message", "id": f"msg_{len(text)}", "role": role, "content": content}

    items = [
        message("developer", "You are a coding agent."),
        message("developer", "Skills."),
        message("user", "cwd: /"),
    ]
    items.append(message("user", "List the files."))
    says(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}")
    first = client.stream(items, **asked)[-1]["response"]
    call = first["output"][-1]
    items += [
        *first["output"],
        {"type": "function_call_output", "id": "fco_1", "call_id": call["call_id"], "output": "a"},
    ]
    says("There is one file.")
    second = client.stream(items, **asked)[-1]["response"]
    receipts = [client.receipt(response) for response in (first, second)]
    assert {receipt["session"] for receipt in receipts} == {f"{scenario}-thread"}
    assert continues(receipts[1], receipts[0], "session")
