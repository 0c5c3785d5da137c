"""The loop's releases become one Weights & Biases run, whatever happens to wandb, to its disk or to the service."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import reef.dispatcher
from reef.config import load
from reef.errors import ConfigError
from reef.ledger import releases, scenarios
from reef.ledger.ledger import Ledger
from reef.ledger.scenarios import Scenario
from reef.types import Operation, Release
from reef.wandb_log import WandbLog, identity, mode
from tests.house import SCENARIO, House
from tests.wandb_files import HEADER, KEY, files, records, rows, run_of, serving

ON = ("--observability.wandb.enabled", "true")
CLOSE_S = 120.0  # for a run to end in order: an import of wandb alone may take many seconds on a busy machine
KEYS = ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE", "WANDB_SERVICE", "WANDB_IDENTITY_TOKEN_FILE")
pytestmark = [
    pytest.mark.slow,  # the real package: a process of its own for each run
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:subprocess:ResourceWarning"),  # wandb forgets a process that was killed
]


def wandb_processes() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends meanwhile
            if child.name() == "wandb-core":
                found.append(child)
    return found


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No key of whoever runs the tests, nothing sent home, and no process of wandb's left."""
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("NETRC", str(tmp_path / "no netrc"))
    monkeypatch.setattr(reef.dispatcher, "WandbLog", partial(WandbLog, close_s=CLOSE_S))
    yield
    for thread in [thread for thread in threading.enumerate() if thread.name == "wandb"]:
        thread.join(60)  # one whose process was killed has still to notice it
    gc.collect()  # here, where what wandb forgot is no error
    assert wandb_processes() == []
    for left in Path(tempfile.gettempdir()).glob(f"wandb-{os.getpid()}-*"):  # of a process that was killed
        shutil.rmtree(left)
    assert [thread.name for thread in threading.enumerate() if thread.name == "wandb"] == []


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What went to the service's log; wandb's own records go to its files only."""
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return [record.getMessage() for record in told if record.name.split(".")[0] != "wandb"]


async def until(true: Callable[[], Any], within_s: float = 120) -> None:
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.02)


def steps(path: Path) -> list[int]:
    return [row["_step"] for row in rows(path)]


class Life:
    """One life of a service in which only the log of releases is there: a real ledger, links put into it by hand."""

    def __init__(self, run_dir: Path, *flags: str, **bounds: float) -> None:
        run_dir.mkdir(exist_ok=True)
        self.config = load(None, ["--reef.run-dir", str(run_dir), *ON, *flags], {})
        self.files = run_dir / "wandb"
        self.ledger = Ledger.open(self.config.ledger_url)
        self.log = WandbLog(self.config, self.ledger, **{"close_s": CLOSE_S} | bounds)

    async def release(self, count: int = 1) -> None:
        """Add links to the chain, and have them written."""
        await self.ledger.write(scenarios.create, SCENARIO, "grpo", 1.0)
        for _ in range(count):
            head = await self.ledger.read(releases.head, SCENARIO)
            await self.ledger.write(releases.append, link(0 if head is None else head.number + 1))
        self.log.write(SCENARIO)

    async def end(self) -> None:
        await self.log.close()
        self.ledger.close()


def link(number: int) -> Release:
    return Release(
        id=f"r{number}",
        scenario=SCENARIO,
        number=number,
        parent=f"r{number - 1}" if number else None,
        content_id=f"sha256:{number}",
        operation=Operation.TRAIN if number else Operation.BASE,
        policy_version=number,
        step=number,
        batch_id=None,
        path=f"/weights/r{number}",
        checkpoint=None,
        restorable=True,
        created_at=float(number),
        metrics={"reward_mean": number / 4} if number else {},
    )


# --- what is written --------------------------------------------------------------------------------------------------


def test_each_release_is_a_row_of_its_metrics_its_names_and_both_axes(tmp_path: Path) -> None:
    house = House(tmp_path / "run", *ON, "--observability.wandb.tags", "[one, two]")

    async def live() -> None:
        await house.open()
        house.run()
        await house.grade_and_wait()
        await house.grade_and_wait()
        await house.stop()

    asyncio.run(live())
    (path,) = files(tmp_path / "run" / "wandb")
    first, second = rows(path)
    run_dir_id = run_of(path).run_id.split("-")[0]
    assert (
        first
        | {
            "num_samples": 2.0,
            "rollouts": 2,
            "trainer_step": 1,
            "release/id": f"{run_dir_id}-000001",
            "release/operation": "train",
            "release/policy_version": 1,
            "release/content_id": "sha256:[1]",
        }
        == first
    )
    assert "seconds/publish" in first
    assert (second["rollouts"], second["trainer_step"], second["_step"]) == (4, 2, 2)
    assert (run_of(path).project, list(run_of(path).tags)) == ("reef", ["one", "two"])
    defined = [record.metric for record in records(path) if record.HasField("metric")]
    assert {metric.name or metric.glob_name: metric.step_metric for metric in defined} == {
        "rollouts": "",
        "trainer_step": "",
        "*": "rollouts",
    }


def test_after_a_rollback_the_trainers_step_goes_back_and_the_runs_steps_do_not(tmp_path: Path) -> None:
    house = House(tmp_path / "run", *ON)

    async def live() -> None:
        await house.open()
        house.run()
        await house.grade_and_wait()
        await house.grade_and_wait()
        await house.dispatcher.rollback((await house.chain())[0].id)
        await house.grade_and_wait()
        await house.stop()

    asyncio.run(live())
    (path,) = files(tmp_path / "run" / "wandb")
    written = [
        (row["_step"], row["release/operation"], row["trainer_step"], row["release/policy_version"], row["rollouts"])
        for row in rows(path)
    ]
    assert written == [(1, "train", 1, 1, 2), (2, "train", 2, 2, 4), (3, "rollback", 0, 0, 4), (4, "train", 1, 1, 6)]


def test_where_it_is_not_enabled_nothing_is_written_and_no_thread_is_started(tmp_path: Path) -> None:
    async def live() -> None:
        life = Life(tmp_path / "run", "--observability.wandb.enabled", "false")
        await life.release(2)
        assert "wandb" not in [thread.name for thread in threading.enumerate()]
        await life.end()
        assert not life.files.exists()

    asyncio.run(live())


def test_nothing_of_wandb_runs_on_the_thread_of_the_loop(tmp_path: Path) -> None:
    seen: set[str] = set()

    def look(frame: Any, _event: str, _arg: Any) -> None:
        if "/site-packages/wandb/" in frame.f_code.co_filename:
            seen.add(frame.f_code.co_filename)

    async def live() -> None:
        life = Life(tmp_path / "run")
        sys.setprofile(look)
        try:
            await life.release(2)
            await until(lambda: [path for path in files(life.files) if steps(path)])
            await life.release()
            await life.end()
        finally:
            sys.setprofile(None)

    asyncio.run(live())
    assert seen == set()


# --- one run over several lives ---------------------------------------------------------------------------------------


def test_a_second_life_goes_on_with_the_same_run_where_the_first_one_ended(tmp_path: Path) -> None:
    async def live(count: int) -> None:
        life = Life(tmp_path / "run")
        await life.release(count)
        await life.end()

    asyncio.run(live(3))  # the base, and two more
    asyncio.run(live(2))
    first, second = files(tmp_path / "run")
    assert run_of(first).run_id == run_of(second).run_id
    assert (run_of(first).resume, run_of(second).resume) == (True, True)
    assert (steps(first), steps(second)) == ([1, 2], [3, 4])


def test_scenarios_and_run_directories_have_runs_of_their_own_and_keep_them() -> None:
    one = Scenario("arithmetic", "grpo", "auto", 1.5)
    names = {
        identity("3f2a", one),
        identity("3f2b", one),
        identity("3f2a", Scenario("algebra", "grpo", "auto", 1.5)),
        identity("3f2a", Scenario("arithmetic", "grpo", "auto", 1.25)),
    }
    assert len(names) == 4
    assert identity("3f2a", Scenario("arithmetic", "grpo", "manual", 1.5)) == identity("3f2a", one)
    assert identity("3f2a", one) == "3f2a-1c780296a99d"


KILLED = """
import asyncio, sys
from pathlib import Path
from tests.test_wandb import Life

