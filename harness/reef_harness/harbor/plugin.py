"""``--plugin reef``: when a trial ends, the verifier's reward is reported against the trial's receipts."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from harbor.models.job.plugin import BaseJobPlugin
from harbor.trial.hooks import TrialHookEvent
from harbor.utils.logger import logger as harbor_logger

from reef_harness.client import Client, Retry
from reef_harness.harbor.reports import Line, Reports
from reef_harness.harbor.verdict import REWARD_KEY
from reef_harness.keys import KEY_FILE

if TYPE_CHECKING:
    from harbor.job import Job
    from harbor.models.job.config import RetryConfig
    from harbor.models.job.result import JobResult

logger = harbor_logger.getChild("reef")  # so that it is in the job's log


class ReefReports(BaseJobPlugin):
    """Reports each trial once, by job and trial name; what fails is in the job's ``reef-reports.jsonl``.

    Of a trial that Harbor tries several times it is the last attempt: one id cannot stand for the receipts of two.

    ``graded_exceptions`` is a comma-separated list of exception types that do not keep a trial from being reported. The
    key is REEF_API_KEY, else that in ``key_file``. A job that is resumed first reports what earlier lives left open.
    Its hooks never raise, for that would end the job.
    """

    def __init__(
        self,
        url: str = "http://127.0.0.1:8080",
        key_file: str = str(KEY_FILE),
        reward_key: str = REWARD_KEY,
        graded_exceptions: str = "",
        patience_s: float = 60.0,
    ) -> None:
        super().__init__()
        self._client = Client(url, key_file=Path(key_file), retry=Retry(total_s=float(patience_s)))
        self._reward_key = str(reward_key)
        self._graded = frozenset(name.strip() for name in str(graded_exceptions).split(",") if name.strip())
        self._reports: Reports | None = None
        self._job_dir = Path()
        self._counts: dict[str, int] = {}
        self._retry: RetryConfig | None = None
        self._ended: Counter[str] = Counter()  # attempts of each trial, of this life of the job

    async def on_job_start(self, job: "Job") -> None:
        """Listen to the job's trials."""
        self._job_dir, self._retry = job.job_dir, job.config.retry
        self._reports = Reports(job.job_dir, self._client, self._reward_key, self._graded)
        job.on_trial_ended(self.on_trial_ended)
        if job.is_resuming:
            await self._catch_up(self._reports)

    async def on_trial_ended(self, event: TrialHookEvent) -> None:
        """Report one trial, unless Harbor tries it again."""
        if self._reports is None:
            return
        try:
            if self._tried_again(event):
                logger.info("reef: %s: nothing reported yet: Harbor tries it again", event.trial_name)
                return
            self._say(await self._reports.trial(event.result.model_dump(mode="json")))
        except Exception:  # a supervisor: whatever is wrong here must not end the other trials
            logger.exception("reef: %s: the report could not be made", event.trial_name)
            self._counts["failed"] = self._counts.get("failed", 0) + 1

    def _tried_again(self, event: TrialHookEvent) -> bool:
        """As Harbor's queue decides once its hooks are done: after an attempt that raised only what may be retried."""
        attempt = self._ended[event.trial_name]
        self._ended[event.trial_name] += 1
        raised = event.result.recorded_exceptions()
        if self._retry is None or not raised or attempt >= self._retry.max_retries:
            return False
        return all(self._retry.is_retryable(each.exception_type) for each in raised)

    async def on_job_end(self, job_result: "JobResult") -> None:
        """Say what was reported, and what is owed."""
        told = ", ".join(f"{count} {status.replace('_', ' ')}" for status, count in sorted(self._counts.items()))
        with _last_words(self._job_dir / "job.log"):
            logger.info("reef: verdicts: %s", told or "none")
            if self._counts.get("failed"):
                logger.error("reef: post what failed later: reef-harness harbor report %s", self._job_dir)
        await self._client.close()

    async def _catch_up(self, reports: Reports) -> None:
        try:
            async for line in reports.missing():
                self._say(line)
        except Exception:  # as above
            logger.exception("reef: what %s owes could not be reported", self._job_dir)

    def _say(self, line: Line) -> None:
        self._counts[line.status] = self._counts.get(line.status, 0) + 1
        (logger.error if line.status == "failed" else logger.info)("reef: %s", line)


@contextmanager
def _last_words(log: Path) -> Iterator[None]:
    """Have what is logged seen and kept: Harbor takes its own handlers away before it tells plugins of the end."""
    handlers: list[logging.Handler] = [logging.StreamHandler(), logging.FileHandler(log, encoding="utf-8")]
    for handler in handlers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
