"""The process around the server: its socket, its signals, its parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

BACKLOG = 2048
PARENT_POLL_S = 0.25
STOP_TIMEOUT_S = 1.0
"""How long requests in flight may take to end after a signal: they are aborted, so this is for slow readers."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 lets the kernel choose.

    Raises:
        OSError: the address is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    return host in ("localhost", "::1") or host.startswith("127.")


def announce(listener: socket.socket, port_file: Path | None) -> None:
    """Prints where the server listens and writes the port, whole or not at all, to `port_file`."""
    host, port = listener.getsockname()[:2]
    print(f"listening on http://{host}:{port}", flush=True)
    if port_file is not None:
        partial = port_file.with_name(f".{port_file.name}.{os.getpid()}")
        partial.write_text(f"{port}\n")
        partial.rename(port_file)


def watch_parent(parent_pid: int) -> None:
    """Ends this process when `parent_pid` is no longer its parent.

    Polls instead of PR_SET_PDEATHSIG: that signal comes when the *thread* that started us ends, so a parent that
    starts engines from a worker thread would kill them.
    """

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(2 * STOP_TIMEOUT_S)
        os._exit(1)  # SIGTERM was not enough, and nobody is left to send SIGKILL

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handling, which would end the process by the signal instead of with a status."""

    def __init__(self, app: ASGIApp, log_level: str) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                lifespan="off",
                access_log=False,
                log_level=log_level,
                timeout_keep_alive=120,
                timeout_graceful_shutdown=int(STOP_TIMEOUT_S),
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to `stop_signals`."""
        yield


def stop_signals(loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    return asked
