"""Correlations, gates and the report: releases made by hand, figures worked out by hand."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reef_harness import wire
from reef_harness.cli import main
from reef_harness.drivers.records import Records, Rollout
from reef_harness.errors import HarnessError
from reef_harness.monitor import Gate, Gates, Run, best, check, correlation, from_file, read_gates
from reef_harness.monitor.figures import Reading, answers, binned, held_out, of_step, readings
from reef_harness.monitor.gates import DEFAULT, strangers
from reef_harness.monitor.page import page
from reef_harness.monitor.series import series
from reef_harness.monitor.statistics import ranks
from reef_harness.types import Item

Json = dict[str, Any]


def release(number: int, *evaluations: Json, **more: Any) -> Json:
    """A link of a chain as the service shows it."""
    return {
        "release_id": f"r{number}",
        "parent_release_id": f"r{number - 1}" if number else None,
        "content_id": f"sha256:{number}",
        "operation": "train" if number else "base",
        "step": number,
        "checkpoint": None,
        "restorable": True,
        "current": False,
        "created_at": 1_790_000_000.0 + number,
        "metrics": {},
        "number": number,
        "policy_version": number,
        "state": "released",
        "evaluations": list(evaluations),
        "alarms": [],
        **more,
    }


def step(number: int, **metrics: float) -> Json:
    """The metrics of a GRPO step as the service stores them: of 8 groups that came 6 were trained and 2 tied."""
    return {
        "reward_mean": 0.5 + number / 100,
        "reward_std": 0.25,
        "reward/final": 0.5,
        "num_groups": 6.0,
        "num_rollouts": 48.0,
        "num_samples": 48.0,
        "informative_group_rate": 1.0,
        "dropped/tied": 16.0,
        "entropy": 0.2,
        "response_length_mean": 30.0 + number,
        "truncation_rate": 0.0,
        "grpo/policy_lag_mean": 1.0,
        "pg_clipfrac": 0.01,
        "train_rollout_logprob_abs_diff": 0.002,
        "seconds/wait": 1.0,
        "seconds/forward_backward": 3.0,
        **metrics,
    }


def chain(*entries: Json) -> Run:
    return Run("sums", tuple(wire.release(entry) for entry in entries))


def accuracy(value: float, low: float, high: float) -> Json:
    return {"accuracy": value, "low": low, "high": high}


def rollout(item: str, index: int, text: str, score: float | None, release: str = "r0") -> Rollout:
    return Rollout(item, 0, index, "g", None, "c", release, "stop", text, 7.0, score, "correct", "equal", "final", "1")


# ---- correlations


def test_correlations_by_hand() -> None:
    found = correlation([(1.0, 2.0), (2.0, 4.0), (3.0, 9.0)])
    assert found.pearson == pytest.approx(7 / (2 * 26) ** 0.5)  # dx -1 0 1, dy -3 -1 4
    assert (found.spearman, found.n) == (pytest.approx(1.0), 3)
    assert correlation([(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]).pearson == pytest.approx(-1.0)


def test_equal_values_share_their_rank() -> None:
    assert ranks([5.0, 1.0, 5.0, 9.0]) == [2.5, 1.0, 2.5, 4.0]


def test_a_constant_series_has_no_correlation_and_nor_do_two_pairs() -> None:
    assert correlation([(1.0, 2.0), (2.0, 2.0), (3.0, 2.0)]) == correlation([(0.0, 2.0), (2.0, 2.0), (9.0, 2.0)])
    assert correlation([(1.0, 2.0), (2.0, 2.0), (3.0, 2.0)]).pearson is None
    assert correlation([(1.0, 2.0), (2.0, 3.0)]).spearman is None
    assert correlation([]).n == 0
    assert correlation([(1.0, 1.0), (2.0, float("nan")), (2.0, 2.0), (3.0, 3.0)]).n == 3


# ---- figures


def test_held_out_figures_are_read_as_the_gate_of_the_service_reads_them() -> None:
    result = {"set": "s", "metrics": {"pass-at-8": {"value": 0.9, "low": 0.8, "high": 0.95}}, **accuracy(0.6, 0.5, 0.7)}
    (found,) = chain(release(0, {"accuracy": 0.1}, result)).releases
    assert held_out(found) == {"accuracy": Reading(0.6, 0.5, 0.7), "pass_at_8": Reading(0.9, 0.8, 0.95)}


def test_groups_that_were_dropped_as_tied_count_among_those_that_came() -> None:
    def rate(**metrics: float) -> float:
        run = chain(release(1, metrics=step(1, **metrics)))
        (checked,) = check(run, gates(Gate("informative_group_rate", min=0.5)))
        (drawn,) = series(run.releases, "informative_group_rate")
        found = readings(run.releases[0], ())["informative_group_rate"].value
        assert drawn == (1, found) and checked.eligible is (found >= 0.5)
        return found

    assert rate() == 0.75
    assert rate(num_samples=96.0) == 0.75  # every report gave two sequences
    assert rate(**{"dropped/tied": 144.0}) == 0.25
    assert rate(**{"dropped/tied": 0.0}, informative_group_rate=0.25) == 0.25  # filter-tied: false


def test_releases_of_an_older_service_have_the_rate_of_groups_that_came() -> None:
    metrics = step(1)
    del metrics["num_rollouts"]
    rate = {"informative_group_rate": Reading(0.75)}
    assert of_step(chain(release(1, metrics=metrics)).releases[0]).items() >= rate.items()
    del metrics["num_samples"]
    assert of_step(chain(release(1, metrics=metrics)).releases[0])["informative_group_rate"] == Reading(1.0)
    del metrics["informative_group_rate"]
    assert "informative_group_rate" not in of_step(chain(release(1, metrics=metrics)).releases[0])


def test_unique_answers_and_the_correlation_of_length_and_score_come_from_the_records() -> None:
    rollouts = [
        rollout("p", 0, "a", 1.0),
        rollout("p", 1, "a", 1.0),
        rollout("p", 2, "bbb", 0.0),
        rollout("p", 3, "cc", 0.5),
        rollout("q", 0, "alone", None),
    ]
    told = answers(rollouts)
    assert told.unique_rate == 0.75  # 3 texts of 4; q was answered once
    assert told.length_reward.pearson == pytest.approx(-1.0)
    assert told.length_reward.n == 4
    (base,) = chain(release(0)).releases
    assert readings(base, rollouts)["length_reward_correlation"].value == pytest.approx(-1.0)
    assert "length_reward_correlation" not in readings(base, rollouts[:2])


def test_runs_over_the_same_items_do_not_answer_a_prompt_together() -> None:
    """Each run's group says one thing twice (1/2 unique); a stream answers a prompt once at a time, and has no rate."""
    first = [replace(rollout("p", index, "a", 1.0), group="p/run1-0") for index in range(2)]
    second = [replace(rollout("p", index, "b", 0.0), group="p/run2-0") for index in range(2)]
    assert answers([*first, *second]).unique_rate == 0.5
    assert answers([replace(each, group=None) for each in (*first, *second)]).unique_rate is None


