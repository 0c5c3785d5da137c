"""The same answers by another grader: verdicts that change, and the answers that each would pick."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reef_harness import FinalGrader, Verdict
from reef_harness.cli import main
from reef_harness.evaluation.bank import Bank
from reef_harness.evaluation.grade import grade
from reef_harness.evaluation.measure import judge, summarize_bank
from reef_harness.evaluation.records import Graded, Response
from reef_harness.evaluation.regrade import Change, Disagreement, disagreement, text_of
from reef_harness.evaluation.sample import Settings
from reef_harness.evaluation.summary import by_temperature, summarize
from reef_harness.evaluation.table import table
from reef_harness.graders import Grader
from reef_harness.types import Item


class LastNumber(Grader):
    """Takes the last word as the answer, whatever stands around it; does not know what to do with "perhaps"."""

    id = "last-number"
    version = "7"

    def grade(self, text: str, gold: str, finish_reason: str) -> Verdict:
        if "perhaps" in text:
            return self.review("unsure")
        return self.decided(self.read(text) == gold, "compared")

    def read(self, text: str) -> str | None:
        return text.replace("<final>", " ").replace("</final>", " ").split()[-1]


ANSWERS = {
    "10": ["<final>10</final>", "it is 10", "<final>3</final>", "<final>3</final>"],  # new: 2 for 10, 2 for 3: a tie
    "20": ["it is 20", "it is 20", "<final>5</final>", "perhaps <final>5</final>"],
    "30": ["<final>30</final>"] * 4,
}


@pytest.fixture
def bank(service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("REEF_API_KEY", raising=False)
    left = {prompt: list(answers) for prompt, answers in ANSWERS.items()}
    service.answer = lambda prompt, index: left[prompt].pop(0)
    items = tmp_path / "items.jsonl"
    items.write_text("".join(json.dumps({"id": f"i{n}", "prompt": n, "gold": n}) + "\n" for n in ANSWERS))
    arguments = ["--url", service.url, "--items", str(items), "--grader", "final", "--samples", "4", "--no-figures"]
    assert main(["evaluate", *arguments, "--concurrency", "1", "--out", str(tmp_path / "run")]) == 0
    service.requests.clear()
    return tmp_path / "run"


def test_another_grader_judges_the_same_answers_without_a_request(bank: Path, service: Any) -> None:
    """By final 1 + 0 + 4 of 12 are right; by the new one 2 + 2 + 4 of the 11 that it can judge."""
    opened = Bank.open(bank)
    assert asyncio.run(judge(opened, LastNumber())) == "last-number@7"
    assert service.requests == []
    assert opened.graders() == ["final@1", "last-number@7"]
    [old], [new] = summarize_bank(opened, "final@1")["in-domain"], summarize_bank(opened, "last-number@7")["in-domain"]
    assert [old.outcomes[kind] for kind in ("correct", "incorrect", "review")] == [5, 7, 0]
    assert [new.outcomes[kind] for kind in ("correct", "incorrect", "review")] == [8, 3, 1]
    assert new.accuracy is not None and new.accuracy.value == pytest.approx((2 / 4 + 2 / 3 + 1) / 3)
    assert (new.coverage.value, new.review_rate.value) == pytest.approx((11 / 12, 1 / 12))
    assert [(k, figure.items) for k, figure in new.pass_at_k.items()] == [(1, 3), (2, 3), (4, 2)]
    assert new.votes is not None
    assert new.votes.outcomes == {"right": 2, "wrong": 0, "tie": 1, "none": 0}
    assert (new.votes.right.value, new.votes.expected.value) == pytest.approx((2 / 3, 2.5 / 3))


def test_changed_verdicts_are_listed_and_the_selected_answers_compared(bank: Path) -> None:
    opened = Bank.open(bank)
    asyncio.run(judge(opened, LastNumber()))
    found = disagreement(opened, "final@1", "last-number@7")
    assert found.answers == 12
    changed = [(change.response.item, change.response.sample, change.old[0], change.new[0]) for change in found.changes]
    assert changed == [
        ("i10", 1, "incorrect", "correct"),
        ("i20", 0, "incorrect", "correct"),
        ("i20", 1, "incorrect", "correct"),
        ("i20", 3, "incorrect", "review"),
    ]
    best, majority = found.picks
    # Old: i20 has four answers of score 0, the first is "it is 20", which is what the new one picks, too.
    assert (best.kind, best.items, best.differ) == ("best score", 3, 0)
    assert best.right == {"old": {"old": 2, "new": 2}, "new": {"old": 3, "new": 3}}
    # Old: 3 wins i10 and 5 wins i20. New: 10 was said first of the two that tie on i10, 20 wins i20.
    assert (majority.kind, majority.items, majority.examples) == ("majority", 3, ("i10", "i20"))
    assert majority.right == {"old": {"old": 1, "new": 2}, "new": {"old": 1, "new": 3}}
    text = text_of(found)
    assert "Of 12 answers 4 are judged differently in outcome.\n" in text  # reasons of two graders are not compared
    assert "| in-domain | majority   | 3     | 2            | 1, 2" in text


def test_one_answer_is_judged_and_a_long_id_ends_in_an_ellipsis() -> None:
    long = Response("Start at 4. Subtract 7. Add 1. Add 7. Subtract 7.", 0, 0, 1.0, text="-2")
    change = Change("in-domain", long, ("incorrect", "no_final"), ("correct", "equal"))
    found = Disagreement("final@1", "number@3-last", 5400, (change,), ())
    text = text_of(found)
    assert "\nOf 5400 answers 1 is judged differently in outcome.\n" in text
    assert "| Start at 4. Subtract 7. Add 1. Add 7. S… | 0 " in text
    same = text_of(replace(found, new="final@2"))
    assert "\nOf 5400 answers 1 is judged differently, in outcome or reason; 1 in outcome.\n" in same


def test_the_figures_of_a_regrade_name_its_grader(bank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plot = pytest.importorskip("reef_harness.evaluation.plot")
    titles: list[str] = []
    for name in ("pass_at_k_curves", "accuracy_by_slice", "length_histogram"):
        monkeypatch.setattr(plot, name, lambda path, *of: titles.append(of[-1]))
    assert main(["regrade", str(bank), "--grader", "number:where=last"]) == 0
    grader = Bank.open(bank).graders()[1]
    assert [title.split("\n") for title in titles] == [
        ["pass@k of release r0", f"graded by {grader}"],
        ["Accuracy of release r0", f"graded by {grader}"],
        ["Answers to in-domain, sampled at 1: release r0", f"graded by {grader}"],
    ]


def test_an_answer_that_was_cut_neither_votes_nor_is_picked(bank: Path) -> None:
    """Of i10's answers "it is 10", which the new grader reads and likes, was cut: left are 10, 3 and 3."""
    file = bank / "in-domain" / "responses.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        if row["text"] == "it is 10":
            row["finish_reason"] = "length"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    opened = Bank.open(bank)
    asyncio.run(judge(opened, LastNumber()))
    [new] = summarize_bank(opened, "last-number@7")["in-domain"]
    assert new.outcomes["correct"] == 8  # the grader's own affair
    assert new.votes is not None and new.votes.outcomes == {"right": 2, "wrong": 1, "tie": 0, "none": 0}
    best, majority = disagreement(opened, "final@1", "last-number@7").picks
    assert best.right["new"] == {"old": 3, "new": 3}
    assert majority.right["new"] == {"old": 1, "new": 2}


