"""Why: all that happened to a report or a receipt, in order of time. Read from the rows there are; stored nowhere.

An event is {at, event, ...details}, `at` in seconds since the epoch. It is None where the ledger does not keep the time
(of a first attempt, once the second has ended); the event's place in the list is right all the same.
"""

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Row, select

from reef.ledger import releases as release_rows
from reef.ledger import reports as report_rows
from reef.ledger.receipts import skeleton
from reef.ledger.schema import batch_samples, batches, receipts, report_receipts, requests
from reef.types import ReleaseState, ReportState

Event = dict[str, Any]


def of_receipt(connection: Connection, receipt_id: str, group_size: int | None = None) -> list[Event]:
    """What happened to a receipt, and to every report that references it. Raises NotFoundError."""
    receipt = skeleton(connection, receipt_id)
    written: Event = {
        "at": receipt.created_at,
        "event": "written",
        "receipt_id": receipt.id,
        "tokens": receipt.num_tokens,
        "releases": list(dict.fromkeys(span.release_id for span in receipt.spans)),
        "exact": receipt.inexact_reason is None,
        "reason": receipt.inexact_reason,
    }
    reports = report_rows.reports_of(connection, receipt_id)
    told = [list(_of_report(connection, report_id, group_size)) for report_id in reports]
    return _merged([[written], *told, list(_deletions(connection, [receipt_id]))])


def of_report(connection: Connection, report_id: str, group_size: int | None = None) -> list[Event]:
    """What happened to a report, to the batches it was in and to the release it trained. Raises NotFoundError."""
    references = report_rows.references_of(connection, report_id)
    told = list(_of_report(connection, report_id, group_size))
    return _merged([told, list(_deletions(connection, references))])


def trained_in(connection: Connection, receipt_id: str) -> list[str]:
    """The releases that a receipt has trained."""
    query = (
        select(batches.c.release_id)
        .join(batch_samples, batch_samples.c.batch_id == batches.c.id)
        .join(report_receipts, report_receipts.c.report_id == batch_samples.c.report_id)
        .where(
            report_receipts.c.receipt_id == receipt_id,
            batch_samples.c.receipt_id == receipt_id,
            batch_samples.c.trains,
            batches.c.state == "committed",
        )
    )
    return list(connection.scalars(query))


def _of_report(connection: Connection, report_id: str, group_size: int | None) -> Iterator[Event]:
    view = report_rows.view(connection, report_id, group_size)
    state, reason = view["state"], view["reason"]
    about = {"report_id": report_id}
    claimed = connection.scalars(
        select(receipts.c.id).where(receipts.c.claimed_by == report_id, _referenced(report_id))
    )
    if receipt_ids := claimed.all():
        yield {"at": view["created_at"], "event": "claimed", **about, "score": view["score"], "receipts": receipt_ids}
    elif state == ReportState.RECORDED:
        yield {"at": view["created_at"], "event": "recorded", **about, "score": view["score"], "reason": reason}
    ended = False
    for batch in connection.execute(_batches_of(report_id)):
        ended = ended or batch.state in ("committed", "failed")
        yield from _of_batch(connection, batch, about)
    if state in (ReportState.PENDING, ReportState.WAITING):
        yield {"at": view["updated_at"], "event": state, **about, **({"reason": reason} if reason else {})}
    elif state == ReportState.DROPPED and not ended:
        yield {"at": view["updated_at"], "event": "dropped", **about, "reason": reason}


def _of_batch(connection: Connection, batch: Row[Any], about: Event) -> Iterator[Event]:
    about = {**about, "batch_id": batch.id}
    yield {"at": batch.created_at, "event": "reserved", **about}
    if batch.error is not None and batch.state != "failed":
        at = batch.updated_at if batch.state == "reserved" else None
        yield {"at": at, "event": "attempt_failed", **about, "attempt": batch.attempt - 1, "error": batch.error}
    if batch.state == "aborted":
        yield {"at": batch.updated_at, "event": "aborted", **about}
    elif batch.state == "failed":
        yield {"at": batch.updated_at, "event": "step_failed", **about, "attempt": batch.attempt, "error": batch.error}
    elif batch.state == "committed" and not batch.trains:
        yield {"at": batch.updated_at, "event": "dropped", **about, "reason": "stale"}
    elif batch.state == "committed":
        yield from _of_release(connection, batch, about)


def _of_release(connection: Connection, batch: Row[Any], about: Event) -> Iterator[Event]:
    """From the step that made a release on: its gate, its load, and whether the chain still goes through it."""
    release = release_rows.get(connection, batch.scenario, batch.release_id)
    named = {"release_id": release.id}
    yield {"at": release.created_at, "event": "trained", **about, "step": release.step, **named}
    told: list[Event] = []
    if release.state is ReleaseState.PENDING:
        told.append({"at": release.created_at, "event": "held", **named, "reason": release.reason})
    elif release.state_at is not None:
        told.append({"at": release.state_at, "event": release.state.value, **named, "reason": release.reason})
    if release.verified_at is not None:
        told.append({"at": release.verified_at, "event": "verified", **named})
    inside = True
    for jump, holds in release_rows.jumps_over(connection, release):
        if holds != inside:
            inside = holds
            event = "brought_back" if inside else "rolled_away"
            told.append({"at": jump.created_at, "event": event, **named, "by": jump.id, "operation": jump.operation})
    yield from sorted(told, key=lambda event: event["at"])


def _batches_of(report_id: str) -> Any:
    """Each batch that a report was in, oldest first, and whether it trained there."""
    inside = select(batch_samples.c.batch_id, batch_samples.c.trains).where(batch_samples.c.report_id == report_id)
    member = inside.distinct().subquery()
    return select(batches, member.c.trains).join(member, member.c.batch_id == batches.c.id).order_by(batches.c.number)


def _deletions(connection: Connection, receipt_ids: Any) -> Iterator[Event]:
    query = (
        select(receipts.c.id, requests.c.deleted_at)
        .join(requests, requests.c.id == receipts.c.request_id)
        .where(receipts.c.id.in_(receipt_ids), requests.c.deleted_at.is_not(None))
        .order_by(requests.c.deleted_at, receipts.c.seq)
    )
    for row in connection.execute(query):
        yield {"at": row.deleted_at, "event": "deleted", "receipt_id": row.id}


def _referenced(report_id: str) -> Any:
    return receipts.c.id.in_(select(report_receipts.c.receipt_id).where(report_receipts.c.report_id == report_id))


def _merged(stories: list[list[Event]]) -> list[Event]:
    """By time, each story's own order kept: an event whose time is not known comes right after the one before it."""
    timed: list[tuple[float, Event]] = []
    for story in stories:
        at = 0.0
        for event in story:
            at = max(at, event["at"] or at)
            timed.append((at, event))
    return [event for _, event in sorted(timed, key=lambda pair: pair[0])]
