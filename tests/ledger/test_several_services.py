"""Two services on one PostgreSQL ledger at once: nothing happens twice, and a server that goes away comes back."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import Connection, insert, text

from reef.errors import BadRequestError, ConflictError, LedgerError, UnavailableError
from reef.ledger import batches, database, deletion, receipts, reports, scenarios
from reef.ledger.ledger import Ledger
from reef.ledger.schema import meta
from reef.types import Pick, Selection

pytestmark = pytest.mark.slow
Pair = tuple[Ledger, Ledger]


def note(connection: Connection, key: str) -> str:
    connection.execute(insert(meta).values(key=key, value="x"))
    return key


@pytest.fixture
def book(postgres_book: Any) -> Any:
    return postgres_book


@pytest.fixture
def pair(book: Any) -> Iterator[Pair]:
    """Two more services on the book's ledger."""
    opened = Ledger.open(book.url), Ledger.open(book.url)
    yield opened
    for ledger in opened:
        ledger.close()


class Meeting:
    """Holds the transaction of one service open until another one has run into it."""

    def __init__(self, op: Callable[..., Any]) -> None:
        self._op = op
        self.done = threading.Event()
        self.leave = threading.Event()

    def __call__(self, connection: Connection, *args: Any) -> Any:
        result = self._op(connection, *args)
        self.done.set()
        assert self.leave.wait(30)
        return result


def meet(pair: Pair, op: Callable[..., Any], one: tuple[Any, ...], other: tuple[Any, ...]) -> list[Any]:
    """`op(*one)` at the first service; `op(*other)` at the second one begins before the first has committed."""

    async def run() -> list[Any]:
        meeting = Meeting(op)
        first = asyncio.create_task(pair[0].write(meeting, *one))
        await asyncio.to_thread(meeting.done.wait)
        second = asyncio.create_task(pair[1].write(op, *other))
        await asyncio.sleep(0.3)
        meeting.leave.set()
        return await asyncio.gather(first, second, return_exceptions=True)

    return asyncio.run(run())


def test_the_first_openings_of_an_empty_database_make_one_ledger(make_postgres: Any) -> None:
    url = make_postgres().url
    with ThreadPoolExecutor(6) as threads:
        ledgers = list(threads.map(Ledger.open, [url] * 6))
    try:
        assert len({ledger.run_id for ledger in ledgers}) == 1
    finally:
        for ledger in ledgers:
            ledger.close()


def test_of_two_reports_that_reference_a_receipt_at_once_one_claims_it(book: Any, pair: Pair) -> None:
    receipt, other = book.complete([1], [2]), book.complete([1], [3])
    one, two = book.report(receipt.id, id="rep_a"), book.report(other.id, receipt.id, id="rep_b")
    answers = meet(pair, reports.accept, (one, True, 1.0), (two, True, 1.0))
    assert [(view["state"], view["reason"]) for view in answers] == [("pending", None), ("recorded", "already_claimed")]
    assert book.rows("SELECT id, claimed_by FROM receipts ORDER BY seq") == [(receipt.id, "rep_a"), (other.id, None)]


def test_many_reports_of_the_same_receipts_at_both_services_claim_each_once(book: Any, pair: Pair) -> None:
    made = [book.complete([1], [index]).id for index in range(20)]
    # Pairs of receipts in either order: the two services wait for each other, and one has to begin again.
    references = [*pairwise(made), *pairwise(reversed(made))] * 4
    wanted = [book.report(*both) for both in references]

    async def run() -> list[Any]:
        writes = [pair[index % 2].write(reports.accept, report, True, 1.0) for index, report in enumerate(wanted)]
        return list(await asyncio.gather(*writes))

    answers = asyncio.run(run())
    pending = [view for view in answers if view["state"] == "pending"]
    claimed = [receipt_id for view in pending for receipt_id in view["references"]]
    assert len(claimed) == len(set(claimed)) > 0
    assert sorted(book.rows("SELECT id, claimed_by FROM receipts WHERE claimed_by IS NOT NULL")) == sorted(
        (receipt_id, view["agent_record_id"]) for view in pending for receipt_id in view["references"]
    )
    assert {view["reason"] for view in answers} == {None, "already_claimed"}


