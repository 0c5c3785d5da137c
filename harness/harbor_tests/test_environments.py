"""The environments without a container engine: what a command sees, what it cannot reach, and what is left of it."""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from conftest import needs_bwrap
from harbor.models.task.config import EnvironmentConfig, NetworkMode, NetworkPolicy
from harbor.models.trial.paths import TrialPaths
from reef_harness.harbor.environments import BwrapEnvironment, HostDirEnvironment

BWRAP = pytest.param(BwrapEnvironment, marks=needs_bwrap)
BOTH = pytest.mark.parametrize("kind", [HostDirEnvironment, BWRAP])
ONLY_BWRAP = pytest.mark.parametrize("kind", [BWRAP])
Kind = type[HostDirEnvironment]


@asynccontextmanager
async def started(kind: Kind, folder: Path, policy: NetworkPolicy | None = None) -> AsyncIterator[HostDirEnvironment]:
    """An environment, until the block ends."""
    (folder / "environment").mkdir(exist_ok=True)
    environment = kind(
        environment_dir=folder / "environment",
        environment_name="task",
        session_id="task__1__env",
        trial_paths=TrialPaths(folder / "trial"),
        task_env_config=EnvironmentConfig(workdir="/app"),
        network_policy=policy,
    )
    await environment.start(force_build=False)
    try:
        yield environment
    finally:
        await environment.stop(delete=True)


def within(
    kind: Kind, folder: Path, work: Callable[[HostDirEnvironment], Awaitable[None]], policy: NetworkPolicy | None = None
) -> None:
    """Run ``work`` in an environment."""

    async def whole() -> None:
        async with started(kind, folder, policy) as environment:
            await work(environment)

    asyncio.run(whole())


@BOTH
def test_a_command_works_in_the_tasks_folder_and_keeps_its_files_for_the_next(kind: Kind, tmp_path: Path) -> None:
    async def work(environment: HostDirEnvironment) -> None:
        await environment.exec("echo 42 > /app/answer.txt; echo said; echo wrong >&2; exit 3")
        result = await environment.exec("cat answer.txt; echo $ROOM", env={"ROOM": "7"})
        assert (result.stdout, result.return_code) == ("42\n7\n", 0)
        failed = await environment.exec("echo said; echo wrong >&2; exit 3")
        assert (failed.stdout, failed.stderr, failed.return_code) == ("said\n", "wrong\n", 3)

    within(kind, tmp_path, work)


def test_a_temporary_folder_with_a_space_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    HostDirEnvironment.preflight()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "a b"))
    with pytest.raises(SystemExit, match=r"needs a TMPDIR without spaces and the like, this is '.*/a b'"):
        HostDirEnvironment.preflight()


