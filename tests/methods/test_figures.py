"""A batch's own figures: ages, waits and the parts of rewards, one rollout for each report."""

from typing import Any

import numpy as np

from reef.methods.figures import batch_figures
from reef.types import Batch, Sample

NOW = 1_700_000_000.0


def sample(report: str = "a", **changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "report_id": report,
        "receipt_id": f"{report}-receipt",
        "group": "g",
        "reward": 1.0,
        "tokens": np.array([1, 2], np.int32),
        "mask": np.array([False, True]),
        "logprobs": np.array([0.0, -0.5], np.float32),
        "temperature": 1.0,
        "accepted_at": NOW,
    }
    return Sample(**fields | changes)


def figures(*samples: Sample, name: str = "grpo", reserved_at: float = NOW) -> dict[str, float]:
    return batch_figures(name, Batch("b", "s", 1, 1, "r0", samples, ((0,),), {}, reserved_at))


def test_ages_and_waits_have_a_mean_and_a_largest_under_the_methods_name() -> None:
    found = figures(
        sample("a", lag=3, accepted_at=NOW - 1.0),
        sample("b", lag=0, accepted_at=NOW - 4.0),
        sample("c", lag=0, accepted_at=NOW - 1.0),
        name="sao",
    )
    assert found == {
        "sao/policy_lag_mean": 1.0,
        "sao/policy_lag_max": 3.0,
        "sao/queue_age_s_mean": 2.0,
        "sao/queue_age_s_max": 4.0,
    }


def test_figures_of_a_class_of_your_own_bear_its_name() -> None:
    assert figures(sample(lag=2), name="my_pkg.file:Patient")["Patient/policy_lag_max"] == 2.0


def test_a_report_of_several_sequences_is_one_rollout_as_old_as_its_oldest() -> None:
    parts = {"right": 1.0}
    found = figures(
        sample("a", lag=1, components=parts),
        sample("a", lag=4, components=parts),
        sample("b", lag=0, components={"right": 0.0}),
    )
    assert (found["grpo/policy_lag_mean"], found["grpo/policy_lag_max"]) == (2.0, 4.0)
    assert found["reward/right"] == 0.5


def test_a_stale_member_has_no_age_and_yet_a_reward() -> None:
    found = figures(sample("a", components={"right": 1.0}), sample("b", lag=9, trains=False, components={"right": 0.0}))
    assert (found["grpo/policy_lag_max"], found["reward/right"]) == (0.0, 0.5)


def test_where_nothing_trains_there_are_no_ages() -> None:
    assert figures(sample(trains=False, lag=9)) == {}


def test_a_part_that_some_reports_do_not_name_is_the_mean_of_the_others() -> None:
    found = figures(sample("a", components={"tidy": 0.5, "right": 1.0}), sample("b", components={"right": 0.0}))
    assert {name: value for name, value in found.items() if name.startswith("reward/")} == {
        "reward/right": 0.5,
        "reward/tidy": 0.5,
    }
