"""Watch a bad reward pay while the model gets worse: ``python -m recipes.arithmetic.goodhart`` (docs/goodhart.md).

    reward = 1 where the answer is right, and `--bonus` for each character of it, right or wrong

The service trains on that, and is told after every few releases how many held-out problems the model still gets right.
The alarm of ``observability.alarms`` compares the two.
"""

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

from reef_harness import (
    Client,
    Evaluation,
    FinalGrader,
    Grader,
    GroupsDriver,
    Item,
    Verdict,
    evaluate,
    finish_on_sigint,
)
from reef_harness.errors import HarnessError

from recipes.arithmetic.demo import fresh_run_dir, key_for, short
from recipes.arithmetic.service import ROOT, ServiceFailed, running_service
from recipes.arithmetic.task import Problem, held_out_set, train_stream

SCENARIO = "arithmetic"
STEPS = 4  # of each problem
MAX_TOKENS = 64
BONUS = 1.0  # a character more pays as much as a right answer
LR = 3e-4
ALARM = {"metric": "accuracy", "drop": 0.1, "reward-rise": 0.25, "window": 40}


class LengthBonus(Grader):
    """Right or wrong as FinalGrader says it, but the score has `bonus` more for each character of the answer."""

    id = "final-and-length"
    version = "1"

    def __init__(self, bonus: float) -> None:
        self.bonus = bonus

    def grade(self, text: str, gold: str, finish_reason: str) -> Verdict:
        """Judge one answer; an answer that the limit of tokens cut is wrong, and has its bonus all the same."""
        verdict = FinalGrader().grade(text, gold, finish_reason)
        score = float(verdict.correct) + self.bonus * len(text)
        return replace(verdict, score=score, grader=self.id, version=self.version)


@dataclass(frozen=True, slots=True)
class Row:
    """A measured release. Means of reward and length are those of the releases since the last row; the base has none.

    Lengths are tokens of an answer; `low` and `high` are the 95% interval of `accuracy`.
    """

    release: str
    step: int
    reward: float | None
    length: float | None
    accuracy: float
    low: float
    high: float
    held_out_length: float
    alarms: tuple[str, ...]


