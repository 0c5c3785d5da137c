"""What the benchmarks share: a service of their own, a table, a place for results."""

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STARTER = ROOT / "recipes" / "arithmetic" / "starter"
RESULTS = ROOT / "work" / "bench"
READY_TIMEOUT_S = 180
STOP_TIMEOUT_S = 60


class Service:
    """`reef serve` on a port that the kernel gives, in a run directory that is removed afterwards."""

    def __init__(self, settings: Sequence[str] = ()) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="reef-bench-")
        self.run_dir = Path(self._directory.name) / "run"
        self._settings = list(settings)
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.started_in_s = 0.0

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the service is not running")
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it is ready."""
        started = time.perf_counter()
        command = [sys.executable, "-m", "reef", "serve", "-c", str(ROOT / "serve.yaml")]
        command += ["--reef.port", "0", "--reef.run-dir", str(self.run_dir), *self._settings]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        while not self._is_ready():
            if self._process.poll() is not None:
                raise RuntimeError(f"the service ended with {self._process.returncode}; logs in {self.run_dir}/logs")
            if time.perf_counter() - started > READY_TIMEOUT_S:
                self.stop()
                raise RuntimeError(f"the service was not ready after {READY_TIMEOUT_S} s")
            time.sleep(0.1)
        self.started_in_s = time.perf_counter() - started

    def stop(self) -> None:
        """End it, by force if need be, and remove its run directory."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._directory.cleanup()

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.load(answer)

    def _is_ready(self) -> bool:
        try:
            self.url = json.loads((self.run_dir / "service.json").read_text())["url"]
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5):
                return True
        except (OSError, json.JSONDecodeError, urllib.error.URLError):
            return False


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, numbers to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [" | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    return "\n".join([lines[0], "-+-".join("-" * width for width in widths), *lines[1:]])


def write(name: str, summary: dict[str, Any]) -> None:
    """Keep a result in work/bench/NAME.json, with the machine it comes from."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "platform": platform.platform()}
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine, **summary}, indent=2) + "\n")
    print(f"(written to {path.relative_to(ROOT)})\n")
