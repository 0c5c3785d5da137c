"""The plugin: one report a trial, nothing for a crashed one, nothing twice, and what failed is posted later."""

import json

import pytest
from conftest import TASKS, Harness, Job

HOSTDIR = ("--environment", "hostdir")
ONE = TASKS / "chain-of-two"
FEW = ("-O", "max_tokens=64", "-O", "rollouts=2")


def test_running_a_job_again_adds_no_second_report(harness: Harness) -> None:
    job = harness.run("again", ONE, *HOSTDIR, *FEW)
    [trial] = job.trials
    receipt = references(job)[0]
    with harness.service.client() as client:
        first = client.receipt(receipt)["reports"]
        assert len(first) == 2  # the rollout's own grade, and the verdict

        resumed = harness.run("again", ONE, *HOSTDIR, *FEW)
        assert [each["trial_name"] for each in resumed.trials] == [trial["trial_name"]]
        assert client.receipt(receipt)["reports"] == first

        (job.folder / "reef-reports.jsonl").unlink()  # as if it had died before it could write it down
        again = harness.report(job)
        assert (again.returncode, "reward" in again.stdout) == (0, True), again.stderr
        assert client.receipt(receipt)["reports"] == first
    assert "every verdict is reported" in harness.report(job).stdout


def test_a_resumed_job_reports_what_its_earlier_life_left_open(harness: Harness) -> None:
    job = harness.run("left-open", ONE, *HOSTDIR, *FEW)
    line = job.reports.popitem()[1]
    (job.folder / "reef-reports.jsonl").unlink()
    resumed = harness.run("left-open", ONE, *HOSTDIR, *FEW)
    assert resumed.reports[line["trial"]]["report"] == line["report"]


def test_a_trial_that_crashed_reports_nothing_though_harbor_calls_its_reward_valid(harness: Harness) -> None:
    ours = ("-O", f"url={harness.service.url}", "-O", f"key_file={harness.service.key_file}", *FEW)
    environment = ("--environment", "reef_harness.harbor.environments:HostDirEnvironment")
    job = harness.run("crashed", ONE, *environment, "--agent", "crashing:CrashesAtTheEnd", *ours)
    [trial] = job.trials
    assert trial["reward_valid"] is True
    line = job.reports[trial["trial_name"]]
    assert (line["status"], line["reason"]) == (
        "not_graded",
        "the trial ended with RuntimeError: the agent fell over",
    )
    assert f"{trial['trial_name']}: nothing reported: {line['reason']}" in job.said
    with harness.service.client() as client:
        found = [client.receipt(receipt)["reports"] for receipt in references(job)]
    assert [len(each) for each in found] == [1, 1]  # what the agent graded stands; the trial's verdict is not there


@pytest.mark.parametrize("agent", ["CrashesAtFirst", "CrashesAtTheEnd"])
def test_of_a_trial_that_harbor_tries_again_the_last_attempt_is_reported(harness: Harness, agent: str) -> None:
    """The crashes count here: the first attempt's verdict would take the trial's id, and the last could not have it."""
    ours = ("-O", f"url={harness.service.url}", "-O", f"key_file={harness.service.key_file}", *FEW)
    environment = ("--environment", "reef_harness.harbor.environments:HostDirEnvironment")
    twice = ("--max-retries", "1", "--pk", "graded_exceptions=RuntimeError")
    job = harness.run("again", ONE, *environment, "--agent", f"crashing:{agent}", *ours, harbor=twice)
    [line] = (job.folder / "reef-reports.jsonl").read_text().splitlines()
    assert json.loads(line)["status"] == "reported", line
    assert job.said.count("nothing reported yet: Harbor tries it again") == 1
    with harness.service.client() as client:
        verdict = client.report_state(json.loads(line)["report"])
        assert verdict.raw["references"] == references(job)  # of the attempt that is left


def test_a_service_that_is_down_is_said_and_its_reports_can_be_posted_later(harness: Harness) -> None:
    nowhere = ("--pk", "url=http://127.0.0.1:9", "--pk", "patience_s=0.2")
    job = harness.run("down", TASKS, *HOSTDIR, *FEW, harbor=(*nowhere, "-n", "3"))
    assert len(job.trials) == 3
    assert [trial["exception_info"] for trial in job.trials] == [None] * 3  # the trials went on
    assert {line["status"] for line in job.reports.values()} == {"failed"}
    reasons = [line["reason"] for line in job.reports.values()]
    assert all(reason.startswith("Unreachable: POST http://127.0.0.1:9/reef/report") for reason in reasons), reasons
    assert job.said.count("could NOT be reported") == 3
    for told in (job.said, job.log):
        assert told.count("reef: verdicts: 3 failed\n") == 1
        assert f"post what failed later: reef-harness harbor report {job.folder}" in told

    later = harness.report(job)
    assert later.returncode == 0, later.stderr
    assert {line["status"] for line in job.reports.values()} == {"reported"}
    with harness.service.client() as client:
        for line in job.reports.values():
            assert client.report_state(line["report"]).raw["score"] == line["score"]


def test_a_receipt_that_the_service_does_not_know_is_a_clear_line_and_the_others_are_reported(harness: Harness) -> None:
    job = harness.run("unknown", TASKS, *HOSTDIR, *FEW)
    (job.folder / "reef-reports.jsonl").unlink()
    broken = job.trials[0]
    broken["trial_name"] += "-copy"  # a trial of its own, whose report was never made
    broken["agent_result"]["metadata"]["reef"]["references"] = ["rcp_nobody_knows"]
    folder = job.folder / broken["trial_name"]
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps(broken))

    done = harness.report(job)
    assert done.returncode == 1
    assert "no receipt rcp_nobody_knows" in done.stdout
    assert "1 could not be reported" in done.stderr
    assert [line["status"] for line in job.reports.values()].count("reported") == 3


def references(job: Job) -> list[str]:
    """The receipts of a job's only trial."""
    [trial] = job.trials
    found: list[str] = trial["agent_result"]["metadata"]["reef"]["references"]
    return found
