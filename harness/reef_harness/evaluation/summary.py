"""What the answers to one set at one temperature come to."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from reef_harness.evaluation.intervals import Figure, by_item, quantile
from reef_harness.evaluation.pass_at_k import curve, ks_up_to
from reef_harness.evaluation.records import Graded, Response
from reef_harness.evaluation.selection import best_of, majority
from reef_harness.types import Item, Json

SMALL_SLICE = 30  # items: an interval over fewer says little


@dataclass(frozen=True, slots=True)
class Candidates:
    """One item's answers at one temperature, by sample, each with its verdict (None: an error in its place)."""

    item: Item
    responses: tuple[Response, ...]
    verdicts: tuple[Graded | None, ...]

    @property
    def judged(self) -> list[Graded]:
        """The verdicts that decided: correct or incorrect."""
        return [verdict for verdict in self.verdicts if verdict is not None and verdict.graded]

    @property
    def right(self) -> int:
        """How many answers are right."""
        return sum(verdict.correct for verdict in self.judged)


def by_temperature(
    items: Sequence[Item], responses: Iterable[Response], verdicts: Iterable[Graded]
) -> dict[float, list[Candidates]]:
    """The answers of a set at each temperature, highest first, in the order of ``items``.

    An item without an answer there has no responses.
    """
    of = {verdict.key: verdict for verdict in verdicts}
    found: dict[float, dict[str, list[Response]]] = {}
    for response in responses:
        found.setdefault(response.temperature, {}).setdefault(response.item, []).append(response)
    return {
        temperature: [_candidates(item, by_id.get(item.id, []), of) for item in items]
        for temperature, by_id in sorted(found.items(), reverse=True)
    }


def _candidates(item: Item, responses: list[Response], of: Mapping[tuple[str, float, int], Graded]) -> Candidates:
    ordered = tuple(sorted(responses, key=lambda response: response.sample))
    return Candidates(item, ordered, tuple(of.get(response.key) for response in ordered))


@dataclass(frozen=True, slots=True)
class Votes:
    """Majority votes: items by outcome; ``right`` counts a tie as not right, ``expected`` breaks it at random."""

    outcomes: Mapping[str, int]
    right: Figure
    expected: Figure


@dataclass(frozen=True, slots=True)
class Tokens:
    """Lengths of whole answers, in tokens; ``mean`` with its interval by item."""

    mean: Figure
    median: float
    p90: float
    p99: float
    longest: int


@dataclass(frozen=True, slots=True)
class Slice:
    """The items for which ``name`` is ``value``."""

    name: str
    value: str
    items: int
    accuracy: Figure | None

    @property
    def small(self) -> bool:
        """Whether the interval says little."""
        return self.items < SMALL_SLICE


@dataclass(frozen=True, slots=True)
class NotJudged:
    """Answers that are in no accuracy for one reason: ``outcome`` is review, error or failed, ``items`` are ids.

    ``reason`` is the verdict's reason code; of an answer that failed, what failed (``BadRequest``).
    """

    outcome: str
    reason: str
    answers: int
    items: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Series:
    """One set's answers at one temperature. None where nothing was there to measure.

    An item weighs the same however many of its answers were judged. ``accuracy`` is over judged answers only (the
    selective accuracy), ``coverage`` says what share of the answers asked for that is; ``at_least`` takes whatever
    was not judged as wrong. ``outcomes`` counts answers: correct, incorrect, review, error (the grader could not
    judge), failed (no answer); ``not_judged`` says why, and to which items. ``cut`` counts the answers that the token
    limit ended, ``cut_wrong`` those of them that are incorrect.
    """

    temperature: float
    samples: int
    items: int
    outcomes: Mapping[str, int]
    not_judged: tuple[NotJudged, ...]
    accuracy: Figure | None
    at_least: Figure
    coverage: Figure
    review_rate: Figure
    format_valid: Figure | None
    pass_at_k: Mapping[int, Figure]
    votes: Votes | None
    best_by_logprob: Figure | None
    tokens: Tokens | None
    truncated: Figure | None
    cut: int
    cut_wrong: int
    releases: Mapping[str, int]
    slices: tuple[Slice, ...]

    @property
    def name(self) -> str:
        """``greedy``, or at which temperature it was sampled."""
        return "greedy" if self.temperature == 0 else f"sampled at {self.temperature:g}"

    def json(self) -> Json:
        """The numbers, as they are written to summary.json."""
        return {
            "temperature": self.temperature,
            "samples": self.samples,
            "items": self.items,
            "outcomes": dict(self.outcomes),
            "not_judged": [asdict(each) for each in self.not_judged],
            "accuracy": _json(self.accuracy),
            "at_least": _json(self.at_least),
            "coverage": _json(self.coverage),
            "review_rate": _json(self.review_rate),
            "format_valid": _json(self.format_valid),
            "pass_at_k": {str(k): _json(figure) for k, figure in self.pass_at_k.items()},
            "majority": None
            if self.votes is None
            else {
                **self.votes.outcomes,
                "right_share": _json(self.votes.right),
                "expected": _json(self.votes.expected),
            },
            "best_by_logprob": _json(self.best_by_logprob),
            "tokens": None
            if self.tokens is None
            else {
                "mean": _json(self.tokens.mean),
                "median": self.tokens.median,
                "p90": self.tokens.p90,
                "p99": self.tokens.p99,
                "longest": self.tokens.longest,
            },
            "truncated": _json(self.truncated),
            "cut": self.cut,
            "cut_wrong": self.cut_wrong,
            "releases": dict(self.releases),
            "slices": [
                {
                    "name": each.name,
                    "value": each.value,
                    "items": each.items,
                    "accuracy": _json(each.accuracy),
                    "small": each.small,
                }
                for each in self.slices
            ],
        }


