"""The options by which every command finds its service."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from reef_harness.client import MAX_CONNECTIONS, TIMEOUT_S, Client, Retry
from reef_harness.errors import HarnessError, UnexpectedAnswer
from reef_harness.keys import KEY_FILE
from reef_harness.types import Json


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--url``, ``--scenario`` and ``--key-file``."""
    parser.add_argument(
        "--url",
        default=os.environ.get("REEF_URL", "http://127.0.0.1:8080"),
        help="of the service (default: REEF_URL, else http://127.0.0.1:8080)",
    )
    parser.add_argument(
        "--scenario", default=os.environ.get("REEF_SCENARIO"), help="default: REEF_SCENARIO, else the one that is there"
    )
    parser.add_argument(
        "--key-file",
        type=Path,
        default=KEY_FILE,
        help=f"of a service on this machine, where REEF_API_KEY is not set (default: {KEY_FILE})",
    )


async def connect(
    arguments: argparse.Namespace, *, timeout_s: float = TIMEOUT_S, max_connections: int = MAX_CONNECTIONS
) -> Client:
    """A client of the service that the options name, which is there and takes our key.

    Without ``--scenario`` it is the only one there, or the one that trains. Raises HarnessError where the service does
    not answer, refuses, or leaves open which scenario is meant.
    """
    url, key_file = arguments.url, arguments.key_file
    async with Client(url, key_file=key_file, retry=Retry(total_s=0)) as probe:
        there = await probe.scenarios()
    if not all(isinstance(found, dict) and "name" in found for found in there):
        raise UnexpectedAnswer(f"{url} lists scenarios without names: is it a Reef service?")
    scenario = arguments.scenario or _only(there)
    if scenario not in [found["name"] for found in there]:
        raise HarnessError(f"{url} has no scenario {scenario!r}, only {_names(there)}")
    return Client(url, scenario=scenario, key_file=key_file, timeout_s=timeout_s, max_connections=max_connections)


def _only(there: Sequence[Json]) -> str:
    """The one scenario, or the one that trains."""
    chosen = there if len(there) == 1 else [found for found in there if found.get("trains")]
    if len(chosen) != 1:
        raise HarnessError(f"--scenario must say which one is meant: {_names(there)}")
    return str(chosen[0]["name"])


def _names(there: Sequence[Json]) -> str:
    return ", ".join(repr(found["name"]) for found in there) or "none"
