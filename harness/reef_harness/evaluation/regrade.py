"""What another grader makes of the answers that are kept: verdicts that change, and answers that it would pick."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from reef_harness.evaluation.bank import Bank
from reef_harness.evaluation.records import Graded, Response
from reef_harness.evaluation.selection import best_of, majority
from reef_harness.evaluation.summary import Candidates, by_temperature
from reef_harness.evaluation.table import counted, short, table
from reef_harness.types import Json

SHOWN = 20  # changed verdicts in the text; the JSON file has all


@dataclass(frozen=True, slots=True)
class Change:
    """An answer that the two graders judge differently: (outcome, reason code) by each."""

    name: str
    response: Response
    old: tuple[str, str]
    new: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Picks:
    """Picking one answer to each item of a fixed bank: what each grader's picks are, as both graders judge them.

    ``kind`` is "best score" or "majority". ``differ`` counts the items for which the two pick answers of different
    text. ``right[judge][picker]`` is the number of picks that are right by one grader ("old", "new") where the
    picker is one of them; an item for which a grader picks nothing has no right pick.
    """

    name: str
    temperature: float
    kind: str
    items: int
    differ: int
    right: Mapping[str, Mapping[str, int]]
    examples: tuple[str, ...]  # ids of items whose pick differs


@dataclass(frozen=True, slots=True)
class Disagreement:
    """How two graders differ on a bank."""

    old: str
    new: str
    answers: int
    changes: tuple[Change, ...]
    picks: tuple[Picks, ...]

    def json(self) -> Json:
        """All of it."""
        return {
            "old": self.old,
            "new": self.new,
            "answers": self.answers,
            "changes": [
                {
                    "set": change.name,
                    "item": change.response.item,
                    "temperature": change.response.temperature,
                    "sample": change.response.sample,
                    "old": list(change.old),
                    "new": list(change.new),
                    "text": change.response.text,
                }
                for change in self.changes
            ],
            "picks": [
                {
                    "set": picks.name,
                    "temperature": picks.temperature,
                    "by": picks.kind,
                    "items": picks.items,
                    "differ": picks.differ,
                    "right": {judge: dict(of) for judge, of in picks.right.items()},
                    "items_that_differ": list(picks.examples),
                }
                for picks in self.picks
            ],
        }


def disagreement(bank: Bank, old: str, new: str) -> Disagreement:
    """Compare two graders (id@version) that both judged the bank: every verdict, and the answers they would pick."""
    changes: list[Change] = []
    picks: list[Picks] = []
    answers = 0
    for name in bank.asked.sets:
        items, responses = bank.items(name), bank.responses(name)
        sides = [by_temperature(items, responses, bank.verdicts(name, grader)) for grader in (old, new)]
        for temperature, by_old in sides[0].items():
            by_new = sides[1][temperature]
            for one, other in zip(by_old, by_new, strict=True):
                answers += sum(verdict is not None for verdict in other.verdicts)
                changes += _changes(name, one, other)
            if bank.asked.settings.asked()[temperature] > 1:
                picks.append(_picks(name, temperature, "best score", by_old, by_new))
                picks.append(_picks(name, temperature, "majority", by_old, by_new))
    return Disagreement(old, new, answers, tuple(changes), tuple(each for each in picks if each.items))


def text_of(found: Disagreement) -> str:
    """Tables for people."""
    same = _id(found.old) == _id(found.new)
    number, kinds = len(found.changes), Counter((change.old[0], change.new[0]) for change in found.changes)
    in_outcome = sum(count for (old, new), count in kinds.items() if old != new)
    parts = [
        f"# {found.old} (old) and {found.new} (new) on the same answers\n",
        f"Of {counted(found.answers, 'answer')} {number} {'is' if number == 1 else 'are'} judged differently"
        + (f", in outcome or reason; {in_outcome} in outcome.\n" if same else " in outcome.\n"),
    ]
    if kinds:
        rows = [(old, new, str(count)) for (old, new), count in kinds.most_common()]
        parts.append(table(("old", "new", "answers"), rows))
        parts.append(table(("set", "item", "sample", "old", "new", "answer"), map(_row, found.changes[:SHOWN])))
    if len(found.changes) > SHOWN:
        parts.append(f"The first {SHOWN} are listed; the JSON file beside this one has all.\n")
    if found.picks:
        parts.append("Answers that each would pick from this bank, and how many of these are right by either:\n")
        head = ("set", "picked by", "items", "picks differ", "right by old: old's, new's", "right by new: old's, new's")
        parts.append(table(head, map(_picks_row, found.picks)))
    return "\n".join(parts)


def _id(grader: str) -> str:
    """Of id@version the id. Reasons are compared between versions of one grader only."""
    return grader.rpartition("@")[0]


def _row(change: Change) -> tuple[str, ...]:
    response = change.response
    number = "greedy" if response.temperature == 0 else str(response.sample)
    text = " ".join((response.text or "").split())
    end = text if len(text) <= 60 else f"…{text[-59:]}"
    return (change.name, short(response.item), number, ": ".join(change.old), ": ".join(change.new), end)


def _picks_row(picks: Picks) -> tuple[str, ...]:
    return (
        picks.name,
        picks.kind,
        str(picks.items),
        str(picks.differ),
        *(f"{picks.right[judge]['old']}, {picks.right[judge]['new']}" for judge in ("old", "new")),
    )


def _changes(name: str, old: Candidates, new: Candidates) -> list[Change]:
    found = []
    for response, before, after in zip(old.responses, old.verdicts, new.verdicts, strict=True):
        if before is None or after is None:
            continue
        said, says = (before.outcome, before.reason_code), (after.outcome, after.reason_code)
        if said != says and (before.outcome != after.outcome or before.grader == after.grader):
            found.append(Change(name, response, said, says))
    return found


def _picks(name: str, temperature: float, kind: str, old: Sequence[Candidates], new: Sequence[Candidates]) -> Picks:
    pick = _best if kind == "best score" else _most_common
    right = {judge: {"old": 0, "new": 0} for judge in ("old", "new")}
    differ: list[str] = []
    num_items = 0
    for one, other in zip(old, new, strict=True):
        picked = {"old": pick(_whole(one)), "new": pick(_whole(other))}
        if picked["old"] is None and picked["new"] is None:
            continue
        num_items += 1
        texts = {picker: None if i is None else one.responses[i].text for picker, i in picked.items()}
        if texts["old"] != texts["new"]:
            differ.append(one.item.id)
        for judge, judged in (("old", one), ("new", other)):
            for picker, i in picked.items():
                verdict = None if i is None else judged.verdicts[i]
                right[judge][picker] += verdict is not None and verdict.correct
    return Picks(name, temperature, kind, num_items, len(differ), right, tuple(differ))


def _whole(candidates: Candidates) -> list[Graded | None]:
    """The verdicts; None for answers that were cut, which nobody picks."""
    pairs = zip(candidates.responses, candidates.verdicts, strict=True)
    return [verdict if response.finish_reason == "stop" else None for response, verdict in pairs]


def _best(verdicts: Sequence[Graded | None]) -> int | None:
    """The first answer with the highest score."""
    return best_of([None if verdict is None else verdict.score for verdict in verdicts]).pick


def _most_common(verdicts: Sequence[Graded | None]) -> int | None:
    """The first answer that says what most say; of several that most say, what was said first."""
    answers = [verdict.answer if verdict is not None and verdict.graded else None for verdict in verdicts]
    vote = majority(answers, [verdict is not None and verdict.correct for verdict in verdicts])
    return answers.index(vote.winners[0]) if vote.winners else None
