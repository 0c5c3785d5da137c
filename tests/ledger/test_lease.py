"""Who owns the ledger: one service at a time, by the database's clock, and what it writes late is refused."""

import asyncio
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, insert

from reef.errors import OwnershipLostError, UnavailableError
from reef.ledger import batches, database
from reef.ledger.ledger import Ledger
from reef.ledger.schema import meta


def note(connection: Connection, key: str) -> str:
    connection.execute(insert(meta).values(key=key, value="x"))
    return key


def notes(book: Any) -> set[str]:
    return {key for (key,) in book.rows("SELECT key FROM meta WHERE key LIKE 'note%'")}


@pytest.fixture
def services(postgres_book: Any) -> Iterator[Callable[..., Ledger]]:
    """`services(timeout_s)` opens one more service on the book's ledger."""
    opened: list[Ledger] = []

    def open_one(timeout_s: float = 10.0) -> Ledger:
        opened.append(Ledger.open(postgres_book.url, lease_timeout_s=timeout_s))
        return opened[-1]

    yield open_one
    for ledger in opened:
        ledger.close()


def test_who_opens_a_file_holds_its_lease_for_as_long_as_it_runs(sqlite_book: Any) -> None:
    lease = sqlite_book.ledger.lease

    async def run() -> None:
        assert await lease.try_acquire()
        assert await lease.renew()
        keeping = asyncio.create_task(lease.keep())
        await asyncio.sleep(0.01)
        assert not keeping.done()
        keeping.cancel()
        await lease.release()
        assert (lease.held, lease.epoch, lease.lost.is_set()) == (True, 1, False)
        await sqlite_book.ledger.write_owned(note, "note")

    asyncio.run(run())
    assert notes(sqlite_book) == {"note"}


