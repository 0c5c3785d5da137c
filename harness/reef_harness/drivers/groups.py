"""Prompts times G: the rollouts of a prompt are compared with one another (GRPO)."""

import asyncio
import hashlib
from collections.abc import Iterator
from typing import Unpack

from reef_harness.client import Client
from reef_harness.drivers.driver import Driver, Options
from reef_harness.drivers.records import Key
from reef_harness.drivers.rollout import Done
from reef_harness.graders import Grader
from reef_harness.types import Item

_ID_CHARS = 200


class GroupsDriver(Driver):
    """Each prompt is answered ``group_size`` times and each answer reported under its group's name.

    ``items`` may be endless. At most ``groups_per_batch * (1 + max_ahead)`` groups are open (sampled, or reported and
    not yet trained or dropped) and at most ``in_flight`` being sampled; ``max_ahead=None`` paces by nothing. A group is
    asked for as one request with ``n``, or with ``one_request=False`` as G requests. A group of which a member has no
    score (it failed, or a person must look) cannot become whole: the service trains or drops it at its
    ``group-deadline-s``, and the driver does not wait for that.
    """

    kind = "groups"
    unit = "group"

    def __init__(
        self,
        client: Client,
        items: Iterator[Item],
        grader: Grader,
        *,
        group_size: int = 8,
        groups_per_batch: int = 8,
        max_ahead: int | None = 1,
        one_request: bool = True,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            client, items, grader, size=group_size, batch_units=groups_per_batch, max_ahead=max_ahead, **options
        )
        self._one_request = one_request

    async def _sample(self, item: Item, key: Key, indexes: list[int]) -> list[Done]:
        group = f"{_short(item.id)}/{self._records.run}-{key[1]}"  # the same in every life: it can be filled up
        requests = [indexes] if self._one_request else [[index] for index in indexes]
        parts = await asyncio.gather(*(self._sampler.sample(item, key, group, each) for each in requests))
        return [done for part in parts for done in part]


def _short(id: str) -> str:
    """An item's id in a group's name, which the service takes up to 256 characters of."""
    return id if len(id) <= _ID_CHARS else f"{id[: _ID_CHARS - 33]}-{hashlib.sha256(id.encode()).hexdigest()[:32]}"
