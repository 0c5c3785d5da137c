"""``reef-harness harbor run``: Harbor's own command, with an agent that asks a service and the plugin that reports.

The command that is run is printed and can be copied. The key is in no argument, only in the variable REEF_API_KEY of
that one process: an agent that speaks to a model takes it from there (--api-key-name). OPENAI_API_KEY and the like stay
as they are, for a verifier that has a judge of its own would send what is in them to whom it asks.
"""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from reef_harness.errors import HarnessError

ENVIRONMENTS = {
    "hostdir": "reef_harness.harbor.environments:HostDirEnvironment",
    "bwrap": "reef_harness.harbor.environments:BwrapEnvironment",
}
OURS = "reef_harness.harbor.agent:HarborAgent"
_RUNS_NOTHING = frozenset({"reef", OURS, "oracle", "nop"})  # agents that run no command of a model's
_ANTHROPIC = frozenset({"claude-code"})  # speaks Messages; the others speak OpenAI's APIs
_KEY = "REEF_API_KEY"
_DATASET = re.compile(r"[\w-][\w.-]*(?:/[\w-][\w.-]*(?:@\S+)?|@\S+)")  # NAME@VERSION or ORG/NAME[@REF]
_HARBOR = "import sys; from harbor.cli.main import app; sys.argv[0] = 'harbor'; sys.exit(app())"


class NoHarbor(HarnessError):  # noqa: N818
    """Harbor is not installed, or this Python is too old for it."""


@dataclass(frozen=True, slots=True)
class Service:
    """Where agents ask and the plugin reports."""

    url: str
    scenario: str
    key: str | None
    key_file: Path


def check_harbor(version: tuple[int, int] = sys.version_info[:2]) -> None:
    """Raise NoHarbor, with what to do, where Harbor cannot run."""
    how = "python3.12 -m venv .venv-harbor && .venv-harbor/bin/pip install './harness[harbor]' (make harbor does it)"
    if version < (3, 12):
        raise NoHarbor(f"Harbor needs Python 3.12 or newer, this is {version[0]}.{version[1]}: {how}")
    if importlib.util.find_spec("harbor") is None:
        raise NoHarbor(f"Harbor is not installed for {sys.executable}: {how}")


def arguments_of(
    tasks: str, agent: str, environment: str, service: Service, agent_options: Sequence[str], more: Sequence[str]
) -> list[str]:
    """The arguments of ``harbor``. ``more`` come last and so win; ``agent_options`` are NAME=VALUE for the agent.

    Raises HarnessError where commands of a model's, or of a task that was downloaded, would run on this host unguarded,
    and where ``tasks`` is neither a folder nor a dataset's name.
    """
    chosen = _tasks(tasks)
    if environment == "hostdir" and chosen[0] == "--dataset":
        raise HarnessError(
            f"--environment hostdir is no sandbox, and {tasks} is a dataset: its tests would run on this host; use "
            f"bwrap or docker (if you trust it: --environment {ENVIRONMENTS['hostdir']})"
        )
    if environment == "hostdir" and agent not in _RUNS_NOTHING:
        raise HarnessError(
            f"--environment hostdir is no sandbox, and {agent} runs what the model writes: use bwrap or docker "
            f"(if you mean it: --environment {ENVIRONMENTS['hostdir']})"
        )
    given = ["run", *chosen, "--env", ENVIRONMENTS.get(environment, environment), *_agent(agent, service)]
    for option in agent_options:
        given += ["--ak", option]
    plugin = {"url": service.url, "key_file": str(service.key_file)}
    given += ["--plugin", "reef", *_pairs("--pk", plugin)]
    # --yes gives a task whatever variables of this host it asks for: not to one that was only now downloaded
    return [*given, *(["--yes"] if chosen[0] == "--path" else []), *more]


def variables_of(service: Service, environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with the key as REEF_API_KEY; what it does not ask for is not sent to Harbor or fetched.

    Where the service is open the key is "none": agents' clients want one.
    """
    quiet = {"HARBOR_TELEMETRY": "off", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return {**quiet, **environ, _KEY: service.key or "none"}


def run(arguments: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run Harbor as a process of its own, which a Ctrl-C reaches too; its exit status."""
    print(f"$ {shlex.join(['harbor', *arguments])}", flush=True)
    process = subprocess.Popen([sys.executable, "-c", _HARBOR, *arguments], env=dict(variables))
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # Harbor has it too, and ends its trials in order


def variables_now(service: Service) -> dict[str, str]:
    """:func:`variables_of` for this process."""
    return variables_of(service, os.environ)


def _tasks(tasks: str) -> list[str]:
    """A folder of this machine (a task, or a folder of tasks), else a dataset of Harbor's registry."""
    if Path(tasks).is_dir():
        return ["--path", tasks]
    if Path(tasks).exists():
        raise HarnessError(f"{tasks} is a file: expected the folder of a task, or one of tasks")
    mistyped = "@" not in tasks and Path(tasks).parts and Path(Path(tasks).parts[0]).is_dir()
    if mistyped or not _DATASET.fullmatch(tasks):
        raise HarnessError(f"no such folder: {tasks} (a dataset is written NAME@VERSION or ORGANISATION/NAME)")
    return ["--dataset", tasks]


def _agent(agent: str, service: Service) -> list[str]:
    if agent in ("reef", OURS):
        options = {"url": service.url, "scenario": service.scenario, "key_file": str(service.key_file)}
        return ["--agent", OURS, *_pairs("--ak", options)]
    if ":" in agent:
        return ["--agent", agent]
    if agent in ("oracle", "nop"):
        return ["--agent", agent]
    if agent in _ANTHROPIC:
        base = f"{service.url}/scenarios/{service.scenario}"
        return ["--agent", agent, *_model("anthropic/reef", base)]
    if agent != "terminus-2":
        base = f"{service.url}/scenarios/{service.scenario}/v1"
        return ["--agent", agent, *_model("openai/reef", base)]
    options = {
        "collect_rollout_details": "true",
        "session_id_headers": json.dumps(["x-session-id"]),
        "llm_call_kwargs": json.dumps({"extra_headers": {"x-reef-scenario": service.scenario}}),
        "enable_summarize": "false",  # a summary replaces turns, and what was said before it would be left out
        "record_terminal_session": "false",  # asciinema, which it would download
    }
    return ["--agent", agent, *_model("openai/reef", f"{service.url}/v1"), *_pairs("--ak", options)]


def _model(name: str, base_url: str) -> list[str]:
    return ["--model", name, "--base-url", base_url, "--api-key-name", _KEY]


def _pairs(flag: str, options: Mapping[str, str]) -> list[str]:
    return [part for name, value in options.items() for part in (flag, f"{name}={value}")]