def test_a_script_that_is_not_utf_8_keeps_its_bytes(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_bytes(b"cat /app/answer.txt; echo '\xe9'\n")

    async def work(environment: HostDirEnvironment) -> None:
        await environment.exec("echo 42 > /app/answer.txt")
        await environment.upload_file(script, "/tests/run.sh")
        await environment.exec("bash /tests/run.sh > /app/said")
        await environment.download_file("/app/said", tmp_path / "said")

    within(HostDirEnvironment, tmp_path, work)
    assert (tmp_path / "said").read_bytes() == b"42\n\xe9\n"


@BOTH
def test_files_and_folders_go_in_and_come_out_as_they_were(kind: Kind, tmp_path: Path) -> None:
    source = tmp_path / "in" / "deep"
    source.mkdir(parents=True)
    (source / "a.txt").write_text("a")
    (source / "run.sh").write_text("#!/bin/bash\ncat /tests/deep/a.txt\n")
    (source / "run.sh").chmod(0o755)

    async def work(environment: HostDirEnvironment) -> None:
        await environment.upload_dir(tmp_path / "in", "/tests")
        assert (await environment.exec("/tests/deep/run.sh")).stdout == "a"
        await environment.upload_file(source / "a.txt", "/app/new folder/b.txt")
        await environment.exec("mkdir -p /logs/x; cp '/app/new folder/b.txt' /logs/x/c.txt")
        await environment.download_dir("/logs/x", tmp_path / "out")
        await environment.download_file("/app/new folder/b.txt", tmp_path / "b.txt")

    within(kind, tmp_path, work)
    assert ((tmp_path / "out" / "c.txt").read_text(), (tmp_path / "b.txt").read_text()) == ("a", "a")


@BOTH
def test_a_command_that_takes_too_long_is_ended_and_so_is_what_it_started(kind: Kind, tmp_path: Path) -> None:
    async def work(environment: HostDirEnvironment) -> None:
        while not environment._host("/app/begun").exists():  # a busy machine may need more than the limit to begin
            result = await environment.exec("sleep 4321.5 & touch begun; sleep 4321.5", timeout_sec=1)
            assert (result.return_code, result.stderr) == (124, "timed out after 1 s")
        await until(partial(running, environment), 0)
        assert (await environment.exec("echo on")).stdout == "on\n"

    within(kind, tmp_path, work)


@BOTH
def test_what_a_command_left_running_ends_with_its_environment_and_nothing_else_does(
    kind: Kind, tmp_path: Path
) -> None:
    async def whole() -> None:
        async with started(kind, tmp_path) as first, started(kind, tmp_path) as second:
            roots = first._root, second._root
            for environment in (first, second):
                await environment.exec("setsid sleep 4321.5 > /dev/null 2>&1 &")
                await until(partial(running, environment), 1)
            ended = sleepers_of(first)
            await first.stop(delete=True)
            assert (ended(), running(second)) == (0, 1)
            ended = sleepers_of(second)
        assert ended() == 0
        assert not any(root and root.exists() for root in roots)

    asyncio.run(whole())


async def until(count: Callable[[], int], expected: int) -> None:
    """Wait for a number that must come to be; pytest's timeout ends a wait in vain."""
    while count() != expected:
        await asyncio.sleep(0.05)


def running(environment: HostDirEnvironment) -> int:
    """Sleepers that were started in an environment."""
    return sleepers_of(environment)()


def sleepers_of(environment: HostDirEnvironment) -> Callable[[], int]:
    """How many there are, also once the environment has ended."""
    mark = f"REEF_HARBOR_ENVIRONMENT={environment._root}".encode()

    def count() -> int:
        found = 0
        for process in Path("/proc").glob("[0-9]*"):
            try:
                found += mark in (process / "environ").read_bytes() and b"4321.5" in (process / "cmdline").read_bytes()
            except OSError:
                continue
        return found

    return count


@BOTH
def test_no_key_of_ours_is_handed_on(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REEF_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "reef_secret")

    async def work(environment: HostDirEnvironment) -> None:
        assert "reef_secret" not in ((await environment.exec("env")).stdout or "")

    within(kind, tmp_path, work)


@BOTH
def test_a_user_that_it_does_not_have_is_refused(kind: Kind, tmp_path: Path) -> None:
    async def work(environment: HostDirEnvironment) -> None:
        with pytest.raises(ValueError, match="has no users: the task asks for 'agent'"):
            await environment.exec("true", user="agent")

    within(kind, tmp_path, work)


@ONLY_BWRAP
def test_the_hosts_files_are_out_of_reach(kind: Kind, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the host's")

    async def work(environment: HostDirEnvironment) -> None:
        refused = [  # none of these would change the host if it were let through
            f"cat {secret}",
            "cat /etc/shadow",
            "test -w /usr",
            "mount -t tmpfs none /mnt",
            "mknod /app/disk b 254 0",
            *(f": >> /proc/{switch}" for switch in ("sys/kernel/core_pattern", "sysrq-trigger")),  # opened, not written
            f"kill -0 {os.getpid()}",
        ]
        await environment.exec("mkdir -p /mnt")
        for command in refused:
            result = await environment.exec(command)
            assert result.return_code != 0, f"{command}: {result.stdout}"

    within(kind, tmp_path, work)


@ONLY_BWRAP
def test_a_link_that_was_made_inside_leads_nowhere_outside(kind: Kind, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the host's")
    (tmp_path / "out").mkdir()

    async def work(environment: HostDirEnvironment) -> None:
        await environment.exec(f"ln -s {secret} /app/answer.txt; ln -s {tmp_path}/out /app/folder")
        await environment.exec("ln -s /etc /logs/etc")
        with pytest.raises(RuntimeError, match="No such file"):
            await environment.download_file("/app/answer.txt", tmp_path / "stolen.txt")
        with pytest.raises(RuntimeError, match="failed in the environment"):
            await environment.upload_file(secret, "/app/folder/planted.txt")
        await environment.download_dir("/logs", tmp_path / "logs")

    within(kind, tmp_path, work)
    assert not list((tmp_path / "out").iterdir())
    assert not (tmp_path / "logs" / "etc").exists()


@ONLY_BWRAP
def test_a_task_that_allows_no_internet_has_a_network_of_its_own(kind: Kind, tmp_path: Path) -> None:
    async def work(environment: HostDirEnvironment) -> None:
        devices = (await environment.exec("tail -n +3 /proc/net/dev")).stdout or ""
        assert [line.split(":")[0].strip() for line in devices.splitlines()] == ["lo"]

    within(kind, tmp_path, work, NetworkPolicy(network_mode=NetworkMode.NO_NETWORK))


@BOTH
def test_nobody_else_of_this_host_reaches_what_is_made_in_an_environment(kind: Kind, tmp_path: Path) -> None:
    """A set-uid program of root's in /tmp would make every user of the host root."""

    async def work(environment: HostDirEnvironment) -> None:
        made = await environment.exec("cp /usr/bin/id /app/id; chmod 4755 /app/id; stat -c %a /app/id")
        assert made.stdout == "4755\n"
        inside = environment._host("/app/id")
        assert inside.exists()
        assert [path for path in inside.parents if path.stat().st_mode & 0o077 == 0], inside
        if os.geteuid() == 0:
            with pytest.raises(PermissionError):
                await asyncio.create_subprocess_exec(inside, user=65534, group=65534, extra_groups=[])

    within(kind, tmp_path, work)
