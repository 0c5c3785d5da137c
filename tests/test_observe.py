"""Metrics leave the service, and never stop it."""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reef.config import Config
from reef.observe import Metrics, WandbLog


def config(run_dir: Path, **wandb: Any) -> Config:
    return Config.model_validate({"reef": {"run-dir": run_dir}, "observability": {"wandb": {"enabled": True, **wandb}}})


def records(path: Path) -> Iterator[Any]:
    """The records of a run's file: 7 bytes of its own, then LevelDB's log format (here: whole records, one block)."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    at = 7
    while at + 7 <= len(data):
        _checksum, length, kind = struct.unpack_from("<IHB", data, at)
        assert kind == 1, "a record over several blocks"
        if at + 7 + length > len(data):
            return  # not whole yet
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data[at + 7 : at + 7 + length])
        yield record
        at += 7 + length


def rewards(path: Path) -> list[float]:
    """What was logged as reward_mean, in order."""
    rows = [record.history.item for record in records(path) if record.HasField("history")]
    return [float(item.value_json) for row in rows for item in row if "reward_mean" in (item.key, *item.nested_key)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_weights_and_biases_gets_each_release_offline(tmp_path: Path) -> None:
    writing = WandbLog(config(tmp_path, directory=tmp_path / "here"), "arithmetic")
    writing.write(1, {"reward_mean": 0.25})
    writing.write(2, {"reward_mean": 0.75})
    writing.close()
    (path,) = (tmp_path / "here").rglob("*.wandb")
    deadline = time.monotonic() + 20  # its own process writes the file, and may do so after `finish`
    while (found := rewards(path)) != [0.25, 0.75] and time.monotonic() < deadline:
        time.sleep(0.1)
    assert found == [0.25, 0.75]


def test_without_weights_and_biases_nothing_is_written_and_nothing_fails(tmp_path: Path) -> None:
    writing = WandbLog(Config.model_validate({"reef": {"run-dir": tmp_path}}), "arithmetic")
    writing.write(1, {"reward_mean": 0.25})
    writing.close()
    assert list(tmp_path.iterdir()) == []


def test_weights_and_biases_that_cannot_start_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "a file"
    blocked.touch()
    with caplog.at_level(logging.WARNING, "reef"):
        writing = WandbLog(config(tmp_path, directory=blocked), "arithmetic")
    writing.write(1, {"reward_mean": 0.25})
    assert "no Weights & Biases" in caplog.text


def test_metrics_of_two_services_in_one_process_are_apart() -> None:
    one, other = Metrics(), Metrics()
    one.receipts.inc(3)
    assert b"reef_receipts_total 3.0" in one.render()
    assert b"reef_receipts_total 0.0" in other.render()
