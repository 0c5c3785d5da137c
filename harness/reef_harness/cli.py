"""``reef-harness``: the client's side on the command line."""

import argparse
import sys
from collections.abc import Sequence

from reef_harness.compute import commands as compute
from reef_harness.drivers import commands as drivers
from reef_harness.errors import HarnessError
from reef_harness.evaluation import commands as evaluation
from reef_harness.graders import commands as graders
from reef_harness.harbor import commands as harbor
from reef_harness.monitor import commands as monitor

ROOMS = (drivers, graders, evaluation, compute, monitor, harbor)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, and turn failures into a message and an exit status: 1 failed, 2 wrong usage, 130 interrupted."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except (HarnessError, ValueError, OSError) as error:
        print(f"reef-harness {arguments.command}: {error}{_given_as(arguments, error)}", file=sys.stderr)
        return 1
    return status


def _given_as(arguments: argparse.Namespace, error: Exception) -> str:
    """`` (given as items)`` where an error is about a file that an argument names."""
    path = error.filename if isinstance(error, OSError) else None
    if path is None:
        return ""
    given = []
    for name, value in vars(arguments).items():
        paths = [
            each[-1] if isinstance(each, tuple) else each for each in (value if isinstance(value, list) else [value])
        ]
        given += [name] if str(path) in map(str, paths) else []
    return f" (given as {' and '.join(given)})" if given else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="reef-harness", description="The client's side of a Reef service.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for room in ROOMS:
        room.add_to(commands)
    return parser
