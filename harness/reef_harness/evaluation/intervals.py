"""Intervals and tests for shares and differences. Standard library only."""

import math


def wilson(successes: int, trials: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Wilson's score interval of a proportion, 95% by default: (low, high), within 0 and 1.

    Source: E. B. Wilson, J. Am. Stat. Assoc. 22 (1927) 209. Raises ValueError unless 0 <= successes <= trials >= 1.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"wilson needs 0 <= successes <= trials and trials >= 1, got {successes} of {trials}")
    share = successes / trials
    scale = 1 + z * z / trials
    centre = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    low = 0.0 if successes == 0 else (centre - spread) / scale
    high = 1.0 if successes == trials else (centre + spread) / scale
    return low, high
