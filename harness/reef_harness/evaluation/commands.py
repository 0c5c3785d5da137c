"""The commands of this room: evaluate, regrade, compare, calibrate, contamination."""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from urllib.parse import quote

from reef_harness import service
from reef_harness.client import TIMEOUT_S
from reef_harness.errors import HarnessError
from reef_harness.evaluation import compare, measure, regrade, scorer
from reef_harness.evaluation.bank import Asked, Bank, ItemsFile, check_set_name, holding, items_file, write_json
from reef_harness.evaluation.calibration import BINS, calibration
from reef_harness.evaluation.contamination import overlaps, text_of
from reef_harness.evaluation.items import read_prompts
from reef_harness.evaluation.sample import Settings
from reef_harness.graders.named import grader_of

IN_DOMAIN = "in-domain"  # the set that --items names


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add them to ``reef-harness``. Each sets ``run``: parsed arguments in, the exit status out."""
    _add_evaluate(commands.add_parser("evaluate", help="measure a release on held-out items"))
    _add_regrade(commands.add_parser("regrade", help="have another grader judge the answers that are kept"))
    _add_compare(commands.add_parser("compare", help="two evaluations of the same items"))
    _add_calibrate(commands.add_parser("calibrate", help="how far a score can be read as a chance to be right"))
    _add_contamination(commands.add_parser("contamination", help="held-out prompts that are trained on"))


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _add_figures(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-figures", action="store_false", dest="figures", help="draw nothing")


def _add_grading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--grader", required=True, help="see reef-harness graders")
    # Graders that run code have limits of time: more of them than CPUs would make right answers late.
    parser.add_argument(
        "--grade-at-once", type=int, default=os.cpu_count() or 1, help="answers graded at a time (default: CPUs)"
    )


# ---- evaluate


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    service.add_options(parser)
    parser.add_argument("--items", type=Path, required=True, help=f"JSONL file of the set {IN_DOMAIN}")
    parser.add_argument("--set", type=_named_file, action="append", default=[], metavar="NAME=FILE", dest="sets",
                        help="another set, reported apart: --set challenge=FILE --set retention=FILE")  # fmt: skip
    _add_grading(parser)
    parser.add_argument("--out", type=Path, required=True, help="directory; one that is there is gone on with")
    parser.add_argument("--release", help="evaluate this one, whatever is served (default: whichever is served)")
    parser.add_argument("--samples", type=int, default=1, help="answers to each item (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the samples (default: %(default)g)")
    parser.add_argument("--greedy", action="store_true", help="one greedy answer to each item besides")
    parser.add_argument(
        "--max-tokens", type=int, default=64, help="of each answer; longer is cut (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first request; each has one of its own (%(default)s)"
    )
    parser.add_argument("--logprobs", action="store_true", help="keep each answer's log-probability")
    parser.add_argument("--concurrency", type=int, default=64, help="requests at a time (default: %(default)s)")
    parser.add_argument(
        "--timeout-s", type=float, default=TIMEOUT_S, help="seconds for an answer (default: %(default)g)"
    )
    parser.add_argument("--store", action="store_true", help="store the result on the release")
    _add_figures(parser)
    parser.set_defaults(run=_evaluate)


def _named_file(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not equals or not path:
        raise argparse.ArgumentTypeError(f"expected NAME=FILE, got {text!r}")
    try:
        return check_set_name(name), Path(path)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _evaluate(arguments: argparse.Namespace) -> int:
    try:
        return asyncio.run(_evaluate_all(arguments))
    except KeyboardInterrupt:
        if (arguments.out / "run.json").exists():
            _say(f"what was answered is kept in {arguments.out}: the same command goes on")
        raise


async def _evaluate_all(arguments: argparse.Namespace) -> int:
    settings = Settings(
        arguments.samples,
        arguments.temperature,
        arguments.greedy,
        arguments.max_tokens,
        arguments.seed,
        arguments.logprobs,
    )
    _check_at_least_one("concurrency", arguments.concurrency)
    _check_at_least_one("grade-at-once", arguments.grade_at_once)
    grader = grader_of(arguments.grader)
    sets = _read_sets([(IN_DOMAIN, arguments.items), *arguments.sets])
    async with await service.connect(arguments, timeout_s=arguments.timeout_s) as client:
        asked = Asked(client.scenario or "", arguments.release, settings, sets)
        with _held(arguments.out):
            # The release first: where there is none such, nothing is written.
            async with client.engine_for(arguments.release) if arguments.release else nullcontext():
                bank = Bank.begin(arguments.out, asked, client.url)
                await measure.fill(bank, client, concurrency=arguments.concurrency)
            by = await measure.judge(bank, grader, at_once=arguments.grade_at_once)
            found = _write(bank, by, arguments.figures)
        if arguments.store:
            release = measure.one_release(found)
            await client.store_evaluation(release, measure.stored_summary(bank, by, found))
            _say(f"stored on release {release}")
    return 0 if _all_measured(bank, by, found) else 1


@contextmanager
def _held(out: Path) -> Iterator[None]:
    """The directory, nobody else's within the block. Made where it was not there, and gone again if nothing came in."""
    made = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    with holding(out):
        try:
            yield
        finally:
            if made and not any(out.iterdir()):
                out.rmdir()


