"""Train on single rollouts: ``python -m recipes.sao.examples.imo_answerbench.stream --items ITEMS --out DIRECTORY``.

This is ``reef-harness stream`` with this example's settings; its other options may be added. Records go to
DIRECTORY/rollouts.jsonl (the same command goes on from there), the chain of releases to DIRECTORY/chain.json.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from reef_harness import cli, service
from reef_harness.errors import HarnessError

from recipes.sao.examples.imo_answerbench import chain


def main(argv: Sequence[str] | None = None) -> int:
    """Stream until the releases are made, then write the chain down."""
    parser = argparse.ArgumentParser(
        prog="stream.py", description=__doc__.splitlines()[0], epilog="Further options: reef-harness stream --help"
    )
    service.add_options(parser)
    parser.add_argument("--items", required=True, help="items JSONL, as export_problems.py makes it")
    parser.add_argument("--out", type=Path, required=True, help="directory of rollouts.jsonl and chain.json")
    parser.add_argument("--releases", type=int, required=True, help="until its reports have trained so many, in all")
    parser.add_argument("--grader", default="boxed")
    parser.add_argument("--max-tokens", default="7168", help="of each answer")
    parser.add_argument("--timeout-s", default="3630", help="of each answer; the service's own limit is shorter")
    parser.add_argument("--in-flight", default="64", help="rollouts at once")
    parser.add_argument("--max-ahead", default="1", help="batches ahead of the releases, so that few get stale")
    parser.add_argument("--seed", default="0", help="of the order of the items, anew each time through")
    arguments, more = parser.parse_known_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    words = ["stream", "--url", arguments.url, "--key-file", str(arguments.key_file)]
    words += ["--scenario", arguments.scenario] if arguments.scenario else []
    words += ["--records", str(arguments.out / "rollouts.jsonl")]
    for name in ("items", "releases", "grader", "max_tokens", "timeout_s", "in_flight", "max_ahead", "seed"):
        words += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    status = cli.main([*words, *more])
    try:
        chain.save(arguments.out / "chain.json", asyncio.run(chain.fetch(arguments)))
    except HarnessError as error:
        if status == 0:
            print(f"stream.py: the chain could not be written down: {error}", file=sys.stderr)
        return status or 1
    return status


if __name__ == "__main__":
    sys.exit(main())
