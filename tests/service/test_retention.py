"""Retention: what is old, or too much, goes; what is needed is looked at again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reef.config import load
from reef.ledger import deletion, receipts, reports, scenarios
from reef.ledger.ledger import Ledger
from reef.service import retention
from reef.service.retention import Retention
from reef.types import Drop, FinishReason, Generation, Report, Request, Sampling, Span
from tests.service.rooms import make_house

DAY = 86_400.0
NOW = 100 * DAY
NUM_TOKENS = 1000  # enough that pages are given back


class Home:
    """A house with a ledger in which receipts have any age."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.ledger = Ledger.open(f"sqlite:///{directory / 'ledger.db'}")
        self.house = make_house(load(None, flags), self.ledger)
        self.retention = Retention(self.house)
        self._prompts: dict[str, Any] = {}

    async def receipt(self, age_days: float, parent: str | None = None) -> str:
        at = NOW - age_days * DAY
        number = len(self._prompts)
        prompt = np.concatenate([self._prompts.get(parent or "", np.array([], dtype=np.int32)), np.int32([number])])
        request = Request(f"req{number}", "s", "chat", prompt, Sampling(max_tokens=1), 1, b"{}", at, parent=parent)
        ids = np.full(NUM_TOKENS, number, dtype=np.int32)
        sampled = Generation(
            ids, np.zeros(NUM_TOKENS, dtype=np.float32), FinishReason.STOP, (Span(0, NUM_TOKENS, "r"),)
        )
        made = receipts.make(request, 0, sampled, "e", f"rcp{number}", at)
        if not self._prompts:
            await self.ledger.write(scenarios.create, "s", "grpo", 1.0)
        await self.ledger.write(receipts.record, request, [made])
        self._prompts[made.id] = np.concatenate([prompt, ids])
        return made.id

    async def report(self, receipt: str) -> str:
        body = {"references": [receipt], "score": 1.0}
        report = Report(f"rep-{receipt}", "s", (receipt,), body, score=1.0)
        await self.ledger.write(reports.accept, report, True, NOW)
        return report.id

    async def live(self) -> list[str]:
        found = [name for name in self._prompts if (await self._skeleton(name)).deleted_at is None]
        return sorted(found, key=lambda name: int(name.removeprefix("rcp")))

    async def _skeleton(self, name: str) -> Any:
        return await self.ledger.read(receipts.skeleton, name)


@pytest.fixture
def at_home(tmp_path: Path) -> Callable[..., None]:
    """`at_home(test, *flags)` runs a coroutine with a Home."""

    def run(test: Callable[[Home], Awaitable[None]], *flags: str) -> None:
        async def inside() -> None:
            home = Home(tmp_path, *flags)
            try:
                await test(home)
            finally:
                home.ledger.close()

        asyncio.run(inside())

    return run


def test_what_is_over_age_goes_and_the_rest_in_its_time(at_home) -> None:
    async def test(home: Home) -> None:
        _, middle, young = [await home.receipt(age) for age in (40, 31, 2)]
        await home.retention.sweep(NOW - 5 * DAY)
        assert await home.live() == [middle, young]
        await home.retention.sweep(NOW)
        assert await home.live() == [young]
        await home.retention.sweep(NOW + 29 * DAY)
        assert await home.live() == []
        assert home.house.num_deleted == {"age": 3}
        assert 'reef_receipts_deleted_total{reason="age"} 3.0' in home.house.metrics.render().decode()

    at_home(test, "--storage.retention-days", "30")


def test_what_a_report_waits_for_is_kept_and_goes_once_that_has_ended(at_home) -> None:
    async def test(home: Home) -> None:
        waiting, _ = await home.receipt(50), await home.receipt(40)
        report = await home.report(waiting)
        for _ in range(2):
            await home.retention.sweep(NOW)
            assert await home.live() == [waiting]
        await home.ledger.write(reports.drop, [Drop(report, "tied")], NOW)
        await home.retention.sweep(NOW)
        assert await home.live() == []

    at_home(test, "--storage.retention-days", "30")


