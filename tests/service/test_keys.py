"""Keys with roles and scenarios at a running service, and the key that a service makes for itself."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from reef import keys
from reef.cli import main
from reef.service.access import ANY, NEEDS, OPEN, WHOLE
from tests.conftest import STARTER

pytestmark = pytest.mark.slow  # engines and services of its own

ROOT = Path(__file__).resolve().parents[2]
ASK = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 4}
ENTRIES = [
    {"name": "infer", "roles": ["infer"]},
    {"name": "report", "roles": ["report"]},
    {"name": "admin", "roles": ["admin"]},
    {"name": "mine", "roles": ["infer", "report", "admin"], "scenarios": ["mine"]},
    {"name": "theirs", "roles": ["infer", "report", "admin"], "scenarios": ["theirs"]},
    {"name": "both", "roles": ["infer", "report"], "scenarios": ["mine", "theirs"]},
]


class Keyed:
    """A service with one key for each of ENTRIES; the key is the entry's name and `-key`."""

    def __init__(self, service) -> None:
        self.service = service
        self.url = service.url

    def __call__(self, key, method, route, body=None, **headers) -> httpx.Response:
        sent = {"authorization": f"Bearer {key}-key", **{name.replace("_", "-"): to for name, to in headers.items()}}
        return self.service.client.request(method, self.url + route, json=body, headers=sent)

    def chat(self, key, **headers) -> str:
        """The receipt of an answer."""
        response = self(key, "POST", "/v1/chat/completions", ASK, **headers)
        assert response.status_code == 200, response.text
        return response.headers["x-reef-agent-record-id"]


@pytest.fixture(scope="module")
def ask(make_service):
    entries = [{**entry, "hash": keys.hash_of(f"{entry['name']}-key")} for entry in ENTRIES]
    tokens = ("--reef.tokens", json.dumps(entries))
    service = make_service("--training.backend", "none", "--reef.access", "key", "--recipe.scenario", "theirs", *tokens)
    service.start()
    yield Keyed(service)
    log = service.log_tail(10_000)
    assert [entry["name"] for entry in ENTRIES if f"{entry['name']}-key" in log] == []
    assert not (service.run_dir / keys.FILE).exists()


def refused(response: httpx.Response) -> tuple[int, str, str]:
    """Status, type and code, in OpenAI's shape or Anthropic's."""
    error = response.json()["error"]
    return response.status_code, error["type"], error["code"] if "code" in error else error["details"]["error_code"]


@pytest.mark.parametrize("route", NEEDS)
def test_every_route_is_for_its_role(ask, route) -> None:
    need = NEEDS[route]
    method, _, path = route.partition(" ")
    path = re.sub(r"{[^}]+}", "x", path.replace("{name}", "mine"))
    if need != OPEN:
        missing = httpx.request(method, ask.url + path, timeout=60)
        assert refused(missing) == (401, "authentication_error", "missing_api_key")
        assert refused(ask("unknown", method, path)) == (401, "authentication_error", "invalid_api_key")
    for role in ("infer", "report", "admin"):
        if need in (role, ANY, OPEN, WHOLE):
            assert ask(role, method, path).status_code not in (401, 403)
        else:
            response = ask(role, method, path)
            assert refused(response) == (403, "permission_error", "role_missing")
            assert f"the role {need}; the key {role} has {role}" in response.json()["error"]["message"]


def test_a_key_sees_its_own_scenario_where_it_names_none(ask) -> None:
    receipt = ask.chat("mine")
    assert ask("mine", "GET", f"/reef/receipts/{receipt}").json()["scenario"] == "mine"
    assert ask("infer", "GET", f"/reef/receipts/{ask.chat('infer')}").json()["scenario"] == "theirs"  # it is configured


def test_a_scenario_of_others_is_refused_by_name_whether_it_is_there_or_not(ask, is_error) -> None:
    ask.chat("theirs")
    for name in ("theirs", "never-there"):
        for response in (
            ask("mine", "POST", "/v1/chat/completions", ASK, x_reef_scenario=name),
            ask("mine", "POST", f"/scenarios/{name}/v1/chat/completions", ASK),
            ask("mine", "POST", "/reef/report", {"references": []}, x_reef_scenario=name),
            ask("mine", "POST", "/reef/scenarios", {"name": name}),
            ask("mine", "GET", f"/reef/scenarios/{name}"),
            ask("mine", "GET", f"/reef/scenarios/{name}/contract"),
            ask("mine", "GET", f"/reef/scenarios/{name}/releases"),
            ask("mine", "GET", f"/reef/scenarios/{name}/releases/x/lineage"),
            ask("mine", "POST", f"/reef/scenarios/{name}/update", {"mode": "auto"}),
            ask("mine", "DELETE", f"/reef/scenarios/{name}/receipts?confirm={name}"),
            ask("mine", "DELETE", f"/reef/scenarios/{name}/sessions/s"),
        ):
            error = is_error(response, 403, type="permission_error", code="scenario_forbidden", says=f"scenario {name}")
            assert "the key mine" in error["message"]
    listed = {key: ask(key, "GET", "/reef/scenarios").json()["scenarios"] for key in ("mine", "theirs", "admin")}
    assert [scenario["name"] for scenario in listed["mine"]] == ["mine"]
    assert [scenario["name"] for scenario in listed["theirs"]] == ["theirs"]
    assert {scenario["name"] for scenario in listed["admin"]} == {"mine", "theirs"}


