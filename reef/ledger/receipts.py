"""Receipts: what was asked and sampled, exactly as it was, until its content is deleted (see `deletion.py`)."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from sqlalchemy import Connection, Row, bindparam, select

from reef.errors import ConflictError, DamagedError, GoneError, LedgerError, NotFoundError
from reef.ledger.ancestors import whole_prompts
from reef.ledger.codec import (
    BROKEN_BODY,
    digest,
    from_json,
    pack_body,
    pack_floats,
    pack_ids,
    to_json,
    unpack_body,
    unpack_floats,
    unpack_ids,
)
from reef.ledger.rows import insert_rows
from reef.ledger.schema import receipts, requests
from reef.types import FinishReason, Generation, Ids, Receipt, Request, Sampling, Span

UNREADABLE = (ValueError, TypeError)  # what reading a value raises that nobody wrote
_NEUTRAL = Sampling(max_tokens=0)
# Built once: making a statement costs more than running it.
_FIND_WHOLE = (
    select(receipts, *(column for column in requests.c if column.name not in ("id", "created_at", "body")))
    .join(requests, requests.c.id == receipts.c.request_id)
    .where(receipts.c.id.in_(bindparam("ids", expanding=True)))
)
_FIND_PARENT = (
    select(receipts.c.output_ids, requests.c.prompt_length, requests.c.prompt_digest, requests.c.deleted_at)
    .join(requests, requests.c.id == receipts.c.request_id)
    .where(receipts.c.id == bindparam("parent"))
    .with_for_update(read=True, of=requests)  # nobody deletes it meanwhile
)
Completion = tuple[Request, Sequence[Receipt]]  # a request, and a receipt for each of its choices


@dataclasses.dataclass(frozen=True, slots=True)
class Skeleton:
    """What of a receipt outlives the deletion of its content; `deleted_at` is None before."""

    id: str
    request_id: str
    scenario: str
    choice: int
    purpose: str
    session: str | None
    parent: str | None
    continued_by: str | None  # how the parent was found
    num_prompt_tokens: int
    num_tokens: int  # sampled
    spans: tuple[Span, ...]
    finish_reason: str
    sampling: Sampling  # without stop strings, once deleted
    inexact_reason: str | None
    reproducible: bool
    template_digest: str | None
    tokenizer_digest: str | None
    engine_build: str
    created_at: float
    deleted_at: float | None
    digest: str


def make(
    request: Request,
    choice: int,
    generation: Generation,
    engine_build: str,
    id: str,
    now: float,
    turn_key: str | None = None,
) -> Receipt:
    """The receipt of one choice, with the digest over all of it."""
    reason = request.sampling.inexact_reason()
    if not np.isfinite(generation.logprobs).all():
        reason = ",".join(filter(None, (reason, "logprob_not_finite")))
    receipt = Receipt(
        id=id,
        request_id=request.id,
        scenario=request.scenario,
        choice=choice,
        prompt_ids=request.prompt_ids,
        generation=generation,
        sampling=request.sampling,
        purpose=request.purpose,
        session=request.session,
        parent=request.parent,
        tags=request.tags,
        template_digest=request.template_digest,
        tokenizer_digest=request.tokenizer_digest,
        engine_build=engine_build,
        created_at=now,
        inexact_reason=reason,
        digest="",
        continued_by=request.continued_by,
        turn_key=turn_key,
    )
    return dataclasses.replace(receipt, digest=compute_digest(receipt))


def compute_digest(receipt: Receipt) -> str:
    """sha256 over everything in the receipt but the digest itself."""
    made_of = {
        "id": receipt.id,
        "request_id": receipt.request_id,
        "scenario": receipt.scenario,
        "choice": receipt.choice,
        "finish_reason": receipt.generation.finish_reason,
        "matched": receipt.generation.matched,
        "spans": _spans_to_rows(receipt.generation.spans),
        "reproducible": receipt.generation.reproducible,
        "sampling": _values(receipt.sampling),
        "purpose": receipt.purpose,
        "session": receipt.session,
        "parent": receipt.parent,
        "tags": dict(receipt.tags),
        "template": receipt.template_digest,
        "tokenizer": receipt.tokenizer_digest,
        "engine": receipt.engine_build,
        "created_at": receipt.created_at,
        "inexact": receipt.inexact_reason,
    }
    later = {"continued_by": receipt.continued_by, "turn_key": receipt.turn_key}  # older receipts have neither
    made_of |= {name: value for name, value in later.items() if value is not None}
    arrays = (receipt.prompt_ids, receipt.generation.output_ids)
    blobs = (*(pack_ids(array) for array in arrays), pack_floats(receipt.generation.logprobs))
    return digest(to_json(made_of), *blobs)


def record(connection: Connection, request: Request, made: Sequence[Receipt]) -> None:
    """Store one completion: its request, and a receipt for each choice.

    Raises:
        NotFoundError: the request continues a receipt that is not there.
        GoneError: the receipt that it continues was deleted.
        ConflictError: the prompt does not begin with that receipt's ids.
    """
    record_all(connection, [(request, made)])


def record_all(connection: Connection, completions: Sequence[Completion]) -> None:
    """Store completions, none of which continues another of them; for `Ledger.write_together`. Raises as `record`."""
    asked = [
        _request_row(request, _prefix_length(connection, request), made[0].engine_build)
        for request, made in completions
    ]
    insert_rows(connection, requests, asked)
    insert_rows(connection, receipts, [_receipt_row(receipt) for _, made in completions for receipt in made])


def _request_row(request: Request, prefix: int, engine_build: str) -> dict[str, object]:
    return {
        "id": request.id,
        "scenario": request.scenario,
        "session": request.session,
        "purpose": request.purpose,
        "api": request.api,
        "parent": request.parent,
        "continued_by": request.continued_by,
        "prompt_ids": pack_ids(request.prompt_ids[prefix:]),
        "prompt_length": len(request.prompt_ids),
        "prompt_digest": digest(pack_ids(request.prompt_ids)),
        "sampling": _sampling_to_json(request.sampling),
        "body": pack_body(request.body),
        "tags": to_json(dict(request.tags)),
        "template_digest": request.template_digest,
        "tokenizer_digest": request.tokenizer_digest,
        "engine_build": engine_build,
        "created_at": request.created_at,
    }


def _receipt_row(receipt: Receipt) -> dict[str, object]:
    generation = receipt.generation
    return {
        "id": receipt.id,
        "request_id": receipt.request_id,
        "choice": receipt.choice,
        "output_ids": pack_ids(generation.output_ids),
        "logprobs": pack_floats(generation.logprobs),
        "num_tokens": len(generation.output_ids),
        "spans": to_json(_spans_to_rows(generation.spans)),
        "finish_reason": generation.finish_reason.value,
        "matched": None if generation.matched is None else to_json(generation.matched),
        "reproducible": generation.reproducible,
        "inexact_reason": receipt.inexact_reason,
        "digest": receipt.digest,
        "created_at": receipt.created_at,
        "turn_key": receipt.turn_key,
    }


def get(connection: Connection, receipt_id: str) -> Receipt:
    """The whole receipt. Raises NotFoundError, and GoneError where it was deleted."""
    return get_many(connection, [receipt_id])[receipt_id]


def get_many(connection: Connection, receipt_ids: Iterable[str]) -> dict[str, Receipt]:
    """Whole receipts by id, each with the digest that it was recorded with.

    Raises:
        NotFoundError, GoneError: one is not there, or not any more.
        DamagedError: one is not as it was recorded.
    """
    try:
        found = read_many(connection, receipt_ids)
    except UNREADABLE:
        found = {receipt_id: _read_or_blame(connection, receipt_id) for receipt_id in receipt_ids}
    for receipt in found.values():
        if compute_digest(receipt) != receipt.digest:
            raise DamagedError(receipt.id, "its digest is another")
    return found


def read_many(connection: Connection, receipt_ids: Iterable[str]) -> dict[str, Receipt]:
    """`get_many` without looking at the digests; what cannot be read raises one of UNREADABLE."""
    wanted = list(dict.fromkeys(receipt_ids))
    found: dict[str, Receipt] = {}
    for start in range(0, len(wanted), 500):
        rows = connection.execute(_FIND_WHOLE, {"ids": wanted[start : start + 500]}).all()
        if deleted := [row.id for row in rows if row.deleted_at is not None]:
            raise _gone(deleted[0])
        prompts = whole_prompts(connection, rows)
        found.update((row.id, _from_row(row, prompts[row.request_id])) for row in rows)
    for receipt_id in wanted:
        if receipt_id not in found:
            raise _unknown(receipt_id)
    return found


def _read_or_blame(connection: Connection, receipt_id: str) -> Receipt:
    try:
        return read_many(connection, [receipt_id])[receipt_id]
    except UNREADABLE as error:
        raise DamagedError(receipt_id, str(error)) from error


def _from_row(row: Row[Any], prompt_ids: Ids) -> Receipt:
    return Receipt(
        id=row.id,
        request_id=row.request_id,
        scenario=row.scenario,
        choice=row.choice,
        prompt_ids=prompt_ids,
        generation=Generation(
            output_ids=unpack_ids(row.output_ids),
            logprobs=unpack_floats(row.logprobs),
            finish_reason=FinishReason(row.finish_reason),
            spans=tuple(Span(*span) for span in from_json(row.spans)),
            matched=None if row.matched is None else from_json(row.matched),
            reproducible=row.reproducible,
        ),
        sampling=sampling_from_json(row.sampling),
        purpose=row.purpose,
        session=row.session,
        parent=row.parent,
        tags=from_json(row.tags),
        template_digest=row.template_digest,
        tokenizer_digest=row.tokenizer_digest,
        engine_build=row.engine_build,
        created_at=row.created_at,
        inexact_reason=row.inexact_reason,
        digest=row.digest,
        continued_by=row.continued_by,
        turn_key=row.turn_key,
    )


def skeleton(connection: Connection, receipt_id: str) -> Skeleton:
    """What a receipt is without its content. Raises NotFoundError."""
    shared = [column for column in requests.c if column.name not in ("id", "created_at", "body", "prompt_ids")]
    own = [column for column in receipts.c if column.name not in ("output_ids", "logprobs")]
    query = select(*own, *shared).join(requests, requests.c.id == receipts.c.request_id)
    row = connection.execute(query.where(receipts.c.id == receipt_id)).first()
    if row is None:
        raise _unknown(receipt_id)
    return Skeleton(
        id=row.id,
        request_id=row.request_id,
        scenario=row.scenario,
        choice=row.choice,
        purpose=row.purpose,
        session=row.session,
        parent=row.parent,
        continued_by=row.continued_by,
        num_prompt_tokens=row.prompt_length,
        num_tokens=row.num_tokens,
        spans=tuple(Span(*span) for span in from_json(row.spans)),
        finish_reason=row.finish_reason,
        sampling=sampling_from_json(row.sampling),
        inexact_reason=row.inexact_reason,
        reproducible=row.reproducible,
        template_digest=row.template_digest,
        tokenizer_digest=row.tokenizer_digest,
        engine_build=row.engine_build,
        created_at=row.created_at,
        deleted_at=row.deleted_at,
        digest=row.digest,
    )


def body_of(connection: Connection, request_id: str) -> bytes:
    """The client's JSON as it came. Raises NotFoundError, GoneError where it was deleted, LedgerError where damaged."""
    row = connection.execute(select(requests.c.body, requests.c.deleted_at).where(requests.c.id == request_id)).first()
    if row is None:
        raise NotFoundError(f"no request {request_id}")
    if row.deleted_at is not None:
        raise GoneError(f"the body of request {request_id} was deleted")
    try:
        return unpack_body(row.body)
    except BROKEN_BODY as error:
        what = f"the body of request {request_id} is damaged ({error}): run `reef doctor --ledger`"
        raise LedgerError(what, code="receipt_damaged") from error


