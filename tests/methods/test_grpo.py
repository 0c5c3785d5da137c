"""Which reports make a batch, and what GRPO makes of them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from reef.errors import ConfigError
from reef.methods.base import Tokens, View, build
from reef.methods.grpo import Grpo
from reef.methods.kl import Estimator, kl
from reef.methods.rewards import kl_estimate
from reef.shelf import GrpoConfig
from reef.types import Candidate, Sample, Selection, Turn
from tests.methods.samples import make_sample

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


def advantages(samples: list[Sample], views: list[View] | None = None, **settings: object) -> list[list[float]]:
    method = Grpo(settings)
    found = method.advantages(samples, views or [View()] * len(samples), {})
    assert all(row.dtype == np.float32 for row in found)
    return [row.tolist() for row in found]


def test_advantages_are_spread_over_sampled_tokens_only() -> None:
    found = advantages([sample("a", "g", 1), sample("b", "g", 0)])
    np.testing.assert_allclose(found, [[0, 0, 0.999998, 0.999998], [0, 0, -0.999998, -0.999998]], atol=1e-6)


def test_a_stale_member_counts_in_the_mean() -> None:
    samples = [sample("a", "g", 1), sample("b", "g", 0), sample("old", "g", 0, trains=False)]
    found = advantages(samples)
    assert found[0][-1] == pytest.approx((2 / 3) / np.sqrt(2 / 9 + 1e-6), rel=1e-6)


def test_a_report_with_several_samples_counts_once_in_the_mean() -> None:
    # slime 378: one session gave three samples, another one
    samples = [sample("a", "g", 1), sample("a", "g", 1), sample("a", "g", 1), sample("b", "g", 0)]
    found = advantages(samples)
    np.testing.assert_allclose([f[-1] for f in found], [1, 1, 1, -1], atol=1e-5)
    metrics = Grpo(GrpoConfig()).metrics(samples)
    assert (metrics["reward_mean"], metrics["response_length_mean"], metrics["truncation_rate"]) == (0.5, 4, 0.5)
    assert (metrics["response_length_max"], metrics["num_rollouts"]) == (6, 2)


def test_groups_of_one_are_counted_uninformative() -> None:
    samples = [sample("a", "g", 1), sample("b", "g", 0), sample("c", "h", 1)]
    assert not any(advantages(samples)[2])
    metrics = Grpo(GrpoConfig()).metrics(samples)
    assert metrics["informative_group_rate"] == 0.5
    assert metrics["num_groups"] == 2
    assert metrics["num_rollouts"] == 3
    assert metrics["reward_mean"] == pytest.approx(2 / 3)
    assert metrics["response_length_mean"] == 2
    assert metrics["truncation_rate"] == pytest.approx(1 / 3)


def test_the_groups_that_came_can_be_counted_from_the_batch_and_what_tied() -> None:
    """As docs/metrics.md says: of three groups two differ, and the batch's own rate is 1."""
    pending = candidates("a1 a0 b1 b1 c1 c0")
    selection = select(pending)
    kept = {pick.report_id for pick in selection.picks}
    metrics = Grpo(GrpoConfig()).metrics(
        [sample(c.report_id, c.group, c.score) for c in pending if c.report_id in kept]
    )
    tied = list(dropped(selection).values()).count("tied")
    assert (metrics["informative_group_rate"], metrics["num_rollouts"], tied) == (1.0, 4.0, 2)
    rate = metrics["informative_group_rate"] * metrics["num_rollouts"] / (metrics["num_rollouts"] + tied)
    assert rate == pytest.approx(2 / 3)


def four(rewards: list[float]) -> list[Sample]:
    """A group of rollouts, each of one prompt token and one sampled token."""
    return [make_sample(f"{k}", "01", reward) for k, reward in enumerate(rewards)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"std": "unbiased"}, [1.499997, -0.499999, -0.499999, -0.499999]),
        ({"advantage": "grpo"}, [1.732046, -0.577349, -0.577349, -0.577349]),
        ({"advantage": "dr-grpo"}, [0.75, -0.25, -0.25, -0.25]),
        ({"advantage": "rloo"}, [1, -1 / 3, -1 / 3, -1 / 3]),
        ({"advantage": "maxrl"}, [3, -1, -1, -1]),
        # whitened: distances of .75 and .25 from 0 with a variance of .25 over 4 tokens
        ({"advantage": "reinforce++-baseline"}, [1.5, -0.5, -0.5, -0.5]),
        ({"advantage": "dr-grpo", "normalize": "rms"}, [3**0.5, *[-1 / 3**0.5] * 3]),
        ({"advantage": "dr-grpo", "normalize": "whiten"}, [1.5, -0.5, -0.5, -0.5]),
    ],
)
def test_each_advantage_is_the_published_one(settings: dict[str, object], expected: list[float]) -> None:
    found = advantages(four([1, 0, 0, 0]), **settings)
    np.testing.assert_allclose(found, [[0, a] for a in expected], atol=1e-6)


