"""Walks one frozen run through kills: wherever production code can stand still, of whoever may die there.

plan(cells) -> moves, one release each -> Walk.repeat(moves): the reference, nobody is killed
                                      `-> Walk.move(move):    killed as its cell says, checked after each
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from reef import checks
from reef.config import load
from tests.conftest import Service
from tests.crash.frozen import (
    BASE,
    BATCH,
    CHECKPOINT_EVERY,
    SCENARIO,
    SETTINGS,
    Grader,
    LedgerFile,
    release_id,
    report_id,
)

POLL_S = 0.02
SLOW_POLL_S = 0.2  # while a service starts: looking costs it time
WAIT_S = 180.0
ORPHAN_S = 120.0  # that what a killed service had started may live on: agents of Ray take half a minute

TARGETS = ("service", "worker", "engine", "all")
OWNERS = {
    "receipt.written": "service",
    "report.written": "service",
    "batch.reserved": "service",
    "step.microbatch": "worker",
    "step.done": "worker",
    "publish.writing": "worker",
    "publish.renamed": "worker",
    "commit.before": "service",
    "commit.inside": "service",
    "commit.after": "service",
    "load.paused": "service",
    "load.engine": "engine",
    "load.loaded": "service",
    "load.resumed": "service",
    "load.verified": "service",
    "checkpoint.files": "worker",
    "checkpoint.writing": "worker",
    "checkpoint.complete": "worker",
    "recovery.begin": "service",
    "recovery.restored": "service",
    "recovery.replayed": "service",
    "rollback.before": "service",
    "rollback.committed": "service",
}
"""Every point in the order of a batch's life, and who stands still there."""
LAUNCHING = threading.Lock()  # two walks of one process share its environment
PASSES = {"step.microbatch": 1}  # stand at the second: the gradient of the first is there by then


@dataclass(frozen=True, slots=True)
class Cell:
    """Who is killed, and where everybody stands at that moment."""

    point: str
    target: str

    def __str__(self) -> str:
        return f"{self.target} at {self.point}"

    @property
    def ends_service(self) -> bool:
        return self.target in ("service", "all")

    @property
    def rolls_back(self) -> bool:
        return self.point.startswith("rollback.")


Move = Cell | None  # makes one release, disturbed as the cell says; None: by nobody


def plan(cells: Iterable[Cell], after: Sequence[Move] = ()) -> list[Move]:
    """The moves of before, then the cells in their order, between them what brings the chain to where each can happen.

    Those that roll back come last: each saves a checkpoint, and the others count on every third release having one.
    """
    moves = list(after)
    for cell in cells:
        number = len(moves) + 1  # of the release that the cell makes
        if cell.point.startswith("checkpoint."):
            moves += [None] * (-number % CHECKPOINT_EVERY)
        elif cell.point.startswith("recovery."):  # a checkpoint is there, and a release after it
            moves += [None] * max(CHECKPOINT_EVERY + 2 - number, number % CHECKPOINT_EVERY == 1)
        elif cell.rolls_back:
            moves += [None] * (2 - len(moves))
        moves.append(cell)
        if cell.target == "worker":
            moves.append(None)  # may be the first to miss the worker, which is an attempt of it
    return moves


