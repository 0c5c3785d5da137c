"""What a prompt's answers earned before: rewards of earlier batches, for methods that compare a rollout with them.

A prompt is the ids of a report's first reference (`reports.prompt_digest`), sampled at one temperature: answers drawn
at another come from another distribution. Groups do not count here, since clients name them anew in each epoch.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import JSON, ColumnElement, Connection, Float, cast, func, literal_column, or_, select

from reef.ledger import releases as release_rows
from reef.ledger.ancestors import PAGE
from reef.ledger.schema import batches, receipts, releases, report_receipts, reports, requests

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
    base = release_rows.get(connection, scenario, base_release)
    ranges = release_rows.ancestry(connection, scenario, base.number)
    temperature = _temperature(connection)
    query = (
        select(reports.c.score)
        .join(report_receipts, (report_receipts.c.report_id == reports.c.id) & (report_receipts.c.position == 0))
        .join(receipts, receipts.c.id == report_receipts.c.receipt_id)
        .join(requests, requests.c.id == receipts.c.request_id)
        .join(batches, batches.c.id == reports.c.batch_id)
        .join(releases, releases.c.id == batches.c.release_id)
        .where(
            _TRAINED,
            reports.c.scenario == scenario,
            or_(*(releases.c.number.between(low, high) for low, high in ranges)),
        )
        .order_by(reports.c.seq.desc())
        .limit(window)
    )
    prompts = _prompts(connection, report_ids)
    earned = {
        prompt: list(connection.scalars(query.where(reports.c.prompt_digest == prompt[0], temperature == prompt[1])))
        for prompt in dict.fromkeys(prompts.values())
    }
    return {report_id: earned[prompt] for report_id, prompt in prompts.items() if earned[prompt]}


def _prompts(connection: Connection, report_ids: Sequence[str]) -> dict[str, Prompt]:
    query = (
        select(reports.c.id, reports.c.prompt_digest, _temperature(connection).label("temperature"))
        .join(report_receipts, (report_receipts.c.report_id == reports.c.id) & (report_receipts.c.position == 0))
        .join(receipts, receipts.c.id == report_receipts.c.receipt_id)
        .join(requests, requests.c.id == receipts.c.request_id)
    )
    found: dict[str, Prompt] = {}
    for start in range(0, len(report_ids), PAGE):
        page = report_ids[start : start + PAGE]
        rows = connection.execute(query.where(reports.c.id.in_(page)))
        found.update((row.id, (row.prompt_digest, row.temperature)) for row in rows)
    return found


def _temperature(connection: Connection) -> ColumnElement[float]:
    """Of a request; its sampling is stored as JSON text that holds what is not neutral, and the neutral one is 1."""
    stored: ColumnElement[Any] = func.json_extract(requests.c.sampling, "$.temperature")
    if connection.dialect.name != "sqlite":
        stored = cast(func.json_extract_path_text(cast(requests.c.sampling, JSON), "temperature"), Float)
    return func.coalesce(stored, 1.0)
