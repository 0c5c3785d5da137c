"""Reports: how a grade is accepted, what it claims, and where it is now.

    accepted -> pending -> reserved -> trained
             |         `-> dropped (stale, abandoned, tied, group_incomplete, step_failed, deleted)
             |-> recorded (no_score, outcome_*, evaluation, not_training, already_claimed, already_trained)
             `-> dropped (aborted, inexact, empty, deleted)

The first scored report of a receipt claims it; a later one is kept and never trained.

A report over several turns (see `trajectories.py`) is one: it is dropped whole where a turn that it references was
aborted or is inexact, since what is left would be graded for what it did not do alone. Turns that are context may be
either, so a client that minds leaves such turns out of `references`. The members of a group answer one prompt: that of
their first references, or that with which the conversations of these began.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, bindparam, func, insert, select, update

from reef.errors import BadRequestError, ConflictError, NotFoundError
from reef.ledger import releases as release_rows
from reef.ledger.ancestors import parents_of
from reef.ledger.codec import digest, from_json, to_json
from reef.ledger.database import OvertakenError, lock
from reef.ledger.schema import batches, receipts, releases, report_receipts, reports, requests
from reef.types import Candidate, Drop, Report, ReportState

FREE_TEXT = ("feedback", "metadata", "reason_code")  # fields of a report that go with its receipts' text
MAX_CANDIDATES = 8192  # pending reports that a selection looks at, oldest first


# The statements of `accept`, built once: making one costs more than running it.
_FIND_DIGEST = select(reports.c.digest).where(reports.c.id == bindparam("id"))
_FIND_REFERENCES = (
    select(
        receipts.c.id,
        requests.c.scenario,
        requests.c.purpose,
        receipts.c.finish_reason,
        receipts.c.inexact_reason,
        receipts.c.num_tokens,
        requests.c.prompt_digest,
        requests.c.sampling,
        receipts.c.spans,
        receipts.c.claimed_by,
        requests.c.deleted_at,
    )
    .join(requests, requests.c.id == receipts.c.request_id)
    .where(receipts.c.id.in_(bindparam("ids", expanding=True)))
    .with_for_update(read=True, of=requests)  # nobody deletes them meanwhile
)
_FIND_MEMBER = (
    select(reports.c.id, reports.c.prompt_digest)
    .where(
        reports.c.scenario == bindparam("scenario"),
        reports.c.state == ReportState.PENDING.value,
        reports.c.group_key == bindparam("group"),
    )
    .limit(1)
)
_INSERT_REPORT = insert(reports)
_INSERT_REFERENCE = insert(report_receipts)
_CLAIM = (
    update(receipts)
    .where(receipts.c.id.in_(bindparam("ids", expanding=True)), receipts.c.claimed_by.is_(None))
    .values(claimed_by=bindparam("report"))
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Reference:
    """What acceptance needs to know of one receipt."""

    id: str
    scenario: str
    purpose: str
    finish_reason: str
    inexact_reason: str | None
    num_tokens: int
    prompt_digest: str
    sampling: str
    spans: Any
    claimed_by: str | None
    deleted_at: float | None


def accept(connection: Connection, report: Report, trains: bool, now: float) -> dict[str, Any]:
    """Store a report and answer with its state; the same id and body again gets the state it has by now.

    Raises:
        NotFoundError: a reference names no receipt.
        ConflictError: the id is stored with another body.
        BadRequestError: a reference belongs to another scenario, or the group holds another prompt.
        OvertakenError: PostgreSQL, and another service claimed one of the receipts meanwhile.
    """
    body = to_json(dict(report.body))
    body_digest = digest(report.scenario, body)
    stored = connection.scalar(_FIND_DIGEST, {"id": report.id})
    if stored is not None:
        if stored != body_digest:
            raise ConflictError(
                f"report {report.id} is stored already with another body", param="agent_record_id", code="id_reused"
            )
        return view(connection, report.id)
    references = _references(connection, report)
    state, reason = _judge(connection, report, references, trains)
    if any(item.deleted_at is not None for item in references):
        body = to_json(skeleton(report.body))
    key = _group_key(report, references)
    prompt = references[0].prompt_digest if references else None
    if state is ReportState.PENDING and report.group is not None:
        _refuse_mixed_prompts(connection, report, key, prompt)
    connection.execute(
        _INSERT_REPORT,
        {
            "id": report.id,
            "scenario": report.scenario,
            "body": body,
            "digest": body_digest,
            "score": report.score,
            "state": state.value,
            "reason": reason,
            "group_key": key,
            "prompt_digest": prompt,
            "releases": to_json(sorted({span[2] for item in references for span in item.spans})),
            "created_at": now,
            "updated_at": now,
        },
    )
    if references:
        rows = [
            {"report_id": report.id, "position": position, "receipt_id": item.id}
            for position, item in enumerate(references)
        ]
        connection.execute(_INSERT_REFERENCE, rows)
    if state is ReportState.PENDING:
        claimed = connection.execute(_CLAIM, {"ids": report.references, "report": report.id})
        if claimed.rowcount < len(references):
            raise OvertakenError(f"a receipt of report {report.id} was claimed at the same moment")
    return {
        "agent_record_id": report.id,
        "scenario": report.scenario,
        "state": state.value,
        "reason": reason,
        "score": report.score,
        "group": report.group,
        "references": list(report.references),
        "batch_id": None,
        "step": None,
        "release_id": None,
        "created_at": now,
        "updated_at": now,
    }


def view(connection: Connection, report_id: str, group_size: int | None = None) -> dict[str, Any]:
    """A report as HTTP shows it. A pending member of an incomplete group is `waiting`. Raises NotFoundError."""
    query = (
        select(reports, batches.c.release_id, releases.c.step)
        .outerjoin(batches, batches.c.id == reports.c.batch_id)
        .outerjoin(releases, releases.c.id == batches.c.release_id)
        .where(reports.c.id == report_id)
    )
    row = connection.execute(query).first()
    if row is None:
        raise NotFoundError(f"no report {report_id}", code="report_not_found")
    state, reason = row.state, row.reason
    if state == ReportState.PENDING and group_size:
        state, reason = _waiting(connection, row, group_size)
    return {
        "agent_record_id": row.id,
        "scenario": row.scenario,
        "state": state,
        "reason": reason,
        "score": row.score,
        "group": from_json(row.body).get("group"),
        "references": list(references_of(connection, report_id)),
        "batch_id": row.batch_id,
        "step": row.step,
        "release_id": row.release_id,
        "created_at": row.created_at,
        "updated_at": row.updated_at,
    }


def skeleton(body: Mapping[str, Any]) -> dict[str, Any]:
    """What of a report outlives the deletion of a receipt that it references."""
    return {name: value for name, value in body.items() if name not in FREE_TEXT}


def references_of(connection: Connection, report_id: str) -> Sequence[str]:
    query = (
        select(report_receipts.c.receipt_id)
        .where(report_receipts.c.report_id == report_id)
        .order_by(report_receipts.c.position)
    )
    return connection.scalars(query).all()


def reports_of(connection: Connection, receipt_id: str) -> Sequence[str]:
    """Every report that references a receipt, in order of arrival."""
    query = (
        select(reports.c.id)
        .join(report_receipts, report_receipts.c.report_id == reports.c.id)
        .where(report_receipts.c.receipt_id == receipt_id)
        .order_by(reports.c.seq)
    )
    return connection.scalars(query).all()


def candidates(connection: Connection, scenario: str) -> list[Candidate]:
    """Pending reports in order of arrival."""
    query = (
        select(
            reports.c.id,
            reports.c.seq,
            reports.c.group_key,
            reports.c.score,
            reports.c.releases,
            reports.c.created_at,
        )
        .where(reports.c.scenario == scenario, reports.c.state == ReportState.PENDING.value)
        .order_by(reports.c.seq)
        .limit(MAX_CANDIDATES)
    )
    return [
        Candidate(
            report_id=row.id,
            seq=row.seq,
            group=row.group_key,
            score=row.score,
            releases=tuple(from_json(row.releases)),
            accepted_at=row.created_at,
        )
        for row in connection.execute(query)
    ]


def graded(connection: Connection, scenario: str, release_id: str) -> list[tuple[str, float]]:
    """(prompt digest, score) of the pending reports whose tokens all came from one release, in order of arrival."""
    query = (
        select(reports.c.prompt_digest, reports.c.score)
        .where(
            reports.c.scenario == scenario,
            reports.c.state == ReportState.PENDING.value,
            reports.c.releases == to_json([release_id]),
        )
        .order_by(reports.c.seq)
        .limit(MAX_CANDIDATES)
    )
    return [(row.prompt_digest, row.score) for row in connection.execute(query)]


def count(connection: Connection, scenario: str, state: ReportState) -> int:
    query = select(func.count()).where(reports.c.scenario == scenario, reports.c.state == state.value)
    return int(connection.scalar(query) or 0)


def drop(connection: Connection, drops: Iterable[Drop], now: float) -> None:
    """End pending reports with their reasons."""
    for item in drops:
        connection.execute(
            update(reports)
            .where(reports.c.id == item.report_id, reports.c.state == ReportState.PENDING.value)
            .values(state=ReportState.DROPPED.value, reason=item.reason, updated_at=now)
        )


def drop_abandoned(connection: Connection, scenario: str, now: float) -> None:
    """End the pending reports that hold a token of a release which is not among the head's ancestors."""
    waiting = (reports.c.scenario == scenario, reports.c.state == ReportState.PENDING.value)
    produced = {
        text: from_json(text) for text in connection.scalars(select(reports.c.releases).where(*waiting).distinct())
    }
    behind = release_rows.staleness(connection, scenario, {id for ids in produced.values() for id in ids})
    for text, ids in produced.items():
        if any(behind[id] is None for id in ids):
            connection.execute(
                update(reports)
                .where(*waiting, reports.c.releases == text)
                .values(state=ReportState.DROPPED.value, reason="abandoned", updated_at=now)
            )


