"""The trainer under a real Ray: what workers compute, and what happens when something dies."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from reef.config import Config
from reef.errors import ConfigError, LoadFailedError, StepFailedError, WorkersLostError
from reef.training.cluster import Trainer
from reef.training.manifest import content_id_of, verify
from reef.types import Batch
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

MakeBatch = Callable[..., Batch]
DRIVER = """
import sys, time
from pathlib import Path
from reef.config import Config
from reef.training.cluster import Trainer
if __name__ == "__main__":
    trainer = Trainer(Config.model_validate({"reef": {"run-dir": sys.argv[2]}}), Path(sys.argv[1]))
    trainer.start()
    print("ready", flush=True)
    if sys.argv[3] == "wait":
        time.sleep(600)
    if sys.argv[3] == "stop":
        trainer.stop()
"""


@pytest.fixture(scope="module")
def trainer(config: Config, make_model: Callable[..., Path]) -> Iterator[Trainer]:
    made = Trainer(config, make_model())
    made.start()
    yield made
    made.stop()
    made.stop()  # once more does no harm


@pytest.fixture(autouse=True)
def base_weights(trainer: Trainer) -> None:
    """Each test begins with living workers and the base model's weights."""
    trainer.reset()


def save(trainer: Trainer, directory: Path) -> None:
    trainer.save_begin(directory)
    trainer.save_finish()


def slow_batch(make_batch: MakeBatch) -> Batch:
    """A batch whose step takes seconds: many microbatches of one."""
    batch = make_batch(num_samples=8)
    return replace(batch, microbatches=batch.microbatches * 400)


def test_a_step_a_release_and_a_checkpoint(
    trainer: Trainer, make_batch: MakeBatch, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    assert trainer.publish("base", tmp_path).content_id == content_id_of(make_model())
    batch = make_batch(trainer.logprobs, temperature=0.7)
    result = trainer.step(batch)
    assert result.step == 1
    assert result.metrics["train_rollout_logprob_abs_diff_max"] < 1e-4
    assert result.seconds["total"] >= result.seconds["forward_backward"] + result.seconds["optimizer"]
    published = trainer.publish("r1", tmp_path)
    assert verify(tmp_path / "r1") == published
    assert published.probe == trainer.probe()
    ids = np.array(published.probe.ids, np.int32)
    assert tuple(trainer.logprobs([ids], 1.0)[0].tolist()) == published.probe.logprobs
    save(trainer, tmp_path / "one")
    trainer.step(batch)
    assert trainer.restore(tmp_path / "one") == 1
    assert trainer.publish("again", tmp_path).content_id == published.content_id
    with pytest.raises(LoadFailedError, match="nowhere: no COMPLETE"):
        trainer.restore(tmp_path / "nowhere")
    with pytest.raises(LoadFailedError, match=r"nowhere: no manifest\.json"):
        trainer.load_weights(tmp_path / "nowhere")


def test_the_way_back_needs_no_new_process(trainer: Trainer, make_batch: MakeBatch, tmp_path: Path) -> None:
    pids, new = trainer.worker_pids(), trainer.digest()
    trainer.step(make_batch(seed=1))
    first = trainer.publish("a", tmp_path)
    trainer.step(make_batch(seed=2))
    trainer.load_weights(tmp_path / "a")
    assert trainer.publish("again", tmp_path).content_id == first.content_id
    assert trainer.digest() != new
    trainer.reset()
    assert (trainer.worker_pids(), trainer.digest()) == (pids, new)


def test_a_refused_step_leaves_the_workers_alive(trainer: Trainer, make_batch: MakeBatch) -> None:
    batch, pids = make_batch(), trainer.worker_pids()
    bad = replace(batch, samples=(replace(batch.samples[0], reward=float("nan")), *batch.samples[1:]))
    with pytest.raises(StepFailedError, match="nothing moved"):
        trainer.step(bad)
    assert trainer.step(batch).step == 1
    assert trainer.worker_pids() == pids


def test_a_killed_worker_is_reported_and_replaced(trainer: Trainer, make_batch: MakeBatch, tmp_path: Path) -> None:
    batch = make_batch(noise=0.1)
    trainer.step(batch)
    save(trainer, tmp_path / "one")
    trainer.step(batch)
    expected = trainer.publish("expected", tmp_path)

    trainer.restore(tmp_path / "one")
    (pid,) = trainer.worker_pids()
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    with pytest.raises(WorkersLostError, match=r"step: rank 0 died; .* logs: .*trainer-\*\.log"):
        trainer.step(slow_batch(make_batch))
    with pytest.raises(WorkersLostError, match="no training workers"):
        trainer.step(batch)
    trainer.restart()
    assert trainer.worker_pids() != [pid]
    assert trainer.restore(tmp_path / "one") == 1
    assert trainer.step(batch).step == 2
    assert trainer.publish("found", tmp_path).content_id == expected.content_id


def test_a_worker_killed_while_it_writes_a_checkpoint_leaves_the_one_before_it(
    trainer: Trainer, make_batch: MakeBatch, tmp_path: Path
) -> None:
    batch = make_batch()
    trainer.step(batch)
    trainer.save_begin(tmp_path / "one")
    trainer.step(batch)  # meanwhile
    trained = trainer.digest()
    trainer.save_finish()
    assert trainer.save_done()
    trainer.save_begin(tmp_path / "two")
    for pid in trainer.worker_pids():
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkersLostError, match=r"save_finish: (rank 0 died|Ray failed)"):
        trainer.save_finish()
    trainer.restart()
    with pytest.raises(LoadFailedError, match="two: no COMPLETE, so it was never finished"):
        trainer.restore(tmp_path / "two")
    assert trainer.restore(tmp_path / "one") == 1
    trainer.step(batch)
    assert trainer.digest() == trained


