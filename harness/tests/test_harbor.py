"""What of the Harbor room needs no Harbor: tasks, rollouts, the pick, verdicts, the reports of a job, the command."""

import asyncio
import dataclasses
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from reef_harness import Client, Completion, FinalGrader, Item, Retry
from reef_harness.cli import main
from reef_harness.graders import Grader, grader_of
from reef_harness.graders import Verdict as Grade
from reef_harness.harbor import run
from reef_harness.harbor.reports import FILE, Reports, read
from reef_harness.harbor.rollouts import Rollout, Rollouts, pick, read_by, references
from reef_harness.harbor.task import BadTask, TaskSays, grader_of_task, read_task
from reef_harness.harbor.verdict import NotGraded, Verdict, verdict_of

QUICK = Retry(first_s=0.01, longest_s=0.02, total_s=0.1)
JOB = "7b9e4f1a-0000-4000-8000-000000000001"


# ---- a task's folder


def task(folder: Path, metadata: str = "", gold_file: str | None = None) -> Path:
    (folder / "tests").mkdir(parents=True, exist_ok=True)
    (folder / "task.toml").write_text(f'[task]\nname = "reef/sum"\n[metadata]\n{metadata}\n')
    if gold_file is not None:
        (folder / "tests" / "gold.txt").write_text(gold_file)
    return folder


@pytest.mark.parametrize(
    ("metadata", "gold_file", "gold"),
    [
        ('gold = "6"', None, "6"),
        ("gold = -3", None, "-3"),
        ('gold = "6"', "7", "6"),  # task.toml says it first
        ("", "\\frac{1}{2}\n", "\\frac{1}{2}"),
        ("", None, None),
    ],
)
def test_the_gold_answer_is_in_task_toml_or_in_a_file_of_the_tests(
    tmp_path: Path, metadata: str, gold_file: str | None, gold: str | None
) -> None:
    assert read_task(task(tmp_path, f'{metadata}\ngrader = "final"', gold_file)) == TaskSays("reef/sum", gold, "final")


@pytest.mark.parametrize(
    ("metadata", "gold_file", "said"),
    [
        ("gold = 0.5", None, "gold must be a text that is not empty, got 0.5"),
        ('gold = " "', None, "gold must be a text that is not empty, got ' '"),
        ("gold = true", None, "gold must be a text that is not empty, got True"),
        ("", "\n", "gold.txt is empty"),
        ("gold = ", None, "cannot read"),
    ],
)
def test_a_gold_answer_that_cannot_be_one_is_refused(
    tmp_path: Path, metadata: str, gold_file: str | None, said: str
) -> None:
    with pytest.raises(BadTask, match=said):
        read_task(task(tmp_path, metadata, gold_file))


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        ("final", "final"),
        ("final:comparing=latex", "final"),
        ("boxed", "boxed"),
        ("number:where=last,tolerance=0.01", "number"),
        ("number:tolerance=1/100", "number"),
        ("choice:options=ABCD", "choice"),
    ],
)
def test_a_task_may_name_a_grader_that_reads_text_and_its_plain_options(spec: str, kind: str) -> None:
    assert grader_of_task(spec).id == grader_of(kind).id


@pytest.mark.parametrize(
    "spec",
    [
        "judge:http://127.0.0.1:9/v1,model=m,rubric=/etc/passwd,key_env=REEF_API_KEY",
        "os:system",
        "reef_harness.graders.final:FinalGrader",  # importing is running
        "code:isolation=process",
        "code:wall_s=1000000",
        "code:python=/bin/sh",
        "math-verify:timeout_s=1000000",
        "json-schema:timeout_s=1000000",
        "number:tolerance=1e999999999",  # a number of a thousand million digits
        "number:tolerance",
        "final:unknown=1",
        "choice:options=A/../B",
        "finale",
        "",
    ],
)
def test_a_task_may_not_name_a_grader_that_reaches_further(spec: str) -> None:
    with pytest.raises(BadTask, match=r"a task may name final:comparing, boxed, .*-O grader=\.\.\."):
        grader_of_task(spec)


@pytest.mark.parametrize("spec", ["final:comparing=nothing", "number:tolerance=1/0"])
def test_an_option_of_a_tasks_grader_that_is_no_good_is_the_tasks_fault(spec: str) -> None:
    with pytest.raises(BadTask, match=f"the task names the grader '{spec}': "):
        grader_of_task(spec)


