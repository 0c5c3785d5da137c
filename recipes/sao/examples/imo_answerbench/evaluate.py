"""Measure releases on held-out items: ``python -m ...imo_answerbench.evaluate --items ITEMS --out DIR``.

Each release is measured by ``reef-harness evaluate`` into a directory of its own in DIR, whatever is being served; one
that is there whole is not measured again. The oldest and the newest in DIR are compared (``reef-harness compare``):
the same items and seeds, so difference, interval and test are paired. As the paper does, the accuracy is the mean of N
runs, here with the spread of the runs and an interval over the items.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from reef_harness import cli, service
from reef_harness.errors import HarnessError
from reef_harness.evaluation.bank import Bank

from recipes.sao.examples.imo_answerbench import chain

SET = "in-domain"  # what reef-harness evaluate calls the set that --items names
SAMPLES = 16  # runs of the paper


def directory_of(out: Path, link: chain.Link) -> Path:
    """Where a release is measured; names sort as the chain does."""
    return out / f"{link.number:05}-{link.id}"


def measured(out: Path) -> list[Path]:
    """The releases that are measured whole, oldest first."""
    return sorted(path.parent for path in out.glob("[0-9]*/summary.json"))


def run_accuracies(bank: Bank) -> list[float]:
    """The accuracy of each run: the first answers to all items, the second ones, ... Unjudged answers are left out."""
    runs: dict[int, list[bool]] = {}
    for verdict in bank.verdicts(SET, bank.grader(None)):
        if verdict.graded and verdict.temperature == bank.asked.settings.temperature:
            runs.setdefault(verdict.sample, []).append(verdict.correct)
    return [fmean(runs[number]) for number in sorted(runs)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, compare, say it."""
    arguments, more = _parser().parse_known_args(argv)
    try:
        return evaluate(arguments, more)
    except (HarnessError, OSError) as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        return 1


def evaluate(arguments: argparse.Namespace, more: Sequence[str]) -> int:
    """Measure the releases that are asked for, then compare; the first status that is not 0."""
    found = asyncio.run(chain.fetch(arguments))
    arguments.out.mkdir(parents=True, exist_ok=True)
    chain.save(arguments.out / "chain.json", found)
    for name in arguments.release or ["current"]:
        link = chain.policy_of(found, name)
        if status := _measure(arguments, more, link):
            return status
    banks = measured(arguments.out)
    if len(banks) > 1:
        words = ["compare", str(banks[0]), str(banks[-1]), "--out", str(arguments.out / "before-after")]
        if status := cli.main(words):
            return status
    for path in banks:
        bank = Bank.open(path)
        runs = run_accuracies(bank)
        if runs:
            spread = f"{min(runs):.3f} to {max(runs):.3f}"
            print(f"{path.name}: {fmean(runs):.3f}, the mean of {len(runs)} runs ({spread})")
    return 0


def _measure(arguments: argparse.Namespace, more: Sequence[str], link: chain.Link) -> int:
    path = directory_of(arguments.out, link)
    if _whole(path, arguments.samples):
        print(f"{path} is measured")
        return 0
    words = ["evaluate", "--url", arguments.url, "--key-file", str(arguments.key_file)]
    words += ["--scenario", arguments.scenario] if arguments.scenario else []
    words += ["--items", str(arguments.items), "--out", str(path), "--release", link.id, "--store"]
    for name in ("grader", "samples", "max_tokens", "timeout_s", "concurrency", "seed"):
        words += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    return cli.main([*words, *more])


def _whole(path: Path, samples: int) -> bool:
    """Whether a release has all its answers and its numbers."""
    if not (path / "summary.json").exists():
        return False
    bank = Bank.open(path)
    answers = [response for response in bank.responses(SET) if response.error is None]
    return len(answers) >= samples * bank.asked.sets[SET].items


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evaluate.py", description=__doc__.splitlines()[0], epilog="Further options: reef-harness evaluate --help"
    )
    service.add_options(parser)
    parser.add_argument("--items", type=Path, required=True, help="held-out items, as export_problems.py makes them")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--release", action="append", help="first, current (default), or an id; may be repeated")
    parser.add_argument("--grader", default="boxed")
    parser.add_argument("--samples", type=int, default=SAMPLES, help=f"runs ({SAMPLES})")
    parser.add_argument("--max-tokens", type=int, default=7168, help="of each answer")
    parser.add_argument("--timeout-s", default="3630", help="of each answer; the service's own limit is shorter")
    parser.add_argument("--concurrency", type=int, default=64, help="requests at a time")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
