"""Which reports make a batch, and what GRPO makes of them."""

from collections.abc import Mapping

import numpy as np
import pytest

from reef.config import GrpoConfig
from reef.errors import ConfigError
from reef.methods.base import build
from reef.methods.grpo import Grpo
from reef.types import Candidate, Sample, Selection

NOW = 1000.0


def candidates(spec: str, start: float = NOW, every_s: float = 0.0) -> list[Candidate]:
    """One per word: `a1` is key a with reward 1; ids are the word's position."""
    return [
        Candidate(
            report_id=f"{position}",
            seq=position,
            group=word[0],
            score=float(word[1:]),
            releases=("r0",),
            accepted_at=start + position * every_s,
        )
        for position, word in enumerate(spec.split())
    ]


def select(
    pending: list[Candidate],
    *,
    group: int = 2,
    batch: int = 4,
    stale: Mapping[str, int | None] | None = None,
    now: float = NOW,
    **settings: object,
) -> Selection:
    config = GrpoConfig.model_validate({"group_size": group, "batch_size": batch, **settings})
    staleness = {c.report_id: 0 for c in pending} | dict(stale or {})
    return Grpo(config).select(pending, staleness, now)


def picked(selection: Selection) -> str:
    return " ".join(pick.report_id + ("" if pick.trains else "!") for pick in selection.picks)


def dropped(selection: Selection) -> dict[str, str]:
    return {drop.report_id: drop.reason for drop in selection.drops}


def test_groups_are_taken_whole_and_in_the_order_in_which_they_closed() -> None:
    selection = select(candidates("a1 b1 c0 b0 c1 a0", every_s=1), now=NOW + 10)
    assert picked(selection) == "1 3 2 4"  # b closed first, then c; a is left for the next batch
    assert not selection.drops


def test_a_batch_waits_until_its_last_place_is_filled() -> None:
    assert picked(select(candidates("a1 a0 b1"))) == ""
    assert picked(select(candidates("a1 a0 b1 b0"))) == "0 1 2 3"


def test_a_key_opens_its_next_group_when_one_is_full() -> None:
    selection = select(candidates("a1 a0 a1 a0"))
    assert picked(selection) == "0 1 2 3"
    groups = [pick.group for pick in selection.picks]
    assert groups == [groups[0]] * 2 + [groups[2]] * 2
    assert groups[0] != groups[2]


def test_a_late_member_does_not_reopen_a_group_that_its_deadline_closed() -> None:
    pending = candidates("a1 a0 a0 a1", every_s=200)  # the third comes at 400 s, the deadline is 300 s
    selection = select(pending, group=4, batch=4, now=NOW + 600)
    assert picked(selection) == "0 1"


@pytest.mark.parametrize(
    ("arrived", "expected", "drops"),
    [
        (7, "0 1 2 3 4 5 6", {}),  # NeMo 2700, and AReaL 1559: one of the group failed
        (2, "0 1", {}),
        (1, "", {"0": "group_incomplete"}),
    ],
)
def test_after_its_deadline_a_group_of_two_or_more_trains(arrived: int, expected: str, drops: dict[str, str]) -> None:
    pending = candidates(" ".join(f"a{i % 2}" for i in range(arrived)))
    before = select(pending, group=8, batch=8, now=NOW + 299)
    assert (picked(before), dropped(before), before.next_deadline_at) == ("", {}, NOW + 300)
    after = select(pending, group=8, batch=8, now=NOW + 300)
    assert (picked(after), dropped(after), after.next_deadline_at) == (expected, drops, None)


def test_a_batch_is_ready_as_soon_as_another_full_group_would_not_fit() -> None:
    pending = candidates("a1 a0 a1 b1 b0")  # groups of 3: a is full, b closes with 2 by its deadline
    assert picked(select(pending, group=3, batch=6, now=NOW + 299)) == ""
    assert picked(select(pending, group=3, batch=6, now=NOW + 300)) == "0 1 2 3 4"


def test_a_batch_never_exceeds_its_size() -> None:
    pending = candidates(" ".join(f"{key}1 {key}0 {key}1" for key in "abcdefgh"))
    assert len(select(pending, group=3, batch=9).picks) == 9


def test_the_next_deadline_is_the_earliest_of_the_open_groups() -> None:
    selection = select(candidates("a1 b1 b0 c1", every_s=5), group=2, batch=8, now=NOW + 20)
    assert selection.next_deadline_at == NOW + 300


def test_a_stale_member_counts_in_its_group_and_contributes_no_tokens() -> None:
    # miles 1829: max-staleness 1, one sample three releases old
    selection = select(candidates("a1 a0 b1 b0"), stale={"1": 3}, max_staleness=1)
    assert picked(selection) == "0 1! 2 3"
    assert not selection.drops


