"""The whole of an evaluation with a real service, which records and does not train: the starter model answers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from reef_harness.cli import main

from recipes.arithmetic.export_items import SETS
from recipes.arithmetic.export_items import main as export
from recipes.arithmetic.service import ROOT, running_service

pytestmark = pytest.mark.slow

Json = dict[str, Any]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The URL of a service and the file with its key."""
    run_dir = tmp_path_factory.mktemp("service") / "run"
    with running_service(ROOT / "serve.yaml", run_dir, ["--training.backend", "none"]) as url:
        yield url, run_dir / "api-key"


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("items")
    export(["--out", str(path), "--count", "40"])
    return path


def evaluate(service: tuple[str, Path], items: Path, out: Path, *more: str) -> Json:
    url, key_file = service
    arguments = ["--url", url, "--key-file", str(key_file), "--items", str(items / "in-domain.jsonl"), "--no-figures"]
    sets = [f"--set={name}={items / name}.jsonl" for name in SETS if name != "in-domain"]
    more = (*sets, "--grader", "final", "--max-tokens", "96", "--seed", "1000", *more)
    assert main(["evaluate", *arguments, *more, "--out", str(out)]) == 0
    summary: Json = json.loads((out / "summary.json").read_text())
    return summary


def test_three_sets_are_measured_apart_and_the_result_stands_on_the_release(
    service: tuple[str, Path], items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    summary = evaluate(service, items, out, "--samples", "4", "--greedy", "--logprobs")
    [release] = summary["releases"]
    series = {name: found["series"] for name, found in summary["sets"].items()}
    assert list(series) == list(SETS)
    for sampled, greedy in series.values():
        assert sampled["outcomes"]["correct"] + sampled["outcomes"]["incorrect"] == 160
        assert greedy["outcomes"]["failed"] == 0
        assert sampled["format_valid"]["value"] > 0.95
        assert sampled["pass_at_k"]["4"]["value"] >= sampled["pass_at_k"]["1"]["value"] == sampled["accuracy"]["value"]
        borrow = {each["value"]: each["accuracy"]["value"] for each in greedy["slices"]}
        assert borrow["no"] > 0.8 > 0.3 > borrow["yes"]  # the starter model forgets the borrow (its card says so)
    assert series["retention"][0]["accuracy"]["value"] > series["challenge"][0]["accuracy"]["value"]

    again = evaluate(service, items, tmp_path / "again", "--samples", "4", "--release", release, "--store")
    assert again["releases"] == {release: 3 * 160}
    text = {key: text for key, text in texts(out).items() if key[1] > 0}
    same = sum(text[key] == other for key, other in texts(tmp_path / "again").items())
    assert same >= 0.98 * len(text)  # the same seeds to the same weights: equal but for float rounding

    url, key_file = service
    key = {"authorization": f"Bearer {key_file.read_text().strip()}"}
    shown = httpx.get(f"{url}/reef/scenarios/arithmetic/releases", headers=key, trust_env=False).json()
    [stored] = shown["releases"][0]["evaluations"]
    assert stored["accuracy"] == again["sets"]["in-domain"]["series"][0]["accuracy"]["value"]
    assert stored["metrics"]["challenge_pass_at_4"]["items"] == 40

    capsys.readouterr()
    assert main(["compare", str(out), str(tmp_path / "again"), "--no-figures"]) == 0
    assert "Both sides are of one release" in capsys.readouterr().out
    assert main(["calibrate", str(out), "--equal-counts"]) == 0
    assert "logprob on challenge, sampled at 1, held against final@1" in capsys.readouterr().out


def texts(out: Path) -> dict[tuple[str, float, int], str]:
    rows = [json.loads(line) for file in out.glob("*/responses.jsonl") for line in file.read_text().splitlines()]
    return {(row["item"], row["temperature"], row["sample"]): row["text"] for row in rows}


@pytest.mark.parametrize("name", SETS)
def test_no_held_out_problem_is_among_those_that_are_trained_on(items: Path, name: str) -> None:
    assert main(["contamination", str(items / "train.jsonl"), str(items / f"{name}.jsonl")]) == 0
