"""What is left behind is ended and removed; nobody else is."""

import subprocess
import sys
from pathlib import Path

import pytest

from reef import reaper
from reef.reaper import Reaper

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "a directory"
    (made / "inside").mkdir(parents=True)
    return made


def test_it_ends_a_process_and_removes_the_directory(directory: Path) -> None:
    process = subprocess.Popen(SLEEP)
    Reaper(directory, [process.pid]).finish()
    assert process.wait(60) == -9
    assert not directory.exists()


@pytest.mark.parametrize("leader_ended", [False, True])
def test_it_ends_all_of_a_group(directory: Path, leader_ended: bool) -> None:
    """Reading ends when nobody holds the other end any more: the shell's child holds it for ten minutes."""
    with subprocess.Popen(["/bin/sh", "-c", "sleep 600 & read -r _"], process_group=0, stdin=-1, stdout=-1) as leader:
        made = Reaper(directory, [-leader.pid])
        if leader_ended:
            assert leader.stdin is not None
            leader.stdin.close()
            leader.wait(60)
        made.finish()
        assert leader.stdout is not None
        assert leader.stdout.read() == b""
        assert leader.wait(60) == (1 if leader_ended else -9)


def test_a_number_that_is_anothers_by_now_is_left_alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What went with the number when it was noted is not what goes with it now."""
    other = subprocess.Popen(SLEEP)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(reaper, "_began", lambda _pid: "1")
            Reaper(directory, [other.pid]).finish()
        assert other.poll() is None
        assert not directory.exists()
    finally:
        other.kill()
        other.wait()


def test_a_number_that_is_a_thread_by_now_does_not_end_the_process_it_is_of(directory: Path) -> None:
    """kill(2) of a thread's number is for the whole process."""
    code = (
        "import sys, threading, time; from pathlib import Path; from reef import reaper\n"
        "thread = threading.Thread(target=time.sleep, args=(5,), daemon=True); thread.start()\n"
        "reaper._began = lambda pid: '1'  # of a process that had the number before\n"
        "reaper.Reaper(Path(sys.argv[1]), [thread.native_id]).finish(); print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code, str(directory)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done
