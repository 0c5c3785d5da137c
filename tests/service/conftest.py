"""What the tests of the HTTP routes share."""

from __future__ import annotations

import itertools
import json
import socket
import sqlite3
import time
from typing import Any

import pytest

_numbers = itertools.count()


@pytest.fixture
def scenario() -> str:
    """A scenario's name that no other test has."""
    return f"scenario-{next(_numbers)}"


@pytest.fixture
def is_error():
    """`is_error(response, 400, param=..., code=..., says=...)`: the one error shape, and nothing else in the body."""

    def check(response, status, *, param=None, code=None, type=None, says="") -> dict[str, Any]:
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        body = response.json()
        assert body.keys() == {"error"}
        error = body["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert says in error["message"]
        assert error["message"] and error["type"] and error["code"]
        if param is not None:
            assert error["param"] == param, error
        if code is not None:
            assert error["code"] == code, error
        if type is not None:
            assert error["type"] == type, error
        return error

    return check


@pytest.fixture
def stored():
    """`stored(service, "SELECT ...", *values)`: rows of a service's ledger, read beside it."""

    def query(service, sql, *values):
        connection = sqlite3.connect(f"file:{service.run_dir / 'ledger.db'}?mode=ro", uri=True)
        try:
            return connection.execute(sql, values).fetchall()
        finally:
            connection.close()

    return query


@pytest.fixture
def eventually():
    """`eventually(condition)`: its first value that is true, within a minute."""

    def wait(condition, timeout_s=60.0):
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.02)
        return value

    return wait


@pytest.fixture
def ask_and_leave(eventually):
    """`ask_and_leave(service, route, body, condition)`: a client that asks, and goes away once the condition holds."""

    def leave(service, route, body, condition):
        content = json.dumps(body).encode()
        address = service.url.removeprefix("http://")
        host, port = address.split(":")
        head = f"POST {route} HTTP/1.1\r\nhost: {address}\r\ncontent-length: {len(content)}\r\n\r\n"
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(head.encode() + content)
            eventually(condition)

    return leave


@pytest.fixture(scope="session")
def attached_recorder(make_service, make_fake_engine):
    """A service that only records, attached by inference.url to an engine that misbehaves on demand: its `.engine`."""
    engine = make_fake_engine()
    service = make_service("--training.backend", "none", "--inference.url", engine.url).start()
    service.engine = engine
    return service


@pytest.fixture
def broken_engine(attached_recorder):
    """The engine of `attached_recorder`; it behaves again after the test."""
    yield attached_recorder.engine
    attached_recorder.engine.answers.clear()