def summarize(
    candidates: Sequence[Candidates], temperature: float, samples: int, *, max_tokens: int = 1, seed: int = 0
) -> Series:
    """The numbers of one series; ``samples`` answers of at most ``max_tokens`` were asked for to each item.

    ``seed`` is of the bootstrap. Raises ValueError for no items.
    """
    if not candidates:
        raise ValueError("no items, no numbers")
    answered = [response for each in candidates for response in each.responses if response.error is None]
    return Series(
        temperature=temperature,
        samples=samples,
        items=len(candidates),
        outcomes=_outcomes(candidates, samples),
        not_judged=tuple(_not_judged(candidates, samples)),
        accuracy=accuracy(candidates, seed=seed),
        at_least=_of_asked(candidates, samples, lambda each: each.right, seed),
        coverage=_of_asked(candidates, samples, lambda each: len(each.judged), seed),
        review_rate=_of_asked(
            candidates, samples, lambda each: sum(v is not None and v.outcome == "review" for v in each.verdicts), seed
        ),
        format_valid=_mean(candidates, lambda each: [float(v.format_valid) for v in each.judged], seed),
        pass_at_k=curve([(len(each.judged), each.right) for each in candidates], ks_up_to(samples), seed=seed),
        votes=_votes(candidates, seed) if samples > 1 else None,
        best_by_logprob=_best_by_logprob(candidates, seed) if samples > 1 else None,
        tokens=_tokens(candidates, max_tokens, seed),
        truncated=_mean(
            candidates, lambda each: [float(r.finish_reason == "length") for r in each.responses if not r.error], seed
        ),
        cut=sum(response.finish_reason == "length" for response in answered),
        cut_wrong=sum(
            response.finish_reason == "length" and verdict is not None and verdict.outcome == "incorrect"
            for each in candidates
            for response, verdict in zip(each.responses, each.verdicts, strict=True)
        ),
        releases=Counter(response.release or "?" for response in answered),
        slices=tuple(_slices(candidates, seed)),
    )


def accuracy(candidates: Sequence[Candidates], *, seed: int = 0) -> Figure | None:
    """The mean over items of the share of their judged answers that are right."""
    return _mean(candidates, lambda each: [float(verdict.correct) for verdict in each.judged], seed)


def _mean(
    candidates: Sequence[Candidates], values: Callable[[Candidates], Sequence[float]], seed: int
) -> Figure | None:
    """The mean over items of the means of their values; an item without any is left out."""
    found = [each for each in map(values, candidates) if each]
    return by_item([math.fsum(each) / len(each) for each in found], seed=seed)


def _of_asked(candidates: Sequence[Candidates], samples: int, count: Callable[[Candidates], int], seed: int) -> Figure:
    """The mean over items of the share of the answers asked for that ``count`` counts."""
    figure = by_item([count(each) / samples for each in candidates], seed=seed)
    assert figure is not None  # there are items
    return figure


def _outcomes(candidates: Sequence[Candidates], samples: int) -> dict[str, int]:
    counted = Counter(v.outcome for each in candidates for v in each.verdicts if v is not None)
    failed = samples * len(candidates) - counted.total()
    return {name: counted[name] for name in ("correct", "incorrect", "review", "error")} | {"failed": failed}


