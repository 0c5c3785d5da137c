"""Compare the ways to spend tokens on an answer, at an equal budget, with the starter model: docs/test-time-compute.md.

    python -m recipes.arithmetic.compute            # work/compute: table, figure, every outcome
    python -m recipes.arithmetic.compute --docs     # and the page in docs/

Every method has the same budget of sampled tokens an item, and the same first seeds. The closed forms are given the
chances of a bank of 64 other answers to each problem.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from reef_harness import Client, FinalGrader, Item
from reef_harness.compute import (
    Asker,
    Beam,
    Budget,
    Outcome,
    beam_search,
    best_of,
    by_logprob_mean,
    by_logprob_sum,
    by_verifier,
    changes,
    revise,
    route,
    run_each,
    seed_of,
    self_consistency,
    summarize,
)
from reef_harness.compute.consistency import candidate_of
from reef_harness.compute.run import Method
from reef_harness.errors import HarnessError

from recipes.arithmetic.compute_results import (
    BANK,
    NOISY,
    PAGE,
    SAMPLES,
    SETTINGS,
    Chances,
    Result,
    Setting,
    draw,
    expectations,
    text_of,
    write_page,
)
from recipes.arithmetic.demo import fresh_run_dir, key_for, short
from recipes.arithmetic.service import ROOT, ServiceFailed, running_service
from recipes.arithmetic.task import held_out_set
from recipes.arithmetic.verifier import answer_right, fault, partial_right, problem_of, told

SCENARIO = "arithmetic"
GRADER = FinalGrader()


class Lab:
    """Runs methods on the items of one setting."""

    def __init__(self, client: Client, setting: Setting, count: int) -> None:
        self.client, self.setting = client, setting
        self.items = [Item.from_text(p.text, p.text, str(p.answer)) for p in held_out_set(setting.steps, count)]

    def asker(
        self,
        item: Item,
        *,
        samples: int | None = None,
        temperature: float = 1.0,
        logprobs: bool = False,
        least: int = 0,
    ) -> Asker:
        """For one item, under the budget."""
        budget = Budget(self.setting.budget, samples, least or self.setting.shortest)
        return Asker(
            self.client,
            budget,
            max_tokens=16 * self.setting.steps,
            temperature=temperature,
            seed=seed_of(0, item),
            logprobs=logprobs,
        )

    async def bank(self) -> Chances:
        """Other answers than those of the methods: ``BANK`` to each problem, in one request."""

        async def draw(asker: Asker, item: Item) -> Outcome:
            found = await asker.chat(item.messages, n=BANK)
            return Outcome(
                item.id, (), asker.spent, "samples", tuple(candidate_of(each, GRADER.read) for each in found)
            )

        def make(item: Item) -> Asker:
            return Asker(self.client, Budget(), max_tokens=16 * self.setting.steps, seed=seed_of(1, item))

        outcomes = await run_each(self.items, make, draw, concurrency=8)
        if failed := [outcome.error for outcome in outcomes if outcome.error]:
            raise HarnessError(f"the bank is not whole: {failed[0]}")
        right, sound = [], []
        for item, outcome in zip(self.items, outcomes, strict=True):
            verdicts = [await GRADER.judge(item, each.text, each.finish_reason) for each in outcome.trace]
            right.append(sum(verdict.correct for verdict in verdicts))
            problem = problem_of(item)
            sound.append(sum(fault(problem, each.text, whole=True) is None for each in outcome.trace))
        tokens = sum(outcome.spent.sampled_tokens for outcome in outcomes) / BANK / len(outcomes)
        return Chances(tuple(right), tuple(sound), tokens)

    async def measure(self, out: Path) -> Result:
        """Every method, one after the other."""
        began = time.monotonic()
        chances = await self.bank()
        rows, revisions = [], {}
        for name, outcomes in [
            *[(name, await run_each(self.items, make, method)) for name, make, method in self._methods()],
            (f"routing: 3, then up to {2 * SAMPLES} by entropy", await self._route()),
        ]:
            rows.append(await summarize(name, self.items, outcomes, GRADER))
            if name.startswith("revision"):
                revisions[name] = await self._changes(outcomes)
            lines = "".join(json.dumps({"method": name, **outcome.json()}) + "\n" for outcome in outcomes)
            with (out / f"outcomes-{self.setting.steps}.jsonl").open("a") as file:
                file.write(lines)
        expected = expectations(chances)
        rows = [replace(row, expected=expected.get(row.method)) for row in rows]
        return Result(self.setting, rows, chances, revisions, time.monotonic() - began)

    def _methods(self) -> list[tuple[str, partial[Asker], Method]]:
        plain, scored = partial(self.asker, samples=SAMPLES), partial(self.asker, samples=SAMPLES, logprobs=True)
        search = partial(self.asker, logprobs=True, least=6)
        read = GRADER.read
        how = Beam(",", width=2, expansions=2, floor=1.0, accept=1.0)

        def vote(samples: int, early_stop: bool = True) -> Method:
            return lambda asker, item: self_consistency(asker, item, read, samples, early_stop=early_stop)

        exact, noisy = by_verifier(answer_right), by_verifier(NOISY.answer)
        return [
            ("one greedy answer", partial(self.asker, temperature=0.0), vote(1)),
            ("one sample", plain, vote(1)),
            (f"vote of {SAMPLES}", plain, vote(SAMPLES, early_stop=False)),
            (f"vote of {SAMPLES}, early stop", plain, vote(SAMPLES)),
            (
                f"best of {SAMPLES}, log-probability",
                scored,
                lambda a, i: best_of(a, i, read, by_logprob_sum, SAMPLES),
            ),
            (
                f"best of {SAMPLES}, mean log-probability",
                scored,
                lambda a, i: best_of(a, i, read, by_logprob_mean, SAMPLES),
            ),
            (f"best of {SAMPLES}, exact verifier", plain, lambda a, i: best_of(a, i, read, exact, SAMPLES, accept=1.0)),
            (f"best of {SAMPLES}, noisy verifier", plain, lambda a, i: best_of(a, i, read, noisy, SAMPLES, accept=1.0)),
            ("beam search, exact verifier", search, lambda a, i: beam_search(a, i, read, partial_right, how)),
            ("beam search, noisy verifier", search, lambda a, i: beam_search(a, i, read, NOISY.partial, how)),
            ("revision, exact checker", plain, lambda a, i: revise(a, i, read, told, SAMPLES - 1)),
            ("revision, noisy checker", plain, lambda a, i: revise(a, i, read, NOISY.told, SAMPLES - 1)),
            ("revision, always asked once more", plain, lambda a, i: revise(a, i, read, _again, 1)),
        ]

    async def _route(self) -> list[Outcome]:
        return await route(
            [self.asker(item) for item in self.items],
            self.items,
            GRADER.read,
            tokens=self.setting.budget * len(self.items),
            first=3,
            most=2 * SAMPLES,
            least=self.setting.shortest,
        )

    async def _changes(self, outcomes: Sequence[Outcome]) -> tuple[int, int, int]:
        pairs = []
        for item, outcome in zip(self.items, outcomes, strict=True):
            if not outcome.trace:
                continue  # it failed, as its row says
            ends = [*outcome.trace[:1], *outcome.chosen]
            first, last = [await GRADER.judge(item, each.text, each.finish_reason) for each in ends]
            pairs.append((first.correct, last.correct))
        found = changes(pairs)
        return found.right_to_wrong, found.wrong_to_right, len(pairs)


def _again(item: Item, sample: object) -> str:
    """A checker that knows nothing and always asks once more."""
    return f"Check every line. {item.question}"


async def measure(url: str, key: str | None, count: int, out: Path) -> list[Result]:
    """Both settings, one after the other."""
    async with Client(url, scenario=SCENARIO, token=key) as client:
        await client.create_scenario(SCENARIO)
        results = []
        for setting in SETTINGS:
            results.append(await Lab(client, setting, count).measure(out))
            print(f"{setting.title}: {results[-1].seconds:.0f} s")
        return results


def main(argv: Sequence[str] | None = None) -> int:
    """Start a service that only answers, measure, write."""
    parser = argparse.ArgumentParser(prog="python -m recipes.arithmetic.compute", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="problems of each class")
    parser.add_argument("--out", type=Path, default=ROOT / "work" / "compute")
    parser.add_argument("--docs", action="store_true", help="write the page in docs/ too")
    arguments = parser.parse_args(argv)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    for setting in SETTINGS:
        (out / f"outcomes-{setting.steps}.jsonl").unlink(missing_ok=True)
    try:
        run_dir = fresh_run_dir(out)
        with running_service(ROOT / "serve.yaml", run_dir, ["--training.backend", "none"]) as url:
            results = asyncio.run(measure(url, key_for(url, run_dir, ours=True), arguments.count, out))
    except (HarnessError, ServiceFailed) as error:
        print(f"not measured: {error}", file=sys.stderr)
        return 1
    text = text_of(results)
    (out / "compute.md").write_text(text)
    draw(out / "compute.png", results)
    print(f"{text}\nwritten: {short(out / 'compute.md')}, {short(out / 'compute.png')}")
    if arguments.docs:
        write_page(text)
        draw(PAGE.with_suffix(".png"), results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
