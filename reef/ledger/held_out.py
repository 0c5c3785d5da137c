"""Held-out results of releases, and the alarms that these ring: derived whenever they are read, never stored."""

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, and_, select

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
    asked = list(found)
    if not alarms or not asked:
        return {}
    links = _links(connection, asked, _widest(alarms))
    measured = {link.release_id for _, link in links if link.results}
    rung = {}
    for release in asked:
        if release.id in measured:
            ranges = releases.ancestry(connection, release.scenario, release.number)
            path = [link for number, link in links if releases.is_among(ranges, number)]
            rung[release.id] = judge(alarms, path)
    return {release_id: found for release_id, found in rung.items() if found}


def newest(connection: Connection, scenario: str, alarms: Alarms) -> tuple[str, tuple[Mark, ...]] | None:
    """The newest measured release among the head and its ancestors, and the alarms it rings; None: none is measured."""
    head = releases.head(connection, scenario)
    if head is None or not alarms:
        return None
    ranges = releases.ancestry(connection, scenario, head.number)
    measured = select(table.c.id, table.c.number).where(table.c.id.in_(select(evaluations.c.release_id)))
    query = measured.where(table.c.scenario == scenario).order_by(table.c.number.desc())
    for row in connection.execute(query).all():
        if releases.is_among(ranges, row.number):
            release = releases.get(connection, scenario, row.id)
            return row.id, marks(connection, [release], alarms).get(row.id, ())
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


def _links(connection: Connection, asked: Sequence[Release], window: int) -> list[tuple[int, Link]]:
    """Those of the chain that are asked for, or may be compared with one: each with its number, oldest first."""
    near = and_(
        table.c.scenario == asked[0].scenario,
        table.c.number <= max(release.number for release in asked),
        table.c.step >= min(release.step for release in asked) - window,
    )
    results: dict[str, list[Any]] = {}
    measured = select(evaluations.c.release_id, evaluations.c.body).join(table, table.c.id == evaluations.c.release_id)
    for row in connection.execute(measured.where(near).order_by(evaluations.c.seq)):
        results.setdefault(row.release_id, []).append(from_json(row.body))
    query = select(table.c.id, table.c.number, table.c.step, table.c.metrics).where(near).order_by(table.c.number)
    return [
        (row.number, Link(row.id, row.step, from_json(row.metrics).get("reward_mean"), results.get(row.id, [])))
        for row in connection.execute(query)
    ]


def _widest(alarms: Alarms) -> int:
    return max(alarm.window for alarm in alarms)