def _not_judged(candidates: Sequence[Candidates], samples: int) -> Iterable[NotJudged]:
    """By outcome, then the most frequent reason first."""
    found: dict[tuple[str, str], list[str]] = {}
    for each in candidates:
        for response, verdict in zip(each.responses, each.verdicts, strict=True):
            if verdict is None:
                what = (response.error or "no verdict").partition(":")[0]
                found.setdefault(("failed", what), []).append(each.item.id)
            elif verdict.outcome in ("review", "error"):
                found.setdefault((verdict.outcome, verdict.reason_code), []).append(each.item.id)
        if (lacking := samples - len(each.responses)) > 0:
            found.setdefault(("failed", "not sampled"), []).extend([each.item.id] * lacking)
    for (outcome, reason), ids in sorted(found.items(), key=lambda pair: (pair[0][0], -len(pair[1]), pair[0][1])):
        yield NotJudged(outcome, reason, len(ids), tuple(dict.fromkeys(ids)))


def _votes(candidates: Sequence[Candidates], seed: int) -> Votes | None:
    """Over the items that have a judged answer. None where the grader reads no answers, or no answer could be read."""
    found = [each.judged for each in candidates if each.judged]
    votes = [majority([v.answer for v in judged], [v.correct for v in judged]) for judged in found]
    outcomes = Counter(vote.pick for vote in votes)
    right = by_item([float(vote.pick == "right") for vote in votes], seed=seed)
    expected = by_item([vote.expected for vote in votes], seed=seed)
    if right is None or expected is None or outcomes["none"] == len(votes):
        return None
    return Votes({name: outcomes[name] for name in ("right", "wrong", "tie", "none")}, right, expected)


def _best_by_logprob(candidates: Sequence[Candidates], seed: int) -> Figure | None:
    """How often the answer with the highest mean log-probability is right; None where none was asked for.

    Over the items that have a judged answer: of the others nothing could be picked, which says nothing of the model.
    An answer that was cut is not picked: where all were, none is right.
    """
    values = []
    for each in candidates:
        pairs = [(r, v) for r, v in zip(each.responses, each.verdicts, strict=True) if v is not None and v.graded]
        if any(r.logprob_sum is None for r, _ in pairs):
            return None
        if not pairs:
            continue
        best = best_of(
            [
                None if r.finish_reason != "stop" else (r.logprob_sum or 0.0) / max(r.completion_tokens or 1, 1)
                for r, _ in pairs
            ]
        )
        values.append(best.expected([v.correct for _, v in pairs]))
    return by_item(values, seed=seed)


def _tokens(candidates: Sequence[Candidates], max_tokens: int, seed: int) -> Tokens | None:
    lengths = [
        [response.completion_tokens or 0 for response in each.responses if response.error is None]
        for each in candidates
    ]
    ordered = sorted(length for of_item in lengths for length in of_item)
    means = [sum(of_item) / len(of_item) for of_item in lengths if of_item]
    mean = by_item(means, most=max([max_tokens, *ordered]), seed=seed)
    if mean is None:
        return None
    return Tokens(mean, quantile(ordered, 0.5), quantile(ordered, 0.9), quantile(ordered, 0.99), ordered[-1])


def slice_names(item: Item) -> dict[str, str]:
    """An item's slices, and where it comes from."""
    known = {"source": item.source, "revision": item.revision, "split": item.split}
    return {name: value for name, value in known.items() if value is not None} | dict(item.slices)


def in_slices(candidates: Sequence[Candidates]) -> dict[tuple[str, str], list[Candidates]]:
    """The items by (name, value) of each slice; a name that has one value for all items divides nothing."""
    found: dict[tuple[str, str], list[Candidates]] = {}
    for each in candidates:
        for name, value in slice_names(each.item).items():
            found.setdefault((name, value), []).append(each)
    whole = {name for (name, _), inside in found.items() if len(inside) == len(candidates)}
    return {key: inside for key, inside in sorted(found.items()) if key[0] not in whole}


def _slices(candidates: Sequence[Candidates], seed: int) -> Iterable[Slice]:
    for (name, value), inside in in_slices(candidates).items():
        yield Slice(name, value, len(inside), accuracy(inside, seed=seed))


def _json(figure: Figure | None) -> Json | None:
    return None if figure is None else dict(figure.json())