@pytest.mark.parametrize("name", ["task.toml", "tests/gold.txt", "tests"])
def test_a_link_out_of_a_tasks_folder_is_not_followed(tmp_path: Path, name: str) -> None:
    """Its first line would go to the service, as the text that a report is graded by."""
    theirs = task(tmp_path / "theirs", gold_file="6")
    (tmp_path / "host").mkdir()
    moved = (theirs / name).rename(tmp_path / "host" / Path(name).name)
    (theirs / name).symlink_to(moved)
    with pytest.raises(BadTask, match=r"is a link out of the task's folder, to .*/host/") as caught:
        read_task(theirs)
    assert str(theirs) in str(caught.value)


def test_a_link_within_a_tasks_folder_is_followed_wherever_the_folder_is_seen_from(tmp_path: Path) -> None:
    ours = task(tmp_path / "ours")
    (ours / "answer").write_text("6")
    (ours / "tests" / "gold.txt").symlink_to("../answer")
    (tmp_path / "seen").symlink_to(ours)
    assert read_task(tmp_path / "seen").gold == "6"


def test_a_gold_that_is_no_text_of_sensible_size_is_refused(tmp_path: Path) -> None:
    gold = task(tmp_path) / "tests" / "gold.txt"
    gold.write_text("6" * 999_999)
    assert read_task(tmp_path).gold == "6" * 999_999
    gold.write_text("6" * 1_000_000)
    with pytest.raises(BadTask, match=r"gold\.txt has 1,000,000 bytes, expected less than 1,000,000"):
        read_task(tmp_path)
    gold.unlink()
    gold.mkdir()
    with pytest.raises(BadTask, match=r"cannot read .*gold\.txt: it is no file"):
        read_task(tmp_path)
    gold.rmdir()
    os.mkfifo(gold)  # reading it would wait for ever
    with pytest.raises(BadTask, match=r"cannot read .*gold\.txt: it is no file"):
        read_task(tmp_path)
    gold.unlink()
    gold.symlink_to("gold.txt")
    with pytest.raises(BadTask, match=r"cannot read .*gold\.txt: "):
        read_task(tmp_path)
    gold.unlink()
    gold.symlink_to("answer")  # which is not there
    with pytest.raises(BadTask, match=r"cannot read .*gold\.txt: "):
        read_task(tmp_path)


# ---- rollouts


def sample(
    service: Any,
    gold: str | None = "2",
    rollouts: int = 4,
    grader: Grader | None = None,
    kind: type[Client] = Client,
    **options: Any,
) -> list[Rollout]:
    async def whole() -> list[Rollout]:
        async with kind(service.url, scenario="sums", retry=QUICK) as client:
            item = Item.from_text("reef/sum", "1+1", gold)
            asked = {"asking": {"token_ids": True}, "group": "g", "metadata": {"trial": "t"}, "pause_s": 0, **options}
            return await Rollouts(client, item, grader or FinalGrader(), **asked).run(rollouts, concurrency=1)

    return asyncio.run(whole())


def test_each_rollout_is_a_request_of_its_own_and_reported_against_its_receipt(service: Any) -> None:
    rollouts = sample(service, rollouts=3)
    bodies = [body for body, _ in service.reports.values()]
    assert [body["references"] for body in bodies] == [[each.receipt] for each in rollouts]
    assert [(body["score"], body["group"], body["metadata"]["rollout"]) for body in bodies] == [
        (1.0, "g", 0),
        (1.0, "g", 1),
        (1.0, "g", 2),
    ]
    assert len(service.paths("/v1/chat/completions")) == 3
    assert list(service.reports) == [f"harbor-{each.receipt}" for each in rollouts]
    assert [each.answer and each.answer.receipt for each in rollouts] == [each.receipt for each in rollouts]


def test_a_report_that_the_service_refuses_leaves_the_answer_to_be_handed_in(service: Any) -> None:
    def right(prompt: str, index: int) -> str:
        service.faults.append(400)  # for the next request
        return final(2)

    service.answer = right
    [rollout] = sample(service, rollouts=1)
    assert (rollout.text, rollout.score, rollout.scored) == (final(2), 1.0, False)
    assert rollout.error == "BadRequest: told to answer 400 (HTTP 400)"
    assert (rollout.line()["report"], service.reports) == (None, {})


def test_a_rollout_that_fails_is_said_and_the_others_go_on(service: Any) -> None:
    service.faults.extend([400])  # the first request
    rollouts = sample(service, rollouts=3)
    assert rollouts[0].error == "BadRequest: told to answer 400 (HTTP 400)"
    assert [each.scored for each in rollouts] == [False, True, True]


def test_an_answer_that_an_engine_failed_is_asked_for_again(service: Any) -> None:
    service.faults.extend([502, 502])
    assert [each.error for each in sample(service, rollouts=1, retries=2)] == [None]
    service.faults.extend([502, 502])
    [failed] = sample(service, rollouts=1, retries=1)
    assert failed.error == "EngineFailed: told to answer 502 (HTTP 502)"


