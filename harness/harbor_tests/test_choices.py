"""What may be said behind the dashes, by Harbor's own list of options: none that chooses tasks, or who runs where."""

from pathlib import Path

import pytest
from conftest import TASKS
from harbor.cli.main import app
from reef_harness.errors import HarnessError
from reef_harness.harbor import run
from typer.main import get_command

PARAMETERS = {each.name: each for each in get_command(app).commands["run"].params}  # type: ignore[attr-defined]
SERVICE = run.Service("http://127.0.0.1:8080", "sums", None, Path("/keys/api-key"))
TASK_PARAMETERS = [
    *("path", "dataset_name_version", "task_ref", "repo", "registry_url", "registry_path"),
    *("task_git_url", "task_git_commit_id"),
]
WHO_RUNS = ["agent_name", "agent_import_path", "user_agent_name", "environment", "environment_import_path"]


@pytest.mark.parametrize("name", [*TASK_PARAMETERS, *WHO_RUNS, "config_path"])
def test_no_spelling_of_a_choice_is_handed_on_to_a_folder_of_this_host(name: str) -> None:
    for spelling in PARAMETERS[name].opts:
        joined = f"{spelling}=x" if spelling.startswith("--") else f"{spelling}x"
        for words in ([spelling, "x"], [joined]):
            with pytest.raises(HarnessError, match=f"^{spelling} cannot be said behind --"):
                run.arguments_of(str(TASKS), "reef", "hostdir", SERVICE, [], words)


def test_letters_that_another_option_may_follow_in_the_same_word_are_looked_behind() -> None:
    flags = {opt for each in PARAMETERS.values() if each.is_flag for opt in each.opts if len(opt) == 2}  # type: ignore[attr-defined]
    assert flags == {"-q", "-y"}  # and -h
    for flag in ("-h", *flags):
        with pytest.raises(HarnessError, match=r"^-d cannot be said behind --"):
            run.arguments_of(str(TASKS), "reef", "docker", SERVICE, [], [f"{flag}dx"])


def test_the_letters_of_harmless_options_are_handed_on() -> None:
    words = ["-n4", "-opath/dataset", "-k", "2", "-qy", "--n-tasks=3", "-i", "chain-*", "-", "--job-name", "agent"]
    assert run.arguments_of(str(TASKS), "reef", "hostdir", SERVICE, [], words)[-len(words) :] == words
