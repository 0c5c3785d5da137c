"""The problems in order, as Harbor trials: ``python -m recipes.sao.examples.imo_answerbench.run --out DIRECTORY``.

Each trial is one ``reef-harness harbor run``: six rollouts, each graded and reported at once, the verifier's reward
reported when the trial ends. One trial after another; with ``--wait`` the next begins once the service has made a
release. What became of each trial (rewards, reports, releases) is printed, and written to DIRECTORY/trials.jsonl, a
line for each. The same command goes on where an earlier one ended, and runs again what crashed; with ``--states`` it
runs nothing and looks again at what became of the reports.

Harbor needs Python 3.12: it is started with ``--python``, by default that of .venv-harbor (`make harbor`).
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from reef_harness import service
from reef_harness.client import Client
from reef_harness.errors import HarnessError, NotFound
from reef_harness.harbor import reports
from reef_harness.harbor.verdict import Verdict, verdict_of

HERE = Path(__file__).resolve().parent
PYTHON = Path(".venv-harbor/bin/python")
ROLLOUTS = 6


@dataclass(frozen=True, slots=True)
class Report:
    """A report of a trial and where it stands. ``release`` is the one that it trained; ``score`` None: not graded."""

    id: str
    score: float | None
    state: str
    reason: str | None
    release: str | None


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of one trial: a line of trials.jsonl.

    ``reward`` is the verifier's, None where there is none; ``error`` is why nothing was reported of it.
    """

    task: str
    trial: str
    reward: float | None
    error: str | None
    answered_by: dict[str, int]  # rollouts by the release that gave them
    failed: int  # rollouts
    rollouts: tuple[Report, ...]
    verdict: Report | None


def tasks_in(directory: Path) -> list[Path]:
    """The tasks of a directory, in order of their names. Raises HarnessError where there is none."""
    found = sorted(path.parent for path in directory.glob("*/task.toml"))
    if not found:
        raise HarnessError(f"{directory} holds no task (a directory with a task.toml)")
    return found


def attempts(jobs: Path, task: str) -> list[Path]:
    """The jobs that a task has had, in order: TASK, and where that one came to nothing TASK.2, TASK.3, ..."""
    found: list[Path] = []
    while (job := jobs / _job_name(task, len(found) + 1)).is_dir():
        found.append(job)
    return found


def _job_name(task: str, attempt: int) -> str:
    return task if attempt == 1 else f"{task}.{attempt}"


def last_result(job: Path) -> dict[str, Any] | None:
    """The finished trial of a job, None while there is none that can be read; of several tries the last."""
    if not (job / "config.json").is_file():
        return None
    found: list[dict[str, Any]] = []
    for path in reports.result_files(job):
        try:
            found.append(reports.read_result(path))
        except HarnessError as error:  # cut short, by a full disk or a kill: that trial never came to its end
            print(error, file=sys.stderr)
    return max(found, key=lambda result: str(result.get("finished_at"))) if found else None


def graded(job: Path) -> bool:
    """Whether a job's trial came to a reward that can be reported; one that crashed is to be run again."""
    result = last_result(job)
    return result is not None and isinstance(verdict_of(result), Verdict)


async def trial_of(client: Client, task: Path, job: Path, result: dict[str, Any]) -> Trial:
    """A finished trial, with the states that its reports have now."""
    ours = ((result.get("agent_result") or {}).get("metadata") or {}).get("reef") or {}
    sampled = ours.get("rollouts", [])
    line = next((each for each in reports.read(job) if each["trial"] == result["trial_name"]), None)
    rewards = (result.get("verifier_result") or {}).get("rewards") or {}
    posted = [each for each in sampled if each["report"]]
    states = await asyncio.gather(*(_report(client, each["report"], each["score"]) for each in posted))
    verdict = await _report(client, line["report"], line["score"]) if line and line["status"] == "reported" else None
    return Trial(
        task=task.name,
        trial=result["trial_name"],
        reward=rewards.get("reward"),
        error=line["reason"] if line and line["status"] != "reported" else None,
        answered_by=dict(Counter(each["release"] for each in sampled if each["release"])),
        failed=sum(each["error"] is not None for each in sampled),
        rollouts=tuple(states),
        verdict=verdict,
    )


async def _report(client: Client, id: str, score: float | None) -> Report:
    try:
        state = await client.report_state(id)
    except NotFound:
        return Report(id, score, "unknown", "the service does not have it", None)
    return Report(id, score, state.state, state.reason, state.release)


def told(trial: Trial) -> str:
    """What became of a trial, for people."""
    lines = [f"{trial.task}  ({trial.trial})"]
    by = ", ".join(f"{count} of {release}" for release, count in trial.answered_by.items()) or "none"
    lines.append(f"  rollouts: {by}" + (f"; {trial.failed} failed" if trial.failed else ""))
    scores = [report.score for report in trial.rollouts if report.score is not None]
    if trial.rollouts:
        right = sum(score == 1 for score in scores)
        lines.append(f"  reports:  {right} of {len(scores)} right; {_states(trial.rollouts)}")
    reward = "no reward" if trial.reward is None else f"reward {trial.reward:g}"
    after = f"reported: {_states([trial.verdict])}" if trial.verdict else f"not reported: {trial.error or 'unknown'}"
    return "\n".join([*lines, f"  verifier: {reward}, {after}"])


