"""POST /reef/report, GET /reef/reports/{id}, GET /reef/receipts/{id}, over the real service."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

REPORT = "/reef/report"


@pytest.fixture
def receipt(recorder, scenario):
    """The id of a fresh receipt in a scenario of its own."""
    response = recorder.chat("2+2=", headers={"x-reef-scenario": scenario}, max_tokens=4)
    return response.headers["x-reef-agent-record-id"]


def test_a_report_is_stored_under_a_new_id_and_says_where_it_is(recorder, receipt, scenario) -> None:
    answer = recorder.post(REPORT, {"references": [receipt], "score": 1}).json()
    assert answer["agent_record_id"].startswith("rep_")
    assert (answer["state"], answer["reason"]) == ("recorded", "not_training")
    assert (answer["scenario"], answer["score"], answer["references"]) == (scenario, 1.0, [receipt])
    assert (answer["step"], answer["release_id"], answer["batch_id"]) == (None, None, None)
    shown = recorder.get(f"/reef/reports/{answer['agent_record_id']}").json()
    recorded = {"event": "recorded", "report_id": answer["agent_record_id"], "score": 1.0, "reason": "not_training"}
    assert shown == {**answer, "history": [{"at": answer["created_at"], **recorded}]}
    receipt = recorder.receipt(receipt)
    assert receipt["reports"] == [answer["agent_record_id"]]
    assert [event["event"] for event in receipt["history"]] == ["written", "recorded"]
    assert receipt["history"][1:] == shown["history"]


def test_every_field_of_a_report_is_taken(recorder, receipt, scenario) -> None:
    body = {
        "agent_record_id": f"job 7/trial-{scenario}",
        "score": 0.5,
        "outcome": "correct",
        "reason_code": "tests_passed",
        "rewards": {"format": 1, "answer": 0},
        "reference_scores": [None],
        "feedback": {"note": "schön 🦀", "nested": [1, {"a": None}]},
        "references": [receipt],
        "group": "g",
        "grader": {"id": "exact", "version": "2"},
        "truncated": False,
        "metadata": {"trial": 3, "large": 10**25},
    }
    response = recorder.post(REPORT, body)
    assert response.status_code == 200, response.text
    assert response.json()["group"] == "g"
    shown = recorder.get(f"/reef/reports/{body['agent_record_id']}").json()
    assert shown == {**response.json(), "history": shown["history"]}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "no_score"),
        ({"score": None}, "no_score"),
        ({"score": 1, "outcome": "review"}, "outcome_review"),
        ({"score": 1, "outcome": "error"}, "outcome_error"),
        ({"score": 0, "outcome": "incorrect"}, "not_training"),
        ({"score": 1, "feedback": "well done"}, "not_training"),
    ],
)
def test_a_report_that_will_not_train_says_why(recorder, receipt, fields, reason) -> None:
    answer = recorder.post(REPORT, {"references": [receipt], **fields}).json()
    assert (answer["state"], answer["reason"]) == ("recorded", reason)


def test_a_report_of_evaluation_traffic_is_recorded_as_that(recorder, scenario) -> None:
    headers = {"x-reef-scenario": scenario, "x-reef-purpose": "eval"}
    receipt = recorder.chat("2+2=", headers=headers).headers["x-reef-agent-record-id"]
    answer = recorder.post(REPORT, {"references": [receipt], "score": 1}).json()
    assert (answer["state"], answer["reason"]) == ("recorded", "evaluation")


def test_a_report_without_references_is_kept(recorder, scenario) -> None:
    answer = recorder.post(REPORT, {"references": [], "score": 1}, headers={"x-reef-scenario": scenario}).json()
    assert (answer["state"], answer["reason"]) == ("recorded", "no_references")


def test_the_scenario_is_that_of_the_receipt_and_a_header_must_agree(recorder, receipt, scenario, is_error) -> None:
    assert recorder.post(REPORT, {"references": [receipt], "score": 1}).json()["scenario"] == scenario
    headers = {"x-reef-scenario": f"{scenario}-other"}
    response = recorder.post(REPORT, {"references": [receipt], "score": 1}, headers=headers)
    is_error(response, 400, param="references", says=f"belongs to scenario {scenario}")


def test_the_same_report_again_gets_the_stored_answer_and_another_body_a_conflict(
    recorder, receipt, scenario, is_error
) -> None:
    body = {"agent_record_id": f"once-{scenario}", "references": [receipt], "score": 1}
    first = recorder.post(REPORT, body)
    again = recorder.post(REPORT, body)
    assert first.json() == again.json()
    other = dict(reversed([*body.items()]))  # the order of keys is no difference
    assert recorder.post(REPORT, other).json() == first.json()
    assert recorder.post(REPORT, {**body, "score": 1.0}).status_code == 200
    is_error(recorder.post(REPORT, {**body, "score": 0}), 409, code="id_reused", param="agent_record_id")
    is_error(recorder.post(REPORT, {**body, "feedback": "x"}), 409, code="id_reused")
    assert recorder.get(f"/reef/reports/once-{scenario}").json()["score"] == 1
    assert recorder.receipt(receipt)["reports"] == [f"once-{scenario}"]


def test_the_same_report_sent_32_times_at_once_is_stored_once(recorder, receipt, scenario) -> None:
    body = {"agent_record_id": f"burst-{scenario}", "references": [receipt], "score": 1}
    with ThreadPoolExecutor(32) as threads:
        answers = list(threads.map(lambda _: recorder.post(REPORT, body), range(32)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.text for answer in answers}) == 1
    assert recorder.receipt(receipt)["reports"] == [f"burst-{scenario}"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "true", '"1"', "[1]", "{}"])
def test_a_score_that_is_no_finite_number_is_refused_by_name(recorder, receipt, is_error, number) -> None:
    body = f'{{"references": ["{receipt}"], "score": {number}}}'
    is_error(recorder.client.post(recorder.url + REPORT, content=body), 400, param="score", says="score: ")
    assert recorder.receipt(receipt)["reports"] == []


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"scroe": 1}, "scroe", "unknown field scroe"),
        ({"grader": {"id": "a", "version": "1", "extra": 1}}, "grader.extra", "unknown field grader.extra"),
        ({"grader": {"id": "a"}}, "grader.version", "missing"),
        ({"outcome": "good"}, "outcome", "'correct'"),
        ({"rewards": {"a": True}}, "rewards.a", "number"),
        ({"rewards": [1]}, "rewards", "dict"),
        ({"reference_scores": [1, 2]}, "reference_scores", "expected one per reference (1), got 2"),
        ({"reference_scores": []}, "reference_scores", "expected one per reference (1), got 0"),
        ({"reference_scores": ["x"]}, "reference_scores.0", "number"),
        ({"truncated": 1}, "truncated", "boolean"),
        ({"agent_record_id": ""}, "agent_record_id", "at least 1"),
        ({"agent_record_id": "x" * 257}, "agent_record_id", "at most 256"),
        ({"agent_record_id": 7}, "agent_record_id", "string"),
        ({"group": ""}, "group", "at least 1"),
        ({"feedback": 5}, "feedback", "string"),
        ({"metadata": []}, "metadata", "dict"),
        ({"references": "rcp_1"}, "references", "list"),
        ({"references": [1]}, "references.0", "string"),
        ({"references": ["x"] * 1025}, "references", "1024"),
    ],
)
def test_a_wrong_field_is_named_and_nothing_is_stored(recorder, receipt, is_error, fields, param, says) -> None:
    body = {"references": [receipt], "score": 1, **fields}
    is_error(recorder.post(REPORT, body), 400, param=param, says=says)
    assert recorder.receipt(receipt)["reports"] == []


def test_what_could_not_be_read_back_is_refused(recorder, receipt, is_error) -> None:
    deep: dict = {}
    for _ in range(100):
        deep = {"a": deep}
    for field in ("metadata", "feedback"):
        response = recorder.post(REPORT, {"references": [receipt], field: deep})
        is_error(response, 400, param=field, says="nested more than 64 levels deep")
    body = f'{{"references": ["{receipt}"], "metadata": {{"a": NaN}}}}'
    is_error(recorder.client.post(recorder.url + REPORT, content=body), 400, code="invalid_json")


def test_missing_references_and_twice_the_same_are_refused(recorder, receipt, is_error) -> None:
    is_error(recorder.post(REPORT, {"score": 1}), 400, param="references", code="missing_field")
    is_error(recorder.post(REPORT, {"references": [receipt] * 2, "score": 1}), 400, param="references", says="twice")


def test_an_unknown_receipt_is_404_naming_it_and_nothing_is_stored(recorder, receipt, scenario, is_error) -> None:
    body = {"agent_record_id": f"r-{scenario}", "references": [receipt, "rcp_nothing"], "score": 1}
    is_error(recorder.post(REPORT, body), 404, param="references", code="receipt_not_found", says="rcp_nothing")
    is_error(recorder.get(f"/reef/reports/r-{scenario}"), 404, code="report_not_found", says=f"r-{scenario}")
    is_error(recorder.post(REPORT, {**body, "references": ["rcp_nothing"]}), 404, says="rcp_nothing")
    is_error(recorder.get("/reef/receipts/rcp_nothing"), 404, code="receipt_not_found", says="rcp_nothing")


def test_several_reports_of_one_receipt_are_listed_in_order(recorder, receipt, scenario) -> None:
    ids = [f"{scenario}-{i}" for i in range(3)]
    for report_id in ids:
        recorder.post(REPORT, {"agent_record_id": report_id, "references": [receipt], "score": 1})
    assert recorder.receipt(receipt)["reports"] == ids


def test_64_bodies_of_half_a_megabyte_at_once_are_all_stored(recorder, receipt, scenario) -> None:
    text = "a" * 500_000

    def send(i):
        body = {"agent_record_id": f"{scenario}-{i}", "references": [receipt], "score": i, "feedback": text}
        return recorder.post(REPORT, body).status_code

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(send, range(64))) == [200] * 64
    assert len(recorder.receipt(receipt)["reports"]) == 64


def test_a_body_over_the_limit_is_413_and_nothing_is_stored(recorder, receipt, scenario, is_error) -> None:
    body = {"agent_record_id": f"large-{scenario}", "references": [receipt], "feedback": "a" * (4 * 1024 * 1024)}
    is_error(recorder.post(REPORT, body), 413, code="body_too_large", says="4194304 bytes (reef.max-body-bytes)")
    is_error(recorder.get(f"/reef/reports/large-{scenario}"), 404)
    is_error(recorder.chat("1" * (4 * 1024 * 1024)), 413)
    assert recorder.chat("1+1=").status_code == 200


@pytest.mark.slow
def test_a_locked_database_is_503_with_when_to_come_back_and_takes_the_report_afterwards(
    recorder, receipt, is_error
) -> None:
    body = {"agent_record_id": f"locked-{receipt}", "references": [receipt], "score": 1}
    with closing(sqlite3.connect(recorder.run_dir / "ledger.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        refused = recorder.post(REPORT, body)
        assert recorder.get("/healthz").status_code == 200
        assert "locked" in recorder.status()["ledger"]["error"]
        other.execute("ROLLBACK")
    is_error(refused, 503, code="unavailable", says="locked")
    assert int(refused.headers["retry-after"]) >= 1
    assert recorder.get(f"/reef/reports/{body['agent_record_id']}").status_code == 404
    assert recorder.post(REPORT, body).status_code == 200
    assert recorder.status()["ledger"]["error"] is None
