"""Chains of additions and subtractions: the problems, their solutions, and what is held out.

A problem reads ``Start at 9. Subtract 4. Add 3.`` (a start of 1-9 and k steps of plus or minus 1-9) and its solution
``9-4=5, 5+3=8. <final>8</final>``. Whether a problem is held out is a property of its text alone (about one in ten),
so the training stream and the held-out sets are apart by construction, whatever their seeds. Standard library only:
this module knows nothing of models.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

HELD_OUT_SHARE = 26 / 256  # of all problems, by the first byte of the text's sha256
_MAX_DRAWS_PER_PROBLEM = 50  # of held-out ones


@dataclass(frozen=True, slots=True)
class Problem:
    """One chain. ``steps`` holds (sign, amount) pairs: sign is "+" or "-", amount is 1-9.

    Example: ``Problem(9, (("-", 4), ("+", 3)))``.
    """

    start: int
    steps: tuple[tuple[str, int], ...]

    @property
    def text(self) -> str:
        """What the user says: ``Start at 9. Subtract 4. Add 3.``"""
        words = (f" {'Add' if sign == '+' else 'Subtract'} {amount}." for sign, amount in self.steps)
        return f"Start at {self.start}." + "".join(words)

    @property
    def values(self) -> list[int]:
        """The correct running value after each step."""
        values, value = [], self.start
        for sign, amount in self.steps:
            value = value + amount if sign == "+" else value - amount
            values.append(value)
        return values

    @property
    def answer(self) -> int:
        """The correct final value."""
        return self.values[-1]

    @property
    def held_out(self) -> bool:
        """Whether this problem is for evaluation only."""
        return hashlib.sha256(self.text.encode()).digest()[0] < HELD_OUT_SHARE * 256


def solution(problem: Problem, values: Sequence[int] | None = None) -> str:
    """Write the worked solution, from the correct values or (for an imperfect writer) from others."""
    values = problem.values if values is None else values
    befores = [problem.start, *values]
    lines = (
        f"{before}{sign}{amount}={after}"
        for before, (sign, amount), after in zip(befores, problem.steps, values, strict=False)
    )
    return f"{', '.join(lines)}. <final>{values[-1]}</final>"


def draw(rng: random.Random, steps: int, held_out: bool = False) -> Problem:
    """Draw one problem of ``steps`` steps from the training side, or from the held-out side."""
    if steps < 1:
        raise ValueError(f"a problem needs at least 1 step, got {steps}")
    while True:
        chain = tuple((rng.choice("+-"), rng.randint(1, 9)) for _ in range(steps))
        problem = Problem(rng.randint(1, 9), chain)
        if problem.held_out == held_out:
            return problem


def train_stream(steps: int, seed: int) -> Iterator[Problem]:
    """Yield training problems for ever, the same ones for the same seed."""
    rng = random.Random(f"train/{steps}/{seed}")
    while True:
        yield draw(rng, steps)


def held_out_set(steps: int, n: int, seed: int = 0) -> list[Problem]:
    """Return ``n`` distinct held-out problems; a smaller ``n`` with the same seed gives the first of them.

    Raises ValueError when the class does not have ``n`` held-out problems (``steps=2`` has about 290).
    """
    rng = random.Random(f"held-out/{steps}/{seed}")
    found: dict[Problem, None] = {}
    for _ in range(n * _MAX_DRAWS_PER_PROBLEM):
        if len(found) == n:
            break
        found[draw(rng, steps, held_out=True)] = None
    if len(found) < n:
        raise ValueError(f"asked for {n} held-out problems of {steps} steps, found only {len(found)}")
    return list(found)
