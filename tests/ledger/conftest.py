"""A real ledger in a SQLite file or a PostgreSQL database of the test's own, and short ways to fill it."""

import asyncio
import dataclasses
import itertools
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from reef.ledger import batches, database, receipts, releases, reports, scenarios
from reef.ledger.ledger import Ledger
from reef.ledger.schema import metadata
from reef.types import (
    Batch,
    FinishReason,
    Generation,
    Operation,
    Pick,
    Receipt,
    Release,
    Report,
    Request,
    Sampling,
    Selection,
    Span,
)
from tests.postgres import PostgresServer

SCENARIO = "arithmetic"
BASE = "r0"
NOW = 1_700_000_000.25
MEMORY = Path("/dev/shm")  # hundreds of small transactions: not on a disk where that can be avoided


def one_by_one(lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The simplest split: each sample is a microbatch."""
    return tuple((position,) for position in range(len(lengths)))


class Store(Protocol):
    """Where a ledger lies, and what another process would see there."""

    url: str

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Through a connection of our own."""

    def dump(self) -> str:
        """Everything in the ledger, to compare before and after."""

    def copied(self) -> Any:
        """A context with a copy of it; nothing may be connected to it meanwhile."""


class SqliteFile:
    """A file `ledger.db` in `directory`."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "ledger.db"
        self.url = f"sqlite:///{self.path}"

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        connection = sqlite3.connect(self.path)
        try:
            return connection.execute(query).fetchall()
        finally:
            connection.close()

    def dump(self) -> str:
        connection = sqlite3.connect(self.path)
        try:
            return "\n".join(connection.iterdump())
        finally:
            connection.close()

    @contextmanager
    def copied(self) -> Iterator["SqliteFile"]:
        directory = Path(tempfile.mkdtemp(prefix="reef-ledger-", dir=MEMORY if MEMORY.is_dir() else None))
        shutil.copy(self.path, directory)
        try:
            yield SqliteFile(directory)
        finally:
            shutil.rmtree(directory)


class PostgresDatabase:
    """A database of the tests' server."""

    def __init__(self, server: PostgresServer, template: str = "template1") -> None:
        self.server = server
        self.name = server.create(template)
        self.url = server.url(self.name)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with self.server.connect(self.name) as connection:
            return connection.execute(query.encode()).fetchall()

    def dump(self) -> str:
        with self.server.connect(self.name) as connection:
            tables = [connection.execute(f"SELECT * FROM {name} ORDER BY 1, 2".encode()) for name in metadata.tables]
            return "\n".join(str(row) for table in tables for row in table)

    @contextmanager
    def copied(self) -> Iterator["PostgresDatabase"]:
        copy = PostgresDatabase(self.server, self.name)
        try:
            yield copy
        finally:
            copy.remove()

    def remove(self) -> None:
        self.server.drop(self.name)


class Book:
    """A ledger with a scenario that trains (its base is release r0), driven from synchronous tests."""

    def __init__(self, store: Any, max_pending: int = 4096) -> None:
        self.store: Store = store
        self.url = self.store.url
        self.rows = self.store.rows
        self.dump = self.store.dump
        self._runner = asyncio.Runner()
        self._numbers = itertools.count(1)
        self._max_pending = max_pending
        self.ledger = Ledger.open(self.url, self._max_pending)

    def begin(self) -> "Book":
        self.write(scenarios.create, SCENARIO, "grpo", NOW)
        self.write(releases.append, self.release(0, parent=None))
        return self

    def close(self) -> None:
        self.ledger.close()
        self._runner.close()

    def reopen(self) -> None:
        """What a restart does."""
        self.ledger.close()
        self.ledger = Ledger.open(self.url, self._max_pending)

    def write(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._runner.run(self.ledger.write(op, *args, **kwargs))

    def read(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._runner.run(self.ledger.read(op, *args, **kwargs))

    def request(self, prompt: Sequence[int], **changes: Any) -> Request:
        number = next(self._numbers)
        request = Request(
            id=f"req{number}",
            scenario=SCENARIO,
            api="chat",
            prompt_ids=np.array(prompt, dtype=np.int32),
            sampling=Sampling(max_tokens=8),
            n=1,
            body=b'{"messages": []}',
            created_at=NOW,
        )
        return dataclasses.replace(request, **changes)

    def generation(self, ids: Sequence[int], release: str = BASE, **changes: Any) -> Generation:
        generation = Generation(
            output_ids=np.array(ids, dtype=np.int32),
            logprobs=-np.linspace(0.1, 1.1, len(ids), dtype=np.float32),
            finish_reason=FinishReason.STOP,
            spans=(Span(0, len(ids), release),) if len(ids) else (),
        )
        return dataclasses.replace(generation, **changes)

    def made(self, request: Request, *generations: Generation, turn_key: str | None = None) -> list[Receipt]:
        return [
            receipts.make(request, choice, generation, "engine 1", f"{request.id}.{choice}", NOW, turn_key)
            for choice, generation in enumerate(generations)
        ]

    def complete(
        self,
        prompt: Sequence[int],
        *outputs: Sequence[int],
        release: str = BASE,
        turn_key: str | None = None,
        finish_reason: FinishReason = FinishReason.STOP,
        **changes: Any,
    ) -> Any:
        """Records a completion of one or more choices; the receipt, or the list of them."""
        request = self.request(prompt, **changes)
        generations = [self.generation(ids, release, finish_reason=finish_reason) for ids in outputs]
        made = self.made(request, *generations, turn_key=turn_key)
        self.write(receipts.record, request, made)
        return made[0] if len(made) == 1 else made

    def turn(self, parent: Receipt | None, added: Sequence[int], *outputs: Sequence[int], **changes: Any) -> Any:
        """`complete` as a later turn: the prompt is what `parent` holds, and what was added to it."""
        before = [] if parent is None else [*parent.prompt_ids.tolist(), *parent.generation.output_ids.tolist()]
        return self.complete([*before, *added], *outputs, parent=parent and parent.id, **changes)

    def report(self, *references: str, id: str | None = None, score: float | None = 1.0, **body: Any) -> Report:
        whole = {"references": list(references), **({} if score is None else {"score": score}), **body}
        return Report(
            id=id or f"rep{next(self._numbers)}",
            scenario=SCENARIO,
            references=references,
            body=whole,
            score=score,
            outcome=body.get("outcome"),
            group=body.get("group"),
            truncated=body.get("truncated", False),
            created_at=NOW,
        )

    def accept(self, *references: str, trains: bool = True, now: float = NOW, **fields: Any) -> dict[str, Any]:
        view: dict[str, Any] = self.write(reports.accept, self.report(*references, **fields), trains, now)
        return view

    def graded(self, count: int, release: str = BASE, prompt: Sequence[int] = (1, 2, 3)) -> list[str]:
        """The ids of `count` pending reports, each of a receipt of its own."""
        made = [self.complete(prompt, [10 + index, 2], release=release) for index in range(count)]
        return [self.accept(receipt.id, score=index % 2)["agent_record_id"] for index, receipt in enumerate(made)]

    def state(self, report_id: str) -> tuple[str, str | None]:
        view = self.read(reports.view, report_id)
        return view["state"], view["reason"]

    def reserve(self, picks: Sequence[str | Pick], id: str = "b1", **changes: Any) -> Batch:
        chosen = tuple(pick if isinstance(pick, Pick) else Pick(pick, "g") for pick in picks)
        self.write(
            batches.reserve,
            SCENARIO,
            id,
            changes.get("selection", Selection(picks=chosen)),
            changes.get("base_release", BASE),
            changes.get("settings", {"method": {"name": "grpo"}, "seed": 3}),
            changes.get("split", one_by_one),
            changes.get("now", NOW + 1),
            changes.get("history_window", 0),
        )
        batch: Batch = self.read(batches.load, id)
        return batch

    def release(self, number: int, parent: str | None = BASE, **changes: Any) -> Release:
        release = Release(
            id=f"r{number}",
            scenario=SCENARIO,
            number=number,
            parent=parent,
            content_id=f"sha256:{number}",
            operation=Operation.TRAIN if number else Operation.BASE,
            policy_version=number,
            step=number,
            batch_id=None,
            path=f"/weights/r{number}",
            checkpoint=None,
            restorable=True,
            created_at=NOW + number,
        )
        return dataclasses.replace(release, **changes)

    def train(self, number: int, picks: Sequence[str | Pick]) -> Release:
        """Reserve and commit: release `number` follows the one before it."""
        batch = self.reserve(picks, id=f"b{number}", base_release=f"r{number - 1}")
        release = self.release(number, parent=f"r{number - 1}", batch_id=batch.id)
        committed: Release = self.write(batches.commit, batch.id, release, NOW + number)
        return committed


MakeStore = Callable[[], Any]


@pytest.fixture
def make_sqlite(tmp_path: Path) -> MakeStore:
    """Each call gives a place for another SQLite ledger."""

    def make() -> SqliteFile:
        return SqliteFile(Path(tempfile.mkdtemp(prefix="book", dir=tmp_path)))

    return make


@pytest.fixture
def make_postgres(postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeStore]:
    """Each call gives a new, empty PostgreSQL database."""
    # Tests hold transactions open on purpose; where the machine stands still besides, that is no fault of theirs.
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 60)
    made: list[PostgresDatabase] = []

    def make() -> PostgresDatabase:
        made.append(PostgresDatabase(postgres_server))
        return made[-1]

    yield make
    for one in made:
        one.remove()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)])
def make_store(request: pytest.FixtureRequest) -> MakeStore:
    """Each call gives a place for another ledger; a test that asks for it runs on both databases."""
    made: MakeStore = request.getfixturevalue(f"make_{request.param}")
    return made


@pytest.fixture
def open_book(make_store: MakeStore) -> Iterator[Callable[..., Book]]:
    """Opens ledgers of their own, each with its own bound of waiting writes."""
    opened: list[Book] = []

    def open_one(max_pending: int = 4096) -> Book:
        opened.append(Book(make_store(), max_pending).begin())
        return opened[-1]

    yield open_one
    for made in opened:
        made.close()


@pytest.fixture
def book(open_book: Callable[..., Book]) -> Book:
    return open_book()


@pytest.fixture
def sqlite_book(make_sqlite: MakeStore) -> Iterator[Book]:
    """For what only a file does."""
    made = Book(make_sqlite()).begin()
    yield made
    made.close()


@pytest.fixture
def postgres_book(make_postgres: MakeStore) -> Iterator[Book]:
    """For what only a server does; its tests are slow ones."""
    made = Book(make_postgres()).begin()
    yield made
    made.close()
