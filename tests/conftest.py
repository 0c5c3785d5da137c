"""The starter model, the real service as a process, and an engine that misbehaves on demand."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from aiohttp import web
from hypothesis import HealthCheck, settings

from tests import postgres

ROOT = Path(__file__).resolve().parents[1]
STARTER = ROOT / "recipes" / "arithmetic" / "starter"
RECORD_ONLY = ("--training.backend", "none")
OPEN = ("--reef.access", "open")  # most tests are not about keys; those that are say `--reef.access key`
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
KILL_TIMEOUT_S = 60.0
REAP_TIMEOUT_S = 10.0
# With more than 20 connections httpx's pool closes those that rest, also one that another thread was just given:
# "Bad file descriptor".
UNLIMITED = httpx.Limits(max_connections=None, max_keepalive_connections=None)

# The same examples each time (`make soak` draws others), however long they take to draw and to try on a busy machine.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", PATIENT, derandomize=True)
settings.register_profile("others", PATIENT)
settings.load_profile(os.environ.get("REEF_EXAMPLES", "same"))


@pytest.fixture(scope="session")
def starter() -> Path:
    """The small model that comes with the repository."""
    return STARTER


# --- the service as a process -----------------------------------------------------------------------------------------


class Service:
    """`python -m reef serve` in a run directory of its own, on a port of the kernel's. It can be started again."""

    def __init__(self, run_dir: Path, *settings: str, model: Path = STARTER) -> None:
        self.run_dir = run_dir
        self.settings = settings
        self.model = model
        self.url = ""
        self.client = httpx.Client(timeout=60, limits=UNLIMITED)
        self._process: subprocess.Popen[bytes] | None = None
        self._seen: set[psutil.Process] = set()
        self._interrupted = False
        self._output = run_dir.parent / "serve.log"

    def start(self, *more: str, timeout_s: float = READY_TIMEOUT_S) -> Service:
        """Start it and wait until it is ready. `more` settings hold for this start only."""
        self.launch(*more)
        deadline = time.monotonic() + timeout_s
        while not self.is_ready():
            self._look()
            assert self.returncode is None, f"the service ended with {self.returncode}:\n{self.log_tail()}"
            assert time.monotonic() < deadline, f"the service is not ready after {timeout_s} s:\n{self.log_tail()}"
            time.sleep(0.05)
        self._look()
        return self

    def launch(self, *more: str) -> None:
        """Start it and return at once."""
        assert self.returncode is not None or self._process is None, "it runs already"
        self.run_dir.mkdir(parents=True, exist_ok=True)
        (self.run_dir / "service.json").unlink(missing_ok=True)
        empty = self.run_dir.parent / "serve.yaml"
        empty.touch()
        command = [sys.executable, "-m", "reef", "serve", "-c", str(empty), "--reef.run-dir", str(self.run_dir)]
        command += ["--reef.port", "0", "--inference.model-path", str(self.model), *OPEN, *self.settings, *more]
        with self._output.open("ab") as output:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        self._interrupted = False

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status; None while it runs."""
        return None if self._process is None else self._process.poll()

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """The exit status, once it has ended by itself."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def interrupt(self) -> None:
        """Ctrl-C, once: a second one would make it leave at once."""
        self._look()
        if self._process is not None and self.returncode is None and not self._interrupted:
            self._interrupted = True
            self._process.send_signal(signal.SIGINT)

    def stop(self) -> int:
        """Ctrl-C. The exit status, and every process it had started has ended."""
        self.interrupt()
        status = self.wait()
        _, alive = psutil.wait_procs(self._seen, timeout=KILL_TIMEOUT_S)
        assert not alive, f"still running after the service has ended: {alive}"
        return status

    def kill_9(self) -> None:
        """kill -9 of the service alone: what it had started is left to end by itself, or to the next start."""
        assert self._process is not None
        self._look()
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Whatever happened before: nothing of it runs any more."""
        if self._process is not None:
            self.interrupt()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
                psutil.wait_procs(self._seen, timeout=REAP_TIMEOUT_S)  # its reapers remove its directories
            self._look()
            # psutil signals one that it knows has ended without a look at whose number it is by now: a thread of ours.
            for process in [process for process in self._seen if process.is_running()]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            psutil.wait_procs(self._seen, timeout=KILL_TIMEOUT_S)
        self.client.close()

    def processes(self) -> list[psutil.Process]:
        """Everything it has started that still runs."""
        self._look()
        return [process for process in self._seen if process.is_running()]

    def named(self, name: str) -> list[psutil.Process]:
        """Those of them with this in their command. One that ends meanwhile has none."""
        found = []
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                if name in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def log_tail(self, num_lines: int = 40) -> str:
        """The end of what it printed, of its log and of the engine's."""
        parts = []
        for path in (self._output, self.run_dir / "logs" / "reef.log", self.run_dir / "logs" / "engine-0.log"):
            lines = path.read_text(errors="replace").splitlines()[-num_lines:] if path.exists() else ["(none)"]
            parts.append("\n".join([f"--- {path.name}", *lines]))
        return "\n".join(parts)

    # HTTP, for tests that read better without the URL.

    def get(self, route: str, **options: Any) -> httpx.Response:
        return self.client.get(self.url + route, **options)

    def post(self, route: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.client.post(self.url + route, json=body, **options)

    def chat(self, text: str = "2+3=", *, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        """POST /v1/chat/completions with one user message."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 16, **fields}
        return self.post("/v1/chat/completions", body, headers=headers)

    def complete(self, prompt: Any = "2+3=", *, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        """POST /v1/completions."""
        return self.post("/v1/completions", {"prompt": prompt, "max_tokens": 16, **fields}, headers=headers)

    @contextmanager
    def streaming(self, route: str, **body: Any) -> Iterator[Iterator[dict[str, Any]]]:
        """The chunks of a streamed answer as they come; the last line must be [DONE]. Left early, it disconnects."""
        with self.client.stream("POST", self.url + route, json={"stream": True, **body}) as response:
            if response.status_code != 200:
                response.read()
            assert response.status_code == 200, response.text
            assert response.headers["content-type"].startswith("text/event-stream")
            yield _chunks(response)

    def stream(self, route: str = "/v1/chat/completions", **body: Any) -> list[dict[str, Any]]:
        """All chunks of a streamed answer."""
        with self.streaming(route, **body) as chunks:
            return list(chunks)

    def receipt(self, receipt_id: str) -> dict[str, Any]:
        response = self.get(f"/reef/receipts/{receipt_id}")
        assert response.status_code == 200, response.text
        receipt: dict[str, Any] = response.json()
        return receipt

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.get("/reef/status").json()
        return status

    def is_ready(self) -> bool:
        """Whether it answers by now; `url` is where."""
        try:
            announced = json.loads((self.run_dir / "service.json").read_text())
            if announced["pid"] != self.pid:
                return False
            self.url = announced["url"]
            return self.client.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except (FileNotFoundError, ValueError, httpx.HTTPError):
            return False

    def _look(self) -> None:
        """Remember its descendants: one whose parent has died could not be found any more."""
        if self._process is not None:
            with suppress(psutil.NoSuchProcess):
                self._seen.update(psutil.Process(self._process.pid).children(recursive=True))


def _chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    last = ""
    for line in response.iter_lines():
        if line:
            assert line.startswith("data: "), line
            assert last != "[DONE]", f"something came after [DONE]: {line}"
            last = line.removeprefix("data: ")
            if last != "[DONE]":
                yield json.loads(last)
    assert last == "[DONE]", f"the stream ended with {last}"


MakeService = Callable[..., Service]


@pytest.fixture(scope="session")
def make_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeService]:
    """`make_service(*settings, model=...)` gives a Service that is not started yet; all end with the session."""
    made: list[Service] = []

    def make(*settings: str, model: Path = STARTER) -> Service:
        made.append(Service(tmp_path_factory.mktemp("a service") / "run", *settings, model=model))
        return made[-1]

    yield make
    for service in made:
        service.interrupt()
    for service in made:
        service.end()


@pytest.fixture(scope="session")
def recorder(make_service: MakeService) -> Service:
    """A service that only records: the embedded engine, no trainer. Shared: a test brings its own scenario."""
    return make_service(*RECORD_ONLY).start()


@pytest.fixture(scope="session")
def tool_recorder(make_service: MakeService, tmp_path_factory: pytest.TempPathFactory) -> Service:
    """As `recorder`, with a chat template that shows the model its tools (the starter's shows none)."""
    model = shutil.copytree(STARTER, tmp_path_factory.mktemp("model") / "starter")
    template = model / "chat_template.jinja"
    shown = "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    template.write_text(shown + template.read_text())
    return make_service(*RECORD_ONLY, model=model).start()


@pytest.fixture(scope="session")
def qwen3(
    make_service: MakeService, make_fake_engine: Callable[..., FakeEngine], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Service, FakeEngine]:
    """A service that only records, before an engine that a test has speak as Qwen3 does (`tests/service/says.py`)."""
    from tests.chat.styles import make_model

    engine = make_fake_engine()
    engine.answers["/model_info"] = lambda *_: {"weight_version": engine.version, "context_length": 8192, "build": "x"}
    model = make_model(STARTER, tmp_path_factory.mktemp("model") / "qwen3", "qwen3")
    return make_service("--training.backend", "none", "--inference.url", engine.url, model=model).start(), engine


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows the logs of the services it used."""
    report = yield
    if report.failed:
        for name, value in getattr(item, "funcargs", {}).items():
            if isinstance(value, Service):
                report.sections.append((f"log of {name}", value.log_tail()))
    return report


# --- an engine that misbehaves on demand ------------------------------------------------------------------------------

FakeAnswer = Callable[[web.Request, Any], Any]


class FakeEngine:
    """SGLang's native API over loopback, with canned answers; `answers[route]` replaces one.

    An answer is called with the request and its JSON, may be a coroutine, and gives JSON values or a response.
    """

    def __init__(self, version: str = "v0") -> None:
        self.version = version
        self.answers: dict[str, FakeAnswer] = {}
        self.calls: list[tuple[str, Any]] = []
        self.cancelled = threading.Event()
        """Set when a client has gone before its answer was complete."""
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()
        assert self._started.wait(60)

    def stop(self) -> None:
        with suppress(RuntimeError):  # its loop is closed: it has ended by itself
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(10)

    def generation(self, ids: list[int], **meta: Any) -> dict[str, Any]:
        """A right answer; fields of meta_info by name."""
        entries = [[-0.5 - i, token, None] for i, token in enumerate(ids)]
        common = {
            "id": "fake",
            "finish_reason": {"type": "stop", "matched": 2},
            "completion_tokens": len(ids),
            "weight_version": self.version,
            "output_token_logprobs": entries,
        }
        return {"text": "", "output_ids": ids, "meta_info": {**common, **meta}}

    def events(self, *events: Any, done: bool = True) -> FakeAnswer:
        """A streamed answer: each event JSON values, or bytes as they are."""

        async def answer(request: web.Request, _body: Any) -> web.StreamResponse:
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            for event in events:
                line = event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n"
                await response.write(line)
            if done:
                await response.write(b"data: [DONE]\n\n")
            return response

        return answer

    async def never(self, _request: web.Request, _body: Any) -> Any:
        """An answer that does not come."""
        try:
            await asyncio.sleep(3600)
        finally:
            self.cancelled.set()

    def _default(self, route: str, body: Any) -> Any:
        if route == "/generate":
            if body["sampling_params"]["max_new_tokens"] == 0:  # it scores its prompt, each token at -1
                entries = [[None if i == 0 else -1.0, token, None] for i, token in enumerate(body["input_ids"])]
                length = {"type": "length", "length": 0}
                return self.generation([], input_token_logprobs=entries, finish_reason=length)
            return self.generation([5, 6, 2])
        if route == "/model_info":
            return {"weight_version": self.version, "context_length": 512, "build": "fake"}
        if route == "/update_weights_from_disk":
            self.version = body["weight_version"]
            return {"success": True, "message": "ok", "num_paused_requests": 0}
        return {}

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.calls.append((request.path, body))
        answer = self.answers.get(request.path)
        if answer is None:
            content = self._default(request.path, body)
        else:
            content = answer(request, body)
            if asyncio.iscoroutine(content):
                content = await content
        return content if isinstance(content, web.StreamResponse) else web.json_response(content)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # answers that do not come are ended with it
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._ended = asyncio.Event()
        app = web.Application(client_max_size=64 * 2**20)
        app.router.add_route("*", "/{route:.*}", self._answer)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._started.set()
        await self._ended.wait()
        await runner.cleanup()


@pytest.fixture(scope="session")
def make_fake_engine() -> Iterator[Callable[..., FakeEngine]]:
    """`make_fake_engine(version)` starts one more; all end with the session."""
    made: list[FakeEngine] = []

    def make(version: str = "v0") -> FakeEngine:
        made.append(FakeEngine(version))
        return made[-1]

    yield make
    for engine in made:
        engine.stop()


@pytest.fixture
def fake_engine(make_fake_engine: Callable[..., FakeEngine]) -> Iterator[FakeEngine]:
    """One engine that misbehaves on demand."""
    engine = make_fake_engine()
    yield engine
    engine.stop()


# --- a PostgreSQL server ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.PostgresServer]:
    """A PostgreSQL server of this session's own; a test makes its own database."""
    if postgres.BINARIES is None:
        pytest.skip(postgres.MISSING)
    server = postgres.PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.remove()
