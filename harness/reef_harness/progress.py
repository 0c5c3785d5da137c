"""Progress bars for a terminal: callbacks for the driver and the evaluation."""

from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from reef_harness.drivers import Progress
from reef_harness.evaluate import Answer


class _Bar:
    def __init__(self, bar: "tqdm[Any]") -> None:
        self._bar = bar

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._bar.close()


class ReleaseBar(_Bar):
    """One bar over a driver's releases, with the reward and the last release: ``progress=ReleaseBar(60)``."""

    def __init__(self, releases: int) -> None:
        super().__init__(tqdm(total=releases, desc="training", unit="release", dynamic_ncols=True))

    def __call__(self, progress: Progress) -> None:
        """Show where the driver stands."""
        self._bar.set_postfix_str(f"reward {progress.reward:.2f}, rollouts {progress.rollouts}, "
                                  f"failed {progress.failed}, release {progress.release or '-'}", refresh=False)
        total = self._bar.total or 0
        self._bar.update(min(progress.releases, total) - self._bar.n)
        self._bar.refresh()


class AnswerBar(_Bar):
    """One bar over an evaluation's answers, with the share correct so far: ``progress=AnswerBar(1000, "before")``."""

    def __init__(self, items: int, name: str) -> None:
        super().__init__(tqdm(total=items, desc=name, unit="answer", dynamic_ncols=True))
        self._correct = self._graded = 0

    def __call__(self, answer: Answer) -> None:
        """Count one answer."""
        if answer.verdict:
            self._graded += 1
            self._correct += answer.verdict.correct
        if self._graded:
            self._bar.set_postfix_str(f"correct {self._correct / self._graded:.3f}", refresh=False)
        self._bar.update()
