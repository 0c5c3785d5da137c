"""Random lives of a chain: steps, rollbacks, promotions, kills and loads in any order keep every invariant.

The house is the one of `tests/house.py`; beside it runs a model of what the chain must be, a list of links.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import reef.chain
import reef.dispatcher
import reef.progress
from reef.errors import ConflictError, LoadFailedError, ReefError, StepFailedError, UnavailableError, WorkersLostError
from reef.ledger import releases
from reef.ledger.audit import audit
from reef.types import Operation, ReleaseState
from tests.house import SCENARIO, Crash, House

KILLS = (
    "reserve", "step", "stepped", "publish", "published", "commit", "committed", "load", "loaded", "set_verified",
    "copy", "save_done", "save", "saved", "set_checkpoint", "restore", "reset", "jump", "forget_weights",
)  # fmt: skip
FAULTS = (
    ("commit", UnavailableError("disk full")),
    ("publish", UnavailableError("disk full")),
    ("save", UnavailableError("disk full")),
    ("step", WorkersLostError("a worker died")),
    ("step", StepFailedError("nan")),
    ("copy", WorkersLostError("a worker died")),
    ("save_done", WorkersLostError("a worker died")),
    ("save", WorkersLostError("a worker died")),
)


@dataclass
class Link:
    """What the model knows of a release: the batches its weights were trained on, in order."""

    id: str
    content: str
    source: str | None
    quarantined: bool = False


class Lives(RuleBasedStateMachine):
    """One run directory, several owners in turn."""

    flags: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.runner = asyncio.Runner()
        flags = ("--storage.keep", "2", "--storage.keep-checkpoints", "1", "--training.checkpoint-every", "2")
        self.house = House(Path(self.directory.name) / "run", *flags, *self.flags)
        self.names: list[str] = []

    def do(self, work: Any) -> Any:
        return self.runner.run(work)

    @initialize()
    def begin(self) -> None:
        self.do(self._open())
        self.links = [self._link(release) for release in self.do(self.house.chain())]

    async def _open(self) -> None:
        await self.house.open()
        self.house.run()
        await self._settled()

    async def _settled(self) -> None:
        """Until the loop has nothing to do, or was killed."""
        async with asyncio.timeout(60):
            while not self.house.loop.done():
                if self.house.dispatcher.progress.phase == "waiting" and not self.house.dispatcher._wake.is_set():
                    return
                await asyncio.sleep(0.001)

    async def _alive_again(self) -> None:
        """What a supervisor does: where the loop was killed, start the next owner."""
        await self._settled()
        while self.house.loop.done():
            await self.house.crash()
            await self._open()

    def _link(self, release: Any) -> Link:
        quarantined = release.state is ReleaseState.QUARANTINED
        return Link(release.id, release.content_id, release.source, quarantined)

    @rule(kill=st.sampled_from((None, *KILLS)))
    def train(self, kill: str | None) -> None:
        """A group is graded, and perhaps the process ends at some point of what follows."""
        if kill is not None:
            self.house.faults.at(kill, Crash())

        async def work() -> None:
            self.names += await self.house.grade()
            await self._alive_again()
            self.house.faults.planned.clear()

        self.do(work())

    @rule(fault=st.sampled_from(FAULTS), times=st.integers(1, 2))
    def train_with_a_fault(self, fault: tuple[str, Exception], times: int) -> None:
        self.house.faults.at(fault[0], *[fault[1]] * times)

        async def work() -> None:
            self.names += await self.house.grade()
            await self._alive_again()
            self.house.faults.planned.clear()

        self.do(work())

    @rule(fraction=st.floats(0, 1), kill=st.sampled_from((None, *KILLS)), promote=st.booleans())
    def move(self, fraction: float, kill: str | None, promote: bool) -> None:
        """A rollback or a promotion to any release, and perhaps the process ends in it."""
        links = self.do(self.house.chain())
        target = links[round(fraction * (len(links) - 1))]
        if kill is not None:
            self.house.faults.at(kill, Crash())

        async def work() -> None:
            dispatcher = self.house.dispatcher
            asked = asyncio.ensure_future(
                dispatcher.promote(target.id, force=True) if promote else dispatcher.rollback(target.id)
            )
            while not asked.done() and not self.house.loop.done():
                await asyncio.sleep(0.001)
            if asked.done() and asked.exception() is not None:
                assert isinstance(asked.exception(), ConflictError | UnavailableError | Crash), asked.exception()
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await self._alive_again()
            self.house.faults.planned.clear()

        self.do(work())

    @rule(
        fraction=st.floats(0, 1),
        kill=st.sampled_from((None, *KILLS)),
        fault=st.sampled_from((None, *FAULTS)),
        asks=st.lists(st.sampled_from(("checkpoint", "rollback", "promote", "nothing")), min_size=1, max_size=3),
        delay_s=st.floats(0, 0.01),
    )
    def ask_while_a_step_is_in_work(
        self, fraction: float, kill: str | None, fault: Any, asks: list[str], delay_s: float
    ) -> None:
        """Several things are asked for at once, at some moment of a step, and perhaps something fails."""
        links = self.do(self.house.chain())
        target = links[round(fraction * (len(links) - 1))]

        async def work() -> None:
            if kill is not None:
                self.house.faults.at(kill, Crash())
            if fault is not None:
                self.house.faults.at(fault[0], fault[1])
            self.names += await self.house.grade()
            await asyncio.sleep(delay_s)
            dispatcher = self.house.dispatcher
            calls = {
                "checkpoint": dispatcher.checkpoint,
                "rollback": lambda: dispatcher.rollback(target.id),
                "promote": lambda: dispatcher.promote(target.id, force=True),
                "nothing": lambda: dispatcher.rollback("nothing"),
            }
            asked = [asyncio.ensure_future(calls[name]()) for name in asks]
            while not all(task.done() for task in asked) and not self.house.loop.done():
                await asyncio.sleep(0.001)
            for task in asked:
                task.cancel()
            for error in await asyncio.gather(*asked, return_exceptions=True):
                expected = ReefError | Crash | asyncio.CancelledError
                assert not isinstance(error, BaseException) or isinstance(error, expected), error
            await self._alive_again()
            self.house.faults.planned.clear()

        self.do(work())

    @rule()
    def no_engine_loads_the_next_one(self) -> None:
        self.house.faults.at("load", LoadFailedError("it differs"))

        async def work() -> None:
            self.names += await self.house.grade()
            await self._alive_again()
            self.house.faults.planned.clear()

        self.do(work())

    @precondition(lambda self: self.house.dispatcher.progress.paused is not None)
    @rule()
    def promote_the_head(self) -> None:
        async def work() -> None:
            await self.house.dispatcher.promote((await self.house.chain())[-1].id)
            await self._alive_again()

        self.do(work())

    @rule()
    def stop_and_start(self) -> None:
        async def work() -> None:
            await self.house.stop()
            await self._open()

        self.do(work())

    @invariant()
    def the_chain_is_whole_and_everybody_is_at_its_head(self) -> None:
        chain = self.do(self.house.chain())
        # History is never rewritten: what was there is there, with the same content.
        now = [self._link(release) for release in chain]
        assert [(a.id, a.content) for a in now[: len(self.links)]] == [(a.id, a.content) for a in self.links]
        self.links = now
        by_id = {release.id: release for release in chain}
        for before, release in itertools.pairwise(chain):
            assert (release.number, release.parent) == (before.number + 1, before.id)
            origin = by_id[release.source] if release.source else before
            trains = release.operation is Operation.TRAIN
            assert release.step == origin.step + trains
            assert release.policy_version == origin.policy_version + trains
            assert trains or release.content_id == origin.content_id
        for release in chain:
            if release.checkpoint is not None:
                kept = Path(release.checkpoint, "state").read_text()
                assert f"sha256:{json.loads(kept)}" == release.content_id
        head = chain[-1]
        assert head.content_id == f"sha256:{self.house.trainer.state}"
        served = by_id[str(self.house.engines.served)]
        if head.state is ReleaseState.RELEASED:
            assert served.id == head.id
            assert self.house.dispatcher.progress.paused is None
        else:
            assert served.state is ReleaseState.RELEASED
            assert self.house.dispatcher.progress.paused is not None
        for release in (served, head):
            if release.restorable or not self.flags:
                assert self.house.storage.published(release).content_id == release.content_id

    @invariant()
    def every_report_has_one_fate_and_the_ledger_is_sound(self) -> None:
        trained: list[str] = []
        for release in self.do(self.house.chain()):
            lineage = self.do(self.house.ledger.read(releases.lineage, SCENARIO, release.id))
            trained += [sample["report_id"] for sample in lineage["samples"]]
        assert len(trained) == len(set(trained))
        for name in self.names:
            state, reason = self.do(self.house.state(name))
            if state == "trained":
                assert name in trained
            elif state == "dropped":
                assert reason in ("abandoned", "stale", "step_failed")
                assert name not in trained
            else:  # waiting until a quarantine ends
                assert (state, self.house.dispatcher.progress.paused is not None) == ("pending", True)
        assert self.do(self.house.ledger.read(lambda connection: list(audit(connection)))) == []

    def teardown(self) -> None:
        if hasattr(self, "links"):
            self.do(self.house.stop())
        self.runner.close()
        self.directory.cleanup()


class SentLives(Lives):
    """Releases are sent to the engines, and one of three is written to disk."""

    flags = ("--training.sync.transport", "distributed", "--training.sync.disk-every", "3")

    @rule(
        kill=st.sampled_from((None, "transfer", "publish", "published", "set_restorable", "load")),
        fault=st.sampled_from((None, ("load", LoadFailedError("no")), ("set_restorable", WorkersLostError("died")))),
    )
    def the_group_is_gone(self, kill: str | None, fault: Any) -> None:
        """A release cannot be sent, so it is written for the engines, and perhaps that fails too."""
        self.house.faults.at("transfer", LoadFailedError("the group is gone"))
        if fault is not None:
            self.house.faults.at(fault[0], fault[1])
        self.train(kill)

    @rule(
        kill=st.sampled_from((None, "publish", "published", "set_restorable")),
        lost=st.booleans(),
    )
    def an_engine_dies(self, kill: str | None, lost: bool) -> None:
        """It needs the files of the head, and perhaps the process or the workers end over them."""
        if kill is not None:
            self.house.faults.at(kill, Crash())
        elif lost:
            self.house.faults.at("publish", WorkersLostError("died"))

        async def work() -> None:
            self.house.engines.lack_files = True
            self.house.dispatcher.notify()
            async with asyncio.timeout(60):
                while self.house.engines.lack_files and not self.house.loop.done():
                    await asyncio.sleep(0.001)
            await self._alive_again()
            self.house.faults.planned.clear()

        self.do(work())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("lives", "number"), [(Lives, 100), (SentLives, 40)])
def test_random_lives(monkeypatch: pytest.MonkeyPatch, lives: type[Lives], number: int) -> None:
    monkeypatch.setattr(reef.progress, "STORE_RETRY_S", 0.001)
    monkeypatch.setattr(reef.chain, "RESTART_RETRY_S", 0.001)
    monkeypatch.setattr(reef.dispatcher, "SETTLE_S", 0.001)
    lives.TestCase.settings = settings(
        max_examples=number,
        stateful_step_count=8,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    lives.TestCase().runTest()
