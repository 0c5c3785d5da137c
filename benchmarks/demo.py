"""`make demo` on three seeds: what is learnt, and the wall clock of the whole command. Minutes: five or six."""

import json
import subprocess
import sys
import time
from typing import Any

from benchmarks.common import RESULTS, ROOT, table, write

SEEDS = (0, 1, 2)


def run(seed: int) -> dict[str, Any]:
    """One demo, start and end of the service included."""
    out = RESULTS / f"demo-seed-{seed}"
    started = time.perf_counter()
    command = [sys.executable, "-m", "recipes.arithmetic.demo", "--seed", str(seed), "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return {**summary, "wall_clock_s": round(time.perf_counter() - started, 1)}


def main() -> None:
    found = [run(seed) for seed in SEEDS]
    head = ["seed", "before", "after", "gain", "releases", "rollouts", "seconds"]
    rows = [
        [
            str(summary["seed"]),
            f"{summary['accuracy_before']:.3f}",
            f"{summary['accuracy_after']:.3f}",
            f"{summary['accuracy_after'] - summary['accuracy_before']:+.3f}",
            str(summary["releases"]),
            str(summary["rollouts"]),
            f"{summary['wall_clock_s']:.0f}",
        ]
        for summary in found
    ]
    print("Demo: held-out accuracy, 1,000 problems, one answer each at temperature 1")
    print(table(head, rows))
    write("demo", {"seeds": found})


if __name__ == "__main__":
    main()
