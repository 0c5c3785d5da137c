"""The real SGLang under EngineHost: how it starts here, what it opens, and that nothing of it outlives its owner."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from reef.engines.host import EngineHost
from reef.engines.replica import Replica
from reef.engines.sglang.launch import STUBS
from reef.errors import EngineError
from reef.observe import Metrics
from reef.service import leftovers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # a start takes 15 s, on busy cores a minute

GONE_S = 60.0
SGLANG = ("--inference.backend", "sglang")
OWNER = Path(__file__).parent / "owner.py"


def processes(pid: int) -> list[psutil.Process]:
    leader = psutil.Process(pid)
    return [leader, *leader.children(recursive=True)]


def running(found: list[psutil.Process]) -> list[psutil.Process]:
    def runs(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    return [process for process in found if runs(process)]


def assert_gone(found: list[psutil.Process]) -> None:
    deadline = time.monotonic() + GONE_S
    while left := running(found):
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.05)


# --- one server, under a process of its own ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Owned:
    """A server, and the process that started it."""

    owner: subprocess.Popen[str]
    processes: list[psutil.Process]
    url: str
    log: Path
    directory: Path


@pytest.fixture(scope="module")
def owned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Owned]:
    run_dir = tmp_path_factory.mktemp("an engine") / "run"
    settings = ("--inference.tensor", "2", "--inference.options.max-running-requests", "7")
    command = [sys.executable, str(OWNER), str(run_dir), *SGLANG, *settings]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        line = owner.stdout.readline()
        log = run_dir / "logs" / "engine-0.log"
        assert line, log.read_text()
        pid, url = line.split()
        environment = psutil.Process(int(pid)).environ()
        yield Owned(owner, processes(int(pid)), url, log, Path(environment["TMPDIR"]))
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()


def test_it_holds_the_release_and_says_how_long_a_text_may_be(owned) -> None:
    assert httpx.get(f"{owned.url}/health", timeout=60).status_code == 200
    assert httpx.get(f"{owned.url}/model_info", timeout=60).json()["weight_version"] == "r0"
    info = httpx.get(f"{owned.url}/server_info", timeout=30).json()
    assert (info["version"], info["context_length"], info["dtype"]) == ("0.5.23", 512, "float32")
    assert (info["device"], info["attention_backend"], info["tp_size"]) == ("cpu", "torch_native", 2)
    assert info["internal_states"][0]["max_running_requests"] == 7  # an option


def test_two_tensor_ranks_score_as_a_float32_forward_does(owned, reference, starter) -> None:
    ids = [1, 294, 201, 20, 13, 21, 31, 2, 201, 1, 298, 297, 201]
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    answer = httpx.post(f"{owned.url}/generate", json=body, timeout=60).json()
    scores = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]
    table = reference(starter, ids)
    expected = [table[i, token].item() for i, token in enumerate(ids[1:])]
    assert scores == pytest.approx(expected, abs=1e-4)


def test_every_port_that_it_opens_is_one_of_loopback(owned) -> None:
    listening = [
        connection.laddr.ip
        for process in owned.processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert set(listening) == {"127.0.0.1"}


def test_its_log_is_in_the_run_directory_without_a_line_for_each_request(owned) -> None:
    text = owned.log.read_text()
    assert "The server is fired up" in text
    assert "GET /model_info" not in text


def test_it_sleeps_while_there_is_nothing_to_do(owned) -> None:
    def seconds() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in running(owned.processes))

    began, before = time.monotonic(), seconds()
    time.sleep(2)
    assert seconds() - before < (time.monotonic() - began) / 2


def test_nothing_of_it_is_left_when_the_process_that_started_it_is_killed(owned) -> None:
    assert len(owned.processes) >= 4  # server, two schedulers, detokenizer
    assert owned.directory.is_dir()
    owned.owner.kill()
    owned.owner.wait()
    assert_gone(owned.processes)
    deadline = time.monotonic() + GONE_S
    while owned.directory.exists():  # it is removed once they are killed
        assert time.monotonic() < deadline, f"still there: {list(owned.directory.iterdir())}"
        time.sleep(0.05)


# --- a server that dies, and the one after it -------------------------------------------------------------------------


def test_one_whose_scheduler_dies_is_restarted_and_the_requests_in_it_fail(
    tmp_path: Path, config: Callable[..., Any], published: Callable[..., Any], starter: Path, generate: Any
) -> None:
    async def main() -> None:
        settings = config(tmp_path, *SGLANG)
        metrics = Metrics()
        host = EngineHost(settings, "engine-0")
        replica = Replica("engine-0", settings, metrics, host)
        try:
            await replica.start(published("r0", starter))
            first = processes(host.pid)
            with replica.use() as client:
                asking = asyncio.create_task(generate(client, 400))
                await asyncio.sleep(0.5)
                scheduler = next(process for process in first if process.name().startswith("sglang::sched"))
                scheduler.kill()
                with pytest.raises(EngineError):
                    await asking
            async with asyncio.timeout(120):
                while replica.ready:
                    await asyncio.sleep(0.05)
            assert replica.state == "restarting"
            assert "ended with -9" in replica.error
            await replica.gate.wait()
            assert (replica.served, replica.state) == ("r0", "ready")
            with replica.use() as client:
                assert len((await generate(client)).output_ids) == 12
            assert_gone(first)
            second = processes(host.pid)
            leftovers.record(tmp_path, [host.pid])  # and now we forget it
            assert leftovers.reap(tmp_path) == len(second)
            assert running(second) == []
        finally:
            await replica.stop()
        assert host.pid is None

    asyncio.run(main())


# --- what can be known before a start ---------------------------------------------------------------------------------

QUESTIONS = {
    "nothing": ({}, None),
    "every kind of value": (
        {
            "mem-fraction-static": 0.5,
            "max_total_tokens": 4096,
            "disable-radix-cache": True,
            "sleep-on-idle": False,
            "cuda-graph-bs-decode": [1, 2, 4],
            "mm-process-config": {"image": {}},
            "no-dllm-fdfo": True,
            "random-seed": -1,
        },
        None,
    ),
    "unknown": (
        {"mem-fraction": 0.5},
        "unknown key inference.options.mem-fraction; did you mean inference.options.mem-fraction-static?",
    ),
    "unlike all": (
        {"xyzzy": 1},
        "unknown key inference.options.xyzzy; SGLang's server has no such argument",
    ),
    "a word it does not take": ({"attention-backend": "best"}, "argument --attention-backend: invalid choice: 'best'"),
    "no number": ({"max-running-requests": "many"}, "argument --max-running-requests: invalid int value: 'many'"),
    "managed": ({"port": 1}, "inference.options.port is set by Reef; what decides it: nothing: the kernel chooses it"),
    "managed by another name": (
        {"tensor_parallel_size": 2},
        "inference.options.tensor-parallel-size is set by Reef; what decides it: inference.tensor",
    ),
    "model": ({"model": "x"}, "inference.options.model is set by Reef; what decides it: inference.model-path"),
    "nothing given": ({"dtype": None}, "inference.options.dtype: expected a value, got nothing"),
    "a switch with a value": ({"disable-radix-cache": 1}, "disable-radix-cache: expected true or false, got 1"),
    "a value switched on": ({"stream-interval": True}, "stream-interval: expected a value, got true"),
    "off, but on by itself": ({"dllm-fdfo": False}, "dllm-fdfo: false is written no-dllm-fdfo: true"),
    "a list where one value goes": ({"dtype": ["auto"]}, "dtype: expected one value, got a list"),
}


@dataclass(frozen=True)
class Answers:
    """What SGLang's parser says of each question, and which of the names that Reef manages it does not have."""

    problems: dict[str, str | None]
    unknown: list[str]


