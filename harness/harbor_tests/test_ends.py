"""What is left of a job that was ended: nothing."""

import shutil
import signal
import time
from pathlib import Path

import pytest
from conftest import TASKS, Harness


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_job_that_is_killed_ends_what_it_started_and_removes_its_folders(
    harness: Harness, number: signal.Signals
) -> None:
    task = harness.folder / "task"
    shutil.copytree(TASKS / "chain-of-two", task)
    (task / "solution" / "solve.sh").write_text("#!/bin/bash\ntouch /app/begun\nsleep 4321.25\n")
    options = ("--environment", "hostdir", "--agent", "oracle", "--", "--jobs-dir", str(harness.folder / "jobs"))
    process = harness.start("run", str(task), *options)
    try:
        while not list(harness.temporary.glob("harbor-environment-*/root/app/begun")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        assert left(harness.temporary) > 0
        process.send_signal(number)
        said = process.communicate()
    finally:
        process.kill()
    assert process.returncode != 0, said
    assert not list(harness.temporary.glob("harbor-environment-*"))
    assert left(harness.temporary) == 0


def left(temporary: Path) -> int:
    """Processes that were started in an environment of a folder."""
    found = 0
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            found += f"REEF_HARBOR_ENVIRONMENT={temporary}/".encode() in environ.read_bytes()
        except OSError:
            continue
    return found
