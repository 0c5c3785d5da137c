"""Two banks on the same items: what changed from the first to the second, and whether it is more than chance."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reef_harness.errors import HarnessError
from reef_harness.evaluation.bank import Bank
from reef_harness.evaluation.differences import McNemar, mcnemar, paired_difference
from reef_harness.evaluation.intervals import Figure, by_item
from reef_harness.evaluation.items import row_of
from reef_harness.evaluation.pass_at_k import curve, ks_up_to
from reef_harness.evaluation.summary import SMALL_SLICE, Candidates, by_temperature, in_slices
from reef_harness.evaluation.table import difference, share, table
from reef_harness.types import Item, Json


@dataclass(frozen=True, slots=True)
class Comparison:
    """One set at one temperature, over the items that both sides have a judged answer to.

    ``first``, ``second`` and ``difference`` are of mean scores. McNemar's test is on one yes or no an item: right where
    more than half of its judged answers are. ``slices`` holds (slice, difference of mean scores).
    """

    name: str
    temperature: float
    items: int
    left_out: int
    samples: tuple[int, int]
    first: Figure
    second: Figure
    difference: Figure
    mcnemar: McNemar
    slices: tuple[tuple[str, Figure], ...]
    curves: tuple[Mapping[int, Figure], Mapping[int, Figure]]

    @property
    def answers(self) -> str:
        """``greedy``, or at which temperature they were sampled, and how many."""
        kind = "greedy" if self.temperature == 0 else f"sampled at {self.temperature:g}"
        return f"{kind}, {self.samples[0]} and {self.samples[1]} each" if self.temperature else kind

    def json(self) -> Json:
        """The numbers."""
        first, second = ({str(k): figure.json() for k, figure in found.items()} for found in self.curves)
        return {
            "set": self.name,
            "temperature": self.temperature,
            "items": self.items,
            "left_out": self.left_out,
            "samples": list(self.samples),
            "first": self.first.json(),
            "second": self.second.json(),
            "difference": self.difference.json(),
            "mcnemar": {
                "only_first": self.mcnemar.only_first,
                "only_second": self.mcnemar.only_second,
                "p": self.mcnemar.p,
            },
            "slices": [{"slice": label, **figure.json()} for label, figure in self.slices],
            "pass_at_k": {"first": first, "second": second},
        }


def compare(
    first: Bank, second: Bank, grader: str | None = None, *, intersection: bool = False, seed: int = 0
) -> tuple[list[Comparison], list[str]]:
    """Compare set by set: (comparisons, remarks on what is compared). ``seed`` is of the bootstrap.

    Items must be the same on both sides, or with ``intersection`` those that are are compared. Raises HarnessError
    where they are not, where no set is in both, or where they have no grader in common.
    """
    by = grader_of_both(first, second, grader)
    names = [name for name in first.asked.sets if name in second.asked.sets]
    if not names:
        raise HarnessError(
            f"no set is in both: {', '.join(first.asked.sets)} in {first.path}, {', '.join(second.asked.sets)} in "
            f"{second.path}"
        )
    remarks = _remarks(first, second)
    if grader is None and by != (own := first.graders()[0]):
        remarks.append(f"Graded by {by}: the first's own grader, {own}, did not judge every answer of both.")
    found: list[Comparison] = []
    for name in names:
        items, remark = _common(first, second, name, intersection)
        remarks += [remark] if remark else []
        sides = [by_temperature(items, bank.responses(name), bank.verdicts(name, by)) for bank in (first, second)]
        for temperature in [temperature for temperature in sides[0] if temperature in sides[1]]:
            samples = (first.asked.settings.asked()[temperature], second.asked.settings.asked()[temperature])
            one, other = sides[0][temperature], sides[1][temperature]
            found.append(_comparison(name, temperature, samples, one, other, seed))
            if left_out := found[-1].left_out:
                remarks.append(f"{name}, {found[-1].answers}: {left_out} items without a judged answer on both sides.")
    if not found:
        raise HarnessError("the two were sampled at different temperatures: nothing can be compared")
    return found, remarks


def grader_of_both(first: Bank, second: Bank, named: str | None) -> str:
    """The grader of ``first`` that ``named`` means. None: the first of them that judged every answer on both sides.

    Where none did, that is as of :meth:`Bank.grader`. Raises HarnessError where the second was not graded by it.
    """
    whole = second.complete() if named is None else []
    shared = [each for each in first.complete() if each in whole] if whole else []
    by = shared[0] if shared else first.grader(named)
    if by not in second.graders():
        raise HarnessError(f"{second.path} was not graded by {by}, only by {', '.join(second.graders()) or 'nobody'}")
    return by


def text_of(found: Sequence[Comparison], remarks: Sequence[str], names: tuple[str, str], grader: str) -> str:
    """The tables with what a reader must know. ``names`` are of the two sides."""
    head = ("set", "answers", "items", "first", "second", "second - first", "right only in", "McNemar p")
    rows = [
        (
            each.name,
            each.answers,
            str(each.items),
            share(each.first),
            share(each.second),
            difference(each.difference),
            f"first {each.mcnemar.only_first}, second {each.mcnemar.only_second}",
            f"{each.mcnemar.p:.2g}",
        )
        for each in found
    ]
    slices = [
        (each.name, each.answers, label, _size(figure), difference(figure))
        for each in found
        for label, figure in each.slices
    ]
    several = any(max(each.samples) > 1 for each in found)
    figures = [figure for each in found for figure in (each.difference, *(figure for _, figure in each.slices))]
    remarks = [*remarks, *([MCNEMAR_OF_SEVERAL] if several else [])]
    remarks += [NO_INTERVAL] if any(figure.low == figure.high for figure in figures) else []
    parts = [
        f"# {names[0]} (first) and {names[1]} (second)\n",
        f"Mean scores of the same items, graded by {grader}; in brackets 95% intervals over items, of the difference "
        "item by item.\n",
        table(head, rows),
        table(("set", "answers", "slice", "items", "second - first"), slices) if slices else "",
        "".join(f"- {remark}\n" for remark in remarks),
    ]
    return "\n".join(part for part in parts if part)


MCNEMAR_OF_SEVERAL = (
    "McNemar's test needs one yes or no an item: with several answers each, an item is right where more than half of "
    "its judged answers are."
)


NO_INTERVAL = (
    "No interval: all items differ by the same, and scores outside [0, 1] have no bounds that would say how far others "
    "may differ."
)


def _size(figure: Figure) -> str:
    return f"{figure.items} (small)" if figure.items < SMALL_SLICE else str(figure.items)


def _comparison(
    name: str,
    temperature: float,
    samples: tuple[int, int],
    first: Sequence[Candidates],
    second: Sequence[Candidates],
    seed: int,
) -> Comparison:
    pairs = [(one, other) for one, other in zip(first, second, strict=True) if one.judged and other.judged]
    if not pairs:
        raise HarnessError(f"{name}: no item has a judged answer on both sides")
    before, after = [_score(one) for one, _ in pairs], [_score(other) for _, other in pairs]
    of_item = {one.item.id: (score, then) for (one, _), score, then in zip(pairs, before, after, strict=True)}
    mean_before, mean_after = by_item(before, seed=seed), by_item(after, seed=seed)
    assert mean_before and mean_after  # there are pairs
    slices = []
    for (slice_name, value), inside in in_slices([one for one, _ in pairs]).items():
        left, right = zip(*(of_item[each.item.id] for each in inside), strict=True)
        slices.append((f"{slice_name} = {value}", paired_difference(left, right, seed=seed)))
    ks = ks_up_to(min(samples))
    return Comparison(
        name=name,
        temperature=temperature,
        items=len(pairs),
        left_out=len(first) - len(pairs),
        samples=samples,
        first=mean_before,
        second=mean_after,
        difference=paired_difference(before, after, seed=seed),
        mcnemar=mcnemar([_right(one) for one, _ in pairs], [_right(other) for _, other in pairs]),
        slices=tuple(slices),
        curves=(_curve([one for one, _ in pairs], ks, seed), _curve([other for _, other in pairs], ks, seed)),
    )


def _score(candidates: Candidates) -> float:
    """The mean score of an item's judged answers."""
    scores = [verdict.score for verdict in candidates.judged if verdict.score is not None]
    return math.fsum(scores) / len(scores)