def write_records(path: Path, *texts: str) -> Path:
    """The records of a driver that answered one prompt, in one group."""
    with closing(Records(path, {"driver": "groups"})) as records:
        name = f"p/{records.run}-0"
        group = [replace(rollout("p", index, text, 1.0), group=name) for index, text in enumerate(texts)]
        records.answered(Item.from_text("p", "p", "2"), group)
        for each in group:
            records.reported(each)
    return path


def test_records_given_twice_count_once_and_those_of_two_runs_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = write_records(tmp_path / "1.jsonl", "a", "a"), write_records(tmp_path / "2.jsonl", "b", "b", "b")
    copy = tmp_path / "copy.jsonl"
    copy.write_text("".join(one.read_text().splitlines(keepends=True)[:4]))  # made when one was reported
    (tmp_path / "run.json").write_text(json.dumps({"scenario": "sums", "releases": [release(0)]}))
    records = [argument for path in (copy, one, other, other) for argument in ("--records", str(path))]
    assert main(["report", str(tmp_path / "run.json"), *records, "--out", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert "5 rollouts in the records, 0 of them failed" in text
    assert cells(text[text.index("## Answers") :], "r0")[1:4] == ["5", "1", f"{(1 / 2 + 1 / 3) / 2:.3f}"]
    said = capsys.readouterr().err
    assert f"{one} holds the run" in said and f"{other} holds the run" in said


def test_scores_are_averaged_over_spans_of_length() -> None:
    pairs = [(0.0, 1.0), (1.0, 0.0), (9.0, 0.5), (10.0, 1.0)]
    assert binned(pairs, 2) == [(0.5, 0.5, 2), (9.5, 0.75, 2)]
    assert binned([(3.0, 1.0), (3.0, 0.0)], 4) == [(3.0, 0.5, 2)]


# ---- gates


def gates(*given: Gate) -> Gates:
    return Gates(given, "accuracy")


def test_a_release_is_eligible_only_where_every_gate_passes() -> None:
    run = chain(
        release(0, accuracy(0.5, 0.4, 0.6)),
        release(1, accuracy(0.7, 0.6, 0.8), metrics=step(1)),
        release(2, accuracy(0.8, 0.7, 0.9), metrics=step(2, truncation_rate=0.5)),
        release(3, metrics=step(3)),
    )
    base, good, cut, unmeasured = check(run, gates(Gate("accuracy", min=0.55), Gate("truncation_rate", max=0.1)))
    assert [each.eligible for each in (base, good, cut, unmeasured)] == [False, True, False, False]
    assert [result for _, result, _ in base.results] == ["failed", "not known"]
    assert [result for _, result, _ in cut.results] == ["passed", "failed"]
    assert [result for _, result, _ in unmeasured.results] == ["not known", "passed"]
    assert best([base, good, cut, unmeasured]) is good


def test_limits_are_compared_with_the_near_end_of_an_interval() -> None:
    reading = Reading(0.6, 0.5, 0.7)
    assert Gate("x", min=0.5).check(reading) == "passed"
    assert Gate("x", min=0.55).check(reading) == "failed"
    assert Gate("x", max=0.65).check(reading) == "failed"
    assert Gate("x", max=0.7).check(reading) == "passed"


def test_weights_that_cannot_be_used_are_never_eligible() -> None:
    everything = gates(Gate("accuracy", min=0.0))
    run = chain(
        release(0, accuracy(0.5, 0.4, 0.6), restorable=False),
        release(1, accuracy(0.5, 0.4, 0.6), state="rejected"),
        release(2, accuracy(0.5, 0.4, 0.6), restorable=False, checkpoint="/c/2"),
    )
    checked = check(run, everything)
    assert [each.unusable for each in checked] == ["weights are gone", "rejected", None]
    found = best(checked)
    assert found is not None
    assert found.release.id == "r2"


def test_links_that_repeat_weights_are_not_checked_and_of_equals_the_newest_is_best() -> None:
    run = chain(
        release(0, accuracy(0.5, 0.4, 0.6)),
        release(1, accuracy(0.5, 0.4, 0.6)),
        release(2, accuracy(0.9, 0.8, 1.0), operation="rollback"),
    )
    checked = check(run, gates(Gate("accuracy", min=0.0)))
    assert [each.release.id for each in checked] == ["r0", "r1"]
    found = best(checked)
    assert found is not None
    assert found.release.id == "r1"


def test_alarms_are_a_figure_and_a_method_s_name_may_be_left_out() -> None:
    run = chain(release(1, alarms=[{"metric": "accuracy", "message": "it fell"}], metrics=step(1)))
    (checked,) = check(run, gates(Gate("alarms", max=0.0), Gate("policy_lag_mean", max=4.0)))
    assert [result for _, result, _ in checked.results] == ["failed", "passed"]


def test_a_part_of_the_reward_is_no_held_out_accuracy_and_has_its_full_name_only() -> None:
    """The second release was paid 0.95 for accuracy in training, and never evaluated."""
    run = chain(
        release(1, accuracy(0.6, 0.55, 0.65), metrics=step(1)),
        release(2, metrics=step(2, **{"reward/accuracy": 0.95})),
    )
    measured, paid = check(run, DEFAULT)
    assert (measured.eligible, paid.eligible, paid.rank) == (True, False, None)
    assert best([measured, paid]) is measured
    (_, named) = check(run, gates(Gate("reward/accuracy", min=0.9)))
    assert [(result, str(reading)) for _, result, reading in named.results] == [("passed", "0.95")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gates = 3", r"expected a table \[gates\]"),
        ("[gates]", r"at least one gate"),
        ("[gates]\naccuracy = 0.5", r"gates.accuracy must be \{min = NUMBER\}"),
        ("[gates]\naccuracy = {least = 0.5}", r"gates.accuracy must be"),
        ("[gates]\naccuracy = {min = true}", r"gates.accuracy.min must be a finite number, got True"),
        ("[gates]\naccuracy = {min = nan}", r"finite number"),
        (f"[gates]\naccuracy = {{min = {10**400}}}", r"finite number"),
        ("[gates]\naccuracy = {min = 0.9, max = 0.1}", r"nothing could pass"),
        ("threshold = 1\n[gates]\naccuracy = {min = 0.5}", r"unknown key 'threshold'"),
        ("[gates", r"not TOML"),
    ],
)
def test_gates_that_cannot_be_meant_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "gates.toml").write_text(text)
    with pytest.raises(HarnessError, match=words):
        read_gates(tmp_path / "gates.toml")


