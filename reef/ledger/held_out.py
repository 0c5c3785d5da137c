"""Held-out results of releases, and the alarms that these ring: derived whenever they are read, never stored."""

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, select

from reef.alarms import Link, Mark, judge
from reef.config import AlarmSection
from reef.ledger import releases
from reef.ledger.codec import from_json
from reef.ledger.schema import evaluations
from reef.ledger.schema import releases as table
from reef.types import Release

Alarms = Sequence[AlarmSection]


def add(
    connection: Connection, scenario: str, release_id: str, body: Any, now: float, alarms: Alarms
) -> list[tuple[str, Mark]]:
    """Store a held-out result on a release; the alarms that ring now and did not before, each with its release.

    Others than this release may ring, too: those measured before that come after it. Raises NotFoundError.
    """
    release = releases.get(connection, scenario, release_id)
    near = _measured_near(connection, release, alarms) if alarms else []
    rang = {(name, mark.metric) for name, found in marks(connection, near, alarms).items() for mark in found}
    releases.add_evaluation(connection, scenario, release_id, body, now)
    after = marks(connection, near, alarms)
    return [(name, mark) for name, found in after.items() for mark in found if (name, mark.metric) not in rang]


def marks(connection: Connection, found: Iterable[Release], alarms: Alarms) -> dict[str, tuple[Mark, ...]]:
    """The alarms that releases of one scenario ring, by release; those that ring none are left out."""
    if not alarms:
        return {}
    asked = {release.id: release for release in found}
    query = select(evaluations.c.release_id).where(evaluations.c.release_id.in_(list(asked))).distinct()
    measured = set(connection.scalars(query))
    rung = {
        release.id: judge(alarms, _path(connection, release, _widest(alarms)))
        for release in asked.values()
        if release.id in measured
    }
    return {release_id: found for release_id, found in rung.items() if found}


def newest(connection: Connection, scenario: str, alarms: Alarms) -> tuple[str, tuple[Mark, ...]] | None:
    """The newest measured release among the head and its ancestors, and the alarms it rings; None: none is measured."""
    head = releases.head(connection, scenario)
    if head is None or not alarms:
        return None
    measured = select(table.c.id).where(table.c.id.in_(select(evaluations.c.release_id)))
    for low, high in releases.ancestry(connection, scenario, head.number):
        inside = measured.where(table.c.scenario == scenario, table.c.number.between(low, high))
        release_id = connection.scalar(inside.order_by(table.c.number.desc()).limit(1))
        if release_id is not None:
            release = releases.get(connection, scenario, release_id)
            return release_id, marks(connection, [release], alarms).get(release_id, ())
    return None


def _measured_near(connection: Connection, release: Release, alarms: Alarms) -> list[Release]:
    """`release`, and the measured ones that may be compared with it: later ones within the widest window."""
    query = (
        select(table.c.id)
        .where(table.c.scenario == release.scenario, table.c.number > release.number)
        .where(table.c.step <= release.step + _widest(alarms))
        .where(table.c.id.in_(select(evaluations.c.release_id)))
        .order_by(table.c.number)
    )
    later = [releases.get(connection, release.scenario, row.id) for row in connection.execute(query).all()]
    return [release, *later]


def _path(connection: Connection, release: Release, window: int) -> list[Link]:
    """A release and its ancestors of at most `window` steps before, oldest first: read by number, and no others."""
    first = release.step - window
    rows: list[Any] = []
    for low, high in releases.ancestry(connection, release.scenario, release.number):
        near = select(table.c.id, table.c.step, table.c.metrics).where(
            table.c.scenario == release.scenario,
            table.c.number.between(max(low, high - window - 1), high),  # in a range each link is at most one step on
            table.c.step >= first,
        )
        found = connection.execute(near.order_by(table.c.number.desc())).all()
        rows += found
        if not found or found[-1].step <= first:
            break
    results: dict[str, list[Any]] = {}
    measured = select(evaluations.c.release_id, evaluations.c.body).where(
        evaluations.c.release_id.in_([row.id for row in rows])
    )
    for row in connection.execute(measured.order_by(evaluations.c.seq)):
        results.setdefault(row.release_id, []).append(from_json(row.body))
    return [
        Link(row.id, row.step, from_json(row.metrics).get("reward_mean"), results.get(row.id, []))
        for row in reversed(rows)
    ]


def _widest(alarms: Alarms) -> int:
    return max(alarm.window for alarm in alarms)
