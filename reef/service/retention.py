"""Retention: the content of the oldest receipts goes once it is over age, or while the ledger is over size.

    receipts, oldest first -> over age, or is the ledger over size? -> does nothing need them any more? -> deleted
                                                                       `-> left: looked at again in the next period

A receipt is visited once, and again only while it is left, so a period costs what became due in it.
"""

import asyncio
import time

from reef.errors import ReefError
from reef.ledger import deletion
from reef.ledger.deletion import PAGE, Live
from reef.observe import log
from reef.service.house import House

RETENTION_PERIOD_S = 3600
MAX_LEFT = 10_000  # receipts that are remembered as left; with more of them, the next period visits all of them again


async def run(house: House) -> None:
    """Sweep now, and once in each period, until cancelled. Returns at once where nothing limits the ledger."""
    storage = house.config.storage
    if storage.retention_days is None and storage.max_ledger_bytes is None:
        return
    retention = Retention(house)
    while True:
        try:
            await retention.sweep(time.time())
        except ReefError as error:
            log.warning("retention goes on in the next period: %s", error.message)
        await asyncio.sleep(RETENTION_PERIOD_S)


class Retention:
    """How far the walk over the receipts has come."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._seq = 0  # every receipt up to here was visited
        self._left: list[Live] = []
        self._forgot = False  # some that are left are not in `_left`
        self._cutoff = float("-inf")  # receipts made before it are over age
        self._excess = 0  # bytes that are still to be freed

    async def sweep(self, now: float) -> None:
        """Delete what is due by now. Raises ReefError; what was deleted until then stays so."""
        storage, ledger = self._house.config.storage, self._house.ledger
        if storage.retention_days is not None:
            self._cutoff = now - storage.retention_days * 86_400
        if storage.max_ledger_bytes is not None:
            self._excess = await ledger.read(deletion.used_bytes) - storage.max_ledger_bytes
        if self._forgot:
            self._seq, self._left, self._forgot = 0, [], False
        await self._look_again(now)
        while due := self._due(await ledger.read(deletion.live_after, self._seq)):
            self._left += await self._delete(due, now)
            self._seq = due[-1].seq
            if len(self._left) > MAX_LEFT:
                self._left, self._forgot = self._left[-MAX_LEFT:], True

    async def _look_again(self, now: float) -> None:
        """Newest first, so that a turn is looked at after all that continue it."""
        left = sorted(self._left, key=lambda live: live.seq, reverse=True)
        for start in range(0, len(left), PAGE):
            page = left[start : start + PAGE]
            due = page if self._excess > 0 else [live for live in page if live.created_at < self._cutoff]
            gone = {live.seq for live in due} - {live.seq for live in await self._delete(due, now)}
            self._left = [live for live in self._left if live.seq not in gone]

    def _due(self, found: list[Live]) -> list[Live]:
        """The first of these (oldest first): as far as they are over age, and more while the ledger is over size."""
        due: list[Live] = []
        excess = self._excess
        for live in found:
            if live.created_at >= self._cutoff:
                if excess <= 0:
                    break
                excess -= live.size_bytes
            due.append(live)
        return due

    async def _delete(self, due: list[Live], now: float) -> list[Live]:
        """Delete what nothing needs; the rest."""
        newest_first = dict.fromkeys(live.request_id for live in sorted(due, key=lambda live: live.seq, reverse=True))
        deleted, kept = await self._house.ledger.write(deletion.expire, list(newest_first), now)
        self._excess -= deleted.size_bytes
        reason = "age" if all(live.created_at < self._cutoff for live in due) else "size"
        self._house.count_deleted(len(deleted.receipt_ids), reason)
        return [live for live in due if live.request_id in kept]
