"""The README's commands for Harbor do what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

from conftest import ROOT, Service
from reef_harness.harbor import reports

BLOCK = re.compile(r"```bash\nmake harbor\n(.*?)```", re.DOTALL)


def test_a_job_started_as_the_readme_says_reports_every_trial(service: Service, tmp_path: Path) -> None:
    (commands,) = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    commands = commands.replace("http://127.0.0.1:8080", service.url).replace("work/jobs", f"'{tmp_path}'")
    commands = commands.replace(".venv-harbor/bin/reef-harness", f"'{sys.executable}' -m reef_harness")
    done = subprocess.run(
        ["bash", "-ec", commands],
        cwd=ROOT,
        env={**os.environ, "REEF_API_KEY": service.key_file.read_text().strip()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (job,) = tmp_path.iterdir()
    assert [(line["status"], line["state"]) for line in reports.read(job)] == [("reported", "recorded")] * 3
