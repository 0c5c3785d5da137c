"""The drivers: what they report, how they pace themselves, and that failures and stops lose nothing."""

import asyncio
import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reef_harness import (
    Client,
    FinalGrader,
    Grader,
    GroupsDriver,
    Item,
    Progress,
    Retry,
    StreamDriver,
    Verdict,
    finish_on_sigint,
)
from reef_harness.drivers import Rewards, read_rollouts
from reef_harness.errors import HarnessError, Stalled
from reef_harness.graders import NumberGrader
from reef_harness.progress import ReleaseBar, RolloutBar

QUICK = Retry(first_s=0.01, longest_s=0.02, total_s=60.0)


def items(count: int | None = None) -> Iterator[Item]:
    numbers = itertools.count() if count is None else range(count)
    return (Item.from_text(f"item{i}", f"prompt {i}", "2") for i in numbers)


def half_right(prompt: str, index: int) -> str:
    return f"<final>{2 if index % 2 else 3}</final>"


def drive(
    service: Any,
    supply: Iterator[Item],
    releases: int | None,
    *,
    kind: Any = GroupsDriver,
    rollouts: int | None = None,
    grader: Grader | None = None,
    **options: Any,
) -> Progress:
    async def run() -> Progress:
        async with Client(service.url, scenario="sums", retry=QUICK) as client:
            with kind(client, supply, grader or FinalGrader(), poll_s=0.01, **options) as driver:
                progress: Progress = await driver.run(releases=releases, rollouts=rollouts)
                return progress

    return asyncio.run(run())


class Clock:
    """The drivers' clock. A test puts it forward while nothing moves: minutes are over at once, on a busy machine too.

    What moves meanwhile takes no part of them: the real timeouts are minutes.
    """

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_s

    def forward(self, seconds: float) -> None:
        self._ahead_s += seconds

    def forward_once_all_wait(self, waiting: int, seconds: float = 400.0) -> Callable[[Progress], None]:
        """To be told how a driver stands: time passes when so many units wait and none is on its way."""

        def told(progress: Progress) -> None:
            if (progress.waiting, progress.in_flight) == (waiting, 0):
                self.forward(seconds)

        return told


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("reef_harness.drivers.driver.time", clock)
    return clock


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
    assert (end.units, end.rollouts, end.failed, end.releases, end.release) == (2, 16, 0, 1, "r1")
    assert end.reward == (0.5 if one_request else 1.0)
    assert seen[-1] == end
    assert len(service.paths("/v1/chat")) == (2 if one_request else 16)
    bodies = [body for body, _ in service.reports.values()]
    assert sorted(receipt for body in bodies for receipt in body["references"]) == sorted(service.receipts)
    assert {len([b for b in bodies if b["group"] == group]) for group in {b["group"] for b in bodies}} == {8}
    assert all(
        b["grader"] == {"id": "final", "version": FinalGrader().version} and b["truncated"] is False for b in bodies
    )
    rows = read_rollouts(tmp_path / "r.jsonl")
    assert {row.report for row in rows} == set(service.reports)
    assert {(row.item, row.index) for row in rows} == {(f"item{i}", j) for i in range(2) for j in range(8)}
    assert {(row.num_tokens, row.release, row.grader) for row in rows} == {(7.0, "r0", "final")}


def test_the_driver_stays_within_the_groups_it_may_be_ahead(service: Any, clock: Clock) -> None:
    service.batch_size = 10_000  # nothing is ever trained
    with pytest.raises(Stalled, match="4 groups wait"):
        drive(service, items(), 1, groups_per_batch=2, max_ahead=1, progress=clock.forward_once_all_wait(4))
    assert len(service.paths("/v1/chat")) == 4


def test_groups_that_the_service_drops_make_room_for_others(service: Any) -> None:
    service.drop_tied, service.batch_size = True, 8
    service.answer = lambda prompt, index: (
        half_right(prompt, index) if int(prompt.split()[1]) % 5 == 4 else "<final>2</final>"
    )
    end = drive(service, items(), 2, groups_per_batch=1, max_ahead=1)
    assert end.releases == 2
    assert end.units >= 10