def _check_at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _read_sets(files: list[tuple[str, Path]]) -> dict[str, ItemsFile]:
    sets: dict[str, ItemsFile] = {}
    for name, path in files:
        if name in sets:
            raise ValueError(f"the set {name} is given twice")
        sets[name], _, complaints = items_file(path)
        for complaint in complaints:
            _say(f"left out: {complaint}")
    return sets


def _write(bank: Bank, grader: str, figures: bool) -> measure.Found:
    """Write what the bank comes to, print the tables, and draw."""
    found = measure.summarize_bank(bank, grader)
    table = measure.write_results(bank, grader, found)
    print(measure.text_of(bank, grader, found))
    for path in [table, *(measure.draw(bank, grader, found, _say) if figures else ())]:
        _say(f"wrote {path}")
    return found


def _all_measured(bank: Bank, grader: str, found: measure.Found) -> bool:
    """Whether every set has an accuracy; says why one has none."""
    bare = [name for name, all_series in found.items() if any(series.accuracy is None for series in all_series)]
    for name in bare:
        reasons = [f"{v.outcome}: {v.reason_code} {v.detail}" for v in bank.verdicts(name, grader) if not v.graded]
        reasons += [response.error for response in bank.responses(name) if response.error]
        _say(f"none of the answers to {name} could be judged; the first: {reasons[0]}")
    return not bare


# ---- regrade


def _add_regrade(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", type=Path, help="of an evaluation")
    _add_grading(parser)
    parser.add_argument("--against", help="the grader to compare with (default: the first that judged every answer)")
    _add_figures(parser)
    parser.set_defaults(run=_regrade)


def _regrade(arguments: argparse.Namespace) -> int:
    _check_at_least_one("grade-at-once", arguments.grade_at_once)
    with holding(arguments.dir):
        return _regrade_held(arguments)


def _regrade_held(arguments: argparse.Namespace) -> int:
    bank = Bank.open(arguments.dir)
    old = bank.grader(arguments.against)
    alone = arguments.against is None and not bank.complete()  # more was sampled, and nobody judged it
    grader = grader_of(arguments.grader)
    if f"{grader.id}@{grader.version}" != old and not alone:
        for name in bank.asked.sets:
            bank.verdicts(name, old)  # what cannot be compared afterwards is said before anybody judges
    new = asyncio.run(measure.judge(bank, grader, at_once=arguments.grade_at_once))
    found = _write(bank, new, arguments.figures)
    if new == old or alone:
        why = "no other grader judged every answer" if alone else f"{new} judged these answers before"
        _say(f"{why}: there is nothing to compare it with")
        return 0 if _all_measured(bank, new, found) else 1
    differs = regrade.disagreement(bank, old, new)
    text = regrade.text_of(differs)
    path = bank.path / f"{bank.stem(new)}disagreement"
    write_json(path.with_name(f"{path.name}.json"), differs.json())
    path.with_name(f"{path.name}.md").write_text(text, encoding="utf-8")
    print(text)
    _say(f"wrote {path}.json and {path.name}.md")
    return 0 if _all_measured(bank, new, found) else 1


# ---- compare


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, metavar="DIR_A", help="of an evaluation: the first")
    parser.add_argument("second", type=Path, metavar="DIR_B", help="of another on the same items: the second")
    parser.add_argument("--grader", help="whose verdicts (default: the first grader that judged every answer of both)")
    parser.add_argument("--intersection", action="store_true", help="where items differ, compare those that do not")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="directory (default: DIR_B/compare)")
    _add_figures(parser)
    parser.set_defaults(run=_compare)


def _compare(arguments: argparse.Namespace) -> int:
    first, second = Bank.open(arguments.first), Bank.open(arguments.second)
    found, remarks = compare.compare(
        first, second, arguments.grader, intersection=arguments.intersection, seed=arguments.seed
    )
    grader = compare.grader_of_both(first, second, arguments.grader)
    names = (_name(first), _name(second))
    text = compare.text_of(found, remarks, names, grader)
    out = arguments.out or arguments.second / "compare"
    out.mkdir(parents=True, exist_ok=True)
    write_json(
        out / "compare.json",
        {
            "first": str(first.path.resolve()),
            "second": str(second.path.resolve()),
            "releases": [first.answered_by, second.answered_by],
            "grader": grader,
            "sets": [each.json() for each in found],
            "remarks": remarks,
        },
    )
    (out / "compare.md").write_text(text, encoding="utf-8")
    print(text)
    _say(f"wrote {out / 'compare.md'} and compare.json")
    if arguments.figures:
        _draw_compared(out, found, names, grader)
    return 0


def _name(bank: Bank) -> str:
    releases = list(bank.answered_by)
    return f"release {releases[0]}" if len(releases) == 1 else f"{bank.path.name}, {len(releases)} releases mixed"


