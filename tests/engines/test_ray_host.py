"""Engines on a real Ray cluster of two nodes: where they run, who may speak to them, and what a loss does to them."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import numpy as np
import psutil
import pytest

from reef.cluster.connection import connect, disconnect
from reef.config import Config
from reef.engines.pool import Engines
from reef.engines.ray_host import RayEngineHost, _for_nodes
from reef.errors import EngineError
from reef.observe import Metrics
from reef.types import Published, Request, Sampling
from tests.ray_nodes import SECOND, Nodes, ray_nodes

# isort: split
import ray
from ray.util.placement_group import placement_group, remove_placement_group

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MakeConfig = Callable[..., Config]
MakePublished = Callable[..., Published]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ray_nodes(cpus=0) as nodes:  # so that engines run on the other one
        nodes.add(SECOND, cpus=1)
        yield nodes


@pytest.fixture
def on_nodes(nodes: Nodes, config: MakeConfig, tmp_path: Path) -> Config:
    flags = ["--training.ray-address", nodes.address, "--training.backend", "none", "--reef.ready-timeout", "120"]
    return config(tmp_path, *flags, "--reef.token", "secret")


def test_an_engine_runs_where_there_is_room_answers_who_has_its_key_and_comes_back(
    on_nodes: Config, published: MakePublished, model_dir: Callable[[str], Path]
) -> None:
    async def live() -> None:
        engines = Engines(on_nodes, Metrics(), lambda name: RayEngineHost(on_nodes, name))
        await engines.start(published("r1", model_dir("qwen3")))
        try:
            (first,) = engines.describe()
            assert first["url"].startswith(f"http://{SECOND}:")
            assert await answered(engines) == "r1"
            assert await status_without_key(first["url"]) == 401
            assert (on_nodes.logs_dir / "engine-0.log").stat().st_mode & 0o077 == 0
            assert "--api-key " not in " ".join(psutil.Process(first["pid"]).cmdline())

            actor = psutil.Process(first["pid"]).parent()
            assert actor is not None and "EngineActor" in actor.name() + " ".join(actor.cmdline())
            actor.kill()
            await until(lambda: engines.state == "restarting")
            assert "ended with the actor that held it on node 127.0.0.2" in str(engines.describe()[0]["error"])
            await until(lambda: engines.state == "ready")
            (second,) = engines.describe()
            assert second["pid"] != first["pid"] and not runs(first["pid"])
            assert await answered(engines) == "r1"

            os.kill(second["pid"], signal.SIGKILL)  # the server, and not its actor
            await until(lambda: engines.state == "restarting")
            assert f"engine-0 ended with {-signal.SIGKILL}" in str(engines.describe()[0]["error"])
            await until(lambda: engines.state == "ready")
            (third,) = engines.describe()
        finally:
            await engines.stop()
        assert not any(runs(each["pid"]) for each in (first, second, third))
        assert not ray.is_initialized()

    asyncio.run(live())


def test_an_engine_that_refuses_to_start_says_why_and_leaves_nothing(on_nodes: Config, tmp_path: Path) -> None:
    async def live() -> None:
        host = RayEngineHost(on_nodes, "engine-0")
        with pytest.raises(EngineError, match=r"(?s)engine-0 ended with 2 while it started:.*config\.json"):
            await host.start(str(tmp_path), "r1", 60)
        assert host.pid is None and host.key is None
        with pytest.raises(EngineError, match="no engine was started"):
            await host.wait()
        assert not ray.is_initialized()

    asyncio.run(live())


def test_an_engine_without_room_says_so_in_time(on_nodes: Config, model_dir: Callable[[str], Path]) -> None:
    async def live() -> None:
        with pytest.raises(EngineError, match=r"found no room in 2 s .* for engine-1: needed are 1 x \(1 CPU\)"):
            await RayEngineHost(on_nodes, "engine-1").start(str(model_dir("qwen3")), "r1", 2)

    connection = connect(on_nodes, 60)
    held = placement_group([{"CPU": 1}])
    try:
        assert held.wait(30)
        asyncio.run(live())
        assert ray.is_initialized()  # this test uses it too
    finally:
        remove_placement_group(held)
        disconnect(connection)
    assert not ray.is_initialized()


def test_the_service_s_secrets_stay_with_it(on_nodes: Config) -> None:
    assert on_nodes.reef.token is not None
    assert _for_nodes(on_nodes).reef.token is None
    assert _for_nodes(on_nodes).reef.run_dir.is_absolute()


def test_an_engine_moves_from_a_node_that_is_lost_to_one_that_has_room(
    nodes: Nodes, on_nodes: Config, published: MakePublished, model_dir: Callable[[str], Path]
) -> None:
    third = "127.0.0.3"
    nodes.add(third, cpus=1)

    async def live() -> None:
        engines = Engines(on_nodes, Metrics(), lambda name: RayEngineHost(on_nodes, name))
        await engines.start(published("r1", model_dir("qwen3")))
        try:
            (before,) = engines.describe()
            (lost,) = (address for address in (SECOND, third) if f"//{address}:" in before["url"])
            await asyncio.to_thread(nodes.kill, lost)
            await until(lambda: engines.state == "restarting")
            await until(lambda: engines.state == "ready")
            (left,) = {SECOND, third} - {lost}
            assert engines.describe()[0]["url"].startswith(f"http://{left}:")
            assert not runs(before["pid"])
            assert await answered(engines) == "r1"
        finally:
            await engines.stop()

    asyncio.run(live())


async def answered(engines: Engines) -> str:
    """The release of a short answer."""
    ids, sampling = np.array([5, 6, 7], np.int32), Sampling(max_tokens=4, ignore_eos=True)
    request = Request("r", "s", "completions", ids, sampling, n=1, body=b"", created_at=0.0)
    async with engines.acquire() as client:
        (generation,) = await client.generate(request)
    assert len(generation.output_ids) == 4
    return generation.spans[0].release_id


async def status_without_key(url: str) -> int:
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json=body) as response:
        return response.status


async def until(true: Callable[[], bool], within_s: float = 150) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
