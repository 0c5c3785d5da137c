"""The code grader: programs that are right, and programs that attack the grader, each in a real sandbox."""

import asyncio
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from reef_harness import Item
from reef_harness.graders.code import CodeGrader, Limits
from reef_harness.graders.sandbox import Isolation

pytestmark = pytest.mark.slow  # starts processes: about 0.1 s for each program

SUM = json.dumps(
    {
        "tests": [
            {"input": "1234 4321\n", "output": "5555\n", "hidden": True},
            {"input": "3 4\n", "output": "7\n"},
        ]
    }
)
RIGHT = "a, b = map(int, input().split())\nprint(a + b)\n"
LIMITS = Limits(wall_s=60, cpu_s=1, memory_mib=256)


@pytest.fixture(scope="module", params=["namespaces", "process"])
def grader(request: pytest.FixtureRequest) -> CodeGrader:
    return made(request.param)


@pytest.fixture(scope="module")
def isolated() -> CodeGrader:
    return made("namespaces")


def made(isolation: Isolation) -> CodeGrader:
    try:
        return CodeGrader(LIMITS, isolation=isolation)
    except ValueError as error:
        if isolation == "namespaces":
            pytest.skip(str(error))  # a machine without bubblewrap; CI's has it
        raise


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """Every directory is gone, and every process: each has the runner's file in its command."""
    yield
    assert not [path for path in Path(tempfile.gettempdir()).glob("reef-code-*") if path.stat().st_uid == os.getuid()]
    deadline = time.monotonic() + 60
    while "/runner.py {" in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def grade(grader: CodeGrader, source: str, gold: str = SUM) -> tuple[str, str, str]:
    verdict = grader.grade(f"Here it is:\n```python\n{source}\n```\n", gold, "stop")
    assert verdict.score == (1.0 if verdict.correct else 0.0)
    return verdict.outcome, verdict.reason_code, verdict.detail


def test_a_right_program_passes_the_public_and_the_hidden_tests(grader: CodeGrader) -> None:
    assert grade(grader, RIGHT) == ("correct", "all_passed", "2 tests")


def test_a_public_failure_is_shown_and_a_hidden_one_is_not(grader: CodeGrader) -> None:
    outcome, reason, detail = grade(grader, "print(8)")
    assert (outcome, reason) == ("incorrect", "wrong_output")
    assert "'3 4\\n'" in detail
    assert "'7\\n'" in detail
    assert "'8\\n'" in detail
    assert grade(grader, "print(7)") == ("incorrect", "wrong_output", "test 2 of 2 is hidden")
    leaks = "import sys\na = sys.stdin.read()\nprint(7)\nif '1234' in a: sys.exit(a)"
    assert grade(grader, leaks) == ("incorrect", "crashed", "test 2 of 2 is hidden")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import sys; sys.exit(0)", "wrong_output"),
        ("import os; os._exit(0)", "wrong_output"),
        ("print('all tests passed'); print('{\"passed\": true}')", "wrong_output"),
        ("import builtins, json, os\nbuiltins.print = lambda *a: os.write(1, b'7')\nstr.__eq__ = 1", "crashed"),
        ("def input(): return '3 4'\n" + RIGHT, "wrong_output"),
        ("raise SystemExit(RuntimeError)", "crashed"),
        ("import os; os.kill(os.getpid(), 9)", "crashed"),
        ("import os; os.kill(os.getppid(), 9); os._exit(1)", "crashed"),
        ("import os; os.killpg(0, 9)", "crashed"),
        ("print(7", "crashed"),
        ("while True: pass", "timed_out"),
        ("x = 'a' * 10**10", "crashed"),
        ("x = []\nwhile True: x.append('a' * 10**6)", "crashed"),
        ("import os\nwhile True: os.fork()", "crashed"),
        (
            "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
            "crashed",
        ),
        ("while True: print('x' * 1000)", "too_much_output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "too_much_output"),
        ("open('big', 'w').write('a' * 10**8)", "crashed"),
        ("import resource; resource.setrlimit(resource.RLIMIT_CPU, (99, 99))", "crashed"),
        ("import os; os.setuid(0)", "crashed"),
        ("open('/etc/reef-was-here', 'w')", "crashed"),
        ("open(__file__, 'a')", "crashed"),
        ("import numpy", "crashed"),
        ("print(chr(0xd800))", "crashed"),
        ("def f(): f()\nf()", "crashed"),
    ],
)
def test_no_attack_is_worth_more_than_a_wrong_answer(grader: CodeGrader, source: str, reason: str) -> None:
    if os.getuid() != 0 and grader.version == "2-process":
        pytest.skip("as one's own user and without namespaces, code can end this very process")
    outcome, found, _ = grade(grader, source)
    assert (outcome, found) == ("incorrect", reason)


