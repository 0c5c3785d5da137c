"""Releases: a scenario's chain, what is kept of it on disk, and where a token's weights lie in it."""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Row, insert, or_, select, update

from reef.errors import NotFoundError
from reef.ledger.codec import from_json, to_json
from reef.ledger.schema import batch_samples, evaluations, releases
from reef.types import Operation, Release


def append(connection: Connection, release: Release) -> None:
    """Add one link; it becomes the head."""
    connection.execute(
        insert(releases).values(
            id=release.id,
            scenario=release.scenario,
            number=release.number,
            parent=release.parent,
            content_id=release.content_id,
            operation=release.operation.value,
            policy_version=release.policy_version,
            step=release.step,
            batch_id=release.batch_id,
            path=release.path,
            checkpoint=release.checkpoint,
            restorable=release.restorable,
            metrics=to_json(dict(release.metrics)),
            verified_at=release.verified_at,
            created_at=release.created_at,
        )
    )


def head(connection: Connection, scenario: str) -> Release | None:
    """The newest link, or None before the base."""
    query = select(releases).where(releases.c.scenario == scenario).order_by(releases.c.number.desc()).limit(1)
    row = connection.execute(query).first()
    return _from_row(row) if row else None


def get(connection: Connection, scenario: str, release_id: str) -> Release:
    """Raises NotFoundError."""
    query = select(releases).where(releases.c.scenario == scenario, releases.c.id == release_id)
    row = connection.execute(query).first()
    if row is None:
        raise NotFoundError(f"no release {release_id} in scenario {scenario}", code="release_not_found")
    return _from_row(row)


def chain(connection: Connection, scenario: str, limit: int = 100, before: int | None = None) -> list[Release]:
    """Newest first; at most `limit`, below number `before` where given."""
    query = select(releases).where(releases.c.scenario == scenario).order_by(releases.c.number.desc()).limit(limit)
    if before is not None:
        query = query.where(releases.c.number < before)
    return [_from_row(row) for row in connection.execute(query)]


def since(connection: Connection, scenario: str, number: int) -> list[Release]:
    """Those after `number`, oldest first: what a checkpoint of release `number` lacks."""
    query = (
        select(releases).where(releases.c.scenario == scenario, releases.c.number > number).order_by(releases.c.number)
    )
    return [_from_row(row) for row in connection.execute(query)]


def staleness(connection: Connection, scenario: str, ids: Iterable[str], window: int) -> dict[str, int | None]:
    """Policy updates between each release and the head along the head's ancestry.

    Exact up to `window`; further back the difference of the versions (too old in any case). None: the release is not
    among the head's ancestors, though it is recent enough that it would have to be (its branch was rolled away).
    """
    newest = head(connection, scenario)
    if newest is None:
        return dict.fromkeys(ids)
    ancestors: dict[str, int] = {}
    row: Release | None = newest
    while row is not None and newest.policy_version - row.policy_version <= window:
        ancestors[row.id] = newest.policy_version - row.policy_version
        row = get(connection, scenario, row.parent) if row.parent else None
    found: dict[str, int | None] = {}
    for release_id in set(ids):
        if release_id in ancestors:
            found[release_id] = ancestors[release_id]
            continue
        version = connection.scalar(
            select(releases.c.policy_version).where(releases.c.scenario == scenario, releases.c.id == release_id)
        )
        behind = None if version is None else newest.policy_version - int(version)
        found[release_id] = behind if behind is not None and behind > window else None
    return found


def verified_before(connection: Connection, release: Release) -> Release | None:
    """The newest link before `release` that an engine has loaded and agreed with; the base always counts."""
    query = (
        select(releases)
        .where(
            releases.c.scenario == release.scenario,
            releases.c.number < release.number,
            releases.c.restorable,
            or_(releases.c.verified_at.is_not(None), releases.c.operation == Operation.BASE.value),
        )
        .order_by(releases.c.number.desc())
        .limit(1)
    )
    row = connection.execute(query).first()
    return _from_row(row) if row else None


def set_verified(connection: Connection, release_id: str, now: float) -> None:
    """Note that an engine loaded this release and passed its check, at `now` (seconds since the epoch)."""
    connection.execute(update(releases).where(releases.c.id == release_id).values(verified_at=now))


def set_checkpoint(connection: Connection, release_id: str, path: str | None) -> None:
    """Note where a release's trainer checkpoint lies; None: it has none any more. An unknown id changes nothing."""
    connection.execute(update(releases).where(releases.c.id == release_id).values(checkpoint=path))


def checkpoints(connection: Connection, scenario: str) -> list[Release]:
    """Releases with a trainer checkpoint, newest first."""
    query = (
        select(releases)
        .where(releases.c.scenario == scenario, releases.c.checkpoint.is_not(None))
        .order_by(releases.c.number.desc())
    )
    return [_from_row(row) for row in connection.execute(query)]


def restorable(connection: Connection, scenario: str) -> list[Release]:
    """Releases whose weights are on disk, newest first."""
    query = (
        select(releases)
        .where(releases.c.scenario == scenario, releases.c.restorable)
        .order_by(releases.c.number.desc())
    )
    return [_from_row(row) for row in connection.execute(query)]


def forget_weights(connection: Connection, release_ids: Iterable[str]) -> None:
    """Say that these can no longer be loaded; written before their directories go."""
    connection.execute(update(releases).where(releases.c.id.in_(list(release_ids))).values(restorable=False))


def lineage(connection: Connection, scenario: str, release_id: str) -> dict[str, Any]:
    """The batch that made a release: its samples in their order, with reports, receipts and rewards."""
    release = get(connection, scenario, release_id)
    query = select(batch_samples).where(batch_samples.c.batch_id == release.batch_id).order_by(batch_samples.c.position)
    samples = [
        {
            "position": row.position,
            "report_id": row.report_id,
            "receipt_id": row.receipt_id,
            "group": row.group_key,
            "reward": row.reward,
            "trained": row.trains,
        }
        for row in connection.execute(query)
    ]
    return {
        "release_id": release.id,
        "parent_release_id": release.parent,
        "batch_id": release.batch_id,
        "samples": samples,
    }


def add_evaluation(connection: Connection, scenario: str, release_id: str, body: Any, now: float) -> None:
    """Store a held-out result on a release. Raises NotFoundError."""
    get(connection, scenario, release_id)
    connection.execute(insert(evaluations).values(release_id=release_id, body=to_json(body), created_at=now))


def evaluations_of(connection: Connection, release_ids: Iterable[str]) -> dict[str, list[Any]]:
    """Held-out results by release, oldest first."""
    query = select(evaluations).where(evaluations.c.release_id.in_(list(release_ids))).order_by(evaluations.c.seq)
    found: dict[str, list[Any]] = {}
    for row in connection.execute(query):
        found.setdefault(row.release_id, []).append(from_json(row.body))
    return found


def _from_row(row: Row[Any]) -> Release:
    return Release(
        id=row.id,
        scenario=row.scenario,
        number=row.number,
        parent=row.parent,
        content_id=row.content_id,
        operation=Operation(row.operation),
        policy_version=row.policy_version,
        step=row.step,
        batch_id=row.batch_id,
        path=row.path,
        checkpoint=row.checkpoint,
        restorable=row.restorable,
        created_at=row.created_at,
        metrics=from_json(row.metrics),
        verified_at=row.verified_at,
    )