def test_gates_are_read_with_either_spelling(tmp_path: Path) -> None:
    text = 'best = "pass-at-8"\n[gates]\ntruncation-rate = {max = 0.1}\n'
    (tmp_path / "gates.toml").write_text(text, encoding="utf-8-sig")  # as some editors save it
    assert read_gates(tmp_path / "gates.toml") == Gates((Gate("truncation_rate", max=0.1),), "pass_at_8")


# ---- the page


def cells(text: str, first: str) -> list[str]:
    """The cells of the first row of any table that begins with ``first``."""
    row = next(line for line in text.splitlines() if line.startswith(f"| {first}"))
    return [cell.strip() for cell in row.split("|")[1:-1]]


def test_the_page_says_what_happened_and_what_is_not_known() -> None:
    run = chain(
        release(0, accuracy(0.5, 0.4, 0.6)),
        *(release(number, metrics=step(number)) for number in range(1, 20)),
        release(20, accuracy(0.7, 0.6, 0.8), metrics=step(20), current=True),
    )
    limits = gates(Gate("accuracy", min=0.45))
    text = page(run, check(run, limits), limits, ["reward"])
    assert "21 releases (1 base, 20 train), from 2026-" in text
    assert "Reward, over the rollouts trained from, went from 0.53 to 0.68 (means of the first and the last 5 " in text
    assert "Held-out accuracy went from 0.5 [0.4, 0.6] to 0.7 [0.6, 0.8]." in text
    assert "Eligible: 1 of 21. **The best by accuracy is r20** (0.7)." in text
    assert "by step, mean length in tokens and mean reward of the rollouts trained from: Pearson +1.00" in text
    assert "Pearson +1.00, of ranks +1.00 (n = 20)" in text
    steps = text[text.index("## Steps") :]
    assert "Rewards, lengths and truncation are of the rollouts trained from." in steps
    assert cells(steps, "release")[:3] == ["release", "reward, trained from", "informative"]
    assert cells(steps, "r20") == ["r20", "0.7 ± 0.25", "0.75", "0.2", "50", "0", "1", "0.01", "0.002", "0.5"]
    assert "8 of 20 rows are left out, evenly" in steps
    assert "- accuracy at least 0.45: failed 1, not known 19, passed 1" in text
    assert cells(text, "forward backward") == ["forward backward", "3.000", "75.0%"]
    assert "![Reward and held-out accuracy by release](reward.png)" in text
    assert "steps.png" not in text
    assert "- no step has: critic's explained variance" in text
    assert "no records were given" in text
    assert "the service's status was not asked" in text


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        (1, None),
        (2, "went from 0.51 to 0.52 (the first and the last of 2 steps)."),
        (5, "went from 0.515 to 0.545 (means of the first and the last 2 of 5 steps)."),
        (9, "went from 0.525 to 0.575 (means of the first and the last 4 of 9 steps)."),
        (10, "went from 0.53 to 0.58 (means of the first and the last 5 of 10 steps)."),
    ],
)
def test_the_first_and_the_last_steps_are_not_the_same_ones(steps: int, sentence: str | None) -> None:
    run = chain(release(0), *(release(n, metrics=step(n)) for n in range(1, steps + 1)))
    text = page(run, check(run, DEFAULT), DEFAULT, [])
    told = "Reward, over the rollouts trained from, "
    assert (told not in text) if sentence is None else (told + sentence in text)