def test_where_every_answer_was_cut_nothing_is_picked_though_a_grader_likes_one() -> None:
    item = Item.from_text("i", "?", "1")
    cut = [Response("i", n, n, 1.0, "r0", f"c{n}", "it is 1", "length", 5, 9, -1.0) for n in range(2)]
    verdicts = asyncio.run(grade({"i": item}, cut, LastNumber()))
    assert [(verdict.outcome, verdict.answer) for verdict in verdicts] == [("correct", None)] * 2
    [candidates] = by_temperature([item], cut, verdicts).values()
    found = summarize(candidates, 1.0, 2)
    assert found.votes is None
    assert found.best_by_logprob is not None and found.best_by_logprob.value == 0.0


def test_the_files_of_the_first_grader_stay_as_they_are(bank: Path) -> None:
    before = {path: path.read_bytes() for path in bank.rglob("*") if path.is_file() and path.name != "run.json"}
    asyncio.run(judge(Bank.open(bank), LastNumber()))
    assert {path: path.read_bytes() for path in before} == before


def test_the_command_regrades_and_finds_a_grader_of_the_same_version_equal(
    bank: Path, capsys: pytest.CaptureFixture[str], service: Any
) -> None:
    capsys.readouterr()
    assert main(["regrade", str(bank), "--grader", "final", "--no-figures"]) == 0
    captured = capsys.readouterr()
    assert "final@1 judged these answers before" in captured.err
    assert "| in-domain | sampled at 1, 4 each | 3     | 0.417" in captured.out
    assert service.requests == []


