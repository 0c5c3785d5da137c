"""One process, watched: bounded in time and output, and gone with all its group when this returns."""

import contextlib
import os
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Ended = Literal["exit", "time", "output"]


@dataclass(frozen=True, slots=True)
class Finished:
    """How it ended: by itself ("exit"), or killed for its ``time`` or ``output``. ``code`` is below 0 for a signal."""

    ended: Ended
    code: int
    stdout: bytes
    stderr: bytes


def run(
    argv: Sequence[str],
    stdin: bytes,
    *,
    wall_s: float,
    output_bytes: int,
    cwd: Path,
    env: Mapping[str, str],
    pass_fds: Sequence[int] = (),
    user: int | None = None,
) -> Finished:
    """Run ``argv`` to its end, at most ``wall_s`` seconds and ``output_bytes`` on stdout and stderr each.

    ``user`` is whom to start it as, for a root only. Whatever is left of its process group is killed at the end,
    however that comes. Raises OSError where it cannot be started.
    """
    with tempfile.TemporaryFile() as given:
        given.write(stdin)
        given.seek(0)
        process = subprocess.Popen(
            argv,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env=env,
            pass_fds=pass_fds,
            start_new_session=True,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
    with process:
        try:
            ended, stdout, stderr = _watch(process, time.monotonic() + wall_s, output_bytes)
        finally:
            # The leader is not waited for yet, so its id, and with it the group's, cannot be another's by now.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    return Finished(ended, code, stdout, stderr)


def _watch(process: "subprocess.Popen[bytes]", deadline: float, output_bytes: int) -> tuple[Ended, bytes, bytes]:
    """Read both pipes until the leader has exited; what its children still hold open is not waited for."""
    assert process.stdout is not None
    assert process.stderr is not None
    pipes = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    over = os.pidfd_open(process.pid)
    try:
        ended = _read(pipes, over, deadline, output_bytes)
    finally:
        os.close(over)
    out, err = (bytes(read[:output_bytes]) for read in pipes.values())
    return ended, out, err


def _read(pipes: dict[int, bytearray], over: int, deadline: float, output_bytes: int) -> Ended:
    with selectors.DefaultSelector() as selector:
        selector.register(over, selectors.EVENT_READ)
        for pipe in pipes:
            os.set_blocking(pipe, False)
            selector.register(pipe, selectors.EVENT_READ)
        while True:
            if (left_s := deadline - time.monotonic()) <= 0:
                return "time"
            ready = [key.fd for key, _ in selector.select(left_s)]
            for pipe in pipes if over in ready else [fd for fd in ready if fd != over]:
                if not _drain(pipe, pipes[pipe], output_bytes):
                    selector.unregister(pipe) if pipe in selector.get_map() else None
                if len(pipes[pipe]) > output_bytes:
                    return "output"
            if over in ready:
                return "exit"


def _drain(pipe: int, into: bytearray, limit: int) -> bool:
    """Read what is there, little more than ``limit`` in all; False at the end of the pipe."""
    while len(into) <= limit:
        try:
            piece = os.read(pipe, 65_536)
        except BlockingIOError:
            return True
        if not piece:
            return False
        into += piece
    return True