def test_without_gold_nothing_is_reported(service: Any) -> None:
    rollouts = sample(service, gold=None)
    assert service.reports == {}
    assert [(each.outcome, each.report, each.error) for each in rollouts] == [(None, None, None)] * 4


def test_a_gold_answer_that_the_grader_cannot_use_grades_nothing(service: Any) -> None:
    rollouts = sample(service, gold="two")
    assert service.reports == {}
    assert all(each.error and each.error.startswith("not graded: bad_gold") for each in rollouts)


def test_an_aborted_answer_is_neither_graded_nor_handed_in(service: Any) -> None:
    service.finish_reason = "abort"
    rollouts = sample(service)
    assert service.reports == {}
    assert rollouts[0].error == "not a whole rollout: finish_reason 'abort'"
    assert pick(rollouts, FinalGrader()) is None


class Broken(Grader):
    """A user's grader with mistakes: answer 0 gets no number, 1 an exception; nothing can be read."""

    id, version = "broken", "1"

    def grade(self, text: str, gold: str, finish_reason: str) -> Grade:
        """A score, of a kind."""
        return Grade("correct", float("nan") if text == "0" else 1.0, "right", True, self.id, self.version)

    async def judge(self, item: Item, text: str, finish_reason: str) -> Grade:
        """As its parent but for answer 1."""
        if text == "1":
            raise RuntimeError("no luck")
        return await super().judge(item, text, finish_reason)

    def read(self, text: str) -> str | None:
        """Fails, as Python does at a number of more than 4,300 digits."""
        return str(10 ** int(text))


def test_a_grader_that_fails_costs_the_rollouts_that_it_fails_at_and_no_others(service: Any) -> None:
    texts = itertools.count()
    service.answer = lambda prompt, index: str(next(texts))
    rollouts = sample(service, rollouts=3, grader=Broken())
    assert [each.error for each in rollouts] == [
        "not graded: the score of broken 1 is nan",
        "RuntimeError: no luck",
        None,
    ]
    assert [each.scored for each in rollouts] == [False, False, True]
    assert [each.text for each in rollouts] == ["0", "1", "2"]  # all can be handed in
    assert [body["references"] for body, _ in service.reports.values()] == [[rollouts[2].receipt]]


class Mute(Client):
    """A client whose first answer has no choices, and whose second is no answer at all."""

    asked = 0

    async def chat(self, *args: Any, **kwargs: Any) -> Completion:
        """The service's answer, spoiled."""
        answer = await super().chat(*args, **kwargs)
        Mute.asked += 1
        if Mute.asked == 2:
            raise TypeError("'NoneType' object is not subscriptable")
        return dataclasses.replace(answer, choices=()) if Mute.asked == 1 else answer


def test_an_answer_without_choices_is_a_rollout_that_failed(service: Any) -> None:
    assert [each.error for each in sample(service, rollouts=3, kind=Mute)] == [
        "UnexpectedAnswer: 1 answers were asked for, those with the indexes [] came",
        "TypeError: 'NoneType' object is not subscriptable",
        None,
    ]


# ---- the pick


def test_an_answer_at_which_reading_fails_does_not_vote_and_ends_nothing() -> None:
    found = pick(answers("5000", "2", "2"), Broken())  # 10^5000 has 5,001 digits
    assert found is not None
    assert found.index == 1
    assert read_by(Broken(), "5000") is None


def answers(*texts: str, cut: Sequence[int] = ()) -> list[Rollout]:
    return [
        Rollout("sum", 0, i, receipt=f"rcp_{i}", text=text, finish_reason="length" if i in cut else "stop")
        for i, text in enumerate(texts)
    ]


def final(value: int) -> str:
    return f"<final>{value}</final>"


@pytest.mark.parametrize(
    ("rollouts", "picked"),
    [
        (answers(final(1), final(2), final(2)), 1),
        (answers(final(2), final(1), final(1), final(2)), 0),  # a tie: the one that came first
        (answers("?", final(3)), 1),  # what cannot be read does not vote
        (answers(final(2), final(2), final(3), cut=[0, 1]), 2),  # nor what length cut
        (answers("?", "!", cut=[0]), 1),
        (answers("?", "!", cut=[0, 1]), 0),
        ([Rollout("sum", 0, 0, error="down")], None),
    ],
)
def test_the_answer_that_most_agree_on_is_handed_in(rollouts: list[Rollout], picked: int | None) -> None:
    found = pick(rollouts, FinalGrader())
    assert (found.index if found else None) == picked


