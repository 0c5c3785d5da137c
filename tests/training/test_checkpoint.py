"""A restored trainer goes on as if nothing had happened."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from reef.errors import LoadFailedError, UnavailableError
from reef.training import checkpoint
from reef.training.worker import MegatronWorker
from reef.types import Batch

MakeModel = Callable[..., Path]
MakeWorker = Callable[..., MegatronWorker]


def test_the_next_step_after_a_restore_is_bit_equal(
    make_model: MakeModel, make_worker: MakeWorker, make_batch: Callable[..., Batch], tmp_path: Path
) -> None:
    worker = make_worker(make_model())
    worker.step(make_batch(seed=1))
    worker.save(tmp_path / "one")
    expected = worker.step(make_batch(seed=2))
    expected_weights = worker.publish("expected", tmp_path)
    worker.close()

    worker = make_worker(make_model())
    assert worker.restore(tmp_path / "one") == 1
    result = worker.step(make_batch(seed=2))
    weights = worker.publish("found", tmp_path)
    worker.close()
    assert (result.step, result.metrics) == (2, expected.metrics)
    assert weights is not None
    assert expected_weights is not None
    assert weights.content_id == expected_weights.content_id


def test_a_checkpoint_before_the_first_step_restores(
    worker: MegatronWorker, make_batch: Callable[..., Batch], tmp_path: Path
) -> None:
    worker.save(tmp_path / "zero")
    expected = worker.step(make_batch()).metrics
    assert worker.restore(tmp_path / "zero") == 0
    assert worker.step(make_batch()).metrics == expected


def test_an_unfinished_checkpoint_is_refused_and_the_one_before_it_used(worker: MegatronWorker, tmp_path: Path) -> None:
    worker.save(tmp_path / "good")
    worker.save(tmp_path / "cut")
    (tmp_path / "cut" / checkpoint.COMPLETE).unlink()  # prime-rl 1712: killed before the marker
    assert not checkpoint.is_complete(tmp_path / "cut")
    with pytest.raises(LoadFailedError, match="not a complete checkpoint"):
        worker.restore(tmp_path / "cut")
    worker.restore(tmp_path / "good")
    worker.save(tmp_path / "cut")
    worker.restore(tmp_path / "cut")
    assert {path.name for path in tmp_path.iterdir()} == {"good", "cut"}


def test_a_save_is_quick_and_starts_no_process(worker: MegatronWorker, tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    threads = threading.active_count()
    started = time.perf_counter()
    worker.save(tmp_path / "timed")
    assert time.perf_counter() - started < 2.0  # 0.1 s on a quiet machine
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before
    assert threading.active_count() == threads


def test_a_disk_that_refuses_leaves_the_worker_as_it_was(worker: MegatronWorker, tmp_path: Path) -> None:
    blocked = tmp_path / "a file"
    blocked.touch()
    before = worker.probe()
    with pytest.raises(UnavailableError, match="a file"):
        worker.publish("r1", blocked)
    with pytest.raises(UnavailableError, match="a file"):
        worker.save(blocked / "r1")
    assert worker.probe() == before
    blocked.unlink()
    worker.save(blocked / "r1")
    published = worker.publish("r1", blocked / "weights")
    assert published is not None
    assert published.probe == before