async def live():
    life = Life(Path(sys.argv[1]))
    await life.release(3)
    print("written", flush=True)
    await asyncio.sleep(600)

asyncio.run(live())
"""


@pytest.mark.parametrize("after", ["at once", "once begun", "once marked"])
def test_after_a_kill_9_every_release_is_in_the_run(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, after: str
) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run")]
    env = os.environ | {"TMPDIR": str(tmp_path_factory.mktemp("t"))}  # wandb removes its own only at an orderly end
    root = Path(__file__).parents[1]
    killed = subprocess.Popen(command, stdout=subprocess.PIPE, env=env, cwd=root, start_new_session=True)
    assert killed.stdout is not None
    killed.stdout.readline()
    deadline = time.monotonic() + 120
    while after != "at once" and time.monotonic() < deadline:
        marks = [path.read_text() for path in (tmp_path / "run" / "wandb").glob("*.json")]
        if files(tmp_path / "run") if after == "once begun" else [mark for mark in marks if '"number": 2' in mark]:
            break
        time.sleep(0.01)
    of_it = psutil.Process(killed.pid).children(recursive=True)
    killed.kill()
    killed.communicate()
    assert psutil.wait_procs(of_it, timeout=120)[1] == []  # wandb's process ends by itself

    async def live() -> None:
        life = Life(tmp_path / "run")
        await life.release()
        await life.end()

    asyncio.run(live())
    *before, last = files(tmp_path / "run")
    if after == "once marked":
        assert [steps(path) for path in before] == [[1, 2]]
        assert steps(last) == [3]
    else:
        assert steps(last) == [1, 2, 3]  # some may be in both, with the same values
        assert all(steps(path) == [1, 2][: len(steps(path))] for path in before)


def test_the_files_of_several_lives_are_synced_as_one_run_whatever_a_killed_one_left(tmp_path: Path) -> None:
    async def live(count: int) -> None:
        life = Life(tmp_path / "run")
        await life.release(count)
        await life.end()

    for count in (3, 2, 1):
        asyncio.run(live(count))
    (run_id,) = {run_of(path).run_id for path in files(tmp_path / "run")}
    runs = tmp_path / "run" / "wandb" / "wandb"
    empty = runs / f"offline-run-20000101_000000-{run_id}"  # nothing was flushed
    empty.mkdir()
    (empty / f"run-{run_id}.wandb").write_bytes(files(tmp_path / "run")[0].read_bytes()[:HEADER])
    second = files(runs)[1]
    second.write_bytes(second.read_bytes()[:-5])  # its last record, which says that it ended, is torn
    with serving() as server:
        env = os.environ | {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY, "HOME": str(tmp_path)}
        for run in sorted(runs.glob("offline-run-*")):  # as docs/observability.md says
            command = [str(Path(sys.executable).with_name("wandb")), "sync", str(run)]
            subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, timeout=200, check=True)
        written = [(row["_step"], row["reward_mean"]) for row in server.runs[run_id]]
        assert written == [(number, number / 4) for number in range(1, 6)]
        assert list(server.runs) == [run_id]


# --- online -----------------------------------------------------------------------------------------------------------


def test_online_the_server_says_where_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def live(count: int) -> None:
        life = Life(tmp_path / "run")
        await life.release(count)
        await life.end()

    with serving() as server:
        asyncio.run(live(3))  # no key is here yet: offline
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        asyncio.run(live(1))
        (rows,) = server.runs.values()
        assert [row["_step"] for row in rows] == [1, 2, 3]  # with what it never heard of
        asyncio.run(live(2))
        assert [row["_step"] for row in rows] == [1, 2, 3, 4, 5]


def test_without_a_network_there_is_one_warning_and_the_service_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setenv("WANDB_API_KEY", KEY)

    async def live() -> None:
        life = Life(tmp_path / "run", close_s=1.0)
        await life.release(2)
        await until(wandb_processes)
        async with asyncio.timeout(60):  # wandb would try the network for hours
            await life.end()

    asyncio.run(live())
    (said,) = warnings(caplog)
    assert "did not end within 1 s and was killed" in said


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_directory_that_is_a_file_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()

    async def live() -> None:
        life = Life(tmp_path / "run", "--observability.wandb.directory", str(tmp_path / "file"), retry_s=0.01)
        await life.release(2)
        await until(lambda: warnings(caplog))
        await life.release()
        await asyncio.sleep(0.1)  # it is tried again, and says no more
        await life.end()

    asyncio.run(live())
    (said,) = warnings(caplog)
    assert str(tmp_path / "file") in said


def test_where_wandb_cannot_be_imported_there_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed

    async def live() -> None:
        life = Life(tmp_path / "run", retry_s=0.01)
        await life.release(2)
        await until(lambda: warnings(caplog))
        await life.release()
        await life.end()

    asyncio.run(live())
    (said,) = warnings(caplog)
    assert "pip install 'reef[wandb]'" in said


def test_online_without_a_key_is_one_warning_and_asks_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def live() -> None:
        life = Life(tmp_path / "run", "--observability.wandb.mode", "online", retry_s=0.01)
        await life.release(2)
        await until(lambda: warnings(caplog))
        await life.end()

    asyncio.run(live())
    (said,) = warnings(caplog)
    assert "WANDB_API_KEY" in said


def test_a_process_of_wandbs_that_is_killed_is_one_warning_and_its_rows_are_written_by_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def live() -> None:
        life = Life(tmp_path / "run", retry_s=0.01)
        await life.release(2)
        await until(lambda: files(life.files))
        (process,) = wandb_processes()
        process.kill()
        await life.release(2)
        await until(lambda: len(files(life.files)) == 2)
        await life.end()

    asyncio.run(live())
    assert len(warnings(caplog)) == 1
    killed, last = map(steps, files(tmp_path / "run"))
    assert last in ([1, 2, 3], [2, 3], [3])  # what was marked as written is in the file of the one that was killed
    assert {*killed, *last} == {1, 2, 3}


def test_a_disk_that_takes_nothing_for_a_while_is_one_warning_and_nothing_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def live() -> None:
        life = Life(tmp_path / "run", retry_s=0.05)
        await life.release(2)
        await until(lambda: files(life.files))
        life.files.rename(tmp_path / "away")
        life.files.touch()  # nothing can be written below it
        await until(lambda: warnings(caplog))
        life.files.unlink()
        await life.release()
        await until(lambda: files(life.files))
        await life.end()

    asyncio.run(live())
    assert len(warnings(caplog)) == 1
    (path,) = files(tmp_path / "run")
    assert steps(path) == [1, 2]


def test_a_process_of_wandbs_that_hangs_does_not_keep_the_service_from_ending(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def live() -> None:
        life = Life(tmp_path / "run", close_s=1.0)
        await life.release(2)
        await until(lambda: [path for path in files(life.files) if steps(path)])
        (process,) = wandb_processes()
        process.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(60):
            await life.release()
            await life.end()

    asyncio.run(live())
    (said,) = warnings(caplog)
    assert "did not end within 1 s and was killed" in said
    assert wandb_processes() == []


def test_a_service_ends_as_usual_where_wandb_fails(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    house = House(tmp_path / "run", *ON, "--observability.wandb.directory", str(tmp_path / "file"))

    async def live() -> None:
        await house.open()
        house.run()
        names = await house.grade_and_wait()
        names += await house.grade_and_wait()
        await house.trained_once(names)
        await house.stop()

    asyncio.run(live())
    assert len(warnings(caplog)) == 1


# --- online or offline ------------------------------------------------------------------------------------------------


def test_without_a_key_it_is_offline_and_with_one_online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert mode(None) == "offline"
    with pytest.raises(ConfigError, match="WANDB_API_KEY"):
        mode("online")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert (mode(None), mode("online"), mode("offline")) == ("online", "online", "offline")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert (mode(None), mode("online")) == ("offline", "online")


def test_a_key_in_netrc_counts_for_its_own_server_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine api.wandb.ai login user password {KEY}\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    assert mode(None) == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert mode(None) == "offline"


@pytest.mark.parametrize("project", ["", "a/b", "a:b", "x" * 129])
def test_a_project_that_wandb_would_refuse_is_refused_at_load(project: str) -> None:
    with pytest.raises(ConfigError, match="project"):
        load(None, [*ON, "--observability.wandb.project", project], {})
