"""The scenario's chain of releases as a file beside the results, so that figures can be drawn without the service."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from reef_harness import service
from reef_harness.client import Client
from reef_harness.errors import HarnessError
from reef_harness.types import Release


@dataclass(frozen=True, slots=True)
class Link:
    """A release: its place in the chain from 0, and by how many updates its policy is newer than the base."""

    id: str
    parent: str | None
    content: str
    operation: str
    number: int
    version: int


def links(chain: Sequence[Release]) -> list[Link]:
    """The chain, oldest first, from the newest-first list that the service gives."""
    ordered = list(reversed(chain))
    return [
        Link(each.id, each.parent, each.content, each.operation, place, each.version)
        for place, each in enumerate(ordered)
    ]


def policy_of(chain: Sequence[Link], release: str) -> Link:
    """The release that answers where ``release`` is served: a step of the critic alone has its parent's weights.

    ``first`` is the oldest release, ``current`` the newest. Raises HarnessError for one that is not there.
    """
    if not chain:
        raise HarnessError("the scenario has no release yet")
    names = {link.id: link for link in chain} | {"first": chain[0], "current": chain[-1]}
    if release not in names:
        raise HarnessError(f"there is no release {release!r}; first, current, or an id that `reef releases` lists")
    found = names[release]
    while found.operation == "critic-only" and found.parent in names:
        found = names[found.parent]
    return found


async def fetch(arguments: argparse.Namespace) -> list[Link]:
    """The whole chain of the service that the options name."""
    async with await service.connect(arguments) as client:
        return await whole_chain(client)


async def whole_chain(client: Client) -> list[Link]:
    """The whole chain, oldest first."""
    return links(await client.releases(limit=None))


def save(path: Path, chain: Sequence[Link]) -> None:
    """Write the chain: it is there whole, or as it was before."""
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.write_text(json.dumps([asdict(link) for link in chain], indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)


def load(path: Path) -> list[Link]:
    """Read what :func:`save` wrote. Raises HarnessError where it is not there or something else."""
    try:
        return [Link(**entry) for entry in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise HarnessError(f"cannot read the chain in {path}: {error}") from None
