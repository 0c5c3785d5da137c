"""A driver's records: what a second life makes of them, however the first one ended."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reef_harness import Client, FinalGrader, GroupsDriver, Item, Progress, Retry, StreamDriver
from reef_harness.drivers import read_rollouts
from reef_harness.errors import HarnessError, WrongRecords
from reef_harness.graders import NumberGrader

QUICK = Retry(first_s=0.01, longest_s=0.02, total_s=0.3)


def items(count: int) -> Iterator[Item]:
    return (Item.from_text(f"item{i}", f"prompt {i}", "2") for i in range(count))


def drive(service: Any, path: Path, kind: Any = StreamDriver, count: int = 6, **options: Any) -> Progress:
    releases = options.pop("releases", None)

    async def run() -> Progress:
        async with Client(service.url, scenario="sums", retry=QUICK) as client:
            with kind(client, items(count), FinalGrader(), poll_s=0.01, records=path, **options) as driver:
                progress: Progress = await driver.run(releases=releases)
                return progress

    return asyncio.run(run())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rollouts.jsonl"


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def reported_prompts(service: Any) -> Counter[str]:
    """How often each prompt was graded. The fake names receipts in the order of the chats."""
    prompts = []
    for body in service.paths("/v1/"):
        prompts += [body["messages"][-1]["content"]] * body["n"]
    return Counter(prompts[int(body["references"][0][1:])] for body, _ in service.reports.values())


def keep(path: Path, wanted: Any) -> None:
    """Leave only some lines: those that an earlier death would have left."""
    lines = [line for line in path.read_text().splitlines(keepends=True) if wanted(json.loads(line))]
    path.write_text("".join(lines))


def test_a_second_life_asks_and_reports_only_what_is_missing(service: Any, path: Path) -> None:
    service.trains = False
    assert drive(service, path, count=4).rollouts == 4
    end = drive(service, path, count=10)
    assert (end.rollouts, end.failed) == (10, 0)
    assert reported_prompts(service) == Counter({f"prompt {i}": 1 for i in range(10)})
    assert len(service.receipts) == 10
    assert len(read_rollouts(path)) == 10
    assert [event["event"] for event in events(path)].count("run") == 1


def test_an_item_that_comes_again_is_answered_again_in_one_life_and_in_two(service: Any, path: Path) -> None:
    service.trains = False

    def twice() -> Iterator[Item]:
        yield from items(3)
        yield from items(3)

    async def run(supply: Iterator[Item]) -> None:
        async with Client(service.url, scenario="sums") as client:
            with StreamDriver(client, supply, FinalGrader(), poll_s=0.01, records=path) as driver:
                await driver.run()

    asyncio.run(run(items(3)))
    asyncio.run(run(twice()))
    asyncio.run(run(twice()))
    assert reported_prompts(service) == Counter({f"prompt {i}": 2 for i in range(3)})
    assert {(row.item, row.occurrence) for row in read_rollouts(path)} == {
        (f"item{i}", j) for i in range(3) for j in range(2)
    }


def test_a_report_that_was_not_acknowledged_is_sent_again_under_its_id(service: Any, path: Path) -> None:
    """Died after the line that says it was answered: one report had arrived, one had not."""
    service.trains = False
    drive(service, path, count=2)
    keep(path, lambda event: event["event"] in ("run", "answered"))
    first, second = (event["report"] for event in events(path)[1:])
    del service.reports[second]
    chats = len(service.paths("/v1/"))
    end = drive(service, path, count=2)
    assert (end.rollouts, end.failed) == (2, 0)
    assert set(service.reports) == {first, second}
    assert len(service.paths("/v1/")) == chats
    assert sorted(body["agent_record_id"] for body in service.paths("/reef/report")[2:]) == sorted([first, second])
    assert len(read_rollouts(path)) == 2


def test_a_report_that_the_service_did_not_take_is_tried_again_in_the_next_life(service: Any, path: Path) -> None:
    service.trains = False
    real, refused = service.report, []

    def refuse(body: Any) -> Any:
        refused.append(body)
        return 503, {"error": {"message": "paused", "type": "x", "param": None, "code": None}}

    service.report = refuse
    end = drive(service, path, count=2)
    assert (end.failed, end.owed, service.reports) == (2, 2, {})
    assert {row.error for row in read_rollouts(path)} == {"Unavailable: paused (HTTP 503)"}
    service.report = real
    end = drive(service, path, count=2)
    assert (end.failed, end.owed) == (0, 0)
    assert sorted(service.reports) == sorted({body["agent_record_id"] for body in refused})
    assert len(service.receipts) == 2
    assert {row.error for row in read_rollouts(path)} == {None}


def test_a_report_of_which_the_service_holds_another_body_is_a_failure_and_the_others_go_on(
    service: Any, path: Path
) -> None:
    service.trains = False
    drive(service, path, count=2)
    keep(path, lambda event: event["event"] in ("run", "answered"))
    stored = events(path)[1]["report"]
    service.reports[stored][0]["score"] = 0.25
    end = drive(service, path, count=3)
    assert (end.failed, end.rollouts) == (1, 3)
    (failed,) = [row for row in read_rollouts(path) if row.error]
    assert failed.error.startswith("Conflict: ")
    assert service.reports[stored][0]["score"] == 0.25


def test_a_group_that_was_half_sampled_is_filled_up_under_its_name(service: Any, path: Path) -> None:
    service.batch_size = 8
    drive(service, path, GroupsDriver, count=1, one_request=False, releases=1)
    keep(path, lambda event: event["event"] == "run" or event.get("index", 9) < 3)
    for id in list(service.reports):
        if service.reports[id][0]["references"][0] not in [e["receipt"] for e in events(path) if "receipt" in e]:
            del service.reports[id]
    service.pending = list(service.reports)
    end = drive(service, path, GroupsDriver, count=1, releases=1)
    assert (end.rollouts, end.releases) == (8, 1)
    assert service.paths("/v1/")[-1]["n"] == 5
    assert len({body["group"] for body, _ in service.reports.values()}) == 1
    assert sorted(row.index for row in read_rollouts(path)) == list(range(8))


def test_reward_length_and_release_of_the_last_batch_are_remembered(service: Any, path: Path) -> None:
    service.trains = False
    service.answer = lambda prompt, index: f"<final>{2 if int(prompt.split()[1]) >= 3 else 3}</final>"
    drive(service, path, count=6, in_flight=1, batch=4)

    async def begin() -> Progress:
        async with Client(service.url, scenario="sums") as client:
            with StreamDriver(client, items(6), FinalGrader(), records=path, batch=4) as driver:
                assert driver.rewards == {}  # of this life
                return driver.snapshot()

    begun = asyncio.run(begin())
    assert (begun.rollouts, begun.reward, begun.length, begun.answered_by) == (6, 0.75, 7.0, "r0")


@pytest.mark.parametrize(("kind", "size"), [(StreamDriver, 1), (GroupsDriver, 8)])
def test_an_item_without_a_gold_that_can_be_read_is_not_asked_again_before_it_changes(
    service: Any, path: Path, kind: Any, size: int
) -> None:
    service.trains = False

    def life(*golds: str | None) -> Progress:
        async def run() -> Progress:
            async with Client(service.url, scenario="sums", retry=QUICK) as client:
                supply = (Item.from_text(f"item{i}", f"prompt {i}", gold) for i, gold in enumerate(golds))
                with kind(client, supply, NumberGrader(), poll_s=0.01, in_flight=4, records=path) as driver:
                    progress: Progress = await driver.run()
                    return progress

        return asyncio.run(run())

    first = life(None, "no number", "2")
    assert len(service.paths("/v1/")) == 3
    again = life(None, "no number", "2")
    assert len(service.paths("/v1/")) == 3
    assert again.failures == first.failures
    assert {reason: count for reason, (count, _) in again.failures.items()} == {"no_gold": size, "bad_gold": size}
    now = life(None, "3", "2")
    assert len(service.paths("/v1/")) == 4
    assert (now.reported, now.rollouts - now.failed) == (size, 2 * size)
    assert {row.item for row in read_rollouts(path) if row.error} == {"item0"}


def test_what_failed_otherwise_is_asked_again(service: Any, path: Path) -> None:
    service.trains = False
    service.faults.append(400)
    assert drive(service, path, count=2, in_flight=1).failed == 1
    end = drive(service, path, count=2)
    assert (end.failed, end.reported, end.rollouts) == (0, 1, 2)


def test_the_folder_of_records_is_made(service: Any, path: Path) -> None:
    service.trains = False
    inside = path.parent / "my rec" / "of today" / "x.jsonl"
    assert drive(service, inside, count=2).rollouts == len(read_rollouts(inside)) == 2


def test_releases_and_waiting_units_are_remembered(service: Any, path: Path) -> None:
    service.batch_size = 4
    end = drive(service, path, count=6)
    assert (end.releases, end.waiting) == (1, 2)
    end = drive(service, path, count=8)
    assert (end.rollouts, end.releases, end.release, end.waiting) == (8, 2, "r2", 0)
    asked = len(service.requests)
    assert drive(service, path, count=8, releases=2).releases == 2
    assert len(service.requests) == asked


def test_a_last_line_that_was_cut_is_removed(service: Any, path: Path) -> None:
    service.trains = False
    drive(service, path, count=3)
    whole = path.read_bytes()
    for cut in (1, 20):
        path.write_bytes(whole[:-cut])  # of the line that says how the last one settled
        assert drive(service, path, count=3).rollouts == 3
        assert path.read_bytes().endswith(b"}\n")
        assert len(events(path)) >= 9
    assert len(service.reports) == 3


def test_a_cut_first_line_is_a_file_that_never_began(service: Any, path: Path) -> None:
    service.trains = False
    path.write_bytes(b'{"event": "run", "driver": "str')
    assert drive(service, path, count=2).rollouts == 2
    assert events(path)[0]["driver"] == "stream"


@pytest.mark.parametrize("size", [1, 65535, 65536, 65537, 200_000])
def test_a_cut_line_of_any_length_is_removed(service: Any, path: Path, size: int) -> None:
    service.trains = False
    drive(service, path, count=1)
    before = path.read_bytes()
    path.write_bytes(before + b"x" * size)
    drive(service, path, count=1)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kind": GroupsDriver}, "driver 'stream', this one has 'groups'"),
        ({"temperature": 0.5}, "temperature 1.0, this one has 0.5"),
        ({"max_tokens": 9}, "max_tokens 64, this one has 9"),
        ({"extra": {"stop": ("a",), "top_p": 0.5}}, r"extra \{\}, this one has \{'stop': \['a'\], 'top_p': 0.5\}"),
    ],
)
def test_records_of_another_run_are_refused(service: Any, path: Path, changed: Any, message: str) -> None:
    service.trains = False
    drive(service, path, count=1)
    before = path.read_bytes()
    with pytest.raises(WrongRecords, match=message):
        drive(service, path, count=1, **changed)
    assert path.read_bytes() == before


@pytest.mark.parametrize("now", [("another prompt", "2"), ("prompt", "3")])
def test_an_item_that_changed_does_not_fill_the_group_of_what_it_was(
    service: Any, path: Path, now: tuple[str, str]
) -> None:
    """Four of eight are answered: the others would be compared with them, though asked or graded otherwise."""
    service.faults.extend([400] * 4)

    async def run(prompt: str, gold: str) -> None:
        async with Client(service.url, scenario="sums", retry=QUICK) as client:
            supply = iter([Item.from_text("q1", prompt, gold)])
            with GroupsDriver(client, supply, FinalGrader(), one_request=False, poll_s=0.01, records=path) as driver:
                await driver.run()

    asyncio.run(run("prompt", "2"))
    assert len(service.reports) == 4
    with pytest.raises(WrongRecords, match="item 'q1' was answered with other messages, or another gold"):
        asyncio.run(run(*now))
    assert len(service.paths("/v1/")) == 8
    asyncio.run(run("prompt", "2"))
    assert len(service.reports) == 8


def test_records_of_before_extra_and_digests_are_gone_on_with(service: Any, path: Path) -> None:
    service.trains = False
    drive(service, path, count=2, extra={"top_k": 5})
    old = [{name: value for name, value in each.items() if name not in ("extra", "asked")} for each in events(path)]
    assert old != events(path)
    path.write_text("".join(json.dumps(event) + "\n" for event in old))
    assert drive(service, path, count=3, extra={"top_k": 5, "stop": ("a",)}).rollouts == 3
    assert len(service.receipts) == 3


def test_fields_that_json_has_in_another_form_are_the_same_in_the_next_life(service: Any, path: Path) -> None:
    service.trains = False
    drive(service, path, count=1, extra={"stop": ("a",)})
    assert drive(service, path, count=2, extra={"stop": ("a",)}).rollouts == 2


@pytest.mark.parametrize("line", [b"{}", b'{"event": "reported", "item": [], "occurrence": 0, "index": 0}', b"again"])
def test_lines_that_are_no_drivers_are_said_by_who_reads_rollouts_too(service: Any, path: Path, line: bytes) -> None:
    service.trains = False
    drive(service, path, count=1)
    lines = path.read_bytes().splitlines()
    reported = next(each for each in lines if json.loads(each)["event"] == "reported")
    path.write_bytes(b"\n".join([*lines, reported if line == b"again" else line, b""]))
    with pytest.raises(WrongRecords, match=r"rollouts\.jsonl:5: no line of a driver's records"):
        read_rollouts(path)


def test_a_line_of_brackets_without_end_is_not_json(path: Path) -> None:
    path.write_bytes(b"[" * 100_000 + b"\n")
    with pytest.raises(WrongRecords, match=r"rollouts\.jsonl:1: not JSON"):
        read_rollouts(path)


@pytest.mark.parametrize("text", ['{"item": "a", "error": null}\n', "[1]\n", "hello\n"])
def test_a_file_that_is_no_drivers_records_is_refused_and_left_alone(service: Any, path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(WrongRecords, match=str(path)):
        drive(service, path)
    assert path.read_text() == text


def test_damage_before_the_last_line_is_said_with_its_line(service: Any, path: Path) -> None:
    service.trains = False
    drive(service, path, count=2)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], lines[2][:10] + b"\n", *lines[3:]]))
    with pytest.raises(WrongRecords, match=r"rollouts\.jsonl:3: not JSON"):
        drive(service, path, count=2)
    path.write_bytes(b"".join([lines[0], lines[-1], *lines[1:]]))
    with pytest.raises(WrongRecords, match=r"rollouts\.jsonl:2: no line of a driver's records"):
        drive(service, path, count=2)


def test_two_drivers_do_not_share_records(service: Any, path: Path) -> None:
    async def run() -> None:
        async with Client(service.url, scenario="sums") as client:
            with (
                StreamDriver(client, items(1), FinalGrader(), records=path),
                pytest.raises(WrongRecords, match="in use"),
            ):
                StreamDriver(client, items(1), FinalGrader(), records=path)
            with StreamDriver(client, items(1), FinalGrader(), records=path):
                pass

    asyncio.run(run())


def test_records_of_another_service_are_noticed(service: Any, path: Path) -> None:
    service.batch_size = 4
    assert drive(service, path, count=2).waiting == 2
    service.reports.clear()
    with pytest.raises(HarnessError, match="is of another service, or of another ledger"):
        drive(service, path, count=3)


LIFE = """
import asyncio, sys
from pathlib import Path
from reef_harness import Client, FinalGrader, GroupsDriver, Item, StreamDriver, finish_on_sigint

