"""One service from start to stop: what is started in which order, and ended in the reverse one.

lock, log, ledger, port -> HTTP answers (503) -> engine and trainer, side by side -> recovery -> ready
stop: no new requests -> dispatcher ends its step -> trainer -> lease -> engine -> ledger, lock

Where several services share a ledger, one owns it and trains. The others serve what it releases (`_follow`), and one of
them takes its place when it is gone.
"""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
from sqlalchemy import Connection

from reef import keys
from reef.chat.dialect import Dialect
from reef.chat.template import Template
from reef.cluster.address import find_cluster
from reef.config import Config
from reef.engines.host import Host
from reef.engines.pool import Engines
from reef.errors import ConfigError, LoadFailedError, OwnershipLostError, ReefError, UnavailableError
from reef.ledger import releases, scenarios
from reef.ledger.ledger import Ledger, RunLock
from reef.observe import Metrics, log, set_up_logging
from reef.service import leftovers, retention
from reef.service.access import Access
from reef.service.app import create_app
from reef.service.house import House
from reef.service.turns import Turns
from reef.storage import Storage, release_id
from reef.training.manifest import content_id_of
from reef.types import Operation, Published, Release

if TYPE_CHECKING:
    from reef.dispatcher import Dispatcher
    from reef.training.cluster import Trainer

# Longer than clients keep an idle connection (httpx 5 s, aiohttp 15 s): the side that uses it must be the one to close
# it, else a request is lost on a connection that the service was just closing.
KEEP_ALIVE_S = 75
GRACE_S = 10  # that requests in work may take once the service stops
FOLLOW_S = 1.0  # between looks at what the owner of a shared ledger has released
RETRY_S = 30.0  # before a follower tries again what failed here: to load a release, to train
Announce = Callable[[str], None]


async def serve(config: Config, announce: Announce) -> int:
    """Run until a signal, or until start-up fails; the exit status. Everything it started has ended when it returns.

    Raises:
        ReefError: it could not even begin (run directory in use, port in use, an unusable ledger).
    """
    run_dir = config.reef.run_dir
    _prepare(config)
    with contextlib.ExitStack() as stack:
        lock = RunLock(run_dir)
        stack.callback(lock.release)
        if ended := leftovers.reap(run_dir):
            announce(f"ended {ended} processes that the last service here left behind")
        listener = stack.enter_context(_listen(config.reef.host, config.reef.port))
        ledger = Ledger.open(config.ledger_url, config.reef.max_pending_writes, config.storage.lease_timeout_s)
        stack.callback(ledger.close)
        template = Template(config.inference.model_path)
        stack.callback(template.close)
        told = config.inference
        dialect = Dialect(template, told.model_path, told.tool_call_parser, told.reasoning_parser)
        turns = Turns(ledger, template, dialect, told.history == "exact", told.history_cache_tokens)
        access = Access(config.reef, _key(config, announce))
        metrics = Metrics()
        house = House(
            config, ledger, Engines(config, metrics, _hosts(config)), template, dialect, turns, metrics, access
        )
        return await _Run(house, listener, announce).until_stopped()


