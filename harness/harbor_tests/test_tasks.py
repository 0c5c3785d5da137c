"""Our own tasks are in order by Harbor's own standard, and can be solved."""

import subprocess
import sys

import pytest
from conftest import TASKS, Harness

NAMES = sorted(path.name for path in TASKS.iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_a_task_has_no_finding_of_harbors_linter(name: str) -> None:
    code = "import sys; from harbor.cli.main import app; sys.argv[0] = 'harbor'; sys.exit(app())"
    done = subprocess.run([sys.executable, "-c", code, "lint", str(TASKS / name)], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout + done.stderr


def test_each_tasks_own_solution_gets_the_full_reward_and_none_gets_none(harness: Harness) -> None:
    for agent, reward in (("oracle", 1.0), ("nop", 0.0)):
        job = harness.run(agent, TASKS, "--environment", "hostdir", "--agent", agent)
        assert [trial["verifier_result"]["rewards"]["reward"] for trial in job.trials] == [reward] * 3
        assert {line["reason"] for line in job.reports.values()} == {
            "its agent kept no receipts (terminus-2 does with collect_rollout_details=true)"
        }