class Faults:
    """The test's side of `reef.faults`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()

    def arm(self, point: str) -> None:
        for ending in ("reached", "go"):
            (self.directory / f"{point}.{ending}").unlink(missing_ok=True)
        whole = self.directory / "armed"
        whole.write_text(str(PASSES.get(point, 0)))
        whole.rename(self.directory / point)

    def reached(self, point: str) -> bool:
        return (self.directory / f"{point}.reached").exists()

    def go(self, point: str) -> None:
        (self.directory / f"{point}.go").touch()


class Walk:
    """One frozen run directory at work. Raises AssertionError as soon as anything is not as it must be."""

    def __init__(self, run_dir: Path, contents: Sequence[str] | None = None) -> None:
        """`contents`: the content ids that the chain must have, by number; None: this is the reference."""
        self.faults = Faults(run_dir.parent / "faults")
        self.service = Service(run_dir, *SETTINGS)
        self.ledger = LedgerFile(run_dir)
        self.grader = Grader()
        self.num_batches = 0
        self._run_dir = run_dir
        self._contents = contents
        self._num_releases = 0
        self._receipts: list[str] = []  # of answers that came
        self._temporary: set[Path] = set()  # directories that its services have made elsewhere

    @property
    def head(self) -> str:
        """The release that the moves so far have made."""
        return release_id(self._num_releases)

    # --- what happens ---

    def launch(self) -> None:
        with LAUNCHING:
            os.environ["REEF_FAULTS"] = str(self.faults.directory)
            try:
                self.service.launch()
            finally:
                del os.environ["REEF_FAULTS"]

    def start(self) -> None:
        self.launch()
        self.wait_ready()

    def wait_ready(self) -> None:
        self.until(self.service.is_ready, "the service is ready", SLOW_POLL_S)
        self.grader.url = self.service.url

    def repeat(self, moves: Sequence[Move]) -> None:
        """The same releases, and nobody is killed."""
        for move in moves:
            if move is not None and move.rolls_back:
                self.settle()
                self._num_releases += 1
                self._roll_back()
            else:
                self.post_batch()
        self.settle()

    def move(self, move: Move) -> None:
        """One more release, disturbed as the cell says: nothing is lost or done twice, and everything goes on."""
        if move is None:
            self.post_batch()
        else:
            self._disturbed(move)
        self.settle(tidy=move is not None and move.ends_service)

    def _disturbed(self, cell: Cell) -> None:
        aside = self._provoke(cell)
        self.until(lambda: self.faults.reached(cell.point), f"{cell.point} is reached")
        left = self.kill(cell.target)
        self.faults.go(cell.point)
        if cell.ends_service:
            self.start()
            gone(left)
        if aside is not None:
            aside.join(WAIT_S)
        if cell.rolls_back and self.ledger.head() != self.head:
            self._roll_back()  # as its client does, who got no answer and finds the chain as it was
        if cell.point == "receipt.written":
            kept = self.ledger.rows("select count(*) from requests where session = ?", str(cell))
            assert kept == [(1,)], "the receipt was durable, and is not there"

    def _provoke(self, cell: Cell) -> threading.Thread | None:
        """Let happen what makes the point be reached; the request that does, where its answer may never come."""
        if cell.point.startswith("recovery."):
            self.faults.arm("step.microbatch")
            self.post_batch()
            self.until(lambda: self.faults.reached("step.microbatch"), "a step")
            self.faults.arm(cell.point)
            self.kill("service" if cell.ends_service else "worker")
            self.faults.go("step.microbatch")
            if cell.ends_service:
                self.launch()
            return None
        self.faults.arm(cell.point)
        if cell.rolls_back:
            self._num_releases += 1
            return _aside(self._roll_back)
        self.post_batch()
        if cell.point == "receipt.written":
            return _aside(lambda: self.service.chat(headers={"x-reef-session": str(cell)}))
        return None

    def post_batch(self) -> None:
        """The reports of one more batch, which makes one more release."""
        self.num_batches += 1
        self._num_releases += 1
        self.grader.post(self.num_batches)

    def _roll_back(self) -> httpx.Response:
        """To the release before the one that is the head until then."""
        target = release_id(self._num_releases - 2)
        return self.service.post(f"/reef/scenarios/{SCENARIO}/rollback", {"release_id": target})

    def kill(self, target: str) -> list[psutil.Process]:
        """kill -9. Where that ends the service: all that it had started."""
        processes = self.service.processes()
        if target in ("service", "all"):
            self.grader.url = None
            self.service.kill_9()
        else:
            processes = [process for process in processes if is_a(process, target)]
            assert processes, f"there is no {target} to kill"
        if target != "service":
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        return processes

    # --- what must be ---

    def checkpoint(self) -> Path:
        """The head's trainer checkpoint, once it is there."""
        query = "select checkpoint from releases where id = ?"
        self.until(lambda: self.ledger.rows(query, self.head)[0][0], f"a checkpoint of {self.head}")
        return self._run_dir / "checkpoints" / self.head

    def settle(self, tidy: bool = False) -> None:
        """The release of the last move is served, and everything is in its place. `tidy`: a start has cleaned up."""
        self.until(lambda: self.ledger.head() == self.head, f"release {self.head}")
        self.until(self._at_rest, f"{self.head} is served, and training waits")
        self.check_ledger()
        assert self.ledger.states() == ({"trained": self.num_batches * BATCH} if self.num_batches else {})
        self._check_directories(tidy)
        self._audit()
        answer = self.service.chat()
        assert answer.headers["x-reef-release-id"] == self.head
        self._receipts.append(answer.headers["x-reef-agent-record-id"])

    def _at_rest(self) -> bool:
        status = self.service.status()
        return bool(status["scenario"]["served"] == self.head and status["training"]["phase"] == "waiting")

    def check_ledger(self) -> None:
        """At any moment: the chain is the reference's, and it was trained on the reports in their order, once each."""
        num_acknowledged = self.grader.num_acknowledged  # before the ledger is read: it may grow meanwhile
        contents, trained = self.ledger.contents(), self.ledger.trained()
        if self._contents is not None:
            assert contents == list(self._contents[: len(contents)]), "the chain is not that of the reference"
        assert trained == [report_id(number) for number in range(len(trained))]
        assert set(self.ledger.states()) <= {"pending", "reserved", "trained"}
        assert sum(self.ledger.states().values()) >= num_acknowledged

    def _check_directories(self, tidy: bool) -> None:
        for name, column in (("releases", "restorable"), ("checkpoints", "checkpoint is not null")):
            named = {id for (id,) in self.ledger.rows(f"select id from releases where {column}")} - {BASE}
            found = {path.name for path in (self._run_dir / name).iterdir()}
            assert named <= found, f"{name}: {named - found} are gone"
            assert not tidy or found == named, f"{name}: {found - named} are left-overs"
        assert not tidy or not (self._run_dir / "replay").exists()
        here = (self._run_dir / "ray").readlink()
        assert not (left := [path for path in self._temporary - {here} if path.exists()]), f"{left} are left-overs"
        self._temporary.add(here)

    def _audit(self) -> None:
        """What `reef doctor --ledger` says."""
        said: list[str] = []
        config = load(None, ["--reef.run-dir", str(self._run_dir), *SETTINGS], {})
        assert checks.ledger(config, said.append, lambda _: None) == 0, said

    def finish(self) -> Path:
        """Ctrl-C. The head's trainer checkpoint."""
        kept = {id for (id,) in self.ledger.rows("select id from receipts")}
        assert kept.issuperset(self._receipts), "an answer left without its receipt"
        assert self.service.stop() == 0
        assert not (left := orphans(self.faults.directory)), f"left behind: {left}"
        self._audit()
        return self._run_dir / "checkpoints" / self.head

    def close(self) -> None:
        self.grader.close()
        self.service.end()

    def until(self, true: Callable[[], Any], what: str, poll_s: float = POLL_S) -> None:
        deadline = time.monotonic() + WAIT_S
        while not true():
            assert self.grader.refused is None, self.grader.refused
            assert self.service.returncode is None, f"the service ended with {self.service.returncode}, before {what}"
            assert time.monotonic() < deadline, f"{what}: not within {WAIT_S:g} s"
            time.sleep(poll_s)


