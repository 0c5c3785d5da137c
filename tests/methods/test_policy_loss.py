"""The policy's loss as settings put it together: what each adds, and what holds for all of them."""

from dataclasses import replace
from math import exp, log
from typing import Any

import numpy as np
import pytest
import torch

from reef.methods.base import Tokens
from reef.methods.policy_loss import policy_loss
from reef.shelf import GrpoConfig, SaoConfig, ShelfConfig

SETTINGS: dict[str, dict[str, Any]] = {
    "ppo-clip": {},
    "dual-clip": {"dual_clip": 3.0},
    "old-trainer": {"old_policy": "trainer", "correction": "tis"},
    "gspo": {"ratio": "gspo", "clip_low": 0.3, "clip_high": 0.4},
    "cispo": {"ratio": "cispo"},
    "sapo": {"ratio": "sapo"},
    "dis": {"ratio": "dis"},
    "dis-coding": {"ratio": "dis", "dis_preset": "coding"},
    "decoupled": {"ratio": "decoupled", "proximal": "trainer"},
    "decoupled-interpolated": {"ratio": "decoupled", "proximal": "interpolated", "behaviour_cap": 1.5},
    "dppo": {"ratio": "dppo"},
    "none": {"ratio": "none"},
    "tis": {"ratio": "none", "correction": "tis"},
    "icepop": {"old_policy": "trainer", "correction": "icepop"},
    "mis-token": {"old_policy": "trainer", "correction": "mis", "correction_veto": 0.2},
    "mis-sequence": {
        **{"ratio": "none", "correction": "mis", "correction_level": "sequence"},
        **{"correction_low": 1e-4, "correction_high": 1e4, "correction_veto": 0.1},
    },
    "mis-geometric": {"ratio": "none", "correction": "mis", "correction_level": "geometric"},
    "sequence-mask": {"ratio": "dis", "sequence_mask": 0.05},
    "kl-k1": {"kl": "loss", "kl_coef": 0.1, "kl_estimator": "k1"},
    "kl-k2": {"kl": "loss", "kl_coef": 0.1, "kl_estimator": "k2"},
    "kl-k3": {"ratio": "gspo", "sequence_mask": 0.05, "kl": "loss", "kl_coef": 0.1, "kl_estimator": "k3"},
}
EACH = pytest.mark.parametrize("name", SETTINGS)
FLOATS = ("logprobs", "engine_logprobs", "advantages", "lags", "reference_logprobs")
EXTREMES = [1e30, -1e30, float("inf"), -float("inf"), float("nan")]


def config(name: str) -> ShelfConfig:
    return GrpoConfig.model_validate(SETTINGS[name])


def make_tokens(rows: int = 4, length: int = 12, seed: int = 0) -> Tokens:
    """Random sequences, one a row, of which some positions are masked."""
    random = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(rows, length, generator=random) * scale

    logprobs = -1.5 + normal(0.4)
    return Tokens(
        logprobs=logprobs,
        engine_logprobs=logprobs + normal(1.0) + torch.linspace(-1.0, 1.0, rows)[:, None],
        advantages=normal(1.0),
        mask=torch.rand(rows, length, generator=random) > 0.25,
        sequences=torch.arange(rows)[:, None].expand(rows, length),
        num_sequences=rows,
        lags=torch.arange(rows, dtype=torch.float32)[:, None].expand(rows, length),
        reference_logprobs=logprobs + normal(0.3),
    )


def run(shelf: ShelfConfig, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Loss, gradient of its sum by the log-probabilities, metrics."""
    leaf = tokens.logprobs.clone().requires_grad_()
    loss, metrics = policy_loss(shelf, replace(tokens, logprobs=leaf))
    loss.sum().backward()
    assert leaf.grad is not None
    for value in metrics.values():
        assert value.shape == loss.shape
        assert value.dtype == torch.float32
        assert not value.requires_grad
    return loss.detach(), leaf.grad, metrics


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for the last bit, which torch's vectorised sigmoid rounds by where a number stands in memory."""
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)


def ones(size: int = 1, **values: Any) -> Tokens:
    """One sequence whose tokens all count, with log-probabilities of 0 but where `values` says otherwise."""
    zeros = torch.zeros(1, size)
    plain = Tokens(
        logprobs=zeros,
        engine_logprobs=zeros,
        advantages=torch.ones(1, size),
        mask=torch.ones(1, size, dtype=torch.bool),
        sequences=torch.zeros(1, size, dtype=torch.int64),
        num_sequences=1,
        lags=zeros,
    )
    return replace(plain, **{name: torch.tensor([value]) for name, value in values.items()})


