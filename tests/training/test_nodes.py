"""The trainer on a real Ray cluster of two nodes: where its workers go, and what happens when a node is lost."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from reef.cluster.connection import connect, disconnect
from reef.config import Config
from reef.errors import ConfigError, WorkersLostError
from reef.training.cluster import Trainer
from reef.types import Batch
from tests.ray_nodes import HEAD, SECOND, Nodes, blind_node, may_unshare, ray_nodes

# isort: split
import ray
from ray.util.placement_group import placement_group, remove_placement_group

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MakeBatch = Callable[..., Batch]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes(cpus=2) as nodes:
        nodes.add(SECOND, cpus=1)
        yield nodes


def make_config(nodes: Nodes, run_dir: Path, **training: object) -> Config:
    return Config.model_validate(
        {"reef": {"run-dir": run_dir}, "training": {"ray-address": nodes.address, "ready-timeout": 60, **training}}
    )


@pytest.mark.parametrize(
    ("layout", "needed"), [({"tensor": 2, "data": 2}, r"2 x \(2 CPU\)"), ({"data": 4}, r"4 x \(1 CPU\)")]
)
def test_a_layout_that_the_nodes_have_no_room_for_is_refused_at_once(
    nodes: Nodes, make_model: Callable[..., Path], tmp_path: Path, layout: dict[str, int], needed: str
) -> None:
    trainer = Trainer(make_config(nodes, tmp_path, layout=layout, **{"ready-timeout": 200}), make_model())
    started = time.monotonic()
    with pytest.raises(
        ConfigError, match=rf"is too small: needed are {needed} .*; there are 2 nodes: \(. CPU\), \(. CP"
    ):
        trainer.start()
    assert time.monotonic() - started < 150
    assert not ray.is_initialized()


def test_a_worker_is_not_waited_for_longer_than_the_timeout_where_others_hold_the_nodes(
    nodes: Nodes, make_model: Callable[..., Path], tmp_path: Path
) -> None:
    config = make_config(nodes, tmp_path, layout={"data": 3}, **{"ready-timeout": 2})
    connection = connect(config, 60)
    held = hold(HEAD, 1)
    try:
        with pytest.raises(
            WorkersLostError, match=r"found no room in . s .* needed are 3 x .* free of all that are 2 CPU"
        ):
            Trainer(config, make_model()).start()
        assert ray.is_initialized()  # this test uses it too
    finally:
        remove_placement_group(held)
        disconnect(connection)
    assert not ray.is_initialized()


def test_a_node_lost_in_a_step_ends_it_and_the_workers_go_on_where_there_is_room(
    nodes: Nodes, make_model: Callable[..., Path], make_batch: MakeBatch, tmp_path: Path
) -> None:
    config = make_config(nodes, tmp_path, layout={"data": 2})
    connection = connect(config, 60)
    trainer = Trainer(config, make_model())
    try:
        held = hold(HEAD, 1)  # so that each node has room for one
        trainer.start()
        assert sorted(trainer._addresses) == [HEAD, SECOND]
        remove_placement_group(held)
        batch = make_batch(noise=0.1)
        trainer.step(batch)
        trainer.save_begin(tmp_path / "one")
        trainer.save_finish()
        trainer.step(batch)
        expected = trainer.publish("expected", tmp_path)
        assert trainer.restore(tmp_path / "one") == 1

        threading.Timer(0.5, nodes.kill, (SECOND,)).start()
        killed = time.monotonic() + 0.5
        with pytest.raises(WorkersLostError, match=r"step(:| of) rank . on node 127\.0\.0\.[12] (died|failed)"):
            trainer.step(replace(batch, microbatches=batch.microbatches * 2000))
        assert time.monotonic() - killed < 100
        trainer.restart()
        assert trainer._addresses == [HEAD, HEAD]
        assert trainer.restore(tmp_path / "one") == 1
        assert trainer.step(batch).step == 2
        assert trainer.publish("found", tmp_path).content_id == expected.content_id
    finally:
        trainer.stop()
        disconnect(connection)


@pytest.mark.skipif(not may_unshare(), reason="this user may not mount")
@pytest.mark.parametrize("missing", ["run/ranks-", "releases/.ranks-"])
def test_a_node_that_does_not_share_a_directory_is_named(
    nodes: Nodes, make_model: Callable[..., Path], tmp_path: Path, missing: str
) -> None:
    directories = [tmp_path / "run", tmp_path / "releases"]
    for directory in directories:
        directory.mkdir()
    connection = connect(make_config(nodes, tmp_path / "run"), 60)
    try:
        wait_for(lambda: "127.0.0.3" not in alive())  # Ray may count the node of the test before a while longer
        num_cpus = sum(alive().values())
        wait_for_cpus(num_cpus)  # what the test before held is given back
        config = make_config(nodes, tmp_path / "run", layout={"data": num_cpus + 1})  # so that each node has a worker
        storage = config.storage.model_copy(update={"releases_dir": tmp_path / "releases"})
        with blind_node(nodes, "127.0.0.3", (tmp_path / missing).parent):
            wait_for_cpus(num_cpus + 1)
            with pytest.raises(ConfigError, match=rf"a training worker on .* does not see {tmp_path}/{missing}"):
                Trainer(config.model_copy(update={"storage": storage}), make_model()).start()
            assert [list(directory.glob("*ranks-*")) for directory in directories] == [[], []]
    finally:
        disconnect(connection)


def alive() -> dict[str, int]:
    """CPUs of each node that Ray believes alive, by address."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return {str(node["NodeManagerAddress"]): int(node["Resources"].get("CPU", 0)) for node in nodes}


def wait_for_cpus(number: int) -> None:
    wait_for(lambda: ray.available_resources().get("CPU", 0) == number)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, (alive(), ray.available_resources())
        time.sleep(0.1)


def hold(address: str, num_cpus: int) -> object:
    """Take CPUs of one node."""
    group = placement_group([{"CPU": num_cpus, f"node:{address}": 0.001}])
    assert group.wait(30)
    return group
