"""Which reports make a batch, and what SAO makes of them with a critic, with a prompt's past, and with neither."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from reef.methods.base import View, build
from reef.methods.gae import suffix_sums
from reef.methods.rewards import token_rewards
from reef.methods.sao import Sao
from reef.shelf import SaoConfig
from reef.types import Candidate, Sample, Selection, Turn
from tests.methods.samples import make_sample

NOW = 1000.0


def select(num: int, stale: Mapping[str, int | None] | None = None, **settings: object) -> Selection:
    pending = [Candidate(f"{k}", k, "one-prompt", 1.0, ("r0",), NOW) for k in range(num)]
    staleness = {c.report_id: 0 for c in pending} | dict(stale or {})
    return Sao({"batch_size": 3, "max_staleness": 1, **settings}).select(pending, staleness, NOW + 1e6)


def test_a_batch_is_the_oldest_rollouts_each_in_a_group_of_its_own() -> None:
    selection = select(5)
    assert [(pick.report_id, pick.group, pick.trains) for pick in selection.picks] == [
        *(("0", "0", True), ("1", "1", True), ("2", "2", True))
    ]
    assert (selection.drops, selection.next_deadline_at) == ((), None)


def test_a_batch_waits_until_it_is_full_however_long_that_takes() -> None:
    assert select(2) == Selection()
    assert select(0) == Selection()


def test_stale_and_abandoned_reports_are_dropped_and_their_places_taken() -> None:
    selection = select(6, stale={"0": 2, "1": 1, "2": None, "5": 9})
    assert [pick.report_id for pick in selection.picks] == ["1", "3", "4"]
    assert {drop.report_id: drop.reason for drop in selection.drops} == {"0": "stale", "2": "abandoned", "5": "stale"}
    waiting = select(3, stale={"0": 2})
    assert waiting.picks == ()
    assert [drop.report_id for drop in waiting.drops] == ["0"]


def test_only_gae_has_a_critic_and_only_a_running_mean_a_history() -> None:
    critic = Sao({}).critic
    assert critic is not None
    assert (critic.critic_updates, critic.critic_warmup_steps) == (2, 10)
    assert (Sao({}).history_window, Sao({}).uses_reference) == (0, False)
    past = Sao({"advantage": "running-mean", "baseline_window": 128})
    assert (past.critic, past.history_window) == (None, 128)
    assert Sao({"advantage": "reinforce++"}).critic is None


def viewed(before: Sequence[float], last: float = 0.0) -> View:
    """A critic that says `before` of each token, and `last` after the last one."""
    return View(values=np.array([*before[1:], last], np.float32))


# A prompt token stands before the vectors of METHODS 4.3, since no model samples the first token of a sequence.
def gae(
    values: Sequence[float], mask: str, reward: float, *, last: float = 0.0, truncated: bool = False, **settings: object
) -> tuple[list[float], list[float]]:
    sample = make_sample("a", "0" + mask, reward, truncated=truncated)
    method, view = Sao(settings), viewed([7.0, *values], last)
    (advantages,), (targets,) = method.advantages([sample], [view], {}), method.critic_targets([sample], [view])
    assert (advantages.dtype, targets.dtype) == (np.float32, np.float32)
    assert (advantages[0], targets[0]) == (0, 0)
    return advantages[1:].tolist(), targets[1:].tolist()


@pytest.mark.parametrize(
    ("values", "mask", "reward", "settings", "advantages", "targets"),
    [
        ([1, 2, 3], "111", 5, {"lambda_alpha": None}, [4, 3, 2], [5, 5, 5]),
        ([10, 99, 99, 4], "1001", 1, {"lambda_alpha": None}, [-9, 0, 0, -3], [1, 0, 0, 1]),
        ([1, 2, 3, 4], "1111", 2, {}, [1.37037037, 0.44444444, -0.66666667, -2], [2, 2, 2, 2]),
        ([0.5, 1.5], "11", -3, {}, [-2, -4.5], [-3, -3]),
        (
            *([1, -2, 3, 0.5], "1011", 4, {"lambda_length": "response"}),
            *([2.34722222, 0, 0.41666667, 3.5], [4, 0, 4, 4]),
        ),
    ],
)
def test_a_critic_that_speaks_after_each_token_gives_the_published_vectors(
    values: list[float],
    mask: str,
    reward: float,
    settings: dict[str, object],
    advantages: list[float],
    targets: list[float],
) -> None:
    found = gae(values, mask, reward, **settings)
    np.testing.assert_allclose(found, [advantages, targets], atol=1e-6)


def test_lambda_counts_sampled_tokens_or_all_from_the_first_to_the_last_of_them() -> None:
    # lambda 1 - 1 / 4.5 = 7/9 for three sampled tokens, 1 - 1 / 6 = 5/6 for the four from first to last
    for length, lam in (("action", 7 / 9), ("response", 5 / 6)):
        advantages, _ = gae([0, 0, 0, 0], "1011", 1, lambda_length=length)
        np.testing.assert_allclose(advantages, [lam**2, 0, lam, 1], rtol=1e-6)


def test_the_critic_s_lambda_is_its_own() -> None:
    advantages, targets = gae([1, 2, 3], "111", 5, lambda_alpha=None, critic_lambda=0.0)
    assert (advantages, targets) == ([4, 3, 2], [2, 3, 5])  # one step ahead: V of the next token, and the reward


def test_an_answer_that_length_cut_ends_there_or_goes_on_in_the_critic_s_eyes() -> None:
    ended = gae([1, 2], "11", 1, last=10, truncated=True)
    assert ended[1] == [1, 1]
    goes_on = gae([1, 2], "11", 1, last=10, truncated=True, bootstrap_truncated=True)
    assert goes_on[1] == [11, 11]
    assert goes_on[0][1] == 1 + 10 - 2
    assert gae([1, 2], "11", 1, last=10, bootstrap_truncated=True)[1] == [1, 1]  # it was not cut


def test_the_critic_s_values_must_have_come() -> None:
    with pytest.raises(ValueError, match="expected the critic's values of report a"):
        Sao({}).advantages([make_sample("a", "01")], [View()], {})
    with pytest.raises(ValueError, match="expected the critic's values of report a"):
        Sao({}).critic_targets([make_sample("a", "01")], [View()])


PLAIN = SaoConfig(advantage="reinforce++")


def test_the_outcome_is_paid_at_the_last_sampled_token_and_a_turn_s_score_at_its_own() -> None:
    turns = [Turn("first", 1, 3, reward=0.25), Turn("second", 4, 6, reward=-0.5)]
    sample = make_sample("a", "01101100", 2.0, turns=turns)  # trailing context after the last turn
    (paid,) = token_rewards([sample], [View()], PLAIN)
    assert paid.tolist() == [0, 0, 0.25, 0, 0, 1.5, 0, 0]


def test_each_branch_of_a_report_ends_in_its_outcome() -> None:
    samples = [make_sample("a", "0110", 1.0), make_sample("a", "00010", 1.0), make_sample("a", "000", 1.0)]
    paid = token_rewards(samples, [View()] * 3, PLAIN)
    assert [row.tolist() for row in paid] == [[0, 0, 1, 0], [0, 0, 0, 1, 0], [0, 0, 0]]


def test_the_overlong_penalty_is_part_of_the_outcome() -> None:
    config = SaoConfig(advantage="reinforce++", overlong_tokens=4, overlong_buffer=2)
    paid = token_rewards([make_sample("a", "0111"), make_sample("b", "01")], [View()] * 2, config)
    assert [row.tolist() for row in paid] == [[0, 0, 0, 0.5], [0, 1]]


def kl_case(mask: str, kl: Sequence[float], reward: float) -> tuple[Sample, View]:
    sample = make_sample("a", mask, reward, logprobs=kl)
    return sample, View(values=np.zeros(len(mask), np.float32), reference_logprobs=np.zeros(len(mask), np.float32))


def test_a_kl_in_the_reward_gives_the_published_advantages() -> None:
    sample, view = kl_case("0111", [0, 0.1, 0.2, 0.3], 1.0)
    method = Sao({"kl": "reward", "kl_coef": 0.05, "kl_estimator": "k1", "lambda_alpha": None})
    np.testing.assert_allclose(method.advantages([sample], [view], {}), [[0, 0.97, 0.975, 0.985]], atol=1e-6)
    np.testing.assert_allclose(method.critic_targets([sample], [view]), [[0, 0.97, 0.975, 0.985]], atol=1e-6)


@pytest.mark.parametrize(
    ("mask", "kl", "reward", "physical"),
    [
        ("01110", [0.2, 0.1, 0.3, 0.4, 0.5], 2, [1.86248304, 1.881296, 1.9104, 1.96, 0]),
        ("111", [0.4, 0.2, 0.1], -1, [-1.049701, -1.0199, -1.01]),
    ],
)
def test_reinforce_plus_plus_gives_the_published_returns_and_whitens_them(
    mask: str, kl: list[float], reward: float, physical: list[float]
) -> None:
    sample, view = kl_case(mask, kl, reward)
    settings = {"advantage": "reinforce++", "gamma": 0.99, "kl": "reward", "kl_coef": 0.1, "kl_estimator": "k1"}
    (paid,) = token_rewards([sample], [view], SaoConfig.model_validate(settings))
    np.testing.assert_allclose(suffix_sums(paid, 0.99), physical, atol=1e-7)
    # Where the sampled tokens lie together, that is the discount per sampled token too. Elsewhere nothing is trained.
    returns = np.array(physical)[sample.mask]
    (found,) = Sao(settings).advantages([sample], [view], {})
    whitened = (returns - returns.mean()) / np.sqrt(returns.var(ddof=1) + 1e-8)
    np.testing.assert_allclose(found[sample.mask], whitened, atol=1e-4)
    assert not found[~sample.mask].any()


def test_a_tool_result_does_not_discount_what_came_before_it() -> None:
    near = make_sample("a", "011", 1.0)
    far = make_sample("b", "01" + "0" * 300 + "1", 1.0)
    a, b = Sao({"advantage": "reinforce++", "gamma": 0.9}).advantages([near, far], [View()] * 2, {})
    np.testing.assert_array_equal(a[near.mask], b[far.mask])


def test_a_running_mean_compares_a_rollout_with_its_prompt_s_past() -> None:
    samples = [make_sample("a", "011", 1.0), make_sample("a", "001", 1.0), make_sample("b", "01", 0.0)]
    method = Sao({"advantage": "running-mean"})
    found = method.advantages(samples, [View()] * 3, {"a": [1.0, 0.5], "b": [1.0]})
    assert [row.tolist() for row in found] == [[0, 0.25, 0.25], [0, 0, 0.25], [0, -1]]
    new = method.advantages(samples, [View()] * 3, {})  # each against the other: two rollouts, not three samples
    assert [row.tolist() for row in new] == [[0, 1, 1], [0, 0, 1], [0, -1]]


@pytest.mark.parametrize("advantage", ["gae", "running-mean", "reinforce++"])
@pytest.mark.parametrize("normalize", ["none", "whiten"])
def test_a_sample_without_a_sampled_token_trains_nothing_and_spoils_nothing(advantage: str, normalize: str) -> None:
    samples = [make_sample("empty", "000", 5.0), make_sample("a", "011", 1.0), make_sample("b", "011", 0.0)]
    views = [View(values=np.array([0.5, 0.25, 0.125], np.float32))] * 3
    found = Sao({"advantage": advantage, "normalize": normalize}).advantages(samples, views, {})
    assert np.isfinite(np.concatenate(found)).all()
    assert not found[0].any()
    assert all(row[0] == 0 for row in found)
    assert Sao({"advantage": advantage}).token_weights(samples)[0].tolist() == [0, 0, 0]


def test_advantages_are_scaled_over_the_sampled_tokens_of_the_batch() -> None:
    samples = [make_sample("a", "011", 1.0), make_sample("b", "01", 0.0)]
    views = [View(values=np.array(v, np.float32)) for v in ([0.5, 0.25, 9], [0.75, 9])]
    raw = np.concatenate([[1 - 0.5, 1 - 0.25], [0 - 0.75]])  # lambda 1: outcome minus what was expected before
    found = Sao({"lambda_alpha": None, "normalize": "rms"}).advantages(samples, views, {})
    np.testing.assert_allclose([*found[0][1:], found[1][1]], raw / np.sqrt(np.mean(raw**2)), rtol=1e-6)
    found = Sao({"lambda_alpha": None, "normalize": "whiten"}).advantages(samples, views, {})
    np.testing.assert_allclose([*found[0][1:], found[1][1]], (raw - raw.mean()) / raw.std(ddof=1), rtol=1e-6)


def test_each_rollout_counts_alike_whatever_its_length() -> None:
    samples = [make_sample("a", "0111", group="a"), make_sample("b", "01", group="b")]
    found = Sao({}).token_weights(samples)
    np.testing.assert_allclose(np.concatenate(found), [0, *[1 / 6] * 3, 0, 1 / 2], rtol=1e-6)


def test_figures_are_over_rollouts() -> None:
    samples = [
        make_sample("a", "0111", 1.0, group="a"),
        make_sample("a", "01", 1.0, group="a", truncated=True),
        make_sample("b", "01", 0.0, group="b"),
    ]
    assert Sao({}).metrics(samples) == {
        "reward_mean": 0.5,
        "reward_std": 0.5,
        "response_length_mean": 2.5,
        "response_length_max": 4.0,
        "truncation_rate": 0.5,
    }


def test_a_method_is_built_from_a_batch_own_settings() -> None:
    method = build({"name": "sao", **SaoConfig(batch_size=5, dis_preset="coding").model_dump(mode="json")})
    assert isinstance(method, Sao)
    assert (method.config.batch_size, method.config.bounds) == (5, (0.8, 3.0))