def test_what_waits_for_ever_is_ended() -> None:
    begun = time.perf_counter()
    waits = CodeGrader(Limits(wall_s=1.5), parallel=1)
    assert grade(waits, "import time; time.sleep(1000)")[:2] == ("incorrect", "timed_out")
    assert time.perf_counter() - begun < 60


@pytest.mark.parametrize("leave", ["pass", "os.setsid()", "os.setsid(); os.fork() and os._exit(0)"])
def test_a_process_left_behind_is_not_waited_for_and_ends(grader: CodeGrader, leave: str) -> None:
    begun = time.perf_counter()
    source = f"import os, time\nif os.fork() == 0:\n    {leave}\n    time.sleep(1000)\n{RIGHT}"
    assert grade(grader, source)[0] == "correct"
    assert time.perf_counter() - begun < 60


def test_there_is_no_network(isolated: CodeGrader) -> None:
    source = (
        "import socket\n"
        "for family, address in ((socket.AF_INET, ('127.0.0.1', PORT)), (socket.AF_INET, ('1.1.1.1', 53))):\n"
        "    try:\n        socket.socket(family).connect(address)\n        print('reached', address)\n"
        "    except OSError:\n        pass\n" + RIGHT
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert grade(isolated, source.replace("PORT", str(port)))[:2] == ("correct", "all_passed")


def test_no_file_but_its_own_is_in_sight(isolated: CodeGrader) -> None:
    secret = Path(tempfile.mkdtemp()) / "hidden-tests"
    secret.write_text("5555")
    secret.chmod(0o644)
    secret.parent.chmod(0o755)
    source = f"import os\nassert not os.path.exists({str(secret)!r})\n" + (
        "assert not {'etc', 'home', 'proc', 'sys', 'var', 'work'} & set(os.listdir('/')), os.listdir('/')\n"
        "assert os.listdir('/tmp') == [], os.listdir('/tmp')\nassert os.getuid() != 0\n"
        "assert set(os.environ) <= {'LANG', 'LC_CTYPE', 'PATH', 'PWD', 'PYTHONHASHSEED'}, os.environ\n"
        "open('/tmp/kept', 'w').write('for the next test')\n"
    )
    try:
        assert grade(isolated, source + RIGHT) == ("correct", "all_passed", "2 tests")
    finally:
        secret.unlink()
        secret.parent.rmdir()


def test_what_is_expected_is_in_nothing_that_the_code_is_given(isolated: CodeGrader) -> None:
    source = (
        "import os, sys\n"
        "given = [*sys.argv, *os.environ.values(), *(open('/code/' + name).read() for name in os.listdir('/code'))]\n"
        "assert len(given) > 4 and not any(str(5 * 1111) in one for one in given)\n"
    )
    assert grade(isolated, source + RIGHT) == ("correct", "all_passed", "2 tests")


ADD = json.dumps(
    {"function": "add", "tests": [{"args": [3, 4], "returns": 7}, {"args": [1, 2], "returns": 3, "hidden": True}]}
)


@pytest.mark.parametrize(
    ("source", "outcome", "reason"),
    [
        ("def add(a, b): return a + b", "correct", "all_passed"),
        ("def add(a, b):\n    print('7')\n    return a + b", "correct", "all_passed"),
        ("def add(a, b): return float(a + b)", "correct", "all_passed"),
        ("def add(a, b): return 7", "incorrect", "wrong_output"),
        ("def add(a, b): return str(a + b)", "incorrect", "wrong_output"),
        ("def add(a, b): return True", "incorrect", "wrong_output"),
        (
            "def add(a, b):\n    class Any(int):\n        __eq__ = lambda s, o: True\n    return Any(9)",
            "incorrect",
            "wrong_output",
        ),
        (
            "import pickle\nclass P: pass\ndef add(a, b): return a + b if pickle.loads(pickle.dumps(P())) else 0",
            "correct",
            "all_passed",
        ),
        (
            "from __future__ import annotations\nfrom dataclasses import dataclass\ndef add(a, b):\n"
            "    @dataclass\n    class P:\n        x: int\n    return P(a + b).x",
            "correct",
            "all_passed",
        ),
        ("def add(a, b): return float('nan')", "incorrect", "crashed"),
        ("def add(a, b): return {1, 2}", "incorrect", "crashed"),
        ("def add(a, b): import os; os._exit(0)", "incorrect", "no_result"),
        ("def sub(a, b): return 7", "incorrect", "crashed"),
        ("import json; json.dumps = lambda *a, **k: '7'\ndef add(a, b): return 0", "incorrect", "wrong_output"),
        ("def add(a, b): return eval('[' * 90 + ']' * 90)", "incorrect", "wrong_output"),
    ],
)
def test_a_function_is_judged_by_what_it_returns(isolated: CodeGrader, source: str, outcome: str, reason: str) -> None:
    assert grade(isolated, source, ADD)[:2] == (outcome, reason)


def test_a_tolerance_is_for_numbers_only(isolated: CodeGrader) -> None:
    gold = {"function": "third", "tolerance": 1e-6, "tests": [{"args": [1], "returns": [0.3333333, "x"]}]}
    assert grade(isolated, "def third(n): return [n / 3, 'x']", json.dumps(gold))[:2] == ("correct", "all_passed")
    assert grade(isolated, "def third(n): return [n / 3, 'y']", json.dumps(gold))[:2] == ("incorrect", "wrong_output")
    assert grade(isolated, "def third(n): return [10 ** 400, 'x']", json.dumps(gold))[:2] == (
        "incorrect",
        "wrong_output",
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no_code"),
        ("```python\nprint(7)", "no_code"),
        ("```json\n{}\n```", "no_code"),
        ("```python\nprint(7)\n```\n```python\nprint(7)\n```", "several_blocks"),
        ("```python\n" + "#" * 1_000_000 + "\n```", "too_long"),
        ("```python\n" * 100_000, "no_code"),
    ],
    ids=range(6),
)
def test_the_answer_is_one_block_of_code(grader: CodeGrader, text: str, reason: str) -> None:
    verdict = grader.grade(text, SUM, "stop")
    assert (verdict.outcome, verdict.reason_code, verdict.format_valid) == ("incorrect", reason, False)
    assert grader.grade(RIGHT, SUM, "length").reason_code == "unfinished"


