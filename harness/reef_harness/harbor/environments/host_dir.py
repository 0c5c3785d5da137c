"""A folder of this host in the place of a container: for agents that run nothing of a model's."""

import asyncio
import contextlib
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities

_FOLDERS = ("app", "installed-agent", "logs", "root", "runtime", "solution", "tests", "tmp", "workspace")  # of a task
_END_TRIES = 600  # of 50 ms
_SCRIPTS = frozenset({".sh", ".py"})
_MARK = "REEF_HARBOR_ENVIRONMENT"  # set for every process that is started here, and so for all of their descendants


class HostDirEnvironment(BaseEnvironment):
    """A temporary folder that stands for ``/``: see the module for what it is not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._root: Path | None = None
        self._running: set[asyncio.subprocess.Process] = set()
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        """What Harbor calls it in results."""
        return "reef-host-dir"

    @classmethod
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None:
        """Say at once where it cannot run."""
        super().preflight(kwargs)
        if not sys.platform.startswith("linux"):
            raise SystemExit(f"{cls.__name__} needs Linux, this is {sys.platform}: use --environment docker")
        folder = tempfile.gettempdir()
        if shlex.quote(folder) != folder:  # it gets into commands as it is
            raise SystemExit(f"{cls.__name__} needs a TMPDIR without spaces and the like, this is {folder!r}")

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """None: files are copied in and out."""
        return EnvironmentCapabilities()

    def _validate_definition(self) -> None:
        """Anything will do: a Dockerfile is not read."""

    # ---- life

    async def start(self, force_build: bool) -> None:
        """Make the folder and what Harbor expects in it."""
        self._make_root()
        await self._furnish()

    async def stop(self, delete: bool) -> None:
        """End what was started here and, with ``delete``, remove the folder."""
        for process in tuple(self._running):
            _end_group(process)
        if self._root is None:
            return
        await self._end_marked(self._root)
        if delete:
            await asyncio.to_thread(shutil.rmtree, self._root.parent, ignore_errors=True)
            self._root = None

    async def _end_marked(self, root: Path) -> None:
        """End what commands left running (a tmux server, say). It takes a moment, and some may just have forked."""
        for _ in range(_END_TRIES):
            left = _kill_marked(root)
            if not left:
                return
            await asyncio.sleep(0.05)
        self.logger.warning("%d processes that were started in %s do not end", left, root)

    def _make_root(self) -> None:
        # In a folder that only its user may enter: a set-uid file made inside makes nobody else of this host root.
        self._root = Path(tempfile.mkdtemp(prefix="harbor-environment-")) / "root"
        self._root.mkdir(mode=0o755)
        self._root.chmod(0o755)  # whatever the umask
        for name in _FOLDERS:
            self._host(f"/{name}").mkdir(exist_ok=True)
        self._host("/tmp").chmod(0o1777)
        self._host(self._workdir).mkdir(parents=True, exist_ok=True)

    async def _furnish(self) -> None:
        await self.ensure_dirs(self._mount_targets(writable_only=True))
        await self._upload_environment_dir_after_start()

    @property
    def _workdir(self) -> str:
        return self.task_env_config.workdir or "/app"

    # ---- files

    def _host(self, path: Path | str) -> Path:
        """Where a path of the environment is on this host; no ``..`` leads out of it."""
        if self._root is None:
            raise RuntimeError(f"{type(self).__name__} is not started")
        return self._root / os.path.normpath(f"/{path}").lstrip("/")

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a file in."""
        target = self._host(target_path)
        await asyncio.to_thread(_copy_file, Path(source_path), target)
        self._localise(target)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy a folder in, over what is there."""
        target = self._host(target_dir)
        await asyncio.to_thread(_copy_folder, Path(source_dir), target)
        for path in target.rglob("*"):
            self._localise(path)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a file out."""
        await asyncio.to_thread(_copy_file, self._host(source_path), Path(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy a folder out, over what is there."""
        await asyncio.to_thread(_copy_folder, self._host(source_dir), Path(target_dir))

    def _localise(self, path: Path) -> None:
        """Rewrite a script's paths as those of commands are."""
        if path.suffix in _SCRIPTS and path.is_file() and not path.is_symlink():
            text = path.read_text(encoding="utf-8", errors="surrogateescape")  # some are in Latin-1
            path.write_text(self._here(text), encoding="utf-8", errors="surrogateescape")

    def _here(self, text: str) -> str:
        """A command in which absolute paths into the task's folders lead into ours."""
        names = "|".join(re.escape(name) for name in _FOLDERS)
        return re.sub(rf"(?<![\w./$}}-])/(?=(?:{names})(?:/|\b))", f"{self._root}/", text)

    # ---- commands

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        """Run a command; one that takes longer than ``timeout_sec`` is ended and gives 124."""
        user = user if user is not None else self.default_user
        if user not in (None, "root", 0, "0"):
            raise ValueError(f"{type(self).__name__} has no users: the task asks for {user!r} (docker has them)")
        argv, where = self._argv(command, cwd or self._workdir)
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=where,
            env={**self._variables(), **(self._merge_env(env) or {}), _MARK: str(self._root)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self._running.add(process)
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        except TimeoutError:
            return ExecResult(stdout="", stderr=f"timed out after {timeout_sec} s", return_code=124)
        finally:
            if process.returncode is None:
                _end_group(process)
                await process.wait()
            self._running.discard(process)
        return await self._told(out.decode(errors="replace"), err.decode(errors="replace"), process.returncode or 0)

    async def _told(self, out: str, err: str, status: int) -> ExecResult:
        callback = self._output_callback()
        if callback is not None:
            for text, stream in ((out, "stdout"), (err, "stderr")):
                if text:
                    await callback(text, stream)
        return ExecResult(stdout=out, stderr=err, return_code=status)

    def _argv(self, command: str, cwd: str) -> tuple[list[str], str]:
        return ["bash", "-c", self._here(command)], str(self._host(cwd))

    def _variables(self) -> Mapping[str, str]:
        """Of the host's variables none but PATH: no key is handed on."""
        folder = str(self._host("/tmp"))
        home = str(self._host("/root"))
        return {"PATH": os.environ["PATH"], "HOME": home, "LANG": "C.UTF-8", "TMPDIR": folder, "TMUX_TMPDIR": folder}


def _copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def _copy_folder(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, target, dirs_exist_ok=True, symlinks=True)


def _end_group(process: asyncio.subprocess.Process) -> None:
    """Kill a command's group, which is its own: it was started in a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _kill_marked(root: Path) -> int:
    """Kill the processes that have our mark, by its unique folder; how many there were."""
    mark = f"{_MARK}={root}".encode()
    found = 0
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if mark in environ.read_bytes().split(b"\0"):
                os.kill(int(environ.parent.name), signal.SIGKILL)
                found += 1
    return found
