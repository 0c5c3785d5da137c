"""Starts and ends one engine server on whatever node of the Ray cluster has room: an actor there holds its GPUs.

    RayEngineHost (in the service) -> EngineActor (on a node) -> EngineHost -> the server

The actor runs, on its node, what starts servers on this machine. The server ends with it, however that ends; and the
actor ends with the service. On another node than the service's the server listens on that node's address, so it
asks for a key, which is made anew at each start.
"""

import asyncio
import contextlib
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reef.cluster import room
from reef.cluster.connection import Connection, connect, disconnect
from reef.cluster.node import check_shared, speak_over
from reef.config import Config
from reef.engines.host import KILL_TIMEOUT_S, STOP_TIMEOUT_S, EngineHost
from reef.engines.launch import Site
from reef.errors import EngineError, ReefError
from reef.observe import log

# isort: split
# Only now: the connection's module sets what Ray reads when it is imported.
import ray
from ray.exceptions import RayError, RayTaskError


@dataclass(frozen=True, slots=True)
class Started:
    """A server that runs."""

    url: str
    pid: int  # on its node


class EngineActor:
    """Runs on the node: one EngineHost."""

    def __init__(self, config: Config, name: str) -> None:
        self._config = config
        self._name = name
        self._host: EngineHost | None = None

    async def settle(self, shared: Mapping[str, Path]) -> str:
        """The node's address. Raises ConfigError where its files are not those of the service."""
        check_shared(shared, self._name)
        address = str(ray.util.get_node_ip_address())
        speak_over(address)  # the server does, with ranks of its own and with the trainer's
        return address

    async def start(self, site: Site, model_path: str, version: str, ready_timeout_s: float) -> Started:
        """Start the server. Raises what `EngineHost.start` raises."""
        self._host = EngineHost(self._config, self._name, site)
        url = await self._host.start(model_path, version, ready_timeout_s)
        assert self._host.pid is not None
        return Started(url, self._host.pid)

    async def wait(self) -> int:
        """The exit status of the server, once it ends."""
        assert self._host is not None
        return await self._host.wait()

    async def stop(self) -> None:
        """End the server."""
        if self._host is not None:
            await self._host.stop()


