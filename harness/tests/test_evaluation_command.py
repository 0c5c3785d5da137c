"""`reef-harness evaluate` against the stand-in service: what is asked, kept, and said when it goes wrong."""

import errno
import json
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from reef_harness.cli import main
from reef_harness.errors import HarnessError
from reef_harness.evaluation.bank import holding
from reef_harness.evaluation.records import Graded, Response
from reef_harness.evaluation.summary import by_temperature, summarize
from reef_harness.evaluation.table import notes
from reef_harness.types import Item

Json = dict[str, Any]


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REEF_API_KEY", raising=False)


def write_items(path: Path, count: int, start: int = 0) -> Path:
    rows = [
        {"id": f"i{n}", "prompt": str(n), "gold": str(n), "slices": {"size": "small" if n < start + 4 else "large"}}
        for n in range(start, start + count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def evaluate(service: Any, out: Path, items: Path, *more: str, figures: bool = False) -> int:
    where = ["--url", service.url, "--items", str(items), "--grader", "final", "--out", str(out)]
    return main(["evaluate", *where, *([] if figures else ["--no-figures"]), *more])


class Answers:
    """The n-th answer to a prompt says what ``says`` gives for (prompt as a number, n)."""

    def __init__(self, says: Any) -> None:
        self.says = says
        self.asked: Counter[str] = Counter()

    def __call__(self, prompt: str, index: int) -> str:
        number, self.asked[prompt] = self.asked[prompt], self.asked[prompt] + 1
        return f"<final>{self.says(int(prompt), number)}</final>"


def lines(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def chats(service: Any) -> list[tuple[Json, Json]]:
    return [(headers, body) for _, path, headers, body in service.requests if path == "/v1/chat/completions"]


def test_every_answer_is_kept_graded_and_counted_apart_by_set_and_temperature(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight items, 4 samples: small numbers always right, large ones in 1 of the 4; the greedy answer is right."""
    service.answer = Answers(lambda n, number: n if n < 4 or number in (0, 4) else -7)
    items, challenge = write_items(tmp_path / "a.jsonl", 8), write_items(tmp_path / "b.jsonl", 2, start=50)
    out = tmp_path / "run"
    more = ["--set", f"challenge={challenge}", "--samples", "4", "--greedy", "--logprobs", "--concurrency", "1"]
    assert evaluate(service, out, items, *more) == 0

    summary = json.loads((out / "summary.json").read_text())
    assert list(summary["sets"]) == ["in-domain", "challenge"]
    sampled, greedy = summary["sets"]["in-domain"]["series"]
    assert sampled["outcomes"] == {"correct": 20, "incorrect": 12, "review": 0, "error": 0, "failed": 0}
    assert sampled["accuracy"]["value"] == (4 * 1 + 4 * 0.25) / 8
    assert sampled["pass_at_k"]["2"]["value"] == pytest.approx((4 * 1 + 4 * 0.5) / 8)
    assert sampled["pass_at_k"]["4"]["value"] == 1.0
    votes = sampled["majority"]
    assert (votes["right"], votes["wrong"], votes["tie"], votes["none"]) == (4, 4, 0, 0)
    assert [(each["value"], each["items"], each["accuracy"]["value"], each["small"]) for each in sampled["slices"]] == [
        ("large", 4, 0.25, True),
        ("small", 4, 1.0, True),
    ]
    assert (greedy["temperature"], greedy["samples"], greedy["accuracy"]["value"]) == (0.0, 1, 1.0)
    assert summary["sets"]["challenge"]["series"][0]["accuracy"]["value"] == 0.25 * 1

    responses = lines(out / "in-domain" / "responses.jsonl")
    assert len(responses) == 40
    assert {row["logprob_sum"] for row in responses} == {-0.75}
    assert len({(row["item"], row["seed"]) for row in responses if row["temperature"] == 1}) == 32
    assert len({row["seed"] for row in responses if row["temperature"] == 1}) == 32
    asked = chats(service)
    assert {headers["x-reef-purpose"] for headers, _ in asked} == {"eval"}
    assert all(body["logprobs"] for _, body in asked)
    assert Counter(body["temperature"] for _, body in asked) == {1.0: 40, 0.0: 10}
    assert service.reports == {}
    said = capsys.readouterr()
    assert "| challenge | sampled at 1, 4 each |" in said.out
    assert "in-domain: 100%" in said.err
    assert "10/10" in said.err  # the bar of challenge: two items, four samples and a greedy answer each


def test_a_file_that_is_not_there_is_named_with_its_argument(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items, out = write_items(tmp_path / "a.jsonl", 1), tmp_path / "run"
    assert evaluate(service, out, tmp_path / "none.jsonl") == 1
    assert "none.jsonl' (given as items)" in capsys.readouterr().err
    assert evaluate(service, out, items, "--set", f"challenge={tmp_path / 'none.jsonl'}") == 1
    assert "none.jsonl' (given as sets)" in capsys.readouterr().err


def test_figures_are_drawn_of_each_set_and_of_what_all_have_in_common(service: Any, tmp_path: Path) -> None:
    service.answer = Answers(lambda n, number: n)
    items, out = write_items(tmp_path / "a.jsonl", 6), tmp_path / "run"
    assert evaluate(service, out, items, "--samples", "2", figures=True) == 0
    drawn = list(out.glob("*.png"))
    assert {path.name for path in drawn} == {"pass-at-k.png", "accuracy.png", "length-in-domain.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_a_second_run_samples_only_what_lacks_and_more_samples_change_no_seed(service: Any, tmp_path: Path) -> None:
    service.answer = Answers(lambda n, number: n)
    items, out = write_items(tmp_path / "a.jsonl", 5), tmp_path / "run"
    assert evaluate(service, out, items, "--samples", "2") == 0
    first = {(row["item"], row["sample"]): row["seed"] for row in lines(out / "in-domain" / "responses.jsonl")}
    assert len(chats(service)) == 10
    assert evaluate(service, out, items, "--samples", "2") == 0
    assert len(chats(service)) == 10
    assert evaluate(service, out, items, "--samples", "3", "--greedy") == 0
    assert len(chats(service)) == 10 + 5 + 5
    rows = lines(out / "in-domain" / "responses.jsonl")
    assert first == {
        (row["item"], row["sample"]): row["seed"] for row in rows if row["temperature"] == 1 and row["sample"] < 2
    }
    assert json.loads((out / "run.json").read_text())["settings"]["samples"] == 3


def test_a_failed_request_is_a_line_and_no_zero_and_is_asked_for_again(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.answer = Answers(lambda n, number: n)
    items, out = write_items(tmp_path / "a.jsonl", 4), tmp_path / "run"
    service.faults.extend(["ok", 400, "drop"])  # the first is the request for the scenarios
    assert evaluate(service, out, items, "--concurrency", "1") == 0
    [series] = json.loads((out / "summary.json").read_text())["sets"]["in-domain"]["series"]
    assert series["outcomes"] == {"correct": 2, "incorrect": 0, "review": 0, "error": 0, "failed": 2}
    assert (series["accuracy"]["value"], series["coverage"]["value"], series["at_least"]["value"]) == (1.0, 0.5, 0.5)
    said = capsys.readouterr().out
    assert "of 4 answers 2 failed; none of these is in the accuracy. Were all of them wrong, it would be 0.500" in said
    errors = [row["error"] for row in lines(out / "in-domain" / "responses.jsonl") if row["error"]]
    assert ["BadRequest" in errors[0], "Unreachable" in errors[1]] == [True, True]

    assert evaluate(service, out, items) == 0
    [series] = json.loads((out / "summary.json").read_text())["sets"]["in-domain"]["series"]
    assert series["outcomes"]["correct"] == 4


def test_an_item_whose_requests_all_failed_is_in_no_figure_and_not_wrong(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of three items are answered, always rightly: every figure that picks among answers is 1, over two items."""
    service.answer = Answers(lambda n, number: n)
    items, out = write_items(tmp_path / "a.jsonl", 3), tmp_path / "run"
    service.faults.extend(["ok", *[400] * 4])  # the first is the request for the scenarios
    assert evaluate(service, out, items, "--samples", "4", "--logprobs", "--concurrency", "1") == 0
    [series] = json.loads((out / "summary.json").read_text())["sets"]["in-domain"]["series"]
    majority = series["majority"]
    assert {name: majority[name] for name in ("right", "wrong", "tie", "none")} == {
        "right": 2,
        "wrong": 0,
        "tie": 0,
        "none": 0,
    }
    for figure in (series["accuracy"], majority["right_share"], majority["expected"], series["best_by_logprob"]):
        assert (figure["value"], figure["items"]) == (1.0, 2)
    said = capsys.readouterr().out
    assert "not all 3 items have enough judged answers, only 2 for pass@1, 2 for pass@2" in said


def test_a_set_of_one_item_is_said_to_tell_little_and_stores_a_wide_interval(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """7 of 8 answers to the one item: as one trial, 0.875 is anything from 0.159 to 0.996."""
    service.answer = Answers(lambda n, number: n if number else -1)
    items = write_items(tmp_path / "a.jsonl", 1)
    assert evaluate(service, tmp_path / "run", items, "--samples", "8", "--concurrency", "1", "--store") == 0
    [(_, stored)] = service.evaluations
    assert (stored["accuracy"], stored["low"], stored["high"]) == pytest.approx((0.875, 0.159, 0.996), abs=5e-4)
    length = stored["metrics"]["response_length"]
    assert (length["value"], length["items"]) == (7.0, 1) and length["low"] < 7 < 40 < length["high"] < 64
    assert "in-domain: of 1 items intervals are wide, and say little." in capsys.readouterr().out


def test_items_without_gold_are_errors_of_the_grader_and_bad_rows_are_left_out(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.answer = Answers(lambda n, number: n)
    items = tmp_path / "a.jsonl"
    items.write_text('{"id": "a", "prompt": "1"}\n{"prompt": "2"}\n{"id": "c", "prompt": "3", "gold": "3"}\n')
    assert evaluate(service, tmp_path / "run", items) == 0
    captured = capsys.readouterr()
    assert f"left out: {items}:2: a row without an id" in captured.err
    assert "1 could not be judged" in captured.out
    verdicts = lines(tmp_path / "run" / "in-domain" / "verdicts-final@1.jsonl")
    assert sorted((row["item"], row["outcome"], row["reason_code"]) for row in verdicts) == [
        ("a", "error", "no_gold"),
        ("c", "correct", "equal"),
    ]
    items.write_text('{"id": "a", "prompt": "1"}\n')
    assert evaluate(service, tmp_path / "none", items) == 1
    assert "none of the answers to in-domain could be judged; the first: error: no_gold" in capsys.readouterr().err


def test_the_notes_say_why_and_to_which_items_answers_were_not_judged(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of seven items four have no gold and one has a bad one; two rows are refused; the first request fails."""
    service.answer = Answers(lambda n, number: n)
    long = "an id that is longer than any table would be wide"
    golds = {"a": "1", "b": None, "c": None, long: None, "d": None, "e": "five"}
    rows = [{"id": id, "prompt": "1"} | ({"gold": gold} if gold else {}) for id, gold in golds.items()]
    items = tmp_path / "a.jsonl"
    rows.insert(0, {"id": "a2", "prompt": "1", "gold": "1"})
    items.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {}, 1]))
    service.faults.extend(["ok", 400])  # the first is the request for the scenarios
    assert evaluate(service, tmp_path / "run", items, "--concurrency", "1") == 0
    start = "- in-domain, sampled at 1: "
    said = capsys.readouterr().out
    assert f"{start}of 7 answers 1 failed, 5 could not be judged; none of these" in said
    assert f"{start}no_gold: 4 answers could not be judged: b, c, {long[:39]}…, …\n" in said
    assert f"{start}bad_gold: 1 answer could not be judged: e\n" in said
    assert f"{start}BadRequest: 1 answer failed: a2\n" in said
    assert f"- in-domain: 2 rows of {items.resolve()} were left out.\n" in said
    assert said.strip() == (tmp_path / "run" / "table.md").read_text().strip()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    [series] = summary["sets"]["in-domain"]["series"]
    assert [(each["outcome"], each["reason"], each["answers"], each["items"]) for each in series["not_judged"]] == [
        ("error", "no_gold", 4, ["b", "c", long, "d"]),
        ("error", "bad_gold", 1, ["e"]),
        ("failed", "BadRequest", 1, ["a2"]),
    ]
    assert all(f"- {note}\n" in said for note in summary["notes"])


def test_several_answers_to_one_item_that_wait_for_review_name_it_once() -> None:
    item = Item.from_text("i", "?", "1")
    responses = [Response("i", n, n, 1.0, "r0", f"c{n}", "x", "stop", 5, 9) for n in range(2)]
    verdicts = [Graded("i", n, 1.0, "review", None, "unsure", True, "g", "1") for n in range(2)]
    [candidates] = by_temperature([item], responses, verdicts).values()
    said = notes({"in-domain": [summarize(candidates, 1.0, 3)]})
    assert "in-domain, sampled at 1: of 3 answers 1 failed, 2 wait for review; none" in said[0]
    assert said[1:3] == [
        "in-domain, sampled at 1: not sampled: 1 answer failed: i",
        "in-domain, sampled at 1: unsure: 2 answers wait for review: i",
    ]


@pytest.mark.parametrize("cut", [1, 2])
def test_more_than_a_twentieth_of_the_answers_cut_is_said_with_the_option(cut: int) -> None:
    """Of 20 answers 1 is not more than 5%, 2 are; of those the grader liked one."""
    items = [Item.from_text(f"i{n}", "?", "1") for n in range(20)]
    ends = ["length" if n < cut else "stop" for n in range(20)]
    responses = [Response(f"i{n}", 0, n, 1.0, "r0", "c", "x", end, 5, 64) for n, end in enumerate(ends)]
    verdicts = [
        Graded(f"i{n}", 0, 1.0, "correct" if n else "incorrect", float(n > 0), "x", True, "g", "1") for n in range(20)
    ]
    [candidates] = by_temperature(items, responses, verdicts).values()
    series = summarize(candidates, 1.0, 1)
    assert (series.json()["cut"], series.json()["cut_wrong"]) == (cut, 1)
    note = (
        "in-domain, sampled at 1: of 20 answers 2 were cut at the token limit, 1 graded as wrong; a higher "
        "--max-tokens (with another --out) leaves fewer."
    )
    assert (note in notes({"in-domain": [series]})) == (cut == 2)


def test_a_service_that_goes_away_leaves_what_was_sampled_and_one_line(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service.answer = Answers(lambda n, number: n)
    items, out = write_items(tmp_path / "a.jsonl", 6), tmp_path / "run"
    service.faults.extend(["ok", "ok", "ok", 401])
    assert evaluate(service, out, items, "--concurrency", "1") == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert said[-1].startswith("reef-harness evaluate: told to answer 401 (HTTP 401); 2 answers are kept in")
    assert len(lines(out / "in-domain" / "responses.jsonl")) == 2
    assert evaluate(service, out, items) == 0
    assert len(lines(out / "in-domain" / "responses.jsonl")) == 6


def test_no_service_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = write_items(tmp_path / "a.jsonl", 1)
    arguments = ["evaluate", "--url", "http://127.0.0.1:9", "--items", str(items), "--grader", "final"]
    assert main([*arguments, "--out", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and "ConnectError" in said
    assert not (tmp_path / "run").exists()


def test_a_line_that_a_crash_cut_off_is_sampled_again(service: Any, tmp_path: Path) -> None:
    service.answer = Answers(lambda n, number: n)
    items, out = write_items(tmp_path / "a.jsonl", 3), tmp_path / "run"
    assert evaluate(service, out, items) == 0
    file = out / "in-domain" / "responses.jsonl"
    file.write_text(file.read_text()[:-20])
    assert evaluate(service, out, items) == 0
    assert sorted(row["item"] for row in lines(file)) == ["i0", "i1", "i2"]


def test_a_release_is_named_in_every_request_and_gets_the_result(service: Any, tmp_path: Path) -> None:
    service.answer = Answers(lambda n, number: n if n != 1 else 2)
    items, challenge = write_items(tmp_path / "a.jsonl", 4), write_items(tmp_path / "b.jsonl", 2, start=1)
    more = ["--set", f"challenge={challenge}", "--release", "r0", "--store"]
    assert evaluate(service, tmp_path / "run", items, *more) == 0
    assert {headers["x-reef-release"] for headers, _ in chats(service)} == {"r0"}
    [(release, stored)] = service.evaluations
    assert release == "r0"
    assert (stored["accuracy"], stored["set"], stored["other_sets"]) == (0.75, "in-domain", ["challenge"])
    assert stored["metrics"]["accuracy"]["value"] == 0.75
    assert stored["metrics"]["challenge_accuracy"]["value"] == 0.5
    assert (stored["metrics"]["coverage"]["value"], stored["metrics"]["invalid_rate"]["value"]) == (1.0, 0.0)
    assert stored["metrics"]["response_length"]["value"] == 7.0
    assert (stored["correct"], stored["graded"], stored["errors"]) == (3, 4, 0)


def test_an_unknown_release_and_one_that_another_answers_for_are_refused(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items = write_items(tmp_path / "a.jsonl", 2)
    assert evaluate(service, tmp_path / "run", items, "--release", "r9") == 1
    assert "HTTP 404" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert evaluate(service, tmp_path / "run", items, "--release", "r0") == 0  # the typo is mended
    service.release_names.append("r1")  # answers for r0, though an engine was lent for it
    assert evaluate(service, tmp_path / "other", items, "--release", "r0") == 1
    assert "asked for an answer of release r0, got one of r1" in capsys.readouterr().err
    assert service.engines == []  # it was given back


def test_interrupted_while_the_engine_starts_it_gives_the_engine_back(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.release_names.append("r1")
    real, go_on = service.handle, threading.Event()

    def handle(http: Any) -> None:
        if http.command == "POST" and http.path.endswith("/engine"):
            send = http.send_response

            def late(status: int) -> None:
                os.kill(os.getpid(), signal.SIGINT)
                go_on.wait(60)
                send(status)

            http.send_response = late
        real(http)

    service.handle = handle
    items = write_items(tmp_path / "a.jsonl", 2)
    try:
        assert evaluate(service, tmp_path / "run", items, "--release", "r0") == 130
    finally:
        go_on.set()
    asked = [method for method, path, _, _ in service.requests if "/engine" in path]
    assert (asked, service.engines, chats(service)) == (["POST", "DELETE"], [], [])
    assert capsys.readouterr().err.endswith("stopped\n")


def test_interrupted_it_says_that_the_same_command_goes_on(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    go_on = threading.Event()

    def answer(prompt: str, index: int) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        go_on.wait(60)
        return f"<final>{prompt}</final>"

    service.answer = answer
    items, out = write_items(tmp_path / "a.jsonl", 1), tmp_path / "run"
    try:
        assert evaluate(service, out, items) == 130
    finally:
        go_on.set()
    assert capsys.readouterr().err.endswith(f"kept in {out}: the same command goes on\nstopped\n")
    service.answer = Answers(lambda n, number: n)
    assert evaluate(service, out, items) == 0


def test_answers_of_two_releases_are_said_and_never_stored(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = Answers(lambda n, number: n)

    def answer(prompt: str, index: int) -> str:
        if sum(answers.asked.values()) == 3:
            service.release_names.append("r1")
        return answers(prompt, index)

    service.answer = answer
    items, out = write_items(tmp_path / "a.jsonl", 5), tmp_path / "run"
    assert evaluate(service, out, items, "--concurrency", "1", "--store") == 1
    captured = capsys.readouterr()
    assert "The answers are of 2 releases (r0: 3, r1: 2): the service took up new ones meanwhile" in captured.out
    assert "they measure none of them" in captured.err
    assert service.evaluations == []
    assert json.loads((out / "run.json").read_text())["answered_by"] == {"r0": 3, "r1": 2}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--max-tokens", "32"], "max_tokens 64, not 32"),
        (["--seed", "1"], "seed 0, not 1"),
        (["--temperature", "0.5"], "temperature 1.0, not 0.5"),
        (["--release", "r0"], "release as served, not r0"),
    ],
)
def test_a_directory_with_another_evaluation_is_refused(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    items, out = write_items(tmp_path / "a.jsonl", 1), tmp_path / "run"
    assert evaluate(service, out, items) == 0
    assert evaluate(service, out, items, *more) == 1
    assert f"holds another evaluation ({message})" in capsys.readouterr().err


def test_a_directory_without_a_single_answer_is_begun_anew(service: Any, tmp_path: Path) -> None:
    service.answer = Answers(lambda n, number: n)
    items, out = write_items(tmp_path / "a.jsonl", 2), tmp_path / "run"
    service.faults.extend(["ok", 400, 400])
    assert evaluate(service, out, items, "--temperature", "99") == 1
    items = write_items(tmp_path / "a.jsonl", 3)
    assert evaluate(service, out, items) == 0
    [series] = json.loads((out / "summary.json").read_text())["sets"]["in-domain"]["series"]
    assert (series["temperature"], series["outcomes"]["correct"], series["outcomes"]["failed"]) == (1.0, 3, 0)
    assert (out / "in-domain" / "items.jsonl").read_bytes() == items.read_bytes()


@pytest.mark.parametrize("died_at", ["write_json", "Bank._keep_items"])
def test_a_directory_is_begun_again_wherever_its_first_lines_ended(
    service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, died_at: str
) -> None:
    """A disk that is full: run.json is not whole yet, or it is and the copy of the items is not."""
    service.answer = Answers(lambda n, number: n)
    items, out = write_items(tmp_path / "a.jsonl", 2), tmp_path / "run"

    def full(*of: Any) -> None:
        if died_at == "write_json":
            (out / "run.json.new").write_text('{"form')
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(f"reef_harness.evaluation.bank.{died_at}", full)
        assert evaluate(service, out, items) == 1
    assert chats(service) == []
    assert [path.name for path in out.iterdir()] == ["run.json.new" if died_at == "write_json" else "run.json"]
    assert evaluate(service, out, items) == 0
    assert len(lines(out / "in-domain" / "responses.jsonl")) == 2
    assert not (out / "run.json.new").exists()


def test_a_grader_that_judged_some_of_the_answers_has_no_numbers(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first two answers to each item are right and judged by final; the six that came later are wrong."""
    service.answer = Answers(lambda n, number: n if number < 2 else n + 1)
    items, out = write_items(tmp_path / "a.jsonl", 3), tmp_path / "run"
    assert evaluate(service, out, items, "--samples", "2", "--logprobs") == 0
    assert evaluate(service, out, items, "--samples", "8", "--logprobs", "--grader", "number") == 0
    capsys.readouterr()
    half = f"{out}: 18 answers to in-domain were not graded by final@1: regrade them"
    half += ", or name who judged all (--grader, --against, --truth): number@2-final\n"
    assert main(["compare", str(out), str(out), "--grader", "final", "--no-figures"]) == 1
    assert half in capsys.readouterr().err
    assert main(["calibrate", str(out), "--truth", "final"]) == 1
    assert half in capsys.readouterr().err
    assert main(["regrade", str(out), "--grader", "boxed", "--against", "final", "--no-figures"]) == 1
    assert half in capsys.readouterr().err
    assert not list((out / "in-domain").glob("verdicts-boxed*"))  # nobody judged in vain
    assert main(["regrade", str(out), "--grader", "final", "--no-figures"]) == 0
    assert main(["compare", str(out), str(out), "--grader", "final", "--no-figures"]) == 0
    assert "| in-domain | sampled at 1, 8 and 8 each | 3     | 0.250" in capsys.readouterr().out


def graded_by_an_older_version(out: Path) -> None:
    """As if final had had the version 0, which is installed nowhere any more, when it judged these answers."""
    old = out / "in-domain" / "verdicts-final@1.jsonl"
    old.with_name("verdicts-final@0.jsonl").write_text(
        "".join(json.dumps(each | {"version": "0"}) + "\n" for each in lines(old))
    )
    old.unlink()
    run = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps(run | {"graders": ["final@0"]}))


def test_a_version_that_is_installed_no_more_holds_nothing_up(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of eight answers to each item the first two are right; only these were judged by final@0, all by final@1."""
    service.answer = Answers(lambda n, number: n if number < 2 else n + 1)
    items, out = write_items(tmp_path / "a.jsonl", 3), tmp_path / "run"
    assert evaluate(service, out, items, "--samples", "2", "--logprobs") == 0
    graded_by_an_older_version(out)
    assert evaluate(service, out, items, "--samples", "8", "--logprobs") == 0
    capsys.readouterr()
    assert main(["compare", str(out), str(out), "--no-figures"]) == 0
    said = capsys.readouterr().out
    assert "| in-domain | sampled at 1, 8 and 8 each | 3     | 0.250" in said
    assert "- Graded by final@1: the first's own grader, final@0, did not judge every answer of both.\n" in said
    assert json.loads((out / "compare" / "compare.json").read_text())["grader"] == "final@1"
    assert main(["calibrate", str(out)]) == 0
    assert "held against final@1" in capsys.readouterr().out
    assert main(["regrade", str(out), "--grader", "final", "--no-figures"]) == 0
    assert "final@1 judged these answers before" in capsys.readouterr().err
    assert main(["regrade", str(out), "--grader", "number", "--no-figures"]) == 0
    assert "Of 24 answers 0 are judged differently" in capsys.readouterr().out
    assert main(["regrade", str(out), "--grader", "number", "--against", "final@0"]) == 1
    said = "were not graded by final@0: regrade them, or name who judged all (--grader, --against, --truth): "
    assert f"18 answers to in-domain {said}final@1, number@2-final\n" in capsys.readouterr().err


def test_two_evaluations_are_compared_by_a_grader_that_judged_all_of_both(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first was judged by final@0, and then by final@1, which judged the second: half of its answers are right."""
    service.answer = Answers(lambda n, number: n)
    items, before, after = write_items(tmp_path / "a.jsonl", 4), tmp_path / "before", tmp_path / "after"
    assert evaluate(service, before, items) == 0
    graded_by_an_older_version(before)
    service.answer = Answers(lambda n, number: n if n < 2 else 0)
    assert evaluate(service, after, items) == 0
    capsys.readouterr()
    assert main(["compare", str(before), str(after), "--no-figures"]) == 1
    assert f"{after} was not graded by final@0, only by final@1" in capsys.readouterr().err
    assert main(["regrade", str(before), "--grader", "final", "--no-figures"]) == 0
    assert main(["compare", str(before), str(after), "--no-figures"]) == 0
    found = json.loads((after / "compare" / "compare.json").read_text())
    assert (found["grader"], found["sets"][0]["difference"]["value"]) == ("final@1", -0.5)


def test_where_nobody_judged_every_answer_any_grader_may(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Judged by final@0, then more was sampled, and the command ended before it graded."""
    service.answer = Answers(lambda n, number: n if number < 2 else n + 1)
    items, out = write_items(tmp_path / "a.jsonl", 3), tmp_path / "run"
    assert evaluate(service, out, items, "--samples", "2") == 0
    graded_by_an_older_version(out)
    assert evaluate(service, out, items, "--samples", "8") == 0
    (out / "in-domain" / "verdicts-final@1.jsonl").unlink()
    capsys.readouterr()
    assert main(["compare", str(out), str(out), "--no-figures"]) == 1
    assert "18 answers to in-domain were not graded by final@0: regrade them\n" in capsys.readouterr().err
    assert main(["regrade", str(out), "--grader", "final", "--no-figures"]) == 0
    said = capsys.readouterr()
    assert "no other grader judged every answer: there is nothing to compare it with" in said.err
    assert "| in-domain | sampled at 1, 8 each | 3     | 0.250" in said.out
    assert main(["compare", str(out), str(out), "--no-figures"]) == 0


@pytest.mark.parametrize("content", ["5", "null", "[]", '{"format": 1, "scenario": "s"}', "[" * 100_000])
def test_a_run_json_that_is_none_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    (tmp_path / "run.json").write_text(content)
    assert main(["regrade", str(tmp_path), "--grader", "final"]) == 1
    assert f"{tmp_path / 'run.json'} cannot be read: " in capsys.readouterr().err


def test_a_directory_that_somebody_evaluates_into_is_refused(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service.answer = Answers(lambda n, number: n)
    items, out = write_items(tmp_path / "a.jsonl", 2), tmp_path / "run"
    assert evaluate(service, out, items) == 0
    num_asked = len(chats(service))
    with holding(out):
        assert evaluate(service, out, items, "--samples", "2") == 1
        assert f"{out} is in use: another evaluation or regrade writes to it" in capsys.readouterr().err
        assert main(["regrade", str(out), "--grader", "boxed", "--no-figures"]) == 1
        assert f"{out} is in use" in capsys.readouterr().err
    assert len(chats(service)) == num_asked
    assert evaluate(service, out, items, "--samples", "2") == 0


def test_while_answers_are_sampled_nobody_else_has_the_directory(service: Any, tmp_path: Path) -> None:
    """The stand-in's answer is given while the command waits for it: the second one is refused, the first goes on."""
    items, out, refused = write_items(tmp_path / "a.jsonl", 1), tmp_path / "run", []

    def answer(prompt: str, index: int) -> str:
        with pytest.raises(HarnessError, match="is in use"), holding(out):
            pass
        refused.append(prompt)
        return "<final>0</final>"

    service.answer = answer
    assert evaluate(service, out, items) == 0
    assert refused == ["0"]


def test_changed_items_and_a_directory_of_something_else_are_refused(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items, out = write_items(tmp_path / "a.jsonl", 1), tmp_path / "run"
    assert evaluate(service, out, items) == 0
    write_items(items, 2)
    assert evaluate(service, out, items) == 1
    assert "the items of in-domain were changed" in capsys.readouterr().err
    other = write_items(tmp_path / "b.jsonl", 1, start=7)
    assert evaluate(service, out, other) == 1
    assert f"the items of in-domain are those of {items}, not {other}" in capsys.readouterr().err
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear diary")
    assert evaluate(service, tmp_path / "notes", items) == 1
    assert "no evaluation's directory and not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--samples", "0"], "must be at least 1"),
        (["--temperature", "0", "--samples", "2"], "at temperature 0 all answers"),
        (["--temperature", "nan"], "temperature must be a number"),
        (["--concurrency", "0"], "concurrency must be at least 1"),
        (["--grade-at-once", "0"], "grade-at-once must be at least 1"),
        (["--set", "in-domain=a.jsonl"], "the set in-domain is given twice"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert evaluate(service, tmp_path / "run", write_items(tmp_path / "a.jsonl", 1), *more) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["../up", ".", "summary.json", "run.json.new", "table.md", "accuracy.png", "compare"])
def test_a_sets_name_is_that_of_a_directory_and_of_no_file_beside_it(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit):
        evaluate(service, tmp_path / "run", write_items(tmp_path / "a.jsonl", 1), "--set", f"{name}=a.jsonl")
    assert "a set's name has letters" in capsys.readouterr().err
    assert service.requests == []


def test_a_set_whose_name_has_dots_is_gone_on_with(service: Any, tmp_path: Path) -> None:
    service.answer = Answers(lambda n, number: n)
    items, out = write_items(tmp_path / "a.jsonl", 2), tmp_path / "run"
    for samples in ("1", "3"):
        assert evaluate(service, out, items, "--set", f"compare.v1.json-2={items}", "--samples", samples) == 0
    assert len(lines(out / "compare.v1.json-2" / "responses.jsonl")) == 6