def test_a_conversation_goes_in_one_sweep_once_its_last_turn_is_over_age(at_home) -> None:
    async def test(home: Home) -> None:
        parent, turns = None, []
        for age in (60, 50, 40, 35, 20):
            parent = await home.receipt(age, parent)
            turns.append(parent)
        await home.retention.sweep(NOW)
        assert await home.live() == turns  # the last one holds the text of all
        await home.retention.sweep(NOW + 11 * DAY)
        assert await home.live() == []

    at_home(test, "--storage.retention-days", "30")


def test_conversations_side_by_side_go_in_one_sweep(at_home, monkeypatch) -> None:
    async def test(home: Home) -> None:
        parents: list[str | None] = [None] * 3
        for _ in range(4):  # each page holds one turn of each
            parents = [await home.receipt(40, parent) for parent in parents]
        young = await home.receipt(1)
        await home.retention.sweep(NOW)
        assert await home.live() == [young]

    monkeypatch.setattr(retention, "MAX_LEFT", 2)
    monkeypatch.setattr(retention, "PAGE", 3)
    monkeypatch.setattr(deletion, "PAGE", 3)
    at_home(test, "--storage.retention-days", "30")


def test_more_needed_receipts_than_are_remembered_go_once_they_can(at_home, monkeypatch) -> None:
    async def test(home: Home) -> None:
        made = [await home.receipt(40) for _ in range(7)]
        waiting = [await home.report(receipt) for receipt in made]
        await home.retention.sweep(NOW)
        assert await home.live() == made
        await home.ledger.write(reports.drop, [Drop(report, "tied") for report in waiting], NOW)
        await home.retention.sweep(NOW)
        assert await home.live() == []

    monkeypatch.setattr(retention, "MAX_LEFT", 2)
    monkeypatch.setattr(deletion, "PAGE", 3)
    at_home(test, "--storage.retention-days", "30")


def test_over_size_the_oldest_go_and_no_more_than_needed(at_home) -> None:
    async def test(home: Home) -> None:
        made = [await home.receipt(10 - index) for index in range(10)]
        used = await home.ledger.read(deletion.used_bytes)
        storage = home.house.config.storage
        limit = used - 5 * NUM_TOKENS * 4  # half of that many bytes a receipt: three must go
        home.house.config = home.house.config.model_copy(
            update={"storage": storage.model_copy(update={"max_ledger_bytes": limit})}
        )
        await home.retention.sweep(NOW)
        assert await home.live() == made[3:]
        assert home.house.num_deleted == {"size": 3}
        for _ in range(3):  # pages that are not quite empty are not given back
            await home.retention.sweep(NOW)
        assert await home.ledger.read(deletion.used_bytes) <= limit
        left = await home.live()
        assert left == made[-len(left) :]
        assert len(left) >= 5

    at_home(test)


def test_both_limits_at_once(at_home) -> None:
    async def test(home: Home) -> None:
        made = [await home.receipt(age) for age in (40, 30, 3, 2, 1)]
        kept = await home.report(made[2])
        await home.retention.sweep(NOW)
        assert await home.live() == [made[2]]
        assert kept

    at_home(test, "--storage.retention-days", "20", "--storage.max-ledger-bytes", "1")


def test_a_task_without_limits_ends_at_once_and_with_one_sweeps_until_cancelled(at_home, monkeypatch) -> None:
    async def test(home: Home) -> None:
        receipt = await home.receipt(40)
        await retention.run(home.house)
        assert await home.live() == [receipt]
        home.house.config = load(None, ["--storage.retention-days", "0.5"])
        task = asyncio.create_task(retention.run(home.house))
        late = None
        for _ in range(6000):
            await asyncio.sleep(0.01)
            if await home.live() == []:
                if late is not None:
                    break
                late = await home.receipt(40)
        assert await home.live() == []
        assert late is not None
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    monkeypatch.setattr(retention, "RETENTION_PERIOD_S", 0.01)
    at_home(test)
