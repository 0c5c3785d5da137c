"""The demo's way of running the service: it waits until ready, says why not, and leaves no process behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from recipes.arithmetic import service
from recipes.arithmetic.service import ROOT, ServiceFailed, answers, running_service, service_url

pytestmark = pytest.mark.slow  # engines and services of its own

# A stand-in for `reef`: ready at the second question; with a grandchild in a session of its own, as Ray has them.
STAND_IN = textwrap.dedent("""
    import json, os, pathlib, signal, subprocess, sys, time
    from http.server import BaseHTTPRequestHandler, HTTPServer

    mode, command = sys.argv[1], sys.argv[2:]
    run_dir = pathlib.Path(command[command.index("--reef.run-dir") + 1])
    run_dir.mkdir(parents=True, exist_ok=True)
    if mode == "fails":
        sys.exit("the model is missing")
    if mode == "deaf":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            ready = len(asked) > 1 and mode != "never"
            body = json.dumps({} if ready else {"waiting_for": "the trainer"}).encode()
            self.send_response(200 if ready else 503)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    url = f"http://127.0.0.1:{server.server_address[1]}"
    (run_dir / "service.json").write_text(json.dumps({"url": url, "pid": os.getpid(), "child": child.pid}))
    server.serve_forever()
""")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "a path with spaces"
    made.mkdir()
    (made / "stand_in.py").write_text(STAND_IN)
    yield made


def program(folder: Path, mode: str) -> tuple[str, ...]:
    return (sys.executable, str(folder / "stand_in.py"), mode)


def alive(folder: Path) -> list[bool]:
    """Whether the stand-in and its grandchild run; a zombie that nobody has waited for yet does not."""
    announced = json.loads((folder / "run" / "service.json").read_text())

    def runs(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    return [runs(announced["pid"]), runs(announced["child"])]


@pytest.mark.parametrize("mode", ["good", "deaf"])
def test_the_service_is_ready_inside_the_block_and_gone_with_its_children_after(folder: Path, mode: str) -> None:
    said: list[str] = []
    patience_s = (0.5, 0.2) if mode == "deaf" else (60, 60)
    with running_service(
        Path("serve.yaml"), folder / "run", program=program(folder, mode), patience_s=patience_s, say=said.append
    ) as url:
        assert answers(url)
        assert service_url(folder / "run" / "service.json") == url
        assert alive(folder) == [True, True]
        assert (folder / "serve.log").stat().st_mode & 0o777 == 0o600  # the service prints its key
    assert alive(folder) == [False, False]
    assert not answers(url)
    assert any("waiting for the trainer" in line for line in said)
    assert any("did not stop" in line for line in said) is (mode == "deaf")


def test_everything_ends_when_the_block_fails(folder: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        running_service(Path("serve.yaml"), folder / "run", program=program(folder, "good"), say=lambda line: None),
    ):
        raise ZeroDivisionError
    assert alive(folder) == [False, False]


def test_a_service_that_ends_early_shows_the_end_of_its_log(folder: Path) -> None:
    with (
        pytest.raises(ServiceFailed, match=r"ended with status 1 before it was ready(.|\n)*the model is missing"),
        running_service(Path("serve.yaml"), folder / "run", program=program(folder, "fails")),
    ):
        pass


def test_a_service_that_never_gets_ready_is_given_up_and_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now, sleep=time.sleep)
    monkeypatch.setattr(service, "time", clock)

    def say(line: str) -> None:
        if "waiting for the trainer" in line:  # the time begins to pass once it is up
            clock.now += 5.0

    with (
        pytest.raises(ServiceFailed, match=r"not ready after 4 s; it waits for the trainer"),
        running_service(
            Path("serve.yaml"),
            folder / "run",
            program=program(folder, "never"),
            ready_timeout_s=4.0,
            say=say,
        ),
    ):
        pass
    assert alive(folder) == [False, False]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_demo_ends_the_service_too(folder: Path, number: signal.Signals) -> None:
    script = textwrap.dedent(f"""
        import pathlib, signal, sys, time
        from recipes.arithmetic.demo import _terminate
        from recipes.arithmetic.service import running_service
        signal.signal(signal.SIGTERM, _terminate)
        with running_service(pathlib.Path("serve.yaml"), pathlib.Path({str(folder / "run")!r}),
                             program={program(folder, "good")!r}):
            print("inside", flush=True)
            time.sleep(600)
    """)
    path = os.pathsep.join([str(ROOT), str(ROOT / "harness")])
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as demo:
        assert demo.stdout is not None
        while demo.stdout.readline() != "inside\n":
            assert demo.poll() is None
        demo.send_signal(number)
        assert demo.wait(120) != 0
    assert alive(folder) == [False, False]
