"""Does a whole ledger hold what it promises? Every invariant of DESIGN.md section 5, row by row; only reads.

    for finding in audit(connection): print(finding)

A row is held for one fault, the first that explains the others. Rows are read in pages, so that a million receipts cost
minutes and little memory; all of it in the one snapshot that `connection` sees.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from sqlalchemy import Connection, Row, Select, func, select, true
from sqlalchemy.exc import DBAPIError

from reef.ledger.batches import MAX_ATTEMPTS
from reef.ledger.codec import BROKEN_BODY, digest, from_json, pack_ids, unpack_body
from reef.ledger.receipts import UNREADABLE, compute_digest, read_many
from reef.ledger.releases import STEPS
from reef.ledger.reports import FREE_TEXT
from reef.ledger.schema import batch_samples, batches, receipts, releases, report_receipts, reports, requests
from reef.types import Operation, Receipt, ReleaseState

PAGE = 500
NOT_FINITE = "logprob_not_finite"
# What the batch of a report may be, by the state of the report; None: it has none.
BATCH_OF: dict[str, set[str | None]] = {
    "pending": {None},
    "recorded": {None},
    "reserved": {"reserved"},
    "trained": {"committed"},
    "dropped": {None},
    "dropped stale": {None, "committed"},
    "dropped step_failed": {"failed"},
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that must not be."""

    kind: str  # what the subject is: database, receipt, report, batch, release, ...
    subject: str  # its id
    message: str

    def __str__(self) -> str:
        return f"{self.kind} {self.subject}: {self.message}"


def audit(connection: Connection, progress: Callable[[str], None] = lambda _: None) -> Iterator[Finding]:
    """Everything that is wrong in a ledger. `progress` is told now and then how far it is."""
    try:
        broken = False
        for finding in _database(connection):
            broken = True
            yield finding
        if broken:
            return  # what is read through broken pages and indices says nothing
        yield from _releases(connection)
        yield from _batches(connection)
        yield from _reports(connection, progress)
        yield from _receipts(connection, progress)
        yield from _bodies(connection)
    except DBAPIError as error:
        yield Finding("database", connection.dialect.name, f"cannot be read: {error.orig}")


def counts(connection: Connection) -> dict[str, int]:
    """How many rows there are of what is audited."""
    tables = (receipts, reports, batches, releases)
    return {table.name: connection.scalar(select(func.count()).select_from(table)) or 0 for table in tables}


def _database(connection: Connection) -> Iterator[Finding]:
    """SQLite's own checks; PostgreSQL refuses rows that break a constraint."""
    if connection.dialect.name != "sqlite":
        return
    for (text,) in connection.exec_driver_sql("PRAGMA integrity_check"):
        if text != "ok":
            yield Finding("database", "sqlite", text)
    for table, row, parent, _ in connection.exec_driver_sql("PRAGMA foreign_key_check"):
        yield Finding("database", "sqlite", f"row {row} of {table} names a row of {parent} that is not there")


def _releases(connection: Connection) -> Iterator[Finding]:
    newest = select(releases.c.scenario, func.max(releases.c.number).label("number")).group_by(releases.c.scenario)
    heads = {row.scenario: row.number for row in connection.execute(newest)}
    gone = (
        select(batches.c.release_id, func.count().label("samples"))
        .select_from(requests)
        .join(receipts, receipts.c.request_id == requests.c.id)
        .join(batch_samples, batch_samples.c.receipt_id == receipts.c.id)
        .join(batches, batches.c.id == batch_samples.c.batch_id)
        .where(requests.c.deleted_at.is_not(None), batches.c.state == "committed")
        .group_by(batches.c.release_id)
    )
    num_deleted = {row.release_id: row.samples for row in connection.execute(gone)}
    query = (
        select(
            *releases.c["id", "scenario", "number", "parent", "content_id", "operation", "policy_version", "step"],
            *releases.c["batch_id", "source", "state", "reason", "num_deleted"],
            batches.c.state.label("batch_state"),
            batches.c.release_id.label("batch_release"),
        )
        .outerjoin(batches, batches.c.id == releases.c.batch_id)
        .order_by(releases.c.scenario, releases.c.number)
    )
    for scenario, chain in groupby(_rows(connection, query), key=lambda row: row.scenario):
        before: dict[str, Row[Any]] = {}  # the links so far, in order
        for row in chain:
            fault = _release_fault(row, before)
            if fault is None and row.state == ReleaseState.PENDING and row.number != heads[scenario]:
                fault = "it is held, and is not the head"
            if fault is None and row.num_deleted != (num := num_deleted.get(row.id, 0)):
                fault = f"it counts {row.num_deleted} deleted samples, {num} of its batch were deleted"
            if fault is not None:
                yield Finding("release", row.id, fault)
            before[row.id] = row


