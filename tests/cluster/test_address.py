"""Which cluster is joined, and what is said where none is there. No Ray: the listeners here are the tests' own."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from reef.cluster.address import Address, check_cluster, find_cluster
from reef.config import Config
from reef.errors import ConfigError

SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"  # a frame of HTTP/2: empty SETTINGS


def config(**training: Any) -> Config:
    return Config.model_validate({"training": training})


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The address of one who answers the first client so, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(60)


def test_the_setting_wins_over_the_variable_and_without_either_there_is_none() -> None:
    assert find_cluster(config(), {}) is None
    assert find_cluster(config(), {"RAY_ADDRESS": "local"}) is None
    assert find_cluster(config(), {"RAY_ADDRESS": "head:1"}) == Address("head", 1, "RAY_ADDRESS")
    both = find_cluster(config(**{"ray-address": "ray-head.example:6379"}), {"RAY_ADDRESS": "head:1"})
    assert both == Address("ray-head.example", 6379, "training.ray-address")
    assert str(both) == "ray-head.example:6379"


def test_a_service_that_starts_nothing_by_ray_asks_nobody() -> None:
    values = {"training": {"backend": "none"}, "inference": {"url": "http://127.0.0.1:1"}}
    assert check_cluster(Config.model_validate(values), {"RAY_ADDRESS": "nonsense"}) is None


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ray://head:10001", "training.ray-address is ray://head:10001: Reef joins a cluster as one of its nodes"),
        ("http://head:8265", "not through Ray Client or the jobs API"),
        ("head", "is 'head': expected HOST:PORT of the cluster's head"),
        ("head:0", "expected HOST:PORT"),
        ("head:70000", "expected HOST:PORT"),
        (":6379", "expected HOST:PORT"),
        ("no-such-host.invalid:6379", r"no Ray cluster answers there: (Name or service|No address|Temporary failure)"),
    ],
)
def test_an_address_that_cannot_be_joined_is_refused(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_cluster(config(**{"ray-address": address}), {})


def test_a_port_where_nobody_listens_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            ConfigError, match=f"RAY_ADDRESS is {address}, but no Ray cluster answers there: Connection"
        ):
            check_cluster(config(), {"RAY_ADDRESS": address})


def test_a_port_where_something_else_listens_is_refused() -> None:
    with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address, pytest.raises(ConfigError, match="not speak gRPC"):
        check_cluster(config(**{"ray-address": address}), {})
    with answering(b"") as address, pytest.raises(ConfigError, match="no Ray cluster answers there"):
        check_cluster(config(**{"ray-address": address}), {})


def test_a_port_where_nobody_answers_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reef.cluster.address.KNOCK_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConfigError, match="no Ray cluster answers there: timed out"):
            check_cluster(config(**{"ray-address": address}), {})


def test_one_who_speaks_grpc_is_taken_for_ray() -> None:
    with answering(SETTINGS) as address:
        assert str(check_cluster(config(**{"ray-address": address}), {})) == address


def test_with_tls_a_port_that_is_open_is_enough() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert check_cluster(config(**{"ray-address": address}), {"RAY_USE_TLS": "1"}) is not None


@contextmanager
def node_of(*gcs_addresses: str) -> Iterator[None]:
    """Processes that look to others as nodes of these clusters do."""
    script = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'raylet'); print(flush=True); time.sleep(60)"
    started = [
        subprocess.Popen([sys.executable, "-c", script, f"--gcs-address={each}"], stdout=subprocess.PIPE)
        for each in gcs_addresses
    ]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


def test_auto_is_the_one_cluster_that_has_a_node_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    everybody = psutil.process_iter  # clusters of others run beside this test
    monkeypatch.setattr(psutil, "process_iter", lambda attrs: (p for p in everybody(attrs) if p.ppid() == os.getpid()))
    auto = config(**{"ray-address": "auto"})
    with pytest.raises(ConfigError, match=r"training\.ray-address is auto: expected one Ray cluster .* but none does"):
        find_cluster(auto, {})
    with node_of("10.1.2.3:6379"):
        assert find_cluster(auto, {}) == Address("10.1.2.3", 6379, "training.ray-address")
    with node_of("10.1.2.3:6379", "10.1.2.4:6379"), pytest.raises(ConfigError, match=r"2 do: 10.1.2.3:6379, 10.1.2.4"):
        find_cluster(auto, {})


@pytest.mark.parametrize("section", ["training", "inference"])
def test_a_cluster_numbers_its_gpus_itself(section: str) -> None:
    named = Config.model_validate({section: {"devices": [0]}})
    with pytest.raises(ConfigError, match=f"{section}.devices numbers GPUs of this machine, but RAY_ADDRESS names"):
        find_cluster(named, {"RAY_ADDRESS": "head:6379"})
    assert find_cluster(named, {}) is None


def test_fewer_gpus_than_workers_are_refused_and_none_at_all_means_cpus() -> None:
    with pytest.raises(ConfigError, match=r"training\.devices names 1 GPUs, but training\.layout has 2 workers"):
        find_cluster(config(devices=[0], layout={"data": 2}), {})
    assert find_cluster(config(devices=[], layout={"data": 2}), {}) is None


def test_a_gpu_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"training\.devices is \[0, 0\]: each worker needs a GPU of its own"):
        find_cluster(config(devices=[0, 0], layout={"data": 2}), {})
    assert find_cluster(config(devices=[1, 0], layout={"data": 2}), {}) is None
