"""The trainer as the dispatcher sees it, and the only door to Ray: a placement group with one actor per rank.

Without RAY_ADDRESS a cluster of this process's own is started, bound to loopback; it ends with this process, however
that ends. With RAY_ADDRESS an existing one is joined and left running.

Calls block. One thread at a time may use a `Trainer`, and not always the same one.
"""

import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

# Read by Ray when it is imported: listen on loopback only, and tell nobody.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from reef.config import Config
from reef.errors import ConfigError, ReefError, WorkersLostError
from reef.training.actor import WorkerActor, WorkerSpec
from reef.training.architecture import check_layout, read_architecture
from reef.training.reaper import Reaper, descendants
from reef.training.settings import settings
from reef.types import Batch, Floats, Ids, Probe, Published, StepResult

OBJECT_STORE_BYTES = 128 * 2**20  # holds batches; weights travel over the disk
KNOCK_TIMEOUT_S = 5
LONGEST_TEMP_DIR = 20  # bytes; Ray's sockets lie 82 below it, and their paths may have 107


class Trainer:
    """Owns the workers that hold one policy.

    Every method but `start`, `restart` and `stop` raises WorkersLostError when a worker died, failed, or did not answer
    in time. All workers have ended by then: `restart`, then `restore` or step on from the base weights.
    """

    def __init__(self, config: Config, model_path: Path) -> None:
        """Check that the model can be trained in this layout; start nothing.

        Raises:
            ConfigError: it cannot.
        """
        self._config = config
        self._model_path = model_path.absolute()
        self._settings = settings(config)
        self._world_size = config.training.layout.world_size
        self._timeout_s = config.training.step_timeout_s
        check_layout(read_architecture(model_path), config.training.layout)
        self._workers: list[Any] = []
        self._pids: list[int] = []
        self._group: Any = None
        self._temp_dir: Path | None = None  # of a cluster of our own
        self._temp_link = config.reef.run_dir.absolute() / "ray"  # leads there
        self._reaper: Reaper | None = None
        self._end = threading.Event()
        self._starting = threading.RLock()  # `stop` may be called while another thread is still in `start`

    def start(self) -> None:
        """Start (or join) Ray and the workers, with the base model's weights.

        Raises:
            ConfigError: the model's files are not what config.json says, or RAY_ADDRESS leads nowhere.
            WorkersLostError: they were not ready within `training.ready-timeout`.
        """
        with self._starting:
            deadline = time.monotonic() + self._config.training.ready_timeout
            connected: Future[None] = Future()
            self._end.clear()
            threading.Thread(target=self._stay_connected, args=(connected,), name="reef-ray", daemon=True).start()
            try:
                self._await(connected, deadline)
                self._start_workers(deadline)
            except BaseException:
                self.stop()
                raise

    def restart(self) -> None:
        """Replace the workers by fresh ones with the base model's weights. Raises what `start` raises."""
        self._end_workers()
        try:
            self._start_workers(time.monotonic() + self._config.training.ready_timeout)
        except RayError as error:
            raise self._lost(f"restart: Ray failed: {error}") from error

    def stop(self) -> None:
        """End the workers, and Ray where it was started here. Safe to call twice; waits for a `start` in work."""
        with self._starting:
            self._end_workers()
            ray.shutdown()
            self._end.set()
            if self._reaper is not None:
                self._reaper.finish()
                self._reaper = None
            if self._temp_dir is not None:
                shutil.rmtree(self._temp_dir, ignore_errors=True)
                self._temp_dir = None
                self._temp_link.unlink(missing_ok=True)

    def ping(self) -> None:
        """Nothing, where every worker is alive and answers."""
        if not self._workers:
            raise WorkersLostError("there are no training workers (not started, or lost and not restarted)")
        try:
            calls = [worker.pid.remote() for worker in self._workers]
        except RayError as error:
            raise self._lost(f"ping: Ray failed: {error}") from error
        self._gather(calls, "ping", self._timeout_s)

    def step(self, batch: Batch) -> StepResult:
        """Take one optimizer step.

        Raises:
            StepFailedError: the gradient is not finite; nothing has moved.
            WorkersLostError: also when it took longer than `training.step-timeout-s`.
        """
        result: StepResult = self._first("step", batch)
        return result

    def publish(self, release_id: str, directory: Path) -> Published:
        """Write the current weights to `directory`/`release_id`, complete or not at all, with the probe's answer.

        Raises:
            UnavailableError: the disk refused; the workers are as before.
        """
        published: Published = self._first("publish", release_id, directory.absolute())
        return published

    def probe(self) -> Probe:
        """The probe sequence and the current weights' log-probabilities of it."""
        probe: Probe = self._first("probe")
        return probe

    def logprobs(self, sequences: Sequence[Ids], temperature: float) -> list[Floats]:
        """The current weights' log-probabilities [T-1] of ids[1:] of each sequence, which has at least 2 ids."""
        found: list[Floats] = self._first("logprobs", list(sequences), temperature)
        return found

    def save(self, directory: Path) -> None:
        """Write a checkpoint; complete once this returns.

        Raises:
            UnavailableError: the disk refused; the workers are as before.
        """
        self._call("save", directory.absolute())

    def restore(self, directory: Path) -> int:
        """Go back to a checkpoint; return the optimizer steps done by then.

        Raises:
            LoadFailedError: it is not complete, damaged, or of another trainer (nothing has moved); or it cannot be
                read, and the workers' state is undefined until another `restore` or a `reset`.
        """
        steps: int = self._first("restore", directory.absolute())
        return steps

    def load_weights(self, directory: Path) -> None:
        """Take a release's weights; moments, step count, schedule and random state stay.

        Raises:
            LoadFailedError: the directory is not a complete release of this model; nothing has moved.
        """
        self._call("load_weights", directory.absolute())

    def reset(self) -> None:
        """Go back to the base model's weights with no step taken, as after `restart` but in the same processes."""
        self._call("reset")

    def digest(self) -> str:
        """The sha256 (hex) of all that decides the next step: equal exactly where two trainers are bit-equal."""
        digest: str = self._first("digest")
        return digest

    def worker_pids(self) -> list[int]:
        """Process ids of the workers, by rank. Asks nobody."""
        return list(self._pids)

    def _stay_connected(self, connected: "Future[None]") -> None:
        """Connect, then wait for `stop`: the kernel ends Ray's processes with the thread that started them."""
        try:
            self._connect()
        except BaseException as error:  # noqa: BLE001 (raised again by the thread that waits)
            connected.set_exception(error)
        else:
            connected.set_result(None)
            self._end.wait()

    def _await(self, connected: "Future[None]", deadline: float) -> None:
        try:
            connected.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            limit_s = self._config.training.ready_timeout
            raise WorkersLostError(f"Ray did not start within training.ready-timeout ({limit_s:g} s)") from None

    def _connect(self) -> None:
        logging.getLogger("ray").setLevel(logging.ERROR)  # it warns of what is meant here, e.g. of this thread
        if address := os.environ.get("RAY_ADDRESS"):
            try:
                _knock(address)
                ray.init(address=address, log_to_driver=False, configure_logging=False)
            except OSError as error:  # Ray's ConnectionError is one too
                raise ConfigError(f"RAY_ADDRESS is {address}, but no Ray cluster answers there: {error}") from None
            return
        # Else Ray keeps a token for its own use in the user's home.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        self._temp_dir = self._make_temp_dir()
        ray.init(
            address="local",
            num_cpus=self._world_size,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(self._temp_dir / "ray"),  # Ray opens it to all users, but not the one above
            _system_config={"enable_worker_prestart": False, "prestart_worker_first_driver": False},
        )
        self._reaper = Reaper(self._temp_dir, descendants(str(self._temp_dir)))

    def _make_temp_dir(self) -> Path:
        """A directory for Ray's files, in the place of one that is still there because the reaper was killed too."""
        self._temp_link.parent.mkdir(parents=True, exist_ok=True)
        if self._temp_link.is_symlink():
            shutil.rmtree(self._temp_link.readlink(), ignore_errors=True)
            self._temp_link.unlink()
        parent = tempfile.gettempdir()
        made = Path(tempfile.mkdtemp(prefix="reef-", dir=parent if len(parent) < LONGEST_TEMP_DIR else "/tmp"))
        self._temp_link.symlink_to(made)
        return made

    def _start_workers(self, deadline: float) -> None:
        bundle: dict[str, float] = {"CPU": 1.0}
        if ray.cluster_resources().get("GPU", 0) >= self._world_size:
            bundle["GPU"] = 1.0
        self._group = placement_group([bundle] * self._world_size)
        if not self._group.wait(max(0.0, deadline - time.monotonic())):
            raise WorkersLostError(f"Ray has no room for {self._world_size} workers of {bundle} each")
        remote = ray.remote(WorkerActor)
        self._workers = [
            remote.options(
                num_cpus=1,
                num_gpus=bundle.get("GPU", 0),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
            ).remote()
            for index in range(self._world_size)
        ]
        rendezvous = Path(tempfile.mkdtemp(prefix="ranks-", dir=self._rendezvous_dir())) / "store"
        calls = []
        for rank, worker in enumerate(self._workers):
            spec = WorkerSpec(
                rank=rank,
                world_size=self._world_size,
                model_path=self._model_path,
                rendezvous=rendezvous,
                settings=self._settings,
                micro_batch_tokens=self._config.training.micro_batch_tokens,
            )
            calls.append(worker.start.remote(spec, self._log_path(rank), self._environment()))
        self._gather(calls, "start", max(0.0, deadline - time.monotonic()))
        self._pids = self._gather([worker.pid.remote() for worker in self._workers], "pid", self._timeout_s)
        shutil.rmtree(rendezvous.parent, ignore_errors=True)

    def _rendezvous_dir(self) -> Path:
        """Where ranks meet: beside Ray's own files, or, when they may be on several machines, in the run directory."""
        if self._temp_dir is not None:
            return self._temp_dir
        run_dir = self._config.reef.run_dir.absolute()
        run_dir.mkdir(parents=True, exist_ok=True)
        return run_dir

    def _environment(self) -> dict[str, str]:
        """Ranks on one machine speak over loopback; on several, gloo and nccl find their own interface."""
        return {"GLOO_SOCKET_IFNAME": "lo"} if self._temp_dir is not None else {}

    def _log_path(self, rank: int) -> Path:
        return self._config.logs_dir.absolute() / f"trainer-{rank}.log"

    def _end_workers(self) -> None:
        for worker in self._workers:
            with suppress(RayError, ValueError):  # ended already
                ray.kill(worker)
        if self._temp_dir is not None:  # they are here, and one that is stopped does not hear Ray
            for pid in self._pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._workers = []
        self._pids = []
        if self._group is not None:
            with suppress(RayError):
                remove_placement_group(self._group)
            self._group = None

    def _first(self, method: str, *args: Any) -> Any:
        """The answer of the first rank that has one."""
        return next(answer for answer in self._call(method, *args) if answer is not None)

    def _call(self, method: str, *args: Any) -> list[Any]:
        if not self._workers:
            raise WorkersLostError(f"{method}: there are no training workers (not started, or lost and not restarted)")
        try:
            shared = [ray.put(arg) for arg in args]
            calls = [worker.call.remote(method, *shared) for worker in self._workers]
        except RayError as error:
            raise self._lost(f"{method}: Ray failed: {error}") from error
        return self._gather(calls, method, self._timeout_s)

    def _gather(self, calls: list[Any], method: str, timeout_s: float) -> list[Any]:
        """Each rank's answer. An error of ours is raised once every rank is done; any other ends the workers."""
        deadline = time.monotonic() + timeout_s
        answers: dict[Any, Any] = {}
        refused: ReefError | None = None
        pending = list(calls)
        while pending:
            ready, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._lost(f"{method}: no answer within {timeout_s:g} s")
            try:
                answers[ready[0]] = ray.get(ready[0])
            except RayTaskError as error:
                if not isinstance(error.cause, ReefError):
                    raise self._lost(f"{method} of rank {calls.index(ready[0])} failed: {error.cause!r}") from error
                refused = error.cause
            except RayError as error:
                raise self._lost(f"{method}: rank {calls.index(ready[0])} died") from error
        if refused is not None:
            raise refused
        return [answers[call] for call in calls]

    def _lost(self, what: str) -> WorkersLostError:
        self._end_workers()
        return WorkersLostError(f"{what}; the workers were ended; their logs: {self._config.logs_dir}/trainer-*.log")


def _knock(address: str) -> None:
    """Fail at once where nothing listens: Ray itself takes minutes to give up. Other forms than host:port pass."""
    host, _, port = address.rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), KNOCK_TIMEOUT_S).close()