def _release_fault(row: Row[Any], before: dict[str, Row[Any]]) -> str | None:
    parent = before[next(reversed(before))] if before else None
    if row.number != (number := parent.number + 1 if parent else 0):
        return f"its number is {row.number}, expected {number}"
    if row.parent != (id := parent.id if parent else None):
        return f"its parent is {row.parent}, the link before it is {id}"
    if row.state not in list(ReleaseState):
        return f"its state {row.state} is not one"
    if row.state in (ReleaseState.REJECTED, ReleaseState.QUARANTINED) and not row.reason:
        return f"it is {row.state} without a reason"
    at = (row.policy_version, row.step)
    if parent is None:
        return None if (row.operation, row.batch_id) == (Operation.BASE, None) else "the first link is not a base"
    if row.operation in STEPS:
        if (row.batch_state, row.batch_release) != ("committed", row.id):
            return f"its batch {row.batch_id} is {row.batch_state}, with release {row.batch_release}"
        updates = int(row.operation == Operation.TRAIN)
        if at != (expected := (parent.policy_version + updates, parent.step + 1)):
            return f"its policy version and step are {at}, expected {expected}"
        return None if row.source is None else f"it is trained, and repeats {row.source}"
    if row.operation not in (Operation.ROLLBACK, Operation.PROMOTE):
        return f"its operation {row.operation} cannot follow a link"
    source = before.get(row.source)
    if source is None:
        return f"it repeats {row.source}, which is no earlier link"
    if (row.content_id, *at) != (source.content_id, source.policy_version, source.step):
        return f"its content, policy version and step are not those of {row.source}, which it repeats"
    return None if row.batch_id is None else f"it repeats {row.source}, and has batch {row.batch_id}"


def _batches(connection: Connection) -> Iterator[Finding]:
    many = select(batches.c.scenario).where(batches.c.state == "reserved").group_by(batches.c.scenario)
    for scenario in connection.scalars(many.having(func.count() > 1)):
        yield Finding("scenario", scenario, "it has more than one reserved batch")
    query = (
        select(batches, releases.c.batch_id.label("made_from"))
        .outerjoin(releases, releases.c.id == batches.c.release_id)
        .order_by(batches.c.id)
    )
    for rows in _pages(connection, query, batches.c.id):
        samples = select(*batch_samples.c["batch_id", "position", "sample", "report_id"]).order_by(
            batch_samples.c.batch_id, batch_samples.c.position
        )
        members = _by_first(connection, samples.where(batch_samples.c.batch_id.between(rows[0].id, rows[-1].id)))
        for row in rows:
            if (fault := _batch_fault(row, members.get(row.id, []))) is not None:
                yield Finding("batch", row.id, fault)


