"""Batches: reserved before the step, committed with the release that the step made.

reserve -> [step] -> commit           the release, the batch and its reports change together
                 |-> again -> failed  two attempts; process deaths count
                 `-> aborted          by a rollback; its reports are pending again
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select, update

from reef.errors import ConflictError, GoneError, LedgerError, NotFoundError
from reef.faults import reach
from reef.ledger import releases as release_rows
from reef.ledger import reports as report_rows
from reef.ledger.ancestors import PAGE
from reef.ledger.codec import from_json, to_json
from reef.ledger.history import rewards_before
from reef.ledger.receipts import get_many
from reef.ledger.schema import batch_samples, batches, receipts, report_receipts, reports, requests
from reef.ledger.trajectories import Grade, plan, sample
from reef.types import Batch, Release, ReleaseState, ReportState, Selection

MAX_ATTEMPTS = 2
HISTORY = "history"  # of a batch's stored settings: `Batch.history`, so that a replay has the same
Split = Callable[[Sequence[int]], tuple[tuple[int, ...], ...]]


def reserve(
    connection: Connection,
    scenario: str,
    batch_id: str,
    selection: Selection,
    base_release: str,
    settings: Mapping[str, Any],
    split: Split,
    now: float,
    history_window: int = 0,
) -> str:
    """Store a batch with its exact order, before anything trains on it. `split` maps lengths to microbatches.

    What its reports reference becomes sequences by the rules of `trajectories.py`; lengths are theirs.

    Args:
        history_window: how many earlier rewards of its prompt are stored for each report, by the rules of `history.py`.

    Returns its id.

    Raises:
        ConflictError: a batch is reserved already, or a picked report is no longer pending.
        DamagedError: the receipts of a report continue one another in a circle, or their sampling cannot be read.
    """
    if (other := reserved(connection, scenario)) is not None:
        raise ConflictError(f"batch {other} of {scenario} is reserved already")
    report_rows.drop(connection, selection.drops, now)
    number = connection.scalar(select(func.max(batches.c.number)).where(batches.c.scenario == scenario)) or 0
    picked = [pick.report_id for pick in selection.picks]
    stored = dict(settings)
    if history_window:
        stored[HISTORY] = rewards_before(connection, scenario, picked, base_release, history_window)
    connection.execute(
        insert(batches).values(
            id=batch_id,
            scenario=scenario,
            number=number + 1,
            state="reserved",
            attempt=1,
            base_release=base_release,
            settings=to_json(stored),
            microbatches="[]",
            created_at=now,
            updated_at=now,
        )
    )
    taken = connection.execute(
        update(reports)
        .where(reports.c.id.in_(picked), reports.c.state == ReportState.PENDING.value)
        .values(state=ReportState.RESERVED.value, batch_id=batch_id, updated_at=now)
    )
    if taken.rowcount != len(picked):
        raise ConflictError(f"{len(picked) - taken.rowcount} reports of batch {batch_id} are no longer pending")
    rows, last_turns = _sample_rows(connection, batch_id, selection)
    connection.execute(insert(batch_samples), rows)
    microbatches = to_json(split(_lengths(connection, last_turns)))
    connection.execute(update(batches).where(batches.c.id == batch_id).values(microbatches=microbatches))
    return batch_id


def _sample_rows(connection: Connection, batch_id: str, selection: Selection) -> tuple[list[dict[str, Any]], list[str]]:
    """One row per receipt of each picked report, in the order of the picks, and the last turn of each sequence.

    Within a report: by sequence, the oldest turn first.
    """
    picked = [pick.report_id for pick in selection.picks]
    query = (
        select(report_receipts.c.report_id, report_receipts.c.receipt_id, reports.c.score)
        .join(reports, reports.c.id == report_receipts.c.report_id)
        .where(report_receipts.c.report_id.in_(picked))
        .order_by(report_receipts.c.report_id, report_receipts.c.position)
    )
    references: dict[str, list[str]] = {}
    rewards: dict[str, float] = {}
    for row in connection.execute(query):
        references.setdefault(row.report_id, []).append(row.receipt_id)
        rewards[row.report_id] = row.score
    sequences = plan(connection, references)
    rows: list[dict[str, Any]] = []
    last_turns: list[str] = []
    for pick in selection.picks:
        for turns in sequences[pick.report_id]:
            rows += [
                {
                    "batch_id": batch_id,
                    "position": position,
                    "report_id": pick.report_id,
                    "receipt_id": receipt_id,
                    "group_key": pick.group,
                    "reward": rewards[pick.report_id],
                    "trains": pick.trains,
                    "sample": len(last_turns),
                }
                for position, receipt_id in enumerate(turns, start=len(rows))
            ]
            last_turns.append(turns[-1])
    return rows, last_turns


def _lengths(connection: Connection, receipt_ids: Sequence[str]) -> list[int]:
    """Tokens of each of these receipts, its whole prompt included."""
    query = select(receipts.c.id, requests.c.prompt_length + receipts.c.num_tokens).join(
        requests, requests.c.id == receipts.c.request_id
    )
    found: dict[str, int] = {}
    for start in range(0, len(receipt_ids), PAGE):
        page = receipt_ids[start : start + PAGE]
        found.update(tuple(row) for row in connection.execute(query.where(receipts.c.id.in_(page))))
    return [found[receipt_id] for receipt_id in receipt_ids]


def load(connection: Connection, batch_id: str) -> Batch:
    """The batch with its samples, as it was reserved.

    Raises:
        NotFoundError: there is no such batch.
        GoneError: receipts of it were deleted.
        DamagedError: one of them is not as it was recorded.
    """
    row = connection.execute(select(batches).where(batches.c.id == batch_id)).first()
    if row is None:
        raise NotFoundError(f"no batch {batch_id}")
    query = select(batch_samples).where(batch_samples.c.batch_id == batch_id).order_by(batch_samples.c.position)
    members = connection.execute(query).all()
    _refuse_deleted(connection, batch_id, len(members))
    found = get_many(connection, [member.receipt_id for member in members])
    grades = _grades(connection, batch_id)
    produced = {span.release_id for receipt in found.values() for span in receipt.generation.spans}
    base = release_rows.get(connection, row.scenario, row.base_release)
    behind = release_rows.behind(connection, base, produced)
    lags = {name: base.policy_version if updates is None else updates for name, updates in behind.items()}
    settings = from_json(row.settings)
    history = settings.pop(HISTORY, {})
    return Batch(
        id=row.id,
        scenario=row.scenario,
        number=row.number,
        attempt=row.attempt,
        base_release=row.base_release,
        samples=tuple(
            sample(rows, found, grades.get(rows[0].report_id, Grade()), lags)
            for rows in _by_sequence(batch_id, members)
        ),
        microbatches=tuple(tuple(positions) for positions in from_json(row.microbatches)),
        settings=settings,
        reserved_at=row.created_at,
        history={report_id: tuple(rewards) for report_id, rewards in history.items()},
    )


def _refuse_deleted(connection: Connection, batch_id: str, num_samples: int) -> None:
    query = (
        select(batch_samples.c.receipt_id)
        .join(receipts, receipts.c.id == batch_samples.c.receipt_id)
        .join(requests, requests.c.id == receipts.c.request_id)
        .where(batch_samples.c.batch_id == batch_id, requests.c.deleted_at.is_not(None))
        .order_by(batch_samples.c.position)
    )
    if gone := connection.scalars(query).all():
        named = ", ".join([*gone[:3], *(["..."] if len(gone) > 3 else [])])
        raise GoneError(f"{len(gone)} of the {num_samples} receipts of batch {batch_id} were deleted: {named}")


def _grades(connection: Connection, batch_id: str) -> dict[str, Grade]:
    query = select(reports.c.id, reports.c.body, reports.c.created_at).where(reports.c.batch_id == batch_id)
    return {row.id: Grade.of(from_json(row.body), row.created_at) for row in connection.execute(query)}


def _by_sequence(batch_id: str, rows: Sequence[Row[Any]]) -> list[list[Row[Any]]]:
    """The rows of each sequence. Before version 3 of the schema each row was one."""
    found: dict[int, list[Row[Any]]] = {}
    for row in rows:
        found.setdefault(row.position if row.sample is None else row.sample, []).append(row)
    if list(found) != list(range(len(found))):
        raise LedgerError(f"batch {batch_id} holds sequences {list(found)[:9]}, expected 0, 1, ...", code="damaged")
    return list(found.values())


def settings_of(connection: Connection, batch_id: str) -> dict[str, Any]:
    """The settings that a batch was reserved with. Raises NotFoundError."""
    stored = connection.scalar(select(batches.c.settings).where(batches.c.id == batch_id))
    if stored is None:
        raise NotFoundError(f"no batch {batch_id}")
    found: dict[str, Any] = from_json(stored)
    return found


def reserved(connection: Connection, scenario: str) -> str | None:
    """The batch that was reserved and not yet committed: there is at most one."""
    query = select(batches.c.id).where(batches.c.scenario == scenario, batches.c.state == "reserved")
    return connection.scalar(query)


def commit(connection: Connection, batch_id: str, release: Release, now: float) -> Release:
    """The release, the batch and its reports, in this one transaction. Idempotent by batch.

    Raises:
        LedgerError: the batch is not reserved, or the chain has moved on without it.
    """
    row = connection.execute(select(batches).where(batches.c.id == batch_id)).first()
    if row is None:
        raise NotFoundError(f"no batch {batch_id}")
    if row.state == "committed":
        return release_rows.get(connection, row.scenario, row.release_id)
    if row.state != "reserved":
        raise LedgerError(f"batch {batch_id} is {row.state} and cannot be committed")
    head = release_rows.head(connection, row.scenario)
    if head is None or head.id != release.parent:
        raise LedgerError(f"release {release.id} follows {release.parent}, but the head is {head and head.id}")
    release_rows.append(connection, release)
    connection.execute(
        update(batches).where(batches.c.id == batch_id).values(state="committed", release_id=release.id, updated_at=now)
    )
    silent = select(batch_samples.c.report_id).where(
        batch_samples.c.batch_id == batch_id, batch_samples.c.trains.is_(False)
    )
    mine = update(reports).where(reports.c.batch_id == batch_id)
    connection.execute(mine.values(state=ReportState.TRAINED.value, reason=None, updated_at=now))
    connection.execute(
        mine.where(reports.c.id.in_(silent)).values(state=ReportState.DROPPED.value, reason="stale", updated_at=now)
    )
    reach("commit.inside")
    return release


def again(connection: Connection, batch_id: str, attempt: int, error: str, now: float) -> bool:
    """Attempt number `attempt` has failed: once more (True), or the batch ends `failed`, its reports `step_failed`.

    Idempotent by attempt.

    Raises:
        LedgerError: the batch is not reserved, and did not end with this attempt.
    """
    found = connection.execute(select(batches.c.state, batches.c.attempt).where(batches.c.id == batch_id)).first()
    if found is not None and (found.state, found.attempt) == ("failed", attempt):
        return False
    if found is None or found.state != "reserved":
        raise LedgerError(f"batch {batch_id} is not reserved, so no attempt of it can fail")
    if found.attempt != attempt:
        return True
    row = update(batches).where(batches.c.id == batch_id)
    if attempt < MAX_ATTEMPTS:
        connection.execute(row.values(attempt=attempt + 1, begun=False, error=error, updated_at=now))
        return True
    connection.execute(row.values(state="failed", error=error, updated_at=now))
    connection.execute(
        update(reports)
        .where(reports.c.batch_id == batch_id)
        .values(state=ReportState.DROPPED.value, reason="step_failed", updated_at=now)
    )
    return False


def lay_down(connection: Connection, scenario: str) -> None:
    """The owner ends in order: the reserved batch, where there is one, has not failed by that."""
    connection.execute(
        update(batches).where(batches.c.scenario == scenario, batches.c.state == "reserved").values(begun=False)
    )


def killed_in(connection: Connection, scenario: str) -> tuple[str, int] | None:
    """The reserved batch, and its attempt, that an owner was killed in. None: none is reserved, or it was not begun."""
    query = select(batches.c.id, batches.c.attempt).where(
        batches.c.scenario == scenario, batches.c.state == "reserved", batches.c.begun
    )
    row = connection.execute(query).first()
    return (row.id, row.attempt) if row is not None else None


def begin(connection: Connection, batch_id: str, taken_again: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """An attempt of a batch that was reserved before begins: whoever is killed from here on, it has failed.

    Args:
        taken_again: what becomes of its settings; the workers may be others than when it was reserved.
    """
    stored = connection.scalars(select(batches.c.settings).where(batches.c.id == batch_id)).one()
    settings = to_json(dict(taken_again(from_json(stored))))
    connection.execute(update(batches).where(batches.c.id == batch_id).values(begun=True, settings=settings))


def abort(connection: Connection, scenario: str, now: float) -> str | None:
    """Give the reserved batch up, where there is one: its reports are pending again. Returns its id."""
    batch_id = reserved(connection, scenario)
    if batch_id is not None:
        connection.execute(update(batches).where(batches.c.id == batch_id).values(state="aborted", updated_at=now))
        connection.execute(
            update(reports)
            .where(reports.c.batch_id == batch_id)
            .values(state=ReportState.PENDING.value, batch_id=None, updated_at=now)
        )
    return batch_id


def jump(connection: Connection, release: Release, now: float) -> Release:
    """Rollback or promotion: `release` repeats an older one's content, and the queue goes with it. One transaction.

    A reserved batch is aborted, reports of the branch left behind are dropped, a head that was held is rejected.

    Raises:
        LedgerError: the chain has moved on meanwhile.
    """
    head = release_rows.head(connection, release.scenario)
    if head is not None and head.id == release.id:
        return head  # stored already, though the answer was lost
    if head is None or head.id != release.parent:
        raise LedgerError(f"release {release.id} follows {release.parent}, but the head is {head and head.id}")
    if head.state is ReleaseState.PENDING:
        reason = release.reason or f"{release.operation} to {release.source} while it was held"
        release_rows.set_state(connection, head.id, ReleaseState.REJECTED, reason, now)
    release_rows.append(connection, release)
    abort(connection, release.scenario, now)
    report_rows.drop_abandoned(connection, release.scenario, now)
    return release


def error_of(connection: Connection, batch_id: str) -> str | None:
    """Why the batch's last failed attempt failed; None where none failed or the batch is unknown."""
    return connection.scalar(select(batches.c.error).where(batches.c.id == batch_id))