def test_the_same_report_at_both_services_at_once_is_stored_once(book: Any, pair: Pair) -> None:
    report = book.report(book.complete([1], [2]).id, id="rep_a")
    one, two = meet(pair, reports.accept, (report, True, 1.0), (report, True, 2.0))
    assert one == two
    assert book.rows("SELECT count(*) FROM reports") == [(1,)]


def test_the_same_id_with_another_body_at_both_services_at_once_is_a_conflict(book: Any, pair: Pair) -> None:
    receipt = book.complete([1], [2])
    one, two = (book.report(receipt.id, id="rep_a", score=score) for score in (0.0, 1.0))
    answers = meet(pair, reports.accept, (one, True, 1.0), (two, True, 1.0))
    assert answers[0]["state"] == "pending"
    assert isinstance(answers[1], ConflictError)
    assert answers[1].code == "id_reused"


def test_the_first_members_of_a_group_at_both_services_at_once_answer_one_prompt(book: Any, pair: Pair) -> None:
    one, two, same = (book.report(book.complete(prompt, [5]).id, group="g") for prompt in ([1, 2], [1, 9], [1, 2]))
    answers = meet(pair, reports.accept, (one, True, 1.0), (two, True, 1.0))
    assert answers[0]["state"] == "pending"
    assert isinstance(answers[1], BadRequestError)
    assert answers[1].code == "mixed_group"
    assert book.write(reports.accept, same, True, 1.0)["state"] == "pending"


def test_a_scenario_created_at_both_services_at_once_is_created_once(book: Any, pair: Pair) -> None:
    (one, made), (two, made_too) = meet(pair, scenarios.create, ("new", "grpo", 1.0), ("new", "grpo", 2.0))
    assert one == two
    assert (made, made_too) == (True, False)


def test_the_first_scenarios_at_both_services_at_once_leave_one_that_trains(make_postgres: Any) -> None:
    store = make_postgres()
    pair = Ledger.open(store.url), Ledger.open(store.url)
    try:
        answers = meet(pair, scenarios.create, ("one", "grpo", 1.0), ("two", "grpo", 1.0))
        assert [created for _, created in answers] == [True, True]
        assert store.rows("SELECT value FROM meta WHERE key = 'training_scenario'") == [("one",)]
    finally:
        for ledger in pair:
            ledger.close()


def test_of_two_batches_reserved_at_once_there_is_one(book: Any, pair: Pair) -> None:
    a, b = book.graded(2)

    def arguments(id: str, name: str) -> tuple[Any, ...]:
        return "arithmetic", id, Selection(picks=(Pick(name, "g"),)), "r0", {}, lambda lengths: ((0,),), 1.0

    answers = meet(pair, batches.reserve, arguments("b1", a), arguments("b2", b))
    assert answers[0] == "b1"
    assert isinstance(answers[1], ConflictError)
    assert [book.state(name) for name in (a, b)] == [("reserved", None), ("pending", None)]


def test_a_receipt_deleted_while_its_report_is_accepted_takes_the_report_along(book: Any, pair: Pair) -> None:
    receipt = book.complete([1], [2])
    report = book.report(receipt.id, id="rep_a")

    def act(connection: Connection, what: str) -> Any:
        if what == "accept":
            return reports.accept(connection, report, True, 1.0)
        return deletion.delete(connection, [receipt.request_id], 2.0)

    meet(pair, act, ("accept",), ("delete",))
    assert book.state("rep_a") == ("dropped", "deleted")


