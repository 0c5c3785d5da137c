"""What stays on disk, what is pruned, and what a killed service left there."""

import asyncio
import dataclasses
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reef.config import Config, load
from reef.errors import LoadFailedError
from reef.ledger import releases, scenarios
from reef.ledger.ledger import Ledger
from reef.storage import Storage
from reef.types import Operation, Probe, Published, Release

SCENARIO = "arithmetic"


class Run:
    """A run directory with a real ledger, real directories, and a chain that begins with the base."""

    def __init__(self, directory: Path, base: Path, *flags: str) -> None:
        self.config: Config = load(None, ["--reef.run-dir", str(directory), *flags], {})
        directory.mkdir(parents=True, exist_ok=True)
        self.ledger = Ledger.open(self.config.ledger_url)
        published = Published(f"{self.ledger.run_id}-000000", str(base), "sha256:base", 1, None)
        self.storage = Storage(self.config, self.ledger, published)
        if self.read(scenarios.find, SCENARIO) is None:
            self.write(scenarios.create, SCENARIO, "grpo", 1.0)
            self.write(releases.append, self.storage.base_release(SCENARIO))

    def read(self, op: Callable[..., Any], *args: Any) -> Any:
        return asyncio.run(self.ledger.read(op, *args))

    def write(self, op: Callable[..., Any], *args: Any) -> Any:
        return asyncio.run(self.ledger.write(op, *args))

    def publish(self, number: int) -> Path:
        """The directory of a release as `training/publish.py` writes it."""
        path = self.storage.releases_dir / self.storage.release_id(number)
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"w" * 100)
        entry = {"sha256": "", "size_bytes": 100}
        values = {"release_id": path.name, "content_id": f"sha256:{number}", "size_bytes": 100, "probe": None}
        (path / "manifest.json").write_text(json.dumps({**values, "files": {"model.safetensors": entry}}))
        return path

    def checkpoint(self, number: int, complete: bool = True) -> Path:
        path = self.storage.checkpoint_path(self.storage.release_id(number))
        path.mkdir()
        (path / "weights").write_bytes(b"c" * 50)
        if complete:
            (path / "COMPLETE").touch()
        self.write(releases.set_checkpoint, path.name, str(path))
        return path

    def grow(self, count: int) -> list[Release]:
        """Releases 1..count, published and appended."""
        for number in range(1, count + 1):
            path = self.publish(number)
            base = self.storage.base_release(SCENARIO)
            self.write(
                releases.append,
                dataclasses.replace(
                    base,
                    id=path.name,
                    number=number,
                    parent=self.storage.release_id(number - 1),
                    operation=Operation.TRAIN,
                    policy_version=number,
                    content_id=f"sha256:{number}",
                    path=str(path),
                ),
            )
        found: list[Release] = self.read(releases.chain, SCENARIO)
        return found

    def prune(self) -> None:
        asyncio.run(self.storage.prune(SCENARIO))

    def clean(self, scenario: str | None = SCENARIO) -> None:
        asyncio.run(self.storage.clean(scenario))

    def weights_on_disk(self) -> list[int]:
        return sorted(int(path.name[-6:]) for path in self.storage.releases_dir.iterdir())

    def checkpoints_on_disk(self) -> list[int]:
        return sorted(int(path.name[-6:]) for path in self.config.checkpoints_dir.iterdir())

    def restorable(self) -> list[int]:
        return sorted(release.number for release in self.read(releases.restorable, SCENARIO))


OpenRun = Callable[..., Run]


@pytest.fixture
def open_run(tmp_path: Path) -> Iterator[OpenRun]:
    """Opens run directories below `tmp_path`, and closes their ledgers."""
    opened: list[Run] = []
    base = tmp_path / "base"
    base.mkdir()
    (base / "model.safetensors").write_bytes(b"b")

    def open_one(name: str = "run", *flags: str) -> Run:
        opened.append(Run(tmp_path / name, base, *flags))
        return opened[-1]

    yield open_one
    for run in opened:
        run.ledger.close()