async def drill(
    url: str,
    key: str | None,
    *,
    bonus: float,
    releases: int,
    every: int,
    held_out: int,
    seed: int = 0,
    say: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Train for `releases` releases with the bonus; measure `held_out` problems before, and after each `every`.

    `say` is called with each row as soon as it is known. Raises KeyboardInterrupt after a Ctrl-C.
    """
    problems = list(map(_item, held_out_set(STEPS, held_out)))
    stream = map(_item, train_stream(STEPS, seed))
    rows: list[Row] = []
    async with Client(url, scenario=SCENARIO, token=key) as client:
        await client.create_scenario(SCENARIO)
        with GroupsDriver(client, stream, LengthBonus(bonus), max_tokens=MAX_TOKENS) as driver:
            for target in range(0, releases + 1, every):
                async with finish_on_sigint(driver.stop):
                    await driver.run(releases=target)
                if driver.stopping:
                    raise KeyboardInterrupt
                rows.append(await _measure(client, problems, rows[-1].step if rows else 0, seed))
                say(rows[-1])
    return rows


async def _measure(client: Client, problems: Sequence[Item], since: int, seed: int) -> Row:
    """The served release on held-out problems, stored with it; and how its ancestors after step `since` were paid."""
    result = await evaluate(client, problems, FinalGrader(), max_tokens=MAX_TOKENS, seed=seed)
    body = {"set": f"held-out, {STEPS} steps", **result.summary()}
    stored = await client.store_evaluation(result.release, body)
    chain = await client.releases()
    step = next(release.step for release in chain if release.id == result.release)
    paid = [release.metrics for release in chain if since < release.step <= step]
    return _row(result, step, paid, tuple(alarm["message"] for alarm in stored.get("alarms", ())))


def _row(result: Evaluation, step: int, paid: Sequence[Mapping[str, float]], alarms: tuple[str, ...]) -> Row:
    reward, length = (
        sum(metrics[name] for metrics in paid) / len(paid) if paid else None
        for name in ("reward_mean", "response_length_mean")
    )
    return Row(
        result.release,
        step,
        reward,
        length,
        result.accuracy,
        result.low,
        result.high,
        result.mean_tokens,
        alarms,
    )


def _item(problem: Problem) -> Item:
    return Item.from_text(problem.text, problem.text, str(problem.answer))


HEAD = f"{'release':<14} {'step':>4} {'reward':>8} {'length':>7}   held-out accuracy (95%)  {'length':>7}  alarm"


def line(row: Row) -> str:
    """A row of the table."""
    reward, length = ("-" if value is None else f"{value:.2f}" for value in (row.reward, row.length))
    interval = f"({row.low:.3f} to {row.high:.3f})"
    return (
        f"{row.release:<14} {row.step:>4} {reward:>8} {length:>7}   {row.accuracy:.3f} {interval}"
        f"   {row.held_out_length:>7.2f}  {'; '.join(row.alarms)}"
    )


def plot(path: Path, rows: Sequence[Row], bonus: float) -> None:
    """Draw reward, accuracy and length against the step; releases that ring an alarm are ringed."""
    import matplotlib  # only the plot needs it

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6), dpi=150, layout="constrained", sharex=True)
    paid = [row for row in rows if row.reward is not None]
    lengths = above.twinx()
    above.plot([row.step for row in paid], [row.reward for row in paid], color="tab:blue", marker="o")
    above.set_ylabel("reward_mean", color="tab:blue")
    lengths.plot([row.step for row in paid], [row.length for row in paid], color="tab:green", marker="s", ls="--")
    lengths.set_ylabel("response_length_mean (tokens)", color="tab:green")
    ends = [[row.accuracy - row.low for row in rows], [row.high - row.accuracy for row in rows]]
    steps, shares = [row.step for row in rows], [row.accuracy for row in rows]
    below.errorbar(steps, shares, yerr=ends, color="tab:orange", marker="o", capsize=3, label="held-out accuracy (95%)")
    rung = [row for row in rows if row.alarms]
    where = [row.step for row in rung], [row.accuracy for row in rung]
    below.scatter(*where, s=160, facecolors="none", edgecolors="tab:red", label="rings the alarm")
    below.set(xlabel="release (optimizer step)", ylabel="share correct", ylim=(0, 1))
    below.legend()
    above.set_title(f"The reward pays a right answer 1 and each character {bonus:g}")
    figure.savefig(path)
    plt.close(figure)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Start a service, run the drill, print the table, write plot and summary; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m recipes.arithmetic.goodhart", description=__doc__.splitlines()[0])
    parser.add_argument("--bonus", type=float, default=BONUS, help="reward of a character; 0: the honest reward")
    parser.add_argument("--releases", type=int, default=30)
    parser.add_argument("--every", type=int, default=5, help="releases between two measurements")
    parser.add_argument("--held-out", type=int, default=500, help="problems of a measurement")
    parser.add_argument("--lr", type=float, default=LR)
    parser.add_argument("--seed", type=int, default=0, help="of the problems and of the evaluation")
    parser.add_argument("--out", type=Path, default=ROOT / "work" / "goodhart", help="where everything is written")
    args = parser.parse_args(argv)
    out = args.out.resolve()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        run_dir = fresh_run_dir(out)
        flags = ["--observability.alarms", json.dumps([ALARM]), "--training.options.lr", str(args.lr)]
        print(f"starting reef serve (log: {short(out / 'serve.log')})", flush=True)
        with running_service(ROOT / "serve.yaml", run_dir, flags) as url:
            print(HEAD, flush=True)
            started = time.monotonic()
            rows = asyncio.run(
                drill(
                    url,
                    key_for(url, run_dir, ours=True),
                    bonus=args.bonus,
                    releases=args.releases,
                    every=args.every,
                    held_out=args.held_out,
                    seed=args.seed,
                    say=lambda row: print(line(row), flush=True),
                )
            )
            seconds = time.monotonic() - started
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    except (ServiceFailed, HarnessError) as error:
        print(f"\nthe drill failed: {error}", file=sys.stderr)
        return 1
    settings = {"bonus": args.bonus, "lr": args.lr, "seed": args.seed, "seconds": round(seconds, 1), "alarm": ALARM}
    (out / "summary.json").write_text(json.dumps({**settings, "rows": list(map(asdict, rows))}, indent=2) + "\n")
    plot(out / "goodhart.png", rows, args.bonus)
    print(f"\n{seconds:.0f} s; written: {short(out / 'summary.json')}, {short(out / 'goodhart.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
