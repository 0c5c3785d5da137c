"""From items to numbers: sample what a bank lacks, have it graded, and write what it comes to."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from reef_harness.client import Client
from reef_harness.errors import HarnessError
from reef_harness.evaluation.bank import Bank, now, write_json
from reef_harness.evaluation.evaluate import Answer
from reef_harness.evaluation.grade import grade
from reef_harness.evaluation.intervals import Figure
from reef_harness.evaluation.records import RecordFile, Response, read_responses, write_graded
from reef_harness.evaluation.sample import Ask, asks, sample
from reef_harness.evaluation.summary import Series, by_temperature, summarize
from reef_harness.evaluation.table import answers_table, counted, notes, sets_table, slices_table
from reef_harness.graders import Grader
from reef_harness.progress import AnswerBar
from reef_harness.types import Json

Found = Mapping[str, Sequence[Series]]  # by set


async def fill(bank: Bank, client: Client, *, concurrency: int) -> None:
    """Sample the answers that the bank lacks, errors among them once more, and keep each as it comes.

    Call it, and :func:`judge`, under :func:`reef_harness.evaluation.bank.holding`: two at once would ask twice.

    Raises HarnessError where no answer can come any more; what came is kept, and the next call goes on from there.
    """
    try:
        for name in bank.asked.sets:
            await _fill_set(bank, client, name, concurrency)
    except HarnessError as error:
        kept = sum(len(_answers(bank, name)) for name in bank.asked.sets)
        raise HarnessError(f"{error}; {kept} answers are kept in {bank.path}, the same command goes on") from error


async def _fill_set(bank: Bank, client: Client, name: str, concurrency: int) -> None:
    settings = bank.asked.settings
    wanted = list(asks(bank.items(name), settings))
    there = {response.key for response in _answers(bank, name)}
    lacking = [ask for ask in wanted if ask.key not in there]
    if not lacking:
        return
    with RecordFile(bank.responses_file(name)) as records, AnswerBar(len(lacking), name) as bar:

        async def keep(ask: Ask, response: Response) -> None:
            records.add(response)
            bar(Answer(ask.item, response, None))

        await sample(client, lacking, settings, release=bank.asked.release, concurrency=concurrency, keep=keep)


def _answers(bank: Bank, name: str) -> list[Response]:
    """The whole answers that there are so far."""
    return [response for response in read_responses(bank.responses_file(name)) if response.error is None]


async def judge(bank: Bank, grader: Grader, *, at_once: int = 16) -> str:
    """Have every answer in the bank graded, ``at_once`` at a time; return the grader as id@version."""
    id = f"{grader.id}@{grader.version}"
    answered_by: Counter[str] = Counter()
    for name in bank.asked.sets:
        items = {item.id: item for item in bank.items(name)}
        responses = bank.responses(name)
        write_graded(bank.verdicts_file(name, id), await grade(items, responses, grader, concurrency=at_once))
        answered_by.update(response.release or "?" for response in _answers(bank, name))
    bank.note(id, answered_by)
    return id


def summarize_bank(bank: Bank, grader: str, *, seed: int = 0) -> dict[str, list[Series]]:
    """The numbers of every set, apart, by one grader's verdicts. ``seed`` is of the bootstrap."""
    asked = bank.asked.settings.asked()
    return {
        name: [
            summarize(
                candidates,
                temperature,
                asked[temperature],
                max_tokens=bank.asked.settings.max_tokens,
                seed=seed,
            )
            for temperature, candidates in by_temperature(
                bank.items(name), bank.responses(name), bank.verdicts(name, grader)
            ).items()
        ]
        for name in bank.asked.sets
    }


def write_results(bank: Bank, grader: str, found: Found) -> Path:
    """Write summary.json and table.md; return the table's path."""
    stem = bank.stem(grader)
    write_json(bank.path / f"{stem}summary.json", _summary(bank, grader, found))
    path = bank.path / f"{stem}table.md"
    path.write_text(text_of(bank, grader, found), encoding="utf-8")
    return path


def text_of(bank: Bank, grader: str, found: Found) -> str:
    """The tables with what a reader must know."""
    settings = bank.asked.settings
    remarks = _remarks(bank, found)
    parts = [
        f"# Evaluation of {_of_releases(found)}\n",
        f"Graded by {grader}; at most {settings.max_tokens} tokens an answer, seed {settings.seed}. "
        "In brackets: 95% intervals over items.\n",
        sets_table(found),
        answers_table(found),
        slices_table(found),
        "".join(f"- {remark}\n" for remark in remarks),
    ]
    return "\n".join(part for part in parts if part)


def stored_summary(bank: Bank, grader: str, found: Found) -> Json:
    """What is stored on the release: figures with the names that ``evaluation.gate`` is written with.

    Those of the first set have plain names (accuracy, coverage, …), those of the others start with the set's name, so
    that a gate can tell them apart. Raises HarnessError where the answers are of several releases.
    """
    one_release(found)
    first, *others = found
    metrics: dict[str, Json] = {}
    for name, all_series in found.items():
        for number, series in enumerate(all_series):
            start = "" if name == first else f"{name}_"
            metrics |= _figures(series, start if number == 0 else f"{start}greedy_")
    series = found[first][0]
    top = {
        "set": first,
        "other_sets": others,
        "grader": grader,
        "samples": series.samples,
        "temperature": series.temperature,
        "correct": series.outcomes["correct"],
        "graded": series.outcomes["correct"] + series.outcomes["incorrect"],
        "errors": series.outcomes["error"] + series.outcomes["failed"],
        "metrics": metrics,
    }
    if series.accuracy is not None:
        top |= {"accuracy": series.accuracy.value, "low": series.accuracy.low, "high": series.accuracy.high}
    return top