def _batch_fault(row: Row[Any], members: list[Row[Any]]) -> str | None:
    """`members`: its rows of `batch_samples`, in order."""
    if row.state not in ("reserved", "committed", "failed", "aborted"):
        return f"its state {row.state} is not one"
    if not members or [member.position for member in members] != list(range(len(members))):
        return f"the positions of its {len(members)} samples are not 0, 1, ..."
    reports_of: dict[int, set[str]] = {}
    for member in members:
        number = member.position if member.sample is None else member.sample
        reports_of.setdefault(number, set()).add(member.report_id)
    if list(reports_of) != list(range(len(reports_of))):
        return f"its sequences are {', '.join(map(str, list(reports_of)[:9]))}, expected 0, 1, ..."
    if mixed := [number for number, named in reports_of.items() if len(named) > 1]:
        return f"its sequence {mixed[0]} is of several reports: {', '.join(sorted(reports_of[mixed[0]]))}"
    try:
        from_json(row.settings)
        if sorted(number for group in from_json(row.microbatches) for number in group) != list(reports_of):
            return f"its microbatches do not hold each of its {len(reports_of)} sequences once"
    except UNREADABLE as error:
        return f"its settings or microbatches cannot be read: {error}"
    if row.state == "committed" and (row.release_id is None or row.made_from != row.id):
        return f"it is committed, and its release {row.release_id} was made from batch {row.made_from}"
    if row.state != "committed" and row.release_id is not None:
        return f"it is {row.state}, and has release {row.release_id}"
    if row.state == "failed" and row.attempt != MAX_ATTEMPTS:
        return f"it failed in attempt {row.attempt}, expected {MAX_ATTEMPTS}"
    return None


def _reports(connection: Connection, progress: Callable[[str], None]) -> Iterator[Finding]:
    twice = (
        select(report_receipts.c.receipt_id)
        .join(reports, reports.c.id == report_receipts.c.report_id)
        .where(reports.c.state == "trained")
        .group_by(report_receipts.c.receipt_id)
    )
    for receipt_id in connection.scalars(twice.having(func.count() > 1)):
        yield Finding("receipt", receipt_id, "it was trained twice: two trained reports reference it")
    query = (
        select(reports, batches.c.state.label("batch_state"))
        .outerjoin(batches, batches.c.id == reports.c.batch_id)
        .order_by(reports.c.seq)
    )
    holder = reports.alias()
    references = (
        select(
            *report_receipts.c["report_id", "receipt_id"],
            receipts.c.claimed_by,
            requests.c.deleted_at,
            holder.c.state.label("claimer_state"),
        )
        .select_from(reports)
        .join(report_receipts, report_receipts.c.report_id == reports.c.id)
        .join(receipts, receipts.c.id == report_receipts.c.receipt_id)
        .join(requests, requests.c.id == receipts.c.request_id)
        .outerjoin(holder, holder.c.id == receipts.c.claimed_by)
        .order_by(reports.c.seq, report_receipts.c.position)
    )
    holding = (
        select(*batch_samples.c["report_id", "batch_id"], batches.c.state, batch_samples.c.trains)
        .select_from(reports)
        .join(batch_samples, batch_samples.c.report_id == reports.c.id)
        .join(batches, batches.c.id == batch_samples.c.batch_id)
        .where(batches.c.state.in_(("reserved", "committed", "failed")))
        .distinct()
        .order_by(*batch_samples.c["report_id", "batch_id"])
    )
    for rows in _pages(connection, query, reports.c.seq):
        progress(f"report {rows[-1].seq}")
        named = _by_first(connection, _between(references, reports.c.seq, rows))
        held = _by_first(connection, _between(holding, reports.c.seq, rows))
        for row in rows:
            if (fault := _report_fault(row, named.get(row.id, []), held.get(row.id, []))) is not None:
                yield Finding("report", row.id, fault)


