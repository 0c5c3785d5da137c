"""Grades in, and the story of a report or a receipt out."""

import time
import uuid
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from reef.ledger import receipts, reports
from reef.ledger.codec import from_json
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
    house.metrics.reports.labels(stored["state"]).inc()
    if house.dispatcher is not None:
        house.dispatcher.notify()
    return json_response(stored)


@router.get("/reef/reports/{report_id:path}")
async def get_report(report_id: str, http: HttpRequest) -> Response:
    """Where a report is, and why."""
    house = house_of(http)
    size = house.config.recipe.config.group_size
    return json_response(await house.ledger.read(reports.view, report_id, size))


@router.get("/reef/receipts/{receipt_id}")
async def get_receipt(receipt_id: str, http: HttpRequest) -> Response:
    """A receipt with its ids and log-probabilities, its text, and the reports that reference it."""
    house = house_of(http)
    receipt = await house.ledger.read(receipts.get, receipt_id)
    body = await house.ledger.read(receipts.body_of, receipt.request_id)
    referenced_by = await house.ledger.read(reports.reports_of, receipt_id)
    prompt, text = await house.template.decode_all([receipt.prompt_ids, receipt.generation.output_ids])
    shown = show_receipt(receipt)
    shown.update(prompt_text=prompt, text=text, request=from_json(body.decode()), reports=list(referenced_by))
    return json_response(shown)


def show_receipt(receipt: Receipt) -> dict[str, Any]:
    """JSON values; a log-probability that is not finite is null."""
    generation = receipt.generation
    return {
        "agent_record_id": receipt.id,
        "request_id": receipt.request_id,
        "scenario": receipt.scenario,
        "choice": receipt.choice,
        "purpose": receipt.purpose,
        "session": receipt.session,
        "parent": receipt.parent,
        "tags": dict(receipt.tags),
        "prompt_token_ids": receipt.prompt_ids.tolist(),
        "token_ids": generation.output_ids.tolist(),
        "logprobs": generation.logprobs.tolist(),
        "spans": [{"start": span.start, "end": span.end, "release_id": span.release_id} for span in generation.spans],
        "finish_reason": generation.finish_reason.value,
        "matched": generation.matched,
        "sampling": {name: getattr(receipt.sampling, name) for name in receipt.sampling.__slots__},
        "exact": receipt.inexact_reason is None,
        "inexact_reason": receipt.inexact_reason,
        "reproducible": generation.reproducible,
        "template_digest": receipt.template_digest,
        "tokenizer_digest": receipt.tokenizer_digest,
        "engine_build": receipt.engine_build,
        "created_at": receipt.created_at,
        "digest": receipt.digest,
    }


async def _scenario_of(house: House, http: HttpRequest, body: ReportBody) -> str:
    """The header's scenario, else that of the first receipt: a grader need not know it."""
    if http.headers.get("x-reef-scenario") is None and body.references:
        receipt = await house.ledger.read(receipts.get, body.references[0])
        return receipt.scenario
    return (await house.scenario_of(http)).name
