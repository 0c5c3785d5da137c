"""The example with olympiad problems: right answers, whole tasks, a strict verifier, configurations that fit."""

import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from fractions import Fraction
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reef_harness.evaluation.items import read_items
from reef_harness.graders.boxed import BoxedGrader
from reef_harness.graders.final import FinalGrader
from reef_harness.types import Item

from recipes.sao.examples.imo_answerbench import checker
from recipes.sao.examples.imo_answerbench.run import graded, last_result
from recipes.sao.examples.imo_answerbench.write_tasks import main as write_tasks
from recipes.sao.examples.imo_answerbench.write_tasks import write_task
from reef import cli
from tests import published

EXAMPLE = Path(__file__).resolve().parents[2] / "recipes" / "sao" / "examples" / "imo_answerbench"
TASKS = sorted((EXAMPLE / "tasks").iterdir())
CONFIGS = sorted(EXAMPLE.glob("serve*.yaml"))
GOLD = {item.id: item.gold or "" for item in read_items(EXAMPLE / "problems.jsonl")[0]}


# ---- the answers, by another way than the one that found them


def test_the_counter_shows_a_multiple_of_2_to_the_u_after_2_to_the_u_minus_2_presses() -> None:
    assert GOLD["p1_button_presses"] == "2^{u-2}"
    for u in range(2, 15):
        shown, presses = 4, 1
        while shown % 2**u:
            shown, presses = 5 * shown + 4, presses + 1
        assert presses == 2 ** (u - 2)


def test_the_numbers_on_the_board_add_up_to_minus_2023_over_2024_squared() -> None:
    total = sum((Fraction(k * k - k - 1, (k * (k + 1)) ** 2) for k in range(1, 2024)), Fraction(0))
    assert total == Fraction(-2023, 2024**2) == checker.number(GOLD["p2_board_sum"])


def test_ben_is_called_with_probability_one_half() -> None:
    for pupils in range(2, 8):
        called = sum(ben_is_called(cards) for cards in permutations(range(pupils)))
        assert Fraction(called, math.factorial(pupils)) == Fraction(1, 2)
    # 2024 pupils: Ada's chain has each length from 1 to 2024 equally often, and Ben is on it with (length - 1) / 2023
    chance = sum(Fraction(1, 2024) * Fraction(length - 1, 2023) for length in range(1, 2025))
    assert chance == Fraction(1, 2) == checker.number(GOLD["p3_name_cards"])


def ben_is_called(cards: tuple[int, ...]) -> bool:
    """Whether pupil 1 is on the chain of calls that pupil 0 begins."""
    called = cards[0]
    while called != 0:
        if called == 1:
            return True
        called = cards[called]
    return False


# ---- the tasks


def test_the_tasks_are_what_tasks_py_makes_of_the_problems(tmp_path: Path) -> None:
    assert write_tasks(["--out", str(tmp_path)]) == 0
    made, there = (files(directory) for directory in (tmp_path, EXAMPLE / "tasks"))
    assert made == there
    assert [task.name for task in TASKS] == list(GOLD)


