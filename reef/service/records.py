"""POST /reef/records/batch: exchanges and grades that were recorded elsewhere, as `reef-client import` sends them."""

import time
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from reef.errors import BadRequestError
from reef.ledger import imports
from reef.ledger.codec import to_json
from reef.ledger.imports import Exchange
from reef.service.document import answers
from reef.service.http import body_schema, house_of, json_response, read_body
from reef.service.wire import Body, JsonObject, ListOf, Name, ReportBody, parse
from reef.types import Report

router = APIRouter()
MAX_RECORDS = 1000  # in one batch, which is one transaction
MAX_BATCH_BYTES = 10 * 1024 * 1024  # as the client has it; larger than what inference takes


# Names that a URL, a log and any database can hold.
RecordId = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$")]


class RecordBody(Body):
    """One record: an inference with its answer, or a report on one that came before it."""

    agent_record_id: RecordId
    request_type: Literal["inference", "report"]
    payload: JsonObject
    scenario: Name | None = None


class BatchBody(Body):
    """A batch, stored whole or not at all."""

    records: ListOf[RecordBody] = Field(min_length=1, max_length=MAX_RECORDS)


@router.post(
    "/reef/records/batch", openapi_extra=body_schema(BatchBody), responses=answers(400, 404, 409, 410, 413, 503)
)
async def import_records(http: HttpRequest) -> Response:
    """Store a batch, each record once however often it comes. Imported exchanges are never trained."""
    house = house_of(http)
    house.require_ready()
    body = parse(BatchBody, await read_body(http, MAX_BATCH_BYTES))
    scenario = (await house.scenario_of(http)).name
    now = time.time()
    records = [_record(record, index, scenario, now) for index, record in enumerate(body.records)]
    trains = await house.is_training(scenario)
    num_receipts, states = await house.ledger.write(imports.store, scenario, records, trains, now)
    house.metrics.receipts.inc(num_receipts)
    for state in states:
        house.metrics.reports.labels(state).inc()
    if house.dispatcher is not None:
        house.dispatcher.notify()
    return json_response({"records": [_shown(record, scenario) for record in body.records]})


def _record(record: RecordBody, index: int, scenario: str, now: float) -> Exchange | Report:
    at = f"records.{index}"
    if record.scenario not in (None, scenario):
        raise BadRequestError(
            f"{at}.scenario: the batch goes to {scenario}, the record names {record.scenario}", param=f"{at}.scenario"
        )
    if record.request_type == "inference":
        return Exchange(record.agent_record_id, to_json(record.payload).encode())
    return _report(record, at, scenario, now)


def _report(record: RecordBody, at: str, scenario: str, now: float) -> Report:
    told = record.payload.get("agent_record_id", record.agent_record_id)
    if told != record.agent_record_id:
        raise BadRequestError(
            f"{at}.payload.agent_record_id: the record is {record.agent_record_id}, got {str(told)[:80]}",
            param=f"{at}.payload.agent_record_id",
        )
    try:
        body = parse(ReportBody, orjson.dumps({**record.payload, "agent_record_id": record.agent_record_id}))
        body.check()
    except BadRequestError as error:
        field = f"{at}.payload" + (f".{error.param}" if error.param else "")
        raise BadRequestError(f"{at}.payload: {error.message}", param=field, code=error.code) from None
    return body.report(record.agent_record_id, scenario, now)


def _shown(record: RecordBody, scenario: str) -> dict[str, Any]:
    return {
        "agent_record_id": record.agent_record_id,
        "request_type": record.request_type,
        "scenario": scenario,
    }
