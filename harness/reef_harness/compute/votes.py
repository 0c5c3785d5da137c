"""Counting what answers say."""

import math
from collections import Counter
from collections.abc import Sequence


class Votes:
    """A running count. An answer of None could not be read: it was drawn, and votes for nothing."""

    def __init__(self, answers: Sequence[str | None] = ()) -> None:
        self.answers: list[str | None] = list(answers)

    def add(self, answer: str | None) -> None:
        """Count one more."""
        self.answers.append(answer)

    @property
    def leaders(self) -> tuple[str, ...]:
        """The answers with the most votes, in the order in which they came first."""
        votes = self._votes()
        return tuple(answer for answer, count in votes.items() if count == max(votes.values()))

    @property
    def lead(self) -> int:
        """By how many votes the first is ahead of the second; 0 for a tie and for no votes at all."""
        counts = [count for _, count in self._votes().most_common(2)]
        return counts[0] - counts[1] if len(counts) == 2 else sum(counts)

    def decided(self, remaining: int) -> bool:
        """Whether ``remaining`` further votes, whatever they say, leave the same single leader.

        The second could win all of them, or an answer not seen yet: both stay behind exactly where lead > remaining.
        """
        return self.lead > remaining

    @property
    def entropy(self) -> float:
        """Entropy of the drawn answers in nats; those that could not be read count as one answer of their own."""
        shares = [count / len(self.answers) for count in Counter(self.answers).values()]
        return max(0.0, -math.fsum(share * math.log(share) for share in shares))

    def _votes(self) -> Counter[str]:
        return Counter(answer for answer in self.answers if answer is not None)