def test_pruning_keeps_the_newest_weights_and_the_base(open_run: OpenRun) -> None:
    run = open_run("run", "--storage.keep", "3")
    run.grow(6)
    run.prune()
    assert run.weights_on_disk() == [4, 5, 6]
    assert run.restorable() == [0, 4, 5, 6]
    assert Path(run.storage.base.path, "model.safetensors").exists()
    run.prune()
    assert run.weights_on_disk() == [4, 5, 6]


def test_pruning_keeps_the_weights_of_kept_checkpoints_and_forgets_older_checkpoints(open_run: OpenRun) -> None:
    run = open_run("run", "--storage.keep", "2", "--storage.keep-checkpoints", "2")
    run.grow(8)
    for number in (1, 3, 5):
        run.checkpoint(number)
    run.prune()
    assert run.checkpoints_on_disk() == [3, 5]
    assert [release.number for release in run.read(releases.checkpoints, SCENARIO)] == [5, 3]
    assert run.weights_on_disk() == run.restorable()[1:] == [3, 5, 7, 8]


def test_keeping_one_keeps_the_head(open_run: OpenRun) -> None:
    run = open_run("run", "--storage.keep", "1", "--storage.keep-checkpoints", "1")
    run.grow(3)
    run.prune()
    assert run.weights_on_disk() == [3]
    assert run.storage.published(run.read(releases.head, SCENARIO)).content_id == "sha256:3"


def test_the_base_is_where_it_came_from_with_the_probe_that_the_trainer_gave(open_run: OpenRun) -> None:
    run = open_run()
    base = run.read(releases.head, SCENARIO)
    assert run.storage.published(base).probe is None
    run.storage.set_base_probe(Probe((1, 2), (-0.5,)))
    assert run.storage.published(base) == dataclasses.replace(run.storage.base, probe=Probe((1, 2), (-0.5,)))


def test_a_release_whose_directory_is_not_whole_is_not_loaded(open_run: OpenRun) -> None:
    run = open_run()
    head = run.grow(1)[0]
    Path(head.path, "model.safetensors").write_bytes(b"w" * 40)
    with pytest.raises(LoadFailedError, match="has 40 bytes, expected 100"):
        run.storage.published(head)
    Path(head.path, "manifest.json").unlink()
    with pytest.raises(LoadFailedError, match="never finished"):
        run.storage.published(head)


def test_cleaning_removes_what_no_release_names_and_what_was_half_written(open_run: OpenRun) -> None:
    run = open_run()
    run.grow(2)
    run.checkpoint(2)
    run.publish(3)  # published, and killed before the commit
    ids = [run.storage.release_id(number) for number in (1, 3, 4)]
    for parent in (run.storage.releases_dir, run.config.checkpoints_dir):
        (parent / f".{ids[2]}.partial").mkdir()
        (parent / f".{ids[2]}.partial" / "model.safetensors").write_bytes(b"half")
        (parent / f".{ids[0]}.old").mkdir()
    run.storage.checkpoint_path(ids[0]).mkdir()  # saved, and killed before the ledger knew
    run.storage.replays_dir.mkdir()
    run.clean()
    assert run.weights_on_disk() == [1, 2]
    assert run.checkpoints_on_disk() == [2]
    assert not run.storage.replays_dir.exists()


def test_a_crash_between_forgetting_and_removing_leaves_only_what_cleaning_removes(open_run: OpenRun) -> None:
    run = open_run()
    chain = run.grow(3)
    run.checkpoint(1)
    run.checkpoint(2)
    run.write(releases.set_checkpoint, run.storage.release_id(1), None)
    run.write(releases.forget_weights, [chain[2].id])
    assert run.weights_on_disk() == [1, 2, 3]
    run.clean()
    assert run.weights_on_disk() == run.restorable()[1:] == [2, 3]
    assert run.checkpoints_on_disk() == [2]
    run.clean()
    assert run.weights_on_disk() == [2, 3]