def test_the_score_of_all_recorded_rollouts_stands_beside_the_reward_of_those_trained_from(tmp_path: Path) -> None:
    """Of what the base answered one group differs, and two tie at 0; nothing is recorded of r1."""
    scores = {"p": (1.0, 0.0), "q": (0.0, 0.0), "r": (0.0, 0.0), "s": (None,)}
    rollouts = tuple(rollout(item, i, "a", score) for item, of in scores.items() for i, score in enumerate(of))
    run = replace(chain(release(0), *(release(n, metrics=step(n)) for n in (1, 2))), rollouts=rollouts)
    text = page(run, check(run, DEFAULT), DEFAULT, [])
    steps = text[text.index("## Steps") :]
    assert cells(steps, "release")[:3] == ["release", "reward, recorded", "reward, trained from"]
    assert cells(steps, "r1")[1:3] == ["0.1667", "0.51 ± 0.25"]
    assert cells(steps, "r2")[1:3] == ["", "0.52 ± 0.25"]
    assert "all recorded answers of the release before, dropped ones included" in steps
    unrecorded = page(replace(run, rollouts=None), check(run, DEFAULT), DEFAULT, [])
    assert "recorded" not in unrecorded[unrecorded.index("## Steps") : unrecorded.index("## Length")]


def test_the_figure_says_which_rollouts_its_reward_is_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plot = pytest.importorskip("reef_harness.monitor.plot")
    monkeypatch.setattr(plot.plt, "close", lambda figure: None)
    run = chain(release(0), *(release(n, metrics=step(n)) for n in (1, 2)))
    answered = tuple(rollout("p", i, "a", score, "r1") for i, score in enumerate((0.0, 0.5)))
    for rollouts, drawn in ((None, None), (answered, [(2, 0.25)])):
        assert plot.reward(tmp_path / "reward.png", replace(run, rollouts=rollouts))
        (axes,) = plot.plt.gcf().axes
        lines = {line.get_label(): [tuple(at) for at in line.get_xydata()] for line in axes.lines}
        assert axes.get_ylabel() == f"reward, mean over rollouts{'' if drawn else ' trained from'}"
        assert lines["rollouts trained from"] == [(1, 0.51), (2, 0.52)]
        assert lines.get("all recorded rollouts") == drawn
    monkeypatch.undo()
    plot.plt.close("all")


