"""Turns of conversations: which receipt a later request continues, and the ids that it continues with.

The index is the ledger's own: a turn is found by its key whenever it was said, and by whichever service.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from sqlalchemy import Connection, Select, bindparam, select

from reef.errors import NotFoundError
from reef.ledger.receipts import get
from reef.ledger.schema import receipts, requests
from reef.types import FinishReason, Ids, Receipt


@dataclass(frozen=True, slots=True, eq=False)
class PastTurn:
    """A recorded turn as those after it see it."""

    receipt_id: str
    ids: Ids  # [T] its prompt and what was sampled
    num_prompt: int
    stop_id: int | None  # the id that ended it, its last one; None: it was cut, or ended by a string

    @property
    def output_ids(self) -> Ids:
        """What was sampled [N]."""
        return self.ids[self.num_prompt :]


def turn_of(receipt: Receipt) -> PastTurn:
    """A receipt as a turn."""
    generation = receipt.generation
    ended = generation.finish_reason is FinishReason.STOP and isinstance(generation.matched, int)
    return PastTurn(
        receipt_id=receipt.id,
        ids=np.concatenate([receipt.prompt_ids, generation.output_ids]),
        num_prompt=len(receipt.prompt_ids),
        stop_id=int(generation.output_ids[-1]) if ended and len(generation.output_ids) else None,
    )


def read(connection: Connection, receipt_id: str) -> PastTurn:
    """Raises NotFoundError, GoneError where it was deleted, DamagedError."""
    return turn_of(get(connection, receipt_id))


def find(
    connection: Connection, keys: Sequence[str], scenario: str, session: str | None
) -> tuple[str, str, str] | None:
    """The turn that a conversation continues.

    Args:
        keys: of its prefixes, the longest first.
        session: where several turns have a key, the newest of this session is meant; else none of them.

    Returns:
        The receipt's id, the key it was found by, and how: `session` or `messages`. None: it continues none.
    """
    for key in keys:
        if session is not None:
            row = connection.execute(_IN_SESSION, {"key": key, "scenario": scenario, "session": session}).first()
            if row is not None:
                return str(row.id), key, "session"
        rows = connection.execute(_BY_KEY, {"key": key}).all()
        if len(rows) == 1:
            return str(rows[0].id), key, "messages"
    return None


def key_of(connection: Connection, receipt_id: str) -> tuple[str, str | None]:
    """A receipt's scenario, and its key where it is a turn of a chat. Raises NotFoundError."""
    query = _joined(select(requests.c.scenario, receipts.c.turn_key)).where(receipts.c.id == receipt_id)
    row = connection.execute(query).first()
    if row is None:
        raise NotFoundError(f"no receipt {receipt_id} to continue", code="receipt_not_found")
    return str(row.scenario), row.turn_key


def _joined(query: Select[tuple[object, ...]]) -> Select[tuple[object, ...]]:
    return query.select_from(receipts).join(requests, requests.c.id == receipts.c.request_id)


# Built once: making a statement costs more than running it.
_BY_KEY = select(receipts.c.id).where(receipts.c.turn_key == bindparam("key")).limit(2)
_IN_SESSION = (
    _joined(select(receipts.c.id))
    .where(requests.c.scenario == bindparam("scenario"), requests.c.session == bindparam("session"))
    # An expression, so that no planner walks all turns of a key, which may be very many: a session's are few.
    .where(receipts.c.turn_key + "" == bindparam("key"))
    .order_by(receipts.c.seq.desc())
    .limit(1)
)