def test_a_report_of_a_receipt_that_is_being_deleted_does_not_train(book: Any, pair: Pair) -> None:
    receipt = book.complete([1], [2])
    report = book.report(receipt.id, id="rep_a")

    def act(connection: Connection, what: str) -> Any:
        if what == "accept":
            return reports.accept(connection, report, True, 1.0)
        return deletion.delete(connection, [receipt.request_id], 2.0)

    answers = meet(pair, act, ("delete",), ("accept",))
    assert isinstance(answers[1], Exception) or answers[1]["state"] != "pending"
    assert book.rows("SELECT count(*) FROM reports WHERE state = 'pending'") == [(0,)]


def test_a_turn_added_while_its_session_is_deleted_goes_with_it(book: Any, pair: Pair) -> None:
    first = book.complete([1, 2], [10])
    request = book.request([1, 2, 10, 3], parent=first.id)
    made = book.made(request, book.generation([11]))

    def act(connection: Connection, what: str) -> Any:
        if what == "record":
            return receipts.record(connection, request, made)
        return deletion.delete(connection, [first.request_id], 2.0)

    meet(pair, act, ("record",), ("delete",))
    assert book.rows("SELECT count(*) FROM requests WHERE deleted_at IS NULL") == [(0,)]


def test_two_groups_that_wait_for_each_other_are_both_stored(book: Any, pair: Pair) -> None:
    """Each service holds a row and wants the other's: who gives way writes the rest first, and that row alone."""
    barrier = threading.Barrier(2, timeout=60)

    def meeting(connection: Connection) -> None:
        if first_time.pop(threading.get_ident(), True):
            first_time[threading.get_ident()] = False
            barrier.wait()

    first_time: dict[int, bool] = {}

    def touch(connection: Connection, name: str) -> str:
        connection.execute(text("UPDATE scenarios SET mode = 'manual' WHERE name = :name"), {"name": name})
        return name

    for name in ("one", "two"):
        book.write(scenarios.create, name, "grpo", 1.0)

    async def group(ledger: Ledger, *names: str) -> list[Any]:
        gate = Meeting(lambda connection: None)
        first = asyncio.create_task(ledger.write(gate))
        await asyncio.to_thread(gate.done.wait)
        ops = (ledger.write(touch, names[0]), ledger.write(meeting), ledger.write(touch, names[1]))
        rest = [asyncio.create_task(op) for op in ops]
        await asyncio.sleep(0)
        gate.leave.set()
        await first
        return list(await asyncio.gather(*rest))

    async def run() -> Any:
        return await asyncio.gather(group(pair[0], "one", "two"), group(pair[1], "two", "one"))

    assert asyncio.run(run()) == [["one", None, "two"], ["two", None, "one"]]


def test_a_string_with_a_nul_is_refused_alone_and_clearly(book: Any) -> None:
    async def run() -> list[Any]:
        keys = ("note1", "no\0te", "note2")
        return await asyncio.gather(*(book.ledger.write(note, key) for key in keys), return_exceptions=True)

    one, refused, two = asyncio.run(run())
    assert (one, two) == ("note1", "note2")
    assert isinstance(refused, BadRequestError)
    assert "NUL" in refused.message
    with pytest.raises(BadRequestError, match="NUL"):
        book.read(reports.view, "rep\0")


def test_a_server_that_is_restarted_costs_503_meanwhile_and_nothing_after(book: Any, postgres_server: Any) -> None:
    book.write(note, "note1")
    postgres_server.stop(signal.SIGQUIT)
    try:
        for _ in range(2):
            with pytest.raises(UnavailableError, match="cannot be used now") as refused:
                book.write(note, "note-lost")
            assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
            with pytest.raises(UnavailableError):
                book.read(scenarios.all_of)
        assert "cannot be used now" in book.ledger.error
    finally:
        postgres_server.start()
    assert book.write(note, "note2") == "note2"
    assert book.read(scenarios.training) == "arithmetic"
    assert book.ledger.error is None
    assert book.rows("SELECT key FROM meta WHERE key LIKE 'note%' ORDER BY key") == [("note1",), ("note2",)]


