"""This process's one connection to Ray, shared by the trainer and the engines: who comes first makes it, who goes last
ends it.

Without an address a cluster of this process's own is started, bound to loopback; it ends with this process, however
that ends. With one an existing cluster is joined and left running.
"""

import logging
import os
import secrets
import shutil
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path

# Read by Ray when it is imported: listen on loopback only, and tell nobody.
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray

from reef.cluster.address import Address, check_cluster
from reef.cluster.room import Bundle
from reef.config import Config
from reef.errors import ConfigError, UnavailableError
from reef.reaper import Reaper, descendants

OBJECT_STORE_BYTES = 128 * 2**20  # holds batches; weights travel over the disk
LONGEST_TEMP_DIR = 20  # bytes; Ray's sockets lie 82 below it, and their paths may have 107

_lock = threading.Lock()
_shared: "Connection | None" = None


class Connection:
    """A connection in use: `connect` gives it, `disconnect` gives it back."""

    def __init__(self, config: Config) -> None:
        """Find out where to; connect to nobody. Raises what `check_cluster` raises."""
        self.address: Address | None = check_cluster(config)  # None: a cluster of our own
        self.temp_dir: Path | None = None  # of a cluster of our own: only this user may enter it
        self.num_users = 0
        self._num_cpus = config.training.layout.world_size
        self._temp_link = config.reef.run_dir.absolute() / "ray"  # leads to temp_dir
        self._reaper: Reaper | None = None
        self._end = threading.Event()

    @property
    def is_local(self) -> bool:
        """Whether the cluster is our own, so that everything in it runs on this machine."""
        return self.address is None

    def open(self, timeout_s: float) -> None:
        """Join or start. Raises UnavailableError or ConfigError."""
        opened: Future[None] = Future()
        threading.Thread(target=self._stay, args=(opened,), name="reef-ray", daemon=True).start()
        try:
            opened.result(timeout_s)
        except TimeoutError:
            raise UnavailableError(f"Ray did not start within {timeout_s:g} s") from None

    def close(self) -> None:
        """Leave; end what was started here."""
        ray.shutdown()
        self._end.set()
        if self._reaper is not None:
            self._reaper.finish()
            self._reaper = None
        if self.temp_dir is not None:
            shutil.rmtree(self.temp_dir, ignore_errors=True)
            self.temp_dir = None
            self._temp_link.unlink(missing_ok=True)

    def nodes(self) -> list[Bundle]:
        """What each living node has in all."""
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]

    def _stay(self, opened: "Future[None]") -> None:
        """Connect, then wait for `close`: the kernel ends Ray's processes with the thread that started them."""
        logging.getLogger("ray").setLevel(logging.ERROR)  # it warns of what is meant here, e.g. of this thread
        try:
            if self.address is None:
                self._start()
            else:
                _join(self.address)
        except BaseException as error:  # noqa: BLE001 (raised again by the thread that waits)
            opened.set_exception(error)
        else:
            opened.set_result(None)
            self._end.wait()

    def _start(self) -> None:
        # Else Ray keeps a token for its own use in the user's home.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        self.temp_dir = self._make_temp_dir()
        ray.init(
            address="local",
            num_cpus=self._num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(self.temp_dir / "ray"),  # Ray opens it to all users, but not the one above
            _system_config={"enable_worker_prestart": False, "prestart_worker_first_driver": False},
        )
        self._reaper = Reaper(self.temp_dir, descendants(str(self.temp_dir)))

    def _make_temp_dir(self) -> Path:
        """A directory for Ray's files, in the place of one that is still there because the reaper was killed too."""
        self._temp_link.parent.mkdir(parents=True, exist_ok=True)
        if self._temp_link.is_symlink():
            shutil.rmtree(self._temp_link.readlink(), ignore_errors=True)
            self._temp_link.unlink()
        parent = tempfile.gettempdir()
        made = Path(tempfile.mkdtemp(prefix="reef-", dir=parent if len(parent) < LONGEST_TEMP_DIR else "/tmp"))
        self._temp_link.symlink_to(made)
        return made


def connect(config: Config, timeout_s: float) -> Connection:
    """The connection of this process, made where there is none. Give it back with `disconnect`. Blocks.

    Raises:
        ConfigError: there is no cluster at the address, or this process is connected to another one.
        UnavailableError: Ray did not come up in time.
    """
    global _shared
    if not _lock.acquire(timeout=timeout_s):
        raise UnavailableError(f"Ray did not start within {timeout_s:g} s")
    try:
        if _shared is None:
            made = Connection(config)
            try:
                made.open(timeout_s)
            except BaseException:
                made.close()
                raise
            _shared = made
        elif (wanted := check_cluster(config)) != _shared.address or wanted is None:
            there = _shared.address or "a cluster of its own"
            raise ConfigError(f"this process uses {there} already; it cannot use {wanted or 'another one'} too")
        _shared.num_users += 1
        return _shared
    finally:
        _lock.release()


def disconnect(connection: Connection) -> None:
    """One who used it has ended. With the last one the connection ends, and the cluster, where it was our own."""
    global _shared
    with _lock:
        connection.num_users -= 1
        if connection.num_users == 0:
            _shared = None
            connection.close()


def _join(address: Address) -> None:
    try:
        ray.init(address=str(address), log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError, ValueError) as error:  # Ray's ConnectionError is an OSError
        raise ConfigError(
            f"{address.source} is {address}, but that cluster cannot be joined from here: {error}. This machine must "
            "be one of its nodes (`ray start --address`), with the same versions of Ray and Python"
        ) from None
