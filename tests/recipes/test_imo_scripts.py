"""The scripts of the example with olympiad problems: what they keep, leave out and say, and all of them in order."""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from reef_harness.errors import HarnessError

from recipes.arithmetic.task import held_out_set, train_stream
from recipes.sao.examples.imo_answerbench import chain, export_problems, plot_curve, plot_paper
from recipes.sao.examples.imo_answerbench.chain import Link
from recipes.sao.examples.imo_answerbench.plot_stream import Point, moving_mean
from recipes.sao.examples.imo_answerbench.plot_stream import main as plot_stream
from recipes.sao.examples.imo_answerbench.plot_stream import points as stream_points
from recipes.sao.examples.imo_answerbench.run import Report, Trial, attempts, graded, tasks_in, told

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "recipes" / "sao" / "examples" / "imo_answerbench"
LONG = "Let n be the number of ways to tile a board of three by ten squares with dominoes of two squares each. Find n."


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def exported(path: Path, out: Path, *options: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The items and the reasons of what was left out."""
    named = ("--source", "ours", "--revision", "1", "--split", "train")
    assert export_problems.main([str(path), "--out", str(out), *named, *options]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    left_out = out.with_name(f"{out.name}.left-out.jsonl").read_text().splitlines()
    return rows, [json.loads(line)["reason"] for line in left_out]


# ---- export


def test_a_row_becomes_an_item_with_its_source_and_how_to_answer(tmp_path: Path) -> None:
    file = write(tmp_path / "raw.jsonl", [{"problem": "How many?", "answer": 3, "id": "a"}])
    rows, left_out = exported(file, tmp_path / "items.jsonl", "--id", "id")
    assert left_out == []
    assert rows == [
        {
            "id": "a",
            "prompt": "How many?\n\nPut the final answer in \\boxed{}.",
            "gold": "3",
            "source": "ours",
            "revision": "1",
            "split": "train",
        }
    ]


def test_a_csv_with_other_column_names_is_read_and_an_id_is_made_of_the_problem(tmp_path: Path) -> None:
    (tmp_path / "raw.csv").write_text('Question,Short Answer\n"How many, in all?",1/2\n')
    columns = ("--problem", "Question", "--answer", "Short Answer")
    rows, _ = exported(tmp_path / "raw.csv", tmp_path / "items.jsonl", *columns)
    again, _ = exported(tmp_path / "raw.csv", tmp_path / "again.jsonl", *columns)
    assert rows[0]["gold"] == "1/2"
    assert rows[0]["prompt"].startswith("How many, in all?")
    assert rows[0]["id"] == again[0]["id"]
    assert rows[0]["id"].startswith("ours_")


def test_rows_that_cannot_be_used_are_left_out_with_their_reasons(tmp_path: Path) -> None:
    raw = [
        {"problem": "One?", "answer": "1"},
        {"problem": "", "answer": "1"},
        {"problem": "Two?", "answer": None},
        {"problem": "Three?", "answer": "\\frac{1}{0}"},
        {"problem": " one ", "answer": "1"},
        {"problem": "Four?", "answer": "4"},
        {"problem": "four", "answer": "5"},
    ]
    rows, left_out = exported(write(tmp_path / "raw.jsonl", raw), tmp_path / "items.jsonl")
    assert [row["gold"] for row in rows] == ["1"]
    assert left_out[0] == "no problem"
    assert left_out[1] == "no answer"
    assert left_out[2].startswith("the answer cannot be judged by: ")
    assert left_out[3:] == ["the problem of line 1 again", *["the same problem with several answers: 4, 5"] * 2]


def test_problems_like_held_out_ones_are_left_out_however_many_they_are(tmp_path: Path) -> None:
    held_out, _ = exported(
        write(tmp_path / "test.jsonl", [{"problem": LONG, "answer": "571", "id": "h1"}]),
        tmp_path / "held-out.jsonl",
        *("--id", "id"),
    )
    assert len(held_out) == 1
    alike = [{"problem": f"{LONG} Hint {number}.", "answer": "571"} for number in range(25)]
    raw = [{"problem": LONG.upper(), "answer": "571"}, *alike, {"problem": "What is 2 + 3?", "answer": "5"}]
    file = write(tmp_path / "raw.jsonl", raw)
    rows, left_out = exported(file, tmp_path / "items.jsonl", "--held-out", str(tmp_path / "held-out.jsonl"))
    assert [row["gold"] for row in rows] == ["5"]
    assert left_out[0] == "it is the held-out h1"
    assert left_out[1:] == ["it has 100% of the n-grams of the held-out h1"] * 25


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("raw.parquet", "", "expected a file that ends in .jsonl or .csv"),
        ("raw.jsonl", '{"question": "One?", "answer": "1"}\n', "has no column 'problem', only answer, question"),
        ("raw.jsonl", "[1]\n", "raw.jsonl:1: expected an object, got list"),
        ("raw.jsonl", "{\n", "raw.jsonl:1: bad JSON"),
    ],
)
def test_a_file_that_is_no_table_of_problems_is_an_error(
    name: str, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content)
    named = ("--source", "ours", "--revision", "1", "--split", "train", "--out", str(tmp_path / "items.jsonl"))
    assert export_problems.main([str(tmp_path / name), *named]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "items.jsonl").exists()


# ---- the chain, and the figures over it

CHAIN = [
    Link("r0", None, "c0", "base", 0, 0),
    Link("r1", "r0", "c0", "critic-only", 1, 0),
    Link("r2", "r1", "c2", "train", 2, 1),
    Link("r3", "r2", "c3", "train", 3, 2),
    Link("r4", "r3", "c3", "critic-only", 4, 2),
]


def test_who_answers_for_a_release_is_the_one_whose_weights_it_has() -> None:
    names = ["first", "r1", "r2", "r3", "r4", "current"]
    assert [chain.policy_of(CHAIN, name).id for name in names] == ["r0", "r0", "r2", "r3", "r3", "r3"]
    with pytest.raises(HarnessError, match="there is no release 'r9'"):
        chain.policy_of(CHAIN, "r9")
    with pytest.raises(HarnessError, match="no release yet"):
        chain.policy_of([], "current")


def test_a_chain_is_read_back_as_it_was(tmp_path: Path) -> None:
    chain.save(tmp_path / "chain.json", CHAIN)
    assert chain.load(tmp_path / "chain.json") == CHAIN
    (tmp_path / "chain.json").write_text('[{"id": "r0"}]')
    with pytest.raises(HarnessError, match="cannot read the chain"):
        chain.load(tmp_path / "chain.json")


def test_staleness_counts_the_updates_between_who_answered_and_what_was_trained_from(tmp_path: Path) -> None:
    chain.save(tmp_path / "chain.json", CHAIN)
    common = {"occurrence": 0, "index": 0, "group": None, "error": None, "receipt": "x", "finish_reason": "stop"}
    common |= {"text": "", "outcome": "correct", "reason_code": "equal", "grader": "final", "version": "1"}

    def lines(item: str, release: str, trained: str | None, score: float) -> list[dict[str, Any]]:
        one = {"item": item, "occurrence": 0, "index": 0}
        answered = common | one | {"event": "answered", "release": release, "num_tokens": 5.0, "score": score}
        events = [answered | {"report": f"p{item}"}, one | {"event": "reported", "report": f"p{item}"}]
        state = {"state": "trained" if trained else "dropped", "reason": None, "release": trained, "step": 1}
        return [*events, one | {"event": "settled"} | state]

    run = {"event": "run", "run": "a"}
    # trained in r2: from r1, which has r0's policy; in r3: from r2, one update after r0; the last one never
    rows = [run, *lines("a", "r0", "r2", 1.0), *lines("b", "r0", "r3", 0.0), *lines("c", "r2", "r3", 1.0)]
    write(tmp_path / "rollouts.jsonl", [*rows, *lines("d", "r3", None, 0.0)])
    assert stream_points(tmp_path) == [
        Point(1.0, 5.0, 0, 0),
        Point(0.0, 5.0, 0, 1),
        Point(1.0, 5.0, 1, 0),
        Point(0.0, 5.0, 2, None),
    ]
    assert plot_stream([str(tmp_path)]) == 0
    assert (tmp_path / "stream.png").read_bytes().startswith(b"\x89PNG")


def test_a_moving_mean_is_over_the_last_values_that_are_there() -> None:
    assert moving_mean([1.0, None, 0.0, 1.0, None, None], window=3) == [1.0, 1.0, 0.5, 0.5, 0.5, 1.0]
    assert moving_mean([None, 2.0], window=2) == [None, 2.0]


def test_the_curve_and_the_paper_s_table_are_drawn_of_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain.save(tmp_path / "chain.json", CHAIN)
    for number, release, accuracy in ((0, "r0", 0.25), (3, "r3", 0.5)):
        directory = tmp_path / f"{number:05}-{release}"
        directory.mkdir()
        figure = {"value": accuracy, "low": accuracy - 0.1, "high": accuracy + 0.1}
        series = {"accuracy": figure, "items": 20, "samples": 4}
        (directory / "summary.json").write_text(json.dumps({"sets": {"in-domain": {"series": [series]}}}))
    assert plot_curve.main([str(tmp_path)]) == 0
    assert "release 3 (r3): 0.500 [0.400, 0.600], 20 items x 4" in capsys.readouterr().out
    assert plot_paper.main([str(tmp_path), "--what", "a test"]) == 0
    said = capsys.readouterr().out
    assert "here, release 0: 25.0 [15.0, 35.0] on a test, 20 items x 4" in said
    assert "Not comparable" in said
    for name in ("curve.png", "paper.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_figures_without_a_measurement_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chain.save(tmp_path / "chain.json", CHAIN)
    assert plot_curve.main([str(tmp_path)]) == 1
    assert "no release is measured" in capsys.readouterr().err
    assert plot_stream([str(tmp_path)]) == 1
    assert "stream.py writes it" in capsys.readouterr().err


# ---- trials


def test_what_became_of_a_trial_is_told() -> None:
    reports = tuple(Report(f"p{i}", float(i < 2), "trained", None, "r3") for i in range(4))
    waiting = (Report("p4", 1.0, "pending", None, None), Report("p5", None, "recorded", "no_score", None))
    verdict = Report("v", 1.0, "recorded", "already_claimed", None)
    trial = Trial("p1", "p1__abc", 1.0, None, {"r2": 6}, 0, reports + waiting, verdict)
    assert told(trial).splitlines() == [
        "p1  (p1__abc)",
        "  rollouts: 6 of r2",
        "  reports:  3 of 5 right; 4 trained in r3, 1 pending, 1 recorded (no_score)",
        "  verifier: reward 1, reported: recorded (already_claimed)",
    ]
    crashed = Trial("p1", "p1__abc", None, "the trial ended with NoAnswer", {}, 6, (), None)
    assert told(crashed).splitlines() == [
        "p1  (p1__abc)",
        "  rollouts: none; 6 failed",
        "  verifier: no reward, not reported: the trial ended with NoAnswer",
    ]


def test_tasks_go_in_order_of_their_names_and_a_directory_without_any_is_an_error(tmp_path: Path) -> None:
    assert [task.name[:2] for task in tasks_in(EXAMPLE / "tasks")] == ["p1", "p2", "p3"]
    with pytest.raises(HarnessError, match="holds no task"):
        tasks_in(tmp_path)


def test_a_trial_that_crashed_or_was_cut_off_is_run_again_under_another_name(tmp_path: Path) -> None:
    result = {"trial_name": "p1__a", "task_name": "reef/p1", "reward_valid": True, "exception_info": None}
    result |= {"verifier_result": {"rewards": {"reward": 1.0}}, "config": {"job_id": "j"}, "finished_at": "1"}
    result |= {"agent_result": {"metadata": {"reef": {"references": ["rcp_1"]}}}}
    crashed = result | {"exception_info": {"exception_type": "NoAnswer", "exception_message": "all failed"}}
    assert attempts(tmp_path, "p1") == []
    for name, content in (("p1", crashed), ("p1.2", None), ("p1.3", result)):
        (tmp_path / name / "p1__a").mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
        if content:
            (tmp_path / name / "p1__a" / "result.json").write_text(json.dumps(content))
    found = attempts(tmp_path, "p1")
    assert [job.name for job in found] == ["p1", "p1.2", "p1.3"]
    assert [graded(job) for job in found] == [False, False, True]


# ---- all of it


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_example_runs_on_a_cpu_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    for name, problems in (("train", islice(train_stream(4, 0), 200)), ("held-out", held_out_set(4, 30))):
        rows = [{"problem": each.text, "answer": each.answer} for each in problems]
        write(tmp_path / f"{name}.jsonl", rows)
    out = tmp_path / "a path with spaces"
    files = ("--train", str(tmp_path / "train.jsonl"), "--held-out", str(tmp_path / "held-out.jsonl"))
    sizes = ("--releases", "4", "--parts", "1", "--samples", "2", "--harbor-python", "/nowhere/python")
    command = [str(EXAMPLE / "run.sh"), "--cpu", *files, *sizes, "--out", str(out)]
    first = ran(command)
    assert "/nowhere/python is not there" in first
    assert "200 items of 200 rows" in first
    assert "Not comparable" in first
    measured = sorted(path.parent.name for path in (out / "evaluation").glob("*/summary.json"))
    assert len(measured) == 2
    assert measured[0].startswith("00000-")
    comparison = json.loads((out / "evaluation" / "before-after" / "compare.json").read_text())
    assert [list(counts.values()) for counts in comparison["releases"]] == [[60], [60]]
    found = stream_points(out / "stream")
    assert len(found) >= 4 * 32
    assert {each.version for each in found} >= {0}
    assert max(each.staleness for each in found if each.staleness is not None) <= 4
    for name in ("stream/stream.png", "evaluation/curve.png", "evaluation/paper.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    before = (out / "evaluation" / measured[0] / "in-domain" / "responses.jsonl").read_bytes()
    ran(command)
    assert stream_points(out / "stream")[: len(found)] == found
    assert (out / "evaluation" / measured[0] / "in-domain" / "responses.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_ctrl_c_reaches_the_service_once_and_it_stops_in_order(tmp_path: Path) -> None:
    """A terminal sends it to every process of the group; the service's second one would end it at once."""
    command = [str(EXAMPLE / "run.sh"), "--cpu", "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0) as run:
        assert run.stdout is not None
        try:
            assert any(line.startswith("ready at http") for line in run.stdout)
            os.killpg(run.pid, signal.SIGINT)
            said = run.communicate(timeout=120)[0]
        finally:
            run.kill()
    assert run.returncode == 130, said
    assert (tmp_path / "serve.log").read_text().endswith("reef: stopping\nreef: stopped\n")


def test_a_file_that_is_not_there_is_named_before_anything_runs(tmp_path: Path) -> None:
    command = [str(EXAMPLE / "run.sh"), "--train", "nowhere.csv", "--held-out", "nothing.csv"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, f"run.sh: cannot read {tmp_path}/nowhere.csv\n")


def ran(command: Sequence[str]) -> str:
    done = subprocess.run(command, cwd="/", env=os.environ, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
