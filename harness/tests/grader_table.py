"""The graders on pairs of answers written by hand: ``python -m harness.tests.grader_table [--math-verify]``.

``boxed_pairs.tsv`` has a line for each pair: "=" where the two are the same and "!" where they are not, gold, answer.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from reef_harness.graders import BoxedGrader, Grader, grader_of

PAIRS = Path(__file__).with_name("boxed_pairs.tsv")


def pairs() -> list[tuple[bool, str, str]]:
    """Each pair: whether it is the same answer, gold, the answer."""
    rows = [line.split("\t") for line in PAIRS.read_text(encoding="utf-8").splitlines()]
    return [(mark == "=", gold, answer) for mark, gold, answer in rows]


def outcomes(grader: Grader) -> Counter[tuple[bool, str]]:
    """How often each outcome is given to pairs that are the same, and to those that are not."""
    counted: Counter[tuple[bool, str]] = Counter()
    for same, gold, answer in pairs():
        try:
            outcome = grader.grade(f"\\boxed{{{answer}}}", gold, "stop").outcome
        except ValueError:
            outcome = "bad gold"
        counted[same, outcome] += 1
    return counted


def main(argv: Sequence[str]) -> None:
    graders = [BoxedGrader(), grader_of("number:where=boxed")]
    if "--math-verify" in argv:
        graders.append(grader_of("math-verify"))
    print("| Grader | same: correct | incorrect | review | bad gold | other: correct | incorrect | review | bad gold |")
    print("|---|---|---|---|---|---|---|---|---|")
    for grader in graders:
        found = outcomes(grader)
        cells = [found[same, o] for same in (True, False) for o in ("correct", "incorrect", "review", "bad gold")]
        print(f"| `{grader.id}` {grader.version} | {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main(sys.argv[1:])
