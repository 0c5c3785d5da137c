"""A root of its own by bubblewrap, without a container engine."""

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.task.config import NetworkMode

from reef_harness.harbor.environments.host_dir import HostDirEnvironment

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ETC = (
    "alternatives",
    "ca-certificates",
    "group",
    "host.conf",
    "hosts",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "passwd",
    "resolv.conf",
    "ssl",
    "terminfo",
)
_CAPABILITIES = "chown,dac_override,fowner,fsetid,kill,setgid,setuid,net_bind_service"  # of containers: no sys_admin
_PROC = ("sys", "sysrq-trigger", "irq", "bus")  # the machine's switches: root may write them without any capability
_APART = ("--proc", "/proc", "--dev", "/dev", "--unshare-pid", "--unshare-ipc", "--unshare-uts")
_UP = ".reef-harbor-up"
_UP_TRIES = 600  # of 50 ms


class BwrapEnvironment(HostDirEnvironment):
    """A root of its own by bubblewrap: one init for each environment, which every command joins.

    Its processes see their own files, the host's programs read-only, and each other. They are root without the
    capabilities that would lead out (no mounts, no devices, no tracing). A task that allows no internet gets a network
    namespace without one; lists of allowed hosts are not supported.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._init: asyncio.subprocess.Process | None = None
        self._pid = 0  # of the namespace's first process, as the host sees it
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        """What Harbor calls it in results."""
        return "reef-bwrap"

    @classmethod
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None:
        """Say at once what is missing."""
        super().preflight(kwargs)
        if os.geteuid() != 0:
            raise SystemExit("BwrapEnvironment must be run as root: only root may join its namespaces")
        missing = [tool for tool in ("bwrap", "nsenter", "setpriv") if shutil.which(tool) is None]
        if missing:
            raise SystemExit(f"BwrapEnvironment needs {', '.join(missing)}: apt-get install bubblewrap util-linux")
        tried = subprocess.run(["bwrap", "--ro-bind", "/", "/", *_APART, "true"], capture_output=True, text=True)
        if tried.returncode:
            why = f"{tried.stderr.strip()} (in a container it lacks CAP_SYS_ADMIN)"
            raise SystemExit(f"BwrapEnvironment cannot make namespaces here: {why}")

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """It can go without internet."""
        return EnvironmentCapabilities(disable_internet=True)

    @property
    def _offline(self) -> bool:
        return bool(self._network_policy.network_mode == NetworkMode.NO_NETWORK)

    async def start(self, force_build: bool) -> None:
        """Make the root, start its init, wait until commands can join."""
        self._make_root()
        reading, writing = os.pipe()
        try:
            self._init = await asyncio.create_subprocess_exec(
                *self._bwrap(),
                *("--info-fd", str(writing), "--", "bash", "-c", f"touch /{_UP}; exec sleep infinity"),
                pass_fds=[writing],
                start_new_session=True,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
        finally:
            os.close(writing)
        with os.fdopen(reading) as info:
            told = await asyncio.to_thread(info.read)
        if not told:
            await self._fail(self._init)
        self._pid = int(json.loads(told)["child-pid"])
        await self._wait_until_up(self._init)
        await self._furnish()

    async def _fail(self, init: asyncio.subprocess.Process) -> NoReturn:
        """Raise what an init that has ended said."""
        _, said = await init.communicate()
        raise RuntimeError(f"bwrap did not start: {said.decode(errors='replace').strip()}")

    async def _wait_until_up(self, init: asyncio.subprocess.Process) -> None:
        """Wait for the file that the payload makes first. Who joined before would be on the host's root still."""
        up = self._host(f"/{_UP}")
        for _ in range(_UP_TRIES):
            if up.exists():
                up.unlink()
                return
            if init.returncode is not None:
                await self._fail(init)
            await asyncio.sleep(0.05)
        raise RuntimeError(f"the bwrap environment was not up after {_UP_TRIES * 0.05:.0f} s")

    async def stop(self, delete: bool) -> None:
        """End the init, and with it everything inside."""
        if self._init is not None and self._init.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid or self._init.pid, signal.SIGKILL)
            await self._init.wait()
        await super().stop(delete)

    def _bwrap(self) -> list[str]:
        argv = ["bwrap", "--die-with-parent", "--bind", str(self._root), "/", "--ro-bind", "/usr", "/usr"]
        argv += _APART
        for name in _PROC:
            argv += ["--ro-bind-try", f"/proc/{name}", f"/proc/{name}"]
        argv += ["--unshare-net"] if self._offline else []
        for name in ("bin", "sbin", "lib", "lib64"):
            linked = Path(f"/{name}").is_symlink()
            argv += ["--symlink", f"usr/{name}", f"/{name}"] if linked else ["--ro-bind-try", f"/{name}", f"/{name}"]
        for name in _ETC:
            argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        return argv

    # ---- files: copied by commands inside, so that a link that was made there leads nowhere else

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copy a file in."""
        quoted, folder = shlex.quote(target_path), shlex.quote(str(Path(target_path).parent))
        mode = Path(source_path).stat().st_mode & 0o777
        with Path(source_path).open("rb") as source:  # noqa: ASYNC230 - opening a local file waits for nobody
            await self._copy(f"mkdir -p {folder} && cat > {quoted} && chmod {mode:o} {quoted}", stdin=source)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copy a folder in, over what is there."""
        quoted = shlex.quote(target_dir)
        with tempfile.TemporaryFile() as packed:
            await asyncio.to_thread(_pack, Path(source_dir), packed)
            packed.seek(0)
            await self._copy(f"mkdir -p {quoted} && tar -x --no-same-owner -C {quoted}", stdin=packed)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copy a file out."""
        Path(target_path).parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            copied = Path(folder) / "copied"
            with copied.open("wb") as file:
                await self._copy(f"cat {shlex.quote(source_path)}", stdout=file)
            await asyncio.to_thread(shutil.copyfile, copied, target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copy a folder out, over what is there; devices, and links that lead out of it, are left behind."""
        Path(target_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile() as packed:
            await self._copy(f"tar -c -C {shlex.quote(source_dir)} .", stdout=packed)
            packed.seek(0)
            await asyncio.to_thread(_unpack, packed, Path(target_dir))

    async def _copy(self, command: str, stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None) -> None:
        argv, where = self._argv(command, "/")
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=where,
            env=dict(self._variables()),
            stdin=stdin or asyncio.subprocess.DEVNULL,
            stdout=stdout or asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        _, said = await process.communicate()
        if process.returncode:
            raise RuntimeError(f"{command} failed in the environment: {said.decode(errors='replace').strip()}")

    # ---- commands

    def _argv(self, command: str, cwd: str) -> tuple[list[str], str]:
        joined = ["nsenter", "-t", str(self._pid), "-m", "-p", "-i", "-u", "-r", f"--wdns={cwd}"]
        joined += ["-n"] if self._offline else []
        kept = ",".join(f"+{name}" for name in _CAPABILITIES.split(","))
        dropped = ["setpriv", "--no-new-privs", "--inh-caps=-all", f"--bounding-set=-all,{kept}"]
        return [*joined, "--", *dropped, "bash", "-c", command], "/"

    def _variables(self) -> Mapping[str, str]:
        return {"PATH": _PATH, "HOME": "/root", "LANG": "C.UTF-8"}

    def _here(self, text: str) -> str:
        """As it is: paths are real inside."""
        return text


def _pack(folder: Path, into: IO[bytes]) -> None:
    with tarfile.open(fileobj=into, mode="w") as archive:
        archive.add(folder, arcname=".")


def _unpack(packed: IO[bytes], folder: Path) -> None:
    with tarfile.open(fileobj=packed, mode="r") as archive:
        archive.extractall(folder, filter=_harmless)


def _harmless(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    try:
        return tarfile.data_filter(member, folder)
    except tarfile.FilterError:
        return None
