"""What a service holds: seen from outside (its process) and as it says itself."""

from __future__ import annotations

import re
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from tests.conftest import Service


@dataclass(frozen=True, slots=True)
class Held:
    """Counts at a quiet moment."""

    clients: int  # connections to its port
    to_engine: int  # connections that it keeps to its engine
    other_fds: int
    threads: int
    tasks: int  # asyncio
    blocks: int  # of memory, by Python's objects
    rss_bytes: int


def look(service: Service, engine_url: str) -> Held:
    """What it holds right now, less the connection by which this is asked."""
    metrics = metrics_of(service)
    process = psutil.Process(service.pid)
    port, engine_port = urlsplit(service.url).port, urlsplit(engine_url).port
    connections = process.net_connections("tcp")
    clients = sum(c.laddr.port == port and c.status != psutil.CONN_LISTEN for c in connections)
    to_engine = sum(bool(c.raddr) and c.raddr.port == engine_port for c in connections)
    num_fds = sum(1 for _ in Path(f"/proc/{service.pid}/fd").iterdir())
    return Held(
        clients=clients - 1,
        to_engine=to_engine,
        other_fds=num_fds - clients - to_engine,
        threads=process.num_threads(),
        tasks=int(metrics["reef_asyncio_tasks"]),
        blocks=int(metrics["reef_python_memory_blocks"]),
        rss_bytes=process.memory_info().rss,
    )


def tasks_at_rest(service: Service, engine_url: str) -> int:
    """Its tasks while it has no work: the fewest of some looks, for what runs now and then."""
    return min(look(service, engine_url).tasks for _ in range(10))


def metrics_of(service: Service) -> dict[str, float]:
    """Every line of /metrics, by name and labels."""
    lines = re.findall(r"^([a-z_]+(?:\{[^}]*\})?) (\S+)$", service.get("/metrics").text, re.MULTILINE)
    return {name: float(value) for name, value in lines}


def receipts_of(service: Service) -> dict[str, tuple[str, str]]:
    """All receipts of its ledger: id -> (its request, finish reason)."""
    rows = rows_of(service, "SELECT id, request_id, finish_reason FROM receipts")
    return {id: (request_id, reason) for id, request_id, reason in rows}


def rows_of(service: Service, sql: str) -> list[tuple]:
    """Rows of its ledger, read beside it."""
    connection = sqlite3.connect(f"file:{service.run_dir / 'ledger.db'}?mode=ro", uri=True)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()
