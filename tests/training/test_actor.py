"""What a worker's process does before there is a worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # a process that imports torch and Megatron

KILLED = """
import os, sys
from pathlib import Path
from reef.errors import ReefError
from reef.training.actor import WorkerActor, WorkerSpec

meeting = Path(sys.argv[1])
try:
    WorkerActor().start(WorkerSpec(0, 1, meeting / "no model", meeting / "store", {"threads": 1}, 64))
except ReefError:
    os._exit(7)  # as Ray ends it: nothing is cleaned up
"""


def test_a_worker_that_is_killed_leaves_nothing_but_where_its_ranks_meet(tmp_path: Path) -> None:
    temporary, meeting = tmp_path / "temporary", tmp_path / "meeting"
    temporary.mkdir()
    meeting.mkdir()
    env = os.environ | {"TMPDIR": str(temporary)}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(meeting)], env=env, cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 7, done.stderr
    assert [path.name for path in temporary.rglob("*wandb*")] == []
    kinds = sorted(path.name.partition("wandb-")[2] for path in meeting.iterdir())
    assert kinds == ["artifacts", "media"]  # where wandb is installed, Megatron imports it
