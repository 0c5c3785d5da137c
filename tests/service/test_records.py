"""POST /reef/records/batch: exchanges and grades that were recorded elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = pytest.mark.slow

BATCH = "/reef/records/batch"


def inference(id, question="2+2?", answer="4"):
    return {
        "agent_record_id": id,
        "request_type": "inference",
        "payload": {
            "messages": [{"role": "user", "content": question}],
            "response": {"choices": [{"message": {"role": "assistant", "content": answer}}]},
        },
    }


def report(id, *references, **fields):
    payload = {"references": list(references), "score": 1, **fields}
    return {"agent_record_id": id, "request_type": "report", "payload": payload}


def reef(recorder, *command):
    """A command beside the service, on its ledger."""
    settings = ["-c", str(recorder.run_dir.parent / "serve.yaml"), "--reef.run-dir", str(recorder.run_dir)]
    settings += ["--inference.model-path", str(recorder.model)]
    command = [sys.executable, "-m", "reef", *command, *settings]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


@pytest.fixture
def send(recorder, scenario):
    return lambda *records, **options: recorder.post(
        BATCH, {"records": list(records)}, headers={"x-reef-scenario": scenario}, **options
    )


@pytest.fixture
def count(recorder, scenario, stored):
    """`count("receipts")`, `count("reports")`: how many this test's scenario has."""
    queries = {
        "receipts": "SELECT count(*) FROM requests WHERE scenario = ?",
        "reports": "SELECT count(*) FROM reports WHERE scenario = ?",
    }
    return lambda table: stored(recorder, queries[table], scenario)[0][0]


def test_a_batch_is_acknowledged_record_by_record_in_its_order(send, scenario) -> None:
    ids = [f"{scenario}-{i}" for i in range(3)]
    answer = send(inference(ids[0]), inference(ids[1]), report(ids[2], ids[0], ids[1]))
    assert answer.status_code == 200, answer.text
    kinds = ["inference", "inference", "report"]
    assert answer.json() == {
        "records": [
            {"agent_record_id": id, "request_type": kind, "scenario": scenario}
            for id, kind in zip(ids, kinds, strict=True)
        ]
    }


def test_an_imported_exchange_is_a_receipt_without_tokens_that_says_so(recorder, send, scenario) -> None:
    record = inference(f"{scenario}-a", "How?", "So.")
    assert send(record).status_code == 200
    receipt = recorder.receipt(f"{scenario}-a")
    assert (receipt["exact"], receipt["inexact_reason"]) == (False, "imported")
    assert (receipt["prompt_token_ids"], receipt["token_ids"], receipt["logprobs"]) == ([], [], [])
    assert (receipt["num_prompt_tokens"], receipt["num_tokens"], receipt["spans"]) == (0, 0, [])
    assert receipt["engine_build"] == "imported"
    assert receipt["scenario"] == scenario
    assert receipt["request"] == record["payload"]


def test_an_id_with_a_slash_is_found_by_its_url(recorder, send, scenario) -> None:
    assert send(inference(f"{scenario}/turn 1")).status_code == 200
    assert recorder.receipt(f"{scenario}/turn%201")["inexact_reason"] == "imported"
    deleted = recorder.client.delete(f"{recorder.url}/reef/receipts/{scenario}/turn%201")
    assert deleted.status_code == 200, deleted.text


def test_an_imported_report_is_a_report_like_any_other(recorder, send, scenario) -> None:
    told = {"feedback": "well done", "grader": {"id": "g", "version": "2"}}
    assert send(inference(f"{scenario}-a"), report(f"{scenario}-r", f"{scenario}-a", **told)).status_code == 200
    shown = recorder.get(f"/reef/reports/{scenario}-r").json()
    assert (shown["score"], shown["references"], shown["scenario"]) == (1.0, [f"{scenario}-a"], scenario)
    assert recorder.receipt(f"{scenario}-a")["reports"] == [f"{scenario}-r"]
    same = recorder.post(
        "/reef/report", {"agent_record_id": f"{scenario}-r", "references": [f"{scenario}-a"], "score": 1, **told}
    )
    assert same.status_code == 200, same.text  # the same report by the other way


