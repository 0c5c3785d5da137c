"""Starts and ends one engine server as a subprocess of this process.

The server and its children are a session of their own, with a directory of their own. Both are gone once it has
ended, by itself, by `stop`, or because this process is gone, however that ended. Its log goes to the run directory.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import psutil

from reef.config import Config
from reef.engines.launch import HERE, EmbeddedLaunch, Launch, Site
from reef.engines.sglang.launch import SglangLaunch
from reef.errors import EngineError
from reef.observe import log
from reef.reaper import Reaper

STOP_TIMEOUT_S = 20  # from SIGTERM to SIGKILL; SGLang takes about 8 s
KILL_TIMEOUT_S = 10  # from SIGKILL until they are gone: memory is given back meanwhile
PORT_TRIES = 3
POLL_S = 0.1
TAIL_LINES = 15  # of its log, that say why it ended
PROGRESS_S = 5  # between lines that say how a start goes
LAUNCHES: dict[str, Callable[[Config, str, str, str, Path, Site], Launch]] = {
    "embedded": EmbeddedLaunch,
    "sglang": SglangLaunch,
}


class Host(Protocol):
    """Starts and ends one engine server, here or elsewhere."""

    @property
    def pid(self) -> int | None:
        """The process id of the server on its machine; None where it does not run."""

    @property
    def key(self) -> str | None:
        """What requests to the server must bring as their bearer token, once it has started; None: nothing."""

    async def start(self, model_path: str, version: str, ready_timeout_s: float) -> str:
        """Start the server; its URL once it takes requests. Raises EngineError or ConfigError."""

    async def wait(self) -> int | str:
        """The exit status of the server, once it has ended, or what became of it."""

    async def stop(self) -> None:
        """End the server and its children; return when they are gone."""


class EngineHost:
    """One server at a time: `start`, `wait` for its end, `stop`. Its log is called `name`.log."""

    def __init__(self, config: Config, name: str, site: Site = HERE) -> None:
        self._config = config
        self._name = name
        self._site = site
        self._log = config.logs_dir / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None
        self._reaper: Reaper | None = None
        self._log_begin = 0  # where this server's log begins in the file

    @property
    def pid(self) -> int | None:
        """The process id of the server, which leads the group of its processes; None where it does not run."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def key(self) -> str | None:
        """What requests to the server must bring as their bearer token."""
        return self._site.key

    async def start(self, model_path: str, version: str, ready_timeout_s: float) -> str:
        """Start the server on a port the kernel gives and return its URL once it takes requests.

        Raises:
            EngineError: it ended, or was not ready in time; the message ends with the last lines of its log.
        """
        await self.stop()
        tries = 0
        try:
            async with asyncio.timeout(ready_timeout_s):
                while True:
                    tries += 1
                    if (url := await self._try(model_path, version, tries)) is not None:
                        return url
        except TimeoutError:
            await self.stop()
            raise EngineError(
                f"{self._name} did not start in {ready_timeout_s:g} s (reef.ready-timeout):\n{self._tail()}"
            ) from None
        except BaseException:
            await self.stop()
            raise

    async def wait(self) -> int:
        """The exit status of the server, once it and all that it had started have ended."""
        if self._process is None:
            raise EngineError("no engine was started")
        status = await self._process.wait()
        await self._reap()
        return status

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after STOP_TIMEOUT_S; returns when the server and its children are gone."""
        process = self._process
        if process is None:
            return
        members = _group(process.pid)
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                log.warning("%s did not end in %d s after SIGTERM: killing it", self._name, STOP_TIMEOUT_S)
        await self._reap()
        await process.wait()
        await _gone(members, KILL_TIMEOUT_S)
        self._process = None  # its id may be another's from now on

    async def _try(self, model_path: str, version: str, tries: int) -> str | None:
        """One attempt; None where its port was taken meanwhile and there may be another."""
        directory = Path(tempfile.mkdtemp(prefix="reef-engine-"))
        try:
            launch = LAUNCHES[self._config.inference.backend](
                self._config, self._name, model_path, version, directory, self._site
            )
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        try:
            await self._spawn(launch, directory)
            url = await self._ready(launch)
        finally:
            await launch.close()
        if url is not None:
            return url
        assert self._process is not None
        status, tail = await self.wait(), self._tail()
        if tries < PORT_TRIES and launch.port_was_taken(tail):
            log.warning("%s: its port was taken while it started; trying another", self._name)
            return None
        raise EngineError(f"{self._name} ended with {status} while it started:\n{tail}")

    async def _spawn(self, launch: Launch, directory: Path) -> None:
        try:
            with self._log.open("ab") as output:
                if self._site.key is not None:
                    self._log.chmod(0o600)  # SGLang writes the key into it
                self._log_begin = output.tell()
                self._process = await asyncio.create_subprocess_exec(
                    *launch.command,
                    env={**os.environ, **launch.environment},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C in the terminal is for us: we end it in its turn
                )
            self._reaper = Reaper(directory, [-self._process.pid])
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise

    async def _ready(self, launch: Launch) -> str | None:
        """Where the server listens, once it takes requests; None where it ends before."""
        assert self._process is not None
        began = said = time.monotonic()
        while self._process.returncode is None:
            if (url := await launch.url()) is not None:
                log.info("%s: %s is up after %.1f s at %s", self._name, launch.title, time.monotonic() - began, url)
                return url
            now = time.monotonic()
            if now - said >= PROGRESS_S:
                said = now
                log.info("%s: %s is starting, %.0f s: %s", self._name, launch.title, now - began, self._newest()[:200])
            await asyncio.sleep(POLL_S)
        return None

    async def _reap(self) -> None:
        """Kill what is left of the server's processes, and remove their directory."""
        reaper, self._reaper = self._reaper, None
        if reaper is not None:
            await asyncio.to_thread(reaper.finish)

    def _tail(self) -> str:
        return "\n".join(self._lines()[-TAIL_LINES:]) or "(its log is empty)"

    def _newest(self) -> str:
        """The last line of the log that says something by itself: indented ones belong to those before them."""
        return next((line for line in reversed(self._lines()) if not line[:1].isspace()), "(its log is empty)")

    def _lines(self) -> list[str]:
        with self._log.open("rb") as file:
            file.seek(self._log_begin)
            return [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]


def _group(pid: int) -> list[psutil.Process]:
    """The processes of a group, as they are now."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(process.pid) == pid:
                members.append(process)
    return members


async def _gone(processes: list[psutil.Process], timeout_s: float) -> None:
    """Return once none of them runs. Raises EngineError after the time."""

    def running(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    deadline = time.monotonic() + timeout_s
    while left := [process.pid for process in processes if running(process)]:
        if time.monotonic() > deadline:
            raise EngineError(f"processes {left} of an engine do not end, though they were killed")
        await asyncio.sleep(POLL_S)
