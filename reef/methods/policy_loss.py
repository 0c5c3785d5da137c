"""The policy's loss as recipe.config puts it together: ratio, correction, sequence mask, KL."""

import torch

from reef.methods import losses
from reef.methods.base import Tokens
from reef.methods.corrections import icepop, level_ratios, mis, off_policy_sequence_mask, tis
from reef.methods.kl import kl
from reef.methods.ratios import bounded_exp, log_ratio
from reef.shelf import ShelfConfig


def policy_loss(config: ShelfConfig, tokens: Tokens) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """weight * keep * ratio loss + kl_coef * KL, of each token: what `Method.token_loss` returns.

    `config.ratio` chooses among `losses`, `config.correction` the weight, `config.sequence_mask` what it keeps. The KL
    is counted on rejected tokens too.

    Returns:
        The loss [...], exactly 0 and without gradient where the mask is False, and metrics [...], detached:
        `ratio` (trainer by engine), `pg_clipfrac` (clipped or rejected by the ratio), `effective_token_rate` (1 where
        neither ratio nor correction nor sequence mask rejected the token; clipping does not), and where configured
        `correction_rejected` and `kl`.

    Raises:
        ValueError: the KL is in the loss, and no log-probabilities of a reference came.
    """
    loss, metrics = _ratio_loss(config, tokens)
    mask = tokens.mask
    metrics["ratio"] = bounded_exp(log_ratio(tokens.logprobs.detach(), tokens.engine_logprobs, mask))
    if config.correction != "none":
        weights = correction_weights(config, tokens)
        loss = loss * weights
        metrics["correction_rejected"] = (mask & (weights == 0)).float()
        metrics["effective_token_rate"] = metrics["effective_token_rate"] * (weights != 0)
    if config.sequence_mask is not None:
        kept = off_policy_sequence_mask(
            tokens.logprobs,
            tokens.engine_logprobs,
            tokens.advantages,
            mask,
            tokens.sequences,
            tokens.num_sequences,
            delta=config.sequence_mask,
        )
        loss = loss * kept
        metrics["effective_token_rate"] = metrics["effective_token_rate"] * kept
    if config.kl == "loss":
        divergence = kl(tokens.logprobs, _reference(tokens), mask, config.estimator)
        loss = loss + config.kl_coef * divergence
        metrics["kl"] = divergence.detach()
    return loss, metrics


def correction_weights(config: ShelfConfig, tokens: Tokens) -> torch.Tensor:
    """The weights [...] of `config.correction`, which must not be `none`; detached."""
    low, high = config.correction_bounds
    if config.correction == "mis":
        return mis(
            *_against_engine(tokens),
            level=config.correction_level,
            low=low,
            high=high,
            veto=config.correction_veto,
        )
    ratios = level_ratios(*_against_engine(tokens), level="token")
    weigh = tis if config.correction == "tis" else icepop
    return weigh(ratios, tokens.mask, low=low, high=high)


def _ratio_loss(config: ShelfConfig, tokens: Tokens) -> losses.Loss:
    logprobs, engine, mask = tokens.logprobs, tokens.engine_logprobs, tokens.mask
    # One update is made of a batch, so the trainer's log-probabilities before the step are these.
    old = logprobs.detach() if config.old_policy == "trainer" else engine
    common = (logprobs, old, tokens.advantages, mask)
    if config.ratio == "none":
        return losses.reinforce(*common)
    if config.ratio == "sapo":
        return losses.sapo(*common, tau_positive=config.sapo_tau_positive, tau_negative=config.sapo_tau_negative)
    low, high = config.bounds
    match config.ratio:
        case "ppo-clip":
            return losses.ppo_clip(*common, clip_low=low, clip_high=high, dual_clip=config.dual_clip)
        case "gspo":
            return losses.gspo(*common, tokens.sequences, tokens.num_sequences, clip_low=low, clip_high=high)
        case "cispo":
            return losses.cispo(*common, clip_low=low, clip_high=high)
        case "dis":
            return losses.dis(*common, clip_low=low, clip_high=high)
        case "dppo":
            return losses.dppo(*common, clip_low=low, clip_high=high, kl=config.dppo_kl)
        case "decoupled":
            return losses.decoupled(
                logprobs,
                engine,
                _proximal(config, tokens),
                tokens.advantages,
                mask,
                clip_low=low,
                clip_high=high,
                behaviour_cap=config.behaviour_cap,
            )


def _proximal(config: ShelfConfig, tokens: Tokens) -> torch.Tensor:
    if config.proximal == "trainer":
        return tokens.logprobs.detach()
    # The update makes version 1 of version 0; the sampler lies `lag` versions before that.
    return losses.proximal_logprobs(tokens.engine_logprobs, tokens.logprobs, -tokens.lags, 1.0)


def _against_engine(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
    return tokens.logprobs, tokens.engine_logprobs, tokens.mask, tokens.sequences, tokens.num_sequences


def _reference(tokens: Tokens) -> torch.Tensor:
    if tokens.reference_logprobs is None:
        raise ValueError("kl: loss needs the reference's log-probabilities of each token, and none came")
    return tokens.reference_logprobs