@pytest.fixture(scope="module")
def answers() -> Answers:
    script = (
        "import json, sys; from sglang.srt.server_args import ServerArgs; from reef.engines.sglang.parser import *; "
        "from reef.engines.sglang.options import MANAGED; parser = argparse.ArgumentParser(); "
        "ServerArgs.add_cli_args(parser); unknown = set(MANAGED) - {action.dest for action in parser._actions}; "
        "print(json.dumps([[problem(options, MANAGED) for options in json.load(sys.stdin)], sorted(unknown)]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=json.dumps([options for options, _ in QUESTIONS.values()]),
        env={"PYTHONPATH": str(STUBS), "SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    problems, unknown = json.loads(done.stdout.splitlines()[-1])
    return Answers(dict(zip(QUESTIONS, problems, strict=True)), unknown)


@pytest.mark.parametrize("name", QUESTIONS)
def test_options_are_those_of_its_own_parser(answers, name) -> None:
    expected, found = QUESTIONS[name][1], answers.problems[name]
    if expected is None:
        assert found is None
    else:
        assert expected in found


def test_every_name_that_reef_keeps_for_itself_is_one_that_the_server_has(answers) -> None:
    assert answers.unknown == []


def test_a_stub_says_what_was_used_and_what_it_is(tmp_path) -> None:
    script = tmp_path / "kernel.py"
    script.write_text(
        "import triton, triton.language as tl, sgl_kernel\n"
        "from torchvision.transforms import InterpolationMode\n"
        "@triton.autotune(configs=[triton.Config({}, num_warps=4)], key=['n'])\n"
        "@triton.jit\n"
        "def add(x, size: tl.constexpr): return tl.load(x)\n"
        "modes = {InterpolationMode.BICUBIC: 3}\n"
        "class Own(sgl_kernel.Base): pass\n"
        "for use in (lambda: add[(1,)](0), lambda: sgl_kernel.silu_and_mul(0), lambda: Own(), lambda: tl.exp(1)):\n"
        "    try:\n"
        "        use()\n"
        "    except NotImplementedError as error:\n"
        "        print(str(error).split(' was used')[0])\n"
    )
    done = subprocess.run([sys.executable, str(script)], env={"PYTHONPATH": str(STUBS)}, capture_output=True, text=True)
    assert done.stdout.split() == ["__main__.add", "sgl_kernel.silu_and_mul", "__main__.Own", "triton.language.exp"]