class _Run:
    """The part of a service's life in which HTTP answers."""

    def __init__(self, house: House, listener: socket.socket, announce: Announce) -> None:
        self._house = house
        self._config = house.config
        self._announce = announce
        self._listener = listener
        self._on_cluster = find_cluster(house.config) is not None
        self._stop = asyncio.Event()
        self._server = _Server(
            uvicorn.Config(
                create_app(house),
                http="httptools",
                log_config=None,
                access_log=False,
                proxy_headers=False,  # nobody asks where a request came from
                lifespan="off",
                timeout_graceful_shutdown=GRACE_S,
                timeout_keep_alive=KEEP_ALIVE_S,
                backlog=4096,
            )
        )
        self._tasks: list[asyncio.Task[None]] = []  # that run beside the service until it stops
        self._refused: tuple[str, str, float] | None = None  # the release that did not load, why, when to try again
        self._fault: str | None = None  # why training ended here, or could not begin
        self._rest_until = 0.0  # no training here before; by time.monotonic()
        self._url = ""

    async def until_stopped(self) -> int:
        self._handle_signals()
        host, port = self._listener.getsockname()[:2]
        url = self._url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        leftovers.write_json(self._config.reef.run_dir / "service.json", {"url": url, "pid": os.getpid()})
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]), name="http")
        self._announce(f"listening on {url}, logs in {self._config.logs_dir}")
        starting = asyncio.create_task(self._start(), name="start")
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and not starting.cancelled() and (error := starting.exception()) is not None:
                cause = _cause(error)
                self._house.failure = str(cause) or type(cause).__name__
                log.error(
                    "start-up failed: %s", self._house.failure, exc_info=None if isinstance(cause, ReefError) else cause
                )
                self._announce(f"failed to start: {self._house.failure}")
                return 1
            if starting.done():
                self._announce(f"ready: {url}")
            await stopping
            return 0
        finally:
            self._announce("stopping")
            await self._end(starting, stopping, serving)
            self._announce("stopped")

    async def _start(self) -> None:
        house, config = self._house, self._config
        storage = await self._open_storage()
        head = await self._served(storage)
        owns = await self._own()
        if owns:
            await storage.clean(head.scenario or None)
        self._announce(f"starting the engine with release {head.id}")
        try:
            async with asyncio.timeout(config.reef.ready_timeout), asyncio.TaskGroup() as group:
                engine = group.create_task(self._serve(storage, head, house.engines.start))
                if house.trains and owns:
                    group.create_task(self._start_training(storage))
        except TimeoutError:
            raise UnavailableError(
                f"engine and trainer are not up after {config.reef.ready_timeout:g} s (reef.ready-timeout)"
            ) from None
        self._handle_signals()
        if owns:
            try:
                await self._lead(storage, head, engine.result())
            except OwnershipLostError:
                if not house.ledger.shared:
                    raise
                await self._step_down()
        if house.ledger.shared:
            self._beside("follow", self._follow(storage))
        self._beside("retention", retention.run(house))
        leftovers.record(config.reef.run_dir, self._pids())
        _settle_heap()
        house.waiting_for = None

    async def _own(self) -> bool:
        """Become the ledger's owner, where there is none and this service trains; stay it. (A file's always is.)"""
        ledger = self._house.ledger
        if not ((self._house.trains or not ledger.shared) and await ledger.lease.try_acquire()):
            return False
        self._beside("lease", self._keep_lease())
        return True

    async def _keep_lease(self) -> None:
        lease, house = self._house.ledger.lease, self._house
        await lease.keep()
        if house.dispatcher is not None and not lease.held:
            house.dispatcher.progress.error = "this service does not own the ledger any more"
            house.dispatcher.stop()

    async def _lead(self, storage: Storage, served: Release, refused: str | None) -> None:
        """As the owner, once engine and trainer are up; `refused`: why the engine did not load `served`."""
        house = self._house
        dispatcher = house.dispatcher
        if not house.ledger.lease.held:
            raise OwnershipLostError("this service lost the ledger while it started to train")
        await house.ledger.write_owned(scenarios.set_recipe, self._config.recipe.implementation)
        house.forget_scenarios()
        if dispatcher is not None:
            await dispatcher.recover()  # takes as long as it takes: each release in the log as it is replayed
            self._announce("trainer is at the head of the chain")
        if house.engines.served == storage.base.release_id:
            await house.engines.verify(storage.base)
        if refused is None:
            await house.ledger.write_owned(releases.set_verified, served.id, time.time())
        elif dispatcher is not None:
            await dispatcher.chain.quarantine(served, refused)
        if dispatcher is not None:
            self._beside("dispatcher", self._train(dispatcher))

    def _beside(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work, name=name))

    async def _serve(
        self, storage: Storage, release: Release, load: Callable[[Published], Awaitable[None]]
    ) -> str | None:
        """`load` a release (None); where no engine takes it, the release verified before it, and why."""
        house = self._house
        try:
            published = storage.published(release)
            await asyncio.to_thread(storage.check_bytes, release)
            await load(published)
        except LoadFailedError as error:
            verified = await house.ledger.read(releases.verified_before, release)
            if verified is None:
                raise
            self._announce(f"serving {verified.id} instead: {error.message}")
            await house.engines.load(storage.published(verified))
            self._refused = (release.id, error.message, time.monotonic() + RETRY_S)
            return error.message
        return None

    async def _start_training(self, storage: Storage) -> None:
        house, config = self._house, self._config
        self._announce("starting Ray and the Megatron workers")
        new_trainer, new_dispatcher = await asyncio.to_thread(_training_rooms)
        trainer = new_trainer(config, config.inference.model_path)
        house.dispatcher = new_dispatcher(config, house.ledger, house.engines, trainer, storage, house.metrics)
        house.dispatcher.gate.url, house.dispatcher.gate.key = self._url, house.access.own_key
        await house.dispatcher.start()
        self._handle_signals()

    async def _train(self, dispatcher: "Dispatcher") -> None:
        """Supervises the loop: if it ends by a fault of ours, serving goes on and status says so."""
        try:
            await dispatcher.run()
        except Exception as error:  # noqa: BLE001 - the supervisor
            dispatcher.progress.error = f"training stopped: {error}"
            log.error("training stopped", exc_info=error)
            if self._house.ledger.shared:
                self._rest(dispatcher.progress.error)
                await self._house.ledger.lease.release()

    def _rest(self, fault: str) -> None:
        """Let another service train, where one can."""
        self._fault, self._rest_until = fault, time.monotonic() + RETRY_S

    async def _follow(self, storage: Storage) -> None:
        """Serve what the owner of the ledger releases; own it where nobody does."""
        house = self._house
        while True:
            await asyncio.sleep(FOLLOW_S)
            try:
                if house.dispatcher is not None:
                    if house.ledger.lease.held or house.dispatcher.progress.phase != "stopped":
                        continue
                    await self._step_down()
                released = await self._served(storage)
                house.following_error = await self._serve_released(storage, released) or self._fault
                if time.monotonic() >= self._rest_until and await self._own():
                    await self._take_over(storage)
            except Exception as error:  # noqa: BLE001 - a supervisor: nobody else would take an owner's place
                house.following_error = error.message if isinstance(error, ReefError) else repr(error)
                cause = None if isinstance(error, ReefError) else error
                log.warning("following the ledger's owner: %s", house.following_error, exc_info=cause)

    async def _serve_released(self, storage: Storage, released: Release) -> str | None:
        """Have the engine serve it, where it does not; why it cannot."""
        if released.id == self._house.engines.served:
            return None
        if await self._is_held(released):
            self._house.engines.call_also(released.id)
            return None
        if self._refused is not None:
            release_id, reason, retry_at = self._refused
            if release_id == released.id and time.monotonic() < retry_at:
                return reason
        return await self._serve(storage, released, self._house.engines.load)

    async def _is_held(self, released: Release) -> bool:
        """Whether the engines hold it under the name of a link before: the critic's steps change no weight."""
        served = self._house.engines.served
        if released.operation is not Operation.CRITIC_ONLY or served is None:
            return False
        held = await self._house.ledger.read(releases.get, released.scenario, served)
        return held.content_id == released.content_id

    async def _take_over(self, storage: Storage) -> None:
        """Train in the place of an owner that is gone."""
        house = self._house
        self._announce(f"taking over as {house.ledger.lease.holder}")
        try:
            released = await self._served(storage)  # the last owner may have released one more
            await storage.clean(released.scenario or None)
            self._refused = None  # it is tried once more, before it is quarantined
            refused = await self._serve_released(storage, released)
            await self._start_training(storage)
            await self._lead(storage, released, refused)
            self._fault = None
        except BaseException as error:
            self._rest(f"training could not begin: {error}")
            await self._step_down()
            raise
        leftovers.record(self._config.reef.run_dir, self._pids())

    async def _step_down(self) -> None:
        """End a trainer that must not, or cannot, train for this ledger any more."""
        house = self._house
        await house.ledger.lease.release()
        dispatcher, house.dispatcher = house.dispatcher, None
        if dispatcher is not None:
            await dispatcher.close()
        self._announce("training no more, following the ledger's next owner")

    async def _open_storage(self) -> Storage:
        house = self._house
        path = self._config.inference.model_path.absolute()
        base = Published(
            release_id=release_id(house.ledger, 0),
            path=str(path),
            content_id=await asyncio.to_thread(content_id_of, path),
            size_bytes=sum(file.stat().st_size for file in path.glob("*.safetensors")),
            probe=None,
        )
        house.storage = Storage(self._config, house.ledger, base)
        return house.storage

    async def _served(self, storage: Storage) -> Release:
        """The release that is to be served; recipe.scenario and its base are created here where they are new."""
        config, ledger = self._config, self._house.ledger

        def begin(connection: Connection) -> Release:
            name = config.recipe.scenario
            if name is not None:
                if scenarios.find(connection, name) is None:
                    created_at = storage.base_release(name).created_at
                    scenarios.create(connection, name, config.recipe.implementation, created_at)
                scenarios.set_training(connection, name)
            name = scenarios.training(connection)
            if name is None:
                return storage.base_release("")
            served = releases.served(connection, name)
            if served is None:
                served = storage.base_release(name)
                releases.append(connection, served)
            return served

        served = await ledger.write(begin)
        if served.scenario:
            base = (await ledger.read(releases.chain, served.scenario, 1, 1))[0]
            if base.content_id != storage.base.content_id:
                raise ConfigError(
                    f"inference.model-path holds {storage.base.content_id}, this run directory began with "
                    f"{base.content_id}: use the same model, or another reef.run-dir"
                )
        return served

    async def _end(
        self, starting: asyncio.Task[None], stopping: asyncio.Task[bool], serving: asyncio.Task[None]
    ) -> None:
        for task in (starting, stopping):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        house = self._house
        house.waiting_for = "nothing: the service is stopping"
        if house.dispatcher is not None:
            house.dispatcher.stop()
        self._server.should_exit = True
        await serving
        for task in self._tasks:
            if task.get_name() not in ("dispatcher", "lease"):  # the one ends its step, the other stays until then
                task.cancel()
        keeping = [task for task in self._tasks if task.get_name() == "lease"]
        try:
            await asyncio.gather(*(task for task in self._tasks if task not in keeping), return_exceptions=True)
            if house.dispatcher is not None:
                await house.dispatcher.close()
        finally:
            for task in keeping:
                task.cancel()
            await house.ledger.lease.release()  # before the engine ends: another service need not wait for that
            await house.engines.stop()
            if house.background:
                await asyncio.wait(house.background)

    def _pids(self) -> Iterator[int]:
        if self._on_cluster:  # they may be other machines', and Ray ends them with this process
            return
        yield from self._house.engines.pids()
        if self._house.dispatcher is not None:
            yield from self._house.dispatcher.worker_pids()

    def _handle_signals(self) -> None:
        """Again whenever Ray has connected: it puts a handler of its own before ours, which prints a stack."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        signal.alarm(0)  # Ray's handler, where it came first, would have this process aborted after 3 s
        if self._stop.is_set():  # the second one: at once; engine and workers end with this process
            os._exit(130)
        self._announce("stopping after the work in hand; once more to stop at once")
        self._stop.set()


def _hosts(config: Config) -> Callable[[str], Host] | None:
    """What starts the engines: Ray, where a cluster is joined. Only then it is imported, which takes seconds."""
    if config.inference.url is not None or find_cluster(config) is None:
        return None
    from reef.engines.ray_host import RayEngineHost

    return lambda name: RayEngineHost(config, name)


def _training_rooms() -> "tuple[type[Trainer], type[Dispatcher]]":
    """They import Ray, which takes seconds: not for a service that only records, and not while requests wait."""
    from reef.dispatcher import Dispatcher
    from reef.training.cluster import Trainer

    return Trainer, Dispatcher


def _cause(error: BaseException) -> BaseException:
    """What failed first: engine and trainer start in a group, whose own text says nothing."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: signals are this file's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _settle_heap() -> None:
    """What is there by now stays: the collector need not look at it again, and at new objects less often.

    With Python's own thresholds it took a seventh of the processor time of 32 clients.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _prepare(config: Config) -> None:
    """The run directory and the log in it. Raises ConfigError where they cannot be written."""
    run_dir = config.reef.run_dir
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # all that was said is in it, and the key
        probe = run_dir / ".writable"
        probe.touch()
        probe.unlink()
        set_up_logging(config.reef.log_level, config.logs_dir / "reef.log")
    except OSError as error:
        raise ConfigError(f"reef.run-dir: cannot write {error.filename}: {error.strerror}") from None


def _key(config: Config, announce: Announce) -> str | None:
    """The key in the run directory, where none is configured and one is asked; the first start makes it and says it."""
    settings = config.reef
    if settings.access == "open" or settings.token is not None or settings.tokens:
        return None
    path = settings.run_dir / keys.FILE
    key = keys.read_file(path)
    if key is None:
        key = keys.make_file(path)
        announce(f"the key of this service, shown this once: {key} (kept in {path})")
    return key


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(4096)  # the other one to bind this port at the same moment may be first here
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror} (reef.host, reef.port)") from None
    listener.setblocking(False)
    return listener
