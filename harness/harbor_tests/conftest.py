"""The real service with the starter model, training, and Harbor's own command beside it, each a process of its own.

These tests run in .venv-harbor (Python 3.12), the service in .venv: ``make test-harbor``.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from reef_harness.harbor import reports
from reef_harness.harbor.environments import BwrapEnvironment
from reef_harness.sync import SyncClient

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TASKS = HERE / "tasks"
BATCH = 6  # reports a step: those of one trial
FLAGS = ("--recipe.config.batch-size", str(BATCH), "--recipe.config.critic-warmup-steps", "0")
CONTEXT = 8192  # terminus-2 begins with 2,700 tokens of the starter's; its own context is 512


def _no_bwrap() -> str:
    try:
        BwrapEnvironment.preflight()
    except SystemExit as why:
        return str(why)
    return ""


NO_BWRAP = _no_bwrap()
needs_bwrap = pytest.mark.skipif(bool(NO_BWRAP), reason=NO_BWRAP)


@dataclass(frozen=True)
class Service:
    """Where it is, and its key."""

    url: str
    key_file: Path

    def client(self) -> SyncClient:
        """A client of it."""
        return SyncClient(self.url, scenario="arithmetic", key_file=self.key_file)


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """SAO on the starter model: every six graded rollouts make a release."""
    folder = tmp_path_factory.mktemp("service")
    model = _with_longer_context(folder / "starter")
    python = ROOT / ".venv" / "bin" / "python"
    assert python.exists(), "the service runs in .venv: make install"
    command = [str(python), str(HERE / "serve.py"), "recipes/sao/serve.yaml", str(folder / "run")]
    with (folder / "said.log").open("w+") as said:
        process = subprocess.Popen(
            [*command, "--inference.model-path", str(model), *FLAGS],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        assert process.stdin and process.stdout
        try:
            url = process.stdout.readline().strip()
            said.seek(0)
            assert url, f"the service did not start:\n{said.read()}"
            yield Service(url, folder / "run" / "api-key")
        finally:
            process.stdin.close()  # it ends the service and all that the service started
            process.wait(150)  # more than serve.py takes, which kills what does not end
            process.stdout.close()


def _with_longer_context(model: Path) -> Path:
    """The starter model with room for an agent's prompts. It was not trained on such lengths: it talks nonsense."""
    shutil.copytree(ROOT / "recipes" / "arithmetic" / "starter", model)
    for name, field in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        settings = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**settings, field: CONTEXT}))
    return model


@dataclass(frozen=True)
class Job:
    """A job that has run: its folder, and what the command said."""

    folder: Path
    said: str

    @property
    def log(self) -> str:
        """What Harbor's log of the job holds."""
        return (self.folder / "job.log").read_text()

    @property
    def trials(self) -> list[dict[str, Any]]:
        """Every trial's result.json."""
        return list(reports.results(self.folder))

    @property
    def reports(self) -> dict[str, dict[str, Any]]:
        """The lines of reef-reports.jsonl, by trial."""
        return {line["trial"]: line for line in reports.read(self.folder)}


class Harness:
    """``reef-harness harbor`` against a service, as a user types it."""

    def __init__(self, service: Service, folder: Path) -> None:
        self.service, self.folder, self.temporary = service, folder, folder / "tmp"

    def run(self, name: str, tasks: Path, *options: str, harbor: tuple[str, ...] = ()) -> Job:
        """Run a job (again, where there is one of that name) and wait for its end."""
        jobs = self.folder / "jobs"
        harbor = ("--job-name", name, "--jobs-dir", str(jobs), "--quiet", "--timeout-multiplier", "5", *harbor)
        done = self.command("run", str(tasks), *options, "--", *harbor)
        assert done.returncode == 0, done.stdout + done.stderr
        return Job(jobs / name, done.stdout + done.stderr)

    def report(self, job: Job, *options: str) -> subprocess.CompletedProcess[str]:
        """Post what a job owes."""
        return self.command("report", str(job.folder), *options)

    def command(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``reef-harness harbor COMMAND``; options of ours come before ``--``."""
        process = self.start(command, *arguments)
        try:
            out, err = process.communicate()
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def start(self, command: str, *arguments: str) -> subprocess.Popen[str]:
        """The same, as it runs. Environments are folders in ``temporary``."""
        self.temporary.mkdir(exist_ok=True)
        ours = ("--url", self.service.url, "--key-file", str(self.service.key_file))
        return subprocess.Popen(
            [sys.executable, "-m", "reef_harness", "harbor", command, *ours, *arguments],
            env={**_without_keys(), "PYTHONPATH": str(HERE), "TMPDIR": str(self.temporary)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def _without_keys() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("REEF_", "OPENAI_", "ANTHROPIC_"))
    }


@pytest.fixture
def harness(service: Service, tmp_path: Path) -> Harness:
    """The command, with a folder for jobs."""
    return Harness(service, tmp_path)


def wait_for_trained(client: SyncClient, reports: list[str], at_least: int, timeout_s: float = 300) -> dict[str, str]:
    """The releases that trained the reports, once ``at_least`` are trained."""
    deadline = time.monotonic() + timeout_s
    while True:
        states = [client.report_state(report) for report in reports]
        trained = {state.id: state.release for state in states if state.state == "trained" and state.release}
        if len(trained) >= at_least:
            return trained
        assert time.monotonic() < deadline, [(state.state, state.reason) for state in states]
        time.sleep(0.25)
