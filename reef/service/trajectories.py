"""Recorded turns as ATIF: bodies become conversations again, and ids replies, as they were when they were answered."""

from collections.abc import Sequence
from typing import Any

from reef.atif import AgentTurn, trajectory
from reef.chat.conversation import Conversation, Message
from reef.chat.detokenizer import cut_at_stop
from reef.chat.dialect import Dialect, read_whole
from reef.chat.reply import Reply
from reef.chat.template import Template
from reef.errors import ConflictError
from reef.ledger.recorded import Recorded
from reef.service.wire import parse
from reef.service.wire_anthropic import MessagesBody
from reef.service.wire_openai import ChatBody
from reef.service.wire_responses import ResponsesBody


def to_atif(
    chain: Sequence[Recorded], template: Template, dialect: Dialect, model_name: str | None = None
) -> dict[str, Any]:
    """One conversation as ATIF. Blocks for as long as its texts take to decode.

    Args:
        chain: its turns, the oldest first, as `ledger.recorded.chain` reads them.

    Raises:
        ConflictError: they are of another model's tokenizer.
        DamagedError: one has not a log-probability for each id.
    """
    turns: list[AgentTurn] = []
    notes: list[str] = []
    for recorded in chain:
        receipt = recorded.receipt
        if receipt.tokenizer_digest not in (None, template.tokenizer_digest):
            raise ConflictError(
                f"receipt {receipt.id} was made with another tokenizer than this model has: its ids mean another text",
                code="other_tokenizer",
            )
        num_before = len(turns[-1].receipt.prompt_ids) + len(turns[-1].receipt.generation.output_ids) if turns else 0
        conversation, repeats, note = _asked(recorded, template, num_before)
        notes += [note] if note else []
        reply = _answered(recorded, conversation, template, dialect)
        grades = [
            {"agent_record_id": grade.report_id, "score": grade.score, "state": grade.state}
            for grade in recorded.grades
        ]
        turns.append(AgentTurn(receipt, conversation, reply, repeats, recorded.copied, grades))
    return trajectory(turns, model_name, notes)


def _asked(recorded: Recorded, template: Template, num_before: int) -> tuple[Conversation, bool, str | None]:
    """What a request asked; whether that repeats the turns before it; and what is missing in it, if something is.

    Args:
        num_before: ids of the turns that it continues.
    """
    match recorded.api:
        case "chat":
            return parse(ChatBody, recorded.body).conversation(), True, None
        case "messages":
            return parse(MessagesBody, recorded.body).conversation(), True, None
        case "responses":
            body = parse(ResponsesBody, recorded.body)
            whole = body.conversation()
            if body.previous_response_id is None:
                return whole, True, None
            if num_before:
                return Conversation(tuple(body.messages()), whole.tools, whole.options), False, None
            name = recorded.receipt.id
            return whole, True, f"{name} is a new branch: what was said before {body.previous_response_id} is left out"
        case "completions":
            added = recorded.receipt.prompt_ids[num_before:].tolist()
            return Conversation((Message("user", template.decode(added)),)), False, None
        case _:
            raise ConflictError(f"receipt {recorded.receipt.id} came through {recorded.api}, which has no messages")


def _answered(recorded: Recorded, conversation: Conversation, template: Template, dialect: Dialect) -> Reply:
    """The reply as the client got it, with the same ids of its calls."""
    receipt = recorded.receipt
    ids, matched = receipt.generation.output_ids.tolist(), receipt.generation.matched
    if recorded.api == "completions":
        return Reply(cut_at_stop(template.decode(ids), matched))
    seed = f"{receipt.request_id}/{receipt.choice}"
    parser = dialect.reader(conversation.tools, seed, receipt.prompt_ids)
    return read_whole(parser, cut_at_stop(template.decode(ids, dialect.keep), matched))
