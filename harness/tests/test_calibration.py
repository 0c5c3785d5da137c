"""Calibration by hand."""

import json
import math
import random
from pathlib import Path

import pytest
from reef_harness.cli import main
from reef_harness.evaluation.calibration import calibration, mean_logprob_chance
from reef_harness.evaluation.intervals import wilson
from reef_harness.evaluation.scorer import Pairs, text_of


def test_brier_and_its_parts_are_those_worked_out_by_hand() -> None:
    """Scores 0.25 (one of four right) and 0.75 (two of two): squares 3/16 + 1/16 * 2/6 weighted as below."""
    scores = [0.25] * 4 + [0.75] * 2
    right = [True, False, False, False, True, True]
    found = calibration(scores, right)
    assert found.brier == pytest.approx((9 / 16 + 3 / 16 + 2 / 16) / 6)  # 0.14583
    assert found.reliability == pytest.approx((4 * 0 + 2 / 16) / 6)
    assert found.uncertainty == pytest.approx(1 / 4)
    assert found.resolution == pytest.approx((4 / 16 + 2 / 4) / 6)
    assert found.within == pytest.approx(0, abs=1e-15)  # each bin holds one value
    assert found.brier == pytest.approx(found.reliability - found.resolution + found.uncertainty)
    assert found.calibration_error == pytest.approx(2 / 4 / 6)
    assert [(each.count, each.mean_score, each.share_right) for each in found.bins] == [(4, 0.25, 0.25), (2, 0.75, 1)]


def test_perfect_scores_have_no_brier_and_inverted_ones_have_all_of_it() -> None:
    assert calibration([1, 0], [True, False]).brier == 0
    inverted = calibration([1, 0], [False, True])
    assert (inverted.brier, inverted.calibration_error) == (1, 1)
    assert [each.high for each in inverted.bins] == [0.1, 1.0]  # a score of 1 is in the last bin


def test_a_calibrated_score_has_nearly_no_calibration_error_and_the_parts_add_up() -> None:
    rng = random.Random(0)
    scores = [rng.random() for _ in range(20_000)]
    found = calibration(scores, [rng.random() < score for score in scores])
    assert found.brier == pytest.approx(1 / 6, abs=0.005)  # the mean of p (1 - p) over [0, 1]
    assert found.calibration_error < 0.015
    parts = found.reliability - found.resolution + found.uncertainty + found.within
    assert found.brier == pytest.approx(parts, abs=1e-12)


def test_a_bins_interval_counts_answers_to_one_item_as_if_they_were_alike() -> None:
    """Three answers to a, one to b, two of the four right: (3 + 1)² / (9 + 1) = 1.6 trials, of which 0.8 right."""
    scores, right = [0.55] * 4, [True, True, False, False]
    [found] = calibration(scores, right, items=["a", "a", "a", "b"]).bins
    assert (found.count, found.items, found.share_right) == (4, 2, 0.5)
    half = 1.959964 * math.sqrt(0.25 / 1.6 + 1.959964**2 / (4 * 1.6**2)) / (1 + 1.959964**2 / 1.6)
    assert (found.share_low, found.share_high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-6)
    [alone] = calibration(scores, right).bins
    assert (alone.items, alone.share_low, alone.share_high) == (4, *wilson(2, 4))


def test_eight_alike_answers_to_each_of_ten_items_are_worth_ten() -> None:
    right = [item < 7 for item in range(10) for _ in range(8)]
    [found] = calibration([0.7] * 80, right, items=[item for item in range(10) for _ in range(8)]).bins
    assert (found.share_low, found.share_high) == pytest.approx(wilson(7, 10))


@pytest.mark.parametrize("score", [1.01, -0.01, math.nan, math.inf])
def test_a_score_that_is_no_chance_is_refused(score: float) -> None:
    with pytest.raises(ValueError, match=r"within \[0, 1\].*\(pair 2\)"):
        calibration([0.5, score], [True, True])


def test_nothing_to_calibrate_is_refused() -> None:
    with pytest.raises(ValueError, match="needs pairs"):
        calibration([], [])
    with pytest.raises(ValueError, match="needs pairs"):
        calibration([0.5, 0.5], [True, True], items=["a"])
    with pytest.raises(ValueError, match="at least one bin"):
        calibration([0.5], [True], bins=0)


def test_a_mean_log_probability_becomes_the_geometric_mean_of_the_chances() -> None:
    assert mean_logprob_chance(math.log(0.5) + math.log(0.125), 2) == pytest.approx(0.25)
    for total, tokens in ((-1.0, 0), (0.1, 3), (math.nan, 3)):
        with pytest.raises(ValueError, match="expected tokens"):
            mean_logprob_chance(total, tokens)


