"""A served script whose asker is interrupted: no question is ever given another's answer."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from reef_harness.graders.served import Servers

# Answers with the question itself. It interrupts who asks: once before it is ready, and before the answer to "wait".
ECHO = """
import json, os, pathlib, signal, sys
mark = pathlib.Path(__file__).with_name("started")
if not mark.exists():
    mark.touch()
    os.kill(os.getppid(), signal.SIGUSR1)
print("ready", flush=True)
for line in sys.stdin:
    question = json.loads(line)["question"]
    if question["ask"] == "wait":
        os.kill(os.getppid(), signal.SIGUSR1)
    print(json.dumps({"answer": question}), flush=True)
"""


class Late(BaseException):
    """What a reward function's own alarm raises."""


@pytest.fixture
def interrupted() -> Iterator[None]:
    def raise_late(*_: object) -> NoReturn:
        raise Late

    before = signal.signal(signal.SIGUSR1, raise_late)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("interrupted")
def test_after_an_interrupt_every_answer_is_still_that_of_its_question(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(ECHO)
    servers = Servers(tmp_path / "echo.py", 1)

    def ask(what: str) -> object:
        return servers.ask({"ask": what}, timeout_s=60, memory_mib=100)["ask"]

    with pytest.raises(Late):  # while it starts
        ask("one")
    assert [ask("two"), ask("three")] == ["two", "three"]
    with pytest.raises(Late):  # between question and answer
        ask("wait")
    assert [ask("four"), ask("five")] == ["four", "five"]


def test_a_fork_starts_a_copy_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(ECHO)
    (tmp_path / "started").touch()  # it interrupts nobody
    servers = Servers(tmp_path / "echo.py", 1)

    def ask() -> tuple[object, int]:
        answer = servers.ask({"ask": os.getpid()}, timeout_s=60, memory_mib=100)["ask"]
        process = servers._free.queue[0]._process
        assert process is not None
        return answer, process.pid

    first = ask()
    if (child := os.fork()) == 0:
        answer, copy = ask()
        servers._free.queue[0]._end()
        os._exit(0 if answer == os.getpid() and copy != first[1] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert ask() == first
