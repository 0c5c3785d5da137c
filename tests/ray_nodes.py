"""A real Ray cluster of several nodes on this machine: each has its own address of loopback, and its own processes."""

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from reef.cluster import connection  # noqa: F401 (first: it sets what Ray reads when it is imported)

# isort: split
from ray._common.utils import get_ray_address_file
from ray.cluster_utils import Cluster

HEAD = "127.0.0.1"
SECOND = "127.0.0.2"
OBJECT_STORE_BYTES = 80 * 2**20
# By default Ray takes 15 s and more to find out that a node is gone, unless it says so itself.
SOON = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000, "health_check_failure_threshold": 5}


class Nodes:
    """The nodes of one cluster, by address."""

    def __init__(self, cpus: int, directory: str) -> None:
        self._nodes: dict[str, Any] = {}
        self._cluster = Cluster()
        self.directory = directory
        # It writes its address in Ray's usual folder, wherever temp_dir is, and on a new machine there is none.
        Path(get_ray_address_file(None)).parent.mkdir(parents=True, exist_ok=True)
        self.add(HEAD, cpus, _system_config=SOON)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, address: str, cpus: int, **head: Any) -> None:
        """Another node; the first is the head."""
        arguments: dict[str, Any] = {"node_ip_address": address, "num_cpus": cpus}
        arguments |= {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
        arguments |= {"temp_dir": self.directory, **head}
        self._nodes[address] = self._cluster.add_node(**arguments)

    def raylet(self, address: str) -> psutil.Process:
        """The process that stands for the node: all others there end with it."""
        return psutil.Process(self._nodes[address].all_processes["raylet"][0].process.pid)

    def kill(self, address: str) -> None:
        """kill -9 of all that the node runs."""
        self._cluster.remove_node(self._nodes.pop(address), allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


@contextlib.contextmanager
def ray_nodes(cpus: int) -> Iterator[Nodes]:
    """A cluster whose head has so many CPUs."""
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    try:
        nodes = Nodes(cpus, directory)
        try:
            yield nodes
        finally:
            nodes.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


# `ray start` would not join a cluster on loopback: this is what Cluster.add_node does, in a process of its own.
NODE = """
import sys, time
from reef.cluster import connection
from ray._private.node import Node
from ray._private.parameter import RayParams
gcs_address, address, directory, memory = sys.argv[1:]
Node(RayParams(
    gcs_address=gcs_address, redis_address=gcs_address, node_ip_address=address, num_cpus=1, temp_dir=directory,
    object_store_memory=int(memory), include_log_monitor=False, node_manager_port=0,
    min_worker_port=0, max_worker_port=0,
), head=False)
time.sleep(600)
"""


@contextlib.contextmanager
def blind_node(nodes: Nodes, address: str, path: Path) -> Iterator[None]:
    """One more node, with one CPU, on which `path` is an empty directory of its own. Needs root."""
    arguments = [sys.executable, "-c", NODE, nodes.address, address, nodes.directory, str(OBJECT_STORE_BYTES)]
    process = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none "{path}" && exec "$@"', "sh", *arguments]
    )
    try:
        yield
    finally:
        started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        for each in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def may_unshare() -> bool:
    """Whether this user may give a process its own mounts."""
    tried = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True)
    return tried.returncode == 0
