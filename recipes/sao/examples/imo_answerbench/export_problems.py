r"""A local file of problems as items: ``python -m ...imo_answerbench.export_problems FILE --out ITEMS``.

FILE is JSONL or CSV with a column for the problem and one for its short answer, by default ``problem`` and ``answer``,
and perhaps one for an id. What comes out has ``id``, ``prompt``, ``gold``, ``source``, ``revision`` and ``split``. Left
out, each with its reason in ``ITEMS.left-out.jsonl``:

    no problem, no answer, or an answer that the grader cannot read   nothing could be right there
    a problem that came before                                        with another answer: every one of them
    a problem that is, or is nearly, one of --held-out                measuring on it would measure memory
"""

import argparse
import csv
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reef_harness.errors import HarnessError
from reef_harness.evaluation.contamination import normal, overlaps
from reef_harness.evaluation.items import read_prompts, row_of
from reef_harness.graders import Grader
from reef_harness.graders.named import grader_of
from reef_harness.types import Item

from recipes.sao.examples.imo_answerbench.write_tasks import FORMS

ASK = "\n\nPut the final answer in \\boxed{}."
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Columns:
    """The names of a file's columns; without one for ids an id is made of the problem."""

    problem: str
    answer: str
    id: str | None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row that is no item: where it is, the problem, and why."""

    line: int
    problem: str
    reason: str


@dataclass(frozen=True, slots=True)
class Problem:
    """A row that can be used."""

    line: int
    id: str
    problem: str
    answer: str


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a JSONL or CSV file with the lines they are on. Raises HarnessError for what is neither."""
    if path.suffix not in (".jsonl", ".csv"):
        raise HarnessError(f"{path}: expected a file that ends in .jsonl or .csv")
    with path.open(encoding="utf-8-sig", newline="") as file:
        if path.suffix == ".csv":
            table = csv.DictReader(file)
            yield from ((table.line_num, row) for row in table)
            return
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise HarnessError(f"{path}:{number}: bad JSON: {error}") from None
                if not isinstance(row, dict):
                    raise HarnessError(f"{path}:{number}: expected an object, got {type(row).__name__}")
                yield number, row


def read_problems(path: Path, columns: Columns, grader: Grader, source: str) -> tuple[list[Problem], list[LeftOut]]:
    """The rows that have a problem and an answer that ``grader`` can judge by, and the others.

    Raises HarnessError where a column is missing in every row.
    """
    found: list[Problem] = []
    left_out: list[LeftOut] = []
    seen: set[str] = set()
    for line, row in read_rows(path):
        seen |= set(row)
        problem, answer = (_text(row.get(name)) for name in (columns.problem, columns.answer))
        id = _text(row.get(columns.id)) if columns.id else _made_id(source, problem)
        reason = _fault(problem, answer, id, columns, grader)
        if reason:
            left_out.append(LeftOut(line, problem, reason))
        else:
            found.append(Problem(line, id, problem, answer))
    for name in (columns.problem, columns.answer, columns.id):
        if name is not None and name not in seen:
            raise HarnessError(f"{path} has no column {name!r}, only {', '.join(sorted(seen)) or 'nothing at all'}")
    return found, left_out


def without_duplicates(problems: Sequence[Problem]) -> tuple[list[Problem], list[LeftOut]]:
    """The first of equal problems; none of them where their answers differ. An id that is taken is left out too."""
    answers: dict[str, set[str]] = {}
    for each in problems:
        answers.setdefault(normal(each.problem), set()).add(each.answer)
    found: dict[str, Problem] = {}
    ids: set[str] = set()
    left_out: list[LeftOut] = []
    for each in problems:
        same = normal(each.problem)
        if len(answers[same]) > 1:
            several = ", ".join(sorted(answers[same]))
            left_out.append(LeftOut(each.line, each.problem, f"the same problem with several answers: {several}"))
        elif same in found:
            left_out.append(LeftOut(each.line, each.problem, f"the problem of line {found[same].line} again"))
        elif each.id in ids:
            left_out.append(LeftOut(each.line, each.problem, f"the id {each.id!r} again"))
        else:
            found[same] = each
            ids.add(each.id)
    return list(found.values()), left_out