def test_cleaning_before_any_scenario_trains_removes_every_left_over(open_run: OpenRun) -> None:
    run = open_run()
    run.publish(1)
    run.clean(None)
    assert run.weights_on_disk() == []


def test_cleaning_touches_nothing_that_is_not_ours(open_run: OpenRun, tmp_path: Path) -> None:
    shared = tmp_path / "models"
    one = open_run("one", "--storage.releases-dir", str(shared))
    one.grow(2)
    (shared / "Qwen3-0.6B").mkdir()
    (shared / "notes.txt").write_text("mine")
    other = open_run("other", "--storage.releases-dir", str(shared))
    assert one.ledger.run_id != other.ledger.run_id  # one in 65,536 runs of this test may see them equal
    other.publish(1)
    other.clean()
    found = {path.name for path in shared.iterdir()}
    assert found == {one.storage.release_id(1), one.storage.release_id(2), "Qwen3-0.6B", "notes.txt"}


def test_a_run_directory_that_was_moved_keeps_its_weights_and_checkpoints(open_run: OpenRun, tmp_path: Path) -> None:
    run = open_run("run", "--storage.keep", "2")
    run.grow(3)
    run.checkpoint(2)
    run.ledger.close()
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    moved = open_run("elsewhere", "--storage.keep", "2")
    moved.clean()
    assert moved.weights_on_disk() == [1, 2, 3]
    head = moved.storage.published(moved.read(releases.head, SCENARIO))
    assert (head.content_id, Path(head.path).parent) == ("sha256:3", tmp_path / "elsewhere" / "releases")
    (newest,) = moved.read(releases.checkpoints, SCENARIO)
    assert moved.storage.checkpoint_of(newest).parent == tmp_path / "elsewhere" / "checkpoints"
    moved.prune()
    assert moved.weights_on_disk() == [2, 3]


def test_releases_published_before_the_releases_directory_was_changed_can_still_be_loaded(
    open_run: OpenRun, tmp_path: Path
) -> None:
    run = open_run()
    head = run.grow(1)[0]
    run.ledger.close()
    changed = open_run("run", "--storage.releases-dir", str(tmp_path / "big disk"))
    changed.clean()
    assert changed.storage.published(head).path == head.path


def test_disk_use_is_counted_in_bytes_by_kind(open_run: OpenRun) -> None:
    run = open_run()
    run.grow(2)
    run.checkpoint(1)
    manifests = sum(path.stat().st_size for path in run.storage.releases_dir.rglob("manifest.json"))
    use = run.storage.disk_use()
    assert use["releases_bytes"] == 200 + manifests
    assert use["checkpoints_bytes"] == 50
    assert use["free_bytes"] > 0


def test_disk_use_can_be_asked_while_releases_come_and_go(open_run: OpenRun) -> None:
    run = open_run()
    done = threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            run.storage.remove(run.publish(1))

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(300):
            assert run.storage.disk_use()["releases_bytes"] >= 0
    finally:
        done.set()
        thread.join()


def test_weights_that_the_ledger_does_not_name_are_not_served(open_run: OpenRun) -> None:
    run = open_run()
    second, first, _base = run.grow(2)
    assert run.storage.published(second).release_id == second.id
    other = (run.storage.releases_dir / first.id / "manifest.json").read_text()
    (run.storage.releases_dir / second.id / "manifest.json").write_text(other)
    with pytest.raises(LoadFailedError, match=f"holds {first.id} with sha256:1, the ledger names {second.id}"):
        run.storage.published(second)


def test_a_byte_that_changed_on_disk_is_found(open_run: OpenRun) -> None:
    run = open_run()
    newest = run.grow(1)[0]
    with pytest.raises(LoadFailedError, match=r"model\.safetensors has sha256"):
        run.storage.check_bytes(newest)