def test_receipts_and_reports_of_others_are_as_if_they_were_not_there(ask) -> None:
    receipt = ask.chat("theirs")
    report = ask("theirs", "POST", "/reef/report", {"references": [receipt], "score": 1.0}).json()["agent_record_id"]
    assert ask("theirs", "GET", f"/reef/reports/{report}").json()["references"] == [receipt]
    own = ask.chat("mine")
    for method, route in (
        ("GET", "/reef/receipts/{}"),
        ("DELETE", "/reef/receipts/{}"),
        ("GET", "/reef/reports/{}"),
    ):
        there = report if "reports" in route else receipt
        seen, unseen = (ask("mine", method, route.format(name)) for name in (there, "never-there"))
        assert seen.status_code == unseen.status_code == 404
        assert seen.text == unseen.text.replace("never-there", there)
    for references in (["{}"], [own, "{}"]):
        bodies = [{"references": [name.format(there) for name in references]} for there in (receipt, "never-there")]
        seen, unseen = (ask("mine", "POST", "/reef/report", body) for body in bodies)
        assert seen.status_code == unseen.status_code == 404
        assert seen.text == unseen.text.replace("never-there", receipt)
    assert ask("theirs", "GET", f"/reef/receipts/{receipt}").json()["deleted_at"] is None


def test_a_turn_of_others_cannot_be_continued(ask, is_error) -> None:
    turn = ask.chat("theirs")
    more = {**ASK, "messages": [*ASK["messages"], {"role": "assistant", "content": "2"}, *ASK["messages"]]}
    for route, body in (("chat/completions", more), ("completions", {"prompt": "1+1=", "max_tokens": 4})):
        seen, unseen = (ask("mine", "POST", f"/v1/{route}", body, x_reef_parent=it) for it in (turn, "rcp_never"))
        is_error(seen, 404, code="receipt_not_found")
        assert (seen.status_code, seen.text) == (unseen.status_code, unseen.text.replace("rcp_never", turn))
    first = ask("theirs", "POST", "/v1/responses", {"input": "1+1=", "max_output_tokens": 4}).json()
    assert ask("theirs", "GET", f"/v1/responses/{first['id']}").status_code == 200
    seen, unseen = (ask("mine", "GET", f"/v1/responses/{name}") for name in (first["id"], "resp_never"))
    assert seen.status_code == unseen.status_code == 404
    assert seen.text == unseen.text.replace("resp_never", first["id"])
    for there in (first["id"], "resp_never"):
        body = {"input": "2+2=", "max_output_tokens": 4, "previous_response_id": there}
        response = ask("mine", "POST", "/v1/responses", body)
        assert (response.status_code, "theirs" in response.text) == (404, False), response.text


def test_what_was_deleted_of_others_is_as_if_it_had_never_been_there(ask) -> None:
    response = ask("theirs", "POST", "/v1/responses", {"input": "1+1=", "max_output_tokens": 4})
    receipt, name = response.headers["x-reef-agent-record-id"], response.json()["id"]
    assert ask("theirs", "DELETE", f"/reef/receipts/{receipt}").status_code == 200
    assert ask("theirs", "GET", f"/v1/responses/{name}").status_code == 410
    for method, route, body in (
        ("GET", "/v1/responses/{}", None),
        ("POST", "/v1/responses", {"input": "2+2=", "max_output_tokens": 4, "previous_response_id": "{}"}),
        ("POST", "/v1/chat/completions", ASK),
        ("GET", "/reef/receipts/{}?format=atif", None),
    ):
        told = []
        for there in (name, "resp_never") if "responses" in route else (receipt, "rcp_never"):
            sent = body and {key: there if value == "{}" else value for key, value in body.items()}
            headers = {"x_reef_parent": there} if body is ASK else {}
            response = ask("mine", method, route.format(there), sent, **headers)
            told.append((response.status_code, response.text.replace(there, "it")))
        assert told[0] == told[1]
        assert told[0][0] == 404