def _states(all_reports: Sequence[Report]) -> str:
    counted = Counter(
        f"{each.state}{f' in {each.release}' if each.release else ''}{f' ({each.reason})' if each.reason else ''}"
        for each in all_reports
    )
    return ", ".join(f"{count} {name}" if len(all_reports) > 1 else name for name, count in counted.items())


def write(path: Path, trials: Sequence[Trial]) -> None:
    """Write all trials: the file is there whole, or as it was before."""
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.write_text("".join(json.dumps(asdict(trial)) + "\n" for trial in trials), encoding="utf-8")
    unfinished.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trials that are missing, say what became of all; 1 where one has nothing to report."""
    arguments = _parser().parse_args(argv)
    try:
        return asyncio.run(run(arguments))
    except KeyboardInterrupt:
        print("stopped; the same command goes on", file=sys.stderr)
        return 130
    except (HarnessError, OSError) as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 1


async def run(arguments: argparse.Namespace) -> int:
    """All tasks, one after another."""
    tasks = tasks_in(arguments.tasks)
    if not arguments.states and not arguments.python.exists():
        raise HarnessError(f"--python {arguments.python} is not there: `make harbor` makes one that has Harbor")
    jobs = arguments.out / "jobs"
    jobs.mkdir(parents=True, exist_ok=True)
    trials: list[Trial] = []
    async with await service.connect(arguments) as client:
        for task in tasks:
            if not arguments.states:
                await _trial(arguments, client, task, jobs)
            tried = attempts(jobs, task.name)
            result = last_result(tried[-1]) if tried else None
            if result is None:
                print(f"{task.name}: no trial is finished", flush=True)
                continue
            trials.append(await trial_of(client, task, tried[-1], result))
            print(told(trials[-1]), flush=True)
    write(arguments.out / "trials.jsonl", trials)
    print(f"wrote {arguments.out / 'trials.jsonl'}")
    return 0 if len(trials) == len(tasks) and all(trial.verdict for trial in trials) else 1


async def _trial(arguments: argparse.Namespace, client: Client, task: Path, jobs: Path) -> None:
    """Run a task's trial; where an earlier one came to a reward, only report what is owed of that."""
    tried = attempts(jobs, task.name)
    if tried and graded(tried[-1]):
        await _catch_up(client, tried[-1])
        return
    head = (await client.current_release()).id
    job = jobs / _job_name(task.name, len(tried) + 1)
    _harbor(arguments, client, task, job)
    if arguments.wait and graded(job):
        await _wait(client, head, arguments.wait_s)


def _harbor(arguments: argparse.Namespace, client: Client, task: Path, job: Path) -> None:
    """Run one trial to its end, whatever that is. A Ctrl-C reaches Harbor too, which ends the trial in order."""
    options = {"rollouts": arguments.rollouts, "concurrency": arguments.rollouts, "group": "false", "timeout_s": 3630}
    options |= {"max_tokens": arguments.max_tokens} if arguments.max_tokens else {}
    words = [str(arguments.python), "-m", "reef_harness", "harbor", "run", str(task)]
    words += ["--environment", arguments.environment, "--url", client.url, "--scenario", str(client.scenario)]
    words += ["--key-file", str(arguments.key_file)]
    words += [part for name, value in options.items() for part in ("--option", f"{name}={value}")]
    words += ["--", "--jobs-dir", str(job.parent), "--job-name", job.name, "--n-concurrent", "1", "--quiet"]
    log_file = job.with_name(f"{job.name}.log")
    with log_file.open("ab") as log:
        status = subprocess.run(words, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if status:
        print(f"{task.name}: Harbor ended with status {status}; its output is in {log_file}", flush=True)


async def _catch_up(client: Client, job: Path) -> None:
    """Post a verdict that an earlier run could not."""
    async for line in reports.Reports(job, client).missing():
        print(line)


async def _wait(client: Client, head: str, wait_s: float) -> None:
    """Wait until the service has made a release since ``head`` was the newest; say so where it does not."""
    try:
        release = await client.wait_for_release(after=head, timeout_s=wait_s)
    except TimeoutError:
        queue = await client.queue()
        print(f"no release within {wait_s:g} s: {queue['pending']} reports wait for a batch to be full", flush=True)
    else:
        print(f"release {release.id} was made", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__.splitlines()[0])
    service.add_options(parser)
    parser.add_argument("--tasks", type=Path, default=HERE / "tasks", help="a directory of tasks (default: the three)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIRECTORY")
    parser.add_argument("--rollouts", type=int, default=ROLLOUTS, help=f"of each trial ({ROLLOUTS})")
    parser.add_argument("--max-tokens", type=int, help="of each answer (default: what the context leaves)")
    parser.add_argument("--environment", default="docker", help="docker, bwrap, hostdir, ...: reef-harness harbor run")
    parser.add_argument("--python", type=Path, default=PYTHON, help=f"one that has Harbor ({PYTHON})")
    parser.add_argument("--wait", action="store_true", help="for a release after each trial")
    parser.add_argument("--wait-s", type=float, default=600.0, help="how long (600)")
    parser.add_argument("--states", action="store_true", help="run nothing, look at what became of the reports")
    return parser


if __name__ == "__main__":
    sys.exit(main())