def test_with_the_defaults_it_is_bit_by_bit_the_loss_of_releases_made_before_the_shelf() -> None:
    tokens = make_tokens(64, 257)
    extreme = torch.tensor([30.0, -30.0, 0.0, 90.0]).repeat(64, 65)[:, :257]
    tokens = replace(tokens, logprobs=torch.where(tokens.advantages.abs() > 2, extreme, tokens.logprobs))
    loss, gradient, metrics = run(GrpoConfig(), tokens)

    leaf = tokens.logprobs.clone().requires_grad_()
    log_ratio = torch.where(tokens.mask, leaf - tokens.engine_logprobs, torch.zeros_like(leaf))
    ratio = log_ratio.clamp(-20.0, 20.0).exp()
    gains = torch.where(tokens.mask, tokens.advantages, torch.zeros_like(leaf))
    plain, clipped = -ratio * gains, -ratio.clamp(1.0 - 0.2, 1.0 + 0.28) * gains
    before = torch.maximum(plain, clipped)
    before.sum().backward()
    assert torch.equal(loss, before.detach())
    assert leaf.grad is not None
    assert torch.equal(gradient, leaf.grad)
    assert torch.equal(metrics["ratio"], ratio.detach())
    assert torch.equal(metrics["pg_clipfrac"], (clipped > plain).float())
    assert set(metrics) == {"ratio", "pg_clipfrac", "effective_token_rate"}


def test_sao_s_defaults_are_dis_with_the_paper_s_bounds_for_reasoning() -> None:
    loss, gradient, metrics = run(
        SaoConfig(), ones(5, logprobs=[0.0, 0.4, -0.7, 1.5, 0.2], engine_logprobs=[0.0, -1.0, 0.5, -2.0, 0.1])
    )
    np.testing.assert_allclose(gradient[0], [-1, -4.0552, 0, 0, -1.105171], rtol=2e-6)
    assert metrics["pg_clipfrac"].tolist() == [[0, 0, 1, 1, 0]]
    assert metrics["effective_token_rate"].tolist() == [[1, 1, 0, 0, 1]]
    assert loss[0, 2:4].tolist() == [0.0, 0.0]


REJECT = (
    *("dis", "dis-coding", "decoupled", "decoupled-interpolated", "dppo"),
    *("icepop", "mis-token", "mis-sequence", "mis-geometric"),
)


@EACH
def test_on_these_tokens_each_setting_has_something_to_do(name: str) -> None:
    """So that the tests below, of what changes nothing, are no tests of zeros."""
    tokens = make_tokens()
    loss, gradient, metrics = run(config(name), tokens)
    assert gradient.count_nonzero() >= 5
    assert loss[tokens.mask].isfinite().all()
    num_effective = metrics["effective_token_rate"].sum()
    if name in REJECT or config(name).sequence_mask is not None:
        assert 5 <= num_effective < tokens.mask.sum()
    else:
        assert num_effective == tokens.mask.sum()
    if name not in ("ppo-clip", "dual-clip"):
        assert not torch.equal(gradient, run(config("ppo-clip"), tokens)[1])


@EACH
def test_padding_changes_nothing(name: str) -> None:
    tokens = make_tokens()
    num_rows, length = tokens.mask.shape
    padded: dict[str, Any] = {}
    for field in FLOATS:
        wide = torch.full((num_rows + 1, length + 5), float("nan"))
        wide[:num_rows, :length] = getattr(tokens, field)
        padded[field] = wide
    mask = torch.zeros(num_rows + 1, length + 5, dtype=torch.bool)
    mask[:num_rows, :length] = tokens.mask
    sequences = torch.full(mask.shape, -7)
    sequences[:num_rows, :length] = tokens.sequences
    wide_tokens = replace(tokens, mask=mask, sequences=sequences, **padded)

    expected, found = run(config(name), tokens), run(config(name), wide_tokens)
    for before, after in zip(expected[:2], found[:2], strict=True):
        assert_same(after[:num_rows, :length], before)
        assert after.count_nonzero() == before.count_nonzero()
    for metric, before in expected[2].items():
        assert_same(found[2][metric][:num_rows, :length], before)


