"""pass@k: the chance that at least one of k answers to an item is right."""

from collections.abc import Sequence

from reef_harness.evaluation.intervals import Figure, by_item, columns_by_item


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The unbiased estimate from ``n`` answers of which ``correct`` are right: 1 - C(n-c, k) / C(n, k).

    As a product of k factors, so that nothing overflows. Source: Chen et al., Evaluating Large Language Models Trained
    on Code (2021), section 2.1. Raises ValueError unless 1 <= k <= n and 0 <= correct <= n.
    """
    if not 1 <= k <= n or not 0 <= correct <= n:
        raise ValueError(f"pass@{k} needs 1 <= k <= n and 0 <= correct <= n, got n = {n}, correct = {correct}")
    if n - correct < k:
        return 1.0
    none_right = 1.0
    for i in range(k):
        none_right *= (n - correct - i) / (n - i)
    return 1.0 - none_right


def ks_up_to(n: int) -> list[int]:
    """The k that are reported for n answers: powers of two, and n."""
    return sorted({1 << i for i in range(n.bit_length()) if 1 << i <= n} | {n})


def curve(counts: Sequence[tuple[int, int]], ks: Sequence[int], *, seed: int = 0) -> dict[int, Figure]:
    """pass@k averaged over items, with intervals by item. ``counts`` holds (answers, right ones) of each item.

    An item with fewer than k answers has no pass@k and is left out of that k; ``Figure.items`` says how many are in.
    A k without any item is left out.
    """
    whole = [k for k in ks if counts and all(n >= k for n, _ in counts)]
    found: dict[int, Figure] = {}
    if whole:  # of the same items: bootstrapped together
        rows = [[pass_at_k(n, correct, k) for k in whole] for n, correct in counts]
        found |= zip(whole, columns_by_item(rows, seed=seed), strict=True)
    for k in ks:
        if k not in found and (some := by_item([pass_at_k(n, c, k) for n, c in counts if n >= k], seed=seed)):
            found[k] = some
    return dict(sorted(found.items()))
