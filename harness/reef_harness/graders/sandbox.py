"""Where a model's code runs: a process that sees no network, no files but its own, and little time and memory."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from reef_harness.graders.process import Finished, run

Isolation = Literal["namespaces", "process"]
Mode = Literal["program", "function"]

_RUNNER = Path(__file__).with_name("code_runner.py")
_SYSTEM = ("/lib", "/lib64", "/bin")  # what a Python needs beside /usr, read only as that is
_ENV = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}


class SandboxFailed(Exception):  # noqa: N818
    """The sandbox did not come up: this says nothing about the code."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run may use. Memory, CPU time and file size are for each of its ``processes``; threads count as such."""

    wall_s: float = 10.0
    cpu_s: float = 5.0
    memory_mib: int = 512
    files_mib: int = 16  # of one file; and of all of them together, in namespaces
    processes: int = 8
    open_files: int = 64
    output_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if wrong := [name for name, value in asdict(self).items() if not value > 0]:
            raise ValueError(f"limits must be above 0: {', '.join(wrong)}")


class Sandbox:
    """Runs Python source, each time in a directory and processes of its own, which are gone afterwards.

    "namespaces" (bubblewrap): no network, a file system of the system's Python and an empty ``/tmp``, no other
    process in sight. "process": limits and a process group only; the code can reach the network and read what any
    user may read (a root starts it as a user who owns nothing). Where namespaces cannot be had, the constructor raises
    ValueError: nothing weaker is taken instead.
    """

    def __init__(self, limits: Limits, isolation: Isolation = "namespaces", python: Path | None = None) -> None:
        if isolation not in ("namespaces", "process"):
            raise ValueError(f"isolation must be namespaces or process, got {isolation!r}")
        self.limits, self.isolation = limits, isolation
        self._bwrap = shutil.which("bwrap") or ""
        if isolation == "namespaces" and not self._bwrap:
            raise ValueError(f"isolation needs bubblewrap (bwrap), which is not installed. {_OTHERWISE}")
        # A root's own interpreter may lie where no other user can read it; then the system's is taken.
        candidates = [python] if python else [Path(_base_python()), Path("/usr/bin/python3")]
        self.python = self._first_that_runs([path.resolve() for path in candidates if path.exists()])

    def run(self, source: str, stdin: bytes, mode: Mode = "program", function: str = "") -> Finished:
        """Run ``source`` as a program, or one of its functions with the arguments in ``stdin``.

        Raises SandboxFailed where it did not come to running it.
        """
        return self._run(self.python, source, stdin, mode, function)

    def _first_that_runs(self, candidates: Sequence[Path]) -> Path:
        said = ["no Python there"]
        for python in candidates:
            try:
                finished = self._run(python, "print('runs')", b"", "program", "")
            except (SandboxFailed, OSError) as error:
                said.append(f"{python}: {error}")
                continue
            if finished.stdout == b"runs\n":
                return python
            said.append(f"{python}: {finished.ended}, {finished.stderr.decode(errors='replace')[-300:].strip()}")
        raise ValueError(f"no sandbox on this machine: {'; '.join(said[-2:])}. {_OTHERWISE}")

    def _run(self, python: Path, source: str, stdin: bytes, mode: Mode, function: str) -> Finished:
        user = 1_000_000_000 + secrets.randbelow(1_000_000_000) if os.geteuid() == 0 else None
        with tempfile.TemporaryDirectory(prefix="reef-code-", ignore_cleanup_errors=True) as name:
            home = Path(name)
            (home / "solution.py").write_text(source, encoding="utf-8", errors="replace")
            shutil.copyfile(_RUNNER, home / "runner.py")
            namespaces = self.isolation == "namespaces"  # these are made by that user, who is then inside them
            become = None if namespaces else user
            told = json.dumps({**asdict(self.limits), "user": become, "isolation": self.isolation})
            if namespaces:
                return self._in_namespaces(python, home, [told, mode, function], stdin, user)
            return self._as_process(python, home, [told, mode, function], stdin, user)

    def _in_namespaces(self, python: Path, home: Path, told: Sequence[str], stdin: bytes, user: int | None) -> Finished:
        home.chmod(0o755)
        reader, writer = os.pipe()
        try:
            inside = [str(python), "-I", "-S", "-B", "/code/runner.py", *told]
            finished = self._started([*self._bubblewrap(python, home, writer), *inside], home, stdin, (writer,), user)
            os.set_blocking(reader, False)
            status = os.read(reader, 65_536)
        except BlockingIOError:
            status = b""
        finally:
            os.close(reader)
            os.close(writer)
        if finished.ended == "exit" and b'"exit-code"' not in status:
            raise SandboxFailed(finished.stderr.decode(errors="replace")[-300:].strip() or "bwrap did not start it")
        return finished

    def _bubblewrap(self, python: Path, home: Path, status: int) -> list[str]:
        """The command before the command: a root's is run by another user, so that it is the same for all."""
        prefix = python.parent.parent
        shared = [path for path in (*_SYSTEM, str(prefix)) if Path(path).exists() and path != "/usr"]
        binds = [part for path in shared if not path.startswith("/usr/") for part in ("--ro-bind", path, path)]
        return [
            self._bwrap,
            *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
            *("--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
            *("--ro-bind", "/usr", "/usr", *binds, "--ro-bind", str(home), "/code", "--dev", "/dev"),
            *("--size", str(self.limits.files_mib << 20), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
            *("--size", str(self.limits.files_mib << 20), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"),
            *("--json-status-fd", str(status)),
        ]

    def _as_process(self, python: Path, home: Path, told: Sequence[str], stdin: bytes, user: int | None) -> Finished:
        work = home / "work"
        work.mkdir()
        if user is not None:
            home.chmod(0o755)
            os.chown(work, user, user)
        try:
            return self._started([str(python), "-I", "-S", "-B", str(home / "runner.py"), *told], work, stdin, ())
        finally:
            if user is not None:  # also those that left the group: nothing else runs as this user
                everything = ["/bin/kill", "-KILL", "--", "-1"]
                subprocess.run(everything, user=user, group=user, extra_groups=[], capture_output=True, check=False)

    def _started(
        self, argv: list[str], cwd: Path, stdin: bytes, pass_fds: Sequence[int], user: int | None = None
    ) -> Finished:
        limits = self.limits
        return run(
            argv,
            stdin,
            wall_s=limits.wall_s,
            output_bytes=limits.output_bytes,
            cwd=cwd,
            env={**_ENV, "PATH": os.defpath},
            pass_fds=pass_fds,
            user=user,
        )


_OTHERWISE = (
    "isolation='process' runs code with limits only, able to reach the network and readable files: ask for it where the"
    " code is trusted that far"
)


def _base_python() -> str:
    """The interpreter outside any virtual environment: it has the standard library and nothing else."""
    found = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    return str(found if found.exists() else sys.executable)