ADVANTAGES = ["grpo", "dr-grpo", "rloo", "maxrl", "reinforce++-baseline"]


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_tied_groups_and_groups_of_one_teach_nothing(advantage: str) -> None:
    for rewards in ([1.0, 1.0, 1.0], [0.3333333, 0.3333334], [1.0]):
        assert not np.any(advantages(four(rewards), advantage=advantage))


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("normalize", ["none", "whiten"])
def test_a_rollout_without_a_sampled_token_counts_in_its_group_and_trains_nothing(
    advantage: str, normalize: str
) -> None:
    samples = [make_sample("a", "011", 1), make_sample("b", "010", 0), make_sample("empty", "000", 0)]
    found = advantages(samples, advantage=advantage, normalize=normalize)
    assert np.isfinite(np.concatenate(found)).all()
    assert found[2] == [0, 0, 0]
    assert found[0][1] > 0 > found[1][1]


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_advantages_do_not_hang_on_the_order_in_which_samples_lie(advantage: str) -> None:
    rng = np.random.default_rng(2)
    samples = [
        make_sample(f"{k}", rng.integers(0, 2, 7).tolist(), float(rng.normal()), group=f"g{k // 4}") for k in range(16)
    ]
    order = rng.permutation(16)
    plain = advantages(samples, advantage=advantage, normalize="whiten")
    moved = advantages([samples[k] for k in order], advantage=advantage, normalize="whiten")
    np.testing.assert_allclose(moved, [plain[k] for k in order], rtol=1e-6, atol=1e-7)


def test_scores_of_single_turns_are_not_compared() -> None:
    plain = [make_sample("a", "0110", 1), make_sample("b", "0110", 0)]
    with_turns = [replace(s, turns=(Turn("t", 1, 3, reward=5.0 * k),)) for k, s in enumerate(plain)]
    assert advantages(with_turns) == advantages(plain)


def test_samples_that_do_not_train_are_in_no_batch_statistics() -> None:
    samples = [make_sample("a", "01", 1), make_sample("b", "01", 0)]
    stale = [make_sample("c", "0" + "1" * 50, 1, group="h", trains=False), make_sample("d", "01", 0, group="h")]
    found = advantages([*samples, *stale], advantage="dr-grpo", normalize="rms")
    assert found[0][1] == pytest.approx(1)  # .5 in units of .5, whatever the 50 stale tokens
    cut = [replace(s, truncated=s.report_id == "a") for s in samples]
    assert advantages(cut, advantage="dr-grpo", normalize="whiten", overlong_filter=True)[1][1] == 0.0  # one token


def test_long_answers_are_compared_by_what_overlong_shaping_leaves_of_their_scores() -> None:
    samples = [make_sample("short", "0" + "1" * 50), make_sample("long", "0" + "1" * 90)]
    shaping = {"overlong_tokens": 100, "overlong_buffer": 20}
    found = advantages(samples, advantage="dr-grpo", **shaping)
    assert (found[0][1], found[1][1]) == (0.25, -0.25)  # 1 against 1 - .5
    assert not np.any(np.concatenate(advantages(samples, advantage="dr-grpo")))


def test_the_length_of_a_rollout_is_that_of_all_its_sequences() -> None:
    samples = [make_sample("a", "0" + "1" * 45), make_sample("a", "0" + "1" * 45), make_sample("b", "01")]
    found = advantages(samples, advantage="dr-grpo", overlong_tokens=100, overlong_buffer=20)
    assert (found[0][1], found[2][1]) == (-0.25, 0.25)


def kl_batch() -> tuple[list[Sample], list[View]]:
    """Two rollouts of equal score; of the first, sampled tokens lie .1, .2 and .3 above the reference."""
    samples = [make_sample("a", "0111", logprobs=[9, 0.5, 0.7, 0.9]), make_sample("b", "0111")]
    reference = np.array([7, 0.4, 0.5, 0.6], np.float32)
    return samples, [View(reference_logprobs=reference), View(reference_logprobs=np.zeros(4, np.float32))]