def test_a_second_run_goes_on_where_the_first_stopped(service: Any) -> None:
    async def run() -> tuple[Progress, Progress]:
        async with Client(service.url, scenario="sums", retry=QUICK) as client:
            with GroupsDriver(client, items(), FinalGrader(), groups_per_batch=1, poll_s=0.01) as driver:
                return await driver.run(releases=2), await driver.run(releases=4)

    first, second = asyncio.run(run())
    assert first.releases >= 2
    assert second.releases >= 4
    assert second.units == len(service.paths("/v1/chat"))


def test_rewards_are_kept_by_the_release_that_answered(service: Any) -> None:
    service.answer = half_right

    async def run() -> dict[str, Rewards]:
        async with Client(service.url, scenario="sums", retry=QUICK) as client:
            with GroupsDriver(client, items(3), FinalGrader(), groups_per_batch=1, max_ahead=0, poll_s=0.01) as driver:
                await driver.run(releases=3)
                return driver.rewards

    found = asyncio.run(run())
    assert found == {release: Rewards(count=8, total=4.0) for release in ("r0", "r1", "r2")}
    assert found["r0"].mean == 0.5


def test_rewards_of_the_last_releases_are_kept_only(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reef_harness.drivers.driver.MAX_RELEASES", 2)

    async def run() -> set[str]:
        async with Client(service.url, scenario="sums", retry=QUICK) as client:
            with GroupsDriver(client, items(4), FinalGrader(), groups_per_batch=1, max_ahead=0, poll_s=0.01) as driver:
                await driver.run(releases=4)
                return set(driver.rewards)

    assert asyncio.run(run()) == {"r2", "r3"}


def test_failed_rollouts_are_recorded_and_the_others_go_on(service: Any, tmp_path: Path) -> None:
    service.faults.extend([400, "drop"])
    end = drive(service, items(4), 9, groups_per_batch=4, records=tmp_path / "r.jsonl")
    assert (end.units, end.rollouts, end.failed) == (4, 32, 16)
    errors = [row.error for row in read_rollouts(tmp_path / "r.jsonl") if row.error]
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
    with pytest.raises(HarnessError, match="10 groups in a row failed; the last: BadRequest: told to answer 400"):
        drive(service, items(), 1, in_flight=2)
    assert 10 <= len(service.requests) <= 11


def test_a_service_that_comes_back_is_gone_on_with_though_all_in_flight_broke(service: Any) -> None:
    service.batch_size = 32
    service.faults.extend(["drop"] * 16)
    end = drive(service, items(48), None, kind=StreamDriver, in_flight=16, max_failed=1)
    assert (end.failed, end.rollouts, end.releases) == (16, 48, 1)


@pytest.mark.parametrize("fault", ["drop", "lose", 429, 502, 503])
def test_a_report_that_is_lost_or_refused_on_its_way_counts_once(service: Any, fault: int | str) -> None:
    """Every third report meets a fault; one rollout at a time, so that no other request takes it."""
    service.trains = False
    service.retry_after = "0.01"
    real, count = service.handle, itertools.count()

    def handle(http: Any) -> None:
        if http.path == "/reef/report" and next(count) % 3 == 0:
            service.faults.append(fault)
        real(http)

    service.handle = handle
    end = drive(service, items(12), None, kind=StreamDriver, in_flight=1)
    assert (end.rollouts, end.failed) == (12, 0)
    assert len(service.paths("/reef/report")) > 12
    assert len(service.reports) == len(service.receipts) == 12
    assert len({body["references"][0] for body, _ in service.reports.values()}) == 12


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_finishes_what_is_in_flight(service: Any, number: int) -> None:
    before = signal.getsignal(number)

    async def run() -> Progress:
        async with Client(service.url, scenario="sums", retry=QUICK) as client:
            interrupts = iter([number])

            def interrupt(progress: Progress) -> None:
                if progress.units >= 3 and (sent := next(interrupts, None)):
                    os.kill(os.getpid(), sent)

            with GroupsDriver(client, items(), FinalGrader(), in_flight=2, poll_s=0.01, progress=interrupt) as driver:
                async with finish_on_sigint(driver.stop):
                    return await driver.run(releases=100_000)

    end = asyncio.run(run())
    assert end.failed == 0
    assert end.rollouts == len(service.reports) == len(service.receipts)
    assert signal.getsignal(number) is before


def test_the_progress_bar_shows_reward_and_release(service: Any, capsys: pytest.CaptureFixture[str]) -> None:
    service.answer = half_right
    with ReleaseBar(2) as bar:
        drive(service, items(), 2, groups_per_batch=1, max_ahead=0, progress=bar)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "reward 0.50" in shown
    assert "length 7, " in shown
    assert "failed 0, release r2, staleness 0.0" in shown
    assert "reward 0.00" not in shown
    assert "\r" not in shown  # nobody's terminal: lines


def test_bars_below_another_bar_move_no_cursor_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with ReleaseBar(2), RolloutBar(3):
        pass
    lines = capsys.readouterr().err.splitlines()
    assert sorted({line.split(":")[0] for line in lines}) == ["rollouts", "training"]


def test_the_bar_of_rollouts_counts_those_that_were_reported(service: Any, capsys: pytest.CaptureFixture[str]) -> None:
    service.trains = False
    service.faults.append(400)
    with RolloutBar(12) as bar:
        drive(service, items(), None, kind=StreamDriver, rollouts=12, progress=bar)
    shown = capsys.readouterr().err
    assert "12/12" in shown
    assert "failed 1, release r0, staleness -" in shown


def test_what_is_not_known_yet_is_shown_as_such(service: Any, capsys: pytest.CaptureFixture[str]) -> None:
    first: list[Progress] = []

    async def begin() -> None:
        async with Client(service.url, scenario="sums") as client:
            with StreamDriver(client, items(1), FinalGrader()) as driver, RolloutBar(1) as bar:
                first.append(driver.snapshot())
                bar.begin(first[0])

    asyncio.run(begin())
    assert (first[0].reward, first[0].length, first[0].staleness, first[0].answered_by) == (None, None, None, None)
    assert "reward -, length -, rollouts 0, failed 0, release -, staleness -" in capsys.readouterr().err


def test_answers_without_a_score_have_a_length_and_no_reward(service: Any, capsys: pytest.CaptureFixture[str]) -> None:
    service.answer = lambda prompt, index: "1"
    with RolloutBar(3) as bar:
        end = drive(service, items(3), None, kind=StreamDriver, grader=Unsure(), progress=bar)
    assert (end.reward, end.length, end.answered_by) == (None, 7.0, "r0")
    assert "reward -, length 7, rollouts 3" in capsys.readouterr().err


def test_before_the_first_release_is_trained_the_one_that_answers_is_shown(
    service: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    service.batch_size = 100
    with ReleaseBar(2) as bar:
        drive(service, items(3), 2, kind=StreamDriver, progress=bar)
    assert "release r0, staleness -" in capsys.readouterr().err


def test_a_stream_shows_the_release_that_answered_not_the_one_that_was_trained(
    service: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    service.batch_size = 4
    with RolloutBar(8) as bar:
        end = drive(service, items(8), None, kind=StreamDriver, in_flight=1, progress=bar)
    assert (end.release, end.answered_by) == ("r2", "r1")
    assert "8/8" in (shown := capsys.readouterr().err)
    assert "release r1, " in shown.splitlines()[-1]


def test_failures_are_counted_by_reason(service: Any) -> None:
    service.faults.extend([400, 404, 400])
    golds = ["2", "2", "2", None, None, "2"]
    supply = [Item.from_text(f"item{i}", f"prompt {i}", gold) for i, gold in enumerate(golds)]
    end = drive(service, iter(supply), None, kind=StreamDriver, in_flight=1)
    assert end.failures == {
        "BadRequest": (2, "BadRequest: told to answer 400 (HTTP 400)"),
        "NotFound": (1, "NotFound: told to answer 404 (HTTP 404)"),
        "no_gold": (2, "not graded: no_gold: item 'item4' has no gold answer"),
    }
    assert (end.failed, end.reported, end.owed) == (5, 1, 0)


def test_an_item_whose_gold_cannot_be_read_is_asked_once_however_often_it_comes(service: Any, tmp_path: Path) -> None:
    service.trains = False
    supply = [Item.from_text("bad", "prompt", "no number"), Item.from_text("good", "prompt", "2")] * 3
    path = tmp_path / "r.jsonl"
    end = drive(service, iter(supply), None, kind=StreamDriver, grader=NumberGrader(), in_flight=1, records=path)
    assert (end.reported, end.failed, len(service.receipts)) == (3, 3, 4)
    assert [(row.item, row.occurrence) for row in read_rollouts(path) if row.error] == [("bad", i) for i in range(3)]


def test_a_stream_reports_each_rollout_at_once_without_a_group(service: Any, tmp_path: Path) -> None:
    seen: list[Progress] = []
    end = drive(
        service, items(), 3, kind=StreamDriver, in_flight=4, batch=8, records=tmp_path / "r.jsonl", progress=seen.append
    )
    assert (end.releases, end.release, end.failed) == (3, "r3", 0)
    assert {len(body["references"]) for body, _ in service.reports.values()} == {1}
    assert not [body for body, _ in service.reports.values() if "group" in body]
    prompts = [body["messages"][-1]["content"] for body in service.paths("/v1/chat")]
    assert sorted(prompts) == sorted(f"prompt {i}" for i in range(len(prompts)))
    assert {body["n"] for body in service.paths("/v1/chat")} == {1}
    assert max(progress.in_flight for progress in seen) <= 4
    assert len(read_rollouts(tmp_path / "r.jsonl")) == end.rollouts == len(service.reports)


def test_a_stream_keeps_its_rollouts_in_flight_at_all_times(service: Any) -> None:
    """Eight are begun before any is answered, and one more for each that ends."""
    service.trains = False
    inside, most, lock, full = [0], [0], threading.Lock(), threading.Event()
    real = service.handle

    def slow(http: Any) -> None:
        chat = http.path.startswith("/v1/")
        with lock:
            inside[0] += chat
            most[0] = max(most[0], inside[0])
            if most[0] == 8:
                full.set()
        if chat:
            full.wait(60)
            time.sleep(0.01)
        with lock:
            inside[0] -= chat
        real(http)

    service.handle = slow
    end = drive(service, items(40), None, kind=StreamDriver, in_flight=8)
    assert end.rollouts == 40
    assert most[0] == 8


def test_a_paced_stream_stays_within_the_batches_it_may_be_ahead(service: Any, clock: Clock) -> None:
    service.batch_size = 10_000
    paced: dict[str, Any] = {"kind": StreamDriver, "batch": 8, "max_ahead": 1}
    with pytest.raises(Stalled, match="16 rollouts wait"):
        drive(service, items(), 1, **paced, progress=clock.forward_once_all_wait(16))
    assert len(service.paths("/v1/chat")) == 16


def test_staleness_counts_the_updates_between_the_answer_and_what_it_was_trained_from(service: Any) -> None:
    service.batch_size = 4
    drive_one = {"kind": StreamDriver, "in_flight": 1, "batch": 4}
    assert drive(service, items(4), 1, **drive_one).staleness == 0.0
    real = service.chat

    def late(body: Any, prompt: str, headers: Any, kind: str) -> Any:
        whole = real(body, prompt, headers, kind)
        headers["x-reef-release-id"] = "r0"  # an engine that did not follow
        return whole

    service.chat = late
    assert drive(service, items(4), 1, **drive_one).staleness == 1.0  # r0 answered, r1 was trained from


def test_rollouts_of_a_service_that_only_records_are_done_once_recorded(service: Any, tmp_path: Path) -> None:
    service.trains = False
    end = drive(service, items(20), None, kind=StreamDriver, batch=8, max_ahead=0, records=tmp_path / "r.jsonl")
    assert (end.rollouts, end.failed, end.releases, end.waiting) == (20, 0, 0, 0)
    assert not service.paths("/reef/reports")  # the answers to the reports said it all


def test_what_is_too_little_for_a_batch_is_left_waiting_at_the_end(service: Any) -> None:
    end = drive(service, items(20), None, kind=StreamDriver)
    assert (end.rollouts, end.releases, end.waiting) == (20, 2, 4)


def test_what_is_trained_while_the_driver_asks_whether_anything_will_be_is_counted(service: Any) -> None:
    service.batch_size = 100
    route = service.route

    def trains_first(method: str, parts: list[str], *rest: Any) -> Any:
        if (method, parts) == ("GET", ["reef", "scenarios", "sums"]):
            service.batch_size = 64
            service.pending.reverse()  # the oldest is not the first that is used
            service.train()
        return route(method, parts, *rest)

    service.route = trains_first
    end = drive(service, items(72), None, kind=StreamDriver)
    assert (end.rollouts, end.releases, end.waiting) == (72, 1, 8)


def test_a_number_of_rollouts_is_met_exactly_though_some_fail(service: Any) -> None:
    service.trains = False
    service.faults.extend([400, "drop", 400])
    end = drive(service, items(), None, kind=StreamDriver, rollouts=30)
    assert (end.rollouts, end.failed, len(service.reports)) == (33, 3, 30)


class Unsure(Grader):
    """Right, a person must look, cannot judge: in turns of the prompt's number."""

    id, version = "unsure", "1"

    def grade(self, text: str, gold: str, finish_reason: str) -> Verdict:
        return (self.decided(True, "ok"), self.review("unclear"), self.error("broke"))[int(text) % 3]


def test_review_and_error_are_reported_as_such_and_never_as_a_score(service: Any, tmp_path: Path) -> None:
    service.answer = lambda prompt, index: prompt.split()[1]
    end = drive(service, items(9), None, kind=StreamDriver, grader=Unsure(), records=tmp_path / "r.jsonl")
    assert (end.rollouts, end.failed, end.reward) == (9, 0, 1.0)
    bodies = [body for body, _ in service.reports.values()]
    said = sorted((body["outcome"], body["reason_code"], body.get("score")) for body in bodies)
    assert said == [("correct", "ok", 1.0)] * 3 + [("error", "broke", None)] * 3 + [("review", "unclear", None)] * 3
    assert {row.score for row in read_rollouts(tmp_path / "r.jsonl") if row.outcome != "correct"} == {None}


def test_a_group_with_a_member_without_a_score_holds_nobody_up(service: Any) -> None:
    """The groups of every third prompt can never be whole; the service keeps them until its deadline."""
    service.answer = lambda prompt, index: "1" if int(prompt.split()[1]) % 3 == 0 and index == 5 else "0"
    end = drive(service, items(), 4, grader=Unsure(), groups_per_batch=1, max_ahead=0, stall_timeout_s=60.0)
    assert end.releases == 4
    assert end.waiting >= 1
    incomplete = [id for id in service.pending if service.reports[id][0]["group"].startswith("item0/")]
    assert len(incomplete) == 7


def test_an_item_without_gold_is_a_line_and_the_others_go_on(service: Any, tmp_path: Path) -> None:
    service.trains = False
    supply = [Item.from_text(f"item{i}", f"prompt {i}", None if i < 30 else "2") for i in range(40)]
    end = drive(service, iter(supply), None, kind=StreamDriver, in_flight=2, records=tmp_path / "r.jsonl")
    assert (end.failed, end.rollouts, len(service.reports)) == (30, 40, 10)
    failed = [row for row in read_rollouts(tmp_path / "r.jsonl") if row.error]
    assert {row.item for row in failed} == {f"item{i}" for i in range(30)}
    assert all("not graded: no_gold" in row.error and row.report is None for row in failed if row.error)
    assert len(service.receipts) <= 10 + 2  # once the grader has said that it needs one, nothing more is sampled


def test_an_endless_supply_of_items_without_gold_ends(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reef_harness.drivers.driver.MAX_UNGRADABLE", 50)
    supply = (Item.from_text(f"item{i}", "prompt", None) for i in itertools.count())
    with pytest.raises(HarnessError, match="50 groups in a row could not be graded; the last: not graded: no_gold"):
        drive(service, supply, 1)


def test_a_score_that_is_no_number_is_no_grade(service: Any) -> None:
    class Odd(Grader):
        id, version = "odd", "1"

        def grade(self, text: str, gold: str, finish_reason: str) -> Verdict:
            return Verdict("correct", float("nan"), "ok", True, self.id, self.version)

    end = drive(service, items(3), None, kind=StreamDriver, grader=Odd())
    assert (end.failed, service.reports) == (3, {})


def test_too_few_answers_are_a_failure_of_their_group(service: Any) -> None:
    real = service.chat
    service.chat = lambda body, prompt, headers, kind: real(body | {"n": 3}, prompt, headers, kind)
    with pytest.raises(HarnessError, match=r"8 answers were asked for, those with the indexes \[0, 1, 2\] came"):
        drive(service, items(), 1, in_flight=1, max_failed=1)


def test_tags_and_further_fields_go_with_every_request(service: Any) -> None:
    drive(service, items(2), None, kind=StreamDriver, tags={"team": "red"}, extra={"top_k": 5}, max_tokens=9)
    asked = [(headers, body) for _, path, headers, body in service.requests if path.startswith("/v1/")]
    assert [(h["x-reef-tag-team"], b["top_k"], b["max_tokens"]) for h, b in asked] == [("red", 5, 9)] * 2


def test_bounds_that_make_no_sense_are_refused(service: Any) -> None:
    with pytest.raises(ValueError, match="in_flight is 300, the Client's max_connections only 256"):
        drive(service, items(), 1, kind=StreamDriver, in_flight=300)
    with pytest.raises(ValueError, match="max_ahead: expected 0 or more, or None, got -1"):
        drive(service, items(), 1, max_ahead=-1)


def test_long_ids_make_group_names_that_the_service_takes_and_that_differ(service: Any) -> None:
    supply = (Item.from_text("x" * 250 + str(i), "prompt", "2") for i in range(2))
    drive(service, supply, None)
    groups = {body["group"] for body, _ in service.reports.values()}
    assert len(groups) == 2
    assert max(len(group) for group in groups) <= 256


@pytest.mark.parametrize("wrong", [{"in_flight": 0}, {"batch": 0}])
def test_bounds_below_one_are_refused_by_name(service: Any, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected at least 1, got 0"):
        drive(service, items(), 1, kind=StreamDriver, **wrong)


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"mode": "manual"}, "nothing is trained by itself: the mode of sums is manual"),
        ({"paused": "r3 is quarantined"}, "training is paused: r3 is quarantined"),
    ],
)
def test_a_run_that_is_done_does_not_wait_for_training_that_stands_still(
    service: Any, clock: Clock, state: dict[str, str], told: str
) -> None:
    for name, value in state.items():
        setattr(service, name, value)
    end = drive(service, items(20), None, kind=StreamDriver, stall_timeout_s=60.0)
    assert (end.reported, end.releases, end.waiting, end.standstill) == (20, 0, 20, told)
    with pytest.raises(Stalled, match=f"8 rollouts wait to be used by the service; {told}"):
        drive(service, items(), None, **ONE_BATCH, progress=clock.forward_once_all_wait(8))


ONE_BATCH: dict[str, Any] = {"kind": StreamDriver, "batch": 8, "max_ahead": 0}
HELD = "the gate holds release r0 since 1970-01-01 00:00:00+00:00"
MEASURING = f"{HELD}, and waits for accuracy"


def test_a_paced_driver_waits_for_the_gate_beyond_the_stall_timeout_and_says_so(service: Any, clock: Clock) -> None:
    """It passes after 3200 s, of 4200 that it may take: otherwise the driver waits for 300 s."""
    service.held = {"missing": ["accuracy"], "error": None}
    said: list[str] = []

    def told(progress: Progress) -> None:
        if progress.standstill and len(said) < 8:
            said.append(progress.standstill)
            clock.forward(400.0)
        if len(said) == 8 and service.held is not None:
            service.held = None  # a step begins
            return
        if service.held is None and progress.standstill is None and progress.waiting == 8:
            with service.lock:
                service.train()
        last.append(progress.standstill)

    last: list[str | None] = []
    end = drive(service, items(), 2, **ONE_BATCH, progress=told)
    assert (end.releases, end.standstill) == (2, None)
    assert set(said) == {MEASURING}
    assert last[-1] is None


def test_a_gate_that_never_decides_ends_a_paced_run_with_what_it_waited_for(service: Any, clock: Clock) -> None:
    service.held = {"missing": ["accuracy"], "error": None}
    with pytest.raises(Stalled, match=f"8 rollouts wait to be used by the service; {re.escape(MEASURING)}"):
        drive(service, items(), 1, **ONE_BATCH, progress=clock.forward_once_all_wait(8, 4300.0))


def test_a_run_that_is_done_leaves_what_waits_to_a_gate_that_takes_long(service: Any, clock: Clock) -> None:
    service.held = {"missing": ["accuracy"], "error": None}
    end = drive(service, items(20), None, kind=StreamDriver, progress=clock.forward_once_all_wait(20))
    assert (end.reported, end.releases, end.waiting, end.standstill) == (20, 0, 20, MEASURING)


def test_a_gate_whose_command_failed_stands_still_until_somebody_decides(service: Any, clock: Clock) -> None:
    service.held = {"missing": ["accuracy"], "error": "r0 stays held: it ended with 1"}
    told = f"{HELD}: r0 stays held: it ended with 1"
    end = drive(service, items(20), None, kind=StreamDriver)  # at once, not after the 300 s for what may pass
    assert (end.waiting, end.standstill) == (20, told)
    with pytest.raises(Stalled, match=re.escape(told)):
        drive(service, items(), 1, **ONE_BATCH, progress=clock.forward_once_all_wait(8))


def test_a_key_that_may_not_see_the_status_sees_the_hold_in_the_chain(service: Any, clock: Clock) -> None:
    service.held = {}
    real = service.route

    def route(method: str, parts: list[str], *rest: Any) -> Any:
        if parts == ["reef", "status"]:
            return 403, {"error": {"message": "this key may not", "code": "forbidden"}}
        return real(method, parts, *rest)

    service.route = route
    end = drive(service, items(8), None, kind=StreamDriver, progress=clock.forward_once_all_wait(8))
    assert end.standstill == HELD


def test_a_key_that_may_not_see_the_status_waits_for_training(service: Any) -> None:
    """It trains in a while: a full batch alone is no standstill."""
    service.paused = "for a moment"
    real = service.route

    def route(method: str, parts: list[str], *rest: Any) -> Any:
        if parts == ["reef", "status"]:
            service.paused = None
            service.train()
            return 403, {"error": {"message": "this key may not", "code": "forbidden"}}
        return real(method, parts, *rest)

    service.route = route
    end = drive(service, items(8), None, kind=StreamDriver, stall_timeout_s=60.0)
    assert (end.releases, end.waiting, end.standstill) == (1, 0, None)


def test_a_second_life_counts_its_own_reports_and_says_what_failed(service: Any, tmp_path: Path) -> None:
    service.trains = False
    options: dict[str, Any] = {"kind": StreamDriver, "in_flight": 1, "records": tmp_path / "r.jsonl"}
    first = drive(service, items(3), None, **options)
    assert (first.rollouts, first.reported, first.failed, first.error) == (3, 3, 0, None)
    service.faults.append(400)
    second = drive(service, items(4), None, **options)
    assert (second.rollouts, second.reported, second.failed) == (4, 0, 1)
    assert second.error == "BadRequest: told to answer 400 (HTTP 400)"


def test_links_of_the_chain_are_forgotten_in_time_and_staleness_stays_right(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reef_harness.drivers.following._MAX_LINKS", 2)

    async def run() -> tuple[int, float | None]:
        async with Client(service.url, scenario="sums", retry=QUICK) as client:
            with GroupsDriver(client, items(), FinalGrader(), groups_per_batch=1, max_ahead=0, poll_s=0.01) as driver:
                end = await driver.run(releases=5)
                return len(driver._following._chain), end.staleness

    assert asyncio.run(run()) == (2, 0.0)
