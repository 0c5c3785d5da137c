"""Cleans up after this process, however it ends: a shell that waits for our end of a pipe to close.

Ray's agents take half a minute to give up on a cluster that is gone, SGLang never notices that whoever started it is
gone, and the directories of both would stay for ever.

An id alone is not a process: numbers come round, and Linux delivers a signal for a thread's number to the whole process
that it is of. So an id goes with the moment at which its process began, and what began at another one is left alone.
"""

import contextlib
import subprocess
from collections.abc import Iterable
from pathlib import Path

import psutil

# /proc/PID/stat, field 22: when it began. A group whose leader has ended keeps the number from everyone else.
_SCRIPT = """
read -r _
for named; do
    pid=${named%:*} began=${named#*:} stat=
    { read -r stat < "/proc/${pid#-}/stat"; } 2> /dev/null
    set -- ${stat##*) }
    [ -n "$stat" ] && [ "${20}" != "$began" ] || kill -9 "$pid" 2> /dev/null
done
rm -rf -- "$0"
"""
_PATIENCE_S = 10


class Reaper:
    """Ends processes and removes a directory, when told to or when this process is gone."""

    def __init__(self, directory: Path, pids: Iterable[int]) -> None:
        """`pids` of processes that run now, as kill(1) has them: a negative one is a whole process group."""
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, str(directory), *(f"{pid}:{_began(abs(pid))}" for pid in pids)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal is for us, not for it
        )

    def finish(self) -> None:
        """Do it now."""
        self._process.communicate(timeout=_PATIENCE_S)


def descendants(word: str) -> list[int]:
    """Process ids of this process's children with `word` in their command line, and of all that those have started.

    Others that start meanwhile (the engine does) are not ours to end.
    """
    found: list[int] = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if word in " ".join(child.cmdline()):
                found += [child.pid, *(process.pid for process in child.children(recursive=True))]
    return found


def _began(pid: int) -> str:
    """In clock ticks since the machine's start; a word that no process has where it has ended, or nothing tells."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19]
    except (OSError, IndexError):
        return "ended"