@EACH
def test_sequences_give_the_same_in_one_microbatch_in_two_or_end_to_end(name: str) -> None:
    tokens = make_tokens()
    whole = run(config(name), tokens)[:2]

    def part(rows: slice) -> Tokens:
        arrays = {field: getattr(tokens, field)[rows] for field in (*FLOATS, "mask")}
        return replace(tokens, **arrays, sequences=tokens.sequences[rows] - rows.start, num_sequences=2)

    halves = [run(config(name), part(slice(start, start + 2)))[:2] for start in (0, 2)]
    row = {field: getattr(tokens, field).reshape(1, -1) for field in (*FLOATS, "mask", "sequences")}
    end_to_end = run(config(name), replace(tokens, **row))[:2]
    for i, expected in enumerate(whole):
        assert_same(torch.cat([half[i] for half in halves]), expected)
        assert_same(end_to_end[i].reshape(expected.shape), expected)


@EACH
@pytest.mark.parametrize("extreme", EXTREMES)
def test_what_stands_at_masked_positions_changes_nothing(name: str, extreme: float) -> None:
    tokens = make_tokens()
    expected = run(config(name), tokens)
    for field in FLOATS:
        spoilt = torch.where(tokens.mask, getattr(tokens, field), torch.full(tokens.mask.shape, extreme))
        loss, gradient, metrics = run(config(name), replace(tokens, **{field: spoilt}))
        assert torch.equal(loss, expected[0])
        assert torch.equal(gradient, expected[1])
        assert (loss[~tokens.mask] == 0).all()
        assert (gradient[~tokens.mask] == 0).all()
        for metric, value in metrics.items():
            assert torch.equal(value, expected[2][metric])


@EACH
@pytest.mark.parametrize("num_sequences", [0, 1])
def test_all_masked_is_all_zero(name: str, num_sequences: int) -> None:
    nan = torch.full((1, 3), float("nan"))
    tokens = Tokens(
        logprobs=nan,
        engine_logprobs=nan,
        advantages=nan,
        mask=torch.zeros(1, 3, dtype=torch.bool),
        sequences=torch.zeros(1, 3, dtype=torch.int64),
        num_sequences=num_sequences,
        lags=nan,
        reference_logprobs=nan,
    )
    loss, gradient, metrics = run(config(name), tokens)
    assert loss.tolist() == gradient.tolist() == [[0.0] * 3]
    assert all(value.isfinite().all() for value in metrics.values())


@EACH
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
def test_loss_and_gradient_are_finite_at_an_extreme_log_ratio(name: str, advantage: float, log_ratio: float) -> None:
    for logprob, engine in ((log_ratio, 0.0), (0.0, -log_ratio)):
        tokens = ones(
            2, logprobs=[logprob, -1.0], engine_logprobs=[engine, -1.0], advantages=[advantage] * 2, lags=[3.0] * 2
        )
        tokens = replace(tokens, reference_logprobs=torch.tensor([[0.0, -1.0]]))
        loss, gradient, metrics = run(config(name), tokens)
        assert loss.isfinite().all()
        assert gradient.isfinite().all()
        assert all(value.isfinite().all() for value in metrics.values())


def test_against_the_trainer_s_own_policy_the_ratio_is_one_and_the_metric_still_the_engine_s() -> None:
    tokens = ones(2, logprobs=[-1.0, -1.0], engine_logprobs=[-2.0, -1.0], advantages=[2.0, -3.0])
    loss, gradient, metrics = run(config("old-trainer"), tokens)
    assert loss.tolist() == [[-4.0, 3.0]]  # of engine and trainer tis weighs the first token with 2 at most
    assert gradient.tolist() == [[-4.0, 3.0]]
    np.testing.assert_allclose(metrics["ratio"], [[exp(1), 1.0]], rtol=1e-6)
    assert metrics["pg_clipfrac"].tolist() == [[0.0, 0.0]]


def test_gspo_s_metric_is_the_token_s_ratio_too() -> None:
    _, _, metrics = run(config("gspo"), ones(2, logprobs=[0.5, -0.5]))
    np.testing.assert_allclose(metrics["ratio"], [[exp(0.5), exp(-0.5)]], rtol=1e-6)


def test_an_interpolated_proximal_policy_lies_further_from_an_older_sampler() -> None:
    shelf = GrpoConfig.model_validate({"ratio": "decoupled", "proximal": "interpolated", "behaviour_cap": 9.0})
    log_ratio = log(1.2)
    tokens = ones(3, logprobs=[log_ratio] * 3, lags=[0.0, 1.0, 3.0], advantages=[1.0, 1.0, 1.0])
    loss, gradient, _ = run(shelf, tokens)
    # alpha = lag / (lag + 1): weight r^alpha, times the ratio r^(1 - alpha), which is r whatever the age.
    np.testing.assert_allclose(loss[0], [-1.2] * 3, rtol=1e-6)
    np.testing.assert_allclose(gradient[0], [-1.2] * 3, rtol=1e-6)
    capped = GrpoConfig.model_validate({"ratio": "decoupled", "proximal": "interpolated", "behaviour_cap": 1.12})
    assert run(capped, tokens)[2]["effective_token_rate"].tolist() == [[1.0, 1.0, 0.0]]  # 1, 1.095 and 1.147


