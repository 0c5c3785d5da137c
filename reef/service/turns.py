"""Where a request stands in its conversation: the turn that it continues, and the prompt that follows from it."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from reef.chat import history
from reef.chat.conversation import Conversation
from reef.chat.detokenizer import cut_at_stop
from reef.chat.dialect import Dialect, read_whole
from reef.chat.reply import Reply
from reef.chat.template import Template
from reef.errors import ConflictError, GoneError, NotFoundError
from reef.ledger import turns
from reef.ledger.ledger import Ledger
from reef.ledger.turns import PastTurn, turn_of
from reef.types import Ids, Receipt

TURN_TOKENS = 96  # what a remembered turn takes beside its ids, in tokens of 4 bytes: many are short


@dataclass(frozen=True, slots=True)
class Named:
    """A turn that the client names as the one it continues; `how` is `explicit` or `response`."""

    receipt_id: str
    how: str


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """A conversation's place: its prompt, and what that continues."""

    prompt_ids: Ids  # [P]
    key: str  # of the conversation that was sent
    parent: str | None = None
    continued_by: str | None = None  # explicit | response | session | messages

    def turn_key(self, reply: Reply) -> str:
        """The key under which a later request finds this turn."""
        return history.extend(self.key, reply.message())


class Turns:
    """Places conversations. Remembers the ids of recent turns; of all others the ledger does."""

    def __init__(self, ledger: Ledger, template: Template, dialect: Dialect, exact: bool, cache_tokens: int) -> None:
        """`exact`: continue stored ids; else every conversation is rendered whole. `cache_tokens` bounds the memory."""
        self._ledger = ledger
        self._template = template
        self._digests = f"{template.template_digest} {template.tokenizer_digest}"  # other ids mean another text
        self._dialect = dialect
        self._exact = exact
        self._cache_tokens = cache_tokens
        self._recent: OrderedDict[str, PastTurn] = OrderedDict()
        self._num_tokens = 0
        self._num_forgotten = 0  # times that all was

    async def place(
        self, conversation: Conversation, scenario: str, owner: str, session: str | None, named: Named | None
    ) -> Place:
        """The prompt of a conversation, as a continuation of a recorded turn where it is one.

        Args:
            owner: whose turns are looked at; those of others are never found.
            named: the turn that it must continue.

        Raises:
            BadRequestError: the template refuses the messages.
            NotFoundError, GoneError, ConflictError: the named turn is not there, or the messages do not continue it.
        """
        root = history.root(scenario, owner, self._digests, conversation)
        keys = history.keys(root, conversation.messages)
        key = keys[-1] if keys else root
        if self._exact:
            found = await self._find(conversation, keys, scenario, session, named)
            if found is not None:
                turn, index, how = found
                after = await self._template.render_after(conversation, index, turn.stop_id)
                if after is not None:
                    return Place(np.concatenate([turn.ids, after]), key, turn.receipt_id, how)
                if named is not None:
                    raise _not_continued(named, "the chat template does not show where the assistant's message ends")
        elif named is not None and named.how == "explicit":
            raise _not_continued(named, "every conversation is rendered anew (inference.history: template)")
        return Place(await self._template.render(conversation), key)

    async def continue_ids(self, prompt_ids: Ids, scenario: str, named: Named) -> Place:
        """A prompt of ids that continues a turn. Raises NotFoundError, GoneError, ConflictError."""
        await self._named_key(scenario, named)
        turn = await self._turn(named.receipt_id)
        if not np.array_equal(prompt_ids[: len(turn.ids)], turn.ids):
            raise _not_continued(named, "the prompt does not begin with its ids")
        return Place(prompt_ids, "", named.receipt_id, named.how)

    def remember(self, receipt: Receipt) -> None:
        """A turn was recorded: the next one of its conversation comes soon."""
        self._keep(turn_of(receipt))

    def forget(self) -> None:
        """Content was deleted: what is remembered may be of it."""
        self._recent.clear()
        self._num_tokens = 0
        self._num_forgotten += 1

    async def _find(
        self, conversation: Conversation, keys: Sequence[str], scenario: str, session: str | None, named: Named | None
    ) -> tuple[PastTurn, int, str] | None:
        """The turn, its message's index, and how it was found."""
        at = {keys[i]: i for i, message in enumerate(conversation.messages) if message.role == "assistant"}
        if named is not None:
            key = await self._named_key(scenario, named)
            if key not in at:
                raise _not_continued(named, "no prefix of the messages is the conversation that it ended")
            return await self._turn(named.receipt_id), at[key], named.how
        candidates = list(reversed(at))
        while candidates:
            found = await self._ledger.read(turns.find, candidates, scenario, session)
            if found is None:
                return None
            receipt_id, key, how = found
            candidates = candidates[candidates.index(key) + 1 :]
            try:
                turn = await self._turn(receipt_id)
            except (GoneError, NotFoundError):  # deleted since it was found
                continue
            if await self._same_reasoning(conversation, at[key], turn):
                return turn, at[key], how
        return None

    async def _named_key(self, scenario: str, named: Named) -> str | None:
        return await self._ledger.read(turns.key_of, named.receipt_id, scenario)

    async def _same_reasoning(self, conversation: Conversation, index: int, turn: PastTurn) -> bool:
        """Only a client that sends reasoning has it looked at: what it left out may be anything."""
        told = conversation.messages[index]
        if not told.reasoning:
            return True
        parser = self._dialect.reader(conversation.tools, "", turn.ids[: turn.num_prompt])
        (text,) = await self._template.decode_all([turn.output_ids], self._dialect.keep)
        return history.same_reasoning(told, read_whole(parser, cut_at_stop(text, turn.matched)).message())

    async def _turn(self, receipt_id: str) -> PastTurn:
        if (turn := self._recent.get(receipt_id)) is None:
            before = self._num_forgotten
            turn = await self._ledger.read(turns.read, receipt_id)
            if before == self._num_forgotten:  # else it may have been deleted since it was read
                self._keep(turn)
        else:
            self._recent.move_to_end(receipt_id)
        return turn

    def _keep(self, turn: PastTurn) -> None:
        if turn.receipt_id in self._recent or len(turn.ids) + TURN_TOKENS > self._cache_tokens:
            return
        self._recent[turn.receipt_id] = turn
        self._num_tokens += len(turn.ids) + TURN_TOKENS
        while self._num_tokens > self._cache_tokens:
            _, oldest = self._recent.popitem(last=False)
            self._num_tokens -= len(oldest.ids) + TURN_TOKENS


def _not_continued(named: Named, why: str) -> ConflictError:
    return ConflictError(f"the request does not continue {named.receipt_id}: {why}", code="not_continued")