def without_held_out(
    problems: Sequence[Problem], held_out: Sequence[tuple[str, str]], at_least: float
) -> tuple[list[Problem], list[LeftOut]]:
    """The problems that none of the held-out prompts is, or shares ``at_least`` of its n-grams with.

    ``held_out`` are named prompts, which may end with a line of their own on how to answer.
    """
    left = {each.id: each for each in problems}
    left_out: list[LeftOut] = []
    while found := overlaps(((id, each.problem) for id, each in left.items()), held_out, at_least=at_least):
        # each pass names some of those that are like a held-out one; it goes on until none is left
        for overlap in found:
            named = [(id, "it is") for id in overlap.exact]
            named += [(id, f"it has {share:.0%} of the n-grams of") for share, id in overlap.near]
            for id, how in named:
                if id in left:
                    each = left.pop(id)
                    left_out.append(LeftOut(each.line, each.problem, f"{how} the held-out {overlap.held_out}"))
    return list(left.values()), left_out


def _fault(problem: str, answer: str, id: str, columns: Columns, grader: Grader) -> str | None:
    for name, value in ((columns.problem, problem), (columns.answer, answer), (columns.id or "id", id)):
        if not value:
            return f"no {name}"
    form = FORMS.get(grader.id, "%s")
    try:
        grader.grade(form % "0", answer, "stop")  # raises for an answer that has no value
        if not grader.grade(form % answer, answer, "stop").correct:
            return f"the answer is not right by its own measure: grader {grader.id} cannot read it"
    except ValueError as error:
        return f"the answer cannot be judged by: {error}"
    return None


def _text(value: Any) -> str:
    """A cell as text; numbers as JSON writes them."""
    return "" if value is None else value.strip() if isinstance(value, str) else json.dumps(value)


def _made_id(source: str, problem: str) -> str:
    return f"{source}_{hashlib.sha256(normal(problem).encode()).hexdigest()[:12]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the items, say what was left out; 1 where nothing is left."""
    arguments = _parser().parse_args(argv)
    try:
        return export(arguments)
    except (HarnessError, ValueError, OSError) as error:
        print(f"export_problems.py: {error}", file=sys.stderr)
        return 1


def export(arguments: argparse.Namespace) -> int:
    """Read, check, write."""
    columns = Columns(arguments.problem, arguments.answer, arguments.id)
    problems, left_out = read_problems(arguments.file, columns, grader_of(arguments.grader), arguments.source)
    num_rows, num_unusable = len(problems) + len(left_out), len(left_out)
    problems, duplicates = without_duplicates(problems)
    alike: list[LeftOut] = []
    if arguments.held_out:
        held_out = [(name, prompt.removesuffix(arguments.ask)) for name, prompt in read_prompts(arguments.held_out)]
        problems, alike = without_held_out(problems, held_out, arguments.at_least)
    left_out += duplicates + alike
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    rows = [row_of(_item(each, arguments)) for each in problems]
    arguments.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    _write_left_out(arguments.out.with_name(f"{arguments.out.name}.left-out.jsonl"), left_out)
    print(
        f"{arguments.out}: {len(rows)} items of {num_rows} rows "
        f"({num_unusable} unusable, {len(duplicates)} duplicates, {len(alike)} like held-out ones)"
    )
    for reason, count in Counter(each.reason for each in left_out).most_common(_SHOWN):
        print(f"  left out {count}: {reason}")
    return 0 if rows else 1


def _item(problem: Problem, arguments: argparse.Namespace) -> Item:
    asked = {"role": "user", "content": problem.problem + arguments.ask}
    return Item(problem.id, (asked,), problem.answer, arguments.source, arguments.revision, arguments.split)


def _write_left_out(path: Path, left_out: Sequence[LeftOut]) -> None:
    ordered = sorted(left_out, key=lambda each: each.line)
    lines = [json.dumps({"line": e.line, "reason": e.reason, "problem": e.problem}) + "\n" for e in ordered]
    path.write_text("".join(lines), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="export_problems.py", description="A local file of problems as items.")
    parser.add_argument("file", type=Path, metavar="FILE", help=".jsonl or .csv")
    parser.add_argument("--out", type=Path, required=True, metavar="ITEMS", help="items JSONL")
    parser.add_argument("--problem", default="problem", help="column of the problem")
    parser.add_argument("--answer", default="answer", help="column of the short answer")
    parser.add_argument("--id", help="column of the id (default: made of the problem)")
    parser.add_argument("--ask", default=ASK, help="what is added to each problem")
    parser.add_argument("--grader", default="boxed", help="must be able to read every answer")
    parser.add_argument("--source", required=True, help="where the file comes from, by name")
    parser.add_argument("--revision", required=True, help="which state of it")
    parser.add_argument("--split", required=True, help="train, held-out, ...")
    parser.add_argument("--held-out", type=Path, help="items that none of these may be like")
    parser.add_argument("--at-least", type=float, default=0.5, help="share of a held-out prompt's n-grams (0.5)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
