"""How the time from one release to the next is spent, and what is dropped on the way: figures of the later one's row.

They are measured, not made: a release that is trained again has the same content and other figures.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Pace:
    """One for each dispatcher; everything counts from the last commit, or from the start of the loop."""

    def __init__(self, closed_s: Callable[[], float]) -> None:
        """`closed_s` gives the seconds so far in which engines took no requests."""
        self._closed_s = closed_s
        self._commit_s: float | None = None
        self._reserve_s: float | None = None  # None: the batch was reserved by an owner before
        self._dropped: Counter[str] = Counter()
        self.begin()

    def dropped(self, reason: str, count: int = 1) -> None:
        """Reports ended without being trained."""
        self._dropped[reason] += count

    def reserved(self, seconds: float) -> None:
        """A batch was reserved and loaded."""
        self._reserve_s = seconds

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The trainer has nothing to do until reports come."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._wait_s += time.perf_counter() - started

    def figures(self, num_tokens: int, step_s: float) -> dict[str, float]:
        """Metrics of the release that is about to be committed, by the names in docs/metrics.md.

        Args:
            num_tokens: sampled tokens that its batch trained on.
            step_s: seconds of its step.
        """
        passed_s = time.perf_counter() - self._since
        found = {
            "tokens_per_s": num_tokens / step_s,
            "async/trainer_wait_share": self._wait_s / passed_s,
            "async/engine_wait_share": (self._closed_s() - self._closed_before_s) / passed_s,
            "seconds/wait": self._wait_s,
        }
        if self._reserve_s is not None:
            found["seconds/reserve"] = self._reserve_s
        if self._commit_s is not None:
            found["seconds/commit"] = self._commit_s
        return found | {f"dropped/{reason}": float(count) for reason, count in sorted(self._dropped.items())}

    def committed(self, seconds: float) -> None:
        """A release was committed, which took so long: the next one's figures begin here."""
        self._commit_s = seconds
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self._since = time.perf_counter()
        self._closed_before_s = self._closed_s()
        self._wait_s = 0.0
        self._reserve_s = None
        self._dropped.clear()