def test_changed_items_are_refused_and_so_is_a_directory_without_answers(
    bank: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["regrade", str(tmp_path / "nowhere"), "--grader", "final"]) == 1
    assert "holds no evaluation" in capsys.readouterr().err
    assert main(["regrade", str(bank), "--grader", "final", "--against", "boxed"]) == 1
    assert "was not graded by boxed, only by final@1" in capsys.readouterr().err
    items, copy = tmp_path / "items.jsonl", bank / "in-domain" / "items.jsonl"
    original = items.read_text()
    items.write_text(original.replace('"gold": "10"', '"gold": "11"'))
    assert main(["regrade", str(bank), "--grader", "final", "--no-figures"]) == 0  # by its own copy
    copy.write_text(items.read_text())
    assert main(["regrade", str(bank), "--grader", "final"]) == 1
    assert f"the items of in-domain were changed since the answers in {bank} were sampled" in capsys.readouterr().err
    items.write_text(original)
    assert main(["regrade", str(bank), "--grader", "final", "--no-figures"]) == 0  # by the file that was copied
    copy.write_text(original)
    items.unlink()  # a bank that is carried elsewhere has a copy
    assert main(["regrade", str(bank), "--grader", "final", "--no-figures"]) == 0
    copy.unlink()
    assert main(["regrade", str(bank), "--grader", "final"]) == 1
    assert "the items of in-domain are neither at" in capsys.readouterr().err


def test_verdicts_of_another_version_stand_beside_the_old_ones(bank: Path) -> None:
    opened = Bank.open(bank)
    asyncio.run(judge(opened, FinalGrader("text")))
    assert opened.graders() == ["final@1", "final@1-text"]
    assert opened.grader(None) == "final@1"
    with pytest.raises(Exception, match="was graded by final@1 and final@1-text: say which"):
        opened.grader("final")
    assert disagreement(opened, "final@1", "final@1-text").changes == ()


def test_the_best_answer_by_log_probability_is_a_pick_of_its_own() -> None:
    """Three answers to one item; the surest by token is the second: -2 over 10 tokens."""
    item = Item.from_text("i", "?", "1")
    sums, right = [(-1.0, 2), (-2.0, 10), (-9.0, 30)], [False, True, False]
    responses = [
        Response("i", n, n, 1.0, "r0", f"c{n}", "x", "stop", 5, tokens, total) for n, (total, tokens) in enumerate(sums)
    ]
    verdicts = [
        Graded("i", n, 1.0, "correct" if hit else "incorrect", float(hit), "x", True, "g", "1")
        for n, hit in enumerate(right)
    ]
    [candidates] = by_temperature([item], responses, verdicts).values()
    found = summarize(candidates, 1.0, Settings(samples=3).samples)
    assert found.best_by_logprob is not None and found.best_by_logprob.value == 1.0
    assert found.votes is None  # nothing read the answers, so nothing can vote
    assert found.tokens is not None
    assert (found.tokens.mean.value, found.tokens.median, found.tokens.longest) == (14.0, 10.0, 30)


def test_what_a_model_wrote_cannot_break_a_table() -> None:
    rows = table(("item", "answer"), [("a|b", "two\nlines"), ("c", "x")]).splitlines()
    assert rows == ["| item | answer    |", "|------|-----------|", "| a\\|b | two lines |", "| c    | x         |"]
