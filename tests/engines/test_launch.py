"""What engine servers are started with: arguments, environment, GPUs, the port."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest

import reef.engines.sglang.launch as module
from reef.engines.launch import flags
from reef.engines.sglang.launch import STUBS, SglangLaunch, arguments, cpu_cache_tokens, environment, hold_port
from reef.engines.sglang.options import check
from reef.errors import ConfigError, EngineError

SGLANG = ("--inference.backend", "sglang")


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with GPUs and SGLang for them: none is here."""
    monkeypatch.setattr(module, "runs_on_cpu", lambda options: False)


def said(words: list[str], name: str) -> str | None:
    """The value of an argument; the last one holds, as for argparse."""
    found = [words[i + 1] for i, word in enumerate(words) if word == f"--{name}"]
    return found[-1] if found else None


def test_options_become_words_as_argparse_reads_them() -> None:
    options = {"a": True, "b_c": False, "d": 0.5, "e": ["x", 2], "f": {"g": [1]}, "h": "i j"}
    assert flags(options) == ["--a", "--d", "0.5", "--e", "x", "2", "--f", '{"g": [1]}', "--h", "i j"]


def test_without_a_gpu_sglang_gets_what_it_needs_there(tmp_path, config, starter) -> None:
    settings = config(tmp_path, *SGLANG)
    words = arguments(settings, "engine-0", str(starter), "r7", 4000)
    expected = {
        "model-path": str(starter),
        "weight-version": "r7",
        "host": "127.0.0.1",
        "port": "4000",
        "tp-size": "1",
        "context-length": "512",  # of its config.json: SGLang would not tell
        "dtype": "float32",
        "device": "cpu",
        "attention-backend": "torch_native",
        "base-gpu-id": None,
    }
    assert {name: said(words, name) for name in expected} == expected
    assert "--sleep-on-idle" in words
    made = environment(settings, "engine-0", tmp_path, 4000)
    assert made["PYTHONPATH"].startswith(str(STUBS))
    assert (made["TMPDIR"], made["no_proxy"]) == (str(tmp_path), "*")
    assert (made["OMP_NUM_THREADS"], made["GLOO_SOCKET_IFNAME"], made["MASTER_PORT"]) == ("1", "lo", "4000")
    assert "CUDA_VISIBLE_DEVICES" not in made
    two = environment(config(tmp_path, *SGLANG, "--inference.tensor", "2"), "engine-0", tmp_path, 4000)
    assert two["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1  # a list of cores for each rank


def test_what_the_options_say_wins_over_what_reef_prefers(tmp_path, config, starter) -> None:
    options = (
        "dtype",
        "bfloat16",
        "sleep_on_idle",
        "false",
        "max-total-tokens",
        "99",
        "attention_backend",
        "intel_amx",
    )
    given = [f"--inference.options.{word}" if i % 2 == 0 else word for i, word in enumerate(options)]
    words = arguments(config(tmp_path, *SGLANG, *given), "engine-0", str(starter), "r0", 1)
    assert [said(words, name) for name in ("dtype", "max-total-tokens", "attention-backend")] == [
        "bfloat16",
        "99",
        "intel_amx",
    ]
    assert "--sleep-on-idle" not in words
    assert len([word for word in words if word.startswith("--")]) == len({w for w in words if w.startswith("--")})


def test_the_environment_of_the_user_wins_too(tmp_path, config, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    made = environment(config(tmp_path, *SGLANG), "engine-0", tmp_path, 1)
    assert (made["OMP_NUM_THREADS"], made["GLOO_SOCKET_IFNAME"]) == ("5", "eth7")
    assert made["PYTHONPATH"] == f"{STUBS}:/mine"


def test_the_engines_precision_is_the_trainers(tmp_path, config, starter, on_gpus) -> None:
    def dtype(*settings: str) -> Any:
        return said(arguments(config(tmp_path, *SGLANG, *settings), "engine-0", str(starter), "r0", 1), "dtype")

    assert dtype("--training.dtype", "bfloat16") == "bfloat16"
    assert dtype() == "float32"
    assert dtype("--training.backend", "none") is None  # nobody it must agree with: the model's own


def test_a_machine_without_a_gpu_is_told_by_what_is_there_and_by_what_is_asked_for(monkeypatch) -> None:
    assert module.runs_on_cpu({"device": "cpu"})
    assert not module.runs_on_cpu({"device": "cuda"})
    monkeypatch.setattr(module, "is_installed", lambda package: package != "sglang-kernel")
    assert module.runs_on_cpu({})  # however many GPUs there are
    monkeypatch.setattr(module, "is_installed", lambda package: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert module.runs_on_cpu({})


def test_each_replica_and_then_the_candidate_has_its_share_of_the_named_gpus(tmp_path, config, on_gpus) -> None:
    settings = ("--inference.replicas", "2", "--inference.tensor", "2", "--inference.devices", "[7, 6, 5, 4, 3, 2]")
    made = {
        name: environment(config(tmp_path, *SGLANG, *settings), name, tmp_path, 1)["CUDA_VISIBLE_DEVICES"]
        for name in ("engine-0", "engine-1", "engine-candidate")
    }
    assert made == {"engine-0": "7,6", "engine-1": "5,4", "engine-candidate": "3,2"}


def test_a_candidate_for_whom_no_gpu_is_left_is_refused(tmp_path, config, on_gpus, monkeypatch) -> None:
    monkeypatch.setattr("reef.engines.sglang.options.is_installed", lambda package: True)  # also where it is not yet
    settings = config(tmp_path, *SGLANG, "--inference.devices", "[0]")
    with pytest.raises(EngineError, match="engine-candidate needs 1 GPUs of its own"):
        environment(settings, "engine-candidate", tmp_path, 1)
    gate = ("--evaluation.gate.accuracy.min", "0.5")
    with pytest.raises(ConfigError, match=r"inference\.devices names 1 GPUs, and 2 are needed"):
        check(config(tmp_path, *SGLANG, "--inference.devices", "[0]", *gate))


def test_where_no_gpus_are_named_replicas_take_them_in_turn(tmp_path, config, starter, on_gpus) -> None:
    settings = config(tmp_path, *SGLANG, "--inference.replicas", "2", "--inference.tensor", "4")
    first, second = (
        said(arguments(settings, name, str(starter), "r0", 1), "base-gpu-id") for name in ("engine-0", "engine-1")
    )
    assert (first, second) == ("0", "4")


def test_the_cache_on_a_cpu_is_so_many_bytes_and_holds_the_longest_text(starter) -> None:
    model = json.loads((starter / "config.json").read_text())
    assert cpu_cache_tokens(model) == 256 * 2**20 // (2 * 3 * 2 * 32 * 4)  # 3 layers, 2 heads of 32
    assert cpu_cache_tokens({**model, "max_position_embeddings": 2**20}) == 2**20
    assert cpu_cache_tokens({"model_type": "mamba"}) is None


def test_a_port_that_is_held_goes_to_the_server_and_to_nobody_else() -> None:
    with hold_port() as holder:
        address = holder.getsockname()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(address)
            server.listen()
            holder.close()
            with socket.create_connection(address):
                pass


def test_an_engine_of_somebody_else_on_its_port_is_not_taken_for_it(tmp_path, config, starter, fake_engine) -> None:
    async def main() -> None:
        launch = SglangLaunch(config(tmp_path, *SGLANG), "engine-0", str(starter), "r0", tmp_path)
        try:
            assert await launch.url() is None
            launch._client.url = fake_engine.url
            with pytest.raises(EngineError, match="somebody else's engine"):
                await launch.url()
            fake_engine.version = "r0"
            assert await launch.url() == fake_engine.url
        finally:
            await launch.close()

    asyncio.run(main())


def test_sglang_that_is_not_installed_is_named_with_what_to_do(tmp_path, config, monkeypatch) -> None:
    monkeypatch.setattr("reef.engines.sglang.options.is_installed", lambda package: False)
    with pytest.raises(ConfigError, match=r"SGLang is not installed: `make sglang-cpu` here, or pip install '\.\[sg"):
        check(config(tmp_path, *SGLANG))


def test_the_stubs_are_part_of_the_package() -> None:
    assert {path.name for path in STUBS.iterdir() if not path.name.startswith("_")} == {
        "sgl_kernel",
        "torchvision",
        "triton",
    }
    assert STUBS.is_relative_to(Path(module.__file__).parent)
