"""Trajectories of recorded conversations: of one receipt over HTTP, and of a whole scenario on the command line."""

from __future__ import annotations

import io
import json

import pytest
from atif import Trajectory

from reef import cli, export
from reef.config import load
from reef.errors import NotFoundError

pytestmark = pytest.mark.slow


@pytest.fixture
def post(recorder, scenario):
    """`post(route, body)`: the JSON answer, and the receipt of its first choice."""

    def ask(route, body, **headers):
        answer = recorder.post(route, body, headers={"x-reef-scenario": scenario, **headers})
        assert answer.status_code == 200, answer.text
        return answer.json(), recorder.receipt(answer.headers["x-reef-agent-record-id"])

    return ask


@pytest.fixture
def chat(post):
    """`chat(messages)`: the assistant's message, and its receipt."""

    def ask(messages, **fields):
        body = {"messages": messages, "max_tokens": 8, "temperature": 3, **fields}
        answer, receipt = post("/v1/chat/completions", body)
        return {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}, receipt

    return ask


def trajectory(service, receipt):
    """What the service gives, once the package has validated it."""
    answer = service.get(f"/reef/receipts/{receipt['agent_record_id']}?format=atif")
    assert answer.status_code == 200, answer.text
    return check(answer.json())


def check(made):
    assert Trajectory.model_validate(made).to_json_dict() == made
    return made


def matches(step, receipt):
    """Whether a step holds what its receipt does."""
    assert step["metrics"] == {
        "prompt_tokens": receipt["num_prompt_tokens"],
        "completion_tokens": receipt["num_tokens"],
        "prompt_token_ids": receipt["prompt_token_ids"],
        "completion_token_ids": receipt["token_ids"],
        "logprobs": receipt["logprobs"],
    }
    assert step["extra"]["reef"]["agent_record_id"] == receipt["agent_record_id"]
    return True


def user(text):
    return {"role": "user", "content": text}


def test_a_conversation_is_one_trajectory_and_a_branch_copies_what_it_shares(recorder, chat, scenario) -> None:
    begun = [{"role": "system", "content": "add"}, user("2+3=")]
    reply, first = chat(begun, seed=1)
    again, second = chat([*begun, reply, user("4+5=")], seed=2)
    other, third = chat([*begun, reply, user("7+1=")], seed=3)
    assert second["parent"] == third["parent"] == first["agent_record_id"]
    made = trajectory(recorder, second)
    assert [(step["source"], step["message"]) for step in made["steps"]] == [
        ("system", "add"),
        ("user", "2+3="),
        ("agent", reply["content"]),
        ("user", "4+5="),
        ("agent", again["content"]),
    ]
    assert matches(made["steps"][2], first) and matches(made["steps"][4], second)
    assert not any("is_copied_context" in step for step in made["steps"])
    assert made["agent"]["model_name"] == recorder.model.name
    assert made["extra"] == {"reef": {"scenario": scenario, "purpose": "train"}}
    branch = trajectory(recorder, third)
    assert [step.get("is_copied_context", False) for step in branch["steps"]] == [True, True, True, False, False]
    assert branch["steps"][4]["message"] == other["content"]
    assert matches(branch["steps"][4], third)


def test_plain_completions_are_trajectories_too(recorder, post) -> None:
    answer, receipt = post("/v1/completions", {"prompt": "2+3=", "max_tokens": 4})
    made = trajectory(recorder, receipt)
    assert [step["message"] for step in made["steps"]] == ["2+3=", answer["choices"][0]["text"]]
    assert matches(made["steps"][1], receipt)
    ids = [*receipt["prompt_token_ids"], *receipt["token_ids"]]
    later, second = post(
        "/v1/completions",
        {"prompt": [*ids, *receipt["prompt_token_ids"]], "max_tokens": 4},
        **{"x-reef-parent": receipt["agent_record_id"]},
    )
    steps = trajectory(recorder, second)["steps"]
    assert [step["message"] for step in steps][1:] == [
        answer["choices"][0]["text"],
        "2+3=",
        later["choices"][0]["text"],
    ]
    assert matches(steps[1], receipt) and matches(steps[3], second)


