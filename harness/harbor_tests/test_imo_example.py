"""The example with olympiad problems through Harbor: its own tasks, and its run.py on arithmetic in their place."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Harness

EXAMPLE = ROOT / "recipes" / "sao" / "examples" / "imo_answerbench"
PACKAGE = "recipes.sao.examples.imo_answerbench"
PROBLEMS = {  # the starter's arithmetic, none of it held out
    "a1": ("Start at 9. Subtract 4. Add 3. Add 5. Subtract 8.", "5"),
    "a2": ("Start at 2. Add 6. Add 1. Subtract 3. Add 4.", "10"),
    "a3": ("Start at 7. Add 2. Subtract 5. Add 9. Subtract 1.", "12"),
}


def script(name: str, *arguments: str) -> str:
    """Run one of the example's scripts, as its README says; what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", f"{PACKAGE}.{name}", *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("REEF_")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def trials_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "trials.jsonl").read_text().splitlines()]


@pytest.fixture
def arithmetic(tmp_path: Path) -> Path:
    """Three tasks that the starter model can answer, made by the script that made the example's own."""
    rows = [{"id": name, "prompt": prompt, "gold": gold} for name, (prompt, gold) in PROBLEMS.items()]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "tasks"
    script("write_tasks", "--items", str(tmp_path / "items.jsonl"), "--form", "final", "--out", str(out))
    return out


def test_harbor_finds_no_fault_in_the_tasks(arithmetic: Path) -> None:
    tasks = [*sorted((EXAMPLE / "tasks").iterdir()), *sorted(arithmetic.iterdir())]
    harbor = Path(sys.executable).with_name("harbor")
    done = subprocess.run([str(harbor), "lint", "--json", *map(str, tasks)], capture_output=True, text=True)
    assert (done.returncode, json.loads(done.stdout or "[]")) == (0, []), done.stdout + done.stderr


def test_the_solutions_of_the_tasks_are_worth_1_in_harbor(harness: Harness) -> None:
    options = ("--agent", "oracle", "--environment", "hostdir")
    job = harness.run("oracle", EXAMPLE / "tasks", *options, harbor=("--n-concurrent", "3"))
    assert [trial["verifier_result"]["rewards"] for trial in job.trials] == [{"reward": 1.0}] * 3


def test_run_py_goes_through_the_tasks_in_order_and_a_second_time_runs_nothing(
    harness: Harness, arithmetic: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    service = ("--url", harness.service.url, "--key-file", str(harness.service.key_file), "--scenario", "arithmetic")
    where = ("--tasks", str(arithmetic), "--out", str(out), "--environment", "hostdir", "--python", sys.executable)
    said = script("run", *service, *where, "--max-tokens", "64", "--wait")
    trials = trials_of(out)
    assert [trial["task"] for trial in trials] == ["a1", "a2", "a3"]
    releases = []
    for trial in trials:
        reports = trial["rollouts"]
        assert [report["state"] for report in reports] == ["trained"] * 6
        assert {report["score"] for report in reports} <= {0.0, 1.0}
        assert trial["verdict"]["state"] == "recorded"
        assert trial["verdict"]["reason"] in (
            "already_claimed",
            "already_trained",
        )  # the step may be quicker than Harbor
        assert trial["verdict"]["score"] == trial["reward"]
        assert trial["failed"] == 0
        [made] = {report["release"] for report in reports}  # six reports are a batch of this service
        assert f"release {made} was made" in said
        releases.append(made)
    # each trial waited for the release of the one before, and was answered by it
    assert [list(trial["answered_by"]) for trial in trials[1:]] == [[release] for release in releases[:-1]]
    with harness.service.client() as client:
        chain = [release.id for release in client.releases()]
        assert [release for release in reversed(chain) if release in releases] == releases
    again = script("run", *service, *where)
    assert "was made" not in again
    assert trials_of(out) == trials