def test_a_batch_that_comes_again_is_stored_once(send, scenario, count) -> None:
    records = [inference(f"{scenario}-a"), report(f"{scenario}-r", f"{scenario}-a")]
    first, again = send(*records), send(*records)
    assert first.status_code == again.status_code == 200
    assert first.json() == again.json()
    assert (count("receipts"), count("reports")) == (1, 1)


def test_a_record_twice_in_one_batch_is_stored_once(send, scenario, count) -> None:
    answer = send(inference(f"{scenario}-a"), inference(f"{scenario}-a"))
    assert answer.status_code == 200
    assert len(answer.json()["records"]) == 2
    assert count("receipts") == 1


def test_batches_of_the_same_records_at_the_same_moment_are_stored_once(send, scenario, count) -> None:
    records = [inference(f"{scenario}-{i}") for i in range(20)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: send(*records), range(8)))
    assert {answer.status_code for answer in answers} == {200}
    assert count("receipts") == 20


def test_an_id_with_another_content_is_a_conflict_and_nothing_of_the_batch_is_stored(
    send, scenario, count, is_error
) -> None:
    send(inference(f"{scenario}-a"))
    answer = send(inference(f"{scenario}-b"), inference(f"{scenario}-a", answer="5"))
    is_error(answer, 409, param="records.1", code="id_reused", says=f"{scenario}-a")
    assert count("receipts") == 1


def test_an_id_of_another_scenario_is_a_conflict(recorder, send, scenario, is_error) -> None:
    send(inference(f"{scenario}-a"))
    other = {"x-reef-scenario": f"{scenario}-other"}
    answer = recorder.post(BATCH, {"records": [inference(f"{scenario}-a")]}, headers=other)
    is_error(answer, 409, param="records.0", code="id_reused")


def test_a_report_whose_receipt_is_not_there_refuses_its_batch(send, scenario, count, is_error) -> None:
    answer = send(inference(f"{scenario}-a"), report(f"{scenario}-r", f"{scenario}-later"))
    is_error(answer, 404, param="records.1", code="receipt_not_found", says=f"{scenario}-later")
    assert count("receipts") == 0


def test_a_report_on_a_receipt_of_another_scenario_finds_none(recorder, send, scenario, is_error) -> None:
    theirs = recorder.chat(headers={"x-reef-scenario": f"{scenario}-other"}).headers["x-reef-agent-record-id"]
    is_error(send(report(f"{scenario}-r", theirs)), 404, code="receipt_not_found")


def test_a_report_may_grade_a_receipt_of_our_own(recorder, send, scenario) -> None:
    ours = recorder.chat(headers={"x-reef-scenario": scenario}).headers["x-reef-agent-record-id"]
    assert send(report(f"{scenario}-r", ours)).status_code == 200
    assert recorder.receipt(ours)["reports"] == [f"{scenario}-r"]


def test_what_was_deleted_stays_deleted_when_it_is_imported_again(recorder, send, scenario, is_error) -> None:
    record = inference(f"{scenario}-a")
    send(record)
    assert recorder.client.delete(f"{recorder.url}/reef/receipts/{scenario}-a").status_code == 200
    assert send(record).status_code == 200  # an import that goes on after an interruption
    left = recorder.receipt(f"{scenario}-a")
    assert left["deleted_at"] is not None
    assert "request" not in left
    is_error(send(inference(f"{scenario}-a", answer="5")), 409, code="id_reused")


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"request_type": "train"}, "records.1.request_type", "bad_field"),
        ({"payload": [1]}, "records.1.payload", "bad_field"),
        ({"agent_record_id": ""}, "records.1.agent_record_id", "bad_field"),
        ({"agent_record_id": "a\x00b"}, "records.1.agent_record_id", "bad_field"),
        ({"weights": 1}, "records.1.weights", "unknown_field"),
        ({"scenario": "elsewhere"}, "records.1.scenario", "bad_field"),
        ({"request_type": "report"}, "records.1.payload.references", "missing_field"),
        (report("x", "y", score=True), "records.1.payload.score", "bad_field"),
        (report("x", "y", "y"), "records.1.payload.references", "bad_field"),
        (report("x", "y", agent_record_id="z"), "records.1.payload.agent_record_id", "bad_field"),
    ],
)
def test_a_wrong_record_is_named_and_nothing_of_its_batch_is_stored(
    send, scenario, count, is_error, change, param, code
) -> None:
    answer = send(inference(f"{scenario}-a"), {**inference(f"{scenario}-b"), **change})
    is_error(answer, 400, param=param, code=code)
    assert count("receipts") == 0


