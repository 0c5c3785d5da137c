"""Train the starter by one method, at a number of rollouts that is given, and measure it on the way.

    python -m recipes.arithmetic.experiment sao --seed 0
    python -m recipes.arithmetic.experiment grpo-dis --steps 8 --releases 60 --stale 4 --seed 1

In lock step, so that methods can be compared and runs repeated: 64 rollouts, graded and reported, one release, the next
64 from it. With `--stale N` each 64 are reported only N releases after they were sampled. Requests have seeds of their
own. Everything goes over HTTP to a `reef serve` that is started for the run.
"""

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from reef_harness import Client, Evaluation, FinalGrader, Item, Release, evaluate
from reef_harness.errors import HarnessError
from reef_harness.evaluation.plot import learning_curve

from recipes.arithmetic.demo import items, short
from recipes.arithmetic.service import ROOT, ServiceFailed, running_service
from recipes.arithmetic.task import held_out_set, train_stream

SCENARIO = "arithmetic"
BATCH = 64  # rollouts of a release
MAX_TOKENS = {4: 64, 8: 96}
POLL_S = 0.01
# Method, by the recipe that it belongs to: its serve.yaml, and flags beside it.
METHODS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "sao": ("sao", ()),
    "grpo": ("grpo", ()),
    "grpo-dis": ("grpo", ("--recipe.config.ratio", "dis")),
}
GROUP = {"sao": 1, "grpo": 8, "grpo-dis": 8}  # rollouts of one prompt
DIGITS = 6  # that are kept of a figure


@dataclass(frozen=True, slots=True)
class Plan:
    """One run."""

    method: str
    seed: int
    steps: int  # of each problem
    releases: int  # those of the critic alone included
    stale: int  # releases between sampling and training
    every: int  # releases between measurements
    held_out: int  # problems of each

    @property
    def name(self) -> str:
        """The directory of its results."""
        late = f"-stale{self.stale}" if self.stale else ""
        mask = "-dis" if self.method == "grpo-dis" else ""
        return f"k{self.steps}{late}{mask}-seed{self.seed}"


@dataclass(frozen=True, slots=True)
class Point:
    """A measurement on the way."""

    release: str
    releases: int
    rollouts: int
    seconds: float  # of training until then; measuring is not counted
    evaluation: Evaluation


@dataclass(slots=True)
class Outcome:
    """What a run showed."""

    points: list[Point] = field(default_factory=list)
    chain: list[Release] = field(default_factory=list)  # oldest first, the base not among them
    seconds: float = 0.0


Reported = list[tuple[str, float | None, str]]  # receipt, score, group


