"""Starts and ends one engine server as a subprocess of this process.

The server writes its port to a file once it listens, its log goes to the run directory, and it ends by itself when this
process dies, however it dies.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from reef.config import Config
from reef.errors import EngineError

STOP_TIMEOUT_S = 20  # from SIGTERM to SIGKILL; SGLang takes about 8 s


class EngineHost:
    """One server process at a time: `start`, `wait` for its end, `stop`. Its files are called `name`.port and .log."""

    def __init__(self, config: Config, name: str) -> None:
        self._settings = config.inference
        self._port_file = config.reef.run_dir / f"{name}.port"
        self._log = config.logs_dir / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self, model_path: str, version: str, ready_timeout_s: float) -> str:
        """Start the server on a port the kernel gives and return its URL once it is bound.

        Raises:
            EngineError: it ended, or did not bind in time; the message ends with the last lines of its log.
        """
        self._port_file.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command(model_path, version),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal is for us: we end it in its turn
            )
        try:
            async with asyncio.timeout(ready_timeout_s):
                while not (port := self._read_port()):
                    if self._process.returncode is not None:
                        raise EngineError(f"the engine ended with {self._process.returncode}:\n{self._log_tail()}")
                    await asyncio.sleep(0.05)
        except TimeoutError:
            await self.stop()
            raise EngineError(f"the engine did not start in {ready_timeout_s:g} s:\n{self._log_tail()}") from None
        return f"http://127.0.0.1:{port}"

    async def wait(self) -> int:
        """The exit status of the server, once it ends."""
        if self._process is None:
            raise EngineError("no engine was started")
        return await self._process.wait()

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after STOP_TIMEOUT_S; returns when the process is gone."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def _command(self, model_path: str, version: str) -> Sequence[str]:
        command = [sys.executable, "-m", "reef.engines.embedded"]
        command += ["--model-path", model_path, "--weight-version", version]
        command += ["--host", "127.0.0.1", "--port", "0", "--port-file", str(self._port_file)]
        command += ["--parent-pid", str(os.getpid())]
        if self._settings.context_length is not None:
            command += ["--context-length", str(self._settings.context_length)]
        command += flags(self._settings.options)
        return command

    def _read_port(self) -> str:
        try:
            return self._port_file.read_text().strip()
        except FileNotFoundError:
            return ""

    def _log_tail(self, num_lines: int = 15) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:]) or "(its log is empty)"


def flags(options: Mapping[str, Any]) -> list[str]:
    """Command line arguments of a server's options: true is a bare flag, false none."""
    words: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words += [flag] if value else []
        else:
            words += [flag, str(value)]
    return words