def test_a_batch_has_its_bounds(recorder, send, scenario, is_error) -> None:
    is_error(send(), 400, param="records")
    is_error(send(*[inference(f"{scenario}-{i}") for i in range(1001)]), 400, param="records")
    huge = inference(f"{scenario}-a", question="x" * (10 * 2**20))
    is_error(send(huge), 413, code="body_too_large")
    large = inference(f"{scenario}-a", question="x" * (9 * 2**20))  # more than an inference may have
    assert send(large).status_code == 200


def test_a_thousand_records_are_one_batch(send, scenario, count) -> None:
    assert send(*[inference(f"{scenario}-{i}") for i in range(1000)]).status_code == 200
    assert count("receipts") == 1000


@pytest.mark.slow
def test_the_ledger_holds_after_imports_what_it_promises(make_service) -> None:
    service = make_service("--training.backend", "none").start()
    records = [inference("a"), report("r", "a")]
    assert service.post("/reef/records/batch", {"records": records}).status_code == 200
    doctor = reef(service, "doctor", "--ledger")
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr


@pytest.mark.slow  # it loads the tokenizer in a process of its own
def test_an_export_of_conversations_leaves_out_what_has_no_tokens(recorder, send, scenario) -> None:
    send(inference(f"{scenario}-a"))
    recorder.chat(headers={"x-reef-scenario": scenario})
    exported = reef(recorder, "export", "--format", "atif", scenario)
    assert exported.returncode == 0, exported.stderr
    assert len(exported.stdout.splitlines()) == 1
    one = recorder.get(f"/reef/receipts/{scenario}-a", params={"format": "atif"})
    assert one.status_code == 409


def test_an_imported_exchange_is_no_turn_that_a_chat_continues(recorder, send, scenario) -> None:
    send(inference(f"{scenario}-a", "2+2?", "4"))
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And 1+1?"},
    ]
    answer = recorder.post(
        "/v1/chat/completions", {"messages": messages, "max_tokens": 4}, headers={"x-reef-scenario": scenario}
    )
    assert recorder.receipt(answer.headers["x-reef-agent-record-id"])["parent"] is None
    named = {"x-reef-scenario": scenario, "x-reef-parent": f"{scenario}-a"}
    refused = recorder.post("/v1/chat/completions", {"messages": messages}, headers=named)
    assert refused.status_code == 409, refused.text


# --- reef-client ------------------------------------------------------------------------------------------------------


def run_import(recorder, file, scenario, *options):
    command = [sys.executable, "-m", "reef_client", "import", str(file), "--url", recorder.url, "--scenario", scenario]
    return subprocess.run([*command, *options], capture_output=True, text=True, check=False, timeout=240)


def test_reef_client_imports_a_file_and_goes_on_where_it_stopped(recorder, scenario, tmp_path, count) -> None:
    records = [
        record
        for i in range(50)
        for record in (inference(f"{scenario}-{i}"), report(f"{scenario}-r{i}", f"{scenario}-{i}"))
    ]
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    done = run_import(recorder, file, scenario, "--batch-size", "16")
    assert done.returncode == 0, done.stderr
    assert "100 records acknowledged" in done.stdout
    assert (count("receipts"), count("reports")) == (50, 50)
    again = run_import(recorder, file, scenario)
    assert again.returncode == 0, again.stderr
    (tmp_path / "records.jsonl.reef-import.json").unlink()  # as if it had never run: every record comes again
    again = run_import(recorder, file, scenario)
    assert again.returncode == 0, again.stderr
    assert (count("receipts"), count("reports")) == (50, 50)


def test_reef_client_stops_where_a_record_is_refused(recorder, scenario, tmp_path, count) -> None:
    records = [inference(f"{scenario}-a"), inference(f"{scenario}-b"), report(f"{scenario}-r", "nobody")]
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    done = run_import(recorder, file, scenario, "--batch-size", "2")
    assert done.returncode == 1
    assert "HTTP 404" in done.stderr
    assert (count("receipts"), count("reports")) == (2, 0)
