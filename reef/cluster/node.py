"""What a process does first on the node of a cluster it was placed on: see the shared files, choose its network."""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from reef.errors import ConfigError


def check_shared(shared: Mapping[str, Path], who: str) -> None:
    """Whether this process sees directories that another one, perhaps on another machine, sees.

    Args:
        shared: by the setting that each belongs to.
        who: this process, for the message.

    Raises:
        ConfigError: one is not here.
    """
    for setting, path in shared.items():
        if not path.is_dir():
            raise ConfigError(
                f"{who} on {socket.gethostname()} does not see {path} ({setting}): put it on a file system that all "
                "nodes of the cluster have at the same path"
            )


def speak_over(address: str) -> None:
    """Have gloo, in this process and those that it starts, use the interface that has the node's address.

    By itself it takes the one that the host's name leads to, which on many machines is loopback.
    """
    if (interface := interface_of(address)) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has an IP address; None where it has none such."""
    if address.startswith("127."):
        return "lo"  # it has all of them, and lists one
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if address in (each.address for each in addresses)), None)