def _draw_compared(out: Path, found: list[compare.Comparison], names: tuple[str, str], grader: str) -> None:
    try:
        from reef_harness.evaluation import plot
    except ImportError:
        _say("no figures: they need matplotlib (pip install 'reef-harness[plot]')")
        return
    labels = [f"{name} ({side})" for name, side in zip(names, ("first", "second"), strict=True)]
    for each in found:
        if max(each.samples) > 1 and each.curves[0] and each.curves[1]:
            path = out / f"pass-at-k-{each.name}.png"
            title = f"pass@k of {each.name}, first and second\ngraded by {grader}"
            plot.pass_at_k_curves(path, dict(zip(labels, each.curves, strict=True)), title)
            _say(f"wrote {path}")


# ---- calibrate


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", type=Path, metavar="FILE|DIR", help="JSONL of {score, correct, item?}, or an evaluation"
    )
    parser.add_argument(
        "--scorer", default=scorer.LOGPROB, help="of an evaluation: logprob (default), or a grader that judged it"
    )
    parser.add_argument(
        "--truth", help="of an evaluation: the grader that is believed (default: the first that judged all)"
    )
    parser.add_argument("--bins", type=int, default=BINS, help="how many spans of scores (default: %(default)s)")
    parser.add_argument("--equal-counts", action="store_true", help="bins of as many scores each, not of equal width")
    parser.add_argument("--out", type=Path, help="directory (default: FILE's, or DIR)")
    parser.set_defaults(run=_calibrate)


def _calibrate(arguments: argparse.Namespace) -> int:
    source: Path = arguments.source
    out = arguments.out or (source if source.is_dir() else source.parent)
    out.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        found = _pairs_of_bank(Bank.open(source), arguments.scorer, arguments.truth)
    else:
        found = [(f"{source.stem}-calibration", source.name, scorer.read_pairs(source))]
    for stem, title, pairs in found:
        _calibrate_one(out, stem, title, pairs, arguments)
    return 0


def _pairs_of_bank(bank: Bank, by: str, truth: str | None) -> list[tuple[str, str, scorer.Pairs]]:
    """(name for files, title, pairs) of each set and way of sampling."""
    truth = bank.grader(truth)
    by = by if by == scorer.LOGPROB else bank.grader(by)
    found = []
    for name in bank.asked.sets:
        for temperature in bank.asked.settings.asked():
            kind = "greedy" if temperature == 0 else f"sampled at {temperature:g}"
            stem = f"calibration-{quote(by, safe='@.')}-{name}" + ("-greedy" if temperature == 0 else "")
            title = f"{by} on {name}, {kind}, held against {truth}"
            found.append((stem, title, scorer.pairs_of(bank, name, temperature, by, truth)))
    return found


def _calibrate_one(out: Path, stem: str, title: str, pairs: scorer.Pairs, arguments: argparse.Namespace) -> None:
    found = calibration(
        pairs.scores, pairs.right, arguments.bins, equal_counts=arguments.equal_counts, items=pairs.items
    )
    write_json(out / f"{stem}.json", {"title": title, "left_out": pairs.left_out, **asdict(found)})
    text = scorer.text_of(found, pairs, title, equal_counts=arguments.equal_counts or arguments.bins == 1)
    (out / f"{stem}.md").write_text(text, encoding="utf-8")
    print(text)
    _say(f"wrote {out / stem}.json and .md")
    try:
        from reef_harness.evaluation import plot
    except ImportError:
        _say("no figure: it needs matplotlib (pip install 'reef-harness[plot]')")
        return
    plot.reliability_diagram(out / f"{stem}.png", found, title)
    _say(f"wrote {out / stem}.png")


# ---- contamination


def _add_contamination(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("train", type=Path, metavar="TRAIN", help="JSONL with a prompt or messages in each row")
    parser.add_argument("held_out", type=Path, metavar="HELD_OUT", help="the same")
    parser.add_argument(
        "--at-least",
        type=float,
        default=0.5,
        help="share of a held-out prompt's n-grams, 0 to 1 (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="gets the pairs, a JSON line a held-out prompt")
    parser.set_defaults(run=_contamination)


def _contamination(arguments: argparse.Namespace) -> int:
    held_out = list(read_prompts(arguments.held_out))
    if not held_out:
        raise HarnessError(f"{arguments.held_out} has no prompts")
    found = overlaps(read_prompts(arguments.train), held_out, at_least=arguments.at_least)
    if arguments.out:
        arguments.out.write_text("".join(json.dumps(asdict(each)) + "\n" for each in found), encoding="utf-8")
    if text := text_of(found, arguments.out):
        print(text)
    exact = sum(each.num_exact > 0 for each in found)
    print(
        f"of {len(held_out)} held-out prompts {exact} are in {arguments.train}, and {len(found) - exact} more share at "
        f"least {arguments.at_least:.0%} of their n-grams with one there"
    )
    return 1 if exact else 0
