"""Which Ray cluster is joined, if any, and whether one is there. Needs no Ray: `reef serve --dry-run` asks it too."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from reef.config import Config
from reef.errors import ConfigError

KNOCK_TIMEOUT_S = 5
# How a client of HTTP/2 (so of gRPC) begins: the fixed words, then a frame of settings that changes none (RFC 9113).
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_FRAME_HEADER_BYTES = 9  # length (3), type, flags, stream (4)
_SETTINGS = 4  # the type of the frame that such a server answers first


@dataclass(frozen=True, slots=True)
class Address:
    """A cluster to join: `host`:`port` of the service (GCS) that its head runs, and the setting that named it."""

    host: str
    port: int
    source: str  # training.ray-address | RAY_ADDRESS

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def find_cluster(config: Config, environ: Mapping[str, str] | None = None) -> Address | None:
    """The cluster that the trainer and the engines are to run on; None: on this machine, or they need no Ray.

    Raises:
        ConfigError: the address has not the form HOST:PORT (or `auto`), `auto` finds none or several, GPUs are numbered
            though a cluster assigns its own, too few, or one twice.
    """
    if config.training.backend == "none" and config.inference.url is not None:
        return None
    _check_devices(config)
    named = _named(config, os.environ if environ is None else environ)
    if named is None:
        return None
    text, source = named
    for section, devices in (("training", config.training.devices), ("inference", config.inference.devices)):
        if devices is not None:
            raise ConfigError(
                f"{section}.devices numbers GPUs of this machine, but {source} names a Ray cluster, which assigns its "
                f"own: leave {section}.devices out, and give each node its GPUs with `ray start --num-gpus`"
            )
    return _parse(_found_here(source) if text == "auto" else text, source)


def check_cluster(config: Config, environ: Mapping[str, str] | None = None) -> Address | None:
    """As `find_cluster`, and something there answers as Ray does.

    Raises:
        ConfigError: also where nothing answers within KNOCK_TIMEOUT_S, or something else does.
    """
    environ = os.environ if environ is None else environ
    address = find_cluster(config, environ)
    if address is not None:
        _knock(address, speaks_tls=environ.get("RAY_USE_TLS", "0") not in ("0", ""))
    return address


def _check_devices(config: Config) -> None:
    """Raises ConfigError where training.devices names a GPU twice, or fewer than there are workers ([]: CPUs)."""
    devices, num_workers = config.training.devices, config.training.layout.world_size
    if devices and len(set(devices)) < len(devices):
        raise ConfigError(f"training.devices is {devices}: each worker needs a GPU of its own, or NCCL refuses them")
    if devices and len(devices) < num_workers:
        raise ConfigError(
            f"training.devices names {len(devices)} GPUs, but training.layout has {num_workers} workers, which take "
            "one each; [] trains on CPUs"
        )


def _named(config: Config, environ: Mapping[str, str]) -> tuple[str, str] | None:
    if config.training.ray_address is not None:
        return config.training.ray_address, "training.ray-address"
    text = environ.get("RAY_ADDRESS", "")
    return (text, "RAY_ADDRESS") if text not in ("", "local") else None  # Ray's word for one of our own


def _parse(text: str, source: str) -> Address:
    if "://" in text:
        raise ConfigError(
            f"{source} is {text}: Reef joins a cluster as one of its nodes, not through Ray Client or the jobs API. "
            "Run `ray start --address=HEAD:6379` on this machine (--num-cpus=0 where nothing may be placed here) and "
            "give HEAD:6379"
        )
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(
            f"{source} is {text!r}: expected HOST:PORT of the cluster's head, as `ray start` took it, or auto"
        )
    return Address(host.removeprefix("[").removesuffix("]"), int(port), source)


def _found_here(source: str) -> str:
    """The address that the node which runs on this machine was started with."""
    found: set[str] = set()
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "raylet":
            words = process.info["cmdline"] or []
            found |= {word.partition("=")[2] for word in words if word.startswith("--gcs-address=")}
    if len(found) != 1:
        what = f"{len(found)} do: {', '.join(sorted(found))}" if found else "none does"
        raise ConfigError(f"{source} is auto: expected one Ray cluster that has a node on this machine, but {what}")
    return found.pop()


def _knock(address: Address, speaks_tls: bool) -> None:
    """Fail at once where no Ray is: Ray itself takes minutes to give up."""
    nobody = f"{address.source} is {address}, but no Ray cluster answers there"
    try:
        with socket.create_connection((address.host, address.port), KNOCK_TIMEOUT_S) as connection:
            if speaks_tls:
                return
            connection.sendall(_HELLO)
            answer = connection.recv(_FRAME_HEADER_BYTES, socket.MSG_WAITALL)
    except OSError as error:
        raise ConfigError(f"{nobody}: {error.strerror or error}") from None
    if len(answer) < _FRAME_HEADER_BYTES or answer[3] != _SETTINGS:
        raise ConfigError(
            f"{nobody}: what listens there does not speak gRPC. Give the port of the head itself (6379 unless "
            "`ray start --port` says otherwise), not that of the dashboard"
        )
