"""``reef-harness harbor run`` and ``reef-harness harbor report``."""

import argparse
import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reef_harness import service
from reef_harness.client import Client, Retry
from reef_harness.errors import HarnessError
from reef_harness.harbor import run
from reef_harness.harbor.reports import FILE, Reports
from reef_harness.harbor.verdict import REWARD_KEY
from reef_harness.keys import find_key
from reef_harness.types import Json


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add them to ``reef-harness``. Each sets ``run``: parsed arguments in, the exit status out."""
    harbor = commands.add_parser("harbor", help="run Harbor tasks through a service, and report what they gave")
    inner = harbor.add_subparsers(dest="harbor_command", required=True, metavar="COMMAND", parser_class=_Parser)
    _add_run(inner.add_parser("run", help="run tasks: trials ask the service, rewards are reported to it"))
    _add_report(inner.add_parser("report", help="report the rewards of a job that are not reported yet"))


class _Parser(argparse.ArgumentParser):
    """Leaves what follows ``--`` alone, as ``more``: argparse would have filled a positional for it before."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = list(args or ())
        end = given.index("--") if "--" in given else len(given)
        parsed, unknown = super().parse_known_args(given[:end], namespace)
        parsed.more = given[end + 1 :]
        return parsed, unknown


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs Harbor's own command, and prints it. What follows -- goes to it as it is: -- -n 2 --job-name first"
    )
    parser.add_argument("tasks", metavar="TASKS", help="a task's folder, a folder of tasks, or a dataset NAME@VERSION")
    parser.add_argument(
        "--agent", default="reef", help="reef (the default), terminus-2, another of Harbor's, or module:Class"
    )
    parser.add_argument(
        "--environment",
        default="docker",
        help="docker (the default), bwrap, hostdir, another of Harbor's, or module:Class",
    )
    parser.add_argument(
        "--option",
        "-O",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of the agent, as rollouts=6 (table: docs/harbor.md)",
    )
    service.add_options(parser)
    parser.set_defaults(run=_run)


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", type=Path, metavar="JOB_DIR", help="jobs/NAME")
    parser.add_argument(
        "--reward-key", default=REWARD_KEY, help=f"which of a trial's rewards counts (default: {REWARD_KEY})"
    )
    parser.add_argument(
        "--graded-exceptions",
        default="",
        metavar="TYPE,TYPE",
        help="exceptions that do not keep a trial from counting (none)",
    )
    service.add_options(parser)
    parser.set_defaults(run=_report)


def _run(arguments: argparse.Namespace) -> int:
    run.check_harbor()
    found, config = asyncio.run(_service(arguments))
    given = run.arguments_of(
        arguments.tasks, arguments.agent, arguments.environment, found, arguments.option, arguments.more
    )
    if told := run.unfilled(arguments.agent, arguments.option, arguments.more, config):
        print(f"reef: {told}")
    run.run(given, run.variables_now(found))


async def _service(arguments: argparse.Namespace) -> tuple[run.Service, Json]:
    """The service, and the settings of the scenario's method."""
    async with await service.connect(arguments) as client:
        key = find_key(arguments.url, None, arguments.key_file)
        found = run.Service(client.url, str(client.scenario), key, arguments.key_file.absolute())
        return found, await _config(client)


async def _config(client: Client) -> Json:
    """Empty where it cannot be read, and where the scenario does not train."""
    client.retry = Retry(total_s=0)  # it is for a line of text
    try:
        trains = [found.get("trains", True) for found in await client.scenarios() if found["name"] == client.scenario]
        config = (await client.contract())["config"] if all(trains) else {}
    except (HarnessError, LookupError, TypeError):
        return {}
    return config if isinstance(config, dict) else {}


def _report(arguments: argparse.Namespace) -> int:
    told = asyncio.run(_report_missing(arguments))
    if not told:
        print(f"{arguments.job}: every verdict is reported")
    failed = told["failed"]
    if failed:
        raise HarnessError(f"{failed} could not be reported; they are in {arguments.job / FILE}")
    return 0


async def _report_missing(arguments: argparse.Namespace) -> Counter[str]:
    graded = frozenset(filter(None, (name.strip() for name in arguments.graded_exceptions.split(","))))
    told: Counter[str] = Counter()
    async with Client(arguments.url, key_file=arguments.key_file, retry=Retry(total_s=10)) as client:
        async for line in Reports(arguments.job, client, arguments.reward_key, graded).missing():
            print(line)
            told[line.status] += 1
    return told
