"""DELETE: the content of a receipt, of a session, of a whole scenario. What stays: see `reef/ledger/deletion.py`."""

import time
from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from reef.errors import BadRequestError, CheckpointNeededError, NotFoundError
from reef.ledger import deletion, receipts, scenarios
from reef.ledger.deletion import PAGE, Deleted
from reef.service.access import require_visible
from reef.service.document import answers, query
from reef.service.house import House
from reef.service.http import house_of, json_response

router = APIRouter()
MAX_CHECKPOINTS = 3  # written for one page; training goes on meanwhile, so that one more may be needed


@router.delete("/reef/receipts/{receipt_id:path}", responses=answers(404, 409, 503))
async def delete_receipt(receipt_id: str, http: HttpRequest) -> Response:
    """A receipt, its whole request, and every later turn."""
    house = _ready(http)
    request_ids = await house.ledger.read(deletion.of_receipt, receipt_id)
    left = await house.ledger.read(receipts.skeleton, receipt_id)
    require_visible(http, left.scenario, NotFoundError(f"no receipt {receipt_id}", code="receipt_not_found"))
    return json_response({"deleted": await _delete(house, request_ids, "receipt")})


@router.delete("/reef/scenarios/{name}/sessions/{session:path}", responses=answers(404, 409, 503))
async def delete_session(name: str, session: str, http: HttpRequest) -> Response:
    """All receipts of a session, and every later turn."""
    house = _ready(http)
    await house.ledger.read(scenarios.get, name)
    request_ids = await house.ledger.read(deletion.of_session, name, session)
    return json_response({"deleted": await _delete(house, request_ids, "session")})


@router.delete(
    "/reef/scenarios/{name}/receipts",
    openapi_extra={"parameters": [query("confirm", "The scenario's name once more", type="string")]},
    responses=answers(400, 404, 409, 503),
)
async def delete_scenario(name: str, http: HttpRequest) -> Response:
    """All receipts of a scenario that are there by now. The name must be said twice: `?confirm=NAME`."""
    house = _ready(http)
    if http.query_params.get("confirm") != name:
        raise BadRequestError(f"this deletes every receipt of {name}: say ?confirm={name}", param="confirm")
    await house.ledger.read(scenarios.get, name)
    await house.ledger.read(deletion.refuse_in_training, name)
    count, before = 0, None
    while page := await house.ledger.read(deletion.of_scenario, name, before):
        before = page[-1][0]
        deleted = await _delete_page(house, list(dict.fromkeys(request_id for _, request_id in page)), "scenario")
        count += len(deleted.receipt_ids)
    return json_response({"deleted": count})


async def _delete(house: House, request_ids: Sequence[str], reason: str) -> list[str]:
    """Delete by pages. A step that begins to train on a later page meanwhile refuses that one: ask again."""
    await house.ledger.read(deletion.refuse_reserved, request_ids)
    deleted: list[str] = []
    for start in range(0, len(request_ids), PAGE):
        deleted += (await _delete_page(house, request_ids[start : start + PAGE], reason)).receipt_ids
    return deleted


async def _delete_page(house: House, request_ids: Sequence[str], reason: str) -> Deleted:
    """Delete one page, after a trainer checkpoint where a replay would need it."""
    for written in range(MAX_CHECKPOINTS + 1):
        try:
            deleted = await house.ledger.write(deletion.delete, request_ids, time.time())
            break
        except CheckpointNeededError:
            if house.dispatcher is None or written == MAX_CHECKPOINTS:
                raise
            await house.dispatcher.checkpoint()
    house.count_deleted(len(deleted.receipt_ids), reason)
    return deleted


def _ready(http: HttpRequest) -> House:
    """Raises UnavailableError while starting: a replay may need what would be deleted."""
    house = house_of(http)
    house.require_ready()
    return house
