"""Losses of single tokens, in torch: one function for each ratio of `reef.shelf.Ratio`.

Each takes arrays [...] of one shape (`logprobs` with gradient, `mask` bool) and returns what `Method.token_loss` does:
the loss [...], exactly 0 and without gradient where `mask` is False whatever stands there, and metrics [...], detached:

- `ratio`: the ratio that it uses.
- `pg_clipfrac`: 1 where it clipped or rejected the token.
- `effective_token_rate`: 1 where the token counts and was not rejected. Clipping is no rejection.

Below, r = exp(logprobs - old_logprobs), A the advantage, sg what no gradient goes through. A ratio that gradient goes
through, or that multiplies one, is held within exp(+-MAX_LOG_RATIO), so that both stay finite.
"""

from typing import Literal

import torch

from reef.methods.ratios import bounded_exp, log_ratio, sequence_mean, where_masked

Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]


def ppo_clip(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Loss:
    """PPO's clipped loss: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); at most -dual_clip A where A < 0.

    Schulman et al. 2017 (1707.06347); two bounds as in DAPO (2503.14476); the dual clip is Ye et al. 2019 (1912.09729),
    which stops a negative advantage times a huge ratio. A token counts as clipped where a clip changed its loss.
    """
    return _clip(log_ratio(logprobs, old_logprobs, mask), advantages, mask, clip_low, clip_high, dual_clip)


def gspo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    sequences: torch.Tensor,
    num_sequences: int,
    *,
    clip_low: float,
    clip_high: float,
) -> Loss:
    """PPO's clipped loss with one ratio per sequence: s = exp(mean over its tokens of logprobs - old_logprobs).

    GSPO (2507.18071), in its token form: s_t = sg(s) exp(logprobs - sg(logprobs)), whose value is s and whose gradient
    is each token's own. Where all tokens of a sequence share advantage and weight, that is the gradient through s;
    where they do not (a critic's advantages), a token's advantage moves that token alone. A sequence must lie whole in
    the call. Clipped is a token whose s is beyond a bound on the side that its advantage pushes to.

    Args:
        sequences: [...] int64, each token's sequence, from 0; read only where `mask` is True.
        num_sequences: how many there are.
    """
    mean = sequence_mean(log_ratio(logprobs.detach(), old_logprobs, mask), mask, sequences, num_sequences)
    token = where_masked(logprobs, mask)
    return _clip(mean + (token - token.detach()), advantages, mask, clip_low, clip_high, None)