def test_the_command_writes_a_table_and_a_diagram(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = tmp_path / "pairs.jsonl"
    rows = "".join(json.dumps({"score": s, "correct": c}) + "\n" for s, c in [(0.25, True), (0.75, True)])
    pairs.write_text(rows, encoding="utf-8-sig")  # a byte order mark is no fault
    assert main(["calibrate", str(pairs)]) == 0
    assert "2 answers. Brier score 0.3125" in capsys.readouterr().out
    assert json.loads((tmp_path / "pairs-calibration.json").read_text())["brier"] == 0.3125
    assert (tmp_path / "pairs-calibration.png").read_bytes().startswith(b"\x89PNG")


def test_the_diagram_shows_the_span_of_the_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plot = pytest.importorskip("reef_harness.evaluation.plot")
    drawn = []
    monkeypatch.setattr(plot, "_save", lambda figure, path: drawn.append(figure))
    plot.reliability_diagram(tmp_path / "a.png", calibration([0.9, 0.95, 1.0], [True] * 3, 3, equal_counts=True), "x")
    assert drawn[0].axes[1].get_xlim() == pytest.approx((0.898, 1.002))  # two hundredths of the span on either side
    plot.plt.close(drawn[0])


def test_bins_of_unequal_width_are_drawn_as_a_density(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two scores on 0 to 0.8 and two on 0.8 to 1: 2.5 and 10 answers per unit of score. Of equal width, counts."""
    plot = pytest.importorskip("reef_harness.evaluation.plot")
    drawn = []
    monkeypatch.setattr(plot, "_save", lambda figure, path: drawn.append(figure))
    scores = [0.0, 0.4, 0.8, 1.0]
    plot.reliability_diagram(tmp_path / "a.png", calibration(scores, [True] * 4, 2, equal_counts=True), "x")
    plot.reliability_diagram(tmp_path / "b.png", calibration(scores, [True] * 4, 2), "x")
    unequal, equal = (figure.axes[1] for figure in drawn)
    assert [bar.get_height() for bar in unequal.patches] == pytest.approx([2.5, 10])
    assert (unequal.get_ylabel(), unequal.get_yscale()) == ("answers / width", "log")
    assert [bar.get_height() for bar in equal.patches] == [2, 2]
    assert (equal.get_ylabel(), equal.get_yscale()) == ("answers", "linear")
    for figure in drawn:
        plot.plt.close(figure)


@pytest.mark.parametrize(
    ("scores", "ends"),
    [
        ([0.1, 0.2, 0.3, 0.4], ["0.100 to 0.300", "0.300 to 0.400"]),
        ([0.9, 0.99991, 0.99992, 0.99994], ["0.90000 to 0.99992", "0.99992 to 0.99994"]),
        ([0.9, 0.9999999, 0.99999995, 1.0], ["0.900000 to 1.000000", "1.000000 to 1.000000"]),  # six at most
    ],
)
def test_the_ends_of_bins_have_as_many_digits_as_tell_them_apart(scores: list[float], ends: list[str]) -> None:
    found = calibration(scores, [True] * 4, 2, equal_counts=True)
    text = text_of(found, Pairs(tuple(scores), (True,) * 4, tuple("abcd")), "x")
    assert [line.split("|")[1].strip() for line in text.splitlines() if " to " in line] == ends


def test_nearly_all_answers_in_one_bin_are_said_where_bins_of_equal_counts_would_part_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(scores: list[float], *more: str) -> str:
        rows = [json.dumps({"score": score, "correct": True}) + "\n" for score in scores]
        (tmp_path / "pairs.jsonl").write_text("".join(rows))
        assert main(["calibrate", str(tmp_path / "pairs.jsonl"), *more]) == 0
        return capsys.readouterr().out

    close = [0.95 + n / 1000 for n in range(18)]
    assert "- 18 of 20 answers are in one bin: --equal-counts shows more.\n" in said([0.1, 0.2, *close])
    for text in (
        said([0.1, 0.2, 0.3, *close]),  # 18 of 21 are fewer than nine tenths
        said([0.1, 0.2, *close], "--equal-counts"),
        said([0.1, 0.2, *close], "--bins", "1"),
        said([0.1, *[0.95] * 18]),  # equal scores are never parted
    ):
        assert "one bin" not in text


def test_the_command_takes_rows_of_one_item_together(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"score": 0.5, "correct": True, "item": "a"}] * 3
    rows += [{"score": 0.5, "correct": True}] * 2  # each to an item of its own
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["calibrate", str(tmp_path / "pairs.jsonl")]) == 0
    [found] = json.loads((tmp_path / "pairs-calibration.json").read_text())["bins"]
    assert (found["count"], found["items"]) == (5, 3)
    assert found["share_low"] == pytest.approx(wilson(25 / 11, 25 / 11)[0])  # (3 + 1 + 1)² / (9 + 1 + 1) trials


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"score": 1.5, "correct": true}\n', "within [0, 1]"),
        ('{"score": 0.5}\n', "pairs.jsonl:1: expected {score, correct}: there is no correct"),
        ("[1]\n", "got list"),
        ('{"score": "0.5", "correct": true}\n', "pairs.jsonl:1"),
        ('{"score": true, "correct": true}\n', "pairs.jsonl:1"),
        (f'{{"score": {10**400}, "correct": true}}\n', "pairs.jsonl:1"),
        ("\n", "no rows"),
    ],
)
def test_the_command_refuses_what_is_no_pair(
    tmp_path: Path, content: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pairs.jsonl").write_text(content)
    assert main(["calibrate", str(tmp_path / "pairs.jsonl")]) == 1
    assert complaint in capsys.readouterr().err