def test_without_a_grader_the_first_answer_that_the_model_ended_is_handed_in() -> None:
    found = pick(answers(final(1), final(2), final(2), cut=[0]), None)
    assert found is not None
    assert found.index == 1


def test_a_verdict_refers_to_all_rollouts_only_where_they_have_grades_of_their_own(service: Any) -> None:
    graded = sample(service, rollouts=3)
    assert references(graded, graded[1]) == [each.receipt for each in graded]
    ungraded = sample(service, gold=None, rollouts=3)
    assert references(ungraded, ungraded[1]) == [ungraded[1].receipt]
    assert references([Rollout("sum", 0, 0, error="down")], None) == []


# ---- verdicts


def result(**changes: Any) -> dict[str, Any]:
    """A trial's result.json, as far as it is read."""
    whole = {
        "trial_name": "sum__abc",
        "task_name": "reef/sum",
        "config": {"job_id": JOB},
        "agent_result": {"metadata": {"reef": {"references": ["rcp_1", "rcp_2"]}}, "rollout_details": []},
        "verifier_result": {"rewards": {"reward": 1.0}},
        "reward_valid": True,
        "exception_info": None,
        "step_results": None,
    }
    return {**whole, **changes}


def raised(kind: str, message: str = "it fell\nover") -> dict[str, str]:
    return {"exception_type": kind, "exception_message": message}


def test_a_trials_reward_is_a_report_on_its_receipts() -> None:
    assert verdict_of(result()) == Verdict(
        f"harbor-{JOB}-sum__abc", "sum__abc", "reef/sum", ("rcp_1", "rcp_2"), 1.0, {"reward": 1.0}
    )


def test_the_turns_of_terminus_2_are_found_in_its_rollout_details() -> None:
    details = [
        {"extra": {"reef_agent_record_id": ["rcp_1", None, "rcp_2"]}},
        {"extra": {"reef_agent_record_id": ["rcp_2", "rcp_3"]}},
        {},
    ]
    found = verdict_of(result(agent_result={"metadata": {"n_episodes": 3}, "rollout_details": details}))
    assert isinstance(found, Verdict)
    assert found.references == ("rcp_1", "rcp_2", "rcp_3")


def test_a_retry_of_a_trial_has_the_same_report_and_another_job_another() -> None:
    first = verdict_of(result(id="one"))
    assert first == verdict_of(result(id="two"))
    other = verdict_of(result(config={"job_id": "another"}))
    assert isinstance(first, Verdict)
    assert isinstance(other, Verdict)
    assert first.id != other.id


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"exception_info": raised("RuntimeError")}, "the trial ended with RuntimeError: it fell"),
        ({"exception_info": raised("CancelledError", "")}, "the trial ended with CancelledError"),
        ({"step_results": [{"exception_info": raised("KeyError")}]}, "the trial ended with KeyError: it fell"),
        ({"verifier_result": None, "reward_valid": False}, "the verifier gave no reward"),
        ({"reward_valid": False}, "Harbor calls its reward invalid"),
        ({"verifier_result": {"rewards": {"a": 1, "b": 0}}}, "no reward is named 'reward', only a, b"),
        ({"verifier_result": {"rewards": {"reward": float("nan")}}}, "a reward is no finite number"),
        ({"agent_result": None}, "its agent kept no receipts"),
    ],
)
def test_a_trial_that_was_not_graded_is_no_report_and_says_why(changes: dict[str, Any], reason: str) -> None:
    found = verdict_of(result(**changes))
    assert isinstance(found, NotGraded)
    assert found.reason.startswith(reason)


def test_exceptions_that_are_named_count_as_the_policys_own_fault() -> None:
    late = result(exception_info=raised("AgentTimeoutError"), verifier_result={"rewards": {"reward": 0.0}})
    assert isinstance(verdict_of(late), NotGraded)
    found = verdict_of(late, graded_exceptions={"AgentTimeoutError"})
    assert isinstance(found, Verdict)
    assert found.score == 0.0


def test_a_single_reward_counts_whatever_its_name_and_of_several_the_one_that_is_asked_for() -> None:
    alone = verdict_of(result(verifier_result={"rewards": {"accuracy": 0.5}}))
    several = verdict_of(result(verifier_result={"rewards": {"a": 1, "b": 0.25}}), reward_key="b")
    assert isinstance(alone, Verdict)
    assert isinstance(several, Verdict)
    assert (alone.score, several.score, several.rewards) == (0.5, 0.25, {"a": 1.0, "b": 0.25})


# ---- a job's reports


