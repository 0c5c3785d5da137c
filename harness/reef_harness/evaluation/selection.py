"""Picking one answer of several: by majority, or by a grader's score."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Pick = Literal["right", "wrong", "tie", "none"]


@dataclass(frozen=True, slots=True)
class Vote:
    """The outcome of a vote on one item.

    ``tie``: answers with the most votes are some right, some wrong, so the vote decides nothing. ``none``: no answer
    could be read. ``expected`` is the chance to be right where ties are broken at random. ``winners`` are the answers
    with the most votes, in the order in which they came first.
    """

    pick: Pick
    expected: float
    winners: tuple[str, ...]


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> Vote:
    """Vote on one item's answers; ``None`` is an answer that could not be read and does not vote.

    A winner is right where the first answer that says it was graded right. Source: Wang et al., Self-Consistency
    Improves Chain of Thought Reasoning in Language Models (2022), with ties kept.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return Vote("none", 0.0, ())
    most = max(votes.values())
    winners = tuple(answer for answer, count in votes.items() if count == most)
    right = [correct[answers.index(winner)] for winner in winners]
    pick: Pick = "right" if all(right) else "tie" if any(right) else "wrong"
    return Vote(pick, sum(right) / len(right), winners)


@dataclass(frozen=True, slots=True)
class Best:
    """The answers that a grader scores highest: their positions, in order (none: nothing was scored).

    ``pick`` is the first of them, what a program takes that asks in this order.
    """

    positions: tuple[int, ...]

    @property
    def pick(self) -> int | None:
        """The first position with the highest score."""
        return self.positions[0] if self.positions else None

    def expected(self, correct: Sequence[bool]) -> float:
        """The chance that the pick is right where ties are broken at random; 0 where nothing was scored."""
        return sum(correct[i] for i in self.positions) / len(self.positions) if self.positions else 0.0


def best_of(scores: Sequence[float | None]) -> Best:
    """The best of one item's answers by ``scores``; ``None`` was not judged and cannot be picked."""
    given = [score for score in scores if score is not None]
    return Best(tuple(i for i, score in enumerate(scores) if given and score == max(given)))