async def main(url, kind, records, count):
    supply = (Item.from_text(f"item{i}", f"prompt {i}", "2") for i in range(int(count)))
    async with Client(url, scenario="sums") as client:
        options = {"in_flight": 4, "poll_s": 0.02, "records": Path(records)}
        with {"stream": StreamDriver, "groups": GroupsDriver}[kind](client, supply, FinalGrader(), **options) as driver:
            async with finish_on_sigint(driver.stop):
                print("begun", flush=True)
                end = await driver.run()
                print(end.rollouts, end.failed, flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


def life(service: Any, kind: str, path: Path, count: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", LIFE, service.url, kind, str(path), str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), [("stream", 1), ("groups", 8)])
def test_killed_at_any_moment_nothing_is_reported_twice_and_nothing_is_lost(
    service: Any, path: Path, kind: str, size: int
) -> None:
    """kill -9 while a report is stored and not acknowledged, before one is stored, and while an answer is sampled."""
    service.trains = False
    count = 40
    real_report, real_chat = service.report, service.chat
    running: list[subprocess.Popen[str]] = []
    calls = Counter[str]()

    def kill(at: str, moments: tuple[int, ...]) -> None:
        calls[at] += 1
        if calls[at] in moments:
            running[-1].send_signal(signal.SIGKILL)
            running[-1].wait()

    def report(body: Any) -> Any:
        kill("before", (11,))
        answer = real_report(body)
        kill("stored", (5, 23))
        return answer

    def chat(*arguments: Any) -> Any:
        kill("chat", (24 // size,))
        return real_chat(*arguments)

    service.report, service.chat = report, chat
    for _ in range(8):
        running.append(life(service, kind, path, count // size))
        said, complaint = running[-1].communicate(timeout=120)
        assert running[-1].returncode in (0, -signal.SIGKILL), complaint
        if running[-1].returncode == 0:
            break
    assert len(running) >= 4
    assert said.splitlines()[-1] == f"{count} 0"
    assert reported_prompts(service) == Counter({f"prompt {i}": size for i in range(count // size)})
    assert len({body["references"][0] for body, _ in service.reports.values()}) == count
    rows = read_rollouts(path)
    assert sorted(row.report for row in rows) == sorted(service.reports)
    assert len({(row.item, row.index) for row in rows}) == count


@pytest.mark.slow
def test_interrupted_it_reports_what_is_in_flight_and_ends_and_the_next_life_does_the_rest(
    service: Any, path: Path
) -> None:
    service.trains = False
    process = life(service, "stream", path, 100_000)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    while len(service.reports) < 5:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    said, complaint = process.communicate(timeout=120)
    assert process.returncode == 0, complaint
    num_reported = len(service.reports)
    assert said.split() == [str(num_reported), "0"]
    assert len(service.receipts) == num_reported  # nothing that was sampled was thrown away
    process = life(service, "stream", path, num_reported + 3)
    assert process.communicate(timeout=120)[0].split() == ["begun", str(num_reported + 3), "0"]
    assert len(service.receipts) == num_reported + 3
