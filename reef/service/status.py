"""Alive, ready, and what is going on."""

import asyncio
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response

from reef.ledger import batches, deletion, held_out, lease, releases, reports, scenarios
from reef.service.access import caller
from reef.service.document import answers
from reef.service.house import House
from reef.service.http import house_of, json_response
from reef.types import ReportState

if TYPE_CHECKING:
    from reef.gate import Gate

router = APIRouter()


@router.get("/healthz", responses=answers())
async def healthz(http: HttpRequest) -> Response:
    """The process answers: during a step, a load and a restart too."""
    return json_response({"status": "ok", "uptime_s": round(time.time() - house_of(http).started_at, 3)})


@router.get("/readyz", responses={**answers(), **answers(ok=503)})
async def readyz(http: HttpRequest) -> Response:
    """200 once requests can be answered; before, 503 with what it waits for."""
    house = house_of(http)
    if house.failure is not None:
        return json_response({"ready": False, "error": house.failure}, 503)
    if house.waiting_for is not None:
        return json_response({"ready": False, "waiting_for": house.waiting_for}, 503, {"retry-after": "1"})
    if house.engines.state != "ready":
        return json_response({"ready": False, "waiting_for": f"the engine ({house.engines.state})"}, 503)
    return json_response({"ready": True})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(http: HttpRequest) -> Response:
    """Prometheus text format."""
    house = house_of(http)
    house.metrics.in_flight.set(house.num_in_flight)
    house.metrics.tasks.set(len(asyncio.all_tasks()))
    house.metrics.blocks.set(sys.getallocatedblocks())
    return Response(house.metrics.render(), media_type="text/plain; version=0.0.4")


@router.get("/reef/status", responses=answers(503))
async def status(http: HttpRequest) -> Response:
    """The step in flight, the queue, the engines and their releases, disk use, errors."""
    house = house_of(http)
    training = await house.ledger.read(scenarios.training)
    seen = training is None or caller(http).sees(training)
    is_whole = caller(http).scenarios is None  # sums over all scenarios are for keys that may see all
    return json_response(
        {
            "ready": house.waiting_for is None,
            "waiting_for": house.waiting_for,
            "failure": house.failure,
            "uptime_s": round(time.time() - house.started_at, 3),
            "run_dir": str(house.config.reef.run_dir.absolute()),
            "in_flight": house.num_in_flight,
            "scenario": await _queue(house, training) if training is not None and seen else None,
            "training": await _training(house) if seen else None,
            "ledger": {
                "error": house.ledger.error,
                "used_bytes": await house.ledger.read(deletion.used_bytes) if is_whole else None,
                "deleted_receipts": dict(house.num_deleted) if is_whole else None,
            },
            "engines": house.engines.describe(),
            "disk": await run_in_threadpool(house.storage.disk_use) if house.storage is not None else None,
        }
    )


async def _queue(house: House, name: str) -> dict[str, Any]:
    head = await house.ledger.read(releases.head, name)
    return {
        "name": name,
        "head": head.id if head else None,
        "served": house.engines.served,
        "step": head.step if head else 0,
        "pending": await house.ledger.read(reports.count, name, ReportState.PENDING),
        "reserved": await house.ledger.read(reports.count, name, ReportState.RESERVED),
        "batch_size": house.config.recipe.values.get("batch_size"),
        "max_staleness": house.config.recipe.values.get("max_staleness"),
        "alarms": await _alarms(house, name),
    }


async def _alarms(house: House, name: str) -> list[dict[str, Any]]:
    """Those that the newest measured release rings, of the head and its ancestors."""
    found = await house.ledger.read(held_out.newest, name, house.config.observability.alarms)
    if found is None:
        return []
    release_id, marks = found
    return [{"release_id": release_id, **asdict(mark)} for mark in marks]


async def _training(house: House) -> dict[str, Any] | None:
    dispatcher = house.dispatcher
    if dispatcher is None:
        return await _following(house) if house.trains and house.ledger.shared else None
    batch = dispatcher.progress.batch
    return {
        "phase": dispatcher.progress.phase,
        "batch_id": batch.id if batch else None,
        "attempt": batch.attempt if batch else None,
        "batch_error": await house.ledger.read(batches.error_of, batch.id) if batch else None,
        "held": _held(dispatcher.gate),
        "paused": dispatcher.progress.paused,
        "error": dispatcher.progress.error,
    }


async def _following(house: House) -> dict[str, Any]:
    """Another service on this ledger trains, `owner`; None: nobody does now."""
    unknown = dict.fromkeys(("batch_id", "attempt", "batch_error", "held", "paused"))
    owner = await house.ledger.read(lease.owner)
    return {"phase": "following", "owner": owner, **unknown, "error": house.following_error}


def _held(gate: "Gate") -> dict[str, Any] | None:
    if gate.held is None:
        return None
    verdict = gate.verdict
    return {
        "release_id": gate.held.id,
        "failed": verdict.failed if verdict else (),
        "missing": verdict.missing if verdict else (),
        "error": gate.error,
    }