def test_a_group_of_stale_members_alone_is_dropped_and_the_batch_refilled() -> None:
    stale = {"0": 5, "1": 9}
    assert dropped(select(candidates("a1 a0 b1 b0"), stale=stale)) == {"0": "stale", "1": "stale"}
    assert picked(select(candidates("a1 a0 b1 b0"), stale=stale)) == ""
    assert picked(select(candidates("a1 a0 b1 b0 c1 c0"), stale=stale)) == "2 3 4 5"


def test_stale_members_do_not_fill_a_batch() -> None:
    spec = "a1 a0 a1 b1 b0 b1"
    half = {"0": 9, "1": 9, "3": 9, "4": 9}
    assert picked(select(candidates(spec), group=3, batch=6, stale=half)) == ""
    more = select(candidates(spec + " c1 c0 c1"), group=3, batch=6, stale=half)
    assert picked(more) == "0! 1! 2 3! 4! 5 6 7 8"


def test_reports_of_an_abandoned_branch_are_dropped_and_their_places_taken() -> None:
    selection = select(candidates("a1 a0 a1 b1 b0"), stale={"0": None})
    assert dropped(selection) == {"0": "abandoned"}
    assert picked(selection) == "1 2 3 4"


def test_tied_groups_are_dropped_or_kept_as_configured() -> None:
    tied = candidates("a0.3333333 a0.3333334 b1 b0 c1 c0")
    assert dropped(select(tied)) == {"0": "tied", "1": "tied"}
    assert picked(select(tied)) == "2 3 4 5"
    assert picked(select(tied, filter_tied=False)) == "0 1 2 3"


def test_when_every_sample_is_filtered_there_is_no_batch() -> None:
    selection = select(candidates("a1 a1 b0 b0"))  # prime-rl 1563
    assert picked(selection) == ""
    assert set(dropped(selection).values()) == {"tied"}
    assert select([]) == Selection()


def sample(report: str, group: str, reward: float, size: int = 4, *, trains: bool = True) -> Sample:
    return Sample(
        report_id=report,
        receipt_id=report,
        group=group,
        reward=reward,
        tokens=np.arange(size, dtype=np.int32),
        mask=np.arange(size) >= 2,
        logprobs=np.zeros(size, np.float32),
        temperature=1.0,
        trains=trains,
        truncated=report == "a",
    )


def test_advantages_are_spread_over_sampled_tokens_only() -> None:
    found = Grpo(GrpoConfig()).advantages([sample("a", "g", 1), sample("b", "g", 0)])
    np.testing.assert_allclose(found, [[0, 0, 0.999998, 0.999998], [0, 0, -0.999998, -0.999998]], atol=1e-6)


def test_a_stale_member_counts_in_the_mean() -> None:
    samples = [sample("a", "g", 1), sample("b", "g", 0), sample("old", "g", 0, trains=False)]
    found = Grpo(GrpoConfig()).advantages(samples)
    assert found[0][-1] == pytest.approx((2 / 3) / np.sqrt(2 / 9 + 1e-6), rel=1e-6)


def test_a_report_with_several_samples_counts_once_in_the_mean() -> None:
    # slime 378: one session gave three samples, another one
    samples = [sample("a", "g", 1), sample("a", "g", 1), sample("a", "g", 1), sample("b", "g", 0)]
    found = Grpo(GrpoConfig()).advantages(samples)
    np.testing.assert_allclose([f[-1] for f in found], [1, 1, 1, -1], atol=1e-5)
    metrics = Grpo(GrpoConfig()).metrics(samples)
    assert (metrics["reward_mean"], metrics["response_length_mean"], metrics["truncation_rate"]) == (0.5, 4, 0.5)


def test_groups_of_one_are_counted_uninformative() -> None:
    grpo = Grpo(GrpoConfig())
    samples = [sample("a", "g", 1), sample("b", "g", 0), sample("c", "h", 1)]
    assert not grpo.advantages(samples)[2].any()
    metrics = grpo.metrics(samples)
    assert metrics["informative_group_rate"] == 0.5
    assert metrics["num_groups"] == 2
    assert metrics["reward_mean"] == pytest.approx(2 / 3)
    assert metrics["response_length_mean"] == 2
    assert metrics["truncation_rate"] == pytest.approx(1 / 3)


def test_a_method_is_built_from_a_batch_own_settings() -> None:
    method = build({"name": "grpo", **GrpoConfig(group_size=3, batch_size=6).model_dump(mode="json")})
    assert isinstance(method, Grpo)
    assert method.config.group_size == 3
    with pytest.raises(ConfigError, match="unknown method 'sao'"):
        build({"name": "sao"})
