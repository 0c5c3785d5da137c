"""A service with a key and small limits, whose engine says what a test tells it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from aiohttp import web

from tests.chat.styles import make_model
from tests.conftest import Service
from tests.service.says import Says

KEY = "a-key-for-tests"
LIMITS = ("--reef.max-in-flight", "1", "--inference.pause-wait-s", "0.1")


@dataclass
class Guarded:
    """`says("text")` is what the model answers; see `Says`."""

    says: Says

    @property
    def service(self) -> Service:
        return self.says.service

    @property
    def url(self) -> str:
        return self.service.url

    def post(self, body: dict, key: str = KEY) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        return self.service.post("/v1/chat/completions", body, headers=headers)

    def receipt(self, receipt_id: str) -> dict:
        response = self.service.get(f"/reef/receipts/{receipt_id}", headers={"authorization": f"Bearer {KEY}"})
        assert response.status_code == 200, response.text
        return response.json()

    @contextmanager
    def full(self) -> Iterator[threading.Event]:
        """While it has as many requests in work as it takes: until the block ends, or the event is set."""
        engine, release = self.says.engine, threading.Event()
        says = engine.answers["/generate"]

        async def later(request: web.Request, body: dict) -> object:
            while not release.is_set():
                await asyncio.sleep(0.01)
            return await says(request, body)

        engine.answers["/generate"] = later
        num_before = len(engine.calls)
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(self.post, {"messages": [{"role": "user", "content": "1"}]})
            while not any(route == "/generate" for route, _ in engine.calls[num_before:]):
                time.sleep(0.01)
            try:
                yield release
            finally:
                release.set()
                assert asking.result(60).status_code == 200
                engine.answers["/generate"] = says

    def when_refused(self, action: Callable[[], None]) -> threading.Thread:
        """Do something once it has refused one more request."""
        before = self._num_refused()

        def watch() -> None:
            while self._num_refused() == before:
                time.sleep(0.05)
            action()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        return thread

    def _num_refused(self) -> float:
        lines = self.service.get("/metrics", headers={"authorization": f"Bearer {KEY}"}).text.splitlines()
        counts = [line for line in lines if line.startswith("reef_http_requests_total") and 'status="429"' in line]
        return sum(float(line.rpartition(" ")[2]) for line in counts)

    @contextmanager
    def without_engine(self) -> Iterator[None]:
        """While its engine is away."""
        engine = self.says.engine
        engine.answers["/model_info"] = lambda *_: web.Response(status=500, text="down")
        try:
            self._wait(503)
            yield
        finally:
            del engine.answers["/model_info"]

    def _wait(self, status: int) -> None:
        deadline = time.monotonic() + 90
        while self.post({"messages": [{"role": "user", "content": "1"}]}).status_code != status:
            assert time.monotonic() < deadline, f"no {status} came in time"
            time.sleep(0.1)


def make(make_service, make_fake_engine, starter, directory) -> Guarded:
    """Started; it speaks like Qwen3."""
    engine = make_fake_engine()
    model = make_model(starter, directory / "qwen3", "qwen3")
    settings = ("--training.backend", "none", "--inference.url", engine.url)
    service = make_service(*settings, *LIMITS, "--reef.access", "key", "--reef.token", KEY, model=model)
    return Guarded(Says(service.start(), engine, "qwen3"))