def job(folder: Path, *trials: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    for trial in trials:
        (folder / trial["trial_name"]).mkdir()
        (folder / trial["trial_name"] / "result.json").write_text(json.dumps(trial))
    return folder


def asked(service: Any) -> str:
    """A receipt."""

    async def whole() -> str:
        async with Client(service.url, scenario="sums") as client:
            return (await client.chat("1+1")).receipt

    return asyncio.run(whole())


def of(receipt: str) -> dict[str, Any]:
    return {"metadata": {"reef": {"references": [receipt]}}}


def test_what_a_job_owes_is_posted_once_and_what_cannot_be_stays_owed(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = result(trial_name="good", agent_result=of(asked(service)))
    crashed = result(trial_name="crashed", exception_info=raised("RuntimeError"))
    unknown = result(trial_name="unknown", agent_result=of("rcp_nobody_knows"))
    folder = job(tmp_path / "job", good, crashed, unknown)

    command = ["harbor", "report", str(folder), "--url", service.url]
    assert main(command) == 1
    said = capsys.readouterr()
    assert "crashed: nothing reported: the trial ended with RuntimeError: it fell" in said.out
    assert f"good: reward 1 reported: pending (harbor-{JOB}-good)" in said.out
    assert "unknown: reward 1 could NOT be reported: NotFound: " in said.out
    assert f"1 could not be reported; they are in {folder / FILE}" in said.err
    assert {line["trial"]: line["status"] for line in read(folder)} == {
        "crashed": "not_graded",
        "good": "reported",
        "unknown": "failed",
    }
    assert main(command) == 1
    assert "good" not in capsys.readouterr().out
    assert list(service.reports) == [f"harbor-{JOB}-good"]


def test_an_acknowledgement_that_was_lost_does_not_make_a_second_report(service: Any, tmp_path: Path) -> None:
    trial = result(agent_result=of(asked(service)))
    folder = job(tmp_path / "job", trial)

    async def whole() -> list[str]:
        async with Client(service.url, retry=Retry(total_s=0)) as client:
            reports = Reports(folder, client)
            service.faults.append("lose")
            first = await reports.trial(trial)
            return [first.status, *[line.status async for line in reports.missing()]]

    assert asyncio.run(whole()) == ["failed", "reported"]
    assert len(service.reports) == 1


def test_a_line_that_a_crash_cut_is_left_out(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"trial": "a", "status": "reported"}\n{"trial": "b", "stat')
    assert [line["trial"] for line in read(tmp_path)] == ["a"]


@pytest.mark.parametrize(
    "cut", ['{"trial_name": "a', "", "[]", '{"trial_name": "a", "task_name": "t", "verifier_result": 1}']
)
def test_a_result_that_was_cut_short_is_a_line_and_the_others_are_reported(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], cut: str
) -> None:
    good = {**result(agent_result=of(asked(service))), "trial_name": "b-good"}
    folder = job(tmp_path / "job", result(trial_name="a-cut"), good)
    (folder / "a-cut" / "result.json").write_text(cut)
    command = ["harbor", "report", str(folder), "--url", service.url]
    assert main(command) == 1
    said = capsys.readouterr().out
    assert f"a-cut: it could NOT be reported: cannot read {folder / 'a-cut' / 'result.json'}: " in said
    assert {line["trial"]: line["status"] for line in read(folder)} == {"a-cut": "failed", "b-good": "reported"}


def test_a_folder_that_is_no_jobs_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["harbor", "report", str(tmp_path)]) == 1
    assert "is no folder of a Harbor job: it has no config.json" in capsys.readouterr().err


# ---- the command

SERVICE = run.Service("http://127.0.0.1:8080", "sums", "reef_secret", Path("/keys/api-key"))


def pairs(arguments: list[str], flag: str) -> dict[str, str]:
    """What is set by a flag that is given NAME=VALUE, the last of each."""
    given = [after for before, after in itertools.pairwise(arguments) if before == flag]
    return dict(each.split("=", 1) for each in given)


def test_our_agent_gets_the_service_and_the_key_is_in_no_argument(tmp_path: Path) -> None:
    arguments = run.arguments_of(str(task(tmp_path)), "reef", "bwrap", SERVICE, ["rollouts=3"], ["-n", "2"])
    assert arguments[:6] == ["run", "--path", str(task(tmp_path)), "--env", run.ENVIRONMENTS["bwrap"], "--agent"]
    assert pairs(arguments, "--ak") == {
        "url": "http://127.0.0.1:8080",
        "scenario": "sums",
        "key_file": "/keys/api-key",
        "rollouts": "3",
    }
    assert pairs(arguments, "--pk") == {"url": "http://127.0.0.1:8080", "key_file": "/keys/api-key"}
    assert arguments[-2:] == ["-n", "2"]
    assert not any("reef_secret" in each for each in arguments)
    assert run.variables_of(SERVICE, {"A": "1"}) == {
        "A": "1",
        "HARBOR_TELEMETRY": "off",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "REEF_API_KEY": "reef_secret",
    }


def test_keys_that_are_there_for_others_stay_what_they_are() -> None:
    """A verifier that has a judge of its own sends what is in OPENAI_API_KEY to whom it asks."""
    theirs = {"OPENAI_API_KEY": "sk-theirs", "ANTHROPIC_API_KEY": "sk-ant-theirs"}
    assert run.variables_of(SERVICE, theirs).items() >= theirs.items()
    open_one = dataclasses.replace(SERVICE, key=None)
    assert run.variables_of(open_one, {})["REEF_API_KEY"] == "none"  # clients want one


@pytest.mark.parametrize("agent", ["terminus-2", "codex", "claude-code"])
def test_an_agent_that_asks_by_base_url_takes_the_key_from_its_variable(agent: str) -> None:
    arguments = run.arguments_of("tasks@1", agent, "docker", SERVICE, [], [])
    assert arguments[arguments.index("--api-key-name") + 1] == "REEF_API_KEY"


@pytest.mark.parametrize("agent", ["reef", "oracle", "nop", "theirs:Agent"])
def test_no_other_agent_is_told_of_a_key(agent: str) -> None:
    assert "--api-key-name" not in run.arguments_of("tasks@1", agent, "docker", SERVICE, [], [])


def test_terminus_2_is_set_so_that_it_keeps_every_turn() -> None:
    arguments = run.arguments_of("some-dataset@1.0", "terminus-2", "docker", SERVICE, [], [])
    assert arguments[1:3] == ["--dataset", "some-dataset@1.0"]
    assert arguments[arguments.index("--base-url") + 1] == "http://127.0.0.1:8080/v1"
    assert pairs(arguments, "--ak") == {
        "collect_rollout_details": "true",
        "session_id_headers": '["x-session-id"]',
        "llm_call_kwargs": '{"extra_headers": {"x-reef-scenario": "sums"}}',
        "enable_summarize": "false",
        "record_terminal_session": "false",
    }


@pytest.mark.parametrize(
    ("agent", "model", "base_url"),
    [
        ("claude-code", "anthropic/reef", "http://127.0.0.1:8080/scenarios/sums"),
        ("codex", "openai/reef", "http://127.0.0.1:8080/scenarios/sums/v1"),
    ],
)
def test_other_agents_get_the_scenario_in_the_base_url(agent: str, model: str, base_url: str) -> None:
    arguments = run.arguments_of("tasks@1", agent, "docker", SERVICE, [], [])
    assert arguments[arguments.index("--model") + 1] == model
    assert arguments[arguments.index("--base-url") + 1] == base_url


def test_what_a_model_writes_is_not_run_in_a_folder_of_this_host(tmp_path: Path) -> None:
    with pytest.raises(run.HarnessError, match="hostdir is no sandbox, and terminus-2 runs what the model writes"):
        run.arguments_of(str(task(tmp_path)), "terminus-2", "hostdir", SERVICE, [], [])


@pytest.mark.parametrize("agent", ["reef", "oracle", "nop"])
def test_the_tests_of_a_dataset_are_not_run_in_a_folder_of_this_host(agent: str, tmp_path: Path) -> None:
    with pytest.raises(run.HarnessError, match="tasks@1 is a dataset: its tests would run on this host"):
        run.arguments_of("tasks@1", agent, "hostdir", SERVICE, [], [])
    assert "--path" in run.arguments_of(str(task(tmp_path)), agent, "hostdir", SERVICE, [], [])
    assert "--dataset" in run.arguments_of("tasks@1", agent, run.ENVIRONMENTS["hostdir"], SERVICE, [], [])


@pytest.mark.parametrize("environment", ["hostdir", "docker", run.ENVIRONMENTS["hostdir"]])
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--dataset", "x@1"], "--dataset"),
        (["--dataset=x@1"], "--dataset"),
        (["-n", "2", "-d", "x@1"], "-d"),
        (["-dx@1"], "-d"),
        (["-qydx@1"], "-d"),
        (["-t", "org/name"], "-t"),
        (["--repo", "org/name"], "--repo"),
        (["--task-git-url=https://host/x", "--task-git-commit=abc"], "--task-git-commit, --task-git-url"),
        (["-p", "elsewhere"], "-p"),
    ],
)
def test_no_other_tasks_than_the_folders_are_chosen_behind_the_dashes(
    words: list[str], named: str, environment: str, tmp_path: Path
) -> None:
    """They would run on this host, or get whatever variables of it they ask for: --yes is for the folder."""
    with pytest.raises(run.HarnessError, match=f"^{named} cannot be said behind --: TASKS says which tasks are run"):
        run.arguments_of(str(task(tmp_path)), "reef", environment, SERVICE, [], words)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--agent", "terminus-2"], "--agent"),
        (["--agent=terminus-2"], "--agent"),
        (["-a", "terminus-2"], "-a"),
        (["-aterminus-2"], "-a"),
        (["--agent-import-path", "their:Agent"], "--agent-import-path"),
        (["-e", "docker", "-c", "job.yaml"], "-c, -e"),
        (["--config=job.yaml"], "--config"),
        (["--environment-import-path=their:Environment"], "--environment-import-path"),
        (["--user-agent", "codex"], "--user-agent"),
    ],
)
def test_hostdir_is_not_given_to_another_agent_behind_the_dashes(words: list[str], named: str, tmp_path: Path) -> None:
    with pytest.raises(run.HarnessError, match=f"^{named} cannot be said behind -- with --environment hostdir"):
        run.arguments_of(str(task(tmp_path)), "reef", "hostdir", SERVICE, [], words)
    for environment in ("docker", run.ENVIRONMENTS["hostdir"]):  # a sandbox, or what was asked for by its whole name
        assert run.arguments_of(str(task(tmp_path)), "reef", environment, SERVICE, [], words)[-len(words) :] == words