@contextmanager
def walking(frozen: Path, directory: Path, contents: Sequence[str] | None = None) -> Iterator[Walk]:
    """A walk over a copy of a frozen run directory, started; whatever happens, it has ended afterwards."""
    directory.mkdir()
    shutil.copytree(frozen, directory / "run")
    walk = Walk(directory / "run", contents)
    try:
        walk.start()
        yield walk
    except BaseException:
        print(walk.service.log_tail())
        raise
    finally:
        walk.close()


def _aside(request: Callable[[], httpx.Response]) -> threading.Thread:
    """A request whose answer may be lost with the service."""

    def work() -> None:
        with suppress(httpx.HTTPError):
            request()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def is_a(process: psutil.Process, target: str) -> bool:
    """Whether a process is a training worker, or an engine."""
    try:
        command = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False
    return command.startswith("ray::WorkerActor") if target == "worker" else "reef.engines.embedded" in command


def gone(processes: Sequence[psutil.Process]) -> None:
    """What a killed service leaves ends by itself, or is ended by the next one."""
    _, alive = psutil.wait_procs(processes, timeout=ORPHAN_S)
    assert not alive, f"left behind by a killed service: {alive}"


def orphans(faults: Path) -> list[psutil.Process]:
    """Processes of a run, whoever started them, told by the environment that they inherit."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.AccessDenied, psutil.NoSuchProcess):
            if process.environ().get("REEF_FAULTS") == str(faults):
                found.append(process)
    return found
