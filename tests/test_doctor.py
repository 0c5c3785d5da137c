"""`reef doctor --ledger`: the ledger and the directories that it names, as the command shows them."""

import asyncio
import hashlib
import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reef import checks, cli
from reef.config import load
from reef.ledger import releases, scenarios
from reef.ledger.ledger import Ledger
from reef.machine import check_disks, visible_gpus
from reef.training.manifest import content_id
from reef.types import Operation, Release

properties = torch.cuda.get_device_properties
SCENARIO = "arithmetic"
SHA256 = hashlib.sha256(b"w" * 100).hexdigest()
CONTENT = content_id({"model.safetensors": SHA256})


class Run:
    """A run directory whose ledger has a base and two releases, with weights on disk and a checkpoint of the second."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory = directory
        self.config = load(None, ["--reef.run-dir", str(directory)], {})
        self.ledger = Ledger.open(self.config.ledger_url)
        self.names = [f"{self.ledger.run_id}-{number:06d}" for number in range(3)]
        self.write(scenarios.create, SCENARIO, "grpo", 1.0)
        for number, name in enumerate(self.names):
            self.write(releases.append, self.release(number, name))
            if number:
                self.publish(number, name)
        self.checkpoint = self.config.checkpoints_dir / self.names[2]
        self.checkpoint.mkdir(parents=True)
        (self.checkpoint / "COMPLETE").write_text('{"steps_done": 0, "files": {}}')
        self.write(releases.set_checkpoint, self.names[2], str(self.checkpoint))

    def write(self, op: Callable[..., Any], *args: Any) -> None:
        asyncio.run(self.ledger.write(op, *args))

    def release(self, number: int, name: str) -> Release:
        """The base, and after it links that repeat it, since they need no batches."""
        return Release(
            id=name,
            scenario=SCENARIO,
            number=number,
            parent=self.names[number - 1] if number else None,
            content_id=CONTENT,
            operation=Operation.PROMOTE if number else Operation.BASE,
            policy_version=0,
            step=0,
            batch_id=None,
            path=str(self.weights(name)),
            checkpoint=None,
            restorable=True,
            created_at=1.0,
            source=self.names[0] if number else None,
        )

    def publish(self, number: int, name: str) -> None:
        path = self.weights(name)
        path.mkdir(parents=True)
        (path / "model.safetensors").write_bytes(b"w" * 100)
        files = {"model.safetensors": {"sha256": SHA256, "size_bytes": 100}}
        values = {"release_id": name, "content_id": CONTENT, "size_bytes": 100, "probe": None, "files": files}
        (path / "manifest.json").write_text(json.dumps(values))

    def weights(self, name: str) -> Path:
        return self.config.releases_dir / name


@pytest.fixture
def run(tmp_path: Path) -> Any:
    made = Run(tmp_path / "run")
    yield made
    made.ledger.close()


@pytest.fixture
def doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[], tuple[int, list[str], str]]:
    """`reef doctor --ledger` on the run directory `run`: exit status, lines, standard error."""

    def command() -> tuple[int, list[str], str]:
        status = cli.main(["doctor", "--ledger", "--reef.run-dir", str(tmp_path / "run")])
        output, errors = capsys.readouterr()
        return status, output.splitlines(), errors

    return command


def test_nothing_is_wrong_with_a_ledger_that_a_service_has_open(run: Run, doctor: Any) -> None:
    assert doctor() == (0, ["0 receipts, 0 reports, 0 batches, 3 releases: 0 findings"], "")
    assert run.ledger.epoch == 1


def test_what_is_wrong_is_a_line_each_and_the_exit_status(run: Run, doctor: Any) -> None:
    with sqlite3.connect(run.directory / "ledger.db") as connection:
        connection.execute("UPDATE releases SET number = 7 WHERE number = 2")
    connection.close()
    status, lines, _ = doctor()
    assert status == 1
    assert lines == [
        f"release {run.names[2]}: its number is 7, expected 2",
        "0 receipts, 0 reports, 0 batches, 3 releases: 1 findings",
    ]


def test_weights_and_checkpoints_that_are_named_must_be_there_and_whole(run: Run, doctor: Any) -> None:
    (run.weights(run.names[1]) / "model.safetensors").write_bytes(b"w" * 99)
    (run.weights(run.names[2]) / "manifest.json").unlink()
    (run.checkpoint / "COMPLETE").unlink()
    status, lines, _ = doctor()
    assert status == 1
    assert lines == [
        f"checkpoint {run.names[2]}: checkpoint {run.checkpoint.absolute()}: no COMPLETE, so it was never finished",
        f"release {run.names[1]}: release {run.weights(run.names[1]).absolute()}: "
        "model.safetensors has 99 bytes, expected 100",
        f"release {run.names[2]}: release {run.weights(run.names[2]).absolute()}: "
        "no manifest.json, so it was never finished",
        "0 receipts, 0 reports, 0 batches, 3 releases: 3 findings",
    ]


def test_weights_of_another_release_are_named(run: Run, doctor: Any) -> None:
    manifest = run.weights(run.names[1]) / "manifest.json"
    manifest.write_text(manifest.read_text().replace(CONTENT, "sha256:other"))
    status, lines, _ = doctor()
    assert status == 1
    assert f"holds {run.names[1]} with sha256:other, the ledger names {run.names[1]} with {CONTENT}" in lines[0]


def test_a_byte_that_turned_on_the_disk_is_found(run: Run, doctor: Any) -> None:
    (run.weights(run.names[1]) / "model.safetensors").write_bytes(b"w" * 99 + b"v")
    status, lines, _ = doctor()
    assert status == 1
    assert f"expected {SHA256}" in lines[0]


def test_directories_that_nobody_names_are_listed_and_are_no_finding(run: Run, doctor: Any) -> None:
    left = run.weights(f".{run.names[2][:-1]}9.partial")
    left.mkdir()
    (run.config.releases_dir / "of-somebody-else").mkdir()
    status, lines, _ = doctor()
    assert (status, lines[:-1]) == (0, [f"left over {left}: no release names it; the next start removes it"])


def test_what_a_service_prunes_meanwhile_is_no_finding(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    look = checks._directories
    run.write(releases.forget_weights, [run.names[1]])
    late = {f"release {run.names[1]}: gone"}
    looks = iter([(late, []), look(run.config)])
    monkeypatch.setattr(checks, "_directories", lambda _config: next(looks))
    lines: list[str] = []
    assert checks.ledger(run.config, lines.append, lambda _text: None) == 0
    assert lines == ["0 receipts, 0 reports, 0 batches, 3 releases: 0 findings"]


def test_a_run_directory_without_a_ledger_is_refused(tmp_path: Path, doctor: Any) -> None:
    assert doctor() == (1, [], f"reef: there is no ledger {tmp_path}/run/ledger.db\n")
    assert not (tmp_path / "run").exists()


def test_a_terminal_is_told_how_far_it_is(run: Run, doctor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    cli._progress("receipt 500")
    status, lines, errors = doctor()
    assert (status, len(lines)) == (0, 1)
    assert errors == "\r\033[Kreceipt 500\r\033[K"


def test_the_doctor_goes_on_after_what_is_missing_and_names_all_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = tmp_path / "no model"
    words = ["--inference.model-path", str(nowhere), "--training.ray-address", "127.0.0.1:1", "--storage.url", "x"]
    status = cli.main(["doctor", "--reef.run-dir", str(tmp_path), *words])
    output, errors = capsys.readouterr()
    assert status == 2
    assert [line.split(":")[1].split(" is ")[0].strip() for line in errors.splitlines()] == [
        "inference.model-path",
        "training.ray-address",
        "storage.url",
    ]
    assert "service   http://127.0.0.1:8080" in output
    assert "GPU       none" in output


def test_what_two_checks_find_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--reef.run-dir", str(tmp_path), "--training.ray-address", "ray://head:10001"]) == 2
    assert capsys.readouterr().err.count("joins a cluster as one of its nodes") == 1


def test_the_doctor_answers_for_a_machine_that_is_not_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ["--gpus", "8", "--gpu-memory-gib", "40"]
    assert cli.main(["doctor", "--reef.run-dir", str(tmp_path), *machine]) == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    assert "GPU       0-7 with 40.0 GiB (simulated)" in output
    assert re.search(r"GPU 0: trainer rank 0 2\.\d GiB of 40\.0 GiB, 37\.\d GiB left", output)


def test_torch_is_asked_for_the_gpus_in_a_process_of_its_own() -> None:
    assert visible_gpus() == tuple(properties(index).total_memory for index in range(torch.cuda.device_count()))


def test_disks_count_what_is_there_already_and_add_up_what_shares_one(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    there, more = tmp_path / "there", tmp_path / "not" / "yet"
    there.mkdir()
    with (there / "file").open("wb") as file:
        file.truncate(2 * free)  # a hole: it counts with its length, and takes no room
    assert check_disks({there: 2 * free, more: 0}) == []
    assert check_disks({there: 2 * free + free // 3, more: free // 3}) == []
    (problem,) = check_disks({there: 3 * free, more: free})
    assert problem.startswith(f"the disk of {there} and {more} has ")
