"""How many turns are kept in memory: as many as fit, short ones too."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from reef.chat.template import Template
from reef.ledger import receipts
from reef.service.turns import TURN_TOKENS, Turns
from reef.types import FinishReason, Generation, Receipt, Request, Sampling, Span

NUM_SENT = 3_000


def receipt(number: int, num_tokens: int) -> Receipt:
    """A recorded turn of so many tokens, of which one was sampled."""
    request = Request(
        id=f"req_{number:032x}",
        scenario="s",
        api="chat",
        prompt_ids=np.full(num_tokens - 1, 5, dtype=np.int32),
        sampling=Sampling(max_tokens=1),
        n=1,
        body=b"{}",
        created_at=0.0,
    )
    made = Generation(
        output_ids=np.array([2], dtype=np.int32),
        logprobs=np.array([-0.5], dtype=np.float32),
        finish_reason=FinishReason.STOP,
        spans=(Span(0, 1, "r"),),
        matched=2,
    )
    return receipts.make(request, 0, made, "build", f"rcp_{number:032x}", 0.0, "key")


@pytest.fixture(scope="module")
def template(starter) -> Iterator[Template]:
    made = Template(starter)
    yield made
    made.close()


@pytest.mark.parametrize("num_tokens", [2, 20, 500])
def test_the_turns_kept_take_no_more_memory_than_was_given_however_short_they_are(template, num_tokens) -> None:
    made = [receipt(number, num_tokens) for number in range(NUM_SENT)]
    cache_tokens = 100_000
    turns = Turns(None, template, None, True, cache_tokens)  # type: ignore[arg-type]  # they are only remembered
    tracemalloc.start()
    try:
        for one in made:
            turns.remember(one)
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used_bytes <= 4 * cache_tokens * 1.1
    assert len(turns._recent) == cache_tokens // (num_tokens + TURN_TOKENS) < NUM_SENT