def files(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*.*") if path.is_file()}


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_task_says_who_grades_and_hides_the_gold(task: Path) -> None:
    config = tomllib.loads((task / "task.toml").read_text())
    assert config["schema_version"] == "1.4"
    assert config["metadata"]["grader"] == "boxed"
    assert config["verifier"]["environment_mode"] == "separate"
    gold = (task / "tests" / "gold.txt").read_text().strip()
    assert gold == GOLD[task.name]
    for shown in [task / "instruction.md", task / "task.toml", *(task / "environment").rglob("*")]:
        assert gold not in shown.read_text()
    assert [path.name for path in (task / "environment").rglob("*")] == ["Dockerfile"]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_verifier_takes_the_solution_and_nothing_less(task: Path, tmp_path: Path) -> None:
    for said, reward in {"solution": "1", "I cannot say.": "0", "\\boxed{}": "0", "\\boxed{1}": "0", None: "0"}.items():
        assert verified(task, tmp_path, said) == reward


def verified(task: Path, tmp_path: Path, said: str | None) -> str:
    """What test.sh writes as the reward, with /app, /tests and /logs in ``tmp_path``; None: there is no answer file."""
    for name in ("app", "logs"):
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        (tmp_path / name).mkdir()
    shutil.copytree(task / "tests", tmp_path / "tests", dirs_exist_ok=True)
    if said == "solution":
        run(task / "solution" / "solve.sh", tmp_path)
    elif said is not None:
        (tmp_path / "app" / "answer.txt").write_text(said)
    run(task / "tests" / "test.sh", tmp_path)
    return (tmp_path / "logs" / "verifier" / "reward.txt").read_text().strip()


def run(script: Path, root: Path) -> None:
    there = re.sub(r"(?<=\s)/(?=app/|tests/|logs/)", f"{root}/", script.read_text())
    subprocess.run(["bash", "-c", there], check=True, capture_output=True)


def test_a_verifier_with_a_broken_gold_gives_no_reward(tmp_path: Path) -> None:
    (tmp_path / "answer.txt").write_text("\\boxed{1}")
    (tmp_path / "gold.txt").write_text(" \n")
    command = [sys.executable, str(EXAMPLE / "checker.py"), "boxed", *("answer.txt", "gold.txt", "reward.txt")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "holds no gold answer" in done.stderr
    assert not (tmp_path / "reward.txt").exists()


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (Item.from_text("p1", "How many?", None), "has no gold"),
        (Item("p1", ({"role": "user", "content": "a"}, {"role": "user", "content": "b"}), "1"), "has 2 messages"),
        (Item.from_text("../p1", "How many?", "1"), "cannot name a task"),
    ],
)
def test_an_item_that_can_be_no_task_is_refused(item: Item, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        write_task(item, "boxed", tmp_path)
    assert list(tmp_path.iterdir()) == []


# ---- the verifier's reading, held against the graders of the same names

RIGHT = {
    "\\frac{1}{2}": [
        "\\frac{1}{2}",
        "1/2",
        "0.5",
        "\\dfrac12",
        "\\frac{2}{4}",
        " \\frac{ 1 }{ 2 } ",
        "2^{-1}",
        "$1/2$",
    ],
    "\\frac{-2023}{2024^2}": [
        "-\\frac{2023}{2024^2}",
        "-2023/2024^2",
        "-\\frac{2023}{4096576}",
        "\\frac{-2023}{2024^2}",
    ],
    "2^{u-2}": ["2^{u-2}", "2^{u - 2}", "$2^{u-2}$"],
    "1024": ["2^{10}", "1024", "2\\cdot 512", "(2^5)^2", "\\left(2^5\\right)^2"],
}
WRONG = {
    "\\frac{1}{2}": [
        "1/3",
        "\\frac{2}{1}",
        "1/2/1",
        "",
        "0.5000001",
        "\\frac{1}{0}",
        "-1/2",
        "1 / 2 x",
        "١/٢",
        "\\frac12 3",
    ],
    "2^{u-2}": ["2^{u-1}", "2^u-2", "2^{v-2}", "4", "u-2"],
    "1024": ["2^10", "10 24", "1023", "9^{9^{9^{9}}}", "2^{99999999}", "(" * 150 + "1024" + ")" * 150, "1024 1024"],
    "0": ["0^0", "0^{-1}", "1-", "-", "()", "{}"],
}


@pytest.mark.parametrize(("gold", "answer"), [(gold, each) for gold, answers in RIGHT.items() for each in answers])
def test_the_verifier_takes_what_is_right_as_the_grader_does(gold: str, answer: str) -> None:
    text = f"So it is \\boxed{{{answer}}}."
    assert checker.judge("boxed", text, gold)[0]
    assert BoxedGrader().grade(text, gold, "stop").correct


@pytest.mark.parametrize(("gold", "answer"), [(gold, each) for gold, answers in WRONG.items() for each in answers])
def test_the_verifier_takes_nothing_else(gold: str, answer: str) -> None:
    assert not checker.judge("boxed", f"So it is \\boxed{{{answer}}}.", gold)[0]


@pytest.mark.parametrize("piece", ["\\pi ", "\\, ", "1 ", "{ ", "\\boxed{", "\\ a", "(", "\\frac "])
def test_the_verifier_reads_a_megabyte_of_anything_in_no_time(piece: str) -> None:
    long = piece * (2**20 // len(piece))
    began = time.process_time()
    assert not checker.judge("boxed", f"\\boxed{{{long}}}", "1/2")[0]
    assert not checker.judge("final", f"<final>{long}</final>", "1/2")[0]
    checker.trimmed(long)  # also where no length is looked at first
    assert time.process_time() - began < 5  # a quadratic reading takes 13 s at this length


def test_a_long_answer_is_right_only_where_gold_is_long_as_well() -> None:
    gold = "x_{1}+" * 100 + "1"
    assert checker.equivalent(gold.replace("+", " + "), gold)
    assert not checker.equivalent("1/2" + " " * 300, "1/2")


def test_numbers_are_compared_exactly_however_large() -> None:
    for answer, gold in (("2^{2024}", "2^{2024}-1"), ("1", "1-\\frac{1}{2^{200}}"), ("10^{60}+7", "10^{60}")):
        assert not checker.equivalent(answer, gold)


def test_an_answer_file_that_is_too_large_is_worth_nothing_and_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "answer.txt").open("w") as file:
        file.truncate(2**36)  # 64 GiB of nothing: to read it would end the verifier without a reward
    (tmp_path / "gold.txt").write_text("1")
    command = [sys.executable, str(EXAMPLE / "checker.py"), "boxed", *("answer.txt", "gold.txt", "reward.txt")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120)
    assert "no answer can be read: answer.txt has more than 16777216 bytes" in done.stdout
    assert (tmp_path / "reward.txt").read_text() == "0\n"


def test_a_trial_whose_result_was_cut_short_is_not_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "p1__abc").mkdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "p1__abc" / "result.json").write_text('{"trial_name": "p1__a')
    assert last_result(tmp_path) is None
    assert not graded(tmp_path)
    assert "cannot read" in capsys.readouterr().err


