"""HarborAgent: several scored rollouts a trial, the releases that they make, and the verdict beside them."""

import json
import shutil
from typing import Any

import pytest
from conftest import BATCH, TASKS, Harness, Job, wait_for_trained

HOSTDIR = ("--environment", "hostdir")
ROLLOUTS = 6
ANSWERS = {"reef/chain-of-two": "6", "reef/chain-of-four": "5", "reef/chain-below-zero": "-3"}
KEPT_BESIDE = {"already_claimed", "already_trained"}  # the first report claims; by now a step may have taken it


def test_every_rollout_of_a_trial_is_reported_and_makes_releases(harness: Harness) -> None:
    with harness.service.client() as client:
        before = {release.id for release in client.releases()}
        job = harness.run("graded", TASKS, *HOSTDIR, "-O", "max_tokens=64", "-O", f"rollouts={ROLLOUTS}")
        assert [trial["exception_info"] for trial in job.trials] == [None] * 3, job.said
        rollouts = [each for trial in job.trials for each in reef(trial)["rollouts"]]
        assert len(rollouts) == 3 * ROLLOUTS
        assert all(each["error"] is None and each["score"] in (0.0, 1.0) for each in rollouts), rollouts
        assert {each["grader"].split("/")[0] for each in rollouts} == {"final"}

        reports = [each["report"] for each in rollouts]
        trained = wait_for_trained(client, reports, at_least=3 * ROLLOUTS - BATCH)
        made = {release.id: release for release in client.releases() if release.id not in before}
        assert set(trained.values()) <= set(made)
        for release in set(trained.values()):
            assert made[release].operation == "train"
            batch = {sample["report_id"]: sample for sample in client.lineage(release)["samples"]}
            for report in (report for report, of in trained.items() if of == release):
                rollout = rollouts[reports.index(report)]
                assert batch[report]["receipt_id"] == rollout["receipt"]
                assert batch[report]["reward"] == rollout["score"]


