"""What cannot work is said before anything has started, by `reef serve` as by its dry run, with what to change."""

import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from reef import cli

ROOT = Path(__file__).resolve().parents[1]
HOW = pytest.mark.parametrize("how", [["--dry-run"], []], ids=["dry run", "start"])
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


@pytest.fixture
def serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """`reef serve` with the starter model and a run directory of its own, with more words: status, output, errors."""
    empty = tmp_path / "serve.yaml"
    empty.touch()

    def command(*words: str) -> tuple[int, str, str]:
        settings = ["--reef.run-dir", str(tmp_path / "run"), "--reef.port", "0"]
        status = cli.main(["serve", "-c", str(empty), *settings, *words])
        return status, *capsys.readouterr()

    handlers, level = logging.root.handlers[:], logging.root.level
    yield command
    for handler in logging.root.handlers:  # of a log in the run directory
        if handler not in handlers:
            handler.close()
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@pytest.fixture
def models(tmp_path: Path, starter: Path) -> Callable[[str], Path]:
    """Copies of the starter's directory in which something is wrong, by what that is."""

    def make(what: str) -> Path:
        path = Path(shutil.copytree(starter, tmp_path / "model"))
        config = json.loads((path / "config.json").read_text())
        weights = path / "model.safetensors"
        if what == "nowhere":
            shutil.rmtree(path)
        elif what == "gpt2":
            (path / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
        elif what == "no config":
            (path / "config.json").unlink()
        elif what == "no tokenizer":
            for name in ("tokenizer.json", "tokenizer.model", "vocab.json"):
                (path / name).unlink(missing_ok=True)
        elif what == "cut off":
            weights.write_bytes(weights.read_bytes()[:-1])
        elif what == "a file is missing":
            index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
            (path / "model.safetensors.index.json").write_text(json.dumps(index))
        elif what == "experts":
            (path / "config.json").write_text(json.dumps(config | {"model_type": "qwen3_moe"} | EXPERTS))
        elif what == "bfloat16":
            save_file({name: tensor.bfloat16() for name, tensor in load_file(weights).items()}, weights)
        return path

    return make


@HOW
@pytest.mark.parametrize(
    ("what", "words", "message"),
    [
        ("nowhere", [], "inference.model-path: no directory "),
        ("gpt2", [], "model_type is 'gpt2'; Reef trains llama, qwen2, qwen3"),
        ("gpt2", ["--training.backend", "none"], "(serve other models with SGLang)"),
        ("no config", [], "holds no config.json"),
        ("no tokenizer", [], "no tokenizer in "),
        ("cut off", [], "model.safetensors is not a whole safetensors file"),
        ("a file is missing", [], "lacks model-2.safetensors, which its index names"),
        (
            "experts",
            ["--training.layout.expert", "4"],
            "training.layout.expert is 4, which does not divide the model's 6",
        ),
        (
            "experts",
            ["--training.layout.expert", "3"],
            "training.layout.expert is 3, which does not divide the 1 ranks",
        ),
        (
            "starter",
            ["--training.layout.tensor", "3"],
            "training.layout.tensor is 3, which does not divide the model's",
        ),
        (
            "starter",
            ["--training.layout.pipeline", "5"],
            "training.layout.pipeline is 5, which does not divide the model's",
        ),
        ("starter", ["--training.layout.expert", "2"], "has no experts: leave it 1"),
        ("bfloat16", [], "model are BF16, as each release's: engine and trainer will differ by more than"),
        ("starter", ["--training.dtype", "bfloat16"], "training.dtype is bfloat16: engine and trainer will differ"),
        (
            "starter",
            ["--training.layout.data", "0"],
            "training.layout.data: input should be greater than or equal to 1",
        ),
        ("starter", ["--inference.tensor", "2"], "the embedded engine has one rank; use backend sglang"),
        ("starter", ["--training.ray-address", "127.0.0.1:1"], "is 127.0.0.1:1, but no Ray cluster answers there"),
        (
            "starter",
            ["--training.ray-address", "ray://head:10001"],
            "expected HOST:PORT|joins a cluster as one of its nodes",
        ),
        (
            "starter",
            ["--inference.url", "http://10.0.0.2:30000", "--training.sync.transport", "distributed"],
            "meet on loopback, where 10.0.0.2 cannot join them",
        ),
        (
            "starter",
            ["--storage.url", "mysql://db/reef"],
            "storage.url: expected sqlite:///PATH or postgresql+psycopg://",
        ),
        (
            "starter",
            ["--evaluation.command", '["no-such-judge"]', "--evaluation.gate", "{accuracy: {min: 0.5}}"],
            "there is no command no-such-judge",
        ),
    ],
)
def test_a_model_or_a_setting_that_cannot_work_is_one_line_and_starts_nothing(
    serve: Any, models: Any, tmp_path: Path, what: str, words: list[str], message: str, how: list[str]
) -> None:
    status, output, errors = serve(*how, "--inference.model-path", str(models(what)), *words)
    assert (status, output) == (2, "")
    assert errors.startswith("reef: ")
    assert errors.count("\n") == 1
    assert any(part in errors for part in message.split("|")), errors
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_in_bfloat16_is_trained_where_rounding_is_allowed_for(serve: Any, models: Any, dtype: str) -> None:
    words = ["--training.dtype", dtype, "--inference.verify-tolerance", "0.5"]
    assert serve("--dry-run", "--inference.model-path", str(models("bfloat16")), *words)[::2] == (0, "")


@pytest.fixture
def held_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


@HOW
def test_a_port_in_use_is_named(serve: Any, held_port: int, how: list[str]) -> None:
    status, output, errors = serve(*how, "--reef.port", str(held_port))
    assert (status, output) == (2, "")
    assert errors.startswith(
        f"reef: cannot listen on 127.0.0.1:{held_port}: Address already in use (reef.host, reef.port"
    )


def test_a_dry_run_for_another_machine_does_not_ask_the_ports_of_this_one(serve: Any, held_port: int) -> None:
    machine = ["--gpus", "1", "--gpu-memory-gib", "24"]
    status, output, errors = serve("--dry-run", "--reef.port", str(held_port), *machine)
    assert (status, errors) == (0, "")
    assert "GPU 0: trainer rank 0 " in output


@pytest.mark.parametrize(
    "words", [["--gpus", "0"], ["--gpus", "1", "--nodes", "0"], ["--gpus", "1", "--gpu-memory-gib", "nan"]]
)
def test_a_machine_that_cannot_be_is_refused(serve: Any, words: list[str]) -> None:
    status, _, errors = serve("--dry-run", *words)
    assert status == 2
    assert "expected at least one of each" in errors


@pytest.mark.parametrize("words", [["--nodes", "2"], ["--gpu-memory-gib", "40"]])
def test_a_machine_that_is_described_by_half_is_refused(serve: Any, words: list[str]) -> None:
    assert serve("--dry-run", *words)[0::2] == (
        2,
        "reef: --gpu-memory-gib and --nodes describe the machines of --gpus: give that too\n",
    )


def test_a_machine_that_is_simulated_starts_nothing(serve: Any, tmp_path: Path) -> None:
    assert serve("--gpus", "1")[0::2] == (
        2,
        "reef: --gpus is a question about another machine: it goes with --dry-run\n",
    )
    assert not (tmp_path / "run").exists()


def test_what_does_not_fit_fails_the_dry_run_with_all_that_was_found(serve: Any) -> None:
    status, output, errors = serve("--dry-run", "--training.micro-batch-tokens", "100000000")
    assert status == 2
    assert "trainer rank 0: " in output
    assert errors.startswith("reef: memory: trainer rank 0 ")
    assert " too much. To change: lower training.micro-batch-tokens (100000000)" in errors
    assert errors.count("\n") == 1


def test_a_start_says_it_too_but_goes_on_since_it_is_an_estimate(serve: Any, held_port: int) -> None:
    status, output, errors = serve("--training.micro-batch-tokens", "100000000", "--reef.port", str(held_port))
    assert (status, output) == (2, "")  # it came as far as the port
    warning, error = errors.splitlines()
    assert warning.startswith("reef: warning: memory: trainer rank 0 ")
    assert error.startswith(f"reef: cannot listen on 127.0.0.1:{held_port}")


def test_disks_that_cannot_hold_what_is_to_be_kept_fail_the_dry_run(serve: Any, tmp_path: Path) -> None:
    status, output, errors = serve("--dry-run", "--storage.keep", "100000000000")
    assert status == 2
    assert re.search(r"^disk .* in .*/run/releases and .* in .*/run/checkpoints", output, re.MULTILINE)
    run = tmp_path / "run"
    assert errors.startswith(f"reef: the disk of {run}/releases and {run}/checkpoints has ")
    assert "lower storage.keep or storage.keep-checkpoints, or move reef.run-dir or storage.releases-dir" in errors


@pytest.fixture(scope="module")
def without_sglang(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose Python finds everything that is installed here, but SGLang."""
    packages = tmp_path_factory.mktemp("packages")
    for entry in Path(pytest.__file__).parents[1].iterdir():
        if not entry.name.lower().startswith("sglang"):
            (packages / entry.name).symlink_to(entry)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), str(ROOT)])}


@HOW
def test_sglang_that_is_not_installed_is_named_with_the_way_to_install_it(
    without_sglang: dict[str, str], tmp_path: Path, how: list[str]
) -> None:
    words = ["--inference.backend", "sglang", "--reef.run-dir", str(tmp_path / "run"), "--reef.port", "0"]
    done = subprocess.run(
        [sys.executable, "-S", "-m", "reef", "serve", *how, *words],  # -S: no packages but those of PYTHONPATH
        cwd=ROOT,
        env=without_sglang,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "reef: inference.backend: SGLang is not installed: `make sglang-cpu` here, or pip install "
    )
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