def _references(connection: Connection, report: Report) -> list[_Reference]:
    rows = connection.execute(_FIND_REFERENCES, {"ids": report.references})
    found = {row.id: _Reference(*row[:8], from_json(row.spans), row.claimed_by, row.deleted_at) for row in rows}
    for index, receipt_id in enumerate(report.references):
        if receipt_id not in found:
            raise NotFoundError(
                f"references[{index}]: no receipt {receipt_id}", param="references", code="receipt_not_found"
            )
        if found[receipt_id].scenario != report.scenario:
            raise BadRequestError(
                f"references[{index}]: receipt {receipt_id} belongs to scenario {found[receipt_id].scenario}, "
                f"the report to {report.scenario}",
                param="references",
            )
    return [found[receipt_id] for receipt_id in report.references]


def _judge(
    connection: Connection, report: Report, references: Sequence[_Reference], trains: bool
) -> tuple[ReportState, str | None]:
    if report.score is None:
        return ReportState.RECORDED, "no_score"
    if report.outcome in ("review", "error"):
        return ReportState.RECORDED, f"outcome_{report.outcome}"
    if not references:
        return ReportState.RECORDED, "no_references"
    if any(item.purpose != "train" for item in references):
        return ReportState.RECORDED, "evaluation"
    if not trains:
        return ReportState.RECORDED, "not_training"
    if any(item.deleted_at is not None for item in references):
        return ReportState.DROPPED, "deleted"
    claims = [item.claimed_by for item in references if item.claimed_by is not None]
    if claims:
        states = connection.scalars(select(reports.c.state).where(reports.c.id.in_(claims))).all()
        trained = ReportState.TRAINED.value in states
        return ReportState.RECORDED, "already_trained" if trained else "already_claimed"
    if any(item.finish_reason == "abort" for item in references):
        return ReportState.DROPPED, "aborted"
    if any(item.inexact_reason for item in references):
        return ReportState.DROPPED, "inexact"
    if all(item.num_tokens == 0 for item in references):
        return ReportState.DROPPED, "empty"
    return ReportState.PENDING, None


