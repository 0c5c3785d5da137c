"""What rollouts and tokens were paid: the report's scores, overlong shaping, and a KL counted in the reward.

A rollout is one report: the outcome is graded once, however many sequences (branches, temperatures) it gave. Shape
letters: T tokens of one sequence.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from reef.methods.base import View
from reef.methods.overlong import overlong_penalty
from reef.shelf import ShelfConfig
from reef.types import Doubles, Sample

Rollout = tuple[str, str]  # group, report

# exp() of more than this is a fault in a log-probability rather than a distance; the losses cut there too.
MAX_LOG_RATIO = 20.0


def rollout_of(sample: Sample) -> Rollout:
    """The rollout that the sample is a sequence of."""
    return sample.group, sample.report_id


def rollouts(samples: Sequence[Sample]) -> dict[Rollout, list[Sample]]:
    """The samples of each rollout, in order of their first ones."""
    found: dict[Rollout, list[Sample]] = {}
    for sample in samples:
        found.setdefault(rollout_of(sample), []).append(sample)
    return found


def num_sampled(samples: Sequence[Sample]) -> int:
    """Sampled tokens of all of them. A turn that branches share is sampled in the first alone, so it counts once."""
    return sum(int(sample.mask.sum()) for sample in samples)


def outcome_rewards(samples: Sequence[Sample], config: ShelfConfig) -> dict[Rollout, float]:
    """The score of each rollout and, where `overlong_tokens` is set, DAPO's penalty on its sampled tokens.

    Scores of single turns (`reference_scores`) are not in it: whole rollouts are compared by `score` alone.
    """
    paid: dict[Rollout, float] = {}
    for rollout, members in rollouts(samples).items():
        paid[rollout] = members[-1].reward
        if config.overlong_tokens is not None:
            paid[rollout] += overlong_penalty(
                num_sampled(members),
                longest=config.overlong_tokens,
                buffer=config.overlong_buffer,
                penalty=config.overlong_penalty,
            )
    return paid


def rollout_rewards(samples: Sequence[Sample], views: Sequence[View], config: ShelfConfig) -> dict[Rollout, float]:
    """`outcome_rewards` and, with `kl: reward`, the KL of all sampled tokens of the rollout."""
    paid = outcome_rewards(samples, config)
    if config.kl == "reward":
        for sample, view in zip(samples, views, strict=True):
            paid[rollout_of(sample)] += float(kl_rewards(sample, view, config).sum())
    return paid


def token_rewards(samples: Sequence[Sample], views: Sequence[View], config: ShelfConfig) -> list[Doubles]:
    """What each token was paid, [T] per sample, 0 where its mask is False.

    The outcome is paid at the last sampled token of each sequence: where a report gave several, each of them ends in
    it. A turn's own score is paid at the last token of the turn, and with `kl: reward` every token pays for its KL.
    """
    outcomes = outcome_rewards(samples, config)
    found = []
    for sample, view in zip(samples, views, strict=True):
        paid = kl_rewards(sample, view, config) if config.kl == "reward" else np.zeros(len(sample.mask))
        for turn in sample.turns:
            paid[turn.end - 1] += turn.reward
        if sample.mask.any():
            paid[np.flatnonzero(sample.mask)[-1]] += outcomes[rollout_of(sample)]
        found.append(paid)
    return found


def kl_rewards(sample: Sample, view: View, config: ShelfConfig) -> Doubles:
    """-kl_coef times the KL estimate of each sampled token between engine and reference, [T], 0 elsewhere.

    A sample that does not train is not shown to the reference. It pays nothing, and counts in its group by its score.

    Raises:
        ValueError: the view has no log-probabilities of the reference.
    """
    paid = np.zeros(len(sample.mask))
    if not sample.trains:
        return paid
    if view.reference_logprobs is None:
        raise ValueError(f"kl is reward: expected the reference's log-probabilities of report {sample.report_id}")
    at = np.flatnonzero(sample.mask)
    estimate = kl_estimate(sample.logprobs[at], view.reference_logprobs[at], config.estimator)
    paid[at] = -config.kl_coef * estimate
    return paid


def kl_estimate(logprobs: ArrayLike, reference: ArrayLike, estimator: Literal["k1", "k2", "k3"]) -> Doubles:
    """Schulman's estimates of KL(policy || reference) at sampled tokens, of any shape: with d = logprobs - reference,
    k1 d, k2 d^2 / 2, k3 exp(-d) - 1 + d, which is never negative. What `kl.kl` computes for losses, in numpy.
    """
    distance = np.asarray(logprobs, dtype=np.float64) - np.asarray(reference, dtype=np.float64)
    if estimator == "k1":
        return distance
    if estimator == "k2":
        return np.asarray(distance**2 / 2)
    held = np.maximum(distance, -MAX_LOG_RATIO)
    return np.asarray(np.expm1(-held) + held)