def cispo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Loss:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs: the weight is clipped, every token keeps its gradient.

    MiniMax-M1 (2506.13585). The upper bound is 1 + clip_high, as in slime and veRL (TRL takes clip_high itself); a
    clip_low of 1 or more is no lower bound. Clipped is a token whose r is beyond a bound.
    """
    ratio = bounded_exp(log_ratio(logprobs.detach(), old_logprobs, mask))
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -weight * where_masked(advantages, mask) * where_masked(logprobs, mask)
    return loss, _metrics(mask, ratio, weight != ratio)


def sapo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    tau_positive: float,
    tau_negative: float,
) -> Loss:
    """-(4 / tau) sigmoid(tau (r - 1)) A, with tau_positive where A > 0 and tau_negative elsewhere.

    SAPO (2511.20347): the gradient fades as r leaves 1, and is that of r A at r = 1. Nothing is clipped or rejected.
    """
    ratio = bounded_exp(log_ratio(logprobs, old_logprobs, mask))
    gains = where_masked(advantages, mask)
    tau = torch.where(gains > 0, tau_positive, tau_negative)
    loss = -(4.0 / tau) * torch.sigmoid(tau * (ratio - 1.0)) * gains
    return loss, _metrics(mask, ratio, torch.zeros_like(mask))


def dis(
    logprobs: torch.Tensor,
    engine_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Loss:
    """-sg(f(r)) A logprobs, f(r) = r where 1 - clip_low < r < 1 + clip_high, else 0; r against the engine.

    SAO's direct double-sided importance sampling (2607.07508, eqs. 1-3). Both bounds are strict and hold whatever the
    sign of A. The ratio is detached, though the paper prints no stop-gradient: otherwise the gradient would gain the
    factor 1 + logprobs. A rejected token has loss and gradient exactly 0; it stays in the aggregation's denominator.
    """
    ratio = bounded_exp(log_ratio(logprobs.detach(), engine_logprobs, mask))
    # Asked this way round, a NaN is kept and the step fails.
    rejected = mask & ((ratio <= 1.0 - clip_low) | (ratio >= 1.0 + clip_high))
    kept = mask & ~rejected
    loss = -where_masked(ratio, kept) * where_masked(advantages, kept) * where_masked(logprobs, kept)
    return loss, _metrics(mask, ratio, rejected, rejected)


def decoupled(
    logprobs: torch.Tensor,
    engine_logprobs: torch.Tensor,
    proximal: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    behaviour_cap: float,
) -> Loss:
    """w times PPO's clipped loss against the proximal policy, w = sg(exp(proximal - engine_logprobs)).

    Decoupled PPO, Hilton et al. 2021 (2110.00641), as in AReaL (2505.24298). A token with w > behaviour_cap is rejected
    (loss and gradient exactly 0; it stays in the denominator); w has no lower bound. `ratio` is that to the proximal
    policy; clipped is a token that PPO clipped or the cap rejected.

    Args:
        proximal: [...], detached: `logprobs.detach()` for the policy before the step, or `proximal_logprobs`.
    """
    weight = bounded_exp(log_ratio(proximal, engine_logprobs, mask)).detach()
    rejected = mask & (weight > behaviour_cap)
    loss, metrics = ppo_clip(logprobs, proximal, advantages, mask & ~rejected, clip_low=clip_low, clip_high=clip_high)
    return where_masked(weight, mask & ~rejected) * loss, _metrics(
        mask, metrics["ratio"], rejected | (metrics["pg_clipfrac"] > 0), rejected
    )


def proximal_logprobs(
    behaviour: torch.Tensor,
    current: torch.Tensor,
    behaviour_versions: torch.Tensor,
    version: float,
    *,
    space: Literal["log", "linear"] = "log",
) -> torch.Tensor:
    """The policy before this update, guessed from the sampler's age: between the sampler and the current policy.

    As in AReaL's code: alpha = clip((v - 1 - v_b) / (v - v_b), 0, 1) of the way from `behaviour` to `current`. One
    version behind is the sampler itself.

    Args:
        behaviour: [...], log-probabilities of the policy that sampled.
        current: [...], those of the policy that is trained; its gradient is cut.
        behaviour_versions: [...], v_b of each token, in policy updates.
        version: v, what the policy will be once updated.
        space: interpolate log-probabilities (`log`) or probabilities (`linear`).

    Returns:
        [...], detached.
    """
    gap = (version - behaviour_versions).clamp(min=1.0)
    alpha = (gap - 1.0) / gap
    if space == "linear":
        return torch.lerp(behaviour.exp(), current.detach().exp(), alpha).log()
    return torch.lerp(behaviour, current.detach(), alpha)


def dppo(
    logprobs: torch.Tensor,
    engine_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    kl: float,
) -> Loss:
    """-keep r A + kl (logprobs - engine_logprobs)^2, r against the engine, the second term on rejected tokens too.

    prime-rl's DPPO+KL. With p and q the trainer's and the engine's probability of the token, it is rejected where A > 0
    and p - q > clip_high, or A <= 0 and p - q < -clip_low: where the gradient would carry p further away.
    """
    logs = log_ratio(logprobs, engine_logprobs, mask)
    ratio = bounded_exp(logs)
    gains = where_masked(advantages, mask)
    moved = where_masked(logprobs.detach(), mask).exp() - where_masked(engine_logprobs, mask).exp()
    rejected = mask & torch.where(gains > 0, moved > clip_high, moved < -clip_low)
    loss = -where_masked(ratio, ~rejected) * gains + kl * logs.square()
    return loss, _metrics(mask, ratio, rejected, rejected)


def reinforce(logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> Loss:
    """-A logprobs: the policy gradient as if the trained policy had sampled (Williams 1992). No ratio, no bounds."""
    ratio = bounded_exp(log_ratio(logprobs.detach(), old_logprobs, mask))
    loss = -where_masked(advantages, mask) * where_masked(logprobs, mask)
    return loss, _metrics(mask, ratio, torch.zeros_like(mask))


def _clip(
    logs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    low: float,
    high: float,
    dual_clip: float | None,
) -> Loss:
    ratio = bounded_exp(logs)
    gains = where_masked(advantages, mask)
    plain = -ratio * gains
    clipped = -ratio.clamp(1.0 - low, 1.0 + high) * gains
    loss = torch.maximum(plain, clipped)
    changed = clipped > plain
    if dual_clip is not None:
        most = torch.where(gains < 0, -dual_clip * gains, float("inf"))
        changed = changed | (loss > most)
        loss = torch.minimum(loss, most)
    return loss, _metrics(mask, ratio, changed)


def _metrics(
    mask: torch.Tensor, ratio: torch.Tensor, changed: torch.Tensor, rejected: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    effective = mask if rejected is None else mask & ~rejected
    return {"ratio": ratio.detach(), "pg_clipfrac": changed.float(), "effective_token_rate": effective.float()}
