"""What a prompt's answers earned before: rewards of earlier batches, for methods that compare a rollout with them.

A prompt is the ids of a report's first reference (`reports.prompt_digest`), sampled at one temperature: answers drawn
at another come from another distribution. Groups do not count here, since clients name them anew in each epoch.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    JSON,
    ColumnElement,
    Connection,
    Float,
    Select,
    bindparam,
    cast,
    func,
    literal_column,
    or_,
    select,
)

from reef.ledger import releases as release_rows
from reef.ledger.ancestors import PAGE
from reef.ledger.schema import batches, receipts, releases, report_receipts, reports, requests
from reef.types import Release

Prompt = tuple[str, float]  # digest of its ids, temperature
_TRAINED = reports.c.state == literal_column("'trained'")  # as the index says it: SQLite takes no parameter for that


def rewards_before(
    connection: Connection, scenario: str, report_ids: Sequence[str], base_release: str, window: int
) -> dict[str, list[float]]:
    """By report, the rewards of its prompt that were trained up to a release, newest first, at most `window`.

    Newest by arrival. What was trained on a branch that `base_release` does not descend from does not count. Reports
    whose prompt earned nothing yet are left out.

    Raises:
        NotFoundError: there is no such release.
    """
    query = _earned(connection, release_rows.get(connection, scenario, base_release))
    prompts = _prompts(connection, report_ids)
    earned: dict[Prompt, list[float]] = {}
    for prompt in dict.fromkeys(prompts.values()):
        values = {"scenario": scenario, "prompt": prompt[0], "temperature": prompt[1], "window": window}
        earned[prompt] = list(connection.scalars(query, values))
    return {report_id: earned[prompt] for report_id, prompt in prompts.items() if earned[prompt]}


def _earned(connection: Connection, base: Release) -> Select[Any]:
    """The query for one prompt; what many prompts ask is made once."""
    query = (
        _first_requests(select(reports.c.score))
        .where(
            _TRAINED,
            reports.c.scenario == bindparam("scenario"),
            reports.c.prompt_digest == bindparam("prompt"),
            _temperature(connection) == bindparam("temperature"),
        )
        .order_by(reports.c.seq.desc())
        .limit(bindparam("window"))
    )
    ranges = release_rows.ancestry(connection, base.scenario, base.number)
    if len(ranges) == 1:  # nothing was ever rolled away
        return query
    among = or_(*(releases.c.number.between(low, high) for low, high in ranges))
    return (
        query.join(batches, batches.c.id == reports.c.batch_id)
        .join(releases, releases.c.id == batches.c.release_id)
        .where(among)
    )


def _prompts(connection: Connection, report_ids: Sequence[str]) -> dict[str, Prompt]:
    columns = (reports.c.id, reports.c.prompt_digest, _temperature(connection).label("temperature"))
    query = _first_requests(select(*columns))
    found: dict[str, Prompt] = {}
    for start in range(0, len(report_ids), PAGE):
        page = report_ids[start : start + PAGE]
        rows = connection.execute(query.where(reports.c.id.in_(page)))
        found.update((row.id, (row.prompt_digest, row.temperature)) for row in rows)
    return found


def _first_requests(query: Select[Any]) -> Select[Any]:
    """`query` over reports, with the request of each one's first reference."""
    return (
        query.select_from(reports)
        .join(report_receipts, (report_receipts.c.report_id == reports.c.id) & (report_receipts.c.position == 0))
        .join(receipts, receipts.c.id == report_receipts.c.receipt_id)
        .join(requests, requests.c.id == receipts.c.request_id)
    )


def _temperature(connection: Connection) -> ColumnElement[float]:
    """Of a request; its sampling is stored as JSON text that holds what is not neutral, and the neutral one is 1."""
    stored: ColumnElement[Any] = func.json_extract(requests.c.sampling, "$.temperature")
    if connection.dialect.name != "sqlite":
        stored = cast(func.json_extract_path_text(cast(requests.c.sampling, JSON), "temperature"), Float)
    return func.coalesce(stored, 1.0)
