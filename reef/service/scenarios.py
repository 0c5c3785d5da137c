"""Scenarios and their release chains."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from reef.alarms import Mark
from reef.errors import BadRequestError, ConflictError, LoadFailedError
from reef.ledger import held_out, lease, releases, reports, scenarios
from reef.ledger.identity import new_id
from reef.ledger.scenarios import Scenario
from reef.service.access import caller, require_scenario
from reef.service.document import answers, any_object, query
from reef.service.house import House
from reef.service.http import body_schema, house_of, json_response, read_body
from reef.service.wire import (
    MAX_INT,
    LoanBody,
    PromoteBody,
    ReportBody,
    RollbackBody,
    ScenarioBody,
    UpdateBody,
    parse,
    parse_json,
)
from reef.types import Release, ReportState

if TYPE_CHECKING:
    from reef.dispatcher import Dispatcher  # imports Ray: not for a service that only records

router = APIRouter(prefix="/reef/scenarios")
MAX_RELEASES = 1000


@router.get("", responses=answers(503))
async def list_scenarios(http: HttpRequest) -> Response:
    house = house_of(http)
    found = [scenario for scenario in await house.ledger.read(scenarios.all_of) if caller(http).sees(scenario.name)]
    training = await house.ledger.read(scenarios.training)
    return json_response({"scenarios": [_show(scenario, training, house) for scenario in found]})


@router.post(
    "",
    status_code=201,
    openapi_extra=body_schema(ScenarioBody),
    responses={**answers(400, 409, 413, 503), **answers(ok=201)},
)
async def create_scenario(http: HttpRequest) -> Response:
    """201 where it is new, 200 where it was there."""
    house = house_of(http)
    body = parse(ScenarioBody, await read_body(http))
    require_scenario(http, body.name)
    scenario, created = await house.create_scenario(body.name, body.recipe)
    training = await house.ledger.read(scenarios.training)
    return json_response(_show(scenario, training, house), 201 if created else 200)


@router.get("/{name}", responses=answers(404, 503))
async def get_scenario(name: str, http: HttpRequest) -> Response:
    house = house_of(http)
    scenario = await house.ledger.read(scenarios.get, name)
    training = await house.ledger.read(scenarios.training)
    pending = await house.ledger.read(reports.count, name, ReportState.PENDING)
    reserved = await house.ledger.read(reports.count, name, ReportState.RESERVED)
    head = await house.ledger.read(releases.head, name)
    shown = _show(scenario, training, house)
    shown.update(pending=pending, reserved=reserved, head=head.id if head else None)
    return json_response(shown)


@router.get("/{name}/contract", responses=answers(404, 503))
async def contract(name: str, http: HttpRequest) -> Response:
    """What the scenario accepts: how its reports are batched, and the schema of one."""
    house = house_of(http)
    scenario = await house.ledger.read(scenarios.get, name)
    return json_response(
        {
            "scenario": scenario.name,
            "recipe": scenario.recipe,
            "config": house.config.dump()["recipe"]["config"],
            "model": house.config.inference.model_path.name,
            "context_length": house.engines.context_length,
            "report": ReportBody.model_json_schema(),
        }
    )


@router.post(
    "/{name}/update",
    openapi_extra=body_schema(UpdateBody, required=False),
    responses=answers(400, 404, 409, 413, 503),
)
async def update(name: str, http: HttpRequest) -> Response:
    """Set the mode (auto, manual), or ask for one update in manual mode."""
    house = house_of(http)
    body = parse(UpdateBody, await read_body(http))
    dispatcher = await _dispatcher(house, name)
    if dispatcher.progress.phase == "stopped":
        raise ConflictError(f"{dispatcher.progress.error}: restart the service", code="training_stopped")
    if body.mode is not None:
        await house.ledger.write(scenarios.set_mode, name, body.mode)
        dispatcher.notify()
    elif dispatcher.progress.paused is not None:
        raise ConflictError(f"training is paused: {dispatcher.progress.paused}; promote it or roll back", code="paused")
    else:
        dispatcher.update_now()
    scenario = await house.ledger.read(scenarios.get, name)
    return json_response(_show(scenario, scenario.name, house))


@router.post(
    "/{name}/rollback",
    status_code=201,
    openapi_extra=body_schema(RollbackBody),
    responses=answers(400, 404, 409, 413, 503, ok=201),
)
async def rollback(name: str, http: HttpRequest) -> Response:
    """Weights, trainer and queue back to an earlier release: a new link of the chain with its content."""
    house = house_of(http)
    body = parse(RollbackBody, await read_body(http))
    made = await (await _dispatcher(house, name)).rollback(body.release_id)
    return json_response(_show_release(made, made, []), 201)


@router.post(
    "/{name}/promote",
    status_code=201,
    openapi_extra=body_schema(PromoteBody),
    responses=answers(400, 404, 409, 413, 503, ok=201),
)
async def promote(name: str, http: HttpRequest) -> Response:
    """Serve a release: a held one, a quarantined head that loads by now, or another one as a new link of the chain."""
    house = house_of(http)
    body = parse(PromoteBody, await read_body(http))
    made = await (await _dispatcher(house, name)).promote(body.release_id, body.force)
    return json_response(_show_release(made, made, []), 201)


@router.get(
    "/{name}/releases",
    openapi_extra={
        "parameters": [
            query("limit", "At most so many", type="integer", minimum=1, maximum=MAX_RELEASES, default=100),
            query("before", "Only those with a smaller number", type="integer", minimum=0, maximum=MAX_INT),
        ]
    },
    responses=answers(400, 404, 503),
)
async def list_releases(name: str, http: HttpRequest) -> Response:
    """The chain, newest first. `?limit=` (100) and `?before=` NUMBER page through it."""
    house = house_of(http)
    await house.ledger.read(scenarios.get, name)
    limit = _number(http, "limit", 100, 1, MAX_RELEASES)
    before = _number(http, "before", MAX_INT, 0, MAX_INT)
    chain = await house.ledger.read(releases.chain, name, limit, before)
    return json_response({"scenario": name, "releases": await _show_releases(house, name, chain)})


@router.get("/{name}/releases/{release_id}", responses=answers(404, 503))
async def get_release(name: str, release_id: str, http: HttpRequest) -> Response:
    """One link of the chain, as in the list of them."""
    house = house_of(http)
    release = await house.ledger.read(releases.get, name, release_id)
    (shown,) = await _show_releases(house, name, [release])
    return json_response(shown)


@router.get("/{name}/releases/{release_id}/lineage", responses=answers(404, 503))
async def lineage(name: str, release_id: str, http: HttpRequest) -> Response:
    """The batch, reports and receipts that made a release."""
    return json_response(await house_of(http).ledger.read(releases.lineage, name, release_id))


@router.post(
    "/{name}/releases/{release_id}/evaluations",
    status_code=201,
    openapi_extra=any_object(),
    responses=answers(400, 404, 413, 503, ok=201),
)
async def add_evaluation(name: str, release_id: str, http: HttpRequest) -> Response:
    """Store a held-out result (any JSON object) on a release; `alarms` are those that it rings by now."""
    house = house_of(http)
    body = parse_json(await read_body(http))
    alarms = house.config.observability.alarms
    rung = await house.ledger.write(held_out.add, name, release_id, dict(body), time.time(), alarms)
    for rings, mark in rung:
        house.metrics.ring(rings, mark.metric, mark.message)
    if house.dispatcher is not None:
        house.dispatcher.notify()
    release = await house.ledger.read(releases.get, name, release_id)
    marks = await house.ledger.read(held_out.marks, [release], alarms)
    shown = _show_marks(marks.get(release_id, ()))
    return json_response({"release_id": release_id, "stored": True, "alarms": shown}, 201)


@router.post(
    "/{name}/releases/{release_id}/engine",
    openapi_extra=body_schema(LoanBody),
    responses=answers(400, 404, 409, 413, 502, 503),
)
async def lend_engine(name: str, release_id: str, http: HttpRequest) -> Response:
    """Have a release answered for an evaluation, whatever is served: in an engine of its own, once this returns.

    Requests that name it (`x-reef-release`) go there until the last `loan` is given back, or nobody asks for
    `evaluation.engine-idle-s`. `role` says who answers: `evaluation`, or `serving` where the release is served and no
    other can be, or no other engine can be started: then nothing is lent.
    """
    house = house_of(http)
    loan = parse(LoanBody, await read_body(http)).loan or new_id("loan_")
    storage = house.require_ready()
    release = await house.ledger.read(releases.get, name, release_id)
    stays = not house.trains and not house.ledger.shared
    if release.id == house.engines.served and (stays or house.config.inference.url is not None):
        return json_response({"release_id": release.id, "role": "serving", "loan": loan})
    try:
        published = await asyncio.to_thread(storage.published, release)
    except LoadFailedError as error:
        raise ConflictError(f"{release_id} cannot be loaded: {error.message}", code="no_weights") from error
    await house.engines.lend(published, loan)
    return json_response({"release_id": release.id, "role": "evaluation", "loan": loan})


@router.delete(
    "/{name}/releases/{release_id}/engine",
    openapi_extra={"parameters": [{**query("loan", "That is given back", type="string"), "required": True}]},
    responses=answers(400, 404, 503),
)
async def give_engine_back(name: str, release_id: str, http: HttpRequest) -> Response:
    """An evaluation is done: the engine ends with the last loan, also while it starts (the POST answers 409 then).

    `given_back` is false where there is no such loan; a POST of it that comes within a minute is refused, once.
    """
    house = house_of(http)
    loan = http.query_params.get("loan")
    if not loan:
        raise BadRequestError("loan: expected the name of the loan that is given back", param="loan")
    release = await house.ledger.read(releases.get, name, release_id)
    return json_response({"release_id": release.id, "given_back": await house.engines.give_back(release.id, loan)})


async def _dispatcher(house: House, name: str) -> "Dispatcher":
    """Of the scenario that trains here.

    Raises:
        NotFoundError: there is no such scenario.
        ConflictError: it does not train, or another service on this ledger trains it.
        UnavailableError: still starting.
    """
    house.require_ready()
    await house.ledger.read(scenarios.get, name)
    if not house.trains or name != await house.ledger.read(scenarios.training):
        raise ConflictError(f"scenario {name} does not train here", code="not_training")
    if house.dispatcher is None:
        owner = await house.ledger.read(lease.owner) or "nobody right now"
        raise ConflictError(f"the service that owns this ledger trains {name}: {owner}", code="not_owner")
    return house.dispatcher


def _show(scenario: Scenario, training: str | None, house: House) -> dict[str, Any]:
    return {
        "name": scenario.name,
        "recipe": scenario.recipe,
        "mode": scenario.mode,
        "trains": house.trains and scenario.name == training,
        "created_at": scenario.created_at,
    }


async def _show_releases(house: House, name: str, chain: Sequence[Release]) -> list[dict[str, Any]]:
    """Releases with their results and the alarms that these ring."""
    results = await house.ledger.read(releases.evaluations_of, [release.id for release in chain])
    marks = await house.ledger.read(held_out.marks, chain, house.config.observability.alarms)
    head = await house.ledger.read(releases.head, name)
    return [_show_release(release, head, results.get(release.id, []), marks.get(release.id, ())) for release in chain]


def _show_release(
    release: Release, head: Release | None, results: list[Any], marks: Sequence[Mark] = ()
) -> dict[str, Any]:
    return {
        "release_id": release.id,
        "parent_release_id": release.parent,
        "number": release.number,
        "content_id": release.content_id,
        "operation": release.operation.value,
        "step": release.step,
        "policy_version": release.policy_version,
        "batch_id": release.batch_id,
        "checkpoint": release.checkpoint,
        "restorable": release.restorable,
        "state": release.state.value,
        "reason": release.reason,
        "source_release_id": release.source,
        "replay_diverged": release.replay_diverged,
        "num_deleted": release.num_deleted,
        "current": head is not None and release.id == head.id,
        "verified_at": release.verified_at,
        "created_at": release.created_at,
        "metrics": dict(release.metrics),
        "evaluations": results,
        "alarms": _show_marks(marks),
    }


def _show_marks(marks: Sequence[Mark]) -> list[dict[str, Any]]:
    """The alarms that a release rings, as JSON."""
    return [asdict(mark) for mark in marks]


def _number(http: HttpRequest, name: str, default: int, least: int, most: int) -> int:
    text = http.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and least <= int(text) <= most):
        raise BadRequestError(f"{name}: expected a whole number from {least} to {most}, got {text[:40]!r}", param=name)
    return int(text)
