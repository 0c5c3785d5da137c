"""The trainer as the dispatcher sees it: one actor per rank, in a placement group on the Ray cluster of this process.

Tensor ranks of one group are on one node; the groups are packed on as few nodes as hold them.

Calls block. One thread at a time may use a `Trainer`, and not always the same one.
"""

import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from reef.cluster import room
from reef.cluster.connection import Connection, connect, disconnect
from reef.config import Config
from reef.errors import ReefError, UnavailableError, WorkersLostError
from reef.methods.base import build as build_method
from reef.training.actor import Surroundings, WorkerActor, WorkerSpec
from reef.training.architecture import check_layout, check_recompute, read_architecture
from reef.training.beside import check_beside, paths_beside
from reef.training.settings import settings
from reef.training.tensors import check_weights
from reef.types import Batch, Bucket, Floats, Ids, Probe, Published, StepResult

# isort: split
# Only now: the connection's module sets what Ray reads when it is imported.
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

SAVE_TIMEOUT_S = 7200  # for a checkpoint's files: hundreds of gigabytes may have to go to a shared disk


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
        architecture = read_architecture(model_path)
        check_layout(architecture, config.training.layout)
        check_recompute(architecture, config.training.layout, config.training.options)
        check_weights(model_path, architecture)
        method = build_method(self._settings["method"])
        check_beside(method, architecture)
        self._beside = paths_beside(method)
        self._workers: list[Any] = []
        self._pids: list[int] = []
        self._processes: list[psutil.Process] = []  # of those that run on this machine, in a cluster of our own
        self._addresses: list[str] = []  # of the workers' nodes, by rank
        self._group: Any = None
        self._meeting: Path | None = None  # where the workers found each other
        self._connection: Connection | None = None
        self._gpus = False  # whether Ray gives each worker one
        self._starting = threading.RLock()  # `stop` may be called while another thread is still in `start`

    def start(self) -> None:
        """Start (or join) Ray and the workers, with the base model's weights.

        Raises:
            ConfigError: the model's files are not what config.json says, or the cluster is not there, too small, or
                does not share this machine's files.
            WorkersLostError: they were not ready within `training.ready-timeout`.
        """
        with self._starting:
            deadline = time.monotonic() + self._config.training.ready_timeout
            try:
                self._connect()
                self._start_workers(deadline)
            except RayError as error:
                self.stop()
                raise WorkersLostError(f"start: Ray failed: {error}") from error
            except BaseException:
                self.stop()
                raise

    def restart(self) -> None:
        """Replace the workers by fresh ones with the base model's weights. Raises what `start` raises.

        Where a node is gone, and the others have no room, it waits for one up to `training.ready-timeout`.
        """
        self._end_workers()
        try:
            self._start_workers(time.monotonic() + self._config.training.ready_timeout)
        except RayError as error:
            raise self._lost(f"restart: Ray failed: {error}") from error

    def stop(self) -> None:
        """End the workers, and Ray where it was started here. Safe to call twice; waits for a `start` in work."""
        with self._starting:
            self._end_workers()
            if self._connection is not None:
                disconnect(self._connection)
                self._connection = None

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

    def publish(self, release_id: str, directory: Path, on_disk: bool = True) -> Published:
        """Write the current weights to `directory`/`release_id`, complete or not at all, with the probe's answer.

        Args:
            on_disk: False writes nothing: it only finds what they would be called and weigh.

        Raises:
            UnavailableError: the disk refused; the workers are as before.
        """
        published: Published = self._first("publish", release_id, directory.absolute(), on_disk)
        return published

    def listen(self, engine: str) -> tuple[str, int, str]:
        """Begin a group with an engine, in the place of an older one: host and port where they meet, and the backend.

        Raises:
            EngineError: rank 0's machine has not the address that Ray knows it by; the workers are as before.
        """
        found: tuple[str, int, str] = self._first("listen", engine, self._meeting_host())
        return found

    def join(self, engine: str, group: str, world_size: int, timeout_s: float) -> None:
        """Join the group with an engine, as its rank 0; `timeout_s` is for this and for each bucket.

        Raises:
            EngineError: the engine's ranks did not join in time; the workers are as before.
        """
        # Half of what a call may take at most: gathering a bucket takes time too.
        self._call("join", engine, group, world_size, min(timeout_s, self._timeout_s / 2))

    def send(self, engine: str, bucket: Bucket) -> None:
        """Send tensors of the current weights to an engine.

        Raises:
            EngineError: there is no group with it, or it failed and is no more; the workers are as before.
        """
        self._call("send", engine, bucket)

    def probe(self) -> Probe:
        """The probe sequence and the current weights' log-probabilities of it."""
        probe: Probe = self._first("probe")
        return probe

    def logprobs(self, sequences: Sequence[Ids], temperature: float) -> list[Floats]:
        """The current weights' log-probabilities [T-1] of ids[1:] of each sequence, which has at least 2 ids."""
        found: list[Floats] = self._first("logprobs", list(sequences), temperature)
        return found

    def save_begin(self, directory: Path) -> None:
        """Copy the state; the workers write it while other calls go on. One at a time, until `save_finish` returns."""
        self._call("save_begin", directory.absolute())

    def save_done(self) -> bool:
        """Whether `save_finish` will not wait, because the files are written, or were refused."""
        return all(self._call("save_done"))

    def save_finish(self) -> None:
        """Wait for what `save_begin` began; the checkpoint is complete once this returns.

        Raises:
            UnavailableError: the disk refused; call again to have what was copied written again.
        """
        self._call("save_finish", timeout_s=SAVE_TIMEOUT_S)

    def restore(self, directory: Path) -> int:
        """Go back to a checkpoint, which any layout may have written; return the optimizer steps done by then.

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

    def _connect(self) -> None:
        try:
            self._connection = connect(self._config, self._config.training.ready_timeout)
        except UnavailableError as error:
            raise WorkersLostError(f"{error.message} (training.ready-timeout)") from error
        nodes = self._connection.nodes()
        self._gpus = room.has_gpus(nodes) and self._config.training.devices is None
        room.check_room(self._config, nodes, self._gpus, self._connection.address, with_engines=False)

    def _start_workers(self, deadline: float) -> None:
        self._place(deadline)
        remote = ray.remote(WorkerActor)
        tensor = self._config.training.layout.tensor
        self._workers = [
            remote.options(
                num_cpus=1,
                num_gpus=int(self._gpus),
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, rank // tensor),
            ).remote()
            for rank in range(self._world_size)
        ]
        # It stays as long as the workers: NCCL asks there again for each connection, at the first call that needs it.
        meeting = self._meeting = Path(tempfile.mkdtemp(prefix="ranks-", dir=self._meeting_dir()))
        marks = self._mark_releases_dir()
        shared = {"inference.model-path": self._model_path, "reef.run-dir": meeting, **marks, **self._beside}
        try:
            # Apart, for while one refuses here the others do not wait for it to join them.
            self._each(deadline, "settle", [(self._surroundings(rank, shared),) for rank in range(self._world_size)])
            self._each(deadline, "start", [(self._spec(rank, meeting),) for rank in range(self._world_size)])
            self._pids = self._each(deadline, "pid", [()] * self._world_size)
            if self._is_local:
                self._processes = [psutil.Process(pid) for pid in self._pids if psutil.pid_exists(pid)]
        finally:
            for mark in marks.values():
                shutil.rmtree(mark, ignore_errors=True)

    def _each(self, deadline: float, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of every actor, with arguments by rank; the answers by rank."""
        calls = [getattr(worker, method).remote(*each) for worker, each in zip(self._workers, arguments, strict=True)]
        return self._gather(calls, method, max(0.0, deadline - time.monotonic()))

    def _spec(self, rank: int, meeting: Path) -> WorkerSpec:
        return WorkerSpec(
            rank=rank,
            world_size=self._world_size,
            model_path=self._model_path,
            rendezvous=meeting / "store",
            settings=self._settings,
            micro_batch_tokens=self._config.training.micro_batch_tokens,
        )

    def _mark_releases_dir(self) -> dict[str, Path]:
        """A new directory where releases are published, for other nodes to see, if that is not in the run directory."""
        if self._is_local or self._config.storage.releases_dir is None:
            return {}
        releases_dir = self._config.releases_dir.absolute()
        releases_dir.mkdir(parents=True, exist_ok=True)
        return {"storage.releases-dir": Path(tempfile.mkdtemp(prefix=".ranks-", dir=releases_dir))}

    def _surroundings(self, rank: int, shared: Mapping[str, Path]) -> Surroundings:
        devices = self._config.training.devices
        return Surroundings(
            log_path=self._config.logs_dir.absolute() / f"trainer-{rank}.log",
            address=self._addresses[rank],
            visible_devices=None if devices is None else str(devices[rank]) if devices else "",
            shared=shared,
        )

    def _place(self, deadline: float) -> None:
        """Have room for the workers; find out where."""
        assert self._connection is not None
        bundles = room.worker_bundles(self._config, self._gpus)
        self._group = placement_group(bundles, strategy="PACK")
        waiting_s = max(0.0, deadline - time.monotonic())
        if not self._group.wait(waiting_s):
            free = ray.available_resources()
            raise self._lost(
                f"Ray found no room in {waiting_s:.0f} s (training.ready-timeout) for the workers: needed are "
                f"{room.needed(bundles, [])}; there are {room.there(self._connection.nodes())}; free of all that are "
                f"{free.get('CPU', 0):g} CPU, {free.get('GPU', 0):g} GPU"
            )
        node_of = placement_group_table(self._group)["bundles_to_node_id"]
        address_of = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
        tensor = self._config.training.layout.tensor
        self._addresses = [address_of[node_of[rank // tensor]] for rank in range(self._world_size)]

    def _meeting_host(self) -> str:
        """Where rank 0 listens for engines: loopback, or on a cluster of several machines its own machine's address."""
        if self._is_local or not self._addresses:  # (without workers, the call itself says so)
            return "127.0.0.1"
        return self._addresses[0]

    @property
    def _is_local(self) -> bool:
        """Whether all workers are on this machine, in a cluster of our own."""
        return self._connection is not None and self._connection.is_local

    def _meeting_dir(self) -> Path:
        """Where ranks meet: beside Ray's own files, or, when they may be on several machines, in the run directory."""
        if self._connection is not None and self._connection.temp_dir is not None:
            return self._connection.temp_dir
        run_dir = self._config.reef.run_dir.absolute()
        run_dir.mkdir(parents=True, exist_ok=True)
        for left in run_dir.glob("ranks-*"):  # by an owner that was killed
            shutil.rmtree(left, ignore_errors=True)
        return run_dir

    def _end_workers(self) -> None:
        for worker in self._workers:
            with suppress(RayError, ValueError):  # ended already
                ray.kill(worker)
        for process in self._processes:  # one that is stopped does not hear Ray
            with suppress(psutil.NoSuchProcess):
                if process.is_running():  # else its number may be another's by now
                    process.kill()
        self._workers = []
        self._pids = []
        self._processes = []
        if self._group is not None:
            with suppress(RayError):
                remove_placement_group(self._group)
            self._group = None
        if self._meeting is not None:
            shutil.rmtree(self._meeting, ignore_errors=True)
            self._meeting = None

    def _first(self, method: str, *args: Any) -> Any:
        """The answer of the first rank that has one."""
        return next(answer for answer in self._call(method, *args) if answer is not None)

    def _call(self, method: str, *args: Any, timeout_s: float | None = None) -> list[Any]:
        if not self._workers:
            raise WorkersLostError(f"{method}: there are no training workers (not started, or lost and not restarted)")
        try:
            shared = [ray.put(arg) for arg in args]
            calls = [worker.call.remote(method, *shared) for worker in self._workers]
        except RayError as error:
            raise self._lost(f"{method}: Ray failed: {error}") from error
        return self._gather(calls, method, self._timeout_s if timeout_s is None else timeout_s)

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
                    raise self._lost(
                        f"{method} of {self._rank(calls.index(ready[0]))} failed: {error.cause!r}"
                    ) from error
                refused = error.cause
            except RayError as error:
                raise self._lost(f"{method}: {self._rank(calls.index(ready[0]))} died") from error
        if refused is not None:
            raise refused
        return [answers[call] for call in calls]

    def _rank(self, rank: int) -> str:
        return f"rank {rank}" if self._is_local else f"rank {rank} on node {self._addresses[rank]}"

    def _lost(self, what: str) -> WorkersLostError:
        self._end_workers()
        return WorkersLostError(f"{what}; the workers were ended; their logs: {self._config.logs_dir}/trainer-*.log")
