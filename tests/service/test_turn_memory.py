"""What is remembered of turns: bounded, and gone with what was deleted."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from reef.chat.conversation import Conversation, Message
from reef.chat.dialect import Dialect
from reef.chat.reply import Reply
from reef.chat.template import Template
from reef.ledger import receipts, scenarios
from reef.ledger.ledger import Ledger
from reef.service.turns import TURN_TOKENS, Turns
from reef.types import FinishReason, Generation, Request, Sampling, Span

ASKED = (Message("user", "1+1="),)
ANSWERED = (*ASKED, Message("assistant", "2"), Message("user", "2+2="))


@pytest.fixture
def template(starter):
    made = Template(starter)
    yield made
    made.close()


@pytest.fixture
def ledger(tmp_path):
    made = Ledger.open(f"sqlite:///{tmp_path}/ledger.db")
    yield made
    made.close()


@pytest.fixture
def make_turns(ledger, template, starter):
    return lambda cache_tokens: Turns(ledger, template, Dialect(template, starter, "auto", "auto"), True, cache_tokens)


def place(turns, messages):
    return turns.place(Conversation(messages), "s", "", None, None)


async def recorded(turns, ledger, number, said="2"):
    """A first turn in the ledger."""
    at = await place(turns, ASKED)
    ids = np.array([53, 2], dtype=np.int32)
    request = Request(f"req{number}", "s", "chat", at.prompt_ids, Sampling(8), 1, b"{}", 1.0)
    generation = Generation(ids, np.zeros(2, np.float32), FinishReason.STOP, (Span(0, 2, "r0"),), 2)
    made = receipts.make(request, 0, generation, "engine", f"rcp{number}", 1.0, at.turn_key(Reply(said)))
    await ledger.write(receipts.record, request, [made])
    return made


def test_a_turn_that_was_forgotten_while_it_was_read_is_not_remembered(ledger, make_turns) -> None:
    """It may have been deleted in between: nothing of it may stay in memory."""
    turns = make_turns(4000)

    class Slow:
        async def read(self, op, *args):
            found = await ledger.read(op, *args)
            turns.forget()
            return found

    async def work():
        await ledger.write(scenarios.create, "s", "r", 1.0)
        made = await recorded(turns, ledger, 1)
        turns._ledger = Slow()
        assert (await place(turns, ANSWERED)).parent == made.id
        assert not turns._recent
        turns._ledger = ledger
        assert (await place(turns, ANSWERED)).parent == made.id
        assert list(turns._recent) == [made.id]

    asyncio.run(work())


def test_memory_of_turns_is_bounded_and_counts_what_it_holds(ledger, make_turns) -> None:
    """Agent-Lightning 438: sessions that never end."""
    turns = make_turns(10 * TURN_TOKENS)

    async def work():
        await ledger.write(scenarios.create, "s", "r", 1.0)
        for number in range(30):
            turns.remember(await recorded(turns, ledger, number, str(number)))
            held = sum(len(turn.ids) + TURN_TOKENS for turn in turns._recent.values())
            assert turns._num_tokens == held <= 10 * TURN_TOKENS
        assert list(turns._recent)[-1] == "rcp29"
        assert 5 < len(turns._recent) < 10
        turns.forget()
        assert (len(turns._recent), turns._num_tokens) == (0, 0)

    asyncio.run(work())


def test_prompts_that_were_rendered_are_forgotten_too(template) -> None:
    asyncio.run(template.render(Conversation(ASKED)))
    assert len(template._rendered) == 1
    template.forget()
    assert not template._rendered
