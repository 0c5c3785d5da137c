"""One rollout per prompt, many in flight at all times, each graded and reported at once (SAO)."""

from collections.abc import Iterator
from typing import Unpack

from reef_harness.client import Client
from reef_harness.drivers.driver import Driver, Options
from reef_harness.drivers.records import Key
from reef_harness.drivers.rollout import Done
from reef_harness.graders import Grader
from reef_harness.types import Item


class StreamDriver(Driver):
    """``in_flight`` rollouts at all times, one per prompt; whichever ends is graded and reported, and the next begins.

    ``items`` may be endless. With ``max_ahead`` at most ``batch * (1 + max_ahead)`` rollouts are open (sampled, or
    reported and not yet trained, recorded or dropped), ``batch`` being what the service trains on at once; without,
    nothing paces them but ``in_flight``.
    """

    kind = "stream"
    unit = "rollout"

    def __init__(
        self,
        client: Client,
        items: Iterator[Item],
        grader: Grader,
        *,
        batch: int = 64,
        max_ahead: int | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(client, items, grader, size=1, batch_units=batch, max_ahead=max_ahead, **options)

    async def _sample(self, item: Item, key: Key, indexes: list[int]) -> list[Done]:
        return await self._sampler.sample(item, key, None, indexes)
