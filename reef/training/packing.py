"""Which samples go through the model together. Needs no torch: batches are split where they are reserved."""

import math
from collections.abc import Sequence


def split(lengths: Sequence[int], budget_tokens: int, data_ranks: int = 1) -> tuple[tuple[int, ...], ...]:
    """Divide sequences into microbatches of like length: rows * longest row <= budget_tokens.

    The same input gives the same answer. Longest first, so that ranks that take every d-th microbatch get like work;
    with several data ranks the budget shrinks until each has some. A sequence over the budget goes alone.

    Args:
        lengths: tokens of each sequence, at least 1.

    Returns:
        Positions in `lengths`, each exactly once.
    """
    if not lengths:
        return ()
    budget = min(budget_tokens, max(lengths) * math.ceil(len(lengths) / data_ranks))
    microbatches: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if microbatches:
            current = microbatches[-1]
            if (len(current) + 1) * lengths[current[0]] <= budget:
                current.append(position)
                continue
        microbatches.append([position])
    return tuple(tuple(sorted(microbatch)) for microbatch in microbatches)
