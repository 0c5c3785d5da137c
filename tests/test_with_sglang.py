"""The whole house on the real SGLang: it samples, gets releases sent and written, dies, and comes back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

GROUP, GROUPS = 4, 2
MAX_GAP = 1e-4  # between SGLang's and the trainer's log-probabilities, float32
WAIT_S = 240.0  # on two busy cores SGLang may take more than a minute to start
SETTINGS = (
    *("--inference.backend", "sglang"),
    *("--recipe.scenario", "house", "--recipe.config.group-size", str(GROUP)),
    *("--recipe.config.batch-size", str(GROUP * GROUPS)),
    *("--training.sync.transport", "distributed", "--training.sync.disk-every", "2"),
    *("--training.sync.bucket-bytes", "200000"),
    *("--inference.pause-wait-s", "200"),
)


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {WAIT_S:g} s"
        time.sleep(0.05)
    return found


def send_round(service: Any, name: str) -> str:
    """Graded answers for one release; the receipt of one of them."""
    for group in range(GROUPS):
        answer = service.chat(f"Start at 9. Add {group}. {name}", n=GROUP).json()
        for choice in answer["choices"]:
            body = {
                "references": [choice["reef_agent_record_id"]],
                "score": float(choice["index"] % 2),
                "group": f"{name}-{group}",
            }
            response = service.post("/reef/report", body)
            assert response.status_code == 200, response.text
    receipt: str = answer["choices"][0]["reef_agent_record_id"]
    return receipt


def served(service: Any, number: int) -> dict[str, Any]:
    """Release `number`, once it is what the engine answers with."""

    def newest() -> Any:
        releases = service.get("/reef/scenarios/house/releases").json()["releases"]
        return next((release for release in releases if release["release_id"].endswith(f"{number:06d}")), None)

    release: dict[str, Any] = until(newest, f"release {number}")
    until(lambda: service.status()["scenario"]["served"] == release["release_id"], f"{release['release_id']} served")
    return release


def test_sglang_learns_is_killed_and_comes_back_with_the_head_that_was_on_no_disk(make_service: Any) -> None:
    service = make_service(*SETTINGS)
    service.start(timeout_s=WAIT_S)
    try:
        first = send_round(service, "one")
        release = served(service, 1)
        assert not release["restorable"]
        assert release["metrics"]["train_rollout_logprob_abs_diff_max"] < MAX_GAP
        assert service.receipt(first)["exact"]
        engine = service.status()["engines"][0]
        assert engine["build"].startswith("sglang-0.5.23")
        load = engine["last_load"]
        assert load["size_bytes"] > 0
        assert 0 < load["transfer_s"] <= load["pause_s"] <= load["total_s"]

        scheduler = next(process for process in service.processes() if "sglang::scheduler" in process.name())
        scheduler.kill()
        answer = until(lambda: (found := service.chat("2+3=")).status_code == 200 and found, "it answers again")
        assert answer.headers["x-reef-release-id"] == release["release_id"]
        assert served(service, 1)["restorable"]  # it was written for the restart

        send_round(service, "two")
        assert served(service, 2)["restorable"]
        assert service.stop() == 0
    finally:
        service.end()
