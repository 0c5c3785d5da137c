"""Starting the trainer where Ray does not come up, and where what a worker needs is not there."""

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest
import torch

from reef.cluster.connection import Connection
from reef.cluster.node import interface_of
from reef.config import Config
from reef.errors import ConfigError, WorkersLostError
from reef.training.actor import Surroundings, WorkerActor
from reef.training.cluster import Trainer


def test_a_ray_that_does_not_come_up_ends_the_start_in_time(
    make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(Connection, "_start", lambda self: released.wait(60))
    values = {"reef": {"run-dir": tmp_path}, "training": {"ready-timeout": 0.2}}
    trainer = Trainer(Config.model_validate(values), make_model())
    with pytest.raises(WorkersLostError, match=r"Ray did not start within 0\.2 s \(training\.ready-timeout\)"):
        trainer.start()
    released.set()


def surroundings(
    tmp_path: Path, shared: Mapping[str, Path], *, address: str = "127.0.0.1", visible_devices: str | None = None
) -> Surroundings:
    return Surroundings(tmp_path / "logs" / "trainer-0.log", address, visible_devices, shared)


@pytest.mark.parametrize("setting", ["reef.run-dir", "inference.model-path"])
def test_a_worker_that_does_not_see_a_shared_directory_says_which_and_writes_nothing(
    tmp_path: Path, setting: str
) -> None:
    shared = {"reef.run-dir": tmp_path, "inference.model-path": tmp_path} | {setting: tmp_path / "elsewhere"}
    with pytest.raises(ConfigError, match=rf"does not see {tmp_path}/elsewhere \({setting}\): put it on a file system"):
        WorkerActor().settle(surroundings(tmp_path, shared))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused_by_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    with pytest.raises(ConfigError, match=r"training\.devices gives GPU 3 to a worker, but torch finds none"):
        settle_here(WorkerActor(), surroundings(tmp_path, {}, visible_devices="3"))
    settle_here(WorkerActor(), surroundings(tmp_path, {}, visible_devices=""))
    assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["GLOO_SOCKET_IFNAME"]) == ("", "lo")


def settle_here(actor: WorkerActor, where: Surroundings) -> None:
    """In this process, whose output is to stay what it was."""
    kept = os.dup(1), os.dup(2)
    try:
        actor.settle(where)
    finally:
        for number, descriptor in enumerate(kept, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)


def test_ranks_speak_over_the_interface_that_has_their_node_s_address() -> None:
    for name, addresses in psutil.net_if_addrs().items():
        assert {interface_of(each.address) for each in addresses if each.family.name == "AF_INET"} <= {name}
    assert interface_of("127.0.0.2") == "lo"
    assert interface_of("203.0.113.7") is None  # kept free for documents
