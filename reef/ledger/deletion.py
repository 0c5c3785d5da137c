"""Deletion: text, ids and log-probabilities go; ids, counts, spans, digests, times and states stay.

What goes with a receipt: its whole request (n choices share prompt and body), every later turn that continues any of
them, since its prompt holds the same text, and the free text of every report that references one of these.

    request_ids = of_session(...)          newest first, so that no turn is ever left without those before it
    delete(connection, page of them, now)  PAGE at most, so that other writes wait for one short transaction
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, Select, bindparam, func, select, text, update

from reef.errors import CheckpointNeededError, ConflictError, NotFoundError
from reef.ledger import releases as release_rows
from reef.ledger import reports as report_rows
from reef.ledger.codec import from_json, to_json
from reef.ledger.database import hold_rows
from reef.ledger.schema import batch_samples, batches, receipts, releases, report_receipts, reports, requests
from reef.types import ReportState

PAGE = 200  # requests in one transaction: bounds how long other writes wait
RETRY_S = 5  # of a deletion that a step in work refuses

_STRIP_REQUEST = (
    update(requests)
    .where(requests.c.id == bindparam("request"))
    .values(prompt_ids=b"", body=b"", tags="{}", sampling=bindparam("left"), deleted_at=bindparam("now"))
)
# SQLite: an update that shrinks a row leaves its page half empty for good. One that moves it away, and back, does not.
_GIVE_BACK = tuple(
    text(f"UPDATE {moved} IN :page").bindparams(bindparam("page", expanding=True))
    for moved in (
        "requests SET rowid = -rowid WHERE id",
        "requests SET rowid = -rowid WHERE id",
        "receipts SET seq = -seq WHERE request_id",
        "receipts SET seq = -seq WHERE request_id",
    )
)
_STRIP_REPORT = update(reports).where(reports.c.id == bindparam("report")).values(body=bindparam("left"))


@dataclasses.dataclass(frozen=True, slots=True)
class Deleted:
    """What one deletion took: receipts, and the bytes of their ids, log-probabilities and bodies."""

    receipt_ids: tuple[str, ...] = ()
    size_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Live:
    """A receipt that has its content still, as retention sees it."""

    seq: int
    request_id: str
    created_at: float
    size_bytes: int


def delete(connection: Connection, request_ids: Collection[str], now: float) -> Deleted:
    """Delete these requests and every later turn of theirs. What was deleted before is passed over.

    Raises:
        ConflictError: a step trains on one of them (`in_training`); nothing is deleted.
        CheckpointNeededError: see `needs_checkpoint`; nothing is deleted.
    """
    doomed = _held(connection, request_ids)
    taken = Deleted()
    for page in _pages(doomed):
        _end_reports(connection, page, now)
        if needs_checkpoint(connection, page):
            raise CheckpointNeededError(
                "releases after the last trainer checkpoint were trained on some of these receipts, and a crash now "
                "would need them: delete them once the service that trains has written one (while a release is held or "
                "quarantined that is not before it is decided)"
            )
        _count_samples(connection, page)
        stripped = _strip(connection, page, now)
        taken = Deleted(taken.receipt_ids + stripped.receipt_ids, taken.size_bytes + stripped.size_bytes)
    return taken


def needs_checkpoint(connection: Connection, request_ids: Collection[str]) -> bool:
    """Whether a crash now would train on these again: a release of theirs is newer than the newest checkpoint."""
    return any(_to_replay(connection, page, oldest=False) for page in _pages(request_ids))


def refuse_in_training(connection: Connection, scenario: str) -> None:
    """Raises ConflictError (`in_training`) while a batch of the scenario is reserved."""
    reserved = select(batches.c.id).where(batches.c.scenario == scenario, batches.c.state == "reserved")
    if (batch_id := connection.scalar(reserved)) is not None:
        raise _in_training(f"batch {batch_id} of scenario {scenario}")


def of_receipt(connection: Connection, receipt_id: str) -> list[str]:
    """The requests that go with a receipt, newest first; none where it was deleted. Raises NotFoundError."""
    request_id = connection.scalar(select(receipts.c.request_id).where(receipts.c.id == receipt_id))
    if request_id is None:
        raise NotFoundError(f"no receipt {receipt_id}", code="receipt_not_found")
    return _newest_first(connection, with_later_turns(connection, [request_id]))


def of_session(connection: Connection, scenario: str, session: str) -> list[str]:
    """The requests that go with a session, newest first; none where it was deleted. Raises NotFoundError."""
    query = select(requests.c.id).where(requests.c.scenario == scenario, requests.c.session == session)
    found = connection.scalars(query).all()
    if not found:
        raise NotFoundError(f"no session {session} in scenario {scenario}", code="session_not_found")
    return _newest_first(connection, with_later_turns(connection, found))


def of_scenario(connection: Connection, scenario: str, before: int | None) -> list[tuple[int, str]]:
    """The next page of a scenario's receipts below `before`, newest first: seq and request; deleted ones left out."""
    query = _live(select(receipts.c.seq, requests.c.id)).where(requests.c.scenario == scenario)
    if before is not None:
        query = query.where(receipts.c.seq < before)
    rows = connection.execute(query.order_by(receipts.c.seq.desc()).limit(PAGE))
    return [(row.seq, row.id) for row in rows]


