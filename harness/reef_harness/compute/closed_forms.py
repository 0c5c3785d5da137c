"""What theory expects, from the chance p that one answer is right, where answers are independent given the item.

t: chance that a verifier accepts a right answer; f: that it accepts a wrong one.
"""

from collections.abc import Sequence
from statistics import fmean


def coverage(p: float, k: int) -> float:
    """The chance that at least one of k answers is right: 1 - (1 - p)^k."""
    _chance(p=p)
    _count(k)
    return 1.0 - (1.0 - p) ** k


def mean_coverage(ps: Sequence[float], k: int) -> float:
    """The same over items, each with a chance of its own: the mean of 1 - (1 - p_i)^k.

    Never more than :func:`coverage` of the mean chance (1 - (1-p)^k is concave in p): items are hard or easy. With p_i
    estimated from few answers it comes out too low; :func:`reef_harness.evaluation.pass_at_k.pass_at_k` does not.
    """
    return fmean(coverage(p, k) for p in ps)


def accepted(p: float, t: float, f: float) -> float:
    """The chance that a verifier accepts an answer: p t + (1 - p) f."""
    _chance(p=p, t=t, f=f)
    return p * t + (1.0 - p) * f


def precision_ceiling(p: float, t: float, f: float) -> float:
    """The share of right ones among the answers that a verifier accepts: p t / (p t + (1 - p) f).

    What best of n by that verifier comes to as n grows: sooner or later something is accepted, and that is right with
    this chance (Bayes). Where nothing is ever accepted, what is picked is a rejected answer.
    """
    a = accepted(p, t, f)
    return p * t / a if a > 0 else _right_if_rejected(p, t, f)


def verified_best_of(p: float, t: float, f: float, n: int) -> float:
    """The accuracy of best of n by that verifier: the first accepted answer, or the first one where none is.

    With a = p t + (1-p) f: (1 - (1-a)^n) p t / a + (1-a)^n p (1-t) / (1-a). With n = 1 it is p, as n grows the ceiling.
    """
    _count(n)
    a = accepted(p, t, f)
    none = (1.0 - a) ** n
    return (1.0 - none) * (p * t / a if a > 0 else 0.0) + none * _right_if_rejected(p, t, f)


def _right_if_rejected(p: float, t: float, f: float) -> float:
    """p (1 - t) / (1 - a); 0 where everything is accepted: then its weight is 0."""
    a = accepted(p, t, f)
    return p * (1.0 - t) / (1.0 - a) if a < 1 else 0.0


def _chance(**values: float) -> None:
    for name, value in values.items():
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} must lie between 0 and 1, got {value}")


def _count(k: int) -> None:
    if k < 1:
        raise ValueError(f"at least one answer is needed, got {k}")
