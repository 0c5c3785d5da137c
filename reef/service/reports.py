"""Grades in, and the story of a report or a receipt out."""

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from sqlalchemy import Connection
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from reef.errors import BadRequestError, NotFoundError
from reef.faults import reach
from reef.ledger import receipts, recorded, reports, story
from reef.ledger.codec import from_json
from reef.ledger.receipts import Skeleton
from reef.ledger.recorded import Recorded
from reef.service.access import caller, require_visible
from reef.service.document import answers, query
from reef.service.house import House
from reef.service.http import body_schema, house_of, json_response, read_body
from reef.service.openai import model_name
from reef.service.trajectories import to_atif
from reef.service.wire import ReportBody, parse
from reef.types import Receipt

router = APIRouter()


@router.post("/reef/report", openapi_extra=body_schema(ReportBody), responses=answers(400, 404, 409, 410, 413, 503))
async def post_report(http: HttpRequest) -> Response:
    """Accept a grade. Acknowledged only once it is durable; the same id and body again gets its state by now."""
    house = house_of(http)
    house.require_ready()
    body = parse(ReportBody, await read_body(http))
    body.check()
    now = time.time()
    await _check_references(house, http, body.references)
    scenario = await _scenario_of(house, http, body)
    report = body.report(body.agent_record_id or f"rep_{uuid.uuid4().hex}", scenario, now)
    stored = await house.ledger.write(reports.accept, report, await house.is_training(scenario), now)
    reach("report.written")
    house.metrics.reports.labels(stored["state"]).inc()
    if house.dispatcher is not None:
        house.dispatcher.notify()
    return json_response(stored)


@router.get("/reef/reports/{report_id:path}", responses=answers(404, 503))
async def get_report(report_id: str, http: HttpRequest) -> Response:
    """Where a report is, why, and all that happened to it."""
    house = house_of(http)
    size = house.config.recipe.group_size

    def read(connection: Connection) -> dict[str, Any]:
        view = reports.view(connection, report_id, size)
        require_visible(http, view["scenario"], NotFoundError(f"no report {report_id}", code="report_not_found"))
        return {**view, "history": story.of_report(connection, report_id, size)}

    return json_response(await house.ledger.read(read))


@router.get(
    "/reef/receipts/{receipt_id:path}",
    openapi_extra={"parameters": [query("format", "How it is shown", enum=["json", "atif"], default="json")]},
    responses=answers(400, 404, 409, 410, 503),
)
async def get_receipt(receipt_id: str, http: HttpRequest) -> Response:
    """A receipt with its ids and log-probabilities, its text, and all that happened to it. Deleted: without content.

    `?format=atif`: the conversation up to it, as an ATIF trajectory; 410 where it was deleted.
    """
    house = house_of(http)
    if (shape := http.query_params.get("format", "json")) == "atif":
        return json_response(await _atif(house, http, receipt_id))
    if shape != "json":
        raise BadRequestError(f"format: expected json or atif, got {shape[:80]!r}", param="format")
    size = house.config.recipe.group_size

    def read(connection: Connection) -> tuple[dict[str, Any], tuple[Receipt, bytes] | None]:
        left = receipts.skeleton(connection, receipt_id)
        require_visible(http, left.scenario, no_receipt(receipt_id))
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


async def _atif(house: House, http: HttpRequest, receipt_id: str) -> dict[str, Any]:
    def read(connection: Connection) -> list[Recorded]:
        scenario = receipts.skeleton(connection, receipt_id).scenario
        require_visible(http, scenario, no_receipt(receipt_id))
        return recorded.chain(connection, receipt_id)

    chain = await house.ledger.read(read)
    return await asyncio.to_thread(to_atif, chain, house.template, house.dialect, model_name(house))


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
        "continued_by": receipt.continued_by,
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


def no_receipt(receipt_id: str) -> NotFoundError:
    """What the ledger says of a receipt that is not there."""
    return NotFoundError(f"no receipt {receipt_id}", param="references", code="receipt_not_found")


async def _check_references(house: House, http: HttpRequest, references: Sequence[str]) -> None:
    """Raises NotFoundError where a key that is bound to scenarios names a receipt of another one, or none."""
    if caller(http).scenarios is None:
        return

    def read(connection: Connection) -> None:
        for receipt_id in references:
            require_visible(http, receipts.skeleton(connection, receipt_id).scenario, no_receipt(receipt_id))

    await house.ledger.read(read)


async def _scenario_of(house: House, http: HttpRequest, body: ReportBody) -> str:
    """The header's scenario, else that of the first receipt: a grader need not know it."""
    if http.headers.get("x-reef-scenario") is None and body.references:
        receipt = await house.ledger.read(receipts.skeleton, body.references[0])
        return receipt.scenario
    return (await house.scenario_of(http)).name
