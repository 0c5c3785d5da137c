"""What makes a turn the same turn: keys of conversations.

    root(...)  --message-->  key  --message-->  key  --reply-->  the turn's key, stored with its receipt

A later request continues a turn where a prefix of its messages has the turn's key. Compared is what a client sends back
unchanged: roles, text without the white space at its edges, names of tools and their arguments as JSON values. Ids of
the assistant's calls and its reasoning are not: clients drop or rename them (`same_reasoning` looks at what is left).
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import orjson

from reef.chat.conversation import Conversation, Message

KEY_BYTES = 16
MAX_EXACT = 2.0**53  # below it a float holds every whole number


def root(scenario: str, owner: str, digests: str, conversation: Conversation) -> str:
    """The key before the first message.

    Args:
        owner: whose turns it is about; those of others are never found.
        digests: of what makes ids of a conversation: the template, and the tokenizer.
    """
    return _hash([scenario, owner, digests, conversation.tools, conversation.options])


def keys(root: str, messages: Sequence[Message]) -> list[str]:
    """The key after each message, each over all before it."""
    found: list[str] = []
    for message in messages:
        root = extend(root, message)
        found.append(root)
    return found


def extend(key: str, message: Message) -> str:
    """The key after one more message."""
    calls = [[call.name, _whole(call.values())] for call in message.tool_calls]
    return _hash([key, message.role, message.content.strip(), calls, message.tool_call_id, message.name])


def same_reasoning(told: Message, said: Message) -> bool:
    """Whether a client that sends reasoning back sends what the model thought."""
    return not told.reasoning or told.reasoning.strip() == (said.reasoning or "").strip()


def _whole(value: Any) -> Any:
    """The same values with 1.0 as 1, which JSON does not tell apart and clients in JavaScript send back so."""
    if isinstance(value, dict):
        return {name: _whole(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_whole(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < MAX_EXACT else value


def _hash(value: object) -> str:
    text = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(text, digest_size=KEY_BYTES).hexdigest()