def test_every_sets_accuracy_is_shown_first_and_what_is_left_out_is_said() -> None:
    names = ("accuracy", "coverage", "greedy_accuracy", "majority", "pass_at_2", "pass_at_4", "truncated")
    stored = {
        f"{start}{name}": {"value": 0.5, "low": 0.4, "high": 0.6} for start in ("", "challenge_") for name in names
    }
    run = chain(release(0, {"metrics": stored | {"retention_accuracy": 0.9}, "samples": 4, "temperature": 1.0}))
    text = page(run, check(run, DEFAULT), DEFAULT, [])
    shown = ["accuracy", "challenge_accuracy", "retention_accuracy", "greedy_accuracy", "pass_at_4", "majority"]
    assert cells(text[text.index("## Held-out") :], "release")[2:] == shown
    assert (
        "Figures left out, all in run.json: challenge_coverage, challenge_greedy_accuracy, challenge_majority, "
        "challenge_pass_at_2, challenge_pass_at_4, challenge_truncated, coverage, pass_at_2, truncated." in text
    )


def test_the_best_of_many_eligible_releases_has_a_row() -> None:
    """Of 40 the fourth is best: neither evenly spaced (0, 4, 7, …) nor among the last six."""
    run = chain(*(release(n, accuracy(0.9 if n == 3 else 0.5, 0.4, 1.0)) for n in range(40)))
    limits = gates(Gate("accuracy", min=0.1))
    text = page(run, check(run, limits), limits, [])
    assert "Eligible: 40 of 40. **The best by accuracy is r3** (0.9)." in text
    assert cells(text, "r3 (best)") == ["r3 (best)", "yes", "0.9 [0.4, 1]", "yes"]


