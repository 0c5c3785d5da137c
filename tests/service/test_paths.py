"""Names in paths and headers reach the ledger as they were meant; a path that is none is a 404."""

from __future__ import annotations

from urllib.parse import quote

ASK = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 4}


def test_a_slash_too_many_is_404_and_nothing_is_asked_in_another_scenario(recorder, scenario, is_error, stored) -> None:
    for route in (f"/scenarios/{scenario}/v1/chat/completions/", "/v1/chat/completions/"):
        response = recorder.post(route, ASK, headers={"x-reef-tag-slash": scenario}, follow_redirects=True)
        is_error(response, 404, code="not_found")
    is_error(recorder.get("/v1/models/"), 404, code="not_found")
    assert stored(recorder, "SELECT count(*) FROM requests WHERE tags LIKE ?", f"%{scenario}%") == [(0,)]


def test_a_session_beyond_ascii_is_one_session_by_path_and_by_header_and_can_be_deleted(recorder, scenario) -> None:
    session = "Größe/日本 1"
    by_path = recorder.post(f"/scenarios/{scenario}/sessions/{quote(session, safe='')}/v1/chat/completions", ASK)
    headers = {"x-reef-scenario": scenario, "x-reef-session": session.encode(), "x-reef-tag-who": "é".encode()}
    by_header = recorder.post("/v1/chat/completions", ASK, headers=headers)
    made = [response.headers["x-reef-agent-record-id"] for response in (by_path, by_header)]
    assert [recorder.receipt(receipt)["session"] for receipt in made] == [session, session]
    assert recorder.receipt(made[1])["tags"] == {"who": "é"}
    deleted = recorder.client.delete(f"{recorder.url}/reef/scenarios/{scenario}/sessions/{quote(session, safe='')}")
    assert sorted(deleted.json()["deleted"]) == sorted(made)


def test_a_header_that_is_not_utf_8_is_read_as_latin_1(recorder, scenario) -> None:
    headers = {"x-reef-scenario": scenario, "x-reef-session": "é".encode("latin-1")}
    response = recorder.post("/v1/chat/completions", ASK, headers=headers)
    assert recorder.receipt(response.headers["x-reef-agent-record-id"])["session"] == "é"