def refuse_reserved(connection: Connection, request_ids: Collection[str]) -> None:
    """Raises ConflictError (`in_training`) where a step trains on one of these requests."""
    for page in _pages(request_ids):
        reserved = _referencing(reports.c.batch_id, page).where(reports.c.state == ReportState.RESERVED.value)
        if (batch_id := connection.scalar(reserved.limit(1))) is not None:
            raise _in_training(f"batch {batch_id}")


def with_later_turns(connection: Connection, request_ids: Collection[str]) -> list[str]:
    """Those of these requests that are not deleted, and every later turn of theirs."""
    found: dict[str, None] = {}
    for page in _pages(request_ids):
        query = select(requests.c.id).where(requests.c.id.in_(page), requests.c.deleted_at.is_(None))
        found.update(dict.fromkeys(connection.scalars(query)))
    level = list(found)
    while level:
        children = [child for after in _later_turns(connection, level).values() for child in after]
        level = [child for child in children if child not in found]
        found.update(dict.fromkeys(level))
    return list(found)


# --- retention --------------------------------------------------------------------------------------------------------


def live_after(connection: Connection, seq: int) -> list[Live]:
    """The next page of receipts above `seq` that have their content still, oldest first."""
    size = func.length(receipts.c.output_ids) + func.length(receipts.c.logprobs)
    shared = func.length(requests.c.prompt_ids) + func.length(requests.c.body)  # counted for each of n choices
    query = _live(select(receipts.c.seq, receipts.c.request_id, receipts.c.created_at, size + shared))
    rows = connection.execute(query.where(receipts.c.seq > seq).order_by(receipts.c.seq).limit(PAGE))
    return [Live(*row) for row in rows]


def expire(connection: Connection, request_ids: Sequence[str], now: float) -> tuple[Deleted, set[str]]:
    """Delete those of these requests (a page, newest first) that nothing needs any more; what went, and what stays.

    Needed are: what a report that waits or is in a step references, what a replay from the oldest checkpoint trains on,
    and the turns before one that stays. With the last turn of a conversation those before it go, as far as they can.
    """
    chosen: set[str] = set()
    candidates = request_ids
    while candidates:
        unneeded = _unneeded(connection, candidates, chosen)
        chosen |= unneeded
        candidates = list(_turns_before(connection, unneeded) - chosen)
    deleted = delete(connection, chosen, now)
    live = select(requests.c.id).where(requests.c.id.in_(request_ids), requests.c.deleted_at.is_(None))
    return deleted, set(connection.scalars(live))


