"""The groups driver: what it reports, how it paces itself, and that failures and stops lose nothing."""

import asyncio
import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from reef_harness import Client, FinalGrader, GroupsDriver, Item, Progress, Retry, finish_on_sigint
from reef_harness.errors import HarnessError, Stalled
from reef_harness.progress import ReleaseBar

QUICK = Retry(first_s=0.01, longest_s=0.02, total_s=0.5)


def items(count: int | None = None) -> Iterator[Item]:
    numbers = itertools.count() if count is None else range(count)
    return (Item.from_text(f"item{i}", f"prompt {i}", "2") for i in numbers)


def half_right(prompt: str, index: int) -> str:
    return f"<final>{2 if index % 2 else 3}</final>"


def drive(service: Any, supply: Iterator[Item], releases: int, **options: Any) -> Progress:
    async def run() -> Progress:
        async with Client(service.url, scenario="sums", retry=QUICK) as client:
            with GroupsDriver(client, supply, FinalGrader(), poll_s=0.01, **options) as driver:
                return await driver.run(releases=releases)

    return asyncio.run(run())


@pytest.mark.parametrize("one_request", [True, False])
def test_every_choice_is_reported_with_its_group_and_recorded(service: Any, tmp_path: Path, one_request: bool) -> None:
    service.answer = half_right if one_request else lambda prompt, index: "<final>2</final>"
    service.batch_size = 16
    seen: list[Progress] = []
    end = drive(
        service,
        items(2),
        1,
        groups_per_batch=2,
        records=tmp_path / "r.jsonl",
        progress=seen.append,
        one_request=one_request,
    )
    assert (end.groups, end.rollouts, end.failed, end.releases, end.release) == (2, 16, 0, 1, "r1")
    assert end.reward == (0.5 if one_request else 1.0)
    assert seen[-1] == end
    assert len(service.paths("/v1/chat")) == (2 if one_request else 16)
    bodies = [body for body, _ in service.reports.values()]
    assert sorted(receipt for body in bodies for receipt in body["references"]) == sorted(service.receipts)
    assert {len([b for b in bodies if b["group"] == group]) for group in {b["group"] for b in bodies}} == {8}
    assert all(b["grader"] == {"id": "final", "version": "1"} and b["truncated"] is False for b in bodies)
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert {row["report"] for row in rows} == set(service.reports)
    assert {row["item"] for row in rows} == {"item0", "item1"}


def test_the_driver_stays_within_the_groups_it_may_be_ahead(service: Any) -> None:
    service.batch_size = 10_000  # nothing is ever trained
    with pytest.raises(Stalled, match="4 groups wait"):
        drive(service, items(), 1, groups_per_batch=2, max_ahead=1, stall_timeout_s=1.0)
    assert len(service.paths("/v1/chat")) == 4


def test_groups_that_the_service_drops_make_room_for_others(service: Any) -> None:
    service.drop_tied, service.batch_size = True, 8
    service.answer = lambda prompt, index: (
        half_right(prompt, index) if int(prompt.split()[1]) % 5 == 4 else "<final>2</final>"
    )
    end = drive(service, items(), 2, groups_per_batch=1, max_ahead=1)
    assert end.releases == 2
    assert end.groups >= 10


def test_a_second_run_goes_on_where_the_first_stopped(service: Any) -> None:
    async def run() -> tuple[Progress, Progress]:
        async with Client(service.url, scenario="sums", retry=QUICK) as client:
            with GroupsDriver(client, items(), FinalGrader(), groups_per_batch=1, poll_s=0.01) as driver:
                return await driver.run(releases=2), await driver.run(releases=4)

    first, second = asyncio.run(run())
    assert first.releases >= 2
    assert second.releases >= 4
    assert second.groups == len(service.paths("/v1/chat"))


def test_rewards_are_kept_by_the_release_that_answered(service: Any) -> None:
    async def run() -> dict[str, list[float]]:
        async with Client(service.url, scenario="sums", retry=QUICK) as client:
            with GroupsDriver(client, items(3), FinalGrader(), groups_per_batch=1, max_ahead=0, poll_s=0.01) as driver:
                await driver.run(releases=3)
                return driver.rewards

    assert asyncio.run(run()) == {"r0": [1.0] * 8, "r1": [1.0] * 8, "r2": [1.0] * 8}


def test_failed_rollouts_are_recorded_and_the_others_go_on(service: Any, tmp_path: Path) -> None:
    service.faults.extend([400, "drop"])
    end = drive(service, items(4), 9, groups_per_batch=4, records=tmp_path / "r.jsonl")
    assert (end.groups, end.rollouts, end.failed) == (4, 32, 16)
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    errors = [row["error"] for row in rows if row["error"]]
    assert len(errors) == 16
    assert {error.split(":")[0] for error in errors} == {"BadRequest", "Unreachable"}


def test_an_aborted_answer_is_no_wrong_answer(service: Any, tmp_path: Path) -> None:
    service.finish_reason = "abort"
    end = drive(service, items(1), 1, records=tmp_path / "r.jsonl")
    assert (end.failed, service.reports) == (8, {})
    assert "not a whole rollout" in (tmp_path / "r.jsonl").read_text()


def test_a_truncated_answer_is_reported_as_such(service: Any) -> None:
    service.finish_reason = "length"
    drive(service, items(1), 1)
    assert {(b["truncated"], b["reason_code"], b["score"]) for b, _ in service.reports.values()} == {
        (True, "unfinished", 0.0)
    }


def test_a_service_that_refuses_everything_ends_the_run(service: Any) -> None:
    service.faults.extend([400] * 100)
    with pytest.raises(HarnessError, match="8 groups in a row failed; the last: BadRequest: told to answer 400"):
        drive(service, items(), 1)


def test_the_first_interrupt_finishes_what_is_in_flight(service: Any) -> None:
    async def run() -> Progress:
        async with Client(service.url, scenario="sums", retry=QUICK) as client:
            interrupts = iter([signal.SIGINT])

            def interrupt(progress: Progress) -> None:
                if progress.groups >= 3 and (sent := next(interrupts, None)):
                    os.kill(os.getpid(), sent)

            with GroupsDriver(client, items(), FinalGrader(), in_flight=2, poll_s=0.01, progress=interrupt) as driver:
                async with finish_on_sigint(driver.stop):
                    return await driver.run(releases=100_000)

    end = asyncio.run(run())
    assert end.failed == 0
    assert end.rollouts == len(service.reports) == len(service.receipts)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_progress_bar_shows_reward_and_release(service: Any, capsys: pytest.CaptureFixture[str]) -> None:
    service.answer = half_right
    with ReleaseBar(2) as bar:
        drive(service, items(), 2, groups_per_batch=1, progress=bar)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "reward 0.50" in shown
    assert "failed 0, release r2" in shown
