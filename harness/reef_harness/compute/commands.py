"""The commands of this room: ``compute METHOD``."""

import argparse
import asyncio
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from reprlib import repr as short
from typing import Any

from reef_harness import service
from reef_harness.client import Client
from reef_harness.compute import coverage
from reef_harness.compute.asker import Asker, Budget
from reef_harness.compute.beam import Beam, beam_search
from reef_harness.compute.best_of import best_of
from reef_harness.compute.consistency import Read, self_consistency
from reef_harness.compute.outcome import Outcome, releases_of
from reef_harness.compute.revision import changes, revise
from reef_harness.compute.routing import route
from reef_harness.compute.run import Method, credit, rows_table, run_each, seed_of, summarize, told_of
from reef_harness.compute.scores import Scorer, by_judge, by_logprob_mean, by_logprob_sum, by_verifier
from reef_harness.errors import HarnessError
from reef_harness.evaluation.items import read_items
from reef_harness.graders import Grader
from reef_harness.graders.named import grader_of, module_of
from reef_harness.progress import OutcomeBar
from reef_harness.types import Item

SCORERS: dict[str, Scorer] = {"logprob-sum": by_logprob_sum, "logprob-mean": by_logprob_mean}
FUNCTION = "a function of yours, as MODULE:NAME (modules here are found)"


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add them to ``reef-harness``. Each sets ``run``: parsed arguments in, the exit status out."""
    parser = commands.add_parser("compute", help="spend more tokens on an answer, counted")
    methods = parser.add_subparsers(dest="method", required=True, metavar="METHOD")
    vote = _add(methods, "vote", "self-consistency: the majority of several answers")
    vote.add_argument("--all", action="store_true", help="draw every sample, though the vote is decided")
    best = _add(methods, "best-of", "the best of several answers by a scorer")
    known = "logprob-sum, logprob-mean, judge:URL,model=M,needs_gold=no"
    best.add_argument("--scorer", required=True, help=f"{known}, or {FUNCTION}")
    best.add_argument("--accept", type=float, help="stop at the first answer that scores at least this")
    beam = _add(methods, "beam", "beam search over segments of an answer, led by a verifier", samples=False)
    beam.add_argument("--verifier", required=True, help=f"{FUNCTION}: (item, partial answer) -> score")
    beam.add_argument("--boundary", required=True, help="the text that ends a segment")
    beam.add_argument("--width", type=int, default=2, help="beams that are kept (default: %(default)s)")
    beam.add_argument("--expansions", type=int, default=2, help="continuations of each beam (default: %(default)s)")
    beam.add_argument("--floor", type=float, help="drop what scores below")
    beam.add_argument("--accept", type=float, help="end with the first whole answer that scores at least this")
    revision = _add(methods, "revise", "answer again after what a checker found", samples=False)
    revision.add_argument("--checker", required=True, help=f"{FUNCTION}: (item, sample) -> text, or None")
    revision.add_argument(
        "--rounds", type=int, default=2, help="further answers to an item at most (default: %(default)s)"
    )
    routing = _add(methods, "route", "more samples where the first ones disagree; the budget is shared by all items")
    routing.add_argument("--first", type=int, default=3, help="answers that every item gets (default: %(default)s)")
    # No budget: items with long answers would have fewer of them, and the last one cut.
    _add(methods, "coverage", "how often one of k answers is right, and where more brings little", budget=False)


def _add(
    methods: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    help: str,
    *,
    samples: bool = True,
    budget: bool = True,
) -> argparse.ArgumentParser:
    """A method's parser, with the options that mean something for it."""
    parser = methods.add_parser(name, help=help)
    service.add_options(parser)
    parser.add_argument("--items", type=Path, required=True, help="JSONL, as for evaluate")
    parser.add_argument("--grader", required=True, help="see reef-harness graders; its reading of answers votes")
    if samples:
        parser.add_argument("--samples", type=int, default=8, help="answers to an item at most (default: %(default)s)")
    parser.set_defaults(budget=None, least=None)
    if budget:
        parser.add_argument("--budget", type=int, metavar="TOKENS", help="sampled tokens for an item at most")
        parser.add_argument("--least", type=int, help="with --budget: no answer that could get fewer tokens (1)")
    parser.add_argument(
        "--max-tokens", type=int, default=64, help="tokens of one answer at most (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampling (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="that the seeds of all answers are made of (default: %(default)s)"
    )
    parser.add_argument("--release", help="ask this one, whatever is served")
    parser.add_argument("--limit", type=int, help="only the first so many items")
    parser.add_argument("--concurrency", type=int, default=64, help="items at a time (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="a new JSONL file: each outcome as it ends, with its answers")
    parser.set_defaults(run=_compute)
    return parser


def _compute(arguments: argparse.Namespace) -> int:
    try:
        return asyncio.run(_compute_all(arguments))
    except KeyboardInterrupt:
        if arguments.out and arguments.out.exists() and arguments.out.stat().st_size:
            _say(f"what was answered is kept in {arguments.out}: the same command with another --out begins anew")
        raise


async def _compute_all(arguments: argparse.Namespace) -> int:
    _check(arguments)
    grader = grader_of(arguments.grader)
    items, complaints = read_items(arguments.items)
    for complaint in complaints:
        _say(f"left out: {complaint}")
    items = items[: arguments.limit]
    read = guarded(arguments.grader, grader.read, "text or None", _text)
    method = _method(arguments, read)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(await service.connect(arguments))
        if arguments.release is not None:
            await stack.enter_async_context(client.engine_for(arguments.release))
        keep = stack.enter_context(_kept(arguments.out)) if arguments.out else None
        bar = stack.enter_context(OutcomeBar(len(items), arguments.method))

        def ended(outcome: Outcome) -> None:
            if keep:
                keep(outcome)
            bar(outcome)

        outcomes = await _run(arguments, client, items, read, method, ended)
    if arguments.out:
        _say(f"wrote {arguments.out}")
    return await _tell(arguments, items, outcomes, grader)


def _check(arguments: argparse.Namespace) -> None:
    """Before anything is asked for. Raises ValueError for what means nothing, FileExistsError for outcomes there."""
    if arguments.concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, got {arguments.concurrency}")
    if arguments.limit is not None and arguments.limit < 1:
        raise ValueError(f"limit must be at least 1, got {arguments.limit}")
    if arguments.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {arguments.max_tokens}")
    if arguments.method == "revise" and arguments.rounds < 0:
        raise ValueError(f"rounds must be at least 0, got {arguments.rounds}")
    _budget(arguments)
    if arguments.method == "route" and arguments.budget is None:
        raise ValueError("route shares out a budget: --budget TOKENS says how much for an item on average")
    if arguments.least is not None and arguments.budget is None:
        raise ValueError("--least says what is too little to be left of a --budget, and there is none")
    if arguments.out and arguments.out.exists() and arguments.out.stat().st_size:
        raise FileExistsError(f"{arguments.out} holds outcomes already: give another --out")


@contextmanager
def _kept(path: Path) -> Iterator[Callable[[Outcome], None]]:
    """A function that writes an outcome to the file at once: whatever ends the command, those that ended are there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:

        def keep(outcome: Outcome) -> None:
            file.write(json.dumps(outcome.json()) + "\n")
            file.flush()

        yield keep


async def _run(
    arguments: argparse.Namespace,
    client: Client,
    items: Sequence[Item],
    read: Read,
    method: Method,
    progress: Callable[[Outcome], None],
) -> list[Outcome]:
    make = partial(_asker, arguments, client)
    if arguments.method == "route":
        return await route(
            [make(item) for item in items],
            items,
            read,
            tokens=arguments.budget * len(items),
            first=arguments.first,
            most=arguments.samples,
            least=arguments.least or 1,
            concurrency=arguments.concurrency,
            progress=progress,
        )
    return await run_each(items, make, method, concurrency=arguments.concurrency, progress=progress)


def _budget(arguments: argparse.Namespace) -> Budget:
    """Of an item. Raises ValueError for numbers below 1."""
    samples = arguments.samples if arguments.method in ("vote", "best-of", "coverage") else None
    return Budget(arguments.budget, samples, arguments.least or 1)


def _asker(arguments: argparse.Namespace, client: Client, item: Item) -> Asker:
    return Asker(
        client,
        _budget(arguments),
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        seed=seed_of(arguments.seed, item),
        release=arguments.release,
        logprobs=arguments.method in ("best-of", "beam"),
    )


def _method(arguments: argparse.Namespace, read: Read) -> Method:
    if arguments.method == "beam":
        how = Beam(
            arguments.boundary,
            arguments.width,
            arguments.expansions,
            floor=arguments.floor,
            accept=arguments.accept,
        )
        verify = guarded(arguments.verifier, function_of(arguments.verifier), "a finite number", _finite)
        return lambda asker, item: beam_search(asker, item, read, verify, how)
    if arguments.method == "revise":
        check = guarded(arguments.checker, function_of(arguments.checker), "text or None", _text)
        return lambda asker, item: revise(asker, item, read, check, arguments.rounds)
    if arguments.method == "best-of":
        score = scorer_of(arguments.scorer)
        return lambda asker, item: best_of(asker, item, read, score, arguments.samples, accept=arguments.accept)
    early_stop = arguments.method == "vote" and not arguments.all
    return lambda asker, item: self_consistency(asker, item, read, arguments.samples, early_stop=early_stop)


async def _tell(
    arguments: argparse.Namespace, items: Sequence[Item], outcomes: Sequence[Outcome], grader: Grader
) -> int:
    """Print what came of it; 1 where nothing could be graded."""
    if len(releases := releases_of(outcomes)) > 1:
        counts = ", ".join(f"{name}: {count}" for name, count in sorted(releases.items()))
        print(
            f"The answers are of {len(releases)} releases ({counts}): the service took up new ones meanwhile, and "
            "these numbers are of none of them alone. With --release they would be of one.\n"
        )
    for outcome in outcomes:
        if outcome.error:
            _say(f"{outcome.item}: {outcome.error}")
    if arguments.method == "coverage":
        print(coverage.text_of(await coverage.counts(items, outcomes, grader, say=_say)))
        return 0
    row = await summarize(arguments.method, items, outcomes, grader)
    for line in told_of(row.unjudged):
        _say(line)
    print(rows_table([row]))
    print("stopped by: " + ", ".join(f"{name} {count}" for name, count in sorted(row.stopped_by.items())))
    if arguments.method == "revise":
        found = changes(await _first_and_last(items, outcomes, grader))
        print(
            f"right to wrong {found.right_to_wrong}, wrong to right {found.wrong_to_right}, "
            f"stayed right {found.right_to_right}, stayed wrong {found.wrong_to_wrong}"
        )
    return 0 if row.accuracy else 1


async def _first_and_last(
    items: Sequence[Item], outcomes: Sequence[Outcome], grader: Grader
) -> list[tuple[bool, bool]]:
    pairs = []
    for item, outcome in zip(items, outcomes, strict=True):
        if outcome.trace:
            first, last = await credit(item, outcome.trace[:1], grader), await credit(item, outcome.chosen, grader)
            if first is not None and last is not None:
                pairs.append((first == 1, last == 1))
    return pairs


def scorer_of(spec: str) -> Scorer:
    """The scorer that a text names. Raises ValueError where there is none."""
    if spec in SCORERS:
        return SCORERS[spec]
    if spec.startswith("judge:"):
        return by_judge(grader_of(spec))
    function = guarded(spec, function_of(spec), "a finite number or None", _finite_or_none)
    return by_verifier(function)


def function_of(spec: str) -> Callable[..., Any]:
    """The function ``MODULE:NAME``; modules in the current directory are found. Raises ValueError where it is none."""
    module_name, colon, name = spec.partition(":")
    if not colon:
        raise ValueError(f"expected MODULE:NAME, got {spec!r}")
    try:
        found = getattr(module_of(module_name), name, None)
    except Exception as error:  # whatever a module does when it is imported
        raise ValueError(f"{spec}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"{spec}: {module_name} has no function {name!r}")
    return found  # type: ignore[no-any-return]


def guarded(spec: str, function: Callable[..., Any], expected: str, take: Callable[[Any], Any]) -> Callable[..., Any]:
    """A user's function; ``take`` raises for a result that is not what is ``expected``, else returns it.

    Whatever either raises becomes a HarnessError that names the function, and the item where it is given one: that item
    is an error, and the others go on.
    """

    def call(*given: Any) -> Any:
        name = f"{spec}: item {given[0].id!r}" if isinstance(given[0], Item) else spec
        try:
            result = function(*given)
        except Exception as error:  # a supervisor: what the function raises ends one item
            raise HarnessError(f"{name}: {type(error).__name__}: {error}") from error
        try:
            return take(result)
        except Exception as error:  # likewise: numbers of other packages raise what they like
            raise HarnessError(f"{name}: expected {expected}, got {short(result)}") from error

    return call


def _finite(score: Any) -> float:
    if not math.isfinite(score):
        raise ValueError
    return float(score)  # as JSON can write it


def _finite_or_none(score: Any) -> float | None:
    return None if score is None else _finite(score)


def _text(found: Any) -> str | None:
    if found is not None and not isinstance(found, str):
        raise TypeError
    return found


def _say(text: str) -> None:
    print(text, file=sys.stderr)
