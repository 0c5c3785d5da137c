"""An unmodified terminus-2 through Reef, by base URL and key alone: every turn is captured, and its verdict trains."""

import json
import shutil

import pytest
from conftest import TASKS, Harness, needs_bwrap, wait_for_trained

TURNS = 3
# The starter model never ends its turn here: two characters end it, as they come.
CALL = {"extra_headers": {"x-reef-scenario": "arithmetic"}, "stop": ["55", "5-", "-5", "--"]}


@needs_bwrap
@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_terminus_2_is_captured_turn_by_turn_and_the_verdict_trains_its_trajectory(harness: Harness) -> None:
    options = ("--environment", "bwrap", "--agent", "terminus-2", "-O", f"max_turns={TURNS}")
    options += ("-O", f"llm_call_kwargs={json.dumps(CALL)}")
    job = harness.run("terminus", TASKS, *options, harbor=("--n-attempts", "2", "-n", "3"))
    assert len(job.trials) == 6
    with harness.service.client() as client:
        for trial in job.trials:
            assert trial["exception_info"] is None, trial["exception_info"]
            [detail] = trial["agent_result"]["rollout_details"]
            turns = detail["extra"]["reef_agent_record_id"]
            prompts, sampled, logprobs = (
                detail[name] for name in ("prompt_token_ids", "completion_token_ids", "logprobs")
            )
            assert trial["agent_result"]["metadata"]["n_episodes"] == TURNS
            assert len(turns) == len(set(turns)) == len(prompts) == len(sampled) == len(logprobs) == TURNS
            assert [len(each) for each in sampled] == [len(each) for each in logprobs]
            for turn, receipt in enumerate(map(client.receipt, turns)):
                assert (receipt["prompt_token_ids"], receipt["token_ids"]) == (prompts[turn], sampled[turn])
                assert receipt["logprobs"] == pytest.approx(logprobs[turn])
                assert receipt["session"] == f"{trial['trial_name']}__agent"
                assert receipt["parent"] == (turns[turn - 1] if turn else None)
                assert receipt["exact"]
            for turn in range(1, TURNS):  # each continues the ids before it
                so_far = prompts[turn - 1] + sampled[turn - 1]
                assert prompts[turn][: len(so_far)] == so_far

            verdict = client.report_state(job.reports[trial["trial_name"]]["report"])
            assert verdict.raw["references"] == turns
            assert verdict.state in ("pending", "reserved", "trained")

        reports = [line["report"] for line in job.reports.values()]
        trained = wait_for_trained(client, reports, at_least=1)  # six reports fill a batch, whatever waits before them
        report, release = trained.popitem()
        samples = [each for each in client.lineage(release)["samples"] if each["report_id"] == report]
        assert [each["receipt_id"] for each in samples] == client.report_state(report).raw["references"]
        assert {each["sample"] for each in samples} == {samples[0]["sample"]}  # the turns are one training sequence


def test_terminus_2_is_not_run_where_its_commands_would_reach_this_host(harness: Harness) -> None:
    done = harness.command("run", str(TASKS), "--environment", "hostdir", "--agent", "terminus-2")
    assert done.returncode == 1
    assert "--environment hostdir is no sandbox, and terminus-2 runs what the model writes" in done.stderr
