"""Exchanges that were recorded elsewhere: kept and graded like our own, and never trained.

Their tokens are not known, and making some by tokenizing text would be inventing what a model sampled. So an imported
receipt has the exchange as its body, no ids and no log-probabilities, the api `imported` and the reason `imported` for
not being exact. Everything else holds for it as for any other: its digest, its audit, reports on it, its deletion.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from sqlalchemy import Connection, bindparam, select

from reef.errors import BadRequestError, ConflictError, NotFoundError
from reef.ledger import receipts as receipt_rows
from reef.ledger import reports as report_rows
from reef.ledger.codec import digest
from reef.ledger.schema import receipts
from reef.types import FinishReason, Generation, Receipt, Report, Request, Sampling

API = "imported"
REASON = "imported"
_FIND_REQUEST = select(receipts.c.request_id).where(receipts.c.id == bindparam("id"))  # built once


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its answer, as somebody recorded them."""

    id: str  # of the receipt that it becomes
    body: bytes  # JSON


def store(
    connection: Connection, scenario: str, records: Sequence[Exchange | Report], trains: bool, now: float
) -> tuple[int, list[str]]:
    """Store exchanges and reports in their order, all of them or none; what is stored already is passed over.

    Args:
        trains: whether the scenario's reports train (those on receipts of our own).

    Returns:
        How many receipts are new, and the states of the reports that are.

    Raises:
        NotFoundError: a report references a receipt that is not in the scenario.
        ConflictError: an id is stored already with another content.
        BadRequestError: a report cannot be accepted.
    """
    num_receipts, states = 0, []
    for index, record in enumerate(records):
        try:
            if isinstance(record, Exchange):
                num_receipts += _store_exchange(connection, scenario, record, now)
            else:
                _check_references(connection, scenario, record)
                stored = report_rows.accept(connection, record, trains, now)
                if stored["created_at"] == now:
                    states.append(stored["state"])
        except (BadRequestError, ConflictError, NotFoundError) as error:
            message = f"records.{index} ({record.id}): {error.message}"
            raise type(error)(message, param=f"records.{index}", code=error.code) from None
    return num_receipts, states


def _store_exchange(connection: Connection, scenario: str, exchange: Exchange, now: float) -> bool:
    """Whether it is new. The request's id says what was stored, also once its content was deleted."""
    request_id = f"req_{digest(scenario, exchange.id, exchange.body)[:32]}"
    stored = connection.scalar(_FIND_REQUEST, {"id": exchange.id})
    if stored == request_id:
        return False
    if stored is not None:
        raise ConflictError("a receipt of this id is stored already with another content", code="id_reused")
    request = Request(
        id=request_id,
        scenario=scenario,
        api=API,
        prompt_ids=np.empty(0, dtype=np.int32),
        sampling=Sampling(max_tokens=0),
        n=1,
        body=exchange.body,
        created_at=now,
    )
    receipt_rows.record(connection, request, [_receipt(request, exchange.id, now)])
    return True


def _receipt(request: Request, id: str, now: float) -> Receipt:
    nothing = Generation(
        output_ids=np.empty(0, dtype=np.int32),
        logprobs=np.empty(0, dtype=np.float32),
        finish_reason=FinishReason.STOP,
        spans=(),
        reproducible=False,
    )
    made = receipt_rows.make(request, 0, nothing, API, id, now)
    inexact = dataclasses.replace(made, inexact_reason=REASON)
    return dataclasses.replace(inexact, digest=receipt_rows.compute_digest(inexact))


def _check_references(connection: Connection, scenario: str, report: Report) -> None:
    """A receipt of another scenario is as if it were not there: the caller may not know of it."""
    for receipt_id in report.references:
        if receipt_rows.skeleton(connection, receipt_id).scenario != scenario:
            raise NotFoundError(f"no receipt {receipt_id}", code="receipt_not_found")
