"""Weights & Biases: one run for each scenario, which every life of the service goes on with.

    loop -- write(): wakes --> thread <-- releases it has not written yet -- ledger
                                 `--> wandb, in a process of its own

The ledger is the queue: what could not be written (no network, a full disk, a killed service) is written later, from
there. Nothing here blocks the loop or fails it: all of wandb happens on the thread, and whatever goes wrong is one
warning.
"""

import asyncio
import contextlib
import hashlib
import json
import netrc
import os
import threading
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import psutil

from reef.config import Config
from reef.errors import ConfigError, ReefError
from reef.ledger import curve, scenarios
from reef.ledger.ledger import Ledger
from reef.ledger.scenarios import Scenario
from reef.observe import log
from reef.types import Release

T = TypeVar("T")
PAGE = 256  # releases read from the ledger at once
READ_S = 30.0  # that the ledger may take to answer
FLUSH_S = 1.0  # between wandb's writes to its file; what it holds back dies with it
RETRY_S = 300.0  # until wandb is tried again, after it failed
CLOSE_S = 10.0  # that ending the run may take; then its process is ended
_KILLED_S = 2.0  # that the thread may take to notice it
_LOOK_S = 0.02
_ROLLOUTS, _STEP = "rollouts", "trainer_step"  # the axes besides wandb's own, which is the release's number


class WandbLog:
    """Writes each release to Weights & Biases; does nothing where that is not enabled."""

    def __init__(self, config: Config, ledger: Ledger, retry_s: float = RETRY_S, close_s: float = CLOSE_S) -> None:
        self._config = config
        self._settings = config.observability.wandb
        self._directory = (self._settings.directory or config.reef.run_dir / "wandb").absolute()
        self._ledger = ledger
        self._retry_s = retry_s
        self._close_s = close_s
        self._scenario = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._warned = False
        if self._settings.enabled:
            threading.Thread(target=_import, name="wandb import", daemon=True).start()

    def write(self, scenario: str) -> None:
        """The scenario's chain has grown: its new links are written soon. Returns at once, on the event loop."""
        if not self._settings.enabled:
            return
        if self._thread is None:
            self._scenario, self._loop = scenario, asyncio.get_running_loop()
            # A daemon: should wandb hang, the interpreter does not wait for it at its end.
            self._thread = threading.Thread(target=self._work, name="wandb", daemon=True)
            self._thread.start()
        self._wake.set()

    async def close(self) -> None:
        """Write what is missing and end the run, within `CLOSE_S`; after that its process is ended."""
        if self._thread is None:
            return
        self._stopping.set()
        self._wake.set()
        if not await _ended(self._thread, self._close_s):
            self._warn(f"it did not end within {self._close_s:g} s and was killed")
            await asyncio.to_thread(_kill)
            await _ended(self._thread, _KILLED_S)

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                self._session()
            except Exception as error:  # noqa: BLE001 - metrics never stop the loop
                self._warn(str(error) or type(error).__name__)
            self._stopping.wait(self._retry_s)

    def _session(self) -> None:
        """Follow the chain until the service stops. Raises whatever wandb, the disk or the ledger raise."""
        _check_installed()
        scenario = self._ask(self._ledger.read(scenarios.get, self._scenario))
        run_id = identity(self._ledger.run_id, scenario)
        mark = _Mark(self._directory / f"{run_id}.json", f"{self._settings.entity or ''}/{self._settings.project}")
        after = mark.read()
        mark.write(after)  # now: where there is no directory to write to, wandb would take another one
        try:
            run = self._open(scenario, run_id)
            if not run.offline:  # the server knows best what it has
                after = max(run.starting_step - 1, 0)
            after = self._follow(run, after, mark)
            run.finish()
        finally:
            _tear_down()
        mark.write(after)

    def _open(self, scenario: Scenario, run_id: str) -> Any:
        import wandb

        settings = self._settings
        return wandb.init(
            id=run_id,
            resume="allow",
            name=f"{scenario.name} {self._ledger.run_id}",
            project=settings.project,
            entity=settings.entity,
            tags=settings.tags,
            mode=mode(settings.mode),
            dir=str(self._directory),
            config={name: part for name, part in self._config.dump().items() if name in ("recipe", "training")},
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,  # GET /metrics has the machine's
                x_disable_meta=True,  # the command line may hold a key
                x_disable_machine_info=True,
                x_save_requirements=False,
                x_transaction_log_flush_interval=FLUSH_S,
            ),
        )

    def _follow(self, run: Any, after: int, mark: "_Mark") -> int:
        """Write every link above `after`, and those to come; the last one's number once the service stops."""
        run.define_metric(_ROLLOUTS)
        run.define_metric(_STEP)
        run.define_metric("*", step_metric=_ROLLOUTS)
        rollouts: int | None = None
        while True:
            self._wake.clear()  # first: what wakes from here on is seen at the next look
            stopping = self._stopping.is_set()
            written = after
            while rows := self._ask(self._ledger.read(curve.points, self._scenario, after, rollouts, PAGE)):
                for release, rollouts in rows:
                    run.log(row(release, rollouts), step=release.number, commit=True)
                after = rows[-1][0].number
            if stopping:
                return after
            if after != written and not self._stopping.wait(2 * FLUSH_S):
                if not _lives():  # it was killed, perhaps before it had written them
                    raise ReefError("its process has ended")
                mark.write(after)
            self._wake.wait()

    def _ask(self, question: Coroutine[Any, Any, T]) -> T:
        """What the ledger answers, through the event loop that it belongs to."""
        assert self._loop is not None
        try:
            return asyncio.run_coroutine_threadsafe(question, self._loop).result(READ_S)
        finally:
            question.close()  # where the loop is gone it was never begun; else it is done

    def _warn(self, reason: str) -> None:
        message = "Weights & Biases: %s; training goes on, what is missing is written once this works again"
        (log.info if self._warned else log.warning)(message, reason)
        self._warned = True


