"""EngineHost as a supervisor: servers that end, hang, leave children or lose their port, as small programs in the
place of the embedded engine; and that engine itself, under a process that is killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import reef.engines.host as module
from reef.engines.host import EngineHost
from reef.errors import EngineError
from tests.engines.conftest import pass_time

pytestmark = pytest.mark.slow  # processes, and time that passes

GONE_S = 60.0
OWNER = Path(__file__).parent / "owner.py"
# A server leaves its pid and a child's, so that a test knows both.
CHILD = "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
KNOWN = CHILD + "import os; print('pids', os.getpid(), child.pid, flush=True)\n"
UP = "open({ready!r}, 'w').close()\n"
SLEEP = "import time; time.sleep(600)\n"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


class Program:
    """A Python program as a server: it is up once it has made the file `ready`."""

    title = "a program"
    environment: dict[str, str] = {}  # noqa: RUF012 (nobody changes it)
    script = ""
    directories: list[Path]

    def __init__(self, _config: Any, _name: str, _model: str, _version: str, directory: Path, *_site: Any) -> None:
        type(self).directories.append(directory)
        self._ready = directory / "ready"
        self.command = [sys.executable, "-c", self.script.format(ready=str(self._ready))]

    async def url(self) -> str | None:
        return "http://127.0.0.1:1" if self._ready.exists() else None

    def port_was_taken(self, output: str) -> bool:
        return "address already in use" in output

    async def close(self) -> None: ...


@pytest.fixture
def run(tmp_path: Path, config: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`run(script, work)`: `await work(host)` with a host that starts this program; nothing of it is left then."""

    def run(script: str, work: Callable[[EngineHost], Any]) -> None:
        made = type("Made", (Program,), {"script": script, "directories": []})
        monkeypatch.setitem(module.LAUNCHES, "embedded", made)

        async def main() -> None:
            host = EngineHost(config(tmp_path), "engine-0")
            try:
                await work(host)
            finally:
                await host.stop()

        asyncio.run(main())
        assert made.directories
        assert not [directory for directory in made.directories if directory.exists()]

    return run


def pids(tmp_path: Path) -> list[int]:
    """Those that the program of this test has printed last."""
    lines = (tmp_path / "run" / "logs" / "engine-0.log").read_text().splitlines()
    return [int(word) for word in [line for line in lines if line.startswith("pids")][-1].split()[1:]]


def alive(found: list[int]) -> list[int]:
    return [pid for pid in found if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def gone(found: list[int]) -> None:
    deadline = time.monotonic() + GONE_S
    while left := alive(found):
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.05)


def start(host: EngineHost, timeout_s: float = 60) -> Any:
    return host.start("model", "r0", timeout_s)


def test_a_server_that_ends_while_it_starts_is_reported_at_once_with_the_end_of_its_log(run, tmp_path) -> None:
    async def work(host: EngineHost) -> None:
        with pytest.raises(
            EngineError, match=r"engine-0 ended with 7 while it started:\n(.*\n)*no such model"
        ) as error:
            await start(host, 60)
        assert "line 1\n" not in error.value.message  # the end of it, not all of it
        assert host.pid is None
        assert alive(pids(tmp_path)) == []

    many = "".join(f"print('line {i}')\n" for i in range(1, 40))
    run(KNOWN + many + "print('no such model', flush=True)\nsys.exit(7)\n", work)


def test_a_server_that_is_not_up_in_time_is_ended_with_its_children(run, tmp_path) -> None:
    async def work(host: EngineHost) -> None:
        starting = asyncio.create_task(start(host, 600))
        log = tmp_path / "run" / "logs" / "engine-0.log"
        while not log.exists() or "pids" not in log.read_text():
            await asyncio.sleep(0.05)
        pass_time(601)
        with pytest.raises(EngineError, match=r"engine-0 did not start in 600 s \(reef\.ready-timeout\):\n(.*\n)*pids"):
            await starting
        assert (host.pid, alive(pids(tmp_path))) == (None, [])

    run(KNOWN + SLEEP, work)


