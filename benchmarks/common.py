"""What the benchmarks share: a service of their own, a table, a place for results."""

import asyncio
import json
import os
import platform
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from recipes.arithmetic.service import running_service

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
STARTER = ROOT / "recipes" / "arithmetic" / "starter"
RESULTS = ROOT / "work" / "bench"
OPEN = ("--reef.access", "open")


@contextmanager
def service(flags: Sequence[str] = ()) -> Iterator["Running"]:
    """`reef serve` with serve.yaml and `flags`, in a run directory that is removed afterwards; it asks for no key."""
    with tempfile.TemporaryDirectory(prefix="reef-bench-") as directory:
        run_dir = Path(directory) / "run"
        started = time.perf_counter()
        with running_service(ROOT / "serve.yaml", run_dir, [*OPEN, *flags], say=lambda _text: None) as url:
            ready_in_s = time.perf_counter() - started
            pid = json.loads((run_dir / "service.json").read_text())["pid"]
            yield Running(url, pid, run_dir, ready_in_s)


@dataclass(frozen=True, slots=True)
class Running:
    """A service that is ready."""

    url: str
    pid: int
    run_dir: Path
    ready_in_s: float


@asynccontextmanager
async def in_thread(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """A blocking context manager, entered and left without blocking the event loop."""
    value = await asyncio.to_thread(manager.__enter__)
    try:
        yield value
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)


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
