"""What a disk, a clock or a file that fails does to a service: the outcome that the design gives, nothing half done."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from reef import cli
from reef.errors import LedgerError
from reef.ledger.audit import audit
from reef.ledger.ledger import Ledger
from reef.ledger.migrations import NEWEST
from reef.ledger.reading import open_reading
from reef.training.manifest import content_id_of
from tests.house import House

DOCTOR = "the ledger is damaged, `reef doctor --ledger` says how far"
Service = Any  # tests/conftest.py


@pytest.fixture
def reef_command(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str]]]:
    """`reef_command("doctor", ...)` in this process, its logging undone after: the exit status, and what it printed."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def run(*words: str) -> tuple[int, str]:
        status = cli.main(words)
        output, errors = capsys.readouterr()
        return status, output + errors

    yield run
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def break_leaf(ledger: Path, table: str, text: str) -> None:
    """Overwrite the page of `table` in which the row with `text` lies."""
    with contextlib.closing(sqlite3.connect(ledger)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # into the file itself
        (size,) = connection.execute("PRAGMA page_size").fetchone()
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", [table]).fetchone()
    pages = ledger.read_bytes()
    holding = [at for at in range(0, len(pages), size) if pages[at] == 0x0D and text.encode() in pages[at : at + size]]
    of_root = pages[(root - 1) * size : root * size]
    numbers = [at for at in holding if (at // size + 1).to_bytes(4) in of_root or at == (root - 1) * size]
    with ledger.open("r+b") as file:
        file.seek(numbers[0])
        file.write(b"\xff" * size)


# --- a disk -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A directory in which nothing can be written, not by root either."""
    directory = tmp_path / "disk"
    directory.mkdir(mode=0o555)
    mounted = False
    if os.geteuid() == 0:
        command = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(directory)]
        mounted = subprocess.run(command, capture_output=True).returncode == 0
        if not mounted:
            pytest.skip("root writes everywhere, and may not mount here")
    yield directory
    if mounted:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.mark.parametrize("name", [".", "run"])
def test_a_run_directory_that_cannot_be_written_is_named_before_anything_starts(
    read_only: Path, reef_command: Any, starter: Path, name: str
) -> None:
    settings = ("--reef.run-dir", str(read_only / name), "--inference.model-path", str(starter))
    status, said = reef_command("serve", *settings)
    assert status == 2
    assert said.startswith(f"reef: reef.run-dir: cannot write {read_only / name}")
    assert list(read_only.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "says"),
    [("logs", "reef.run-dir: cannot write {}: File exists"), ("owner.lock", "cannot lock {}: Is a directory")],
)
def test_what_lies_in_the_way_in_a_run_directory_is_named(
    tmp_path: Path, reef_command: Any, starter: Path, name: str, says: str
) -> None:
    in_the_way = tmp_path / name
    in_the_way.mkdir() if name == "owner.lock" else in_the_way.touch()
    status, said = reef_command("serve", "--reef.run-dir", str(tmp_path), "--inference.model-path", str(starter))
    assert status in (1, 2)
    assert said == f"reef: {says.format(in_the_way)}\n"


class Disk:
    """The run directory of a service as `tests/disk.c` lets it be."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    @contextlib.contextmanager
    def being(self, state: str) -> Iterator[None]:
        """`slow`, or `read-only`, meanwhile."""
        marker = self._run_dir.with_name(f"{self._run_dir.name}.{state}")
        marker.touch()
        try:
            yield
        finally:
            marker.unlink()

    def syncs(self) -> bool:
        """Whether a sync has begun since it is slow."""
        return self._run_dir.with_name(f"{self._run_dir.name}.syncing").exists()


@pytest.fixture(scope="module")
def on_a_disk(make_service: Callable[..., Service], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service that only records, with its `.disk`."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("disk") / "disk.so"
    source = Path(__file__).with_name("disk.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    service = make_service("--training.backend", "none")
    service.disk = Disk(service.run_dir)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(library))
        patch.setenv("REEF_DISK", str(service.run_dir))
        service.start()
    yield service
    service.end()


def report(service: Service, receipt: str, name: str) -> Any:
    body = {"agent_record_id": name, "references": [receipt], "score": 1}
    return service.post("/reef/report", body)


@pytest.mark.slow
def test_a_sync_that_takes_long_holds_up_what_waits_for_it_and_nothing_else(on_a_disk: Service) -> None:
    receipt = on_a_disk.chat().headers["x-reef-agent-record-id"]
    with ThreadPoolExecutor(1) as threads:
        with on_a_disk.disk.being("slow"):
            sending = threads.submit(report, on_a_disk, receipt, "slow")
            until(on_a_disk.disk.syncs, "a sync")
            for _ in range(20):
                assert on_a_disk.get("/healthz").status_code == 200
                assert on_a_disk.get(f"/reef/receipts/{receipt}").status_code == 200
            assert not sending.done()  # acknowledged only once it is on the disk
        assert sending.result(60).status_code == 200


@pytest.mark.slow
def test_a_run_directory_that_becomes_read_only_is_503_until_it_can_be_written_again(on_a_disk: Service) -> None:
    receipt = on_a_disk.chat().headers["x-reef-agent-record-id"]
    with on_a_disk.disk.being("read-only"):
        for refused in (report(on_a_disk, receipt, "refused"), on_a_disk.chat()):
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
            assert int(refused.headers["retry-after"]) >= 1
        assert on_a_disk.get("/healthz").status_code == 200
        assert on_a_disk.receipt(receipt)["reports"] == []
        assert "the ledger cannot be used now" in on_a_disk.status()["ledger"]["error"]
    assert on_a_disk.get("/reef/reports/refused").status_code == 404
    assert report(on_a_disk, receipt, "refused").status_code == 200
    assert on_a_disk.chat().status_code == 200
    assert on_a_disk.status()["ledger"]["error"] is None
    with open_reading(f"sqlite:///{on_a_disk.run_dir / 'ledger.db'}") as connection:
        assert list(audit(connection)) == []


# --- a clock ----------------------------------------------------------------------------------------------------------


class Clock:
    """The wall clock, set forward and back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offset_s = 0.0
        right = time.time
        monkeypatch.setattr(time, "time", lambda: right() + self.offset_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_clock_that_is_set_back_changes_no_order_no_staleness_and_no_audit(tmp_path: Path, clock: Clock) -> None:
    house = House(tmp_path / "run", "--recipe.config.max-staleness", "0")

    async def live() -> None:
        await house.open()
        house.run()
        names = []
        for back_s in (0, 3600, 1800, 7200):  # between the reports of a batch and the next ones
            clock.offset_s = -back_s
            names += await house.grade_and_wait()
        first, *_ = await house.grade((0.0,))  # a group that is open while the clock is set back
        await house.waits()
        clock.offset_s -= 3600
        house.dispatcher.notify()
        await house.waits()
        assert await house.state(first) == ("pending", None)
        chain = await house.chain()
        assert [release.number for release in chain] == [0, 1, 2, 3, 4]
        assert chain[2].created_at < chain[1].created_at
        await house.trained_once(names)
        await house.stop()

        await house.open()  # and a start finds the same head
        assert house.trainer.state == [1, 2, 3, 4]
        house.run()
        await house.stop()

    asyncio.run(live())
    with open_reading(house.config.ledger_url) as connection:
        assert list(audit(connection)) == []


def test_a_clock_that_is_set_forward_closes_a_group_early_and_says_so(tmp_path: Path, clock: Clock) -> None:
    house = House(tmp_path / "run", "--recipe.config.group-deadline-s", "60")

    async def live() -> None:
        await house.open()
        house.run()
        (early,) = await house.grade((0.0,))
        await house.waits()
        clock.offset_s = 3600
        house.dispatcher.notify()
        await house.waits()
        state, reason = await house.state(early)
        assert (state, bool(reason)) == ("dropped", True)
        names = await house.grade_and_wait()
        clock.offset_s = 0  # it was a mistake
        names += await house.grade_and_wait()
        await house.trained_once(names)
        await house.stop()

    asyncio.run(live())
    with open_reading(house.config.ledger_url) as connection:
        assert list(audit(connection)) == []


# --- a file -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "says"),
    [("output_ids", "receipt"), ("logprobs", "receipt"), ("body", "the body of request")],
)
def test_a_truncated_value_is_500_naming_its_receipt_and_costs_no_other(
    recorder: Service, column: str, says: str
) -> None:
    headers = {"x-reef-scenario": f"truncated-{column}"}
    lost, whole = (recorder.chat(headers=headers) for _ in range(2))
    lost, whole = (answer.headers["x-reef-agent-record-id"] for answer in (lost, whole))
    row = recorder.receipt(lost)
    table, id = ("requests", row["request_id"]) if column == "body" else ("receipts", lost)
    with contextlib.closing(sqlite3.connect(recorder.run_dir / "ledger.db", timeout=60)) as connection, connection:
        connection.execute(
            f"UPDATE {table} SET {column} = substr({column}, 1, length({column}) - 3) WHERE id = ?", [id]
        )
    refused = recorder.get(f"/reef/receipts/{lost}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (500, "receipt_damaged")
    assert f"{says} {id} is damaged" in refused.json()["error"]["message"]
    assert "reef doctor --ledger" in refused.json()["error"]["message"]
    told = report(recorder, lost, f"on-{lost}")  # what it needs of the receipt is there: the loop drops it, `damaged`
    assert told.status_code == 200
    assert recorder.receipt(whole)["agent_record_id"] == whole
    assert report(recorder, whole, f"on-{whole}").status_code == 200
    with open_reading(f"sqlite:///{recorder.run_dir / 'ledger.db'}") as connection:
        assert [finding.subject for finding in audit(connection) if finding.subject == id] == [id]


def test_a_broken_page_stops_the_loop_with_the_reason(tmp_path: Path) -> None:
    house = House(tmp_path / "run")

    async def live() -> None:
        await house.open()
        names = await house.grade()
        break_leaf(house.config.reef.run_dir / "ledger.db", "reports", names[0])
        house.ledger.close()
        house.ledger = Ledger.open(house.config.ledger_url)  # no page is in its cache
        house.dispatcher._ledger.ledger = house.ledger  # type: ignore[attr-defined]
        house.run()
        with pytest.raises(LedgerError, match=DOCTOR) as broken:
            await house.loop
        assert broken.value.code == "damaged"
        assert house.dispatcher.progress.phase == "stopped"
        await house.dispatcher.close()
        assert not house.trainer.running
        house.ledger.close()

    asyncio.run(live())


@pytest.mark.slow
def test_a_broken_page_is_500_for_what_lies_in_it_and_the_rest_goes_on(
    make_service: Callable[..., Service], reef_command: Any
) -> None:
    service = make_service("--training.backend", "none").start()
    receipts = [service.chat(f"Start at 9. Add {number}.").headers["x-reef-agent-record-id"] for number in range(60)]
    break_leaf(service.run_dir / "ledger.db", "receipts", receipts[0])
    assert service.chat().status_code == 200  # and no reader trusts its cache any more
    for refused in (service.get(f"/reef/receipts/{receipts[0]}"), report(service, receipts[0], "r")):
        assert (refused.status_code, refused.json()["error"]["code"]) == (500, "damaged")
        assert DOCTOR in refused.json()["error"]["message"]
    assert service.receipt(receipts[-1])["agent_record_id"] == receipts[-1]
    assert report(service, receipts[-1], "r").status_code == 200
    assert service.get("/reef/status").status_code == 200
    status, said = reef_command("doctor", "--ledger", "--reef.run-dir", str(service.run_dir))
    assert status == 1
    assert "database sqlite: " in said
    service.end()


@pytest.mark.parametrize("command", [("serve",), ("doctor", "--ledger")])
def test_a_ledger_of_a_newer_version_is_said_to_be_one(
    tmp_path: Path, reef_command: Any, starter: Path, command: tuple[str, ...]
) -> None:
    Ledger.open(f"sqlite:///{tmp_path / 'ledger.db'}").close()
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db")) as connection, connection:
        connection.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    settings = ("--reef.run-dir", str(tmp_path), "--inference.model-path", str(starter), "--reef.port", "0")
    status, said = reef_command(*command, *settings)
    assert status == 1
    assert said.startswith(f"reef: the ledger has schema version 99, this Reef knows versions up to {NEWEST}: use the ")


def test_a_ledger_of_an_older_version_is_not_read_by_the_doctor_who_says_what_brings_it_forward(
    tmp_path: Path, reef_command: Any
) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db")) as connection:
        connection.executescript((Path(__file__).parent / "ledger" / "data" / "schema-1.sql").read_text())
    status, said = reef_command("doctor", "--ledger", "--reef.run-dir", str(tmp_path))
    assert status == 1
    assert said.startswith(f"reef: the ledger has schema version 1, and {NEWEST} is needed to read it: `reef serve` ")


# --- weights and checkpoints ------------------------------------------------------------------------------------------


def until(condition: Callable[[], Any], what: str, timeout_s: float = 180) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.05)
    return found


def train(service: Service, number: int) -> None:
    """One batch; release `number` is served, stored and pruned after."""
    answer = service.chat("Start at 9. Add 3.", n=2).json()
    for choice in answer["choices"]:
        body = {
            "references": [choice["reef_agent_record_id"]],
            "score": choice["index"],
            "group": f"group-{number}",
        }
        assert service.post("/reef/report", body).status_code == 200
    until(lambda: is_at(service, number), f"release {number}")


def is_at(service: Service, number: int) -> bool:
    status = service.status()
    return status["scenario"]["served"].endswith(f"-{number:06d}") and status["training"]["phase"] == "waiting"


def chain(service: Service) -> list[dict[str, Any]]:
    """Oldest first."""
    found: list[dict[str, Any]] = service.get("/reef/scenarios/s/releases").json()["releases"]
    return found[::-1]


def contents(service: Service) -> list[str]:
    return [release["content_id"] for release in chain(service)]


def cut(path: Path) -> None:
    """The second half of a file is gone."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


@pytest.fixture
def trains(make_service: Callable[..., Service]) -> Iterator[Service]:
    """A service that trains on groups of two, with a checkpoint of each release."""
    groups = ("--recipe.scenario", "s", "--recipe.config.group-size", "2", "--recipe.config.batch-size", "2")
    made = make_service(*groups, "--training.checkpoint-every", "1")
    yield made
    made.end()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_damaged_weights_and_checkpoints_cost_no_release_and_nothing_is_mended_unasked(
    trains: Service, reef_command: Any
) -> None:
    service = trains
    releases, checkpoints = service.run_dir / "releases", service.run_dir / "checkpoints"
    log = service.run_dir / "logs" / "reef.log"
    service.start()
    train(service, 1)
    train(service, 2)
    assert service.stop() == 0
    ids = [path.name for path in sorted(releases.iterdir())]

    # The head's weights are cut, and the service was killed while it wrote the next ones.
    cut(releases / ids[1] / "model.safetensors")
    half = [releases / f".{ids[1][:-1]}3.partial", releases / f"{ids[1][:-1]}3", releases / "of-somebody-else"]
    for path in half:
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"half")
    service.start()
    status = service.status()
    assert (status["scenario"]["head"], status["scenario"]["served"]) == (ids[1], ids[0])
    assert f"release {ids[1]} is quarantined: " in status["training"]["paused"]
    assert "model.safetensors has" in status["training"]["paused"]
    assert service.chat().headers["x-reef-release-id"] == ids[0]
    assert [path.exists() for path in half] == [False, False, True]
    assert chain(service)[2]["state"] == "quarantined"
    time.sleep(2)
    assert service.status()["scenario"]["served"] == ids[0]  # it stays so
    promoted = service.post("/reef/scenarios/s/promote", {"release_id": ids[1]})
    assert (promoted.status_code, promoted.json()["state"]) == (201, "released")
    assert content_id_of(releases / ids[1]) == contents(service)[2]
    assert service.chat().headers["x-reef-release-id"] == ids[1]
    train(service, 3)
    assert service.stop() == 0

    # A byte of the newest checkpoint is another one: the one before it is used.
    newest, before = sorted(checkpoints.iterdir(), reverse=True)
    damaged = max((newest / path for path in newest.iterdir()), key=lambda path: path.stat().st_size)
    cut(damaged)
    made = contents_of(service)
    service.start()
    assert f"checkpoint of {newest.name} is not used, the one before it is: " in log.read_text()
    assert f"replayed {newest.name}" in log.read_text()
    assert f"replayed {before.name}" not in log.read_text()
    assert contents(service) == made
    train(service, 4)
    assert service.stop() == 0

    # No checkpoint is left: everything is trained again from the ledger.
    shutil.rmtree(checkpoints)
    log.write_text("")
    made = contents_of(service)
    service.start()
    assert log.read_text().count("replayed ") == 4
    assert contents(service) == made
    train(service, 5)
    assert not any(release["replay_diverged"] for release in chain(service))
    assert service.stop() == 0
    _, said = reef_command("doctor", "--ledger", "--reef.run-dir", str(service.run_dir))
    *findings, _ = said.splitlines()
    assert all(line.startswith("checkpoint ") and "-000004: no COMPLETE" in line for line in findings), said


def contents_of(service: Service) -> list[str]:
    """The chain's, from the ledger of a service that does not run."""
    with contextlib.closing(sqlite3.connect(service.run_dir / "ledger.db")) as connection:
        return [row[0] for row in connection.execute("SELECT content_id FROM releases ORDER BY number")]
