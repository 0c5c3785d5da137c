"""The ledger's benchmark at a size that takes seconds: what it makes is whole, and it asks everything."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import ledger

# Of 29 groups that settle 25 are trained, two a batch: 12 batches, 2 rollbacks and the base.
TINY = (29 + ledger.NUM_WAITING) * ledger.GROUP_SIZE


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "NUM_SHOWN_RELEASES", 10)
        return ledger.run(tmp_path_factory.mktemp("bench"), (TINY, TINY + 40), share=0.01)


def test_both_ledgers_are_whole_and_everything_is_asked_of_both(found: Any) -> None:
    assert found["receipts"] == [TINY, TINY + 40]
    assert found["median_ms"].keys() == found["ratio"].keys() == ledger.QUESTIONS.keys()
    assert all(value > 0 for values in found["median_ms"].values() for value in values)


def test_a_sampled_token_takes_eight_bytes_and_a_prompt_token_four(found: Any) -> None:
    assert found["disk"]["bytes_per_sampled_token"] == 8
    # 4 choices of 32 tokens with log-probabilities for each prompt of 64.
    assert found["disk"]["ids_and_logprobs_bytes_per_token"] == pytest.approx((8 * 128 + 4 * 64) / (128 + 64), abs=0.01)
    assert found["disk"]["file_bytes_per_token"] > 8


def test_a_ledger_is_the_same_each_time_but_for_its_name(tmp_path: Path) -> None:
    first, second = (ledger.generate(tmp_path / f"{number}.db", TINY) for number in (1, 2))
    assert first.shown == second.shown
    assert first.head[4:] == second.head[4:] == "-000014"