class RayEngineHost:
    """One server at a time, as EngineHost. Use it in one event loop."""

    def __init__(self, config: Config, name: str) -> None:
        self._config = config
        self._name = name
        self._connection: Connection | None = None
        self._actor: Any = None
        self._node = ""  # its address
        self._gpus: bool | None = None  # whether the cluster has any; None: not seen yet
        self._pid: int | None = None
        self._key: str | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the server on its node; None where it does not run."""
        return self._pid

    @property
    def key(self) -> str | None:
        """What requests to the server must bring as their bearer token."""
        return self._key

    async def start(self, model_path: str, version: str, ready_timeout_s: float) -> str:
        """Start the server where there is room, and return its URL once it takes requests.

        Raises:
            ConfigError: the cluster is not there, too small at the first start, or does not share this machine's files.
            EngineError: there was no room in time, or the server ended or was not ready in time.
        """
        await self.stop()
        clock = asyncio.get_running_loop()
        deadline = clock.time() + ready_timeout_s
        try:
            self._connection = await self._connect(ready_timeout_s)
            bundle = await asyncio.to_thread(self._create)
            try:
                async with asyncio.timeout_at(deadline):
                    await self._settle(model_path)
            except TimeoutError:
                raise self._no_room(bundle, ready_timeout_s) from None
            started = await self._start(model_path, version, max(0.1, deadline - clock.time()))
        except RayError as error:
            await self.stop()
            raise EngineError(f"{self._name}: its actor did not start: {error}") from error
        except BaseException:
            await self.stop()
            raise
        self._pid = started.pid
        log.info("%s: is on node %s at %s", self._name, self._node, started.url)
        return started.url

    async def wait(self) -> int | str:
        """The exit status of the server, once it has ended, or that its actor has: with its node, or by itself."""
        if self._actor is None:
            raise EngineError("no engine was started")
        try:
            status: int = await _answer(self._actor.wait.remote())
        except RayError:
            return f"the actor that held it on node {self._node}"
        finally:
            self._pid = None
        return status

    async def stop(self) -> None:
        """End the server, then the actor; leave the cluster, where no other of this process uses it."""
        actor, node, self._actor, self._node = self._actor, self._node, None, ""
        self._pid = self._key = None
        if actor is not None and node:  # else it waits for room, and answers nothing
            with contextlib.suppress(RayError, ReefError, TimeoutError):  # it has ended, or ends now
                async with asyncio.timeout(STOP_TIMEOUT_S + 2 * KILL_TIMEOUT_S):
                    await _answer(actor.stop.remote())
        if actor is not None:
            with contextlib.suppress(RayError, ValueError):
                await asyncio.to_thread(ray.kill, actor)
        connection, self._connection = self._connection, None
        if connection is not None:
            await asyncio.to_thread(disconnect, connection)

    async def _connect(self, timeout_s: float) -> Connection:
        connecting = asyncio.ensure_future(asyncio.to_thread(connect, self._config, timeout_s))
        try:
            return await asyncio.shield(connecting)
        except asyncio.CancelledError:  # the thread goes on: what it brings is given back
            connecting.add_done_callback(_give_back)
            raise

    def _create(self) -> room.Bundle:
        """Ask for the actor; what it takes of its node."""
        assert self._connection is not None
        nodes = self._connection.nodes()
        if self._gpus is None:  # later a node may be gone, and come back
            gpus = room.has_gpus(nodes)
            room.check_room(self._config, nodes, gpus, self._connection.address, with_engines=True)
            self._gpus = gpus
        bundle = room.engine_bundle(self._config, self._gpus)
        options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "max_restarts": 0}
        self._actor = ray.remote(EngineActor).options(**options).remote(_for_nodes(self._config), self._name)
        return bundle

    async def _settle(self, model_path: str) -> None:
        """Wait until the actor is somewhere; find out where."""
        run_dir = self._config.reef.run_dir.absolute()
        marker = Path(tempfile.mkdtemp(prefix=f"{self._name}-", dir=run_dir))  # no other machine's has it by chance
        try:
            shared = {"reef.run-dir": marker, "the release's weights": Path(model_path)}
            self._node = await _answer(self._actor.settle.remote(shared))
        finally:
            marker.rmdir()

    def _no_room(self, bundle: room.Bundle, timeout_s: float) -> EngineError:
        assert self._connection is not None
        return EngineError(
            f"Ray found no room in {timeout_s:g} s (reef.ready-timeout) for {self._name}: needed are "
            f"{room.needed([], [bundle])}; there are {room.there(self._connection.nodes())}, and others hold them"
        )

    async def _start(self, model_path: str, version: str, timeout_s: float) -> Started:
        here = self._node == ray.util.get_node_ip_address()
        self._key = secrets.token_urlsafe(32)
        site = Site(host="127.0.0.1" if here else self._node, key=self._key, own_gpus=True)
        started: Started = await _answer(self._actor.start.remote(site, model_path, version, timeout_s))
        return started


def _give_back(connecting: "asyncio.Future[Connection]") -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        disconnect(connecting.result())


def _for_nodes(config: Config) -> Config:
    """What an engine needs of the configuration, where its node can find it; the secrets stay here."""
    reef = config.reef.model_copy(update={"token": None, "tokens": [], "run_dir": config.reef.run_dir.absolute()})
    storage = config.storage.model_copy(update={"url": None})
    return config.model_copy(update={"reef": reef, "storage": storage})


async def _answer(reference: Any) -> Any:
    """What a call of an actor answers. Raises our own errors as they were raised there, RayError for any other."""
    try:
        return await asyncio.wrap_future(reference.future())
    except RayTaskError as error:
        if isinstance(error.cause, ReefError):
            raise error.cause from None
        raise
