"""Receipts linked by parent: who continues whom, and whole prompts out of what each turn added.

However deep a conversation is, its ancestors are read by one query, and what its turns share lies in memory once.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import CTE, Connection, Row, Select, bindparam, select

from reef.ledger.codec import unpack_ids
from reef.ledger.schema import receipts, requests
from reef.types import Ids

PAGE = 500  # receipts named in one query


def _above() -> CTE:
    """The ids of the receipts `ids` and of all their ancestors, each once."""
    above = (
        select(receipts.c.id).where(receipts.c.id.in_(bindparam("ids", expanding=True))).cte("above", recursive=True)
    )
    parents = (
        select(requests.c.parent)
        .select_from(above)
        .join(receipts, receipts.c.id == above.c.id)
        .join(requests, requests.c.id == receipts.c.request_id)
        .where(requests.c.parent.is_not(None))
    )
    return above.union(parents)


def _of_all_above(*columns: Any) -> Select[Any]:
    above = _above()
    return (
        select(*columns)
        .select_from(above)
        .join(receipts, receipts.c.id == above.c.id)
        .join(requests, requests.c.id == receipts.c.request_id)
    )


# Built once: making a statement costs more than running it.
_FIND_PARENTS = _of_all_above(receipts.c.id, requests.c.parent)
_FIND_LINKS = _of_all_above(*receipts.c["id", "request_id", "output_ids"], *requests.c["parent", "prompt_ids"])


@dataclass(frozen=True, slots=True)
class _Link:
    """One ancestor: what its turn added to the ids before it, and which it continues."""

    request_id: str
    parent: str | None
    added: Ids
    sampled: Ids


def parents_of(connection: Connection, receipt_ids: Iterable[str]) -> dict[str, str | None]:
    """The parents of these receipts and of all their ancestors; a receipt that nobody knows is left out."""
    found: dict[str, str | None] = {}
    for page in _pages(receipt_ids):
        found.update((row.id, row.parent) for row in connection.execute(_FIND_PARENTS, {"ids": page}))
    return found


def whole_prompts(connection: Connection, rows: Sequence[Row[Any]]) -> dict[str, Ids]:
    """The whole prompt [P] of each row, by request: the ids of every turn before it, then what the request added.

    Turns of one conversation get views of one array, so that many turns take no more memory than the last of them.

    Args:
        rows: receipts with their request's `request_id`, `parent` and `prompt_ids`.

    Raises:
        ValueError: a parent is not there, or turns continue one another in a circle.
    """
    asked = {row.request_id: (row.parent, unpack_ids(row.prompt_ids)) for row in rows}
    links = _links(connection, {parent for parent, _ in asked.values() if parent is not None})
    paths = {request_id: _path(links, parent) for request_id, (parent, _) in asked.items()}
    found: dict[str, Ids] = {}
    for request_id in sorted(asked, key=lambda id: -len(paths[id])):  # the last turns first: they hold those before
        if request_id not in found:
            found |= _shared(paths[request_id], request_id, asked[request_id][1], asked.keys() - found.keys())
    return found


def _shared(path: Sequence[_Link], request_id: str, added: Ids, wanted: Collection[str]) -> dict[str, Ids]:
    """One conversation's ids, and of each of its requests that is wanted the part that was its prompt."""
    if not path:
        return {request_id: added}
    tokens = np.concatenate([piece for link in path for piece in (link.added, link.sampled)] + [added])
    tokens.flags.writeable = False
    found = {request_id: tokens}
    end = 0
    for link in path:
        end += len(link.added)
        if link.request_id in wanted:
            found[link.request_id] = tokens[:end]
        end += len(link.sampled)
    return found


def _path(links: Mapping[str, _Link], parent: str | None) -> list[_Link]:
    """From the first turn to `parent`."""
    path: list[_Link] = []
    while parent is not None:
        if parent not in links:
            raise ValueError(f"it continues {parent}, which is not there")
        if len(path) > len(links):
            raise ValueError(f"it continues {parent}, which continues it")
        path.append(links[parent])
        parent = path[-1].parent
    return path[::-1]


def _links(connection: Connection, receipt_ids: Collection[str]) -> dict[str, _Link]:
    """These receipts and all their ancestors."""
    found: dict[str, _Link] = {}
    for page in _pages(receipt_ids):
        for row in connection.execute(_FIND_LINKS, {"ids": page}):
            added, sampled = unpack_ids(row.prompt_ids), unpack_ids(row.output_ids)
            found[row.id] = _Link(row.request_id, row.parent, added, sampled)
    return found


def _pages(ids: Iterable[str]) -> Iterator[list[str]]:
    every = list(dict.fromkeys(ids))
    for start in range(0, len(every), PAGE):
        yield every[start : start + PAGE]
