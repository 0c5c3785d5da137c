"""``reef-harness harbor run``: Harbor's own command, with an agent that asks a service and the plugin that reports.

The command that is run is printed and can be copied. The key is in no argument, only in the variable REEF_API_KEY of
that one process: an agent that speaks to a model takes it from there (--api-key-name). OPENAI_API_KEY and the like stay
as they are, for a verifier that has a judge of its own would send what is in them to whom it asks.
"""

import importlib.util
import itertools
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from reef_harness.errors import HarnessError
from reef_harness.harbor.rollouts import ROLLOUTS

ENVIRONMENTS = {
    "hostdir": "reef_harness.harbor.environments:HostDirEnvironment",
    "bwrap": "reef_harness.harbor.environments:BwrapEnvironment",
}
OURS = "reef_harness.harbor.agent:HarborAgent"
_RUNS_NOTHING = frozenset({"reef", OURS, "oracle", "nop"})  # agents that run no command of a model's
_ANTHROPIC = frozenset({"claude-code"})  # speaks Messages; the others speak OpenAI's APIs
# What Harbor 0.26 takes behind the dashes that would say anew what TASKS, --agent and --environment have said.
_CHOOSE_TASKS = frozenset(
    {"-p", "--path", "-d", "--dataset", "-t", "--task", "--repo", "--registry-url", "--registry-path"}
    | {"--task-git-url", "--task-git-commit"}
)
_CHOOSE_WHO_RUNS = frozenset(
    {"-a", "--agent", "--agent-import-path", "--user-agent"}
    | {"-e", "--env", "--environment-import-path", "-c", "--config"}
)
_FLAGS = "hqy"  # one-letter options without a value: others may follow in the same word
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

    Raises HarnessError where commands of a model's, or of a task that was downloaded, would run on this host unguarded
    or get its variables unasked, and where ``tasks`` is neither a folder with tasks nor a dataset's name.
    """
    chosen = _tasks(tasks)
    _check_more(more, chosen[0] == "--path", environment == "hostdir")
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
    if environment == "bwrap" and agent == "terminus-2" and shutil.which("tmux") is None:
        raise HarnessError("terminus-2 needs tmux, and bwrap has the programs of this host: apt-get install tmux")
    given = ["run", *chosen, "--env", ENVIRONMENTS.get(environment, environment), *_agent(agent, service)]
    for option in agent_options:
        if "=" not in option:
            raise HarnessError(f"--option {option}: expected NAME=VALUE")
        given += ["--ak", option]
    plugin = {"url": service.url, "key_file": str(service.key_file)}
    given += ["--plugin", "reef", *_pairs("--pk", plugin)]
    # --yes gives a task whatever variables of this host it asks for: not to one that was only now downloaded
    return [*given, *(["--yes"] if chosen[0] == "--path" else []), *more]


def unfilled(agent: str, agent_options: Sequence[str], more: Sequence[str], config: Mapping[str, Any]) -> str | None:
    """What becomes of the group that a trial's rollouts do not fill; None where they do, or nothing is grouped.

    ``config`` is that of the scenario's contract; a method that compares rollouts has a group-size in it.
    """
    size, batch, deadline_s = (config.get(name) for name in ("group-size", "batch-size", "group-deadline-s"))
    if not (isinstance(size, int) and size > 0 and isinstance(batch, int) and isinstance(deadline_s, int | float)):
        return None
    if agent not in ("reef", OURS) or _CHOOSE_WHO_RUNS.intersection(map(_option, more)):
        return None
    given = [*agent_options, *_values(more, "--ak", "--agent-kwarg")]
    options = {name: value for name, _, value in (pair.partition("=") for pair in given)}
    try:
        rollouts, temperature = int(options.get("rollouts", ROLLOUTS)), float(options.get("temperature", 1))
    except ValueError:
        return None  # Harbor says so
    grouped = options.get("group", "true").lower() in ("true", "1", "yes", "on", "t", "y")
    left = rollouts % size
    if not (rollouts > 0 and left and grouped and temperature) or options.get("purpose") == "eval":
        return None
    told = (
        f"{rollouts} rollout{'s' if rollouts > 1 else ''} a trial, and group-size is {size}: a trial's "
        f"{'last ' if rollouts > size else ''}group stays at {left} of {size} until {deadline_s:g} s after its first "
        "report (group-deadline-s), then it "
    )
    full = f"full groups: -O rollouts={rollouts + size - left}"
    if left == 1:
        told += f"is dropped; {full}"
    else:
        told += f"counts as it is for a batch of {batch}; {full}"
    if rollouts > 1:  # a group of one compares nothing
        told += f", or the service's group-size {rollouts}"
        told += " with a batch-size that it divides" if batch % rollouts else ""
    return told


def variables_of(service: Service, environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with the key as REEF_API_KEY; what it does not ask for is not sent to Harbor or fetched.

    Where the service is open the key is "none": agents' clients want one.
    """
    quiet = {"HARBOR_TELEMETRY": "off", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return {**quiet, **environ, _KEY: service.key or "none"}


def run(arguments: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Become Harbor: a Ctrl-C or a kill reaches it, which ends its trials in order, and its exit status is ours."""
    print(f"$ {shlex.join(['harbor', *arguments])}", flush=True)
    os.execve(sys.executable, [sys.executable, "-c", _HARBOR, *arguments], dict(variables))


def variables_now(service: Service) -> dict[str, str]:
    """:func:`variables_of` for this process."""
    return variables_of(service, os.environ)


def _tasks(tasks: str) -> list[str]:
    """A folder of this machine (a task, or a folder of tasks), else a dataset of Harbor's registry."""
    if Path(tasks).is_dir():
        if not any((folder / "task.toml").is_file() for folder in (Path(tasks), *Path(tasks).iterdir())):
            raise HarnessError(f"{tasks} has no task: expected a folder with a task.toml, or a folder of such folders")
        return ["--path", tasks]
    if Path(tasks).exists():
        raise HarnessError(f"{tasks} is a file: expected the folder of a task, or one of tasks")
    mistyped = "@" not in tasks and Path(tasks).parts and Path(Path(tasks).parts[0]).is_dir()
    if mistyped or not _DATASET.fullmatch(tasks):
        raise HarnessError(f"no such folder: {tasks} (a dataset is written NAME@VERSION or ORGANISATION/NAME)")
    return ["--dataset", tasks]


def _check_more(more: Sequence[str], folder: bool, hostdir: bool) -> None:
    """Refuse what would have other tasks run than the folder whose owner is trusted, or others than hostdir is for."""
    said = [_option(word) for word in more]
    if folder and (found := _CHOOSE_TASKS.intersection(said)):
        raise HarnessError(f"{', '.join(sorted(found))} cannot be said behind --: TASKS says which tasks are run")
    if hostdir and (found := _CHOOSE_WHO_RUNS.intersection(said)):
        raise HarnessError(
            f"{', '.join(sorted(found))} cannot be said behind -- with --environment hostdir, which is no sandbox: "
            f"say --agent before it (if you mean it: --environment {ENVIRONMENTS['hostdir']})"
        )


def _option(word: str) -> str:
    """The option that a word is, as Harbor reads it: --agent=x is --agent, and -ax and -qax are -a."""
    if word.startswith("--"):
        return word.partition("=")[0]
    short = word[1:].lstrip(_FLAGS)[:1]
    return f"-{short}" if word.startswith("-") else ""


def _values(words: Sequence[str], *names: str) -> list[str]:
    """What is given with the options ``names``, as --ak x or --ak=x."""
    return [
        after if word in names else word.partition("=")[2]
        for word, after in itertools.pairwise([*words, ""])
        if word.partition("=")[0] in names
    ]


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
