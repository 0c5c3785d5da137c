"""Turns as they leave the ledger: a conversation from its first turn to one of its last, with the clients' bodies.

    for receipt_id in last_turns(connection, scenario): chain(connection, receipt_id)

Turns that several conversations share come with each of them, and are `copied` in all but one: the one in which every
turn after them is the first that continued the turn before it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BindParameter, Connection, Select, bindparam, exists, func, select

from reef.errors import DamagedError
from reef.ledger.ancestors import PAGE, parents_of
from reef.ledger.codec import BROKEN_BODY, unpack_body
from reef.ledger.imports import API as IMPORTED
from reef.ledger.receipts import get_many
from reef.ledger.schema import receipts, report_receipts, reports, requests
from reef.types import FinishReason, Receipt


@dataclass(frozen=True, slots=True)
class Grade:
    """A report that references a turn, and what became of it."""

    report_id: str
    score: float | None
    state: str


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """One turn: its receipt, what the client sent, and how it was graded."""

    receipt: Receipt
    api: str
    body: bytes
    copied: bool  # another conversation holds it as its own
    grades: tuple[Grade, ...] = ()  # in order of arrival


def chain(connection: Connection, receipt_id: str) -> list[Recorded]:
    """A turn and all before it, the oldest first.

    Raises:
        NotFoundError: there is no such receipt.
        GoneError: it was deleted.
        DamagedError: one is not as it was recorded.
    """
    parents = parents_of(connection, [receipt_id])
    path: list[str] = []
    turn: str | None = receipt_id
    while turn is not None:
        if turn in path[-1:] or len(path) > len(parents):
            raise DamagedError(receipt_id, "its turns continue one another in a circle")
        path.append(turn)
        turn = parents.get(turn)
    path.reverse()
    found = get_many(connection, path)
    sent = _sent(connection, path)
    copied = _copied(connection, path)
    grades = _grades(connection, path)
    return [Recorded(found[name], *sent[name], name in copied, tuple(grades.get(name, ()))) for name in path]


def last_turns(connection: Connection, scenario: str) -> Iterator[str]:
    """The receipts of a scenario that no later turn continues, in the order of their recording, a page at a time.

    What was deleted is left out, and so is what was aborted (nobody has acted on it) and what was imported: of that no
    tokens are known.
    """
    later, answer = requests.alias(), receipts.alias()
    continued = (
        exists()
        .where(later.c.parent == receipts.c.id, later.c.deleted_at.is_(None))
        .where(answer.c.request_id == later.c.id, answer.c.finish_reason != FinishReason.ABORT.value)
    )
    query = (
        select(receipts.c.seq, receipts.c.id)
        .join(requests, requests.c.id == receipts.c.request_id)
        .where(requests.c.scenario == scenario, requests.c.deleted_at.is_(None), requests.c.api != IMPORTED)
        .where(receipts.c.finish_reason != FinishReason.ABORT.value, ~continued)
        .order_by(receipts.c.seq)
        .limit(PAGE)
    )
    seq = 0
    while rows := connection.execute(query.where(receipts.c.seq > seq)).all():
        yield from (row.id for row in rows)
        seq = rows[-1].seq


def _sent(connection: Connection, path: Sequence[str]) -> dict[str, tuple[str, bytes]]:
    """API and body of each receipt's request."""
    found = {}
    for start in range(0, len(path), PAGE):
        for row in connection.execute(_FIND_SENT, {"ids": path[start : start + PAGE]}):
            try:
                found[row.id] = (row.api, unpack_body(row.body))
            except BROKEN_BODY as error:
                raise DamagedError(row.id, f"its body: {error}") from error
    return found


def _grades(connection: Connection, path: Sequence[str]) -> dict[str, list[Grade]]:
    found: dict[str, list[Grade]] = {}
    for start in range(0, len(path), PAGE):
        for receipt_id, *grade in connection.execute(_FIND_GRADES, {"ids": path[start : start + PAGE]}):
            found.setdefault(receipt_id, []).append(Grade(*grade))
    return found


def _copied(connection: Connection, path: Sequence[str]) -> set[str]:
    """The turns before the last one that this conversation shares with another whose own they are."""
    first: dict[str, int] = {}  # of each turn, the place in the ledger of the first that continued it
    place: dict[str, int] = {}
    for start in range(0, len(path), PAGE):
        page = {"ids": path[start : start + PAGE]}
        place.update((row.id, row.seq) for row in connection.execute(_FIND_PLACES, page))
        first.update((row.parent, row.seq) for row in connection.execute(_FIND_NEXT, page))
    for at in range(len(path) - 2, -1, -1):
        if first.get(path[at]) not in (None, place[path[at + 1]]):
            return set(path[: at + 1])
    return set()


def _joined(*columns: Any) -> Select[Any]:
    return select(*columns).select_from(receipts).join(requests, requests.c.id == receipts.c.request_id)


# Built once: making a statement costs more than running it.
_IDS: BindParameter[Any] = bindparam("ids", expanding=True)
_FIND_SENT = _joined(receipts.c.id, requests.c.api, requests.c.body).where(receipts.c.id.in_(_IDS))
_FIND_PLACES = select(receipts.c.id, receipts.c.seq).where(receipts.c.id.in_(_IDS))
_FIND_NEXT = (
    _joined(requests.c.parent, func.min(receipts.c.seq).label("seq"))
    .where(requests.c.parent.in_(_IDS), requests.c.deleted_at.is_(None))
    .where(receipts.c.finish_reason != FinishReason.ABORT.value)
    .group_by(requests.c.parent)
)
_FIND_GRADES = (
    select(report_receipts.c.receipt_id, reports.c.id, reports.c.score, reports.c.state)
    .join(reports, reports.c.id == report_receipts.c.report_id)
    .where(report_receipts.c.receipt_id.in_(_IDS))
    .order_by(reports.c.seq)
)
