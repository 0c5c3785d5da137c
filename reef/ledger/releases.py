"""Releases: a scenario's chain, what is kept of it on disk, and where a token's weights lie in it."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, insert, or_, select, update

from reef.errors import NotFoundError
from reef.ledger.codec import from_json, to_json
from reef.ledger.schema import batch_samples, evaluations, releases
from reef.types import Operation, Release, ReleaseState

STEPS = (Operation.TRAIN.value, Operation.CRITIC_ONLY.value)  # links that a batch made


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
            source=release.source,
            state=release.state.value,
            reason=release.reason,
            state_at=release.state_at,
            replay_diverged=release.replay_diverged,
            num_deleted=release.num_deleted,
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


def ancestry(connection: Connection, scenario: str, number: int) -> list[tuple[int, int]]:
    """The ancestors of link `number` and itself, along the content: inclusive ranges of numbers, newest first.

    A rollback or promotion continues at the release it repeats, so what lies between the two is not among them.
    """
    repeated = releases.alias()
    jumps = (
        select(releases.c.number, repeated.c.number.label("source_number"))
        .join(repeated, repeated.c.id == releases.c.source)
        .where(releases.c.scenario == scenario, releases.c.source.is_not(None), releases.c.number <= number)
        .order_by(releases.c.number.desc())
    )
    ranges = []
    for row in connection.execute(jumps):
        if row.number <= number:
            ranges.append((row.number, number))
            number = row.source_number
    return [*ranges, (0, number)]


def jumps_over(connection: Connection, release: Release) -> Iterator[tuple[Release, bool]]:
    """The rollbacks and promotions after a release, oldest first, and whether it is an ancestor of each."""
    query = (
        select(releases)
        .where(releases.c.scenario == release.scenario, releases.c.source.is_not(None))
        .where(releases.c.number > release.number)
        .order_by(releases.c.number)
    )
    jumps = [_from_row(row) for row in connection.execute(query)]
    numbers = numbers_of(connection, {jump.source for jump in jumps if jump.source is not None})
    held: list[tuple[int, bool]] = [(release.number, True)]  # from each number on, until the next: is it an ancestor?
    for jump in jumps:
        source = numbers[str(jump.source)]
        holds = source >= release.number and held[bisect_right(held, source, key=lambda entry: entry[0]) - 1][1]
        held.append((jump.number, holds))
        yield jump, holds


def numbers_of(connection: Connection, ids: Iterable[str]) -> dict[str, int]:
    """Links' numbers by their ids."""
    query = select(releases.c.id, releases.c.number).where(releases.c.id.in_(list(ids)))
    return {row.id: row.number for row in connection.execute(query)}


def is_among(ranges: Sequence[tuple[int, int]], number: int) -> bool:
    """Whether a link's number lies in one of `ancestry`'s ranges."""
    return any(low <= number <= high for low, high in ranges)


def steps_to(connection: Connection, release: Release, after: int) -> list[Release]:
    """The steps along a release's ancestry after link `after`, oldest first: what a checkpoint of that lacks."""
    query = (
        select(releases)
        .where(
            releases.c.scenario == release.scenario,
            releases.c.operation.in_(STEPS),
            releases.c.number > after,
            releases.c.number <= release.number,
        )
        .order_by(releases.c.number)
    )
    ranges = ancestry(connection, release.scenario, release.number)
    return [_from_row(row) for row in connection.execute(query) if is_among(ranges, row.number)]


def checkpoints_of(connection: Connection, release: Release) -> list[Release]:
    """Those along a release's ancestry that have a trainer checkpoint, newest first."""
    ranges = ancestry(connection, release.scenario, release.number)
    return [found for found in checkpoints(connection, release.scenario) if is_among(ranges, found.number)]


def staleness(connection: Connection, scenario: str, ids: Iterable[str]) -> dict[str, int | None]:
    """`behind` the head; all None where there is none."""
    newest = head(connection, scenario)
    return dict.fromkeys(ids) if newest is None else behind(connection, newest, ids)


def behind(connection: Connection, release: Release, ids: Iterable[str]) -> dict[str, int | None]:
    """Policy updates from each release on to `release`, along its ancestry; None: it is not among its ancestors.

    That is: its branch was rolled away, or nobody knows it. The same whenever it is asked.
    """
    found: dict[str, int | None] = dict.fromkeys(ids)
    ranges = ancestry(connection, release.scenario, release.number)
    query = select(releases.c.id, releases.c.number, releases.c.policy_version).where(
        releases.c.scenario == release.scenario, releases.c.id.in_(list(found))
    )
    for row in connection.execute(query):
        if is_among(ranges, row.number):
            found[row.id] = release.policy_version - row.policy_version
    return found


def served(connection: Connection, scenario: str) -> Release | None:
    """The newest of the head and its ancestors that may be served: not held, rejected, quarantined or gone."""
    newest = head(connection, scenario)
    query = select(releases).where(releases.c.state == ReleaseState.RELEASED.value, releases.c.restorable)
    return None if newest is None else _newest_ancestor(connection, query, newest)


def verified_before(connection: Connection, release: Release) -> Release | None:
    """The newest ancestor of `release` that an engine has loaded and agreed with; the base always counts."""
    query = select(releases).where(
        releases.c.number < release.number,
        releases.c.restorable,
        releases.c.state == ReleaseState.RELEASED.value,
        or_(releases.c.verified_at.is_not(None), releases.c.operation == Operation.BASE.value),
    )
    return _newest_ancestor(connection, query, release)


def set_state(connection: Connection, release_id: str, state: ReleaseState, reason: str | None, now: float) -> None:
    """Release, reject or quarantine a link, at `now`. An unknown id changes nothing."""
    connection.execute(
        update(releases).where(releases.c.id == release_id).values(state=state.value, reason=reason, state_at=now)
    )


def set_restorable(connection: Connection, release_id: str) -> None:
    """Note that a release's weights were written to disk after all. An unknown id changes nothing."""
    connection.execute(update(releases).where(releases.c.id == release_id).values(restorable=True))


def adopt(connection: Connection, release_id: str, content_id: str, reason: str) -> None:
    """What was made again in a release's place, which was never written to disk, is that release from now on."""
    values = {"content_id": content_id, "reason": reason, "replay_diverged": True}
    connection.execute(update(releases).where(releases.c.id == release_id).values(values))


def set_diverged(connection: Connection, release_id: str) -> None:
    """Note that this release, made again from the ledger, came out different."""
    connection.execute(update(releases).where(releases.c.id == release_id).values(replay_diverged=True))


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
    """The batch that made a release: its receipts in their order, with reports, rewards and the sequences they form."""
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
            "sample": row.position if row.sample is None else row.sample,
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


def _newest_ancestor(connection: Connection, query: Select[Any], release: Release) -> Release | None:
    """Of the links that a query finds, the newest that is `release` or one of its ancestors."""
    for low, high in ancestry(connection, release.scenario, release.number):
        inside = query.where(releases.c.scenario == release.scenario, releases.c.number.between(low, high))
        row = connection.execute(inside.order_by(releases.c.number.desc()).limit(1)).first()
        if row is not None:
            return _from_row(row)
    return None


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
        source=row.source,
        state=ReleaseState(row.state),
        reason=row.reason,
        state_at=row.state_at,
        replay_diverged=row.replay_diverged,
        num_deleted=row.num_deleted,
    )