def test_where_a_datasets_registry_is_may_be_said_behind_the_dashes() -> None:
    words = ["--registry-path", "registry.json"]
    assert run.arguments_of("tasks@1", "reef", "docker", SERVICE, [], words)[-2:] == words


def test_what_terminus_2_needs_of_this_host_in_bwrap_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(run.HarnessError, match="terminus-2 needs tmux, and bwrap has the programs of this host: apt-"):
        run.arguments_of(str(task(tmp_path)), "terminus-2", "bwrap", SERVICE, [], [])
    assert "terminus-2" in run.arguments_of(str(task(tmp_path)), "terminus-2", "docker", SERVICE, [], [])


def test_only_a_folder_of_this_machine_gets_the_variables_that_it_asks_for(tmp_path: Path) -> None:
    assert "--yes" in run.arguments_of(str(task(tmp_path)), "reef", "docker", SERVICE, [], [])
    assert "--yes" not in run.arguments_of("tasks@1", "reef", "docker", SERVICE, [], [])


@pytest.mark.parametrize("tasks", ["./taks", "/no/such", "../x", "taks", "~/tasks", "a/b/c", "here/taks", "a b@1"])
def test_a_folder_that_is_not_there_is_said(tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(run.HarnessError, match=f"no such folder: {tasks}"):
        run.arguments_of(tasks, "reef", "docker", SERVICE, [], [])


def test_a_folder_without_a_task_is_said(tmp_path: Path) -> None:
    (tmp_path / "task" / "environment").mkdir(parents=True)
    with pytest.raises(
        run.HarnessError, match=r"has no task: expected a folder with a task\.toml, or a folder of such"
    ):
        run.arguments_of(str(tmp_path), "reef", "docker", SERVICE, [], [])
    task(tmp_path / "task")
    for folder in (tmp_path, tmp_path / "task"):
        assert run.arguments_of(str(folder), "reef", "docker", SERVICE, [], [])[1:3] == ["--path", str(folder)]


def test_an_option_without_a_value_is_said() -> None:
    with pytest.raises(run.HarnessError, match="--option rollouts: expected NAME=VALUE"):
        run.arguments_of("tasks@1", "reef", "docker", SERVICE, ["rollouts"], [])


def test_a_file_in_the_place_of_a_folder_is_said(tmp_path: Path) -> None:
    (tmp_path / "task.toml").write_text("")
    with pytest.raises(run.HarnessError, match=r"task\.toml is a file: expected the folder of a task"):
        run.arguments_of(str(tmp_path / "task.toml"), "reef", "docker", SERVICE, [], [])


@pytest.mark.parametrize("dataset", ["terminal-bench@2.0", "org/name", "org/name@sha256:ab", "a-b_c.d@head"])
def test_a_dataset_is_handed_on_by_its_name(dataset: str) -> None:
    assert run.arguments_of(dataset, "reef", "docker", SERVICE, [], [])[1:3] == ["--dataset", dataset]


def test_a_python_that_is_too_old_is_said_with_what_to_do() -> None:
    with pytest.raises(run.NoHarbor, match=r"needs Python 3\.12 or newer, this is 3\.11: .*make harbor does it"):
        run.check_harbor((3, 11))


# ---- groups that a trial does not fill

CONFIG = {"group-size": 8, "batch-size": 64, "group-deadline-s": 300.0}  # of README.md's serve.yaml
SIX_OF_EIGHT = (
    "6 rollouts a trial, and group-size is 8: a trial's group stays at 6 of 8 until 300 s after its first report "
    "(group-deadline-s), then it counts as it is for a batch of 64; full groups: -O rollouts=8, or the service's "
    "group-size 6 with a batch-size that it divides"
)


def test_a_trial_that_does_not_fill_its_group_is_told_how_long_it_waits_and_what_fills_it() -> None:
    assert run.unfilled("reef", [], [], CONFIG) == SIX_OF_EIGHT
    four = run.unfilled(run.OURS, ["rollouts=4"], [], CONFIG)
    assert four is not None
    assert four.endswith("full groups: -O rollouts=8, or the service's group-size 4")
    twelve = run.unfilled("reef", ["rollouts=12"], [], CONFIG)
    assert twelve is not None
    assert "a trial's last group stays at 4 of 8 until" in twelve
    assert "full groups: -O rollouts=16, or the service's group-size 12 with" in twelve
    assert run.unfilled("reef", ["rollouts=1"], [], CONFIG) == (
        "1 rollout a trial, and group-size is 8: a trial's group stays at 1 of 8 until 300 s after its first report "
        "(group-deadline-s), then it is dropped; full groups: -O rollouts=8"
    )


@pytest.mark.parametrize("options", [["rollouts=8"], ["rollouts=16"], ["rollouts=6", "rollouts=8"]])
def test_nothing_is_told_where_groups_are_filled(options: list[str]) -> None:
    assert run.unfilled("reef", options, [], CONFIG) is None


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--ak", "rollouts=8"], False),
        (["--agent-kwarg=rollouts=8", "-n", "2"], False),
        (["--ak", "rollouts=8", "--ak", "rollouts=6"], True),
        (["--ak"], True),
        (["-a", "terminus-2"], False),
        (["-c", "job.yaml"], False),
    ],
)
def test_what_follows_the_dashes_wins_there_too(more: list[str], told: bool) -> None:
    assert run.unfilled("reef", [], more, CONFIG) == (SIX_OF_EIGHT if told else None)


