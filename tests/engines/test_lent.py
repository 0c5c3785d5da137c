"""An engine that is lent: loans that end early, and servers that end at a bad moment. What it answers: test_pool.py."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import httpx
import pytest

import reef.engines.lent as lent_module
from reef.engines.lent import LentEngine
from reef.engines.pool import Engines
from reef.engines.replica import Replica
from reef.errors import ConflictError, EngineError, UnavailableError
from reef.ledger import releases, scenarios
from reef.ledger.ledger import Ledger
from reef.observe import Metrics
from reef.service.app import create_app
from reef.types import Operation, Release
from tests.engines.conftest import FakeHost
from tests.service.rooms import make_house

pytestmark = pytest.mark.slow  # engines of its own


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.01)


class Host(FakeHost):
    """Says when an end begins too, and lets it not go on before it may."""

    def __init__(self, make_fake_engine) -> None:
        super().__init__(make_fake_engine, "engine-evaluation")
        self.stopping = asyncio.Event()
        self.may_stop = asyncio.Event()
        self.may_stop.set()

    async def stop(self) -> None:
        self.stopping.set()
        await self.may_stop.wait()
        await super().stop()


@pytest.fixture
def with_lent(tmp_path, config, make_fake_engine):
    """Run `work(lent, host)`; `replica` makes another Replica than the real one, as `replica(lent, *arguments)`."""

    def run(work, *settings, idle_s=300.0, replica=None):
        async def main():
            host, settled = Host(make_fake_engine), config(tmp_path, *settings)
            made = Replica if replica is None else lambda *arguments: replica(lent, *arguments)
            lent = LentEngine(lambda: made("engine-evaluation", settled, Metrics(), host), idle_s)
            try:
                async with asyncio.timeout(120):
                    await work(lent, host)
            finally:
                host.may_stop.set()
                await lent.stop()
            assert host.pid is None

        asyncio.run(main())

    return run


def given_back():
    return pytest.raises(ConflictError, match="given back")


# --- loans that end early ---------------------------------------------------------------------------------------------


def test_a_loan_that_is_given_back_before_it_was_asked_for_is_refused_once_and_starts_nothing(
    with_lent, published
) -> None:
    async def work(lent, host):
        assert await lent.give_back("e1", "a") is False
        with given_back() as refused:
            await lent.lend(published("e1"), "a")
        assert (refused.value.code, lent.release, host.engines) == ("given_back", None, [])
        await lent.lend(published("e1"), "a")
        assert await lent.give_back("e1", "a") is True
        await lent.lend(published("e1"), "a")  # in its order, a name may be used again
        assert await lent.give_back("e2", "a") is False  # of another release: another loan
        assert await lent.give_back("e1", "a") is True

    with_lent(work)


def test_a_loan_that_was_given_back_too_early_is_forgotten_in_time_and_so_are_the_oldest_of_too_many(
    with_lent, published, monkeypatch
) -> None:
    async def work(lent, host):
        monkeypatch.setattr(lent_module, "MAX_EARLY", 2)
        for loan in ("a", "b", "a", "c"):
            await lent.give_back("e1", loan)
        await lent.lend(published("e1"), "b")  # the one not heard of for longest
        for loan in ("a", "c"):
            with given_back():
                await lent.lend(published("e1"), loan)
        await lent.give_back("e1", "d")
        monkeypatch.setattr(lent_module, "EARLY_S", 0.0)
        await lent.lend(published("e1"), "d")

    with_lent(work)


def test_a_loan_that_is_given_back_while_the_engine_starts_is_answered_so_at_once_and_others_get_theirs(
    with_lent, published
) -> None:
    async def work(lent, host):
        host.may_start.clear()
        first, second = (asyncio.create_task(lent.lend(published("e1"), loan)) for loan in ("a", "b"))
        await host.starting.wait()
        assert await lent.give_back("e1", "a") is True
        with given_back():
            await first
        assert (lent.release, second.done()) == ("e1", False)
        host.may_start.set()
        await second
        assert lent.replica is not None and lent.replica.served == "e1"

    with_lent(work)


def test_a_loan_that_is_given_back_in_the_moment_in_which_the_engine_has_started_is_not_answered_as_lent(
    with_lent, published
) -> None:
    tasks = []

    class GivenBack(Replica):
        def __init__(self, lent, *arguments) -> None:
            super().__init__(*arguments)
            self.lent = lent

        async def start(self, published):
            await super().start(published)
            tasks.append(asyncio.create_task(self.lent.give_back("e1", "a")))  # runs before who waits for the start

    async def work(lent, host):
        with given_back():
            await lent.lend(published("e1"), "a")
        assert await tasks[0] is True
        assert (lent.release, host.pid) == (None, None)

    with_lent(work, replica=GivenBack)


def test_an_engine_that_starts_for_nobody_any_more_is_ended_and_the_next_release_waits_for_that(
    with_lent, published
) -> None:
    async def work(lent, host):
        host.may_start.clear()
        lending = asyncio.create_task(lent.lend(published("e1"), "a"))
        await host.starting.wait()
        host.stopping.clear()
        host.may_stop.clear()
        giving = asyncio.create_task(lent.give_back("e1", "a"))
        await host.stopping.wait()
        with given_back():
            await lending
        host.starting.clear()
        following = asyncio.create_task(lent.lend(published("e2"), "b"))
        await until(lambda: lent.release == "e2")
        assert not host.starting.is_set()
        host.may_stop.set()
        host.may_start.set()
        await following
        assert await giving is True
        assert [engine.version for engine in host.engines] == ["e2"]

    with_lent(work)


# --- servers that end at a bad moment ---------------------------------------------------------------------------------


def test_an_engine_ends_though_who_gave_it_back_went_away_and_a_stop_waits_for_that(with_lent, published) -> None:
    async def work(lent, host):
        await lent.lend(published("e1"), "a")
        host.stopping.clear()
        host.may_stop.clear()
        giving = asyncio.create_task(lent.give_back("e1", "a"))
        await host.stopping.wait()
        giving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await giving
        stopping = asyncio.create_task(lent.stop())
        await asyncio.sleep(0)
        assert (stopping.done(), host.pid) == (False, 1)
        host.may_stop.set()
        await stopping
        assert host.pid is None

    with_lent(work)


def test_the_end_of_an_engine_that_did_not_start_is_not_cut_short_by_the_stop_of_the_service(
    with_lent, published
) -> None:
    class Refused(Replica):
        def __init__(self, _lent, *arguments) -> None:
            super().__init__(*arguments)

        async def start(self, published):
            await super().start(published)
            raise EngineError("it disagrees")

    async def work(lent, host):
        host.may_start.clear()
        lending = asyncio.create_task(lent.lend(published("e1"), "a"))
        await host.starting.wait()
        host.stopping.clear()
        host.may_stop.clear()
        host.may_start.set()
        with pytest.raises(EngineError, match="no engine answers for e1: it disagrees"):
            await lending
        await host.stopping.wait()
        stopping = asyncio.create_task(lent.stop())
        await asyncio.sleep(0)
        assert (stopping.done(), host.pid) == (False, 1)
        host.may_stop.set()
        await stopping
        assert host.pid is None

    with_lent(work, replica=Refused)


def test_an_engine_that_cannot_be_ended_is_said_and_leaves_room_for_the_next(with_lent, published, caplog) -> None:
    async def work(lent, host):
        await lent.lend(published("e1"), "a")
        real, host.stop = host.stop, refuse
        assert await lent.give_back("e1", "a") is True
        assert "the engine that was lent for e1 does not end: processes [1] do not end" in caplog.text
        host.stop = real
        await lent.lend(published("e2"), "a")

    async def refuse() -> None:
        raise EngineError("processes [1] do not end")

    with_lent(work)


def test_an_engine_that_died_for_good_is_lent_no_more_and_can_be_borrowed_again(
    with_lent, published, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(lent_module, "LOOK_S", 0.01)

    async def work(lent, host):
        await lent.lend(published("e1"), "a")
        host.starts_fail = EngineError("no memory")
        await host.die()
        await until(lambda: lent.release is None)
        assert "the engine that was lent for e1 ends: giving up after 1 restarts in a row: no memory" in caplog.text
        host.starts_fail = None
        await lent.lend(published("e1"), "b")
        assert lent.replica is not None and lent.replica.ready

    with_lent(work, "--inference.max-restarts", "1")


def test_an_engine_that_is_brought_up_again_is_not_idle_meanwhile(with_lent, published, monkeypatch) -> None:
    clock = SimpleNamespace(now=0.0, looks=0)

    def monotonic() -> float:
        clock.looks += 1
        return clock.now

    async def work(lent, host):
        await lent.lend(published("e1"), "a")
        host.may_start.clear()
        await host.die()
        await until(lambda: lent.replica.state == "restarting")
        for _ in range(3):
            clock.now += 200.0  # of the 300 that it may be idle
            looks = clock.looks
            await until(lambda: lent.release is None or clock.looks > looks + 2)  # noqa: B023 (asked before the next)
        assert (lent.release, lent.replica.state) == ("e1", "restarting")
        host.may_start.set()
        await until(lambda: lent.replica.ready)
        looks = clock.looks
        await until(lambda: clock.looks > looks + 2)
        clock.now += 301.0
        await until(lambda: lent.release is None)

    monkeypatch.setattr(lent_module, "LOOK_S", 0.01)
    monkeypatch.setattr(lent_module, "time", SimpleNamespace(monotonic=monotonic))
    with_lent(work)


def test_who_waits_for_an_engine_when_the_service_stops_is_told_that(with_lent, published) -> None:
    async def work(lent, host):
        host.may_start.clear()
        lending = asyncio.create_task(lent.lend(published("e1"), "a"))
        await host.starting.wait()
        await lent.stop()
        with pytest.raises(UnavailableError, match="the service stops"):
            await lending

    with_lent(work)


# --- over HTTP --------------------------------------------------------------------------------------------------------


def test_a_delete_ends_a_loan_whose_post_is_under_way_or_comes_later(
    tmp_path, config, published, make_fake_engine
) -> None:
    route = "/reef/scenarios/s/releases/r0/engine"

    async def work(client, house, host):
        host.may_start.clear()
        asking = asyncio.create_task(client.post(route, json={"loan": "a"}))
        await host.starting.wait()
        gone = await client.delete(f"{route}?loan=a")
        assert (gone.status_code, gone.json()) == (200, {"release_id": "r0", "given_back": True})
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "given_back")
        assert (house.engines.lent, host.engines) == (None, [])
        host.may_start.set()
        gone = await client.delete(f"{route}?loan=b")  # overtakes its POST
        assert (gone.status_code, gone.json()["given_back"]) == (200, False)
        answer = await client.post(route, json={"loan": "b"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "given_back")
        assert (house.engines.lent, host.engines) == (None, [])
        answer = await client.post(route, json={"loan": "b"})
        assert (answer.status_code, answer.json()["role"]) == (200, "evaluation")

    async def main():
        settled, host = config(tmp_path), Host(make_fake_engine)
        engines = Engines(settled, Metrics(), lambda name: host)
        ledger = Ledger.open(f"sqlite:///{tmp_path / 'ledger.db'}")
        storage = SimpleNamespace(published=lambda release: published(release.id))
        house = make_house(settled, ledger, engines, storage=storage)
        house.waiting_for = None
        transport = httpx.ASGITransport(app=create_app(house))
        try:
            await ledger.write(scenarios.create, "s", "grpo", time.time())
            await ledger.write(releases.append, BASE)
            async with (
                asyncio.timeout(120),
                httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client,
            ):
                await work(client, house, host)
        finally:
            await engines.stop()
            ledger.close()

    asyncio.run(main())


BASE = Release(
    id="r0",
    scenario="s",
    number=0,
    parent=None,
    content_id="sha256:0",
    operation=Operation.BASE,
    policy_version=0,
    step=0,
    batch_id=None,
    path="",
    checkpoint=None,
    restorable=True,
    created_at=1.0,
)
