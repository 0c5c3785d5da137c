"""Scenarios and their release chains, over the real service."""

from __future__ import annotations

import pytest

ROUTE = "/reef/scenarios"


def test_a_scenario_is_created_once(recorder, scenario) -> None:
    created = recorder.post(ROUTE, {"name": scenario, "recipe": "grpo"})
    again = recorder.post(ROUTE, {"name": scenario})
    assert (created.status_code, again.status_code) == (201, 200)
    assert created.json() == again.json()
    assert created.json()["name"] == scenario
    assert created.json()["recipe"] == "grpo"
    assert created.json()["mode"] == "auto"
    assert created.json()["trains"] is False  # this service only records
    assert scenario in [item["name"] for item in recorder.get(ROUTE).json()["scenarios"]]


def test_a_request_creates_the_scenario_it_names(recorder, scenario) -> None:
    recorder.chat("1+1=", headers={"x-reef-scenario": scenario})
    seen = recorder.get(f"{ROUTE}/{scenario}").json()
    assert (seen["name"], seen["pending"], seen["reserved"]) == (scenario, 0, 0)
    assert recorder.post(ROUTE, {"name": scenario}).status_code == 200


def test_another_recipe_than_the_services_is_a_conflict(recorder, scenario, is_error) -> None:
    is_error(recorder.post(ROUTE, {"name": scenario, "recipe": "sao"}), 409, param="recipe", says="sao")
    is_error(recorder.get(f"{ROUTE}/{scenario}"), 404)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "name", "missing"),
        ({"name": ""}, "name", "at least 1"),
        ({"name": "a b"}, "name", "'a b'"),
        ({"name": "../x"}, "name", "1-64"),
        ({"name": "x" * 65}, "name", "1-64"),
        ({"name": "ünïcode"}, "name", "1-64"),
        ({"name": "ok", "colour": 1}, "colour", "unknown field colour"),
        ({"name": 5}, "name", "string"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused(recorder, is_error, body, param, says) -> None:
    is_error(recorder.post(ROUTE, body), 400, param=param, says=says)


def test_the_contract_says_what_a_report_may_hold(recorder, scenario) -> None:
    recorder.post(ROUTE, {"name": scenario})
    contract = recorder.get(f"{ROUTE}/{scenario}/contract").json()
    assert contract["scenario"] == scenario
    assert contract["recipe"] == "grpo"
    assert contract["config"]["group-size"] == 8
    assert contract["context_length"] == 512
    assert contract["model"] == "starter"
    assert {"score", "references", "agent_record_id", "group"} <= contract["report"]["properties"].keys()


def test_the_first_scenario_has_a_chain_that_begins_with_the_base(recorder) -> None:
    recorder.chat("1+1=")  # so that one exists
    first = recorder.status()["scenario"]["name"]
    answer = recorder.get(f"{ROUTE}/{first}/releases").json()
    assert answer["scenario"] == first
    (base,) = answer["releases"]
    assert base["release_id"] == recorder.status()["engines"][0]["release_id"]
    assert (base["parent_release_id"], base["number"], base["step"], base["operation"]) == (None, 0, 0, "base")
    assert base["content_id"].startswith("sha256:")
    assert base["current"] is True
    assert base["restorable"] is True
    assert base["metrics"] == {}


def test_a_held_out_result_is_stored_on_a_release(recorder, is_error) -> None:
    recorder.chat("1+1=")
    first = recorder.status()["scenario"]["name"]
    release = recorder.get(f"{ROUTE}/{first}/releases").json()["releases"][0]["release_id"]
    route = f"{ROUTE}/{first}/releases/{release}/evaluations"
    assert recorder.post(route, {"accuracy": 0.5, "num_problems": 1000}).status_code == 201
    (shown,) = recorder.get(f"{ROUTE}/{first}/releases").json()["releases"]
    assert {"accuracy": 0.5, "num_problems": 1000}.items() <= _result(shown["evaluations"][-1]).items()
    is_error(recorder.post(f"{ROUTE}/{first}/releases/nothing/evaluations", {"a": 1}), 404, says="nothing")
    is_error(recorder.post(route, [1]), 400, says="JSON object")
    is_error(recorder.client.post(recorder.url + route, content=b'{"a": NaN}'), 400, code="invalid_json")
    is_error(recorder.client.post(recorder.url + route, content=b'{"a":' * 200 + b"1" + b"}" * 200), 400, says="deep")


def _result(evaluation):
    return evaluation.get("result", evaluation)


def test_the_lineage_of_the_base_names_no_batch(recorder, is_error) -> None:
    recorder.chat("1+1=")
    first = recorder.status()["scenario"]["name"]
    release = recorder.status()["engines"][0]["release_id"]
    answer = recorder.get(f"{ROUTE}/{first}/releases/{release}/lineage")
    assert answer.status_code == 200
    is_error(recorder.get(f"{ROUTE}/{first}/releases/nothing/lineage"), 404, says="nothing")


def test_releases_are_paged_with_checked_numbers(recorder, is_error) -> None:
    recorder.chat("1+1=")
    first = recorder.status()["scenario"]["name"]
    assert recorder.get(f"{ROUTE}/{first}/releases?limit=1").status_code == 200
    assert recorder.get(f"{ROUTE}/{first}/releases?before=0").json()["releases"] == []
    for query, param in (
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("limit=1001", "limit"),
        ("before=-1", "before"),
        ("before=" + "9" * 40, "before"),
        ("limit=٣", "limit"),
    ):
        is_error(recorder.get(f"{ROUTE}/{first}/releases?{query}"), 400, param=param)


def test_an_unknown_scenario_is_404_on_every_route(recorder, is_error) -> None:
    for suffix in ("", "/contract", "/releases", "/releases/r/lineage"):
        is_error(
            recorder.get(f"{ROUTE}/nowhere{suffix}"), 404, says="nowhere" if suffix != "/releases/r/lineage" else ""
        )
    is_error(recorder.post(f"{ROUTE}/nowhere/update", {}), 404, says="nowhere")


def test_a_scenario_that_does_not_train_here_takes_no_update(recorder, scenario, is_error) -> None:
    recorder.post(ROUTE, {"name": scenario})
    is_error(recorder.post(f"{ROUTE}/{scenario}/update", {"mode": "manual"}), 409, code="not_training")
    is_error(recorder.post(f"{ROUTE}/{scenario}/update", {"mode": "sometimes"}), 400, param="mode")
