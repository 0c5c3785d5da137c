"""Tiny models, their float32 reference, inference servers as real processes on loopback, and a host of fake ones."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from reef.config import Config
from reef.config import load as load_config
from reef.engines.host import EngineHost
from reef.types import Generation, Published, Request, Sampling

START_TIMEOUT_S = 120
SGLANG_START_TIMEOUT_S = 300  # 15 s, on busy cores a minute
NUM_ROWS = 24  # sequences that the contract servers run at once; more wait
EOS = 2
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.15,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, after three special tokens: id 2 ends a text, id 3 + i is the i-th byte of the alphabet."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<start>": 1, "<end>": EOS} | {character: 3 + i for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


def _build(name: str, path: Path) -> None:
    torch.manual_seed(sum(name.encode()))
    qwen3 = {**SIZES, "head_dim": 32}
    model: Any
    if name.startswith("qwen3-untied"):
        model = Qwen3ForCausalLM(Qwen3Config(**qwen3, tie_word_embeddings=False, attention_bias=True))
    elif name.startswith("qwen3"):
        model = Qwen3ForCausalLM(Qwen3Config(**qwen3, tie_word_embeddings=True))
    elif name == "qwen2-tied":
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True))
    elif name == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))
    elif name == "llama":
        biases = {"attention_bias": True, "mlp_bias": True}
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **biases, tie_word_embeddings=False))
    elif name == "llama3":
        model = LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True))
    else:
        raise ValueError(name)
    for parameter in model.parameters():  # norms and biases too, so that a forgotten one shows
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(path)
    _tokenizer().save_pretrained(path)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the directory of a tiny random model; other names with one prefix are other weights of one architecture."""
    root = tmp_path_factory.mktemp("models")

    def get(name: str) -> Path:
        if not (root / name).exists():
            _build(name, root / name)
        return root / name

    return get


Logprobs = Callable[..., torch.Tensor]


@pytest.fixture(scope="session")
def reference() -> Logprobs:
    """`reference(path, ids, temperature)` -> log-softmax [len(ids), vocabulary] of a transformers float32 forward."""
    loaded: dict[Path, Any] = {}

    def logprobs(path: Path, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
        if path not in loaded:
            loaded[path] = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
        with torch.no_grad():
            logits = loaded[path](torch.tensor([ids])).logits[0]
        return torch.log_softmax(logits / temperature, -1)

    return logprobs


@dataclass
class Server:
    """A running inference server and a client for it."""

    url: str
    path: Path
    """The model it was started with."""
    process: subprocess.Popen[bytes] | None
    """None: it has another owner."""
    client: httpx.Client
    kind: str = "embedded"
    """Or "sglang"."""
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(64))

    def post(self, route: str, **body: Any) -> httpx.Response:
        return self.client.post(self.url + route, json=body)

    def get(self, route: str) -> httpx.Response:
        return self.client.get(self.url + route)

    def generate(self, ids: Any, max_new_tokens: int = 8, *, expect: int = 200, **options: Any) -> Any:
        """POST /generate with log-probabilities; body fields by name, everything else into sampling_params."""
        response = self.post("/generate", **self.body(ids, max_new_tokens, **options))
        assert response.status_code == expect, response.text
        return response.json()

    def body(self, ids: Any, max_new_tokens: int = 8, **options: Any) -> dict[str, Any]:
        outside = ("rid", "logprob_start_len", "top_logprobs_num", "stream", "return_logprob")
        body = {name: options.pop(name) for name in outside if name in options}
        sampling = {"max_new_tokens": max_new_tokens, "ignore_eos": True, **options}
        return {"input_ids": ids, "return_logprob": True, "sampling_params": sampling, **body}

    def stream(self, ids: Any, max_new_tokens: int = 8, **options: Any) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer; the last line must be [DONE]."""
        body = self.body(ids, max_new_tokens, stream=True, **options)
        with self.client.stream("POST", self.url + "/generate", json=body) as response:
            assert response.status_code == 200
            pending, last = b"", b""
            # Not iter_lines: it also splits at characters like U+2028, which JSON strings may hold.
            for chunk in response.iter_bytes():
                *events, pending = (pending + chunk).split(b"\n\n")
                for event in events:
                    last = event.removeprefix(b"data: ")
                    if last != b"[DONE]":
                        yield json.loads(last)
            assert last == b"[DONE]"

    def started(self, ids: Any, max_new_tokens: int, **options: Any) -> Future[dict[str, Any]]:
        """Starts a streamed request, waits until it has a token, and promises what its events add up to."""
        events = self.stream(ids, max_new_tokens, **options)
        first = next(events)
        return self.pool.submit(lambda: added_up([first, *events]))

    def num_in_work(self, waiting: bool = True) -> int:
        """Sequences that run, or wait too."""
        (load,) = self.get("/v1/loads").json()["loads"]
        return int(load["num_running_reqs"] + (load["num_waiting_reqs"] if waiting else 0))

    def await_in_work(self, wanted: Callable[[int], bool], timeout_s: float, waiting: bool = True) -> None:
        """Return once so many sequences are in work."""
        deadline = time.monotonic() + timeout_s
        while not wanted(num := self.num_in_work(waiting)):
            assert time.monotonic() < deadline, f"{num} sequences are in work after {timeout_s} s"
            time.sleep(0.02)

    def load(self, path: Path, version: str, **options: Any) -> httpx.Response:
        return self.post("/update_weights_from_disk", model_path=str(path), weight_version=version, **options)

    def stop(self) -> None:
        self.pool.shutdown(cancel_futures=True)
        self.client.close()
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole answer that a stream of one sequence makes, whether its events repeat tokens or bring each once."""
    last = events[-1]
    meta = dict(last["meta_info"])
    if len(last["output_ids"]) == meta["completion_tokens"]:
        return last
    for name in ("output_token_logprobs", "output_top_logprobs"):
        if name in meta:
            meta[name] = [entry for event in events for entry in event["meta_info"][name]]
    ids = [token for event in events for token in event["output_ids"]]
    assert len(ids) == meta["completion_tokens"]
    return {**last, "text": "".join(event["text"] for event in events), "output_ids": ids, "meta_info": meta}


