"""``reef-harness stream`` and ``reef-harness groups``."""

import json
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from reef_harness.cli import main
from reef_harness.drivers import read_rollouts
from reef_harness.drivers.commands import _Outages
from reef_harness.errors import HarnessError, TooManyRequests, Unavailable, Unreachable


@pytest.fixture
def items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("REEF_URL", "REEF_SCENARIO", "REEF_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)  # where no service keeps its key
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps({"id": f"i{n}", "prompt": f"prompt {n}", "gold": "2"}) + "\n" for n in range(6)))
    return path


def command(name: str, service: Any, items: Path, *more: str) -> int:
    return main([name, "--url", service.url, "--items", str(items), "--grader", "final", *more])


def asked(service: Any) -> list[Any]:
    return service.paths("/v1/chat")


def test_a_stream_goes_through_the_items_once_and_says_what_came_of_it(
    service: Any, items: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.batch_size = 4
    more = ("--temperature", "0.7", "--max-tokens", "9", "--tags", "team=red", "run=7")
    assert command("stream", service, items, *more) == 0
    assert sorted(body["messages"][0]["content"] for body in asked(service)) == [f"prompt {n}" for n in range(6)]
    assert {(body["n"], body["temperature"], body["max_tokens"]) for body in asked(service)} == {(1, 0.7, 9)}
    headers = [headers for _, path, headers, _ in service.requests if path.startswith("/v1/")]
    assert {(h["x-reef-tag-team"], h["x-reef-tag-run"], h["x-reef-scenario"]) for h in headers} == {
        ("red", "7", "sums")
    }
    said = capsys.readouterr().err
    assert "6 rollouts reported, 0 failed, 1 releases trained; 2 wait for the service to use them" in said


def test_groups_have_the_services_size_unless_another_is_given(service: Any, items: Path) -> None:
    service.batch_size = 16
    assert command("groups", service, items, "--releases", "2") == 0
    assert {body["n"] for body in asked(service)} == {8}
    service.requests.clear()
    service.trains = False
    assert command("groups", service, items, "--group-size", "3", "--epochs", "1") == 0
    assert {body["n"] for body in asked(service)} == {3}
    assert len(asked(service)) == 6


def test_epochs_are_shuffled_anew_with_a_seed_and_the_same_in_each_life(
    service: Any, items: Path, tmp_path: Path
) -> None:
    service.trains = False
    orders = []
    for records in ("a", "b"):
        service.requests.clear()
        more = ("--epochs", "3", "--seed", "5", "--in-flight", "1", "--records", str(tmp_path / records))
        assert command("stream", service, items, *more) == 0
        orders.append([body["messages"][0]["content"] for body in asked(service)])
    assert orders[0] == orders[1]
    epochs = [orders[0][start : start + 6] for start in (0, 6, 12)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_number_of_rollouts_ends_it_and_the_records_go_on(
    service: Any, items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.trains = False
    records = tmp_path / "r.jsonl"
    assert command("stream", service, items, "--rollouts", "4", "--records", str(records)) == 0
    assert "4 rollouts reported" in capsys.readouterr().err
    assert command("stream", service, items, "--rollouts", "10", "--records", str(records)) == 0
    assert "10 rollouts reported" in capsys.readouterr().err
    assert len(service.reports) == len(read_rollouts(records)) == 10
    assert command("groups", service, items, "--records", str(records)) == 1
    assert "is of a run with driver 'stream', this one has 'groups'" in capsys.readouterr().err


def test_the_bar_begins_where_the_records_end(
    service: Any, items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.batch_size = 2
    more = ("--releases", "2", "--records", str(tmp_path / "r.jsonl"))
    assert command("stream", service, items, *more) == 0
    capsys.readouterr()
    assert command("stream", service, items, *more) == 0
    assert "training: 100%|" in (told := capsys.readouterr().err)
    assert "| 2/2 [" in told
    assert "releases trained" in told

    service.trains = False
    more = ("--rollouts", "8", "--records", str(tmp_path / "s.jsonl"))
    assert command("stream", service, items, "--rollouts", "3", *more[2:]) == 0
    capsys.readouterr()
    assert command("stream", service, items, *more, "--epochs", "2") == 0
    counts = re.findall(r"\| (\d)/8 \[", capsys.readouterr().err)
    assert (counts[0], counts[1], counts[-1]) == ("0", "3", "8")


@pytest.mark.parametrize(("option", "least"), [("--in-flight", 1), ("--max-ahead", 0)])
@pytest.mark.parametrize("value", ["abc", "1.5", "-1"])
def test_a_count_that_is_none_is_a_sentence(
    service: Any, items: Path, capsys: pytest.CaptureFixture[str], option: str, least: int, value: str
) -> None:
    with pytest.raises(SystemExit):
        command("stream", service, items, f"{option}={value}")
    assert f"{option}" in (said := capsys.readouterr().err)
    assert f"expected a whole number of at least {least}, got '{value}'" in said


@pytest.mark.parametrize(
    "command", ["stream", "groups", "compute vote", "compute beam", "compute revise", "compute route", "harbor run"]
)
def test_the_help_says_every_default(capsys: pytest.CaptureFixture[str], command: str) -> None:
    """In the words after an option: argparse leaves a default out that no help names."""
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    told = " ".join(capsys.readouterr().out.split())
    expected = {
        "stream": [
            "sampled at once (default: 16)",
            "tokens of an answer at most (default: 64)",
            "of sampling (default: 1.0)",
            "seconds that an answer may take (default: 630)",
        ],
        "compute vote": [
            "answers to an item at most (default: 8)",
            "tokens of one answer at most (default: 64)",
            "items at a time (default: 64)",
            "are made of (default: 0)",
        ],
        "compute beam": ["kept (default: 2)", "each beam (default: 2)"],
        "compute revise": ["at most (default: 2)"],
        "compute route": ["every item gets (default: 3)"],
        "harbor run": ["reef (the default)", "docker (the default)"],
    }
    common = ["(default: REEF_URL, else http://127.0.0.1:8080)", "(default: work/run/api-key)"]
    for words in (*expected[command if command != "groups" else "stream"], *common):
        assert words in told


def test_rows_that_cannot_be_used_are_named_and_the_others_go_on(
    service: Any, items: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.trains = False
    with items.open("a") as file:
        file.write('{"prompt": "no id", "gold": "2"}\n{"id": "ungraded", "prompt": "x"}\nnonsense\n')
    assert command("stream", service, items) == 0
    said = capsys.readouterr().err
    assert f"left out: {items}:7: a row without an id" in said
    assert f"left out: {items}:9: bad JSON" in said
    assert "6 rollouts reported, 1 failed" in said
    assert len(service.reports) == 6


def test_a_file_without_a_usable_item_is_an_error(
    service: Any, items: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items.write_text("")
    assert command("stream", service, items) == 1
    assert "has no usable item" in capsys.readouterr().err
    assert command("stream", service, items.with_name("none.jsonl")) == 1
    assert "none.jsonl" in capsys.readouterr().err
    assert service.requests == []


def test_where_nothing_could_be_graded_the_status_says_so(
    service: Any, items: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items.write_text('{"id": "a", "prompt": "x"}\n')
    assert command("stream", service, items) == 1
    said = capsys.readouterr().err
    assert "0 rollouts reported, 1 failed" in said
    assert "\n1 failed with no_gold, the last: not graded: no_gold: " in said
    assert service.reports == {}


@pytest.mark.parametrize("name", ["stream", "groups"])
def test_what_cannot_be_graded_is_counted_by_reason_and_asked_in_one_life_only(
    service: Any, items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    service.trains = False
    golds = [None, "no number", None, "2"]
    items.write_text(
        "".join(json.dumps({"id": f"i{n}", "prompt": "x", "gold": gold}) + "\n" for n, gold in enumerate(golds))
    )
    size = 1 if name == "stream" else 8
    more = ("--grader", "number", "--in-flight", "1", "--records", str(tmp_path / "r.jsonl"))
    for _ in range(3):
        assert command(name, service, items, *more) == 0
        said = capsys.readouterr().err
        assert f"{size} rollouts reported, {3 * size} failed" in said
        assert f"\n{2 * size} failed with no_gold, the last: not graded: no_gold: item 'i2' has no gold answer" in said
        assert f"\n{size} failed with bad_gold, the last: not graded: bad_gold: item 'i1'" in said
        assert len(asked(service)) == 3  # of i2 it is known by then that it needs a gold


def test_the_status_is_of_this_life_but_for_gold_that_is_lacking(
    service: Any, items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.trains = False
    records = ("--records", str(tmp_path / "r.jsonl"))
    assert command("stream", service, items, *records) == 0
    assert command("stream", service, items, *records) == 0  # nothing is left to do
    with items.open("a") as file:
        file.write('{"id": "ungraded", "prompt": "x"}\n')
    capsys.readouterr()
    assert command("stream", service, items, *records) == 0  # all that can be graded is reported
    assert "no_gold" in capsys.readouterr().err
    with items.open("a") as file:
        file.write('{"id": "new", "prompt": "x", "gold": "2"}\n')
    real = service.chat
    service.chat = lambda *_: {"choices": []}
    assert command("stream", service, items, *records) == 1
    service.chat = real
    assert command("stream", service, items, *records) == 0


def test_a_run_whose_scenario_is_trained_by_hand_ends_and_says_so(
    service: Any, items: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.batch_size, service.mode = 4, "manual"
    assert command("stream", service, items) == 0
    said = capsys.readouterr().err
    assert "6 wait for the service to use them; nothing is trained by itself: the mode of sums is manual" in said


def test_a_service_that_is_down_is_one_clear_line(items: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert main(["stream", "--url", url, "--items", str(items), "--grader", "final"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("reef-harness stream: ")
    assert url in line
    assert "ConnectError" in line


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--scenario", "other"), "has no scenario 'other', only 'sums'"),
        (("--grader", "nobody"), "no grader is named 'nobody'"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(
    service: Any, items: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, str], message: str
) -> None:
    assert command("stream", service, items, *more) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert asked(service) == []


def test_without_a_scenario_it_is_the_one_that_trains(
    service: Any, items: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.trains = False
    real = service.route

    def several(method: str, parts: list[str], *rest: Any) -> Any:
        if parts == ["reef", "scenarios"]:
            return 200, {"scenarios": [{"name": "sums", "trains": True}, {"name": "chat", "trains": other}]}
        return real(method, parts, *rest)

    service.route, other = several, False
    assert command("stream", service, items) == 0
    assert {headers["x-reef-scenario"] for _, path, headers, _ in service.requests if "/v1/" in path} == {"sums"}
    other = True
    assert command("stream", service, items) == 1
    assert "--scenario must say which one is meant: 'sums', 'chat'" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [("--in-flight", "0"), ("--max-ahead", "-1"), ("--tags", "red"), ("--epochs", "x")])
def test_options_that_make_no_sense_are_wrong_usage(service: Any, items: Path, wrong: tuple[str, str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command("stream", service, items, *wrong)
    assert caught.value.code == 2


@pytest.mark.parametrize("recorded", [True, False])
def test_a_service_that_dies_is_told_of_at_once_and_at_the_end_what_was_done(
    service: Any,
    items: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    recorded: bool,
) -> None:
    """While it takes the third report. By a clock of the client on which each request to the dead takes 4 s of 60."""
    lost: list[str] = []
    monkeypatch.setattr("reef_harness.client.time", SimpleNamespace(monotonic=lambda: 4.0 * len(lost)))
    monkeypatch.setattr("reef_harness.client.Retry.pause_s", lambda *_: 0.01)
    real = service.handle

    def handle(http: Any) -> None:
        if lost or (http.path == "/reef/report" and len(service.reports) == 2):
            lost.append(http.path)
            http.rfile.read(int(http.headers.get("content-length", 0)))
            http.close_connection = True
        else:
            real(http)

    service.handle = handle
    records = tmp_path / "r.jsonl"
    more = ("--records", str(records)) if recorded else ()
    assert command("stream", service, items, "--in-flight", "1", *more) == 1
    said = capsys.readouterr().err.splitlines()
    (told,) = [line for line in said if line.startswith("the service does not answer, and is tried until ")]
    assert re.search(r" until \d\d:\d\d:\d\d: (GET|POST) http://\S+: ", told)
    (summary,) = [line for line in said if line.startswith("2 rollouts reported, ")]
    assert summary.endswith("; 2 wait for the service to use them; 1 reports are owed")
    assert said.index(told) < said.index(summary)
    assert said[-1].startswith("reef-harness stream: ")
    assert (said[-2] == f"the same command goes on from {records}") is recorded

    if recorded:
        service.handle = real
        assert command("stream", service, items, "--in-flight", "1", *more) == 0
        assert "6 rollouts reported, 0 failed" in capsys.readouterr().err
        assert len(service.reports) == len(service.receipts) == 6


def test_records_that_cannot_be_gone_on_with_are_not_said_to_be(
    service: Any, items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--records", str(tmp_path / "r.jsonl"))
    assert command("stream", service, items, *more) == 0
    service.reports.clear()  # another service
    with items.open("a") as file:
        file.write('{"id": "new", "prompt": "x", "gold": "2"}\n')
    capsys.readouterr()
    assert command("stream", service, items, *more) == 1
    said = capsys.readouterr().err
    assert "is of another service, or of another ledger" in said
    assert "goes on from" not in said


def test_an_outage_is_told_of_once_and_the_next_one_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    clock = SimpleNamespace(
        monotonic=lambda: now[0], time=lambda: now[0], localtime=time.gmtime, strftime=time.strftime
    )
    monkeypatch.setattr("reef_harness.drivers.commands.time", clock)
    outages = _Outages()

    def told(at_s: float, error: HarnessError, left_s: float) -> str:
        now[0] = at_s
        outages(error, left_s)
        return capsys.readouterr().err

    gone = Unreachable("GET http://x/: ConnectError")
    assert told(3600.0, gone, 60.0) == "the service does not answer, and is tried until 01:01:00: " + f"{gone}\n"
    assert told(3605.0, gone, 60.0) == ""  # another request
    assert told(3661.0, gone, 4.0) == ""  # the same, near its end
    assert told(3662.0, TooManyRequests(429, "full"), 60.0) == ""  # it answers, and lets us in by and by
    loading = Unavailable(503, "loading")
    assert told(3720.0, loading, 60.0) == "the service is not ready, and is tried until 01:03:00: loading (HTTP 503)\n"


def test_interrupted_it_finishes_what_is_in_flight_and_says_how_to_go_on(
    service: Any, items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.trains = False
    records = tmp_path / "r.jsonl"
    real = service.report
    interrupt = threading.Event()

    def report(body: Any) -> Any:
        if len(service.reports) == 5 and not interrupt.is_set():
            interrupt.set()
            os.kill(os.getpid(), signal.SIGINT)
        return real(body)

    service.report = report
    assert command("stream", service, items, "--epochs", "1000", "--records", str(records)) == 130
    said = capsys.readouterr().err
    assert f"stopped: what was in flight is reported; the same command goes on from {records}" in said
    assert len(service.reports) == len(service.receipts) == len(read_rollouts(records))
