"""Send graded arithmetic traffic to a running service until it has made some releases.

`python -m recipes.arithmetic.traffic --url http://127.0.0.1:8080 --releases 2`: several rollouts of
each problem, which GRPO compares; with `--stream` one of each, for SAO.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from reef_harness import Client, FinalGrader, GroupsDriver, Item, StreamDriver, finish_on_sigint
from reef_harness.client import Retry
from reef_harness.drivers import Options
from reef_harness.errors import HarnessError
from reef_harness.progress import ReleaseBar

from recipes.arithmetic.task import train_stream

STEPS = 4  # of each problem
MAX_TOKENS = 64


async def send(url: str, scenario: str, releases: int, seed: int, key_file: Path, stream: bool) -> None:
    """Keep rollouts in flight, in groups or singly, until our reports have trained `releases` releases, or Ctrl-C."""
    problems = (
        Item.from_text(problem.text, problem.text, str(problem.answer)) for problem in train_stream(STEPS, seed)
    )
    async with Client(url, key_file=key_file, retry=Retry(total_s=0)) as probe:
        await probe.scenarios()  # a service that is not there, or wants another key, is said at once
    async with Client(url, scenario=scenario, key_file=key_file) as client:
        with ReleaseBar(releases) as bar:
            options = Options(max_tokens=MAX_TOKENS, progress=bar)
            with (
                StreamDriver(client, problems, FinalGrader(), max_ahead=1, **options)
                if stream
                else GroupsDriver(client, problems, FinalGrader(), **options)
            ) as driver:
                async with finish_on_sigint(driver.stop):
                    await driver.run(releases=releases)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--run-dir", type=Path, default=Path("work/run"), help="the service's: its key is there")
    parser.add_argument("--scenario", default="arithmetic")
    parser.add_argument("--releases", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the stream of problems")
    parser.add_argument("--stream", action="store_true", help="one rollout of each problem (SAO), not groups (GRPO)")
    arguments = parser.parse_args(argv)
    try:
        key_file = arguments.run_dir / "api-key"
        work = send(arguments.url, arguments.scenario, arguments.releases, arguments.seed, key_file, arguments.stream)
        asyncio.run(work)
    except HarnessError as error:
        sys.exit(f"no traffic: {error}")


if __name__ == "__main__":
    main()