def embedded_command(path: Path, port_file: Path, *extra: str) -> list[str]:
    """How to start the embedded engine."""
    command = [sys.executable, "-m", "reef.engines.embedded", "--model-path", str(path), "--port", "0"]
    return [*command, "--port-file", str(port_file), "--log-level", "warning", *extra]


StartServer = Callable[..., Server]


@pytest.fixture(scope="session")
def start_embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Starts embedded engines, each with its own arguments, and ends them with the session."""
    servers: list[Server] = []

    def start(path: Path, *extra: str) -> Server:
        port_file = tmp_path_factory.mktemp("server") / "port"
        command = embedded_command(path, port_file, "--parent-pid", str(os.getpid()), *extra)
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        deadline = time.monotonic() + START_TIMEOUT_S
        while not port_file.exists():
            assert process.poll() is None, f"the engine ended with {process.returncode}"
            assert time.monotonic() < deadline, "the engine did not start in time"
            time.sleep(0.05)
        client = httpx.Client(timeout=60, limits=httpx.Limits(max_connections=128))
        servers.append(Server(f"http://127.0.0.1:{int(port_file.read_text())}", path, process, client))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="package", params=["embedded", pytest.param("sglang", marks=pytest.mark.slow)])
def contract_server(
    request: pytest.FixtureRequest,
    config: Callable[..., Config],
    model_dir: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    """The servers that the contract suite runs against, started as Reef starts them, with model `qwen3-a`."""
    settings = ("--inference.backend", request.param, "--inference.options.max-running-requests", str(NUM_ROWS))
    host = EngineHost(config(tmp_path_factory.mktemp(request.param), *settings), "engine-0")
    path = model_dir("qwen3-a")
    with asyncio.Runner() as runner:
        url = runner.run(host.start(str(path), "v0", SGLANG_START_TIMEOUT_S))
        client = httpx.Client(timeout=60, limits=httpx.Limits(max_connections=128))
        server = Server(url, path, None, client, request.param)
        yield server
        server.stop()
        runner.run(host.stop())


@pytest.fixture
def server(contract_server: Server) -> Iterator[Server]:
    """The contract server, brought back to its first weights and to motion after each test."""
    yield contract_server
    contract_server.post("/abort_request", abort_all=True)
    contract_server.post("/continue_generation")
    if contract_server.get("/model_info").json()["weight_version"] != "v0":
        assert contract_server.load(contract_server.path, "v0").status_code == 200


@pytest.fixture
def copy_model(model_dir: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A private copy of a model's directory, to damage."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(model_dir(name), tmp_path / name))

    return copy


# --- replicas and pools -----------------------------------------------------------------------------------------------


class FakeHost:
    """Starts a FakeEngine where EngineHost starts a process; `prepare(engine)` breaks what it starts."""

    def __init__(self, make_fake_engine: Callable[[str], Any], name: str = "engine-0") -> None:
        self.name = name
        self.engines: list[Any] = []
        self.prepare: Callable[[Any], None] = lambda engine: None
        self.starts_fail: Exception | None = None
        self.starting = asyncio.Event()
        self.may_start = asyncio.Event()
        self.may_start.set()
        self._make = make_fake_engine
        self._gone = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return None if self._gone.is_set() or not self.engines else 1

    @property
    def key(self) -> str | None:
        return None

    @property
    def engine(self) -> Any:
        return self.engines[-1]

    async def start(self, _model_path: str, version: str, _ready_timeout_s: float) -> str:
        self.starting.set()
        await self.may_start.wait()
        if self.starts_fail is not None:
            self._gone.set()
            raise self.starts_fail
        self.engines.append(self._make(version))
        self.prepare(self.engine)
        self._gone = asyncio.Event()
        return str(self.engine.url)

    async def wait(self) -> int:
        await self._gone.wait()
        return -9

    async def stop(self) -> None:
        gone = self._gone  # of this engine: another may have been started by the time that it has ended
        if self.engines:
            await asyncio.to_thread(self.engine.stop)
        gone.set()

    async def die(self) -> None:
        await self.stop()

    async def hang_in_a_restart(self) -> None:
        """Die; returns once it is to start again, with the release wanted until then. It may not before `may_start`."""
        self.may_start.clear()
        self.starting.clear()
        await self.die()
        await self.starting.wait()


def pass_time(seconds: float) -> None:
    """Move the running event loop's clock: whoever waits for less has waited too long, however fast this machine is."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]


