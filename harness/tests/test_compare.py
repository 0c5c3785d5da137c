"""Two evaluations of the same items, compared item by item."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reef_harness.cli import main
from reef_harness.evaluation.differences import tango

Evaluate = Callable[..., Path]


@pytest.fixture
def run(service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evaluate:
    """Evaluate items 0 … count-1 (the prompt is the number); ``says(n, sample)`` tells whether an answer is right."""
    monkeypatch.delenv("REEF_API_KEY", raising=False)

    def evaluate(
        name: str, says: Callable[[int, int], bool], *more: str, count: int = 20, items: str = "items.jsonl"
    ) -> Path:
        asked: dict[str, int] = {}

        def answer(prompt: str, index: int) -> str:
            asked[prompt] = asked.get(prompt, -1) + 1
            return f"<final>{prompt if says(int(prompt), asked[prompt]) else -1}</final>"

        service.answer = answer
        rows = [
            {"id": f"i{n}", "prompt": str(n), "gold": str(n), "slices": {"parity": "even" if n % 2 == 0 else "odd"}}
            for n in range(count)
        ]
        (tmp_path / items).write_text("".join(json.dumps(row) + "\n" for row in rows))
        arguments = ["--url", service.url, "--items", str(tmp_path / items), "--grader", "final", "--no-figures"]
        assert main(["evaluate", *arguments, "--out", str(tmp_path / name), "--concurrency", "1", *more]) == 0
        return tmp_path / name

    return evaluate


def compared(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "compare.json").read_text())
    return found


def test_one_answer_each_is_compared_item_by_item(
    run: Evaluate, service: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before items 0 … 9 are right, after 1 … 18: 1 is lost, 9 are won, the even ones gain 0.4, the odd ones too."""
    before = run("before", lambda n, sample: n < 10)
    service.release_names.append("r1")
    after = run("after", lambda n, sample: 1 <= n <= 18)
    assert main(["compare", str(before), str(after), "--no-figures"]) == 0
    [found] = compared(after / "compare")["sets"]
    assert (found["first"]["value"], found["second"]["value"]) == (0.5, 0.9)
    assert found["mcnemar"] == {"only_first": 1, "only_second": 9, "p": 22 / 1024}
    assert found["difference"]["value"] == pytest.approx(0.4)
    assert 0.1 < found["difference"]["low"] < 0.4 < found["difference"]["high"] < 0.7
    slices = {each["slice"]: (each["value"], each["items"]) for each in found["slices"]}
    assert slices == {"parity = even": (pytest.approx(0.4), 10), "parity = odd": (pytest.approx(0.4), 10)}
    said = capsys.readouterr().out
    assert "# release r0 (first) and release r1 (second)" in said
    assert "first 1, second 9" in said and "0.021" in said and "10 (small)" in said