def test_a_metric_beyond_all_floats_is_no_figure(tmp_path: Path) -> None:
    entries = [release(1, {"accuracy": 10**400}, metrics=step(1, entropy=10**400))]
    (tmp_path / "run.json").write_text(json.dumps({"scenario": "sums", "releases": entries}), encoding="utf-8-sig")
    run = from_file(tmp_path / "run.json")
    found = readings(run.releases[0], ())
    assert "accuracy" not in found and "entropy" not in found and found["truncation_rate"].value == 0.0


def test_a_chain_without_steps_says_so_and_draws_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"scenario": "sums", "releases": [release(0)]}))
    out = tmp_path / "out"
    assert main(["report", str(tmp_path / "run.json"), "--out", str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["report.md", "run.json"]
    text = (out / "report.md").read_text()
    assert "no release was made by a step" in text
    assert "none is stored on a release" in text
    assert capsys.readouterr().out == "best eligible release: none\n"


def test_the_spread_of_the_reward_stays_within_the_rewards_of_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plot = pytest.importorskip("reef_harness.monitor.plot")
    monkeypatch.setattr(plot.plt, "close", lambda figure: None)
    steps = [release(n, metrics=step(n, reward_mean=mean, reward_std=0.4)) for n, mean in ((1, 0.2), (2, 0.9))]
    run = chain(release(0), *steps)
    for rollouts, ends in ((None, (-0.2, 1.3)), ((rollout("p", 0, "a", 0.0), rollout("p", 1, "b", 1.0)), (0.0, 1.0))):
        assert plot.reward(tmp_path / "reward.png", replace(run, rollouts=rollouts))
        band = plot.plt.gcf().axes[0].collections[0].get_paths()[0].vertices[:, 1]
        assert (band.min(), band.max()) == pytest.approx(ends)
    monkeypatch.undo()
    plot.plt.close("all")


def test_a_report_of_a_service_can_be_written_again_from_what_it_kept(service: Any, tmp_path: Path) -> None:
    entries = [release(0, accuracy(0.5, 0.4, 0.6)), *(release(n, metrics=step(n)) for n in range(1, 6))]
    entries[4]["operation"], entries[4]["metrics"] = "rollback", {}
    entries[5]["evaluations"] = [accuracy(0.7, 0.6, 0.8)]
    service.chain = lambda query: entries[::-1] if "before" not in query else []
    route = service.route

    def with_status(method: str, parts: list[str], *rest: Any) -> tuple[int, Json]:
        if parts == ["reef", "status"]:
            scenario = {"name": "sums", "pending": 3, "reserved": 0, "batch_size": 8}
            return 200, {"scenario": scenario, "training": {"phase": "waiting", "error": "the disk is full"}}
        answer: tuple[int, Json] = route(method, parts, *rest)
        return answer

    service.route = with_status
    out = tmp_path / "out"
    assert main(["report", "sums", "--url", service.url, "--out", str(out)]) == 0
    text = (out / "report.md").read_text()
    kept = from_file(out / "run.json")
    assert text == page(kept, check(kept, DEFAULT), DEFAULT, ["reward", "steps", "length", "time"])
    assert "Phase waiting; 3 reports wait, 0 are in a step, a batch is 8." in text
    assert "- error: the disk is full" in text
    for name in ("reward", "steps", "length", "time"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_exit_status_says_whether_a_release_is_eligible(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "run.json").write_text(
        json.dumps({"scenario": "sums", "releases": [release(0, accuracy(0.5, 0.4, 0.6))]})
    )
    (tmp_path / "low.toml").write_text("[gates]\naccuracy = {min = 0.3}\n")
    (tmp_path / "high.toml").write_text("[gates]\naccuracy = {min = 0.5}\n")
    command = ["report", str(tmp_path / "run.json"), "--out", str(tmp_path / "out"), "--gates"]
    assert main([*command, str(tmp_path / "low.toml")]) == 0
    assert capsys.readouterr().out == "best eligible release: r0\n"
    assert main([*command, str(tmp_path / "high.toml")]) == 3
    assert capsys.readouterr().out == "best eligible release: none\n"
    (tmp_path / "typo.toml").write_text("[gates]\nacuracy = {min = 0.3}\n")
    assert main([*command, str(tmp_path / "typo.toml")]) == 3
    sentence = "no release has a figure acuracy; the nearest name is accuracy"
    assert sentence in capsys.readouterr().err
    assert f"- {sentence}\n" in (tmp_path / "out" / "report.md").read_text()


def test_a_part_of_the_reward_is_offered_only_for_a_part_of_the_reward() -> None:
    """What is paid in training is no held-out figure, whose name it may have; the gate on that would never pass."""
    first = release(0)
    run = Run("sums", chain({**first, "metrics": {"reward/accuracy": 0.5, "grpo/entropy": 1.0}}).releases, None, None)
    asked = gates(*(Gate(name, min=0.0) for name in ("reward/acuracy", "entropie")))
    assert strangers(run, asked) == [
        "no release has a figure reward/acuracy; the nearest name is reward/accuracy",
        "no release has a figure entropie; the nearest name is entropy",
        "no release has a figure accuracy",
    ]


def test_records_add_answers_to_the_page(tmp_path: Path) -> None:
    run = Run("sums", chain(release(0)).releases, None, tuple(rollout("p", i, "x" * i, float(i)) for i in range(4)))
    text = page(run, check(run, gates(Gate("unique_answer_rate", min=0.9))), gates(), [])
    assert cells(text[text.index("## Answers") :], "r0") == ["r0", "4", "1.5", "1.000", "+1.00"]
    assert "by rollout, characters and score: Pearson +1.00" in text


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"scenario": "s"}', '{"scenario": "s", "releases": [{}]}', "[" * 100_000]
)
def test_a_file_that_is_no_run_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(HarnessError, match=r"run\.json|a release came without"):
        from_file(tmp_path / "run.json")


@pytest.mark.parametrize(
    "wrong", [{"created_at": 10**400}, {"created_at": None}, {"evaluations": 5}, {"alarms": ["accuracy"]}]
)
def test_a_release_that_no_page_can_be_written_of_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: Json
) -> None:
    entry = release(1, accuracy(0.6, 0.5, 0.7)) | wrong
    (tmp_path / "run.json").write_text(json.dumps({"scenario": "sums", "releases": [entry]}))
    assert main(["report", str(tmp_path / "run.json"), "--out", str(tmp_path / "out")]) == 1
    assert f"r1: {next(iter(wrong))} must be" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_not_taken_for_a_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "no-such-run.json"]) == 1
    assert "there is no file no-such-run.json" in capsys.readouterr().err