def test_sums_over_all_scenarios_are_not_for_a_bound_key(ask, is_error) -> None:
    is_error(ask("mine", "GET", "/metrics"), 403, code="scenario_forbidden", says="the key mine is bound to mine")
    told = {key: ask(key, "GET", "/reef/status").json()["ledger"] for key in ("mine", "admin")}
    assert told["mine"] == {"error": None, "used_bytes": None, "deleted_receipts": None}
    assert told["admin"]["used_bytes"] > 0


def test_the_status_shows_a_bound_key_nothing_of_the_scenario_that_trains(ask) -> None:
    ask.chat("theirs")
    assert ask("theirs", "GET", "/reef/status").json()["engines"][0]["state"] == "ready"
    shown = {key: ask(key, "GET", "/reef/status").json() for key in ("mine", "admin")}
    assert (shown["mine"]["scenario"], shown["mine"]["training"]) == (None, None)
    assert shown["admin"]["scenario"]["name"] == "theirs"


def test_a_key_of_several_scenarios_names_the_one_it_means(ask, is_error) -> None:
    for name in ("mine", "theirs"):
        receipt = ask.chat("both", x_reef_scenario=name)
        assert ask("both", "GET", f"/reef/receipts/{receipt}").json()["scenario"] == name
        assert ask("both", "POST", "/reef/report", {"references": [receipt]}).json()["scenario"] == name
    is_error(ask("both", "POST", "/v1/chat/completions", ASK, x_reef_scenario="other"), 403, says="mine, theirs")


def test_nothing_that_is_said_holds_a_key_or_its_hash(ask) -> None:
    secrets = [f"{entry['name']}-key" for entry in ENTRIES]
    secrets += [keys.hash_of(secret) for secret in secrets]
    for route in ("/reef/status", "/metrics", "/reef/scenarios/theirs/contract", "/openapi.json", "/nothing"):
        text = ask("admin", "GET", route).text
        assert [secret for secret in secrets if secret in text] == []
    for body in (b"{", b'{"references": 1}', b"\xff"):
        headers = {"authorization": "Bearer report-key"}
        text = ask.service.client.post(ask.url + "/reef/report", content=body, headers=headers).text
        assert [secret for secret in secrets if secret in text] == []


def test_prefix_and_header_say_the_same(ask, is_error) -> None:
    base = "/scenarios/theirs/sessions/s%2F1%20x/v1"
    for stream in (False, True):
        response = ask("both", "POST", f"{base}/chat/completions", {**ASK, "stream": stream}, x_session_id="other")
        assert response.status_code == 200, response.text
        receipt = response.headers.get("x-reef-agent-record-id") or re.findall(r"rcp_\w+", response.text)[0]
        shown = ask("both", "GET", f"/reef/receipts/{receipt}").json()
        assert (shown["scenario"], shown["session"]) == ("theirs", "s/1 x")
    again = ask("both", "POST", f"{base}/chat/completions", ASK, x_reef_scenario="theirs", x_reef_session="s/1 x")
    assert again.status_code == 200
    for name in ("x_reef_scenario", "x_reef_session"):
        response = ask("both", "POST", f"{base}/chat/completions", ASK, **{name: "mine"})
        is_error(response, 400, code="header_contradicts_path", param=name.replace("_", "-"))
    assert ask("both", "GET", f"{base}/models").json()["data"][0]["id"] == "starter"
    for path in (
        "/scenarios/mine/reef/status",
        "/scenarios/mine/v1",
        "/sessions/s/nothing",
        "/scenarios/mine/v1/nothing",
    ):
        is_error(ask("admin", "GET", path), 404)
    routes = set(re.findall(r'reef_http_requests_total\{route="([^"]+)"', ask("admin", "GET", "/metrics").text))
    assert "/v1/chat/completions" in routes
    assert [route for route in routes if "theirs" in route or "s/1" in route or "scenarios/mine" in route] == []


def test_pages_of_other_sites_are_refused(ask, is_error) -> None:
    own = ask.url
    assert ask("infer", "GET", "/v1/models", origin=own).status_code == 200
    is_error(ask("infer", "GET", "/v1/models", origin="http://evil.example"), 403, code="other_site")
    is_error(ask("infer", "POST", "/v1/chat/completions", ASK, origin="null"), 403, code="other_site")
    assert ask("infer", "GET", "/v1/models", host="reef.example").status_code == 200  # behind a proxy


def test_without_a_key_only_loopbacks_names_are_answered(recorder, is_error) -> None:
    assert recorder.get("/v1/models", headers={"host": "localhost:1"}).status_code == 200
    is_error(recorder.get("/v1/models", headers={"host": "evil.example"}), 403, code="other_host")
    rebound = {"host": "evil.example:80", "origin": "http://evil.example:80"}
    is_error(recorder.post("/v1/chat/completions", ASK, headers=rebound), 403, code="other_host")


# --- the key that a service makes (an engine that is there already: these tests start services again and again) -------