def used_bytes(connection: Connection) -> int:
    """What the ledger's rows and indices take; space that the file holds and SQLite can use again is not counted."""
    if connection.dialect.name == "sqlite":
        pages, free, size = (
            int(connection.exec_driver_sql(f"PRAGMA {name}").scalar() or 0)
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size
    tables = "SELECT sum(pg_total_relation_size(relid)) FROM pg_stat_user_tables WHERE schemaname = current_schema()"
    return int(connection.scalar(text(tables)) or 0)


# --- parts ------------------------------------------------------------------------------------------------------------


def _held(connection: Connection, request_ids: Collection[str]) -> list[str]:
    """`with_later_turns`. PostgreSQL: no report of theirs is accepted, no turn added, before this transaction ends."""
    doomed = with_later_turns(connection, request_ids)
    while True:
        for page in _pages(sorted(doomed)):
            hold_rows(connection, select(requests.c.id).where(requests.c.id.in_(page)).order_by(requests.c.id))
        before, doomed = set(doomed), with_later_turns(connection, request_ids)
        if before.issuperset(doomed):
            return doomed


def _unneeded(connection: Connection, page: Sequence[str], chosen: set[str]) -> set[str]:
    """Of these requests, newest first, those that nothing needs once `chosen` have gone."""
    open_states = (ReportState.PENDING.value, ReportState.RESERVED.value)
    waiting = (
        _referencing(receipts.c.request_id, page)
        .join(receipts, receipts.c.id == report_receipts.c.receipt_id)
        .where(reports.c.state.in_(open_states))
    )
    needed = {*connection.scalars(waiting), *_to_replay(connection, page, oldest=True)}
    later = _later_turns(connection, page)
    found: set[str] = set()
    for request_id in page:
        if request_id not in needed and later.get(request_id, set()) <= found | chosen:
            found.add(request_id)
    return found


def _turns_before(connection: Connection, page: Collection[str]) -> set[str]:
    query = select(receipts.c.request_id).join(requests, requests.c.parent == receipts.c.id)
    return set(connection.scalars(query.where(requests.c.id.in_(page))))


def _strip(connection: Connection, page: Sequence[str], now: float) -> Deleted:
    own = select(receipts.c.id, (func.length(receipts.c.output_ids) + func.length(receipts.c.logprobs)).label("size"))
    shared = select(
        requests.c.id,
        requests.c.sampling,
        (func.length(requests.c.prompt_ids) + func.length(requests.c.body)).label("size"),
    )
    made = connection.execute(own.where(receipts.c.request_id.in_(page)).order_by(receipts.c.seq)).all()
    asked = connection.execute(shared.where(requests.c.id.in_(page))).all()
    left = [{"request": row.id, "left": _without_stops(row.sampling), "now": now} for row in asked]
    connection.execute(_STRIP_REQUEST, left)
    connection.execute(
        update(receipts)
        .where(receipts.c.request_id.in_(page))
        .values(output_ids=b"", logprobs=b"", matched=None, turn_key=None)
    )
    if connection.dialect.name == "sqlite":
        for statement in _GIVE_BACK:
            connection.execute(statement, {"page": page})
    return Deleted(tuple(row.id for row in made), sum(row.size for row in (*made, *asked)))


def _without_stops(sampling: str) -> str:
    kept = {
        name: value
        for name, value in from_json(sampling).items()
        if name not in ("stop", "stop_token_ids", "json_schema")
    }
    return to_json(kept)


def _end_reports(connection: Connection, page: Sequence[str], now: float) -> None:
    """Drop the pending reports of these requests, take the free text of all. Raises ConflictError: one is reserved.

    In this order: on PostgreSQL the drop waits for whoever reserves one of them at this moment.
    """
    referencing = _referencing(reports.c.id, page)
    connection.execute(
        update(reports)
        .where(reports.c.id.in_(referencing), reports.c.state == ReportState.PENDING.value)
        .values(state=ReportState.DROPPED.value, reason="deleted", updated_at=now)
    )
    found = select(reports.c.id, reports.c.body, reports.c.state, reports.c.batch_id)
    rows = connection.execute(found.where(reports.c.id.in_(referencing))).all()
    for row in rows:
        if row.state == ReportState.RESERVED.value:
            raise _in_training(f"batch {row.batch_id}")
    left = [{"report": row.id, "left": to_json(report_rows.skeleton(from_json(row.body)))} for row in rows]
    if left:
        connection.execute(_STRIP_REPORT, left)


def _count_samples(connection: Connection, page: Sequence[str]) -> None:
    """Note on each release how many samples of its batch have lost their content."""
    query = _samples(select(batches.c.release_id, func.count()), page).group_by(batches.c.release_id)
    for release_id, count in connection.execute(query).all():
        connection.execute(
            update(releases).where(releases.c.id == release_id).values(num_deleted=releases.c.num_deleted + count)
        )


def _to_replay(connection: Connection, page: Sequence[str], oldest: bool) -> set[str]:
    """Of these requests, those that the way from a checkpoint to the head trains on, or to what it may give way to.

    From the newest checkpoint or the oldest there is along the head's ancestry; from the base, where there is none.
    """
    query = (
        _samples(select(receipts.c.request_id, releases.c.scenario, releases.c.number), page)
        .join(receipts, receipts.c.id == report_receipts.c.receipt_id)
        .join(releases, releases.c.id == batches.c.release_id)
    )
    rows = connection.execute(query).all()
    found: set[str] = set()
    for scenario in {row.scenario for row in rows}:
        head = release_rows.head(connection, scenario)
        assert head is not None  # one of its releases was found
        fallback = None if head.verified_at is not None else release_rows.verified_before(connection, head)
        for target in filter(None, (head, fallback)):
            checkpoints = release_rows.checkpoints_of(connection, target)
            since = checkpoints[-1 if oldest else 0].number if checkpoints else 0
            ranges = release_rows.ancestry(connection, scenario, target.number)
            found |= {
                row.request_id
                for row in rows
                if row.scenario == scenario and row.number > since and release_rows.is_among(ranges, row.number)
            }
    return found


def _samples(query: Select[Any], page: Sequence[str]) -> Select[Any]:
    """`query` over the samples of committed batches that were made from the receipts of these requests."""
    return (
        query.select_from(report_receipts)
        .join(
            batch_samples,
            (batch_samples.c.report_id == report_receipts.c.report_id)
            & (batch_samples.c.receipt_id == report_receipts.c.receipt_id),
        )
        .join(batches, batches.c.id == batch_samples.c.batch_id)
        .where(report_receipts.c.receipt_id.in_(_receipts_of(page)), batches.c.state == "committed")
    )


def _referencing(column: Any, page: Sequence[str]) -> Select[Any]:
    """`column` over the reports that reference a receipt of these requests."""
    return (
        select(column)
        .select_from(report_receipts)
        .join(reports, reports.c.id == report_receipts.c.report_id)
        .where(report_receipts.c.receipt_id.in_(_receipts_of(page)))
    )


def _receipts_of(page: Sequence[str]) -> Select[Any]:
    own = receipts.alias()
    return select(own.c.id).where(own.c.request_id.in_(page))


def _later_turns(connection: Connection, request_ids: Collection[str]) -> dict[str, set[str]]:
    """The next turns of each request that are not deleted."""
    found: dict[str, set[str]] = {}
    for page in _pages(request_ids):
        query = (
            select(receipts.c.request_id, requests.c.id)
            .join(requests, requests.c.parent == receipts.c.id)
            .where(receipts.c.request_id.in_(page), requests.c.deleted_at.is_(None))
        )
        for request_id, child in connection.execute(query):
            found.setdefault(request_id, set()).add(child)
    return found


def _newest_first(connection: Connection, request_ids: Collection[str]) -> list[str]:
    order: dict[str, int] = {}
    for page in _pages(request_ids):
        query = select(receipts.c.request_id, func.max(receipts.c.seq)).where(receipts.c.request_id.in_(page))
        order.update(tuple(row) for row in connection.execute(query.group_by(receipts.c.request_id)))
    return sorted(order, key=order.__getitem__, reverse=True)


def _live(query: Select[Any]) -> Select[Any]:
    return (
        query.select_from(receipts)
        .join(requests, requests.c.id == receipts.c.request_id)
        .where(requests.c.deleted_at.is_(None))
    )


def _pages(ids: Iterable[str]) -> Iterator[list[str]]:
    every = list(ids)
    for start in range(0, len(every), PAGE):
        yield every[start : start + PAGE]


def _in_training(what: str) -> ConflictError:
    return ConflictError(
        f"{what} is being trained on some of these receipts: delete them once it is done",
        code="in_training",
        retry_after_s=RETRY_S,
    )