def test_a_worker_that_does_not_answer_is_ended(
    trainer: Trainer, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pid,) = trainer.worker_pids()
    monkeypatch.setattr(trainer, "_timeout_s", 1.0)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WorkersLostError, match="step: no answer within 1 s"):
        trainer.step(make_batch())
    monkeypatch.undo()
    assert ended([pid], within_s=60)
    trainer.restart()
    assert trainer.step(make_batch()).step == 1


def test_a_fault_in_a_worker_ends_the_workers(trainer: Trainer, make_batch: MakeBatch) -> None:
    batch = make_batch()
    beyond = replace(batch.samples[0], tokens=batch.samples[0].tokens + 10_000)
    with pytest.raises(WorkersLostError, match="step of rank 0 failed: IndexError"):
        trainer.step(replace(batch, samples=(beyond, *batch.samples[1:])))
    trainer.restart()
    assert trainer.step(batch).step == 1


def test_a_worker_without_memory_ends_the_workers(trainer: Trainer, make_batch: MakeBatch) -> None:
    batch, (pid,) = make_batch(), trainer.worker_pids()
    worker = psutil.Process(pid)
    worker.rlimit(psutil.RLIMIT_AS, (worker.memory_info().vms + 64 * 2**20,) * 2)
    long = replace(batch, samples=batch.samples * 500, microbatches=(tuple(range(4000)),))  # 37 MB of logits, often
    with pytest.raises(WorkersLostError, match=r"step of rank 0 failed: .*memory.* logs: .*trainer-\*\.log"):
        trainer.step(long)
    trainer.restart()
    assert trainer.step(batch).step == 1


def test_nothing_listens_beyond_loopback(trainer: Trainer) -> None:
    pids = {p.pid for p in psutil.Process().children(recursive=True)}
    listening = [c for c in psutil.net_connections("inet") if c.pid in pids and c.status == psutil.CONN_LISTEN]
    assert listening
    assert {c.laddr.ip.removeprefix("::ffff:") for c in listening} == {"127.0.0.1"}


def test_other_users_cannot_reach_the_cluster_files(trainer: Trainer) -> None:
    assert trainer._connection is not None and trainer._connection.temp_dir is not None
    assert trainer._connection.temp_dir.stat().st_mode & 0o077 == 0


def test_the_place_where_workers_meet_stays_as_long_as_they_do_and_no_longer(trainer: Trainer) -> None:
    assert trainer._connection is not None and trainer._connection.temp_dir is not None
    place = trainer._connection.temp_dir
    (before,) = place.glob("ranks-*/store")  # NCCL makes its connections over it at the first call, not at the start
    trainer.restart()
    (after,) = place.glob("ranks-*/store")
    assert before != after


def test_a_model_that_cannot_be_trained_is_refused_before_anything_starts(config: Config, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model at"):
        Trainer(config, tmp_path)


@pytest.mark.parametrize("ending", ["wait", "leave"])
def test_a_driver_that_ends_leaves_no_process_and_no_directory(
    make_model: Callable[..., Path], tmp_path: Path, ending: str
) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(make_model()), str(tmp_path), ending], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    try:
        assert driver.stdout.readline() == "ready\n"
        started = psutil.Process(driver.pid).children(recursive=True)
        shells = [p.cmdline() for p in started if p.name() == "sh"]
    finally:
        if ending == "wait":
            driver.kill()
        driver.wait(60)
        driver.stdout.close()
    assert len(started) >= 1
    assert ended([p.pid for p in started], within_s=60)
    assert not any(Path(line[3]).exists() for line in shells)


def test_a_cluster_of_others_is_joined_and_left_running(make_model: Callable[..., Path], tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    environment = os.environ | {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}
    arguments = [sys.executable, "-c", DRIVER, str(make_model()), str(tmp_path), "stop"]
    nowhere = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)
    assert f"RAY_ADDRESS is {address}, but no Ray cluster answers there" in nowhere.stderr

    start = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--include-dashboard=false"]
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        where = ["--node-ip-address=127.0.0.1", f"--port={address.split(':')[1]}", f"--temp-dir={directory}"]
        without_address = {name: value for name, value in environment.items() if name != "RAY_ADDRESS"}
        head = subprocess.Popen([*start, *where, "--num-cpus=1"], env=without_address, stdout=subprocess.DEVNULL)
        (tmp_path / "ranks-left").mkdir()  # by an owner that was killed
        try:
            wait_for_port(address)
            joined = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=90)
            assert (joined.returncode, joined.stdout) == (0, "ready\n"), joined.stderr
            assert not list(tmp_path.rglob("ranks-*"))
            assert head.poll() is None
            assert not [p for p in psutil.Process(head.pid).children(recursive=True) if "WorkerActor" in p.name()]
        finally:
            started = psutil.Process(head.pid).children(recursive=True)
            head.terminate()
            head.wait(60)
    assert ended([p.pid for p in started], within_s=60)


def wait_for_port(address: str) -> None:
    host, port = address.split(":")
    deadline = time.monotonic() + 90
    while True:
        try:
            socket.create_connection((host, int(port)), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def ended(pids: list[int], within_s: float) -> bool:
    """True once none of the processes runs (a zombie that nobody waits for has ended)."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if not any(_runs(pid) for pid in pids):
            return True
        time.sleep(0.1)
    return False


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