def test_several_answers_each_are_compared_by_mean_and_by_more_than_half(
    run: Evaluate, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before 1 of 4 is right, after 3 of 4: +0.5 for each item, and 20 items more are right by more than half."""
    before = run("before", lambda n, sample: sample < 1, "--samples", "4")
    after = run("after", lambda n, sample: sample < 3, "--samples", "4")
    assert main(["compare", str(before), str(after), "--no-figures"]) == 0
    [found] = compared(after / "compare")["sets"]
    assert found["difference"]["value"] == 0.5
    assert (found["difference"]["low"], found["difference"]["high"]) == pytest.approx(tango(10, 0, 20))
    assert found["difference"]["high"] - found["difference"]["low"] > 0.3  # though all differ by the same
    assert found["mcnemar"] == {"only_first": 0, "only_second": 20, "p": 2 / 2**20}
    assert found["pass_at_k"]["first"]["2"]["value"] == pytest.approx(0.5)
    assert found["pass_at_k"]["second"]["2"]["value"] == 1.0
    said = capsys.readouterr().out
    assert "an item is right where more than half of its judged answers are" in said
    assert "no interval" not in said.lower()
    assert "Both sides are of one release" in said


def test_both_curves_are_in_one_figure(run: Evaluate, tmp_path: Path) -> None:
    before = run("before", lambda n, sample: (n + sample) % 4 == 0, "--samples", "4")
    after = run("after", lambda n, sample: (n + sample) % 2 == 0, "--samples", "4")
    assert main(["compare", str(before), str(after), "--out", str(tmp_path / "c")]) == 0
    assert (tmp_path / "c" / "pass-at-k-in-domain.png").read_bytes().startswith(b"\x89PNG")


def test_the_figure_and_the_table_speak_of_first_and_second_and_name_the_grader(
    run: Evaluate, service: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plot = pytest.importorskip("reef_harness.evaluation.plot")
    before = run("before", lambda n, sample: sample == 0, "--samples", "2")
    service.release_names.append("r1")
    after = run("after", lambda n, sample: True, "--samples", "2")
    drawn = []
    monkeypatch.setattr(plot, "pass_at_k_curves", lambda path, curves, title: drawn.append((list(curves), title)))
    capsys.readouterr()
    assert main(["compare", str(before), str(after)]) == 0
    labels = ["release r0 (first)", "release r1 (second)"]
    assert drawn == [(labels, "pass@k of in-domain, first and second\ngraded by final@1")]
    said = capsys.readouterr().out
    assert f"# {' and '.join(labels)}" in said and "Mean scores of the same items, graded by final@1;" in said


def test_the_same_seed_gives_the_same_interval(run: Evaluate, tmp_path: Path) -> None:
    before, after = run("before", lambda n, sample: n % 3 == 0), run("after", lambda n, sample: n % 2 == 0)
    for out, seed in (("a", "5"), ("b", "5"), ("c", "6")):
        more = ["--seed", seed, "--out", str(tmp_path / out), "--no-figures"]
        assert main(["compare", str(before), str(after), *more]) == 0
    one, same, other = (compared(tmp_path / out)["sets"][0] for out in "abc")
    assert one == same
    assert one["difference"]["value"] == other["difference"]["value"]


def test_other_items_are_refused_or_left_out_and_said(run: Evaluate, capsys: pytest.CaptureFixture[str]) -> None:
    before = run("before", lambda n, sample: True, count=20)
    after = run("after", lambda n, sample: n < 15, count=30, items="more.jsonl")
    assert main(["compare", str(before), str(after), "--no-figures"]) == 1
    said = capsys.readouterr().err
    assert "in-domain: 20 items are the same in both, of 20 and 30; --intersection compares" in said
    assert main(["compare", str(before), str(after), "--intersection", "--no-figures"]) == 0
    [found] = compared(after / "compare")["sets"]
    assert (found["items"], found["difference"]["value"]) == (20, pytest.approx(-0.25))
    assert "20 items are the same in both, of 20 and 30; the others are left out." in capsys.readouterr().out


def test_changed_items_and_sets_or_graders_that_only_one_has_are_refused(
    run: Evaluate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run("before", lambda n, sample: True)
    other = run("other", lambda n, sample: True, count=3, items="few.jsonl")
    assert main(["compare", str(before), str(before), "--grader", "boxed"]) == 1
    assert "was not graded by boxed" in capsys.readouterr().err
    renamed = json.loads((other / "run.json").read_text())
    renamed["sets"]["challenge"] = renamed["sets"].pop("in-domain")
    (other / "run.json").write_text(json.dumps(renamed))
    (other / "in-domain").rename(other / "challenge")
    assert main(["compare", str(before), str(other)]) == 1
    assert "no set is in both: in-domain in" in capsys.readouterr().err
    changed = '{"id": "x", "prompt": "x", "gold": "x"}\n'
    (before / "in-domain" / "items.jsonl").write_text(changed)
    assert main(["compare", str(before), str(before), "--no-figures"]) == 0  # the file that was copied is intact
    capsys.readouterr()
    (tmp_path / "items.jsonl").write_text(changed)
    assert main(["compare", str(before), str(before)]) == 1
    assert "were changed since the answers" in capsys.readouterr().err
