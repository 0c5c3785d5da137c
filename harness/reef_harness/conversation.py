"""A dialogue of several turns, each of which continues the one before, token by token."""

from collections.abc import Mapping, Sequence
from typing import Unpack

from reef_harness.client import Client
from reef_harness.types import Completion, Message
from reef_harness.wire import Asking


class Conversation:
    """Turns with a model: each request names the receipt of the turn before, and the service goes on from its ids.

    Where that is not possible the service refuses (409, ``not_continued``) instead of rendering the history anew, so
    the turns are one training sequence: report ``receipts`` together, or one by one. ``asking`` goes with every turn.
    """

    def __init__(self, client: Client, messages: Sequence[Message] = (), **asking: Unpack[Asking]) -> None:
        self._client = client
        self._asking = asking
        self.messages: list[Message] = list(messages)
        self.receipts: list[str] = []

    async def say(self, *said: str | Message) -> Completion:
        """Add messages (a string is one of the user), have them answered, and add the answer."""
        asked = [*self.messages, *(_message(each) for each in said)]
        asking = self._asking if not self.receipts else {**self._asking, "parent": self.receipts[-1]}
        answer = await self._client.chat(asked, **asking)
        self.messages = [*asked, answer.choices[0].message]
        self.receipts.append(answer.receipt)
        return answer


def _message(said: str | Mapping[str, object]) -> Message:
    return {"role": "user", "content": said} if isinstance(said, str) else said
