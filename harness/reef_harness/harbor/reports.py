"""``reef-reports.jsonl`` beside a job's trials: what became of each verdict, so that what failed can be posted later.

    {"at", "trial", "task", "status": "reported", "report", "score", "state", "reason"}   the service has it
    {"at", "trial", "task", "status": "not_graded", "reason"}                             there is nothing to report
    {"at", "trial", "task", "status": "failed", "report", "score", "reason"}              `reef-harness harbor report`

A failed line has neither report nor score where the trial's result.json cannot be read.

The last line of a trial counts. A report has the same id and body each time, so the service takes it once.
"""

import json
import time
from collections.abc import AsyncIterator, Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from reef_harness.client import Client
from reef_harness.errors import HarnessError
from reef_harness.harbor.verdict import REWARD_KEY, NotGraded, Verdict, verdict_of
from reef_harness.types import Json

FILE = "reef-reports.jsonl"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the file, and what a person is told."""

    trial: str
    task: str
    status: str
    reason: str | None
    report: str | None = None
    score: float | None = None
    state: str | None = None

    def __str__(self) -> str:
        if self.status == "reported":
            after = f", {self.reason}" if self.reason else ""
            return f"{self.trial}: reward {self.score:g} reported: {self.state}{after} ({self.report})"
        if self.status == "failed":
            what = "it" if self.score is None else f"reward {self.score:g}"
            return f"{self.trial}: {what} could NOT be reported: {self.reason}"
        return f"{self.trial}: nothing reported: {self.reason}"


class Reports:
    """The reports of one job. Verdicts are read by ``reward_key`` and ``graded_exceptions``: see :func:`verdict_of`."""

    def __init__(
        self, job_dir: Path, client: Client, reward_key: str = REWARD_KEY, graded_exceptions: Set[str] = frozenset()
    ) -> None:
        self._job_dir, self._client = job_dir, client
        self._reward_key, self._graded_exceptions = reward_key, graded_exceptions

    async def trial(self, result: Json) -> Line:
        """Report a trial, or say why not, and write it down. A service that refuses or is down is a line as well."""
        found = verdict_of(result, self._reward_key, self._graded_exceptions)
        line = Line(found.trial, found.task, "not_graded", found.reason) if isinstance(found, NotGraded) else None
        line = line or await self._post(found)  # type: ignore[arg-type]
        self._write(line)
        return line

    async def missing(self) -> AsyncIterator[Line]:
        """Report every finished trial of the job that the file does not say is reported.

        A result that cannot be read is a failed line, named after its folder, and the others go on.
        """
        reported = {line["trial"] for line in read(self._job_dir) if line["status"] == "reported"}
        for path in result_files(self._job_dir):
            try:
                result = read_result(path)
            except HarnessError as error:
                line = Line(path.parent.name, "", "failed", str(error))
                self._write(line)
                yield line
                continue
            if result["trial_name"] not in reported:
                yield await self.trial(result)

    async def _post(self, verdict: Verdict) -> Line:
        try:
            state = await self._client.report(
                verdict.references,
                verdict.score,
                rewards=verdict.rewards,
                grader=("harbor", "1"),
                metadata=verdict.metadata,
                report_id=verdict.id,
            )
        except HarnessError as error:
            told = f"{type(error).__name__}: {error}"
            return Line(verdict.trial, verdict.task, "failed", told, verdict.id, verdict.score)
        return Line(verdict.trial, verdict.task, "reported", state.reason, verdict.id, verdict.score, state.state)

    def _write(self, line: Line) -> None:
        fields = {name: getattr(line, name) for name in Line.__slots__}
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with (self._job_dir / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at": at} | {k: v for k, v in fields.items() if v is not None}) + "\n")


def read(job_dir: Path) -> list[Json]:
    """The last line of each trial; none where the file is not there. A line that was cut by a crash is left out."""
    path = job_dir / FILE
    last: dict[str, Json] = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        last[line["trial"]] = line
    return list(last.values())


def result_files(job_dir: Path) -> list[Path]:
    """The result.json of each finished trial of a job, by folder. Raises HarnessError where it is no job's folder."""
    if not (job_dir / "config.json").is_file():
        raise HarnessError(f"{job_dir} is no folder of a Harbor job: it has no config.json")
    return sorted(job_dir.glob("*/result.json"))


def results(job_dir: Path) -> Iterator[Json]:
    """The finished trials of a job, by folder. Raises HarnessError where one cannot be read, or there is no job."""
    return map(read_result, result_files(job_dir))


def read_result(path: Path) -> Json:
    """A finished trial. Raises HarnessError where the file is cut short or is no trial's result."""
    try:
        result: Json = json.loads(path.read_text(encoding="utf-8"))
        verdict_of(result)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise HarnessError(f"cannot read {path}: {type(error).__name__}: {error}") from error
    return result
