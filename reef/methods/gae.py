"""Generalized advantage estimation over sampled tokens, in numpy. Shape letters: T tokens of one sequence.

Tokens that were not sampled (prompts, tool results) are no steps: the recursion passes from the last token of one
action to the first of the next (SAO, 2607.07508, equations 4 and 5). They still decide what the critic says later.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from reef.types import Bools, Doubles


def suffix_sums(steps: ArrayLike, decay: float) -> Doubles:
    """Discounted sums of what is still to come: y[i] = x[i] + decay * y[i + 1], for x of shape [T].

    By doubling: after the pass of k each place holds the sum of its next 2 k steps, so that log2(T) passes over whole
    arrays do. In float64, since the serial sum is not repeated to the last bit.

    Args:
        decay: 0 to 1.
    """
    sums = np.array(steps, dtype=np.float64)
    reach, factor = 1, float(decay)
    while reach < len(sums) and factor > 0.0:  # a factor that underflows adds nothing any more
        sums[:-reach] += factor * sums[reach:]
        reach, factor = 2 * reach, factor * factor
    return sums


def skip_observation_gae(
    values: ArrayLike, mask: Bools, rewards: ArrayLike, *, gamma: float, lam: float, bootstrap: float = 0.0
) -> tuple[Doubles, Doubles]:
    """Advantages and returns of one sequence, as if it were its sampled tokens alone.

    With t and t' a sampled token and the next one: delta_t = r_t + gamma V_t' - V_t, A_t = delta_t + gamma lam A_t',
    return_t = A_t + V_t. After the last one V is `bootstrap` and A is 0.

    Args:
        values: [T] what the critic said before each token. Where `mask` is False neither they nor rewards are read.
        mask: [T] True on sampled tokens.
        rewards: [T] what each token was paid.
        gamma: discount per sampled token.
        lam: GAE's lambda, 0 to 1.
        bootstrap: what the critic expects after the end; 0: the sequence ended there.

    Returns:
        Advantages and returns [T], 0 where `mask` is False.
    """
    at = np.flatnonzero(mask)
    known = np.asarray(values, dtype=np.float64)[at]
    paid = np.asarray(rewards, dtype=np.float64)[at]
    advantages, returns = np.zeros(len(mask)), np.zeros(len(mask))
    if len(at):
        then = np.append(known[1:], bootstrap)
        advantages[at] = suffix_sums(paid + gamma * then - known, gamma * lam)
        returns[at] = advantages[at] + known
    return advantages, returns


def adaptive_lambda(alpha: float | None, length: int) -> float:
    """VAPO's lambda of an answer of `length` tokens: 1 - 1 / (alpha * length) within [0, 1]; 0 for an empty answer.

    2504.05118; SAO takes alpha = 1.5. alpha None: lambda is 1 whatever the length.
    """
    if alpha is None:
        return 1.0
    if length <= 0:
        return 0.0
    return min(max(1.0 - 1.0 / (alpha * length), 0.0), 1.0)


def values_before(values: ArrayLike) -> Doubles:
    """What the critic said before each token, [T], from what it says after each: 0 before the first, which no model
    has sampled."""
    before = np.zeros(np.shape(values))
    before[1:] = np.asarray(values, dtype=np.float64)[:-1]
    return before


def explained_variance(returns: Sequence[ArrayLike], values: Sequence[ArrayLike], masks: Sequence[Bools]) -> float:
    """How much of the returns' variance the values before tell: 1 - Var(R - V) / Var(R), over a batch's sampled tokens.

    Population variances. 1: all; 0: no more than a constant; below: less. 0 too where the returns do not vary.

    Args:
        returns: [T] per sample, as are `values` (before each token) and `masks`.
    """
    told = [
        np.stack([np.asarray(r, dtype=np.float64)[mask], np.asarray(v, dtype=np.float64)[mask]])
        for r, v, mask in zip(returns, values, masks, strict=True)
    ]
    flat_returns, flat_values = np.concatenate(told, axis=1) if told else np.zeros((2, 0))
    if flat_returns.size == 0 or np.ptp(flat_returns) == 0.0:
        return 0.0
    return float(1.0 - (flat_returns - flat_values).var() / flat_returns.var())
