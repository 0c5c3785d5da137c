"""What was asked and said in one request, without the turns before it: of them only what this one added is read."""

from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, select

from reef.errors import DamagedError, GoneError, NotFoundError
from reef.ledger.codec import BROKEN_BODY, from_json, unpack_body, unpack_ids
from reef.ledger.receipts import UNREADABLE, sampling_from_json
from reef.ledger.schema import receipts, requests
from reef.types import FinishReason, Ids, Sampling


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """A request and the first choice of its answer."""

    request_id: str
    receipt_id: str
    scenario: str
    api: str
    body: bytes  # the client's JSON as it came
    sampling: Sampling
    added_ids: Ids  # [A] what the request added to the turn that it continues: the end of its prompt
    num_prompt_tokens: int  # of the whole prompt
    output_ids: Ids  # [N]
    matched: int | str | None  # the stop id or stop string that ended it
    finish_reason: FinishReason
    release_id: str | None  # that produced its last token
    created_at: float


def scenario_of(connection: Connection, request_id: str) -> str:
    """The scenario of a request, deleted or not. Raises NotFoundError."""
    scenario = connection.scalar(_SCENARIO, {"request": request_id})
    if scenario is None:
        raise NotFoundError(f"no request {request_id}")
    return str(scenario)


def read(connection: Connection, request_id: str) -> Exchange:
    """Raises NotFoundError, GoneError where it was deleted, DamagedError."""
    row = connection.execute(_BY_REQUEST, {"request": request_id}).first()
    if row is None:
        raise NotFoundError(f"no request {request_id}")
    if row.deleted_at is not None:
        raise GoneError(f"request {request_id} was deleted")
    try:
        spans = from_json(row.spans)
        return Exchange(
            request_id=request_id,
            receipt_id=row.receipt_id,
            scenario=row.scenario,
            api=row.api,
            body=unpack_body(row.body),
            sampling=sampling_from_json(row.sampling),
            added_ids=unpack_ids(row.prompt_ids),
            num_prompt_tokens=row.prompt_length,
            output_ids=unpack_ids(row.output_ids),
            matched=None if row.matched is None else from_json(row.matched),
            finish_reason=FinishReason(row.finish_reason),
            release_id=spans[-1][2] if spans else None,
            created_at=row.created_at,
        )
    except (*UNREADABLE, *BROKEN_BODY) as error:
        raise DamagedError(row.receipt_id, str(error)) from error


# Built once: making a statement costs more than running it.
_SCENARIO = select(requests.c.scenario).where(requests.c.id == bindparam("request"))
_BY_REQUEST = (
    select(
        receipts.c.id.label("receipt_id"),
        *receipts.c["output_ids", "matched", "finish_reason", "spans"],
        *requests.c["scenario", "api", "body", "sampling", "prompt_ids", "prompt_length", "created_at", "deleted_at"],
    )
    .join(requests, requests.c.id == receipts.c.request_id)
    .where(requests.c.id == bindparam("request"), receipts.c.choice == 0)
)