def test_a_restart_between_two_requests_costs_nobody_an_error(book: Any, postgres_server: Any) -> None:
    book.read(scenarios.all_of)
    postgres_server.stop()
    postgres_server.start()
    book.write(note, "note")
    assert book.read(scenarios.training) == "arithmetic"


def test_a_connection_that_is_lost_in_a_write_is_a_503_and_the_next_one_is_made_by_itself(book: Any) -> None:
    def cut(connection: Connection) -> None:
        note(connection, "note-lost")
        connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    with pytest.raises(UnavailableError):
        book.write(cut)
    assert book.write(note, "note") == "note"
    assert book.rows("SELECT key FROM meta WHERE key LIKE 'note%'") == [("note",)]


def test_a_row_that_another_process_holds_is_a_503_that_passes(book: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 3)
    book.reopen()
    with book.store.server.connect(book.store.name) as other, other.transaction():
        other.execute("UPDATE scenarios SET mode = 'auto'")
        with pytest.raises(UnavailableError, match="timeout"):
            book.write(scenarios.set_mode, "arithmetic", "manual")
        assert book.read(scenarios.get, "arithmetic").mode == "auto"  # reads go on
    book.write(scenarios.set_mode, "arithmetic", "manual")


def test_a_row_that_another_process_holds_for_a_moment_is_waited_for(book: Any) -> None:
    with book.store.server.connect(book.store.name) as other, ThreadPoolExecutor(1) as thread:
        with other.transaction():
            other.execute("UPDATE scenarios SET mode = 'auto'")
            writing = thread.submit(book.write, scenarios.set_mode, "arithmetic", "manual")
            time.sleep(4 * database.LOCK_WAIT_S)
            assert not writing.done()
        writing.result(60)
    assert book.read(scenarios.get, "arithmetic").mode == "manual"


def test_a_commit_is_durable_and_a_read_sees_one_moment(book: Any) -> None:
    show = "SELECT current_setting('{}')"
    assert book.write(lambda connection: connection.scalar(text(show.format("synchronous_commit")))) == "on"
    for name, value in {"transaction_isolation": "repeatable read", "transaction_read_only": "on"}.items():
        assert book.read(lambda connection, name=name: connection.scalar(text(show.format(name)))) == value


@pytest.mark.parametrize("state", ["XX001", "XX002"])
def test_damage_is_said_to_be_damage(book: Any, state: str) -> None:
    def damaged(connection: Connection) -> None:
        connection.execute(text(f"DO $$ BEGIN RAISE 'invalid page in block 7' USING ERRCODE = '{state}'; END $$"))

    for use in (book.write, book.read):
        with pytest.raises(
            LedgerError, match=r"the ledger is damaged, `reef doctor --ledger`.*invalid page"
        ) as refused:
            use(damaged)
        assert (refused.value.status, refused.value.retry_after_s) == (500, None)
    assert book.write(note, "note") == "note"


def test_a_server_that_is_not_there_is_named_without_its_password() -> None:
    with pytest.raises(LedgerError, match=r"postgresql\+psycopg://reef:\*\*\*@127.0.0.1:1/reef: .*refused") as refused:
        Ledger.open("postgresql+psycopg://reef:hunter2@127.0.0.1:1/reef")
    assert "hunter2" not in refused.value.message


def test_a_database_that_is_not_there_is_named(postgres_server: Any) -> None:
    with pytest.raises(LedgerError, match='database "nothing" does not exist'):
        Ledger.open(postgres_server.url("nothing"))


def test_a_ledger_of_a_newer_version_is_refused(book: Any) -> None:
    book.write(lambda connection: connection.execute(text("UPDATE meta SET value = '99' WHERE key = 'schema_version'")))
    with pytest.raises(LedgerError, match="schema version 99, this Reef knows"):
        Ledger.open(book.url)