def _report_fault(row: Row[Any], references: list[Row[Any]], holding: list[Row[Any]]) -> str | None:
    """`references`: its receipts, their claims and the claimers' states; `holding`: batches that have samples of it."""
    gone = [reference.receipt_id for reference in references if reference.deleted_at is not None]
    if not gone and row.digest != digest(row.scenario, row.body):
        return "its body is not the one that was accepted: the digest differs"
    try:
        body = dict(from_json(row.body))
    except UNREADABLE as error:
        return f"its body cannot be read: {error}"
    if gone and (texts := [name for name in FREE_TEXT if name in body]):
        return f"its receipt {gone[0]} was deleted, and its {', '.join(texts)} not"
    if body.get("references", []) != [reference.receipt_id for reference in references]:
        return "its body references other receipts than are stored for it"
    if row.state not in BATCH_OF:
        return f"its state {row.state} is not one"
    if row.state in ("recorded", "dropped") and not row.reason:
        return f"it is {row.state} without a reason"
    trained = [sample.batch_id for sample in holding if sample.trains and sample.state == "committed"]
    if len(trained) > 1:
        return f"it was trained twice: in {' and '.join(trained)}"
    if (held := [sample.batch_id for sample in holding]) != ([] if row.batch_id is None else [row.batch_id]):
        return f"its batch is {row.batch_id}, samples of it are in {', '.join(held) or 'none'}"
    if row.batch_state not in BATCH_OF.get(f"{row.state} {row.reason}", BATCH_OF[row.state]):
        return f"it is {row.state} ({row.reason}), and its batch {row.batch_id} is {row.batch_state}"
    if gone and row.state in ("pending", "reserved"):
        return f"it is {row.state}, and its receipt {gone[0]} was deleted"
    if row.state in ("pending", "reserved", "trained"):
        for item in references:
            if item.claimed_by != row.id and not row.state == item.claimer_state == "trained":  # named already: twice
                return f"it is {row.state}, and its receipt {item.receipt_id} is claimed by {item.claimed_by}"
    return None


def _receipts(connection: Connection, progress: Callable[[str], None]) -> Iterator[Finding]:
    known = set(connection.scalars(select(releases.c.id)))
    parent, parent_request = receipts.alias(), requests.alias()
    query = (
        select(
            *receipts.c["seq", "id", "num_tokens", "spans", "inexact_reason", "claimed_by", "turn_key"],
            *requests.c["parent", "prompt_length", "prompt_digest", "deleted_at"],
            (func.length(requests.c.prompt_ids) + func.length(requests.c.body)).label("request_bytes"),
            func.length(receipts.c.output_ids).label("id_bytes"),
            func.length(receipts.c.logprobs).label("logprob_bytes"),
            report_receipts.c.report_id.label("claimer"),
            parent.c.seq.label("parent_seq"),
            parent_request.c.deleted_at.label("parent_deleted_at"),
        )
        .join(requests, requests.c.id == receipts.c.request_id)
        .outerjoin(parent, parent.c.id == requests.c.parent)
        .outerjoin(parent_request, parent_request.c.id == parent.c.request_id)
        .outerjoin(
            report_receipts,
            (report_receipts.c.receipt_id == receipts.c.id) & (report_receipts.c.report_id == receipts.c.claimed_by),
        )
        .order_by(receipts.c.seq)
    )
    incomplete: set[str] = set()  # whose ids are not there or not sound, so that none who continues them is judged
    for rows in _pages(connection, query, receipts.c.seq):
        progress(f"receipt {rows[-1].seq}")
        sound: dict[str, Row[Any]] = {}
        for row in rows:
            if (fault := _receipt_fault(row, known)) is not None:
                yield Finding("receipt", row.id, fault)
            if fault is not None or row.deleted_at is not None or row.parent in incomplete:
                incomplete.add(row.id)
            else:
                sound[row.id] = row
        whole = dict(_read(connection, list(sound)))
        for row in sound.values():
            if row.parent in incomplete:
                incomplete.add(row.id)
            elif (fault := _content_fault(row, whole[row.id])) is not None:
                incomplete.add(row.id)
                yield Finding("receipt", row.id, fault)


def _bodies(connection: Connection) -> Iterator[Finding]:
    query = select(requests.c.id, requests.c.body).where(requests.c.deleted_at.is_(None)).order_by(requests.c.id)
    for row in _rows(connection, query):
        try:
            unpack_body(row.body)
        except BROKEN_BODY as error:
            yield Finding("request", row.id, f"its body cannot be read: {error}")