@pytest.fixture
def made(make_service, fake_engine):
    """`made(*settings)`: a service that asks for a key, not started yet."""
    attached = ("--training.backend", "none", "--inference.url", fake_engine.url, "--reef.access", "key")
    return lambda *settings: make_service(*attached, *settings)


def test_the_first_start_makes_a_key_says_it_once_and_the_next_one_reads_it(made, capsys, monkeypatch) -> None:
    monkeypatch.delenv("REEF_API_KEY", raising=False)
    service = made().start()
    file = service.run_dir / "api-key"
    key = file.read_text().strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    printed = (service.run_dir.parent / "serve.log").read_text()
    assert printed.count(key) == 1
    headers = {"authorization": f"Bearer {key}"}
    missing = service.get("/v1/models")
    assert missing.status_code == 401
    assert "api-key of the run directory" in missing.json()["error"]["message"]
    assert service.get("/v1/models", headers=headers).status_code == 200
    texts = [service.get(route, headers=headers).text for route in ("/reef/status", "/metrics", "/openapi.json")]
    assert [text for text in [*texts, missing.text] if key in text] == []

    run_dir = ("--reef.run-dir", str(service.run_dir))
    assert main(["status", *run_dir]) == 0  # the commands find it
    assert main(["status", *run_dir, "--reef.token", "another"]) == 1
    assert "the key is none that this service knows" in capsys.readouterr().err
    monkeypatch.setenv("REEF_API_KEY", "another")
    assert main(["status", *run_dir]) == 1
    monkeypatch.setenv("REEF_API_KEY", key)
    assert main(["status", "--url", service.url]) == 0

    assert service.stop() == 0
    service.start()
    assert file.read_text().strip() == key
    assert service.get("/v1/models", headers=headers).status_code == 200
    assert (service.run_dir.parent / "serve.log").read_text().count(key) == 1
    for log in (service.run_dir / "logs").iterdir():
        assert key not in log.read_text()


def test_a_run_directory_that_a_start_makes_is_for_its_owner_alone(tmp_path) -> None:
    """Receipts hold whole conversations. It is the operator who opens it to others, and that stays as it is."""
    run_dir = tmp_path / "more" / "run"
    command = [sys.executable, "-m", "reef", "serve", "-c", "/dev/null", "--reef.run-dir", str(run_dir)]
    command += ["--training.backend", "none", "--inference.url", "http://127.0.0.1:1", "--reef.host", "192.0.2.1"]
    command += ["--reef.token", "x", "--inference.model-path", str(STARTER)]
    for mode in (0o700, 0o755):
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=140)
        assert ended.returncode == 2, ended.stderr
        assert "192.0.2.1" in ended.stderr  # an address that no machine has
        if mode == 0o700:
            assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
            run_dir.chmod(0o755)
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o755


def test_recipes_find_the_key_in_the_run_directory(made, tmp_path) -> None:
    service = made("--recipe.scenario", "arithmetic").start()
    command = [sys.executable, "-m", "recipes.arithmetic.measure", "--url", service.url, "--count", "2"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'harness'}"}

    def measure(*more: str, **variables: str) -> subprocess.CompletedProcess[str]:
        ran = [*command, *more]
        env = environment | variables
        return subprocess.run(ran, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=240)

    without = measure()
    assert (without.returncode, "a key is needed" in without.stderr) == (1, True), without.stderr
    found = measure("--run-dir", str(service.run_dir))
    assert json.loads(found.stdout)["graded"] == 2, found.stderr
    wrong = measure("--run-dir", str(service.run_dir), REEF_API_KEY="another")
    assert (wrong.returncode, "none that this service knows" in wrong.stderr) == (1, True), wrong.stderr


def test_a_key_that_the_command_makes_works_as_it_is_printed(made, capsys, tmp_path, is_error) -> None:
    empty = tmp_path / "empty.yaml"
    empty.touch()
    assert main(["token", "ci", "-c", str(empty), "--role", "infer", "--scenario", "sums"]) == 0
    key, _, rest = capsys.readouterr().out.partition("\n")
    lines = rest[rest.index("reef:") :]
    assert key not in lines
    written = tmp_path / "serve.yaml"
    written.write_text(lines)
    service = made().start("-c", str(written))
    headers = {"x-api-key": key}
    receipt = service.post("/v1/chat/completions", ASK, headers=headers).headers["x-reef-agent-record-id"]
    assert service.get(f"/reef/receipts/{receipt}", headers=headers).json()["scenario"] == "sums"
    is_error(service.post("/reef/report", {"references": [receipt]}, headers=headers), 403, code="role_missing")
    assert main(["token", "ci", "-c", str(written)]) == 2
    assert "ci is the name of two keys" in capsys.readouterr().err
    assert main(["token", "c i", "-c", str(empty)]) == 2
