"""``reef-harness graders`` lists them; ``reef-harness grade`` grades texts that are there already."""

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from reef_harness.errors import HarnessError
from reef_harness.graders.base import Grader
from reef_harness.graders.judge import JudgeGrader
from reef_harness.graders.named import SPELLINGS, grader_of
from reef_harness.types import Item

_OTHER_VERSIONS = {
    "final": ("comparing=text", "comparing=latex"),
    "number": ("where=boxed", "where=last"),
    "code": ("isolation=process",),
}
_COLUMNS = frozenset({"text", "gold", "finish_reason", "question", "id"})


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add them to ``reef-harness``. Each sets ``run``: parsed arguments in, the exit status out."""
    commands.add_parser("graders", help="what --grader takes").set_defaults(run=_list)
    parser = commands.add_parser(
        "grade",
        help="grade texts that are there already",
        description="Grade one text against --gold, or each line of a JSONL file of text, gold and, where known,"
        " finish_reason, question and id. Verdicts go to stdout, a JSON line each.",
    )
    parser.add_argument(
        "--grader",
        required=True,
        help="see reef-harness graders",
    )
    parser.add_argument("--gold", help="the right answer: the input is one text")
    parser.add_argument("--finish-reason", default="stop", help="of texts that do not say their own (default: stop)")
    parser.add_argument("file", nargs="?", default="-", metavar="FILE", help="default: -, standard input")
    parser.set_defaults(run=_grade)


@dataclass(frozen=True, slots=True)
class _Row:
    item: Item
    text: str
    finish_reason: str


def _list(arguments: argparse.Namespace) -> int:
    rows = [("grader", "versions", "reads")]
    rows += [(spelling, _versions(re.split(r"[\[:]", spelling)[0]), reads) for spelling, reads in SPELLINGS.items()]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    for spelling, versions, reads in rows:
        print(f"{spelling:<{first}}  {versions:<{second}}  {reads}")
    return 0


def _versions(name: str) -> str:
    """The version without options, then those of options that make another; ``-`` for what cannot be made here."""
    if name == "judge":
        return f"{JudgeGrader('http://127.0.0.1', model='', rubric='-').version.partition('-')[0]}-HASH"
    found = []
    for spec in (name, *(f"{name}:{options}" for options in _OTHER_VERSIONS.get(name, ()))):
        try:
            found.append(grader_of(spec).version)
        except ValueError:  # not installed, no such sandbox, or one's own
            found.append("-")
    return ", ".join(found)


def _grade(arguments: argparse.Namespace) -> int:
    """Exit status 1 where a row could not be read, or a grader could not judge; the others are graded all the same."""
    grader = grader_of(arguments.grader)
    source = sys.stdin.read() if arguments.file == "-" else Path(arguments.file).read_text(encoding="utf-8")
    source = source.removeprefix("\ufeff")  # a byte order mark
    if arguments.gold is not None:
        rows: Iterator[_Row | str] = iter([_Row(Item("1", (), arguments.gold), source, arguments.finish_reason)])
    elif not source.strip():
        whence = "standard input" if arguments.file == "-" else arguments.file
        raise HarnessError(f"{whence} has no rows (with --gold it would be one text)")
    else:
        rows = _rows(source, arguments.finish_reason)
    return asyncio.run(_print_verdicts(grader, rows))


async def _print_verdicts(grader: Grader, rows: Iterator[_Row | str]) -> int:
    status = 0
    for row in rows:
        if isinstance(row, str):
            print(row, file=sys.stderr)
            status = 1
            continue
        verdict = await grader.judge(row.item, row.text, row.finish_reason)
        print(json.dumps({"id": row.item.id, **asdict(verdict)}), flush=True)
        if verdict.outcome == "error":
            status = 1
    return status


def _rows(source: str, finish_reason: str) -> Iterator[_Row | str]:
    """The rows, and a message in the place of each that cannot be graded. A row's id is its line where it has none."""
    for number, line in enumerate(source.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield _row(number, json.loads(line), finish_reason)
        except (ValueError, RecursionError) as error:
            yield f"line {number}: {error}"


def _row(number: int, raw: object, finish_reason: str) -> _Row:
    if not isinstance(raw, dict) or "text" not in raw:
        raise ValueError("expected an object with text and gold")
    if unknown := raw.keys() - _COLUMNS:
        raise ValueError(f"expected text, gold, finish_reason, question, id; got also {', '.join(sorted(unknown))}")
    if wrong := [
        name for name, value in raw.items() if not isinstance(value, str) and not (name == "gold" and value is None)
    ]:
        raise ValueError(f"{', '.join(wrong)} must be text")
    question = raw.get("question", "")
    messages = ({"role": "user", "content": question},) if question else ()
    return _Row(
        Item(raw.get("id", str(number)), messages, raw.get("gold")),
        raw["text"],
        raw.get("finish_reason", finish_reason),
    )