def test_bare_code_and_a_block_beside_another_language_are_read(isolated: CodeGrader) -> None:
    assert isolated.grade(RIGHT, SUM, "stop").correct
    assert isolated.grade(f"```bash\nls\n```\n```\n{RIGHT}```", SUM, "stop").correct
    documented = f'def doc():\n  """\n  ```\n  1 2\n  ```\n    ```python\n    1 2\n    ```\n  """\n{RIGHT}'
    assert isolated.grade(documented, SUM, "stop").correct
    assert isolated.grade(f"```python\n{documented}```", SUM, "stop").correct


@pytest.mark.parametrize("before", ["", "    - item\n\n"])
@pytest.mark.parametrize("indent", ["", "  ", "    "])
@pytest.mark.parametrize("language", ["", "python"])
def test_an_example_in_a_docstring_of_bare_code_is_not_the_answer(
    isolated: CodeGrader, before: str, indent: str, language: str
) -> None:
    example = f"{before}{indent}```{language}\n{indent}add(1, 2)\n{indent}```\n"
    add = f'def add(x, y):\n    """Add.\n\n{example}    """\n    return x + y\n'
    text = f"{add}\n\nprint(add(*map(int, input().split())))\n"
    verdict = isolated.grade(text, SUM, "stop")
    assert (verdict.outcome, verdict.reason_code) == ("correct", "all_passed"), verdict.detail


def test_what_only_quotes_a_block_is_read_as_the_block(isolated: CodeGrader) -> None:
    assert isolated.grade(f'"""\n```python\n{RIGHT}```\n"""\n', SUM, "stop").correct


@pytest.mark.parametrize("around", ["````markdown", "`````md", "~~~~markdown"])
def test_a_block_within_a_longer_fence_is_read(isolated: CodeGrader, around: str) -> None:
    marks = around.rstrip("markdown")
    block = f"{around}\nSo:\n```python\n{RIGHT}```\n{marks}\n"
    assert isolated.grade(block, SUM, "stop").correct
    assert isolated.grade(f"{block}\n{marks}text\n3 4\n{marks}\n", SUM, "stop").correct
    assert isolated.grade(f"{around}\n{RIGHT}{marks}\n", SUM, "stop").reason_code == "no_code"
    assert isolated.grade(block * 2, SUM, "stop").reason_code == "several_blocks"


