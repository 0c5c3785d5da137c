"""`make demo` as it stands: the service, Ray and Megatron start, the model learns what it should, all of it ends."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from reef_harness.drivers import read_rollouts

from recipes.arithmetic.service import ROOT


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_learns_measures_and_leaves_nothing_running(tmp_path: Path) -> None:
    out = tmp_path / "a path with spaces"
    command = [sys.executable, "-m", "recipes.arithmetic.demo", "--out", str(out)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "harness")])
    run = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["method"] == "grpo"
    assert summary["held_out_problems"] == 1000
    assert summary["accuracy_after"] - summary["accuracy_before"] >= 0.30
    assert summary["interval_before"][0] < summary["accuracy_before"] < summary["interval_before"][1]
    assert summary["interval_before"][1] < summary["interval_after"][0]
    assert (out / "learning.png").read_bytes().startswith(b"\x89PNG")
    rows = read_rollouts(out / "rollouts.jsonl")
    assert len(rows) == summary["rollouts"]
    assert not [row.error for row in rows if row.error]
    assert "before  " in run.stdout
    assert "reef why rcp_" in run.stdout
    left = [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(out) in " ".join(process.info["cmdline"] or []) and process.status() != psutil.STATUS_ZOMBIE
    ]
    assert left == []