def test_a_stop_ends_the_server_and_the_children_it_leaves_behind(run, tmp_path) -> None:
    async def work(host: EngineHost) -> None:
        await start(host)
        assert alive(pids(tmp_path)) == pids(tmp_path)
        assert host.pid == pids(tmp_path)[0]
        await host.stop()
        assert (host.pid, alive(pids(tmp_path))) == (None, [])
        await host.stop()  # once more is nothing

    run(KNOWN + UP + SLEEP, work)


def test_a_server_that_does_not_hear_sigterm_is_killed_after_the_time_for_it(run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "STOP_TIMEOUT_S", 0.5)

    async def work(host: EngineHost) -> None:
        await start(host)
        began = time.monotonic()
        await host.stop()
        assert 0.5 <= time.monotonic() - began < GONE_S
        assert alive(pids(tmp_path)) == []

    run(DEAF + KNOWN + UP + SLEEP, work)


def test_what_a_server_had_started_ends_with_it_when_it_dies(run, tmp_path) -> None:
    async def work(host: EngineHost) -> None:
        await start(host)
        os.kill(pids(tmp_path)[0], 9)
        assert await host.wait() == -9
        await asyncio.to_thread(gone, pids(tmp_path))

    run(KNOWN + UP + SLEEP, work)


def test_a_port_that_was_taken_meanwhile_costs_another_try_and_no_more_than_three(run, tmp_path) -> None:
    taken = "print('[Errno 98] address already in use', flush=True)\nraise SystemExit(1)\n"
    tries = tmp_path / "tries"
    count = f"tries = open({str(tries)!r}, 'a+'); tries.write('x'); tries.seek(0); number = len(tries.read())\n"

    async def second(host: EngineHost) -> None:
        await start(host)
        assert host.pid is not None

    run(count + "if number == 1:\n    " + taken.replace("\n", "\n    ") + "\n" + UP + SLEEP, second)
    assert tries.read_text() == "xx"
    tries.unlink()

    async def never(host: EngineHost) -> None:
        with pytest.raises(EngineError, match="address already in use"):
            await start(host)

    run(count + taken, never)
    assert tries.read_text() == "xxx"


def test_a_failure_shows_the_log_of_its_own_server_and_not_of_the_one_before(run, tmp_path) -> None:
    async def work(host: EngineHost) -> None:
        with pytest.raises(EngineError):
            await start(host)
        with pytest.raises(EngineError, match="ended with 1") as second:
            await start(host)
        assert second.value.message.count("pids") == 1

    run(KNOWN + "sys.exit(1)\n", work)


def test_it_says_how_a_start_goes_on(run, monkeypatch, caplog, tmp_path) -> None:
    monkeypatch.setattr(module, "PROGRESS_S", 0.3)
    caplog.set_level("INFO", logger="reef")
    read = tmp_path / "read"

    def progress() -> bool:
        said = [record.message for record in caplog.records]
        return any("engine-0: a program is starting, " in line and line.endswith("s: reading weights") for line in said)

    async def work(host: EngineHost) -> None:
        starting = asyncio.create_task(start(host))
        while not progress() and not starting.done():
            await asyncio.sleep(0.05)
        read.touch()
        await starting

    waits = f"import os, time\nprint('reading weights', flush=True)\nwhile not os.path.exists({str(read)!r}):\n"
    run(waits + "    time.sleep(0.05)\n" + UP + SLEEP, work)
    assert progress()
    assert "engine-0: a program is up after" in caplog.records[-1].message


def test_an_engine_ends_with_the_process_that_started_it_however_that_ends(tmp_path) -> None:
    owner = subprocess.Popen([sys.executable, str(OWNER), str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        pid, url = owner.stdout.readline().split()
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
    finally:
        owner.kill()
        owner.communicate()
    gone([int(pid)])