MARKS = r"\frac { } ( ) ^ - + / * . \cdot $ \, \boxed{ \boxed{ } \{ \} \\ \left \! , <final> </final>"
PIECES = st.sampled_from([*MARKS.split(" "), *"12012ux½_ \n"])
TEXTS = st.lists(PIECES, max_size=14).map("".join)


@given(TEXTS, st.sampled_from(["1", "12", "1/2", "2^{u-2}", "-1", "0", "u", "\\frac{1}{2}"]), st.booleans())
def test_what_the_verifier_takes_the_grader_takes(text: str, gold: str, box: bool) -> None:
    said = f"\\boxed{{{text}}}" if box else text
    if checker.judge("boxed", said, gold)[0]:
        assert BoxedGrader().grade(said, gold, "stop").correct


@given(TEXTS | st.integers(-20, 20).map(lambda value: f"<final>{value}</final>"), st.integers(-3, 20).map(str))
def test_a_final_answer_is_read_as_the_grader_reads_it(text: str, gold: str) -> None:
    assert checker.judge("final", text, gold)[0] == FinalGrader().grade(text, gold, "stop").correct


# ---- the configurations


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("models")
    for name in ("Qwen3-1.7B", "Qwen3-30B-A3B"):
        published.make(directory / name, name)
    yield directory


@pytest.mark.slow
@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_each_configuration_passes_the_dry_run_of_its_machine(
    file: Path, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "RAY_ADDRESS": "head:6379",
        "DATABASE_URL": "postgresql+psycopg://r:h@db/r",
        "TOKEN": "h",
    }.items():
        monkeypatch.setenv(f"REEF_{name}", value)
    text = file.read_text()
    model = re.search(r"model-path: (?:.*/)?(\S+)", text)
    flags = re.search(r"--gpus \d+ --gpu-memory-gib \d+(?: --nodes \d+)?", text)
    assert model
    assert bool(flags) == (file.stem != "serve-cpu")
    words = ["serve", "--dry-run", "-c", str(file), "--reef.port", "0", *(shlex.split(flags[0]) if flags else [])]
    words += [] if model[1] == "starter" else ["--inference.model-path", str(models / model[1])]
    assert (cli.main(words), capsys.readouterr().err) == (0, "")


def test_the_paper_s_settings_are_in_every_configuration_for_gpus() -> None:
    for file in CONFIGS:
        config = json.dumps(yaml_of(file))
        for setting in ('"dis-preset": "reasoning"', '"lambda-alpha": 1.5', '"critic-updates": 2'):
            assert setting in config
        if file.stem != "serve-cpu":
            for setting in ('"batch-size": 128', '"critic-warmup-steps": 10', '"critic-options": {"lr": 5e-06}'):
                assert setting in config
            assert yaml_of(file)["training"]["options"]["lr"] == 1e-6


def yaml_of(file: Path) -> dict:
    import yaml

    return yaml.safe_load(file.read_text())
