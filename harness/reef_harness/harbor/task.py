"""What a task's folder says for the agent alone: the right answer, and who judges.

Harbor gives an agent the instruction and the environment, and the environment knows the folder it was made of. Of that
folder Harbor uploads ``environment/`` at the start and ``tests/`` only once the agent is done; ``task.toml`` stays on
this side. So the gold answer is read here, from ``task.toml`` or from a file in ``tests/``, and does not enter the
environment while the agent works.
"""

import os
import re
import tomllib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from reef_harness.errors import HarnessError
from reef_harness.graders import Grader
from reef_harness.graders.named import grader_of

GOLD_FILE = "tests/gold.txt"
_MAX_BYTES = 1_000_000  # of a file of a task's: more is a mistake
# What a task may name, and the options it may set. A task may be anyone's: nothing here imports, reads a file, asks a
# server, takes a key, or says how long or how well enclosed something runs.
_OPEN_TO_TASKS: Mapping[str, Set[str]] = {
    "final": {"comparing"},
    "boxed": frozenset(),
    "number": {"where", "tolerance"},
    "choice": {"options"},
    "math-verify": frozenset(),
    "json-schema": frozenset(),
    "code": frozenset(),
}
_PLAIN = re.compile(r"[A-Za-z]{1,26}|[0-9]{1,20}(?:[./][0-9]{1,20})?")  # a word or a number, without an exponent


class BadTask(HarnessError):  # noqa: N818
    """A task's folder, or the table of gold answers, is not what the agent can read."""


@dataclass(frozen=True, slots=True)
class TaskSays:
    """A task's name, gold answer and grader (a name that ``reef-harness graders`` lists); None where it has none."""

    name: str
    gold: str | None
    grader: str | None


def read_task(folder: Path) -> TaskSays:
    """Read ``[metadata] gold`` and ``grader`` of ``task.toml``, and ``tests/gold.txt`` where there is no such gold.

    Raises BadTask where one of them is there and cannot be read, is empty, of a megabyte or more, or a link to what is
    not in the folder.
    """
    path = folder / "task.toml"
    try:
        config = tomllib.loads(_read(folder, path))
    except tomllib.TOMLDecodeError as error:
        raise BadTask(f"cannot read {path}: {error}") from error
    metadata = config.get("metadata", {})
    name = str(config.get("task", {}).get("name", folder.name))
    gold, grader = (_text(path, field, metadata.get(field)) for field in ("gold", "grader"))
    return TaskSays(name, gold if gold is not None else _gold_file(folder), grader)


def grader_of_task(spec: str) -> Grader:
    """The grader that a task itself names: one of those that judge by text alone, or ``code``, with plain options.

    Raises BadTask for any other, which only the one who runs the task may choose, and for what the grader refuses.
    """
    name, _, rest = spec.partition(":")
    options = [part.partition("=") for part in filter(None, rest.split(","))]
    if name not in _OPEN_TO_TASKS or not all(
        option in _OPEN_TO_TASKS[name] and _PLAIN.fullmatch(value) for option, _, value in options
    ):
        known = ", ".join(
            f"{each}:{'|'.join(sorted(taken))}" if taken else each for each, taken in _OPEN_TO_TASKS.items()
        )
        raise BadTask(
            f"the task names the grader {spec!r}; a task may name {known} and set these with a word or a number. "
            "If you trust it, choose it yourself: -O grader=..."
        )
    try:
        return grader_of(spec)
    except (ValueError, ArithmeticError) as error:
        raise BadTask(f"the task names the grader {spec!r}: {error}") from error


def _text(path: Path, field: str, value: object) -> str | None:
    """A text, or a number as TOML has it (a float would have lost its digits: it is refused)."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise BadTask(f"{path}: [metadata] {field} must be a text that is not empty, got {value!r}")
    return str(value)


def _gold_file(folder: Path) -> str | None:
    path = folder / GOLD_FILE
    if not os.path.lexists(path):
        return None
    gold = _read(folder, path).strip()
    if not gold:
        raise BadTask(f"{path} is empty: it must hold the right answer")
    return gold


def _read(folder: Path, path: Path) -> str:
    """The text of a file in a task's folder. The task may be anyone's, and what is read here goes to a service."""
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(folder.resolve()):
            raise BadTask(f"{path} is a link out of the task's folder, to {real}: it is not read")
        if not real.is_file():
            raise BadTask(f"cannot read {path}: it is no file")
        if (size := real.stat().st_size) >= _MAX_BYTES:
            raise BadTask(f"{path} has {size:,} bytes, expected less than {_MAX_BYTES:,}")
        return real.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        raise BadTask(f"cannot read {path}: {error}") from error
