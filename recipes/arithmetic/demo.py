"""Watch a model learn from its own traffic: ``python -m recipes.arithmetic.demo`` (what ``make demo`` runs).

    start the service -> held-out accuracy -> rollouts, grades, releases -> held-out accuracy -> summary, plot, table

Everything after the start goes over HTTP, through reef_harness, as any client's traffic would.
"""

import argparse
import asyncio
import json
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from reef_harness import Client, Evaluation, FinalGrader, GroupsDriver, Item, Release, evaluate, finish_on_sigint
from reef_harness.drivers.records import read_rollouts
from reef_harness.errors import HarnessError
from reef_harness.evaluation.plot import learning_curve
from reef_harness.keys import find_key
from reef_harness.progress import AnswerBar, ReleaseBar

from recipes.arithmetic.service import ROOT, ServiceFailed, answers, running_service, service_url
from recipes.arithmetic.task import Problem, held_out_set, train_stream

SCENARIO = "arithmetic"
STEPS = 4  # of each problem
NUM_CURVE = 200  # held-out problems, at most, for the points between before and after
NUM_PARTS = 5  # of the training, with a point between each two
MAX_TOKENS = 64
TABLE_ROWS = 8


@dataclass(slots=True)
class Curve:
    """What the plot shows, by the release's step: rewards (step, mean), held-out (step, share, low, high)."""

    rewards: list[tuple[int, float]] = field(default_factory=list)
    held_out: list[tuple[int, float, float, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything the demo measured."""

    method: str
    before: Evaluation
    after: Evaluation
    curve: Curve
    chain: list[Release]  # newest first
    releases: int  # made meanwhile
    rollouts: int


def items(problems: Iterator[Problem]) -> Iterator[Item]:
    """Problems as the harness wants them; an item is named by its text."""
    return (Item.from_text(problem.text, problem.text, str(problem.answer)) for problem in problems)


async def learn(url: str, seed: int, releases: int, num_held_out: int, records: Path, key: str | None) -> Outcome:
    """Measure, train for ``releases`` releases over HTTP, measure again. Raises KeyboardInterrupt after a Ctrl-C."""
    held_out = list(items(iter(held_out_set(STEPS, num_held_out))))
    between: list[Evaluation] = []
    async with Client(url, scenario=SCENARIO, token=key) as client:

        async def measure(name: str, count: int) -> Evaluation:
            with AnswerBar(count, name) as bar:
                result = await evaluate(
                    client, held_out[:count], FinalGrader(), max_tokens=MAX_TOKENS, seed=seed, progress=bar
                )
            await client.store_evaluation(result.release, {"set": f"held-out, {STEPS} steps", **result.summary()})
            return result

        method = (await client.create_scenario(SCENARIO))["recipe"]
        num_before = len(await client.releases())
        before = await measure("held-out, before", num_held_out)
        with (
            ReleaseBar(releases) as bar,
            GroupsDriver(
                client,
                items(train_stream(STEPS, seed)),
                FinalGrader(),
                max_tokens=MAX_TOKENS,
                records=records,
                progress=bar,
            ) as driver,
        ):
            for target in sorted({max(1, releases * i // NUM_PARTS) for i in range(1, NUM_PARTS + 1)}):
                async with finish_on_sigint(driver.stop):
                    progress = await driver.run(releases=target)
                if driver.stopping:
                    raise KeyboardInterrupt
                if target < releases:
                    name = f"held-out, {progress.releases} releases"
                    between.append(await measure(name, min(NUM_CURVE, num_held_out)))
        after = await measure("held-out, after", num_held_out)
        chain = await client.releases()
    step = {release.id: release.step for release in chain}
    points = sorted((step[e.release], e.accuracy, e.low, e.high) for e in (before, *between, after))
    rewards = sorted((step[release], scores.mean) for release, scores in driver.rewards.items())
    return Outcome(
        method,
        before,
        after,
        Curve(rewards, points),
        chain,
        len(chain) - num_before,
        progress.rollouts,
    )


def write_summary(path: Path, outcome: Outcome, seed: int, seconds: float) -> None:
    """Write the numbers, as JSON. ``seconds``: of the whole demo, the service's start and end included."""
    before, after = outcome.before, outcome.after
    summary = {
        "method": outcome.method,
        "seed": seed,
        "accuracy_before": before.accuracy,
        "accuracy_after": after.accuracy,
        "interval_before": [before.low, before.high],
        "interval_after": [after.low, after.high],
        "format_valid_after": after.format_valid,
        "held_out_problems": after.graded,
        "seconds": round(seconds, 1),
        "releases": outcome.releases,
        "rollouts": outcome.rollouts,
    }
    path.write_text(json.dumps(summary, indent=2) + "\n")


def table(chain: Sequence[Release]) -> str:
    """The last releases, newest first, as lines of text."""
    lines = [f"{'release':<26} {'step':>4}  {'operation':<10} {'reward':>6}  {'weights on disk':<15}  served"]
    for release in chain[:TABLE_ROWS]:
        reward = release.metrics.get("reward_mean")
        lines.append(
            f"{release.id:<26} {release.step:>4}  {release.operation:<10} "
            f"{'-' if reward is None else format(reward, '.3f'):>6}  "
            f"{'yes' if release.restorable else 'no':<15}  {'<-' if release.current else ''}"
        )
    return "\n".join(lines)


def share(evaluation: Evaluation) -> str:
    """Accuracy with its interval, as text; and what could not be graded, if anything."""
    failed = [answer.error for answer in evaluation.answers if answer.error]
    note = f"; {len(failed)} not graded, the first: {failed[0]}" if failed else ""
    return (
        f"{evaluation.accuracy:.3f}  (95% interval {evaluation.low:.3f} to {evaluation.high:.3f}, "
        f"{evaluation.graded} problems){note}"
    )


def go_on(url: str | None, run_dir: Path, records: Path) -> str:
    """Three commands to go on with: serve from the last release (or list them), ask it, ask what an answer was for."""
    reef = shlex.quote(short(Path(sys.executable).parent / "reef"))
    at = (f"--url {url} " if url else "") + f"--reef.run-dir {shlex.quote(short(run_dir))}"
    first = f"releases {SCENARIO} {at}" if url else f"serve -c serve.yaml {at}"
    key = f"$(cat {shlex.quote(short(run_dir / 'api-key'))})" if (run_dir / "api-key").exists() else "$REEF_API_KEY"
    body = json.dumps({"messages": [{"role": "user", "content": held_out_set(STEPS, 1)[0].text}], "max_tokens": 64})
    receipt = informative_receipt(records)
    return "\n".join(
        (
            f"  {reef} {first}",
            f"  curl -i {url or 'http://127.0.0.1:8080'}/v1/chat/completions -H 'content-type: application/json' "
            f'-H "Authorization: Bearer {key}" '
            f"-H 'x-reef-scenario: {SCENARIO}' -d {shlex.quote(body)}",
            f"  {reef} why {receipt} {at}",
        )
    )


def informative_receipt(records: Path) -> str:
    """The first receipt of a group with unlike scores: one that could train."""
    scores: dict[str, set[float]] = {}
    first: dict[str, str] = {}
    for rollout in read_rollouts(records):
        if rollout.error is None and rollout.group and rollout.receipt and rollout.score is not None:
            scores.setdefault(rollout.group, set()).add(rollout.score)
            first.setdefault(rollout.group, rollout.receipt)
    return next((first[group] for group, seen in scores.items() if len(seen) > 1), next(iter(first.values())))


def short(path: Path) -> str:
    """The path as seen from here, where it lies below."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def fresh_run_dir(out: Path) -> Path:
    """An empty run directory; that of an earlier demo goes. Raises ServiceFailed where a service still uses it."""
    run_dir = out / "run"
    url = service_url(run_dir / "service.json")
    if url and answers(url):
        raise ServiceFailed(f"a service at {url} still uses {run_dir}: stop it, or give the demo --url {url}")
    shutil.rmtree(run_dir, ignore_errors=True)
    return run_dir


def key_for(url: str, run_dir: Path, *, ours: bool) -> str | None:
    """The key of the service. Of one that we started it is the file's, whatever REEF_API_KEY is for."""
    file = run_dir / "api-key"
    return find_key(url, file.read_text().strip() if ours and file.exists() else None, file)


def demo(args: argparse.Namespace) -> None:
    """Run the whole demo and print what came of it."""
    started = time.monotonic()
    args.out.mkdir(parents=True, exist_ok=True)
    summary, plot, records = (args.out / name for name in ("summary.json", "learning.png", "rollouts.jsonl"))
    records.unlink(missing_ok=True)
    run_dir = args.run_dir if args.url else args.out / "run"
    service: AbstractContextManager[str]
    if args.url:
        service = nullcontext(args.url.rstrip("/"))
    else:
        run_dir = fresh_run_dir(args.out)
        print(f"starting reef serve (log: {short(args.out / 'serve.log')})", flush=True)
        service = running_service(ROOT / "serve.yaml", run_dir, say=lambda line: print(line, flush=True))
    with service as url:
        key = key_for(url, run_dir, ours=not args.url)
        outcome = asyncio.run(learn(url, args.seed, args.releases, args.held_out, records, key))
        print("stopping the service" if not args.url else "done", flush=True)

    seconds = time.monotonic() - started
    write_summary(summary, outcome, args.seed, seconds)
    gain = outcome.after.accuracy - outcome.before.accuracy
    learning_curve(
        plot,
        outcome.curve.rewards,
        outcome.curve.held_out,
        f"Arithmetic, {STEPS} steps, seed {args.seed}: held-out accuracy {gain:+.2f} in {outcome.releases} releases",
    )
    print(f"""
held-out accuracy, {STEPS}-step problems never trained on, one answer each at temperature 1
  before  {share(outcome.before)}
  after   {share(outcome.after)}
  {outcome.releases} releases from {outcome.rollouts} graded rollouts; {seconds:.0f} s in all

the last releases
{table(outcome.chain)}

written: {short(summary)}, {short(plot)}, {short(records)}
to go on:
{go_on(args.url, run_dir, records)}""")


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, run, and turn failures into a message and an exit status."""
    parser = argparse.ArgumentParser(prog="python -m recipes.arithmetic.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="of the problems and of the evaluation")
    parser.add_argument("--releases", type=int, default=45, help="releases to train")
    parser.add_argument("--held-out", type=int, default=1000, help="problems to measure on, before and after")
    parser.add_argument("--url", help="use a service that is running already, instead of starting one")
    parser.add_argument("--run-dir", type=Path, default=Path("work/run"), help="of the service at --url, for its key")
    parser.add_argument("--out", type=Path, default=ROOT / "work" / "demo", help="where everything is written")
    args = parser.parse_args(argv)
    args.out = args.out.resolve()
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGHUP, _terminate)
    try:
        demo(args)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except (ServiceFailed, HarnessError) as error:
        print(f"\nthe demo failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