def _prefix_length(connection: Connection, request: Request) -> int:
    if request.parent is None:
        return 0
    row = connection.execute(_FIND_PARENT, {"parent": request.parent}).first()
    if row is None:
        raise NotFoundError(f"no receipt {request.parent} to continue", code="receipt_not_found")
    if row.deleted_at is not None:
        raise _gone(request.parent)
    before, sampled = np.split(request.prompt_ids[: row.prompt_length + len(row.output_ids) // 4], [row.prompt_length])
    if digest(pack_ids(before)) != row.prompt_digest or pack_ids(sampled) != row.output_ids:
        raise ConflictError(f"the prompt does not begin with the ids of receipt {request.parent}", code="not_continued")
    return len(before) + len(sampled)


def _values(sampling: Sampling) -> dict[str, object]:
    """Every field by name; `dataclasses.asdict` copies each value, and takes as long as the rest of a digest."""
    values = {name: getattr(sampling, name) for name in Sampling.__slots__}
    if sampling.json_schema is None:  # as in the digests of receipts from before there was one
        del values["json_schema"]
    return values


def _spans_to_rows(spans: Sequence[Span]) -> list[list[int | str]]:
    return [[span.start, span.end, span.release_id] for span in spans]


def _sampling_to_json(sampling: Sampling) -> str:
    """Only what differs from the neutral values."""
    return to_json({key: value for key, value in _values(sampling).items() if value != getattr(_NEUTRAL, key)})


def sampling_from_json(text: str) -> Sampling:
    """A request's sampling as it is stored. Raises one of UNREADABLE where it is not one."""
    changed = from_json(text)
    for name in ("stop", "stop_token_ids"):
        if name in changed:
            changed[name] = tuple(changed[name])
    return dataclasses.replace(_NEUTRAL, **changed)


def _unknown(receipt_id: str) -> NotFoundError:
    return NotFoundError(f"no receipt {receipt_id}", param="references", code="receipt_not_found")


def _gone(receipt_id: str) -> GoneError:
    return GoneError(f"receipt {receipt_id} was deleted")
