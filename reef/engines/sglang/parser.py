"""Asks SGLang's own parser about options: the only place where SGLang is imported, in a process of its own.

It reads {"options": {...}, "managed": {field: what decides it}} and prints what is wrong, or null, as JSON.
"""

import argparse
import difflib
import json
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from sglang.srt.server_args import ServerArgs

from reef.engines.launch import flags


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def problem(options: Mapping[str, Any], managed: Mapping[str, str]) -> str | None:
    """What is wrong with the first option that is; None where all can be given to the server."""
    parser = _Parser(add_help=False)
    ServerArgs.add_cli_args(parser)
    known = {option[2:]: action for action in parser._actions for option in action.option_strings if option[:2] == "--"}
    for given, value in options.items():
        name = given.replace("_", "-")
        if name not in known:
            free = [option for option, action in known.items() if action.dest not in managed]
            near = difflib.get_close_matches(name, free, n=1)
            hint = f"did you mean inference.options.{near[0]}?" if near else "SGLang's server has no such argument"
            return f"unknown key inference.options.{name}; {hint}"
        action = known[name]
        if action.dest in managed:
            return f"inference.options.{name} is set by Reef; what decides it: {managed[action.dest]}"
        if wrong := _misfit(name, action, value):
            return f"inference.options.{name}: {wrong}"
    try:
        parser.parse_args(["--model-path", ".", *flags(options)])
    except (ValueError, argparse.ArgumentError) as error:
        return f"inference.options: {error}"
    return None


def _misfit(name: str, action: argparse.Action, value: Any) -> str | None:
    """Why a value cannot be written as words of a command line that mean it."""
    if value is None:
        return "expected a value, got nothing; leave it out for SGLang's default"
    if action.nargs == 0:
        if not isinstance(value, bool):
            return f"expected true or false, got {value!r}"
        if not value and action.default:
            return f"false is written no-{name}: true"
        return None
    if isinstance(value, bool):
        return f"expected a value, got {str(value).lower()}"
    if isinstance(value, list) and action.nargs is None:
        return f"expected one value, got a list; JSON is written as text: '{json.dumps(value)}'"
    return None


if __name__ == "__main__":
    question = json.load(sys.stdin)
    print(json.dumps(problem(question["options"], question["managed"])))
