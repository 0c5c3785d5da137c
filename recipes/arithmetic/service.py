"""Start ``reef serve`` as a process of our own, wait until it is ready, and end it and all it started."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[2]  # where serve.yaml is; relative paths in it start here
REEF = (sys.executable, "-m", "reef")


class ServiceFailed(RuntimeError):  # noqa: N818
    """The service ended or did not get ready in time; the message has the end of its log."""


@contextmanager
def running_service(
    config: Path,
    run_dir: Path,
    flags: Sequence[str] = (),
    *,
    program: Sequence[str] = REEF,
    ready_timeout_s: float = 300.0,
    patience_s: tuple[float, float] = (30.0, 10.0),
    say: Callable[[str], None] = print,
) -> Iterator[str]:
    """Serve ``config`` from ``run_dir`` on a free port; yield the URL once ready. Its log is serve.log beside run_dir.

    Only we may read that log: the service prints its key when it makes one.

    The service gets a session of its own, so that Ctrl-C reaches it only through us. However the block ends, it is
    asked to stop (SIGINT, then SIGTERM, ``patience_s`` after each), and whatever is still alive of it or its
    descendants is killed. Raises ServiceFailed when it does not come up.
    """
    log_path = run_dir.parent / "serve.log"
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    announced = run_dir / "service.json"
    announced.unlink(missing_ok=True)
    command = [*program, "serve", "-c", str(config), "--reef.run-dir", str(run_dir), "--reef.port", "0", *flags]
    log_path.unlink(missing_ok=True)
    with open(log_path, "wb", opener=partial(os.open, mode=0o600)) as log:
        process = _Process(command, log)
        try:
            yield _wait_until_ready(process, announced, log_path, ready_timeout_s, say)
        finally:
            process.end(patience_s, say)


class _Process:
    """The service's process and, as far as seen, its descendants (Ray puts some of them outside its session)."""

    def __init__(self, command: Sequence[str], log: IO[bytes]) -> None:
        self.popen = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._seen: set[psutil.Process] = set()

    def look(self) -> None:
        """Remember the descendants there are now: one whose parent dies could not be found any more."""
        with suppress(psutil.NoSuchProcess):
            self._seen.update(psutil.Process(self.popen.pid).children(recursive=True))

    def end(self, patience_s: tuple[float, float], say: Callable[[str], None]) -> None:
        """Ask the service to stop, wait, and kill what is left. A Ctrl-C meanwhile kills at once."""
        try:
            self.look()
            for number, wait_s in zip((signal.SIGINT, signal.SIGTERM), patience_s, strict=True):
                if self.popen.poll() is not None:
                    break
                self.popen.send_signal(number)
                try:
                    self.popen.wait(wait_s)
                except subprocess.TimeoutExpired:
                    say(f"the service did not stop within {wait_s:.0f} s of {number.name}")
        finally:
            self._kill()

    def _kill(self) -> None:
        self.look()
        for process in self._seen:
            with suppress(psutil.NoSuchProcess):
                process.kill()  # psutil refuses where the id now belongs to another process
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        psutil.wait_procs(self._seen, timeout=5)


def _wait_until_ready(
    process: _Process, announced: Path, log_path: Path, timeout_s: float, say: Callable[[str], None]
) -> str:
    started = time.monotonic()
    said = ""
    while time.monotonic() - started < timeout_s:
        process.look()
        if process.popen.poll() is not None:
            raise ServiceFailed(
                f"the service ended with status {process.popen.returncode} before it was ready. "
                f"The end of {log_path}:\n{_tail(log_path)}"
            )
        url = service_url(announced)
        waits_for = _waits_for(url) if url else "the service's process"
        if url and waits_for is None:
            say(f"  ready after {time.monotonic() - started:.0f} s at {url}")
            return url
        if waits_for and waits_for != said:
            said = waits_for
            say(f"  {time.monotonic() - started:3.0f} s  waiting for {waits_for}")
        time.sleep(0.2)
    raise ServiceFailed(
        f"the service was not ready after {timeout_s:.0f} s; it waits for {said}. "
        f"The end of {log_path}:\n{_tail(log_path)}"
    )


def service_url(announced: Path) -> str | None:
    """The URL in a run directory's service.json, or None while there is none."""
    try:
        return str(json.loads(announced.read_text())["url"])
    except (FileNotFoundError, ValueError, KeyError):
        return None


def answers(url: str) -> bool:
    """Whether a service is alive at ``url``."""
    try:
        return httpx.get(f"{url}/healthz", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _waits_for(url: str) -> str | None:
    """What the service says it waits for; None when it is ready."""
    try:
        response = httpx.get(f"{url}/readyz", timeout=5, trust_env=False)
    except httpx.HTTPError:
        return "the service to answer"
    if response.status_code == 200:
        return None
    try:
        body = response.json()
    except ValueError:
        return response.text.strip() or f"readiness (HTTP {response.status_code})"
    return str(body.get("waiting_for") or body.get("error") or body)


def _tail(path: Path, lines: int = 25) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