def _group_key(report: Report, references: Sequence[_Reference]) -> str | None:
    """The report's own group, else the first prompt with its sampling."""
    if report.group is not None:
        return f"group:{report.group}"
    if not references:
        return None
    return f"prompt:{digest(references[0].prompt_digest, _without_seed(references[0].sampling))[:32]}"


def _without_seed(sampling: str) -> str:
    values = from_json(sampling)
    values.pop("seed", None)
    return to_json(values)


def _refuse_mixed_prompts(connection: Connection, report: Report, key: str | None, prompt: str | None) -> None:
    member = {"scenario": report.scenario, "group": key}
    other = connection.execute(_FIND_MEMBER, member).first()
    if other is None:
        lock(connection, f"{report.scenario}/{key}")  # another service may take its first member at this moment
        other = connection.execute(_FIND_MEMBER, member).first()
    if other is None or other.prompt_digest == prompt:
        return
    theirs = references_of(connection, other.id)
    if not _begin_alike(connection, report.references[0], theirs[0]):
        raise BadRequestError(
            f"group {report.group}: its members answer one prompt, and report {other.id} of it answers another",
            param="group",
            code="mixed_group",
        )


def _begin_alike(connection: Connection, *receipt_ids: str) -> bool:
    """Whether the conversations that these receipts continue all began with one prompt."""
    parents = parents_of(connection, receipt_ids)
    first = []
    for turn in receipt_ids:
        while (parent := parents.get(turn)) is not None:
            turn = parent
        first.append(turn)
    query = select(requests.c.prompt_digest).join(receipts, receipts.c.request_id == requests.c.id)
    return len(set(connection.scalars(query.where(receipts.c.id.in_(first))))) == 1


def _waiting(connection: Connection, row: Row[Any], group_size: int) -> tuple[str, str | None]:
    query = select(func.count()).where(
        reports.c.scenario == row.scenario,
        reports.c.state == ReportState.PENDING.value,
        reports.c.group_key == row.group_key,
    )
    members = int(connection.scalar(query) or 0)
    before = int(connection.scalar(query.where(reports.c.seq < row.seq)) or 0)
    in_its_group = min(members - before // group_size * group_size, group_size)
    if in_its_group == group_size:
        return ReportState.PENDING.value, None
    return ReportState.WAITING.value, f"group {in_its_group} of {group_size}"