def one_release(found: Found) -> str:
    """The release that gave every answer. Raises HarnessError where there are several, or none."""
    releases = releases_of(found)
    if len(releases) != 1:
        raise HarnessError(
            f"the answers are of {len(releases)} releases ({_list(releases)}), so they measure none of them: "
            "give --release, and another --out"
        )
    return next(iter(releases))


def releases_of(found: Found) -> Counter[str]:
    """How many answers each release gave."""
    total: Counter[str] = Counter()
    for all_series in found.values():
        for series in all_series:
            total.update(series.releases)
    return total


def draw(bank: Bank, grader: str, found: Found, say: Callable[[str], None]) -> list[Path]:
    """Draw what can be drawn; without matplotlib say so, and draw nothing."""
    try:
        from reef_harness.evaluation import plot
    except ImportError:
        say("no figures: they need matplotlib (pip install 'reef-harness[plot]')")
        return []
    stem, release, drawn = bank.stem(grader), _of_releases(found), list[Path]()
    by = f"\ngraded by {grader}"  # a line of its own: the title may be long

    def path(name: str) -> Path:
        drawn.append(bank.path / f"{stem}{name}.png")
        return drawn[-1]

    curves = {f"{name}, {s.name}": s.pass_at_k for name, all_s in found.items() for s in all_s if len(s.pass_at_k) > 1}
    if curves:
        plot.pass_at_k_curves(path("pass-at-k"), curves, f"pass@k of {release}{by}")
    if rows := _rows(found):
        plot.accuracy_by_slice(path("accuracy"), rows, f"Accuracy of {release}{by}")
    for name, all_series in found.items():
        series = all_series[0]  # the sampled one, where there is one
        answers = [response for response in _answers(bank, name) if response.temperature == series.temperature]
        cut = [r.completion_tokens or 0 for r in answers if r.finish_reason == "length"]
        whole = [r.completion_tokens or 0 for r in answers if r.finish_reason != "length"]
        if answers:
            title = f"Answers to {name}, {series.name}: {release}{by}"
            plot.length_histogram(path(f"length-{name}"), whole, cut, title)
    return drawn


def _rows(found: Found) -> list[tuple[str, Figure, bool]]:
    """A row for each series, and below it one for each of its slices."""
    rows = []
    for name, all_series in found.items():
        for series in all_series:
            parts = [(f"{name}, {series.name}", series.accuracy, True)]
            parts += [(f"{each.name} = {each.value}", each.accuracy, False) for each in series.slices]
            rows += [(label, figure, whole) for label, figure, whole in parts if figure is not None]
    return rows


def _summary(bank: Bank, grader: str, found: Found) -> Json:
    return {
        "made_at": now(),
        "grader": grader,
        "release_asked": bank.asked.release,
        "releases": dict(releases_of(found)),
        "sets": {
            name: {
                "items": bank.asked.sets[name].path,
                "sha256": bank.asked.sets[name].sha256,
                "rows_refused": bank.asked.sets[name].refused,
                "series": [series.json() for series in all_series],
            }
            for name, all_series in found.items()
        },
        "notes": _remarks(bank, found),
    }


def _figures(series: Series, start: str) -> dict[str, Json]:
    named = {
        "accuracy": series.accuracy,
        "coverage": series.coverage,
        "review_rate": series.review_rate,
        "truncated": series.truncated,
        "response_length": series.tokens.mean if series.tokens else None,
        "mean_tokens": series.tokens.mean if series.tokens else None,
        "majority": series.votes.right if series.votes else None,
        **{f"pass_at_{k}": figure for k, figure in series.pass_at_k.items() if k > 1},
    }
    found: dict[str, Json] = {start + name: dict(figure.json()) for name, figure in named.items() if figure is not None}
    if (valid := series.format_valid) is not None:
        found[f"{start}format_valid"] = dict(valid.json())
        found[f"{start}invalid_rate"] = {"value": 1 - valid.value, "low": 1 - valid.high, "high": 1 - valid.low}
    return found


def _remarks(bank: Bank, found: Found) -> list[str]:
    """What a reader must know to read the numbers."""
    return [*_about_releases(bank, found), *_about_files(bank), *notes(found)]


def _about_files(bank: Bank) -> list[str]:
    return [
        f"{name}: {counted(file.refused, 'row')} of {file.path} {'was' if file.refused == 1 else 'were'} left out."
        for name, file in bank.asked.sets.items()
        if file.refused
    ]


def _about_releases(bank: Bank, found: Found) -> list[str]:
    releases = releases_of(found)
    if len(releases) < 2:
        return []
    return [
        f"The answers are of {len(releases)} releases ({_list(releases)}): the service took up new ones meanwhile, and "
        "these numbers are of none of them alone. With --release they would be of one."
    ]


def _of_releases(found: Found) -> str:
    names = list(releases_of(found))
    return f"release {names[0]}" if len(names) == 1 else f"{len(names)} releases mixed"


def _list(releases: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in sorted(releases.items())) or "none"
