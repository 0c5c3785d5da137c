"""Reads what wandb wrote, and stands in for its server: takes what `wandb sync` or an online run sends."""

from __future__ import annotations

import gzip
import json
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BLOCK = 32768
HEADER = 7  # of the file, and of each piece of a record
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
KEY = "a" * 40  # has the looks of one


def records(path: Path) -> Iterator[Any]:
    """The whole records of a run's file, which is a log as LevelDB writes it: a record may lie over several blocks."""
    from wandb.proto import wandb_internal_pb2

    data, at, begun = path.read_bytes(), HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:  # no room for a header: the rest of the block is empty
            at += BLOCK - at % BLOCK
            continue
        _checksum, length, kind = struct.unpack_from("<IHB", data, at)
        piece = data[at + HEADER : at + HEADER + length]
        if kind not in (FULL, FIRST, MIDDLE, LAST) or len(piece) < length:
            return  # not written whole
        at += HEADER + length
        begun = piece if kind in (FULL, FIRST) else begun + piece
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(begun)
            yield record


def files(directory: Path) -> list[Path]:
    """The runs' files under a directory, the oldest first."""
    return sorted(directory.rglob("*.wandb"), key=lambda path: path.stat().st_mtime_ns)


def rows(path: Path) -> list[dict[str, Any]]:
    """What was logged, in its order."""
    found = [record.history.item for record in records(path) if record.HasField("history")]
    return [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in row} for row in found]


def run_of(path: Path) -> Any:
    """The record that says which run this is."""
    return next(record.run for record in records(path) if record.HasField("run"))


class Server:
    """What wandb's server would hold: runs by id, with their rows."""

    def __init__(self) -> None:
        self.runs: dict[str, list[dict[str, Any]]] = {}
        self.url = ""

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """To a GraphQL request."""
        name = variables.get("name") or ""
        entity = {"id": "e", "name": "somebody"}
        if operation == "RunResumeStatus":
            return {"model": {"id": "p", "name": "reef", "entity": entity, "bucket": self._bucket(name)}}
        if operation == "UpsertBucket":
            inserted = name not in self.runs
            self.runs.setdefault(name, [])
            project = {"id": "p", "name": "reef", "entity": entity}
            bucket = {**(self._bucket(name) or {}), "description": None, "sweepName": None, "project": project}
            return {"upsertBucket": {"inserted": inserted, "bucket": bucket}}
        if operation == "CreateRunFiles":
            return {"createRunFiles": {"runID": "r", "uploadHeaders": [], "files": []}}
        return {}

    def take(self, run_id: str, offset: int, lines: list[str]) -> None:
        """Rows of a run, to be put at a place in it."""
        self.runs[run_id][offset:] = [json.loads(line) for line in lines]

    def _bucket(self, name: str) -> dict[str, Any] | None:
        if name not in self.runs:
            return None
        rows = self.runs[name]
        nothing = {"logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]", "config": "{}", "tags": []}
        history = {"historyLineCount": len(rows), "historyTail": json.dumps([json.dumps(row) for row in rows[-1:]])}
        summary = json.dumps(rows[-1] if rows else {})
        told = {"summaryMetrics": summary, "wandbConfig": '{"t": 1}'}
        return {"id": "r", "name": name, "displayName": name, **nothing, **history, **told}


@contextmanager
def serving() -> Iterator[Server]:
    """A `Server` on a port of loopback."""
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_args: Any) -> None:
            """Nothing on the terminal."""

        def do_GET(self) -> None:
            self._send({})

        def do_POST(self) -> None:
            size = int(self.headers.get("content-length") or 0)
            body = self.rfile.read(size)
            told = json.loads(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            if self.path.endswith("/graphql"):
                self._send({"data": server.answer(told.get("operationName") or "", told.get("variables") or {})})
            else:
                history = (told.get("files") or {}).get("wandb-history.jsonl")
                if history:
                    server.take(self.path.split("/")[-2], history["offset"], history["content"])
                self._send({"exitcode": None, "limits": {}})

        def _send(self, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    server.url = f"http://127.0.0.1:{listener.server_port}"
    try:
        yield server
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()