@pytest.mark.parametrize("unit", ["(", "-", "not ", "a.", "1+", "lambda:", "[", "if 1:\n "])
def test_what_nests_deeper_than_python_reads_is_no_program(isolated: CodeGrader, unit: str) -> None:
    text = unit * (180_000 // len(unit)) + '1\n"""\n```python\n' + RIGHT + '```\n"""'
    assert isolated.grade(text, SUM, "stop").correct


@pytest.mark.parametrize("indent", ["", "   ", "    ", "\t"])
@pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("```python", "```"),
        ("```python title=sum.py", "```"),
        ("```py3", "```"),
        ("~~~py", "~~~"),
        ("````Python 3", "````"),
    ],
)
def test_a_block_is_read_however_it_is_fenced(isolated: CodeGrader, opening: str, closing: str, indent: str) -> None:
    lines = ["def main():", "    a, b = map(int, input().split())", "    print(a + b)", "main()"]
    block = "\n".join(indent + line for line in [opening, *lines, closing])
    verdict = isolated.grade(f"10. So:\n\n{block}\n", SUM, "stop")
    assert (verdict.outcome, verdict.reason_code) == ("correct", "all_passed"), verdict.detail


@pytest.mark.parametrize(
    "gold",
    [
        "",
        "[]",
        "{}",
        '{"tests": []}',
        '{"tests": [{"input": "1"}]}',
        '{"tests": [{"input": 1, "output": "1"}]}',
        '{"tests": [{"input": "1", "output": "1", "hidden": "yes"}]}',
        '{"tests": [{"input": "1", "output": "1"}], "assert": "x"}',
        '{"function": "f()", "tests": [{"args": [], "returns": 1}]}',
        '{"function": "f", "tests": [{"args": 1, "returns": 1}]}',
        '{"function": "f", "tests": [{"args": [], "returns": NaN}]}',
        '{"tolerance": true, "tests": [{"input": "1", "output": "1"}]}',
    ],
)
def test_a_gold_that_is_no_test_is_an_error(isolated: CodeGrader, gold: str) -> None:
    with pytest.raises(ValueError, match="gold"):
        isolated.grade("print(7)", gold, "stop")


def test_several_answers_are_judged_beside_each_other(isolated: CodeGrader) -> None:
    async def all_of_them() -> list[str]:
        item = Item.from_text("sum", "Add.", SUM)
        texts = [RIGHT, "print(7)"] * 4
        return [verdict.outcome for verdict in await asyncio.gather(*(isolated.judge(item, t, "stop") for t in texts))]

    assert asyncio.run(all_of_them()) == ["correct", "incorrect"] * 4


def test_a_machine_without_namespaces_is_told_and_nothing_weaker_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"bubblewrap.*isolation='process'"):
        CodeGrader()


def test_a_python_that_does_not_run_is_told(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/false\n")
    with pytest.raises(ValueError, match="no sandbox on this machine"):
        CodeGrader(python=broken, isolation="process")


@pytest.fixture
def everyones_path() -> Iterator[Path]:
    """A folder that every user can read: a root's bubblewrap is started by another."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.usefixtures("isolated")  # where there are namespaces
def test_a_sandbox_that_fails_to_start_is_an_error_and_no_score(
    everyones_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = everyones_path / "broken"
    script = f'#!/bin/sh\nif [ -e {broken} ]; then echo "bwrap: no permission" >&2; exit 1; fi\nexec {{}} "$@"\n'
    (everyones_path / "bwrap").write_text(script.format(shutil.which("bwrap")))
    (everyones_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", str(everyones_path), prepend=os.pathsep)
    grader = CodeGrader(LIMITS)
    assert grade(grader, RIGHT)[0] == "correct"
    broken.touch()
    verdict = grader.grade(RIGHT, SUM, "stop")
    assert (verdict.outcome, verdict.score, verdict.reason_code) == ("error", None, "sandbox_failed")
    assert "no permission" in verdict.detail


@pytest.mark.parametrize("unit", [" ", "\t", "a", " a", "```\n", "```"])
def test_looking_for_blocks_takes_no_longer_than_the_text(isolated: CodeGrader, unit: str) -> None:
    begun = time.process_time()
    verdict = isolated.grade(
        "```" + unit * (1_000_000 // len(unit)) + "x y", '{"tests": [{"input": "", "output": ""}]}', "stop"
    )
    assert verdict.outcome == "incorrect"
    assert time.process_time() - begun < 20


def test_nothing_can_be_written_but_two_small_disks_and_no_namespace_made(isolated: CodeGrader) -> None:
    source = """
import ctypes, os
for place in ("/", "/dev", "/code", "/usr"):
    try:
        open(os.path.join(place, "x"), "wb").close()
        print("written", place)
    except OSError:
        pass
for place in ("/tmp", "/dev/shm"):
    size = os.statvfs(place).f_blocks * os.statvfs(place).f_frsize
    if size > 16 << 20:
        print("large", place, size)
CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x20000
print(ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNS))
"""
    verdict = isolated.grade(source, '{"tests": [{"input": "", "output": "-1"}]}', "stop")
    assert verdict.outcome == "correct", verdict.detail
