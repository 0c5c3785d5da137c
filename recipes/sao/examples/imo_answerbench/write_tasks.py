r"""Items as Harbor tasks: ``python -m recipes.sao.examples.imo_answerbench.write_tasks --items FILE --out DIRECTORY``.

    task.toml             environment/Dockerfile      Python, for the verifier; the answer is not in it
    instruction.md        solution/solve.sh           what Harbor's own `oracle` agent runs: must be worth 1
    tests/test.sh         runs tests/check.py (checker.py, copied) on /app/answer.txt and tests/gold.txt

The three tasks in ``tasks/`` are made of ``problems.jsonl``. The verifier has an environment of its own
(``environment_mode = "separate"``): what an agent does in the first one cannot reach the gold answer or the reward.
`reef_harness.harbor.agent` grades its rollouts on this side, by the same gold.txt and the grader that task.toml names.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from reef_harness.errors import HarnessError
from reef_harness.evaluation.items import read_items
from reef_harness.types import Item

HERE = Path(__file__).resolve().parent
ANSWER = "/app/answer.txt"
FORMS = {"boxed": "\\boxed{%s}", "final": "<final>%s</final>"}
# Said to agents that work in a shell. The starter model knows nothing but its problems, so there it is not said.
WHERE = {"boxed": f"If you work in a shell, write that line to `{ANSWER}`.\n", "final": ""}

TASK_TOML = """\
schema_version = "1.4"
artifacts = [{answer}]

[task]
name = {name}
description = {description}
keywords = ["mathematics", "short answer"]

[metadata]
id = {id}
source = {source}
revision = {revision}
grader = {form}

[agent]
timeout_sec = 3600.0

[verifier]
timeout_sec = 60.0
environment_mode = "separate"

[environment]
build_timeout_sec = 600.0
workdir = "/app"
"""
DOCKERFILE = """\
FROM python:3.12.11-slim-bookworm
WORKDIR /app
"""
TEST_SH = """\
#!/bin/bash
# Judges {answer} and writes the reward. Where this fails there is no reward: the answer was not judged.
mkdir -p /logs/verifier
python3 /tests/check.py {form} {answer} /tests/gold.txt /logs/verifier/reward.txt
"""
SOLVE_SH = """\
#!/bin/bash
printf '%s\\n' {said} > {answer}
"""


def write_task(item: Item, form: str, directory: Path) -> Path:
    """Write one item as a task in ``directory``; its files of an earlier time are written again.

    Raises ValueError for an item that cannot be one: without gold, of several messages, or named in a way that is no
    directory.
    """
    if item.gold is None or not item.gold.strip():
        raise ValueError(f"item {item.id!r} has no gold answer")
    if len(item.messages) != 1:
        raise ValueError(f"item {item.id!r} has {len(item.messages)} messages; a task has one instruction")
    if not item.id.replace("-", "_").isidentifier() or not item.id.isascii():
        raise ValueError(f"the id {item.id!r} cannot name a task: letters, digits, - and _, not a digit first")
    task = directory / item.id
    for name, text in _files(item, item.gold.strip(), form).items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text, encoding="utf-8")
        if name.endswith(".sh"):
            (task / name).chmod(0o755)
    return task


def _files(item: Item, gold: str, form: str) -> dict[str, str]:
    """What a task consists of, by path."""
    fields = {
        "answer": ANSWER,
        "name": f"reef/{item.id}",
        "description": f"A problem with a short answer ({item.source or 'no source'})",
        "id": item.id,
        "source": item.source or "",
        "revision": item.revision or "",
        "form": form,
    }
    quoted = {name: json.dumps(value, ensure_ascii=False) for name, value in fields.items()}
    return {
        "task.toml": TASK_TOML.format(**quoted),
        "instruction.md": f"{item.question}\n{WHERE[form]}",
        "environment/Dockerfile": DOCKERFILE,
        "solution/solve.sh": SOLVE_SH.format(said=shlex.quote(FORMS[form] % gold), answer=ANSWER),
        "tests/check.py": (HERE / "checker.py").read_text(encoding="utf-8"),
        "tests/gold.txt": f"{gold}\n",
        "tests/test.sh": TEST_SH.format(form=form, answer=ANSWER),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Write the tasks; 1 where some item cannot be one."""
    parser = argparse.ArgumentParser(prog="write_tasks.py", description="Write items as Harbor tasks.")
    parser.add_argument("--items", type=Path, default=HERE / "problems.jsonl", help="items JSONL")
    parser.add_argument("--form", choices=sorted(FORMS), default="boxed", help="how the answer is written")
    parser.add_argument("--first", type=int, help="only so many items")
    parser.add_argument("--out", type=Path, required=True, help="a directory for each task is made in it")
    arguments = parser.parse_args(argv)
    try:
        items, complaints = read_items(arguments.items)
        for item in items[: arguments.first]:
            print(write_task(item, arguments.form, arguments.out))
    except (HarnessError, ValueError, OSError) as error:
        print(f"write_tasks.py: {error}", file=sys.stderr)
        return 1
    for complaint in complaints:
        print(f"left out: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