def test_responses_that_name_the_one_before_are_one_trajectory(recorder, post) -> None:
    first, one = post("/v1/responses", {"input": "2+3=", "max_output_tokens": 8})
    body = {"input": "4+5=", "max_output_tokens": 8, "previous_response_id": first["id"]}
    _, two = post("/v1/responses", body)
    made = trajectory(recorder, two)
    assert [step["source"] for step in made["steps"]] == ["user", "agent", "user", "agent"]
    assert matches(made["steps"][1], one) and matches(made["steps"][3], two)
    assert made["steps"][3]["extra"]["reef"]["continued_by"] == "response"
    assert "notes" not in made


def test_a_response_that_begins_anew_says_what_is_left_out(recorder, post) -> None:
    first, _ = post("/v1/responses", {"input": "2+3=", "max_output_tokens": 8})
    body = {"input": "4+5=", "max_output_tokens": 8, "instructions": "add", "previous_response_id": first["id"]}
    _, two = post("/v1/responses", body)
    assert two["parent"] is None
    made = trajectory(recorder, two)
    assert made["notes"].endswith(f"is a new branch: what was said before {first['id']} is left out")
    assert matches(made["steps"][-1], two)


def test_anthropic_messages_are_trajectories_too(recorder, post) -> None:
    body = {"model": "m", "system": "add", "messages": [user("2+3=")], "max_tokens": 8}
    answer, one = post("/v1/messages", body)
    said = {"role": "assistant", "content": answer["content"] or "-"}
    _, two = post("/v1/messages", {**body, "messages": [user("2+3="), said, user("4+5=")]})
    made = trajectory(recorder, two)
    assert [step["source"] for step in made["steps"]] == ["system", "user", "agent", "user", "agent"]
    assert two["parent"] == one["agent_record_id"]
    assert matches(made["steps"][2], one) and matches(made["steps"][4], two)


def test_a_format_that_there_is_not_and_a_receipt_that_there_is_not_any_more(recorder, chat, is_error) -> None:
    _, receipt = chat([user("2+3=")])
    route = f"/reef/receipts/{receipt['agent_record_id']}"
    is_error(recorder.get(f"{route}?format=xml"), 400, param="format", says="expected json or atif, got 'xml'")
    is_error(recorder.get("/reef/receipts/rcp_x?format=atif"), 404, code="receipt_not_found")
    assert recorder.get(f"{route}?format=json").json() == recorder.get(route).json()
    assert recorder.client.delete(recorder.url + route).status_code == 200
    is_error(recorder.get(f"{route}?format=atif"), 410, code="receipt_deleted")


def test_a_whole_scenario_is_exported_beside_the_service_each_turn_once(
    recorder, chat, scenario, tmp_path, capsys
) -> None:
    reply, _ = chat([user("2+3=")], n=2, seed=5)
    for text in ("4+5=", "7+1="):
        chat([user("2+3="), reply, user(text)])
    file, out = tmp_path / "serve.yaml", tmp_path / "out.jsonl"
    file.write_text(
        json.dumps({"reef": {"run-dir": str(recorder.run_dir)}, "inference": {"model-path": str(recorder.model)}})
    )
    asked = ["export", "-c", str(file), "--format", "atif", scenario]
    assert cli.main([*asked, "--out", str(out)]) == 0
    made = [check(json.loads(line)) for line in out.read_text().splitlines()]
    assert capsys.readouterr().out.strip() == f"{len(made)} conversations in {out}"
    assert len(made) == 3  # the second choice, and two that continue the first
    own = [
        step["extra"]["reef"]["agent_record_id"]
        for whole in made
        for step in whole["steps"]
        if step["source"] == "agent" and not step.get("is_copied_context")
    ]
    assert len(own) == len(set(own)) == 4
    assert trajectory(recorder, {"agent_record_id": made[0]["trajectory_id"]}) == made[0]
    assert not list(tmp_path.glob("*.partial"))
    assert cli.main(["export", "-c", str(file), "--format", "atif", "nobody", "--out", str(out)]) == 1
    assert "no scenario nobody" in capsys.readouterr().err
    assert len(out.read_text().splitlines()) == 3  # what was there is not touched


def test_an_export_to_a_stream_is_written_line_by_line(recorder, chat, scenario) -> None:
    chat([user("2+3=")])
    config = load(None, ["--reef.run-dir", str(recorder.run_dir), "--inference.model-path", str(recorder.model)])
    out = io.BytesIO()
    assert export.atif(config, scenario, out, lambda _: None) == 1
    check(json.loads(out.getvalue()))
    with pytest.raises(NotFoundError, match="no scenario nobody"):
        export.atif(config, "nobody", out, lambda _: None)