@pytest.fixture
def fake_hosts(make_fake_engine: Callable[[str], Any]) -> dict[str, FakeHost]:
    """The host of each replica's name, made when it is asked for."""

    class Hosts(dict[str, FakeHost]):
        def __missing__(self, name: str) -> FakeHost:
            self[name] = FakeHost(make_fake_engine, name)
            return self[name]

    return Hosts()


@pytest.fixture(scope="session")
def published() -> Callable[..., Published]:
    """`published("r1", path, probe)`: a release as the pool gets it."""

    def make(release_id: str, path: Any = "/weights", probe: Any = None) -> Published:
        return Published(release_id=release_id, path=str(path), content_id="sha256:0", size_bytes=1, probe=probe)

    return make


@pytest.fixture(scope="session")
def config() -> Callable[..., Config]:
    """`config(directory, *flags)`: the configuration of a run directory below it, which has its place for logs."""

    def make(directory: Path, *settings: str) -> Config:
        (directory / "run" / "logs").mkdir(parents=True, exist_ok=True)
        return load_config(None, ["--reef.run-dir", str(directory / "run"), *settings], environ={})

    return make


@pytest.fixture(scope="session")
def generate() -> Callable[..., Any]:
    """`await generate(client, max_tokens=12)`: one greedy answer to a prompt that is always the same."""

    async def run(client: Any, max_tokens: int = 12) -> Generation:
        request = Request(
            id=f"req_{time.monotonic_ns()}",
            scenario="s",
            api="completions",
            prompt_ids=np.array([1, 294, 201, 20, 13, 21, 31, 2, 201, 1, 298, 297, 201], dtype=np.int32),
            sampling=Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
            n=1,
            body=b"{}",
            created_at=0.0,
        )
        (generation,) = await client.generate(request)
        return generation

    return run
