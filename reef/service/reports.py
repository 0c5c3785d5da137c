"""Grades in, and the story of a report or a receipt out."""

import time
import uuid
from typing import Any

from fastapi import APIRouter
from sqlalchemy import Connection
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from reef.faults import reach
from reef.ledger import receipts, reports, story
from reef.ledger.codec import from_json
from reef.ledger.receipts import Skeleton
from reef.service.house import House
from reef.service.http import body_schema, house_of, json_response, read_body
from reef.service.wire import ReportBody, parse
from reef.types import Receipt, Report

router = APIRouter()


@router.post("/reef/report", openapi_extra=body_schema(ReportBody))
async def post_report(http: HttpRequest) -> Response:
    """Accept a grade. Acknowledged only once it is durable; the same id and body again gets its state by now."""
    house = house_of(http)
    house.require_ready()
    body = parse(ReportBody, await read_body(http))
    body.check()
    now = time.time()
    scenario = await _scenario_of(house, http, body)
    report = Report(
        id=body.agent_record_id or f"rep_{uuid.uuid4().hex}",
        scenario=scenario,
        references=tuple(body.references),
        body=body.model_dump(exclude_unset=True),
        score=body.score,
        outcome=body.outcome,
        group=body.group,
        truncated=body.truncated,
        created_at=now,
    )
    stored = await house.ledger.write(reports.accept, report, await house.is_training(scenario), now)
    reach("report.written")
    house.metrics.reports.labels(stored["state"]).inc()
    if house.dispatcher is not None:
        house.dispatcher.notify()
    return json_response(stored)


@router.get("/reef/reports/{report_id:path}")
async def get_report(report_id: str, http: HttpRequest) -> Response:
    """Where a report is, why, and all that happened to it."""
    house = house_of(http)
    size = house.config.recipe.config.group_size

    def read(connection: Connection) -> dict[str, Any]:
        view = reports.view(connection, report_id, size)
        return {**view, "history": story.of_report(connection, report_id, size)}

    return json_response(await house.ledger.read(read))


@router.get("/reef/receipts/{receipt_id}")
async def get_receipt(receipt_id: str, http: HttpRequest) -> Response:
    """A receipt with its ids and log-probabilities, its text, and all that happened to it. Deleted: without content."""
    house = house_of(http)
    size = house.config.recipe.config.group_size

    def read(connection: Connection) -> tuple[dict[str, Any], tuple[Receipt, bytes] | None]:
        left = receipts.skeleton(connection, receipt_id)
        shown = show_skeleton(left)
        shown["reports"] = list(reports.reports_of(connection, receipt_id))
        shown["trained_in"] = story.trained_in(connection, receipt_id)
        shown["history"] = story.of_receipt(connection, receipt_id, size)
        if left.deleted_at is not None:
            return shown, None
        receipt = receipts.get(connection, receipt_id)
        return shown, (receipt, receipts.body_of(connection, receipt.request_id))

    shown, content = await house.ledger.read(read)
    if content is not None:
        receipt, body = content
        prompt, text = await house.template.decode_all([receipt.prompt_ids, receipt.generation.output_ids])
        shown.update(show_content(receipt), prompt_text=prompt, text=text, request=from_json(body.decode()))
    return json_response(shown)


def show_skeleton(receipt: Skeleton) -> dict[str, Any]:
    """What is shown of every receipt, deleted or not, as JSON values."""
    return {
        "agent_record_id": receipt.id,
        "request_id": receipt.request_id,
        "scenario": receipt.scenario,
        "choice": receipt.choice,
        "purpose": receipt.purpose,
        "session": receipt.session,
        "parent": receipt.parent,
        "num_prompt_tokens": receipt.num_prompt_tokens,
        "num_tokens": receipt.num_tokens,
        "spans": [{"start": span.start, "end": span.end, "release_id": span.release_id} for span in receipt.spans],
        "finish_reason": receipt.finish_reason,
        "sampling": {name: getattr(receipt.sampling, name) for name in receipt.sampling.__slots__},
        "exact": receipt.inexact_reason is None,
        "inexact_reason": receipt.inexact_reason,
        "reproducible": receipt.reproducible,
        "template_digest": receipt.template_digest,
        "tokenizer_digest": receipt.tokenizer_digest,
        "engine_build": receipt.engine_build,
        "created_at": receipt.created_at,
        "deleted_at": receipt.deleted_at,
        "digest": receipt.digest,
    }


def show_content(receipt: Receipt) -> dict[str, Any]:
    """What goes when a receipt is deleted, as JSON values; a log-probability that is not finite is null."""
    return {
        "tags": dict(receipt.tags),
        "prompt_token_ids": receipt.prompt_ids.tolist(),
        "token_ids": receipt.generation.output_ids.tolist(),
        "logprobs": receipt.generation.logprobs.tolist(),
        "matched": receipt.generation.matched,
    }


async def _scenario_of(house: House, http: HttpRequest, body: ReportBody) -> str:
    """The header's scenario, else that of the first receipt: a grader need not know it."""
    if http.headers.get("x-reef-scenario") is None and body.references:
        receipt = await house.ledger.read(receipts.skeleton, body.references[0])
        return receipt.scenario
    return (await house.scenario_of(http)).name
