"""Processes that a service started, written down so that the next owner of the run directory can end those it left."""

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from reef.observe import log

KILL_TIMEOUT_S = 5
_FILE = "processes.json"


def record(run_dir: Path, pids: Iterable[int]) -> None:
    """Write down the pids with their start times (a pid alone may be someone else's by then)."""
    entries = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            entries.append({"pid": pid, "started_at": psutil.Process(pid).create_time()})
    write_json(run_dir / _FILE, entries)


def write_json(path: Path, value: Any) -> None:
    """Write a small file that others read at any moment: they see the old one or the new one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)


def reap(run_dir: Path) -> int:
    """End what the last owner left running, children too; the number of processes ended."""
    try:
        entries = json.loads((run_dir / _FILE).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return 0
    found: list[psutil.Process] = []
    for entry in entries:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(entry["pid"])
            if abs(process.create_time() - entry["started_at"]) < 1.0:
                found += [process, *process.children(recursive=True)]
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            log.warning("ending left-over process %s (%s)", process.pid, process.name())
            process.kill()
    psutil.wait_procs(found, timeout=KILL_TIMEOUT_S)
    (run_dir / _FILE).unlink()
    return len(found)
