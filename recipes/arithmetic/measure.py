"""Measure a release on held-out problems: the command of a gate.

    evaluation:
      gate: {accuracy: {min: 0.5}, invalid-rate: {max: 0.05}}
      command: [.venv/bin/python, -m, recipes.arithmetic.measure]

The service sets REEF_URL, REEF_API_KEY, REEF_SCENARIO and REEF_RELEASE, and reads the result from the last line that is
printed.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from reef_harness import Client, FinalGrader, Item, evaluate
from reef_harness.errors import HarnessError

from recipes.arithmetic.task import held_out_set

STEPS = 4  # of each problem
MAX_TOKENS = 64


async def measure(url: str, scenario: str, release: str, count: int, key_file: Path) -> dict[str, object]:
    """The summary of one answer to each of `count` held-out problems, by this release and no other."""
    async with Client(url, scenario=scenario, key_file=key_file) as client:
        problems = [
            Item.from_text(problem.text, problem.text, str(problem.answer)) for problem in held_out_set(STEPS, count)
        ]
        result = await evaluate(client, problems, FinalGrader(), max_tokens=MAX_TOKENS, release=release)
    return {"set": f"held-out, {STEPS} steps", **result.summary()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default=os.environ.get("REEF_URL", "http://127.0.0.1:8080"))
    parser.add_argument("--run-dir", type=Path, default=Path("work/run"), help="the service's: its key is there")
    parser.add_argument("--scenario", default=os.environ.get("REEF_SCENARIO", "arithmetic"))
    parser.add_argument("--release", default=os.environ.get("REEF_RELEASE"), help="default: the one that is served")
    parser.add_argument("--count", type=int, default=200, help="problems")
    arguments = parser.parse_args(argv)
    try:
        key_file = arguments.run_dir / "api-key"
        measured = measure(arguments.url, arguments.scenario, arguments.release, arguments.count, key_file)
        print(json.dumps(asyncio.run(measured)))
    except HarnessError as error:
        sys.exit(f"not measured: {error}")


if __name__ == "__main__":
    main()