@pytest.fixture(scope="module")
def job(service: Any, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """One job of the three tasks, looked at from several sides."""
    return Harness(service, tmp_path_factory.mktemp("job")).run("seen", TASKS, *HOSTDIR, "-O", "max_tokens=64")


def test_what_was_reported_is_on_the_screen_and_in_the_log_with_the_trials_names(job: Job) -> None:
    for told in (job.said, job.log):
        assert told.count("reef: verdicts: 3 reported\n") == 1
        for trial in job.trials:
            scores = [each["score"] for each in reef(trial)["rollouts"]]
            mean = f"mean {sum(scores) / ROLLOUTS:.2f}"
            assert f"reef: {trial['trial_name']}: {ROLLOUTS} rollouts, {ROLLOUTS} scored and reported, {mean}" in told


def test_rollout_details_are_what_the_receipts_hold(harness: Harness, job: Job) -> None:
    with harness.service.client() as client:
        for trial in job.trials:
            details = trial["agent_result"]["rollout_details"]
            assert len(details) == ROLLOUTS
            assert sorted(receipts(details)) == sorted(reef(trial)["receipts"])
            for detail in details:
                receipt = client.receipt(detail["extra"]["reef_agent_record_id"][0])
                assert detail["prompt_token_ids"] == [receipt["prompt_token_ids"]]
                assert detail["completion_token_ids"] == [receipt["token_ids"]]
                assert detail["logprobs"][0] == pytest.approx(receipt["logprobs"])
                assert receipt["tags"]["trial"] == trial["trial_name"]
                assert receipt["exact"]


def test_tokens_are_counted_over_all_rollouts(job: Job) -> None:
    for trial in job.trials:
        details = trial["agent_result"]["rollout_details"]
        assert trial["agent_result"]["n_output_tokens"] == sum(len(each["completion_token_ids"][0]) for each in details)
        assert trial["agent_result"]["n_input_tokens"] == sum(len(each["prompt_token_ids"][0]) for each in details)


def test_the_answer_handed_in_is_the_majoritys_and_the_verifier_judges_it(job: Job) -> None:
    for trial in job.trials:
        folder = job.folder / trial["trial_name"]
        lines = [json.loads(line) for line in (folder / "agent" / "rollouts.jsonl").read_text().splitlines()]
        handed_in = next(line for line in lines if line["receipt"] == reef(trial)["handed_in"])
        assert (folder / "artifacts" / "app" / "answer.txt").read_text() == handed_in["text"] + "\n"
        fields = [line["text"].partition("<final>")[2] for line in lines if line["finish_reason"] == "stop"]
        votes = {field: fields.count(field) for field in fields if field}
        assert votes[handed_in["text"].partition("<final>")[2]] == max(votes.values())
        right = f"<final>{ANSWERS[trial['task_name']]}</final>" in handed_in["text"]
        assert trial["verifier_result"]["rewards"] == {"reward": float(right)}


def test_the_verdict_is_one_more_report_and_trains_nothing(harness: Harness, job: Job) -> None:
    with harness.service.client() as client:
        for trial in job.trials:
            line = job.reports[trial["trial_name"]]
            assert line["status"] == "reported"
            verdict = client.report_state(line["report"])
            assert (verdict.state, verdict.reason in KEPT_BESIDE) == ("recorded", True)
            assert verdict.raw["references"] == reef(trial)["receipts"]
            assert verdict.raw["score"] == trial["verifier_result"]["rewards"]["reward"]


def test_rollouts_of_a_trial_are_one_group_and_of_another_trial_another(harness: Harness, job: Job) -> None:
    with harness.service.client() as client:
        groups = [
            {client.report_state(each["report"]).raw["group"] for each in reef(trial)["rollouts"]}
            for trial in job.trials
        ]
    assert [len(each) for each in groups] == [1, 1, 1]
    assert len(set.union(*groups)) == 3


def test_without_gold_nothing_is_graded_and_the_verdict_trains_the_answer_handed_in(harness: Harness) -> None:
    gold = harness.folder / "gold.json"
    gold.write_text("{}")
    options = ("-O", f"gold_file={gold}", "-O", "max_tokens=64", "-O", "rollouts=3", "-O", "group=false")
    job = harness.run("ungraded", TASKS, *HOSTDIR, *options, harbor=("--n-attempts", "2"))
    assert len(job.trials) == BATCH
    assert "has no gold answer: nothing is graded before the verifier" in job.said
    with harness.service.client() as client:
        for trial in job.trials:
            assert [each["report"] for each in reef(trial)["rollouts"]] == [None, None, None]
            verdict = client.report_state(job.reports[trial["trial_name"]]["report"])
            assert verdict.raw["references"] == [reef(trial)["handed_in"]]
            assert verdict.raw["score"] == trial["verifier_result"]["rewards"]["reward"]
        wait_for_trained(client, [line["report"] for line in job.reports.values()], at_least=1)


def test_the_gold_answer_does_not_enter_the_environment(harness: Harness) -> None:
    """The folder is kept and read: neither task.toml nor tests are in what the agent's commands could have seen."""
    harness.run("kept", TASKS / "chain-below-zero", *HOSTDIR, "-O", "max_tokens=64", harbor=("--no-delete",))
    roots = list(harness.temporary.glob("harbor-environment-*/root"))
    agents = [root for root in roots if not any((root / "tests").iterdir())]  # the other one is the verifier's
    assert (len(roots), len(agents)) == (2, 1)
    assert (agents[0] / "app" / "answer.txt").exists()
    assert not [path for path in agents[0].rglob("*") if path.name in ("task.toml", "gold.txt", "solve.sh", "test.sh")]


@pytest.mark.parametrize(
    "spec", ["judge:http://127.0.0.1:9/v1,model=m,rubric=/etc/passwd,key_env=REEF_API_KEY", "crashing:Marks"]
)
def test_a_task_chooses_no_grader_that_reaches_further_than_its_text(harness: Harness, spec: str) -> None:
    task = harness.folder / "task"
    shutil.copytree(TASKS / "chain-of-two", task)
    said = (task / "task.toml").read_text()
    (task / "task.toml").write_text(said.replace('grader = "final"', f'grader = "{spec}"'))
    job = harness.run("theirs", task, *HOSTDIR, "-O", "rollouts=2")
    [trial] = job.trials
    assert trial["exception_info"]["exception_type"] == "BadTask"
    assert f"the task names the grader {spec!r}; a task may name" in trial["exception_info"]["exception_message"]
    assert job.reports[trial["trial_name"]]["status"] == "not_graded"


def test_a_grader_that_is_not_known_is_refused_before_anything_runs(harness: Harness) -> None:
    done = harness.command("run", str(TASKS), *HOSTDIR, "-O", "grader=finale", "--", "--jobs-dir", str(harness.folder))
    assert done.returncode != 0
    assert "no grader is named 'finale'" in done.stdout + done.stderr
    assert not list(harness.folder.glob("*/*/result.json"))


def test_a_service_without_such_a_scenario_is_refused_before_anything_runs(harness: Harness) -> None:
    done = harness.command("run", str(TASKS), *HOSTDIR, "--scenario", "geometry")
    assert done.returncode == 1
    assert "has no scenario 'geometry', only 'arithmetic'" in done.stderr


def reef(trial: dict[str, Any]) -> dict[str, Any]:
    """What the agent left in the trial's context."""
    found: dict[str, Any] = trial["agent_result"]["metadata"]["reef"]
    return found


def receipts(details: list[dict[str, Any]]) -> list[str]:
    """Those in Harbor's rollout details."""
    return [receipt for detail in details for receipt in detail["extra"]["reef_agent_record_id"]]