def _right(candidates: Candidates) -> bool:
    return 2 * candidates.right > len(candidates.judged)


def _curve(candidates: Sequence[Candidates], ks: Sequence[int], seed: int) -> dict[int, Figure]:
    return curve([(len(each.judged), each.right) for each in candidates], ks, seed=seed)


def _common(first: Bank, second: Bank, name: str, intersection: bool) -> tuple[list[Item], str]:
    """The items of a set that both have, and what to say of the others."""
    items, others = first.items(name), second.items(name)
    if first.asked.sets[name].sha256 == second.asked.sets[name].sha256:
        return items, ""
    rows = {item.id: row_of(item) for item in others}
    same = [item for item in items if rows.get(item.id) == row_of(item)]
    if len(same) == len(items) == len(others):
        return same, ""
    said = f"{name}: {len(same)} items are the same in both, of {len(items)} and {len(others)}"
    if not intersection or not same:
        raise HarnessError(f"{said}; --intersection compares those that are the same" if same else said)
    return same, f"{said}; the others are left out."


def _remarks(first: Bank, second: Bank) -> list[str]:
    found = []
    if only := sorted(set(first.asked.sets) ^ set(second.asked.sets)):
        found.append(f"Only one of the two has {', '.join(only)}: left out.")
    one, other = first.asked.settings, second.asked.settings
    if one.max_tokens != other.max_tokens:
        found.append(f"Answers had at most {one.max_tokens} tokens in the first, {other.max_tokens} in the second.")
    for bank in (first, second):
        if len(bank.answered_by) > 1:
            several = ", ".join(f"{release}: {count}" for release, count in sorted(bank.answered_by.items()))
            found.append(f"The answers in {bank.path} are of several releases ({several}).")
    if len(first.answered_by) == 1 and first.answered_by.keys() == second.answered_by.keys():
        found.append("Both sides are of one release: what differs is chance.")
    return found
