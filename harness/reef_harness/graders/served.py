"""A script that loads once what is slow to load, and answers each question in a fork of itself with limits."""

import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import IO

from reef_harness.graders.apart import ScriptFailed, TookTooLong
from reef_harness.types import Json

_START_S = 60.0  # to load what it loads, on a busy machine
_GRACE_S = 10.0  # beyond a question's own time, to say so


class Servers:
    """``count`` copies of a script, started when they are first needed, each asked one question at a time."""

    def __init__(self, script: Path, count: int) -> None:
        self._free: queue.LifoQueue[_Server] = queue.LifoQueue()
        for _ in range(count):
            self._free.put(_Server(script))

    def ask(self, question: Json, *, timeout_s: float, memory_mib: int) -> Json:
        """The answer to one question. Waits for a free copy; raises TookTooLong and ScriptFailed."""
        server = self._free.get()
        try:
            return server.ask(question, timeout_s, memory_mib)
        finally:
            self._free.put(server)


class _Server:
    """One copy; started again where it ended."""

    def __init__(self, script: Path) -> None:
        self._script = script
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: weakref.finalize[..., _Server] | None = None
        self._said: IO[bytes] | None = None
        self._asker = os.getpid()

    def ask(self, question: Json, timeout_s: float, memory_mib: int) -> Json:
        request = {"question": question, "timeout_s": timeout_s, "memory_bytes": memory_mib << 20}
        try:
            process = self._started()
            assert process.stdin is not None
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            answer = json.loads(self._line(process, timeout_s + _GRACE_S))
        except (OSError, ValueError) as error:
            said = self._end()
            raise ScriptFailed(f"{self._script.name} gave no answer: {said or error}") from error
        except BaseException:  # an interrupt too: what is still to come must not answer the next question
            self._end()
            raise
        if answer.get("ended") == "time":
            raise TookTooLong(f"no answer within {timeout_s:g} s")
        if "answer" not in answer:
            raise ScriptFailed(f"{self._script.name}: a question's process ended with {answer.get('ended')}")
        return dict(answer["answer"])

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._asker != os.getpid():  # a fork of who started it: that copy answers the other
            if self._stop is not None:
                self._stop.detach()
            self._process = self._stop = self._said = None
            self._asker = os.getpid()
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _stop
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(self._script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={"LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for us: it ends when its standard input does
        )
        self._stop = weakref.finalize(self, _stop, process, self._said)
        self._process = process
        try:
            self._line(process, _START_S)
        except (OSError, ValueError) as error:
            raise ScriptFailed(f"{self._script.name} did not start: {self._end() or error}") from error
        return process

    def _end(self) -> str:
        """Stop it, and return the end of what it said on stderr."""
        said = ""
        if self._stop is not None and self._said is not None:
            with contextlib.suppress(ValueError, OSError):
                self._said.seek(0)
                said = self._said.read().decode(errors="replace").strip()[-300:]
            self._stop()
        self._process = self._stop = self._said = None
        return said

    def _line(self, process: "subprocess.Popen[bytes]", timeout_s: float) -> bytes:
        assert process.stdout is not None
        deadline = time.monotonic() + timeout_s
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"nothing within {timeout_s:g} s")
                piece = os.read(process.stdout.fileno(), 65_536)
                if not piece:
                    raise OSError("it ended")
                line += piece
        return line


def _stop(process: "subprocess.Popen[bytes]", said: IO[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # with a fork that may be at work
    process.wait()
    process.stdout.close()
    said.close()
