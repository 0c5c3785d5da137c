"""Turns of conversations: which receipt a later request continues, and the ids that it continues with.

The index is the ledger's own: a turn is found by its key whenever it was said, and by whichever service.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import BindParameter, Connection, Select, bindparam, func, select

from reef.errors import GoneError, NotFoundError
from reef.ledger.ancestors import PAGE
from reef.ledger.receipts import get
from reef.ledger.schema import receipts, requests
from reef.types import FinishReason, Ids, Receipt


@dataclass(frozen=True, slots=True, eq=False)
class PastTurn:
    """A recorded turn as those after it see it."""

    receipt_id: str
    ids: Ids  # [T] its prompt and what was sampled
    num_prompt: int
    matched: int | str | None  # the stop id, its last one, or stop string that ended it; None: it was cut

    @property
    def stop_id(self) -> int | None:
        """The id that ended it; None: it was cut, or ended by a string."""
        return int(self.ids[-1]) if isinstance(self.matched, int) else None

    @property
    def output_ids(self) -> Ids:
        """What was sampled [N]."""
        return self.ids[self.num_prompt :]


def turn_of(receipt: Receipt) -> PastTurn:
    """A receipt as a turn."""
    generation = receipt.generation
    ended = generation.finish_reason is FinishReason.STOP and len(generation.output_ids) > 0
    return PastTurn(
        receipt_id=receipt.id,
        ids=np.concatenate([receipt.prompt_ids, generation.output_ids]),
        num_prompt=len(receipt.prompt_ids),
        matched=generation.matched if ended else None,
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
    for page in _pages(keys):
        own = _in_session(connection, page, scenario, session) if session is not None else {}
        sole = page if len(page) == 1 else connection.scalars(_SOLE, {"keys": page}).all()
        for key in page:
            if key in own:
                return own[key], key, "session"
            rows = connection.execute(_BY_KEY, {"key": key}).all() if key in sole else ()
            if len(rows) == 1:
                return str(rows[0].id), key, "messages"
    return None


def _pages(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    """The longest by itself, which most requests continue; the others many at once, since none of them may be known."""
    if keys:
        yield keys[:1]
    for start in range(1, len(keys), PAGE):
        yield keys[start : start + PAGE]


def _in_session(connection: Connection, keys: Sequence[str], scenario: str, session: str) -> dict[str, str]:
    """The newest turn of the session with each key."""
    rows = connection.execute(_IN_SESSION, {"keys": keys, "scenario": scenario, "session": session})
    return {row.turn_key: row.id for row in rows}  # the newest comes last


def key_of(connection: Connection, receipt_id: str, scenario: str) -> str | None:
    """A receipt's key where it is a turn of a chat.

    Raises:
        NotFoundError: it is not in the scenario; whether it is, or was, in another one is not said.
        GoneError: it was deleted.
    """
    row = connection.execute(_KEY_OF, {"id": receipt_id}).first()
    if row is None or row.scenario != scenario:
        raise NotFoundError(f"no receipt {receipt_id}", code="receipt_not_found")
    if row.deleted_at is not None:
        raise GoneError(f"receipt {receipt_id} was deleted")
    key: str | None = row.turn_key
    return key


def _joined(query: Select[tuple[object, ...]]) -> Select[tuple[object, ...]]:
    return query.select_from(receipts).join(requests, requests.c.id == receipts.c.request_id)


# Built once: making a statement costs more than running it.
_KEYS: BindParameter[Any] = bindparam("keys", expanding=True)
_SOLE = (
    select(receipts.c.turn_key)
    .where(receipts.c.turn_key.in_(_KEYS))
    .group_by(receipts.c.turn_key)
    .having(func.count() == 1)
)
_BY_KEY = select(receipts.c.id).where(receipts.c.turn_key == bindparam("key")).limit(2)
_KEY_OF = _joined(select(requests.c.scenario, requests.c.deleted_at, receipts.c.turn_key)).where(
    receipts.c.id == bindparam("id")
)
_IN_SESSION = (
    _joined(select(receipts.c.turn_key, receipts.c.id))
    .where(requests.c.scenario == bindparam("scenario"), requests.c.session == bindparam("session"))
    # An expression, so that no planner walks all turns of a key, which may be very many: a session's are few.
    .where((receipts.c.turn_key + "").in_(_KEYS))
    .order_by(receipts.c.seq)
)