@pytest.mark.parametrize(
    ("agent", "options"),
    [
        ("terminus-2", []),
        ("oracle", []),
        ("reef", ["group=false"]),
        ("reef", ["purpose=eval"]),
        ("reef", ["temperature=0"]),
        ("reef", ["rollouts=many"]),
        ("reef", ["rollouts=-2"]),
    ],
)
def test_nothing_is_told_of_rollouts_that_are_no_group(agent: str, options: list[str]) -> None:
    assert run.unfilled(agent, options, [], CONFIG) is None


class Became(Exception):  # noqa: N818
    """Harbor would have been begun."""


@pytest.mark.parametrize(
    ("contract", "told"),
    [
        ((200, {"config": CONFIG}), f"reef: {SIX_OF_EIGHT}\n"),
        ((200, {"config": {"batch-size": 64}}), ""),  # SAO
        ((200, {"config": {**CONFIG, "group-size": "8"}}), ""),
        ((200, {"config": {**CONFIG, "group-size": 0}}), ""),
        ((200, {"config": None}), ""),
        ((200, {}), ""),
        ((404, {}), ""),
        ((503, {}), ""),
    ],
)
def test_the_run_tells_what_the_contract_says_and_begins_whatever_it_says(
    contract: tuple[int, Any],
    told: str,
    service: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    route = service.route
    monkeypatch.setattr(
        service, "route", lambda how, parts, *more: contract if "contract" in parts else route(how, parts, *more)
    )
    assert begun(service, tmp_path, monkeypatch, capsys).startswith(f"{told}$ harbor run --path ")


def test_a_scenario_that_only_records_has_no_groups(
    service: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    there = {"scenarios": [{"name": "sums", "trains": False}]}
    whole = {"scenario": "sums", "config": CONFIG}
    monkeypatch.setattr(service, "route", lambda how, parts, *more: (200, whole if "contract" in parts else there))
    assert begun(service, tmp_path, monkeypatch, capsys).startswith("$ harbor run --path ")


def begun(service: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What ``harbor run`` says before it becomes Harbor."""

    def become(*arguments: Any) -> None:
        raise Became

    monkeypatch.setattr(run, "check_harbor", lambda: None)
    monkeypatch.setattr(os, "execve", become)
    with pytest.raises(Became):
        main(["harbor", "run", str(task(folder)), "--url", service.url, "--scenario", "sums"])
    return capsys.readouterr().out
