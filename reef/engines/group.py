"""The process group in which the trainer's first rank and the ranks of one engine meet, laid out as SGLang does it.

    TCPStore <- prefix NAME <- prefix NAME/ <- prefix cpu/ (gloo) or cuda/ (nccl)

Rank 0, the trainer, keeps the store; every rank joins with the same name. torch's registry of groups is left out, so
that a process can have groups beside its own, under any name, and give one up alone.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from reef.errors import EngineError

POLL_S = 0.001
GRACE_S = 1  # from a broadcast's own end of waiting to ours
JOIN_TIMEOUT_S = 30  # ranks that are alive take less than a second
NEVER = timedelta(days=7)  # nccl's own watchdog ends the process at a timeout: ours comes first


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    return host in ("localhost", "::1") or host.startswith("127.")


def open_store(host: str, timeout_s: float) -> TCPStore:
    """A store that listens on this address alone, on a port that the kernel gave.

    Raises:
        EngineError: the address is not ours.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.bind((host, 0))
        listener.listen()
    except OSError as error:
        listener.close()
        raise EngineError(f"cannot listen on {host} for engines: {error}") from None
    port = listener.getsockname()[1]
    return TCPStore(  # takes the socket over
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def find_store(host: str, port: int, timeout_s: float) -> TCPStore:
    """The store that rank 0 opened. Raises EngineError where none answers in time."""
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise EngineError(f"no store answers at {host}:{port}: {_first_line(error)}") from None


class Group:
    """One rank's end of a group. What is waited for is bounded; after an error the group is of no use: close it."""

    def __init__(
        self,
        store: TCPStore,
        name: str,
        rank: int,
        world_size: int,
        backend: str,
        timeout_s: float,
    ) -> None:
        """Join. Blocks until every rank is there (nccl: until the first broadcast).

        Args:
            backend: `gloo` or `nccl`.
            timeout_s: for each broadcast; for joining too, where that is less than JOIN_TIMEOUT_S.

        Raises:
            EngineError: not every rank came in time.
        """
        self.name = name
        self._timeout_s = timeout_s
        self._stuck = False
        join_timeout_s = min(timeout_s, JOIN_TIMEOUT_S)
        device = "cuda" if backend == "nccl" else "cpu"
        prefixed: Any = store
        for prefix in (name, f"{name}/", f"{device}/"):
            prefixed = PrefixStore(prefix, prefixed)
        try:
            if backend == "nccl":
                self._ranks = _nccl(prefixed, rank, world_size)
            else:
                self._ranks = _gloo(prefixed, rank, world_size, store.host, join_timeout_s)
        except RuntimeError as error:
            raise EngineError(
                f"the {world_size} ranks of group {name} did not meet in {join_timeout_s:g} s: {_first_line(error)}"
            ) from None

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Send contiguous tensors from rank 0, or receive into ones of the same shapes and dtypes, in order.

        Raises:
            EngineError: another rank is gone, or has not kept up for the group's timeout.
        """
        outcome: Future[None] = Future()
        # In a thread, for what nccl does before the first broadcast has no bound of its own.
        threading.Thread(target=self._run, args=(tensors, outcome), name="broadcast", daemon=True).start()
        try:
            outcome.result(self._timeout_s + GRACE_S)
        except TimeoutError:
            self._stuck = True
            raise EngineError(f"group {self.name}: its ranks did not connect within {self._timeout_s:g} s") from None
        except RuntimeError as error:
            raise EngineError(f"group {self.name} failed: {_first_line(error)}") from None

    def _run(self, tensors: Sequence[torch.Tensor], outcome: "Future[None]") -> None:
        try:
            self._broadcast(tensors)
        except Exception as error:  # noqa: BLE001 (raised again by who waits)
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    def _broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        deadline = time.monotonic() + self._timeout_s
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=self._timeout_s)
        under_way = [self._ranks.broadcast([tensor], options) for tensor in tensors]
        for work in under_way:
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise EngineError(f"group {self.name}: a rank did not keep up within {self._timeout_s:g} s")
                time.sleep(POLL_S)
            work.wait()

    def close(self) -> None:
        """Cut the connections: other ranks that wait for this one see it. The group is of no use afterwards."""
        if not self._stuck:  # (else this could be stuck as well)
            self._ranks.abort()
        self._ranks = None


def _gloo(store: Any, rank: int, world_size: int, meeting_host: str, timeout_s: float) -> Any:
    ranks: Any = dist.ProcessGroupGloo
    options = ranks._Options()
    options._timeout = timedelta(seconds=timeout_s)
    # Ranks that meet over loopback also speak over it; others over the address that GLOO_SOCKET_IFNAME or the host's
    # name leads to.
    here = is_loopback(meeting_host)
    options._devices = [ranks.create_device(hostname="127.0.0.1") if here else ranks.create_default_device()]
    return ranks(store, rank, world_size, options)


def _nccl(store: Any, rank: int, world_size: int) -> Any:
    ranks: Any = dist.ProcessGroupNCCL
    options = ranks.Options()
    options._timeout = NEVER
    with _errors_are_ours():
        return ranks(store, rank, world_size, options)


@contextlib.contextmanager
def _errors_are_ours() -> Iterator[None]:
    """By default nccl ends the process when another rank is gone. Read once, when a group is made."""
    ours = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _first_line(error: Exception) -> str:
    """torch's errors bring a stack of C++ along."""
    return str(error).splitlines()[0]
