"""Write the held-out problems as items that `reef-harness evaluate` reads: three sets, and some to train on.

`python -m recipes.arithmetic.export_items --out work/items --count 200`

in-domain.jsonl (4 steps, as in training), challenge.jsonl (8 steps), retention.jsonl (2 steps), and train.jsonl, which
shares no problem with them: `reef-harness contamination work/items/train.jsonl work/items/challenge.jsonl`.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from recipes.arithmetic.task import Problem, held_out_set, train_stream

SETS = {"in-domain": 4, "challenge": 8, "retention": 2}  # steps of each problem
TRAINED = 4  # steps of those that are trained on


def row(problem: Problem, split: str) -> dict[str, Any]:
    """A problem as an item; the slice says whether a borrow, which the starter model forgets, is needed on the way."""
    borrows = any(
        sign == "-" and amount >= 5 and after // 10 != before // 10
        for before, after, (sign, amount) in zip(
            [problem.start, *problem.values], problem.values, problem.steps, strict=False
        )
    )
    return {
        "id": problem.text,
        "prompt": problem.text,
        "gold": str(problem.answer),
        "source": "recipes/arithmetic",
        "split": split,
        "slices": {"borrow": "yes" if borrows else "no"},
    }


def write(path: Path, problems: Iterable[Problem], split: str) -> None:
    """Write problems as JSONL, once each."""
    distinct: Iterator[Problem] = iter(dict.fromkeys(problems))
    path.write_text("".join(json.dumps(row(problem, split)) + "\n" for problem in distinct))
    print(f"wrote {path}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("work/items"))
    parser.add_argument("--count", type=int, default=200, help="problems of each held-out set")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, steps in SETS.items():
        write(arguments.out / f"{name}.jsonl", held_out_set(steps, arguments.count, arguments.seed), name)
    trained = islice(train_stream(TRAINED, arguments.seed), 20 * arguments.count)
    write(arguments.out / "train.jsonl", trained, "train")


if __name__ == "__main__":
    main()
