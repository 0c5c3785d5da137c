"""Progress bars: callbacks for the driver and the evaluation. Without a terminal they write a line now and then."""

import sys
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Self, TextIO

from tqdm import tqdm

from reef_harness.compute import Outcome
from reef_harness.drivers import Progress
from reef_harness.evaluation import Answer

_LINE_EVERY_S = 10.0  # without a terminal


class _Bar:
    def __init__(self, total: int | None, name: str, unit: str) -> None:
        terminal = sys.stderr.isatty()
        pause_s = 0.1 if terminal else _LINE_EVERY_S
        self._bar: tqdm[Any] = tqdm(
            total=total,
            desc=name,
            unit=unit,
            file=sys.stderr if terminal else _Lines(sys.stderr),
            dynamic_ncols=terminal,
            mininterval=pause_s,
            maxinterval=pause_s,
            miniters=0,
            leave=True,
            position=None if terminal else 0,  # where bars lie below one another, they move the cursor
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


class _DriverBar(_Bar, ABC):
    def begin(self, progress: Progress) -> None:
        """Show what earlier lives have done; it does not count into the pace."""
        self._bar.n = self._bar.initial = self._bar.last_print_n = self._at(progress)
        self(progress)
        self._bar.refresh()

    @abstractmethod
    def _reached(self, progress: Progress) -> int:
        """How far the driver is, in the bar's unit."""

    def _release(self, progress: Progress) -> str | None:
        return progress.answered_by

    def _at(self, progress: Progress) -> int:
        reached = self._reached(progress)
        return min(reached, int(self._bar.total or reached))

    def __call__(self, progress: Progress) -> None:
        """Show where the driver stands."""
        reward, length = _known(progress.reward, ".2f"), _known(progress.length, ".0f")
        self._bar.set_postfix_str(
            f"reward {reward}, length {length}, rollouts {progress.rollouts}, failed {progress.failed}, "
            f"release {self._release(progress) or '-'}, staleness {_known(progress.staleness, '.1f')}"
            + (f"; {progress.standstill}" if progress.standstill else ""),
            refresh=False,
        )
        self._bar.update(self._at(progress) - self._bar.n)


class ReleaseBar(_DriverBar):
    """One bar over a driver's releases: ``progress=ReleaseBar(45)``.

    Beside it reward, length and staleness of the last batch of rollouts, and the last release that they trained; before
    there is one, the release that answered last.
    """

    def __init__(self, releases: int) -> None:
        super().__init__(releases, "training", "release")

    def _reached(self, progress: Progress) -> int:
        return progress.releases

    def _release(self, progress: Progress) -> str | None:
        return progress.release or progress.answered_by


class RolloutBar(_DriverBar):
    """One bar over a driver's reported rollouts, for runs that no number of releases ends; None: no end is known.

    Beside it the same, and the release that answered last.
    """

    def __init__(self, rollouts: int | None) -> None:
        super().__init__(rollouts, "rollouts", "rollout")

    def _reached(self, progress: Progress) -> int:
        return progress.rollouts - progress.failed


class AnswerBar(_Bar):
    """One bar over an evaluation's answers, with the share correct so far: ``progress=AnswerBar(1000, "before")``."""

    def __init__(self, items: int, name: str) -> None:
        super().__init__(items, name, "answer")
        self._correct = self._graded = 0

    def __call__(self, answer: Answer) -> None:
        """Count one answer."""
        if answer.verdict:
            self._graded += 1
            self._correct += answer.verdict.correct
        if self._graded:
            self._bar.set_postfix_str(f"correct {self._correct / self._graded:.3f}", refresh=False)
        self._bar.update()


class OutcomeBar(_Bar):
    """One bar over a method's outcomes, with how many items failed: ``progress=OutcomeBar(200, "vote")``."""

    def __init__(self, items: int, name: str) -> None:
        super().__init__(items, name, "item")
        self._failed = 0

    def __call__(self, outcome: Outcome) -> None:
        """Count one outcome."""
        self._failed += outcome.error is not None
        self._bar.set_postfix_str(f"failed {self._failed}", refresh=False)
        self._bar.update()


def tell(line: str) -> None:
    """Write a line between the bars that are drawn."""
    tqdm.write(line, file=sys.stderr)


def _known(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


class _Lines:
    """What a bar writes, as lines: a log keeps no carriage returns."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write one state of the bar as a line; the moves of the cursor between them are none."""
        if line := text.strip("\r\n "):
            self._stream.write(line + "\n")
        return len(text)

    def flush(self) -> None:
        """Flush."""
        self._stream.flush()
