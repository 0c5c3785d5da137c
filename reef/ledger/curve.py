"""A learning curve: the chain's links in their order, each with the rollouts that had been trained by then."""

from sqlalchemy import ColumnElement, Connection, func, select

from reef.ledger import releases as release_rows
from reef.ledger.schema import batch_samples, releases
from reef.types import Release


def points(
    connection: Connection, scenario: str, after: int, rollouts: int | None, limit: int
) -> list[tuple[Release, int]]:
    """Up to `limit` links numbered above `after`, oldest first, each with the rollouts trained up to and with it.

    A rollout is a report that a step trained on; one that only counted in its group's mean (it was stale) is none, and
    one whose release was rolled back later stays one: its budget is spent. `rollouts`: how many they were at `after`;
    None: count them.
    """
    newest_first = release_rows.chain(connection, scenario, limit, before=after + 1 + limit)  # numbers have no gaps
    found = [release for release in reversed(newest_first) if release.number > after]
    if not found:
        return []
    if rollouts is None:
        rollouts = sum(_trained(connection, scenario, releases.c.number <= after).values())
    mine = _trained(connection, scenario, releases.c.number.between(found[0].number, found[-1].number))
    curve = []
    for release in found:
        rollouts += mine.get(release.number, 0)
        curve.append((release, rollouts))
    return curve


def _trained(connection: Connection, scenario: str, among: ColumnElement[bool]) -> dict[int, int]:
    """Rollouts by the number of the release whose step trained on them."""
    query = (
        select(releases.c.number, func.count(batch_samples.c.report_id.distinct()).label("rollouts"))
        .join(batch_samples, batch_samples.c.batch_id == releases.c.batch_id)
        .where(releases.c.scenario == scenario, batch_samples.c.trains, among)
        .group_by(releases.c.number)
    )
    return {row.number: row.rollouts for row in connection.execute(query)}
