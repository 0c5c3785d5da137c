"""A run that was killed goes on under another layout: the chain, its checkpoint, and what is trained again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.test_moves import SETTINGS, releases, served, train, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DATA = ("--training.layout.data", "2")
TENSOR = ("--training.layout.tensor", "2")


@pytest.fixture
def service(make_service: Callable[..., Any]) -> Iterator[Any]:
    made = make_service(*SETTINGS, "--training.checkpoint-every", "2")
    yield made
    made.end()


def test_a_killed_run_goes_on_from_its_checkpoint_under_another_layout(service: Any, tmp_path: Path) -> None:
    service.start(*DATA)
    for number in (1, 2, 3):
        train(service, f"group {number}")
        until(lambda number=number: served(service).endswith(str(number)), "a release")
    until(lambda: releases(service)[2]["checkpoint"] is not None, "the checkpoint of the second")
    before = releases(service)
    service.kill_9()

    service.start(*TENSOR)
    after = releases(service)
    assert [(r["release_id"], r["content_id"]) for r in after] == [(r["release_id"], r["content_id"]) for r in before]
    assert served(service) == before[3]["release_id"]
    log = (service.run_dir / "logs" / "reef.log").read_text()
    third = before[3]["release_id"]
    assert f"replayed {third}" in log
    assert f"replayed {before[2]['release_id']}" not in log  # its checkpoint, which data ranks wrote, was read
    assert "is not used" not in log
    diverged = f"replay of {third} gave" in log  # in its last bits: two ranks sum otherwise
    assert after[3]["replay_diverged"] == diverged
    assert not diverged or "training.layout.tensor was 1 and is 2, training.layout.data was 2 and is 1" in log

    train(service, "group 4")
    until(lambda: served(service).endswith("4"), "a release of two tensor ranks")
    head = releases(service)[-1]
    assert (head["step"], head["operation"]) == (4, "train")
    assert head["metrics"]["train_rollout_logprob_abs_diff_max"] < 1e-4  # the engine and both ranks hold the same
    assert service.stop() == 0

    command = [sys.executable, "-m", "reef", "replay", "s", "--to", before[1]["release_id"], *TENSOR]
    command += ["--reef.run-dir", str(service.run_dir), "--directory", str(tmp_path / "again")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert "from here on training.layout.tensor was 1 and is 2, " in said.stdout
    assert ": bits may differ" in said.stdout
    assert said.returncode == ("DIFFERENT" in said.stdout), said.stderr