class _Mark:
    """How far the offline runs in a directory have come, for the next life. Written once the rows are in their file."""

    def __init__(self, path: Path, project: str) -> None:
        self._path = path
        self._project = project

    def read(self) -> int:
        """The number of the last link written to this project; 0: none but the base."""
        try:
            found = json.loads(self._path.read_text())
            return int(found["number"]) if found["project"] == self._project else 0
        except (FileNotFoundError, ValueError, KeyError, TypeError):  # not there, or not ours: all is written again
            return 0

    def write(self, number: int) -> None:
        """Raises OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps({"project": self._project, "number": number}))
        partial.replace(self._path)


def identity(run_id: str, scenario: Scenario) -> str:
    """The W&B run of one scenario of one run directory: the same after every restart.

    With the moment at which the scenario was created, since the 4 digits of a run directory's id alone would let one of
    a hundred others go on with the same run.
    """
    told = f"{run_id}/{scenario.name}/{scenario.created_at!r}"
    return f"{run_id}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"


def mode(asked: Literal["online", "offline"] | None) -> Literal["online", "offline"]:
    """`asked`; where nothing is: offline if WANDB_MODE says so or there is no key, else online.

    Raises:
        ConfigError: online is asked for, and there is no key. (wandb would ask for one at the terminal.)
    """
    told = asked or ("offline" if os.environ.get("WANDB_MODE", "online") != "online" else None)
    if told == "offline":
        return "offline"
    if _has_key():
        return "online"
    if told == "online":
        raise ConfigError("observability.wandb.mode is online, but no key is here: set WANDB_API_KEY, or `wandb login`")
    return "offline"


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    try:
        return netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc").authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def row(release: Release, rollouts: int) -> Mapping[str, float | str]:
    """What is written of a release: its metrics, who it is, and where it lies on the axes."""
    return {
        **release.metrics,
        _ROLLOUTS: rollouts,
        _STEP: release.step,
        "release/id": release.id,
        "release/operation": release.operation.value,
        "release/policy_version": release.policy_version,
        "release/content_id": release.content_id,
    }


def _import() -> None:
    """Importing wandb has the interpreter for itself at times: better while the service starts and nobody is served."""
    with contextlib.suppress(Exception):  # the session says so
        _check_installed()


def _check_installed() -> None:
    """Import wandb. Raises ConfigError where that fails."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # wandb's process sends its crashes home otherwise
    try:
        import wandb  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"wandb cannot be imported ({error}): pip install 'reef[wandb]'") from error


def _tear_down() -> None:
    """End wandb's process, and have it forgotten: the next session starts another one."""
    import wandb

    try:
        wandb.teardown()
    except Exception as error:  # noqa: BLE001 - it is gone already, which whoever used it has noticed
        log.info("Weights & Biases did not end in order: %s", error)
    _kill()


def _kill() -> None:
    """End wandb's process, a child of this one, should it be there still: it may hang at a network or a disk."""
    left = _processes()
    for child in left:
        child.kill()
    psutil.wait_procs(left, timeout=_KILLED_S)


def _processes() -> list[psutil.Process]:
    """Wandb's, of those that this one has started."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == "wandb-core":
                found.append(child)
    return found


def _lives() -> bool:
    for process in _processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


async def _ended(thread: threading.Thread, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while thread.is_alive() and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_S)
    return not thread.is_alive()