def test_a_correction_multiplies_the_loss_and_says_what_it_rejected() -> None:
    ratios = [0.25, 1.5, 9.0]
    tokens = ones(3, engine_logprobs=[-log(ratio) for ratio in ratios], advantages=[1.0, -2.0, 3.0])
    loss, gradient, metrics = run(config("icepop"), tokens)
    np.testing.assert_allclose(loss, [[0.0, 3.0, 0.0]], rtol=1e-6)
    np.testing.assert_allclose(gradient, [[0.0, 3.0, 0.0]], rtol=1e-6)
    assert metrics["correction_rejected"].tolist() == [[1.0, 0.0, 1.0]]
    assert metrics["effective_token_rate"].tolist() == [[0.0, 1.0, 0.0]]
    assert metrics["pg_clipfrac"].tolist() == [[0.0] * 3]  # the ratio itself, against the trainer, clipped nothing

    truncated = GrpoConfig.model_validate({"old_policy": "trainer", "correction": "tis"})
    loss, _, metrics = run(truncated, tokens)
    np.testing.assert_allclose(loss, [[-0.25, 3.0, -6.0]], rtol=1e-6)
    assert metrics["correction_rejected"].tolist() == [[0.0] * 3]
    assert metrics["effective_token_rate"].tolist() == [[1.0] * 3]


def test_the_level_and_the_veto_of_mis_are_the_configured_ones() -> None:
    tokens = ones(2, engine_logprobs=[-1.0, 0.9])
    by_sequence = {"old_policy": "trainer", "correction": "mis", "correction_level": "sequence"}
    loss, _, _ = run(GrpoConfig.model_validate(by_sequence), tokens)
    np.testing.assert_allclose(loss, [[-exp(0.1)] * 2], rtol=1e-6)
    loss, _, _ = run(GrpoConfig.model_validate(by_sequence | {"correction_level": "geometric"}), tokens)
    np.testing.assert_allclose(loss, [[-exp(0.05)] * 2], rtol=1e-6)
    loss, gradient, metrics = run(GrpoConfig.model_validate(by_sequence | {"correction_veto": 0.5}), tokens)
    assert loss.tolist() == gradient.tolist() == [[0.0, 0.0]]
    assert metrics["correction_rejected"].tolist() == [[1.0, 1.0]]


def test_the_sequence_mask_switches_the_policy_gradient_off_and_leaves_the_kl() -> None:
    shelf = GrpoConfig.model_validate({"sequence_mask": 0.1, "kl": "loss", "kl_coef": 0.5, "kl_estimator": "k2"})
    tokens = ones(2, engine_logprobs=[0.2, 0.1], advantages=[-1.0, -1.0], reference_logprobs=[-2.0, 1.0])
    loss, gradient, metrics = run(shelf, tokens)
    assert loss.tolist() == [[1.0, 0.25]]
    assert gradient.tolist() == [[1.0, -0.5]]
    assert metrics["effective_token_rate"].tolist() == [[0.0, 0.0]]
    assert metrics["kl"].tolist() == [[2.0, 0.5]]


def test_the_kl_is_added_to_the_loss_of_each_token() -> None:
    tokens = make_tokens()
    plain, with_kl = run(config("ppo-clip"), tokens), run(config("kl-k2"), tokens)
    assert tokens.reference_logprobs is not None
    difference = torch.where(tokens.mask, tokens.logprobs - tokens.reference_logprobs, torch.tensor(0.0))
    torch.testing.assert_close(with_kl[0] - plain[0], 0.1 * difference.square() / 2)
    torch.testing.assert_close(with_kl[1] - plain[1], 0.1 * difference)


def test_a_kl_that_is_counted_in_the_reward_is_none_of_the_loss() -> None:
    shelf = GrpoConfig.model_validate({"kl": "reward", "kl_coef": 0.1})
    tokens = make_tokens()
    loss, _, metrics = run(shelf, tokens)
    assert torch.equal(loss, run(GrpoConfig(), tokens)[0])
    assert "kl" not in metrics


def test_a_kl_without_a_reference_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match="reference's log-probabilities"):
        policy_loss(config("kl-k3"), replace(make_tokens(), reference_logprobs=None))
