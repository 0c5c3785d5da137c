"""A service before a stub engine, and what the tests of load say about both."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.conftest import RECORD_ONLY, ROOT, Service


class StubEngine:
    """The process of `stub_engine.py`."""

    def __init__(self, *settings: str) -> None:
        command = [sys.executable, "-m", "tests.load.stub_engine", *settings]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        assert self.url.startswith("http://"), "the stub engine did not start"

    def seen(self) -> dict[str, Any]:
        """`fates` of all requests by id, how many are `in_work`, the `most` at once, ids that came `twice`."""
        seen: dict[str, Any] = httpx.get(f"{self.url}/seen", timeout=30).json()
        return seen

    def gate(self, is_open: bool) -> None:
        """While it is closed nobody gets a token."""
        httpx.post(f"{self.url}/gate", json={"open": is_open}, timeout=30).raise_for_status()

    def forget(self) -> None:
        """Begin the list of requests anew."""
        httpx.post(f"{self.url}/forget", timeout=30).raise_for_status()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[StubEngine]:
    stub = StubEngine()
    yield stub
    stub.end()


@pytest.fixture(scope="module")
def loaded(make_service: Callable[..., Service], shared_engine: StubEngine) -> Iterator[Service]:
    """A service before it, which keeps few turns in memory: after the first rounds it holds as many as it ever does."""
    service = make_service(
        *RECORD_ONLY, "--inference.url", shared_engine.url, "--reef.max-in-flight", "1024",
        "--inference.history-cache-tokens", "20000",
    )  # fmt: skip
    yield service.start()
    service.end()


@pytest.fixture
def engine(shared_engine: StubEngine) -> StubEngine:
    """The engine, which has seen nothing yet."""
    shared_engine.forget()
    return shared_engine


@pytest.fixture
def eventually() -> Callable[..., Any]:
    """`eventually(condition, what)`: its first value that is true."""

    def wait(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (value := condition()):
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
            time.sleep(0.05)
        return value

    return wait
