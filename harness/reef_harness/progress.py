"""Progress bars: callbacks for the driver and the evaluation. Without a terminal they write a line now and then."""

import sys
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from reef_harness.drivers import Progress
from reef_harness.evaluation import Answer


class _Bar:
    def __init__(self, total: int, name: str, unit: str) -> None:
        pause_s = 0.1 if sys.stderr.isatty() else 10.0
        self._bar: tqdm[Any] = tqdm(
            total=total,
            desc=name,
            unit=unit,
            dynamic_ncols=True,
            mininterval=pause_s,
            maxinterval=pause_s,
            miniters=0,
            leave=None,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()


class ReleaseBar(_Bar):
    """One bar over a driver's releases, with the reward and the last release: ``progress=ReleaseBar(45)``."""

    def __init__(self, releases: int) -> None:
        super().__init__(releases, "training", "release")

    def __call__(self, progress: Progress) -> None:
        """Show where the driver stands."""
        self._bar.set_postfix_str(
            f"reward {progress.reward:.2f}, rollouts {progress.rollouts}, "
            f"failed {progress.failed}, release {progress.release or '-'}",
            refresh=False,
        )
        total = self._bar.total or 0
        self._bar.update(min(progress.releases, total) - self._bar.n)


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