@pytest.mark.slow
class TestSeveralServices:
    """On one PostgreSQL ledger."""

    def test_one_of_them_is_the_owner_and_the_next_one_has_a_greater_epoch(
        self, postgres_book: Any, services: Callable[..., Ledger]
    ) -> None:
        first, second = services(), services()

        async def run() -> None:
            assert first.shared
            assert (first.epoch, first.lease.held) == (0, False)
            assert await first.lease.try_acquire()
            assert await first.lease.try_acquire()  # it is already
            assert not await second.lease.try_acquire()
            assert (first.epoch, second.epoch) == (1, 0)
            await first.lease.release()
            assert (first.epoch, first.lease.held, await first.lease.renew()) == (0, False, False)
            assert await second.lease.try_acquire()
            assert (second.epoch, second.lease.held) == (2, True)

        asyncio.run(run())
        assert re.fullmatch(r"[^:]+:\d+:[0-9a-f]{6}", second.lease.holder)
        assert postgres_book.rows("SELECT name, holder, epoch FROM leases") == [("dispatcher", second.lease.holder, 2)]
        assert postgres_book.rows("SELECT value FROM meta WHERE key = 'epoch'") == [("2",)]

    def test_of_many_that_ask_at_once_one_gets_it(self, services: Callable[..., Ledger]) -> None:
        ledgers = [services() for _ in range(6)]

        async def run() -> list[bool]:
            return list(await asyncio.gather(*(ledger.lease.try_acquire() for ledger in ledgers)))

        assert sorted(asyncio.run(run())) == [False] * 5 + [True]
        assert sorted(ledger.epoch for ledger in ledgers) == [0] * 5 + [1]

    def test_any_writes_what_anyone_may_and_only_the_owner_what_is_owned(
        self, postgres_book: Any, services: Callable[..., Ledger]
    ) -> None:
        owner, other = services(), services()

        async def run() -> None:
            await owner.lease.try_acquire()
            for ledger, key in ((owner, "note1"), (other, "note2")):
                await ledger.write(note, key)
            await owner.write_owned(note, "note3")
            with pytest.raises(OwnershipLostError, match="does not own"):
                await other.write_owned(note, "note4")

        asyncio.run(run())
        assert notes(postgres_book) == {"note1", "note2", "note3"}

    def test_a_holder_that_does_not_renew_is_replaced_and_only_its_own_writes_are_refused(
        self, postgres_book: Any, services: Callable[..., Ledger]
    ) -> None:
        slow, next_one = services(6.0), services(60.0)

        async def run() -> list[Any]:
            assert await slow.lease.try_acquire()
            assert not await next_one.lease.try_acquire()
            await asyncio.sleep(6.1)
            assert await next_one.lease.try_acquire()
            assert not slow.lease.held  # by its own clock it knows, too
            assert slow.epoch == 1
            owned = slow.write_owned(batches.again, "b1", 1, "late", 1.0)
            answers = await asyncio.gather(
                slow.write(note, "note1"), owned, slow.write(note, "note2"), return_exceptions=True
            )
            assert not await slow.lease.renew()
            assert slow.lease.lost.is_set()
            return list(answers)

        answers = asyncio.run(run())
        assert (answers[0], answers[2]) == ("note1", "note2")
        assert isinstance(answers[1], OwnershipLostError)
        assert "epoch 1, the ledger is owned by epoch 2" in answers[1].message

    def test_nobody_takes_over_between_an_owned_write_and_its_commit(
        self, postgres_book: Any, services: Callable[..., Ledger]
    ) -> None:
        slow, next_one = services(6.0), services(60.0)
        inside, leave = threading.Event(), threading.Event()

        def held_up(connection: Connection) -> None:
            inside.set()
            assert leave.wait(30)
            note(connection, "note")

        async def run() -> None:
            assert await slow.lease.try_acquire()
            writing = asyncio.create_task(slow.write_owned(held_up))
            await asyncio.to_thread(inside.wait)
            await asyncio.sleep(6.1)  # the lease has expired by now
            taking = asyncio.create_task(next_one.lease.try_acquire())
            await asyncio.sleep(0.5)
            assert not taking.done()
            leave.set()
            await writing
            assert await taking
            with pytest.raises(OwnershipLostError):
                await slow.write_owned(note, "note-late")

        asyncio.run(run())
        assert notes(postgres_book) == {"note"}

    def test_a_kept_lease_stays_until_it_is_released(self, services: Callable[..., Ledger]) -> None:
        owner, other = services(6.0), services()

        async def run() -> None:
            assert await owner.lease.try_acquire()
            keeping = asyncio.create_task(owner.lease.keep())
            for _ in range(6):
                await asyncio.sleep(1.2)
                assert owner.lease.held
                assert not await other.lease.try_acquire()
            await owner.lease.release()
            await asyncio.wait_for(keeping, 60)
            assert not owner.lease.lost.is_set()
            assert await other.lease.try_acquire()

        asyncio.run(run())

    def test_a_keeper_says_so_when_another_service_has_taken_the_lease(
        self, postgres_book: Any, services: Callable[..., Ledger]
    ) -> None:
        owner = services(0.6)

        async def run() -> None:
            assert await owner.lease.try_acquire()
            keeping = asyncio.create_task(owner.lease.keep())
            postgres_book.rows("UPDATE leases SET holder = 'another', epoch = 7 RETURNING 1")
            await asyncio.wait_for(owner.lease.lost.wait(), 60)
            await asyncio.wait_for(keeping, 60)
            assert (owner.epoch, owner.lease.held) == (0, False)

        asyncio.run(run())

    def test_a_keeper_gives_up_when_the_server_does_not_answer_for_the_whole_time_out(
        self, postgres_book: Any, services: Callable[..., Ledger]
    ) -> None:
        owner, store = services(0.9), postgres_book.store

        async def run() -> None:
            assert await owner.lease.try_acquire()
            with store.server.connect(store.name) as other, other.transaction():
                other.execute("LOCK TABLE leases")
                began = asyncio.get_running_loop().time()
                await asyncio.wait_for(owner.lease.keep(), 60)
                assert asyncio.get_running_loop().time() - began < database.BUSY_TIMEOUT_S  # which a statement may wait
                assert owner.lease.lost.is_set()

        asyncio.run(run())

    def test_a_keeper_gives_up_when_the_server_is_away_for_the_whole_time_out_and_can_come_back(
        self, postgres_server: Any, postgres_book: Any, services: Callable[..., Ledger]
    ) -> None:
        owner = services(0.9)

        async def run() -> None:
            assert await owner.lease.try_acquire()
            keeping = asyncio.create_task(owner.lease.keep())
            postgres_server.stop(signal.SIGQUIT)
            try:
                began = asyncio.get_running_loop().time()
                await asyncio.wait_for(keeping, 60)
                assert asyncio.get_running_loop().time() - began < database.BUSY_TIMEOUT_S  # which a statement may wait
                assert owner.lease.lost.is_set()
                with pytest.raises(UnavailableError):
                    await owner.lease.try_acquire()
            finally:
                postgres_server.start()
            assert await owner.lease.try_acquire()
            assert (owner.epoch, owner.lease.lost.is_set()) == (2, False)

        asyncio.run(run())
