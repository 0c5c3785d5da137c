"""What every grader is: an answer's text in, a verdict out. What a model writes is never run in this process."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from reef_harness.types import Item

Outcome = Literal["correct", "incorrect", "review", "error"]


class BadGold(ValueError):  # noqa: N818
    """A gold that is not in the form its grader expects: no answer could ever equal it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A grade. A client posts ``score`` with ``outcome`` and ``reason_code``; a verdict without a score trains nothing.

    ``correct`` and ``incorrect`` have a score, ``review`` (a person must look) and ``error`` (the grader could not
    judge) have none. ``format_valid`` says whether the answer could be read at all, right or wrong. ``detail`` is for
    people: what was read, what a judge said. Raises ValueError for a score where there may be none, or the reverse.
    """

    outcome: Outcome
    score: float | None
    reason_code: str
    format_valid: bool
    grader: str
    version: str
    detail: str = ""

    def __post_init__(self) -> None:
        if (self.score is not None) != (self.outcome in ("correct", "incorrect")):
            raise ValueError(f"a verdict {self.outcome!r} cannot have the score {self.score}")

    @property
    def correct(self) -> bool:
        """Whether the answer is right."""
        return self.outcome == "correct"

    @property
    def graded(self) -> bool:
        """Whether the answer was judged: a verdict of review or error is none."""
        return self.score is not None


class Grader(ABC):
    """Judges answers. ``id`` is its name in reports; ``version`` changes with how it judges.

    Subclasses write :meth:`grade`; drivers and evaluations call :meth:`judge`, which never raises.
    """

    id: str
    version: str

    @abstractmethod
    def grade(self, text: str, gold: str, finish_reason: str) -> Verdict:
        """Judge one answer. ``finish_reason`` is the service's: "stop" when the model ended its turn itself.

        Raises BadGold for a gold that is not in the form this grader expects: no answer could ever equal it.
        """

    async def judge(self, item: Item, text: str, finish_reason: str) -> Verdict:
        """Judge one answer to ``item``; where that cannot be done, the verdict is ``error`` and says why."""
        if item.gold is None:
            return self.error("no_gold", f"item {item.id!r} has no gold answer")
        try:
            return await self.grade_later(item, item.gold, text, finish_reason)
        except BadGold as error:
            return self.error("bad_gold", f"item {item.id!r}: {error}")
        except Exception as error:  # noqa: BLE001 - a supervisor: one answer's grader fails, the others go on
            return self.error("grader_failed", f"item {item.id!r}: {type(error).__name__}: {error}")

    async def grade_later(self, item: Item, gold: str, text: str, finish_reason: str) -> Verdict:
        """What :meth:`judge` awaits. Graders that wait for something (a process, a model) do so here."""
        return self.grade(text, gold, finish_reason)

    def read(self, text: str) -> str | None:
        """What an answer says, without judging it: answers that say the same give the same text, so they can vote.

        None: it cannot be read, or this grader has no such form (then nothing can vote under it).
        """
        return None

    # ---- verdicts of this grader

    def decided(self, right: bool, reason_code: str, detail: str = "") -> Verdict:
        """A readable answer, right or wrong."""
        outcome: Outcome = "correct" if right else "incorrect"
        return Verdict(outcome, float(right), reason_code, True, self.id, self.version, detail)

    def malformed(self, reason_code: str, detail: str = "") -> Verdict:
        """An answer that breaks the format: wrong."""
        return Verdict("incorrect", 0.0, reason_code, False, self.id, self.version, detail)

    def review(self, reason_code: str, detail: str = "") -> Verdict:
        """An answer that only a person can judge."""
        return Verdict("review", None, reason_code, True, self.id, self.version, detail)

    def error(self, reason_code: str, detail: str = "") -> Verdict:
        """The grader itself could not judge."""
        return Verdict("error", None, reason_code, False, self.id, self.version, detail)
