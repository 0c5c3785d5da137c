"""Whole conversations train: three turns over HTTP become one sequence of the real trainer, masks and all."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reef.ledger import batches
from reef.ledger.reading import open_reading
from reef.types import Sample
from tests.test_whole_house import MAX_GAP, chain, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ASKED = ("Start at 9. Subtract 4. Add 3.", "Now add 5.", "Now subtract 8.")
TURN_SCORES = (0.25, None, -0.5)
METRICS = Path(__file__).parents[1] / "docs" / "metrics.md"
METHODS = {
    "grpo": ("--recipe.config.group-size", "2"),
    "sao": ("--recipe.implementation", "sao", "--recipe.config.critic-warmup-steps", "0"),
}


def converse(service: Any, name: str) -> list[dict[str, Any]]:
    """Three turns as an agent has them, each with all messages before it; their receipts."""
    messages: list[dict[str, Any]] = []
    made = []
    for text in ASKED:
        messages.append({"role": "user", "content": text})
        body = {"messages": messages, "max_tokens": 24, "seed": len(name) + len(made)}
        answer = service.post("/v1/chat/completions", body, headers={"x-reef-session": name})
        assert answer.status_code == 200, answer.text
        messages.append(answer.json()["choices"][0]["message"])
        made.append(service.receipt(answer.headers["x-reef-agent-record-id"]))
    return made


def is_documented(name: str, method: str) -> bool:
    """Whether docs/metrics.md has a line for a metric."""
    lines = re.findall(r"^\| (`.*?`) \|", METRICS.read_text(encoding="utf-8"), re.MULTILINE)
    known = {known for line in lines for known in re.findall(r"`(.*?)`", line)}
    general = name.replace(f"{method}/", "METHOD/", 1)
    general = re.sub(r"^reward/.*", "reward/COMPONENT", re.sub(r"^dropped/.*", "dropped/REASON", general))
    return name in known or general in known


def assert_holds(sample: Sample, turns: list[dict[str, Any]]) -> None:
    """One sequence of everything, in which the sampled tokens of the turns train, and nothing else."""
    assert sample.tokens.tolist() == [*turns[-1]["prompt_token_ids"], *turns[-1]["token_ids"]]
    expected = np.zeros(len(sample.tokens), np.bool_)
    for turn, made in zip(sample.turns, turns, strict=True):
        assert turn.receipt_id == made["agent_record_id"]
        assert (turn.start, turn.end) == (
            len(made["prompt_token_ids"]),
            len(made["prompt_token_ids"]) + len(made["token_ids"]),
        )
        expected[turn.start : turn.end] = True
        assert sample.tokens[turn.start : turn.end].tolist() == made["token_ids"]
        assert sample.logprobs[turn.start : turn.end] == pytest.approx(made["logprobs"])
    assert sample.mask.tolist() == expected.tolist()
    between = sum(len(made["token_ids"]) for made in turns)
    assert 0 < between < len(sample.tokens) - len(turns[0]["prompt_token_ids"])  # what was asked later lies in between
    assert tuple(turn.reward for turn in sample.turns) == tuple(score or 0.0 for score in TURN_SCORES)


@pytest.mark.parametrize("method", METHODS)
def test_a_conversation_of_three_turns_trains_as_one_sequence(method: str, make_service: Callable[..., Any]) -> None:
    size = ("--recipe.scenario", "house", "--recipe.config.batch-size", "2")
    service = make_service(*size, *METHODS[method]).start()
    conversations = {name: converse(service, name) for name in ("one", "other one")}
    for name, score in zip(conversations, (1.0, 0.0), strict=True):
        body = {
            "agent_record_id": name,
            "references": [made["agent_record_id"] for made in conversations[name]],
            "reference_scores": TURN_SCORES,
            "rewards": {"right": score},
            "score": score,
            "group": "conversations",
        }
        stored = service.post("/reef/report", body)
        assert stored.status_code == 200, stored.text
    served(service, 1)
    release = chain(service)[1]
    with open_reading(f"sqlite:///{service.run_dir / 'ledger.db'}") as connection:
        lineage = service.get(f"/reef/scenarios/house/releases/{release['release_id']}/lineage").json()
        batch = batches.load(connection, lineage["batch_id"])
    assert [sample.report_id for sample in batch.samples] == list(conversations)
    for sample in batch.samples:
        assert_holds(sample, conversations[sample.report_id])
    metrics = release["metrics"]
    assert metrics["num_tokens"] == sum(int(sample.mask.sum()) for sample in batch.samples)
    assert 0 < metrics["train_rollout_logprob_abs_diff"] < metrics["train_rollout_logprob_abs_diff_max"] < MAX_GAP
    assert metrics["grad_norm"] > 0
    assert metrics[f"{method}/policy_lag_max"] == 0
    assert 0 < metrics[f"{method}/queue_age_s_max"] < 300
    assert (metrics["reward_mean"], metrics["reward/right"]) == (0.5, 0.5)
    assert metrics["tokens_per_s"] > 0
    assert 0 < metrics["async/trainer_wait_share"] <= 1
    assert {name for name in metrics if not is_documented(name, method)} == set()
    assert service.stop() == 0
