"""A restored trainer goes on as if nothing had happened."""

import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from reef import faults
from reef.errors import LoadFailedError, UnavailableError
from reef.training.manifest import COMPLETE, check_checkpoint, dump_complete, vouch
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


def test_one_checkpoint_is_written_at_a_time_and_an_end_waits_for_it(
    make_model: MakeModel, make_worker: MakeWorker, tmp_path: Path
) -> None:
    other = make_worker(make_model())
    try:
        other.save_begin(tmp_path / "one")
        with pytest.raises(AssertionError, match="not finished"):
            other.save_begin(tmp_path / "two")
    finally:
        other.close()
    assert other.save_done()
    assert {path.name for path in tmp_path.iterdir()} == {".one.partial"}  # left for the next one of its name


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
    (tmp_path / "cut" / COMPLETE).unlink()  # prime-rl 1712: killed before the marker
    with pytest.raises(LoadFailedError, match=r"checkpoint .*cut: no COMPLETE, so it was never finished"):
        worker.restore(tmp_path / "cut")
    worker.restore(tmp_path / "good")
    worker.save(tmp_path / "cut")
    worker.restore(tmp_path / "cut")
    assert {path.name for path in tmp_path.iterdir()} == {"good", "cut"}


def test_a_checkpoint_vouches_for_each_of_its_bytes(
    worker: MegatronWorker, make_batch: Callable[..., Batch], tmp_path: Path
) -> None:
    worker.save(tmp_path / "one")
    worker.step(make_batch())
    before = worker.digest()
    files = sorted(path for path in (tmp_path / "one").iterdir() if path.name != COMPLETE)
    assert {".metadata", "__0_0.distcp", "common.pt", "metadata.json"} == {path.name for path in files}
    for path in files:
        data = path.read_bytes()
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        for damage, message in (
            (bytes(flipped), "has sha256 .*, expected"),
            (data[:-1], f"has {len(data) - 1} bytes, expected {len(data)}"),
            (None, "is missing"),
        ):
            if damage is None:
                path.unlink()
            else:
                path.write_bytes(damage)
            with pytest.raises(LoadFailedError, match=rf"checkpoint .*one: {path.name} {message}"):
                worker.restore(tmp_path / "one")
            path.write_bytes(data)
    assert worker.digest() == before
    worker.restore(tmp_path / "one")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot read COMPLETE"),
        ("[]", r"COMPLETE holds \[\], expected an object"),
        ('{"steps_done": 1}', "COMPLETE lacks files"),
        ('{"steps_done": 1, "files": {"common.pt": 1}}', "does not give sha256 and size_bytes of each"),
    ],
)
def test_a_broken_marker_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / COMPLETE).write_text(text)
    with pytest.raises(LoadFailedError, match=message):
        check_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "moved"),
    [
        ("common.pt", "{}", False),
        ("metadata.json", '{"sharded_backend": "torch_dist", "sharded_backend_version": 99}', False),
        (".metadata", "{}", False),
        ("__0_0.distcp", "{}", True),
    ],
)
def test_a_checkpoint_that_megatron_cannot_read_is_refused(
    worker: MegatronWorker, tmp_path: Path, name: str, text: str, moved: bool
) -> None:
    worker.reset()
    before = worker.digest()
    directory = tmp_path / "old"
    worker.save(directory)
    (directory / COMPLETE).unlink()
    (directory / name).write_text(text)  # as if by another version: whole, and not understood
    (directory / COMPLETE).write_bytes(dump_complete(0, {path.name: vouch(path) for path in directory.iterdir()}))
    with pytest.raises(LoadFailedError, match=r"checkpoint .*old: Megatron cannot read it: ."):
        worker.restore(directory)
    assert (worker.digest() != before) == moved
    worker.reset()
    assert worker.digest() == before


def test_a_save_is_quick_and_starts_no_process(worker: MegatronWorker, tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    threads = threading.active_count()
    started = time.perf_counter()
    worker.save(tmp_path / "timed")
    assert time.perf_counter() - started < 10  # 0.1 s on a quiet machine
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before
    assert threading.active_count() == threads


def test_training_goes_on_while_a_checkpoint_is_written_and_moves_nothing_of_it(
    worker: MegatronWorker, make_batch: Callable[..., Batch], tmp_path: Path
) -> None:
    worker.reset()
    worker.step(make_batch(seed=1))
    saved = worker.digest()
    with standing("checkpoint.files", tmp_path) as go:
        worker.save_begin(tmp_path / "one")
        expected = [worker.step(make_batch(seed=seed)).metrics for seed in (2, 3)]
        later = worker.digest()
        assert not worker.save_done()
        go()
        until(worker.save_done)
        assert not (tmp_path / "one").exists()
        with pytest.raises(LoadFailedError, match=r"no COMPLETE, so it was never finished"):
            worker.restore(tmp_path / "one")
        worker.save_finish()
    assert worker.restore(tmp_path / "one") == 1
    assert worker.digest() == saved
    assert [worker.step(make_batch(seed=seed)).metrics for seed in (2, 3)] == expected
    assert worker.digest() == later


@pytest.mark.parametrize("limit_bytes", [1, 10_000, 100_000])  # the first file, in a tensor, between two of them
def test_what_the_disk_refused_is_written_again_as_it_was_copied(
    worker: MegatronWorker, make_batch: Callable[..., Batch], tmp_path: Path, limit_bytes: int
) -> None:
    worker.reset()
    worker.step(make_batch(seed=1))
    saved = worker.digest()
    with no_file_longer_than(limit_bytes):
        worker.save_begin(tmp_path / "one")
        worker.step(make_batch(seed=2))
        for _ in range(2):
            with pytest.raises(UnavailableError, match=r"cannot write .*one: .*File too large"):
                worker.save_finish()
    later = worker.digest()
    worker.save_finish()
    assert worker.digest() == later
    assert worker.restore(tmp_path / "one") == 1
    assert worker.digest() == saved
    assert {path.name for path in tmp_path.iterdir()} == {"one"}


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


def test_a_full_disk_leaves_the_worker_as_it_was(worker: MegatronWorker, tmp_path: Path) -> None:
    worker.save(tmp_path / "good")
    before = worker.digest()
    for write in (worker.save, lambda path: worker.publish(path.name, path.parent)):
        with (
            no_file_longer_than(100),
            pytest.raises(UnavailableError, match=r"cannot write .*next: .*File too large"),
        ):
            write(tmp_path / "next")
    assert worker.digest() == before
    assert not (tmp_path / "next").exists()
    worker.restore(tmp_path / "good")
    worker.save(tmp_path / "next")
    worker.restore(tmp_path / "next")


@contextmanager
def no_file_longer_than(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def standing(point: str, directory: Path) -> Iterator[Callable[[], None]]:
    """Whoever reaches a point of `reef.faults` stands there until the function is called."""
    points = directory / "faults"
    points.mkdir()
    (points / point).touch()
    faults._DIRECTORY = str(points)
    try:
        yield (points / f"{point}.go").touch
    finally:
        (points / f"{point}.go").touch()
        faults._DIRECTORY = None


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
