"""A PostgreSQL server of the tests' own: Debian's binaries, its own directory, loopback on a port of the kernel's."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from tests.ports import free_port

BINARIES = max(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), default=None)
MISSING = "PostgreSQL is not installed: make postgres"
START_TIMEOUT_S = 60
MEMORY = Path("/dev/shm")
MEMORY_BYTES = 4 * 2**30


class PostgresServer:
    """Started by `start`, ended by `stop` or with this process; settings are the server's defaults."""

    def __init__(self) -> None:
        assert BINARIES is not None, MISSING
        # Not under pytest's own directory, which only root may enter where root runs the tests; in memory, where there
        # is room: a database for each test is much to write.
        roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > MEMORY_BYTES
        self.directory = Path(tempfile.mkdtemp(prefix="reef-postgres-", dir=MEMORY if roomy else None))
        self._account = []
        if os.geteuid() == 0:  # as root the server refuses to run
            account = pwd.getpwnam("postgres")
            os.chown(self.directory, account.pw_uid, account.pw_gid)
            self._account = [f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
        self._postgres = BINARIES / "postgres"
        self._data = self.directory / "data"
        self._names = (f"test{number}" for number in itertools.count(1))
        self._process: subprocess.Popen[bytes] | None = None
        initdb = [str(BINARIES / "initdb"), "-D", str(self._data), "-U", "reef", "-A", "trust", "-E", "UTF8"]
        made = subprocess.run(
            ["setpriv", *self._account, *initdb, "--locale=C.UTF-8", "--no-sync"],
            cwd=self.directory,
            capture_output=True,
            text=True,
        )
        assert made.returncode == 0, made.stdout + made.stderr
        self.port = free_port()

    def start(self) -> None:
        """Returns once it takes connections."""
        settings = {"listen_addresses": "127.0.0.1", "port": self.port, "unix_socket_directories": self.directory}
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig=INT", *self._account, str(self._postgres), "-D", str(self._data), *words],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.connect("postgres").close()
                return
            except psycopg.OperationalError:
                assert self._process.poll() is None, (self.directory / "log").read_text()
                assert time.monotonic() < deadline, (self.directory / "log").read_text()
                time.sleep(0.05)

    def stop(self, signal_number: int = signal.SIGINT) -> None:
        """SIGINT: every connection ends, and the server in order. SIGQUIT: at once, as in a crash."""
        if self._process is not None:
            self._process.send_signal(signal_number)
            self._process.wait(60)
            self._process = None

    def remove(self) -> None:
        """End it, whatever state it is in, and its files."""
        try:
            self.stop()
        except subprocess.TimeoutExpired:
            self.stop(signal.SIGQUIT)
        finally:
            shutil.rmtree(self.directory)

    def connect(self, database: str) -> psycopg.Connection[tuple[Any, ...]]:
        """A connection of our own, each statement its own transaction."""
        return psycopg.connect(host="127.0.0.1", port=self.port, user="reef", dbname=database, autocommit=True)

    def url(self, database: str) -> str:
        """As `storage.url` takes it."""
        return f"postgresql+psycopg://reef@127.0.0.1:{self.port}/{database}"

    def create(self, template: str = "template1") -> str:
        """The name of a new database, a copy of `template`."""
        name = next(self._names)
        with self.connect("postgres") as connection:
            connection.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template))
            )
        return name

    def drop(self, database: str) -> None:
        """Remove a database, ending what is still connected to it."""
        with self.connect("postgres") as connection:
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(database)))
