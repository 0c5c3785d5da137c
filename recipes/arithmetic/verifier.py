"""Checks the lines of an answer to a chain, whole or not: exactly, and with errors at stated rates.

As functions of `reef-harness compute`: `--verifier recipes.arithmetic.verifier:partial_right`,
`--checker recipes.arithmetic.verifier:told`.
"""

import hashlib
import re
from dataclasses import dataclass

from reef_harness.compute import Partial, Sample
from reef_harness.types import Item

from recipes.arithmetic.task import Problem

_STEP = re.compile(r"(Add|Subtract) ([1-9])\.")
_LINE = re.compile(r"(-?\d{1,9})([+-])(\d{1,9})=(-?\d{1,9})", re.ASCII)
_END = re.compile(r"(.*)\. <final>(-?\d{1,9})</final>\s*", re.ASCII | re.DOTALL)


def problem_of(item: Item) -> Problem:
    """The problem that an item asks. Raises ValueError where it is no chain."""
    start, _, rest = item.question.removeprefix("Start at ").partition(".")
    steps = tuple(("+" if word == "Add" else "-", int(amount)) for word, amount in _STEP.findall(rest))
    if not start.isdecimal() or not steps or Problem(int(start), steps).text != item.question:
        raise ValueError(f"expected a chain such as 'Start at 9. Subtract 4.', got {item.question!r}")
    return Problem(int(start), steps)


def fault(problem: Problem, text: str, whole: bool) -> str | None:
    """The first fault of an answer so far; None: every line does the problem's next step, and does it right.

    A whole answer must have a line for each step, and end with the last value. A right final value reached over a wrong
    line is a fault: the lines are checked, not the value alone. Of an answer that is not whole, what follows the last
    comma is the beginning of a line and says nothing yet (", -" is one token of the starter model).
    """
    body, final = text.rpartition(",")[0], None
    if whole:
        if (end := _END.fullmatch(text)) is None:
            return "The answer does not end with a final value."
        body, final = end[1], int(end[2])
    lines = [line.strip() for line in body.split(",") if line.strip()]
    value = problem.start
    for number, line in enumerate(lines, start=1):
        if number > len(problem.steps):
            return f"There is no step {number}."
        sign, amount = problem.steps[number - 1]
        right = value + amount if sign == "+" else value - amount
        if (read := _LINE.fullmatch(line)) is None:
            return f"Line {number} cannot be read."
        if (int(read[1]), read[2], int(read[3])) != (value, sign, amount):
            return f"Line {number} should begin with {value}{sign}{amount}."
        if int(read[4]) != right:
            return f"Line {number} is wrong: {value}{sign}{amount} is not {int(read[4])}."
        value = right
    if whole and len(lines) < len(problem.steps):
        return f"Step {len(lines) + 1} is missing."
    return None if final is None or final == value else f"The final value should be {value}."


def partial_right(item: Item, partial: Partial) -> float:
    """The exact verifier of beam search: 1 while nothing is wrong, else 0."""
    return float(fault(problem_of(item), partial.text, partial.whole) is None)


def answer_right(item: Item, sample: Sample) -> float:
    """The exact verifier of best of n."""
    return float(fault(problem_of(item), sample.text, whole=True) is None)


def told(item: Item, sample: Sample) -> str | None:
    """The exact checker of revision: what it found, and the problem once more."""
    found = fault(problem_of(item), sample.text, whole=True)
    return None if found is None else f"{found} {item.question}"


@dataclass(frozen=True, slots=True)
class Noisy:
    """The exact verifier with errors: accepts what is right with chance ``t``, and what is wrong with chance ``f``.

    Errors are drawn anew for every answer or part of one, by its random numbers: independent, as the closed forms
    assume, and the same again in the next run.
    """

    t: float
    f: float
    seed: int = 0

    def accepts(self, item: Item, text: str, whole: bool, nonce: tuple[int, ...]) -> bool:
        """Its verdict on one answer."""
        right = fault(problem_of(item), text, whole) is None
        digest = hashlib.sha256(f"{self.seed}/{item.id}/{nonce}".encode()).digest()
        return int.from_bytes(digest[:8]) / 2**64 < (self.t if right else self.f)

    def partial(self, item: Item, partial: Partial) -> float:
        """For beam search."""
        return float(self.accepts(item, partial.text, partial.whole, partial.nonce))

    def answer(self, item: Item, sample: Sample) -> float:
        """For best of n."""
        return float(self.accepts(item, sample.text, True, (sample.seed, sample.index)))

    def told(self, item: Item, sample: Sample) -> str | None:
        """For revision. Where it is wrong about a right answer it cannot name a line."""
        if self.answer(item, sample):
            return None
        return f"{fault(problem_of(item), sample.text, whole=True) or 'A line is wrong.'} {item.question}"