def _receipt_fault(row: Row[Any], known: set[str]) -> str | None:
    if row.claimed_by is not None and row.claimer is None:
        return f"it is claimed by {row.claimed_by}, which does not reference it"
    if row.parent is not None and row.parent_seq is None:
        return f"it continues {row.parent}, which is not there"
    if row.parent is not None and row.parent_seq >= row.seq:
        return f"it continues {row.parent}, which is not older"
    if row.deleted_at is not None:
        left = row.id_bytes + row.logprob_bytes + row.request_bytes
        if left:
            return f"it was deleted, and {left} bytes of its content are there"
        return None if row.turn_key is None else "it was deleted, and the hash of its conversation is there"
    if row.parent_deleted_at is not None:
        return f"it continues {row.parent}, which was deleted"
    if not row.id_bytes == row.logprob_bytes == 4 * row.num_tokens:
        return (
            f"it has {row.num_tokens} tokens in {row.id_bytes} bytes of ids, {row.logprob_bytes} of log-probabilities"
        )
    try:
        return _span_fault(from_json(row.spans), row.num_tokens, known)
    except UNREADABLE as error:
        return f"its spans cannot be read: {error}"


def _span_fault(spans: Iterable[Any], num_tokens: int, known: set[str]) -> str | None:
    at = 0
    for start, end, release_id in spans:
        if start != at or end < start:
            return f"its spans have a gap or overlap at token {at}: the next is [{start}, {end})"
        if known and release_id not in known:  # a ledger that only records has no chain
            return f"tokens [{start}, {end}) are from {release_id}, which is no release"
        at = end
    return None if at == num_tokens else f"its spans cover {at} of {num_tokens} tokens"


def _read(connection: Connection, receipt_ids: list[str]) -> Iterator[tuple[str, Receipt | Exception]]:
    """Whole receipts; in place of one that cannot be put together, why not."""
    try:
        yield from read_many(connection, receipt_ids).items()
    except UNREADABLE as error:
        if len(receipt_ids) == 1:
            yield receipt_ids[0], error
            return
        for receipt_id in receipt_ids:
            yield from _read(connection, [receipt_id])


def _content_fault(row: Row[Any], receipt: Receipt | Exception) -> str | None:
    if isinstance(receipt, Exception):
        return f"it cannot be read: {receipt}"
    if len(receipt.prompt_ids) != row.prompt_length or digest(pack_ids(receipt.prompt_ids)) != row.prompt_digest:
        return "its prompt is not the one that was asked: the digest of its ids differs"
    if not np.isfinite(receipt.generation.logprobs).all() and NOT_FINITE not in (row.inexact_reason or ""):
        return "it has log-probabilities that are not finite, and does not say so"
    try:
        return None if compute_digest(receipt) == receipt.digest else "it was changed: its digest differs"
    except UNREADABLE as error:
        return f"it cannot be read: {error}"


def _rows(connection: Connection, query: Select[Any]) -> Iterator[Row[Any]]:
    """The rows of a query, a page of them in memory at a time."""
    yield from connection.execute(query, execution_options={"yield_per": PAGE})


def _pages(connection: Connection, query: Select[Any], key: Any) -> Iterator[list[Row[Any]]]:
    """Pages of a query that is ordered by the unique column `key`; each is a query of its own, by that key."""
    after = true()
    while rows := list(connection.execute(query.where(after).limit(PAGE))):
        yield rows
        after = key > rows[-1]._mapping[key.name]


def _between(query: Select[Any], key: Any, rows: list[Row[Any]]) -> Select[Any]:
    """Of `query`, what lies within the page `rows` by the column `key`."""
    return query.where(key.between(rows[0]._mapping[key.name], rows[-1]._mapping[key.name]))


def _by_first(connection: Connection, query: Select[Any]) -> dict[str, list[Row[Any]]]:
    """The rows of a query by their first column."""
    found: dict[str, list[Row[Any]]] = {}
    for row in connection.execute(query):
        found.setdefault(row[0], []).append(row)
    return found
