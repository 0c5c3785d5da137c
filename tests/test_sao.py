"""SAO as a user has it: a real service with a critic beside the policy, killed, rolled back, replayed and switched."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SAO = (
    *("--recipe.scenario", "s", "--recipe.implementation", "sao", "--recipe.config.batch-size", "4"),
    *("--recipe.config.critic-warmup-steps", "2", "--training.checkpoint-every", "100"),
)


def reef(service: Any, *words: str, check: int = 0) -> str:
    """A command on the service's run directory; what it printed. `check`: the exit status that it must have."""
    command = [sys.executable, "-m", "reef", *words, "--reef.run-dir", str(service.run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == check, done.stdout + done.stderr
    return done.stdout + done.stderr


def report(service: Any, seeds: range) -> list[str]:
    """Graded answers of single rollouts, none of them in a group; their receipts."""
    found = []
    for seed in seeds:
        answer = service.chat(f"{seed}: 2+3=", seed=seed, max_tokens=8).json()
        receipt = answer["choices"][0]["reef_agent_record_id"]
        body = {"references": [receipt], "score": seed % 2, "agent_record_id": f"report-{receipt}"}
        assert service.post("/reef/report", body).status_code == 200
        found.append(receipt)
    return found


def until(true: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + 180
    while not true():
        assert time.monotonic() < deadline, f"not within 180 s: {what}"
        time.sleep(0.05)


def releases(service: Any) -> list[dict[str, Any]]:
    """Oldest first."""
    found: list[dict[str, Any]] = service.get("/reef/scenarios/s/releases").json()["releases"]
    return found[::-1]


def train(service: Any, number: int) -> dict[str, Any]:
    """The link that a batch of single rollouts makes, once it is there and, where weights changed, served."""
    report(service, range(4 * number, 4 * number + 4))
    until(lambda: len(releases(service)) > number, f"release {number}")
    made = releases(service)[number]
    if made["operation"] == "train":
        until(lambda: service.status()["scenario"]["served"] == made["release_id"], f"{made['release_id']} served")
    return made


@pytest.fixture
def service(make_service: Callable[..., Any]) -> Iterator[Any]:
    made = make_service(*SAO)
    yield made
    made.end()


def test_a_critic_warms_up_is_killed_and_replayed_rolled_back_to_and_left_behind(service: Any, tmp_path: Path) -> None:
    service.start()
    base = releases(service)[0]
    first, second = train(service, 1), train(service, 2)
    assert [link["operation"] for link in (first, second)] == ["critic-only", "critic-only"]
    assert {first["content_id"], second["content_id"]} == {base["content_id"]}
    assert service.status()["scenario"]["served"] == base["release_id"]  # nothing was loaded
    assert service.chat("2+3=", max_tokens=4).headers["x-reef-release-id"] == base["release_id"]
    assert service.chat("2+3=", max_tokens=4, headers={"x-reef-release": second["release_id"]}).status_code == 200
    assert first["metrics"]["sao/actor_trained"] == 0.0
    assert "grad_norm" not in first["metrics"]

    third = train(service, 3)
    assert (third["operation"], third["policy_version"]) == ("train", 1)
    assert third["content_id"] != base["content_id"]
    for name in ("critic/loss", "critic/explained_variance", "critic/grad_norm", "entropy", "pg_clipfrac", "grad_norm"):
        assert name in third["metrics"], name
    assert third["metrics"]["sao/critic_updates"] == 2.0
    assert third["metrics"]["sao/policy_lag_max"] == 0.0  # what the base sampled before the critic's steps is not older
    assert third["metrics"]["train_rollout_logprob_abs_diff_max"] < 1e-4

    # A kill with no checkpoint: policy and critic are made again from the ledger, and go on as if nothing had been.
    service.kill_9()
    service.start()
    assert releases(service)[-1]["release_id"] == third["release_id"]
    assert not any(link["replay_diverged"] for link in releases(service))
    fourth = train(service, 4)

    # From the ledger alone: the critic's steps too.
    said = reef(service, "replay", "s", "--directory", str(tmp_path / "again"))
    assert [line.split()[2] for line in said.splitlines()[1:5]] == ["equal"] * 4, said
    assert "critic-only" in reef(service, "releases", "s")

    # Back to where the critic had learned once: the next step is its second one, again.
    assert reef(service, "rollback", first["release_id"]).endswith("(rollback), step 1, released\n")
    again = train(service, 6)
    assert (again["operation"], again["step"], again["policy_version"]) == ("critic-only", 2, 0)
    assert fourth["policy_version"] == 2
    assert "0 findings" in reef(service, "doctor", "--ledger")
    assert service.stop() == 0

    # Another method in the same run directory: the policy is there, and the critic's steps stay in the chain.
    service.settings = ("--recipe.scenario", "s", "--recipe.config.group-size", "2", "--recipe.config.batch-size", "4")
    service.start()
    assert len(releases(service)) == 7
    assert service.stop() == 0


def test_a_method_of_ones_own_trains_by_its_dotted_path(make_service: Callable[..., Any]) -> None:
    own = ("--recipe.scenario", "s", "--recipe.implementation", "tests.methods.own_method:Imitate")
    service = make_service(*own, "--recipe.config.batch-size", "2").start()  # two of four have scored 1
    made = train(service, 1)
    assert made["operation"] == "train"
    assert made["metrics"]["imitated_logprob"] < 0
    assert made["metrics"]["Imitate/policy_lag_max"] == 0
    assert "own_method:Imitate" in service.get("/reef/scenarios/s/contract").text
    assert service.stop() == 0