KL = {"kl": "reward", "kl_coef": 0.5, "kl_estimator": "k1"}


def test_a_kl_in_the_reward_charges_a_rollout_for_all_of_its_tokens() -> None:
    found = advantages(*kl_batch(), advantage="dr-grpo", **KL)
    np.testing.assert_allclose(found, [[0, *[-0.15] * 3], [0, *[0.15] * 3]], atol=1e-6)  # .5 * .6 / 2


def test_a_stale_member_which_the_reference_is_not_shown_counts_by_its_score() -> None:
    samples, views = kl_batch()
    stale = [samples[0], replace(samples[1], trains=False, logprobs=np.full(4, -9, np.float32))]
    for view in (View(), views[1]):
        found = advantages(stale, [views[0], view], advantage="dr-grpo", **KL)
        np.testing.assert_allclose(found[0], [0, *[-0.15] * 3], atol=1e-6)


def test_reinforce_with_a_group_s_baseline_charges_each_token_for_its_own() -> None:
    found = np.array(advantages(*kl_batch(), advantage="reinforce++-baseline", **KL))[:, 1:]
    raw = np.array([[-0.05, -0.1, -0.15], [0, 0, 0]])
    np.testing.assert_allclose(found, (raw - raw.mean()) / np.sqrt(raw.var(ddof=1) + 1e-8), atol=1e-5)


def test_a_kl_in_the_reward_needs_the_reference() -> None:
    method = Grpo(KL)
    assert method.uses_reference
    with pytest.raises(ValueError, match="expected the reference's log-probabilities of report a"):
        method.advantages(*(kl_batch()[0], [View()] * 2, {}))
    assert not Grpo({}).uses_reference
    assert Grpo({}).reference_path is None
    assert Grpo({**KL, "kl_reference": "models/frozen"}).reference_path == Path("models/frozen").absolute()


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [0.1, 0.2, 0.3]),
        ("k2", [0.005, 0.02, 0.045]),
        ("k3", [0.004837418, 0.018730753, 0.040818221]),
    ],
)
def test_rewards_and_losses_have_the_same_kl_and_it_is_the_published_one(
    estimator: Estimator, expected: list[float]
) -> None:
    logprobs, reference = [0.5, 0.7, 0.9], [0.4, 0.5, 0.6]
    np.testing.assert_allclose(kl_estimate(logprobs, reference, estimator), expected, atol=1e-9)
    rng = np.random.default_rng(3)
    logprobs, reference = [*rng.normal(size=64), -40.0, 0.0], [*rng.normal(size=64), 0.0, -40.0]
    in_loss = kl(torch.tensor(logprobs), torch.tensor(reference), torch.ones(66, dtype=torch.bool), estimator)
    np.testing.assert_allclose(kl_estimate(logprobs, reference, estimator), in_loss.numpy(), rtol=1e-4, atol=1e-6)


def test_weights_are_those_of_the_configured_aggregation_and_filter() -> None:
    samples = [make_sample("a", "011"), make_sample("b", "010", truncated=True)]
    found = Grpo({"aggregation": "token-sum", "aggregation_tokens": 4, "overlong_filter": True}).token_weights(samples)
    assert [row.tolist() for row in found] == [[0, 0.25, 0.25], [0, 0, 0]]


def test_the_loss_is_the_shelf_s_with_the_method_s_settings() -> None:
    tokens = Tokens(
        logprobs=torch.tensor([2.0, 2.0, 0.5]).log().requires_grad_(),
        engine_logprobs=torch.zeros(3),
        advantages=torch.tensor([2.0, -2.0, 2.0]),
        mask=torch.tensor([True, True, True]),
        sequences=torch.zeros(3, dtype=torch.int64),
        num_sequences=1,
        lags=torch.zeros(3),
    )
    loss, metrics = Grpo({"clip_high": 0.2}).token_loss(tokens)
    np.testing.assert_allclose(loss.detach(), [-2.4, 4.0, -1.0], rtol=1e-6)
    assert metrics["pg_clipfrac"].tolist() == [1, 0, 0]


def test_a_method_is_built_from_a_batch_own_settings() -> None:
    method = build({"name": "grpo", **GrpoConfig(group_size=3, batch_size=6).model_dump(mode="json")})
    assert isinstance(method, Grpo)
    assert method.config.group_size == 3
    with pytest.raises(ConfigError, match=r"unknown method 'ppo': expected grpo, sao or my_pkg\.file:Class"):
        build({"name": "ppo"})