class Run:
    """One run against a service."""

    def __init__(self, plan: Plan, client: Client) -> None:
        self._plan = plan
        self._client = client
        self._grader = FinalGrader()
        self._problems: Iterator[Item] = items(train_stream(plan.steps, plan.seed))
        self._held_out = list(items(iter(held_out_set(plan.steps, plan.held_out))))
        self._correct: list[list[int]] = []

    async def go(self, records: TextIO) -> Outcome:
        """Train and measure; a line of `records` for each release and each measurement."""
        plan, outcome = self._plan, Outcome()
        waiting: deque[Reported] = deque()
        await self._client.create_scenario(SCENARIO)
        await self._measure(outcome, records, 0)
        sampled = 0
        for number in range(1, plan.releases + 1):
            started = time.perf_counter()
            while len(waiting) <= plan.stale and sampled < plan.releases:
                waiting.append(await self._sample(sampled))
                sampled += 1
            release = await self._train(waiting.popleft())
            outcome.seconds += time.perf_counter() - started
            outcome.chain.append(release)
            _write(
                records,
                {"release": release.id, "step": release.step, "operation": release.operation, **_figures(release)},
            )
            if number % plan.every == 0 or number == plan.releases:
                await self._measure(outcome, records, number)
        return outcome

    async def _sample(self, number: int) -> Reported:
        """A batch of rollouts from what is served, graded."""
        size = GROUP[self._plan.method]
        problems = [next(self._problems) for _ in range(BATCH // size)]
        answers = await asyncio.gather(
            *(
                self._client.chat(
                    item.messages,
                    n=size,
                    temperature=1.0,
                    max_tokens=MAX_TOKENS[self._plan.steps],
                    seed=(self._plan.seed * 100_000 + number) * BATCH + i * size,
                )
                for i, item in enumerate(problems)
            )
        )
        return [
            (choice.receipt, (await self._grader.judge(item, choice.text, choice.finish_reason)).score, f"{number}/{i}")
            for i, (item, answer) in enumerate(zip(problems, answers, strict=True))
            for choice in answer.choices
        ]

    async def _train(self, batch: Reported) -> Release:
        """Report a batch; the release that it made, once that answers."""
        states = await asyncio.gather(
            *(self._client.report(receipt, score, group=group) for receipt, score, group in batch)
        )
        while not (state := await self._client.report_state(states[-1].id)).final:
            await asyncio.sleep(POLL_S)
        if state.state != "trained":
            raise HarnessError(f"report {state.id} was to train and is {state.state}: {state.reason}")
        while True:
            head = await self._client.current_release()
            served = (await self._client.status())["scenario"]["served"]
            if head.id == state.release and (head.operation == "critic-only" or served == head.id):
                return head
            await asyncio.sleep(POLL_S)

    async def _measure(self, outcome: Outcome, records: TextIO, releases: int) -> None:
        result = await evaluate(
            self._client, self._held_out, self._grader, max_tokens=MAX_TOKENS[self._plan.steps], seed=10**9
        )
        head = await self._client.current_release()
        await self._client.store_evaluation(head.id, {"set": f"held-out, {self._plan.steps} steps", **result.summary()})
        point = Point(head.id, releases, releases * BATCH, outcome.seconds, result)
        outcome.points.append(point)
        correct = "".join("1" if a.verdict is not None and a.verdict.correct else "0" for a in result.answers)
        _write(
            records,
            {
                "held_out": result.accuracy,
                "low": result.low,
                "high": result.high,
                "releases": releases,
                "rollouts": point.rollouts,
                "seconds": point.seconds,
                "correct": f"{int(correct, 2):x}",  # one bit for each problem, in their order
            },
        )
        print(
            f"{self._plan.method} {self._plan.name}: {releases:3} releases  {result.accuracy:.3f} "
            f"[{result.low:.3f}, {result.high:.3f}]  {point.seconds:6.1f} s",
            flush=True,
        )


def _figures(release: Release) -> dict[str, Any]:
    return {name: value for name, value in release.metrics.items() if isinstance(value, int | float)}


def _write(records: TextIO, values: Mapping[str, Any]) -> None:
    rounded = {name: round(value, DIGITS) if isinstance(value, float) else value for name, value in values.items()}
    records.write(json.dumps(rounded) + "\n")
    records.flush()


def summary(plan: Plan, outcome: Outcome, command: Sequence[str]) -> dict[str, Any]:
    """The numbers of a run."""
    before, after = outcome.points[0].evaluation, outcome.points[-1].evaluation
    return {
        "method": plan.method,
        "seed": plan.seed,
        "problem_steps": plan.steps,
        "stale": plan.stale,
        "accuracy_before": before.accuracy,
        "accuracy_after": after.accuracy,
        "interval_before": [before.low, before.high],
        "interval_after": [after.low, after.high],
        "gain": after.accuracy - before.accuracy,
        "held_out_problems": after.graded,
        "rollouts": outcome.points[-1].rollouts,
        "releases": len(outcome.chain),
        "critic_only": sum(release.operation == "critic-only" for release in outcome.chain),
        "seconds": round(outcome.seconds, 1),
        "curve": [[p.rollouts, p.evaluation.accuracy, p.evaluation.low, p.evaluation.high] for p in outcome.points],
        "command": " ".join(command),
    }


async def _against(url: str, plan: Plan, records: Path) -> Outcome:
    async with Client(url, scenario=SCENARIO) as client:
        with records.open("w") as file:
            return await Run(plan, client).go(file)


def run(plan: Plan, out: Path, flags: Sequence[str], command: Sequence[str]) -> dict[str, Any]:
    """One run in a service of its own; its results are written to `out`."""
    recipe, own = METHODS[plan.method]
    out.mkdir(parents=True, exist_ok=True)
    run_dir = ROOT / "work" / "experiments" / f"{plan.method}-{plan.name}" / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    config = ROOT / "recipes" / recipe / "serve.yaml"
    given = ("--reef.access", "open", "--storage.keep", "1", *own, *flags)
    with running_service(config, run_dir, given, say=lambda _line: None) as url:
        outcome = asyncio.run(_against(url, plan, out / "records.jsonl"))
    numbers = summary(plan, outcome, command)
    (out / "summary.json").write_text(json.dumps(numbers, indent=2) + "\n")
    learning_curve(
        out / "learning.png",
        [(r.step, r.metrics["reward_mean"]) for r in outcome.chain],
        [(p.releases, p.evaluation.accuracy, p.evaluation.low, p.evaluation.high) for p in outcome.points],
        f"{plan.method}, {plan.steps} steps, seed {plan.seed}: held-out accuracy {numbers['gain']:+.2f} "
        f"in {numbers['rollouts']} rollouts",
    )
    return numbers


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m recipes.arithmetic.experiment", description=__doc__.splitlines()[0]
    )
    parser.add_argument("method", choices=sorted(METHODS))
    parser.add_argument("--seed", type=int, default=0, help="of problems and sampling; the held-out problems stay")
    parser.add_argument("--steps", type=int, default=4, choices=sorted(MAX_TOKENS), help="of each problem")
    parser.add_argument("--releases", type=int, default=50, help="to train, of 64 rollouts each")
    parser.add_argument("--stale", type=int, default=0, help="releases that rollouts wait before they are reported")
    parser.add_argument("--every", type=int, default=10, help="releases between measurements")
    parser.add_argument("--held-out", type=int, default=1000, help="problems to measure on")
    parser.add_argument("--out", type=Path, help="default: recipes/RECIPE/results/RUN")
    args, flags = parser.parse_known_args(argv)
    plan = Plan(args.method, args.seed, args.steps, args.releases, args.stale, args.every, args.held_out)
    out = args.out or ROOT / "recipes" / METHODS[args.method][0] / "results" / plan.name
    command = ["python", "-m", "recipes.arithmetic.experiment", *(sys.argv[1:] if argv is None else argv)]
    try:
        numbers = run(plan, out, flags, command)
    except (ServiceFailed, HarnessError) as error:
        print(f"the run failed: {error}", file=sys.stderr)
        return 1
    print(f"{numbers['accuracy_before']:.3f} -> {numbers['accuracy_after']:.3f}, written: {short(out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
