"""What `reef.memory` computes beside what a real worker and real files take. Nothing here is an estimate's word."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from torch.profiler import ProfilerActivity, profile

from reef.config import Config
from reef.memory.parameters import of_model
from reef.memory.trainer import TrainerMemory, checkpoint_bytes, trainer_memory
from reef.training.architecture import read_architecture
from reef.training.packing import split
from reef.training.settings import settings
from reef.training.worker import MegatronWorker
from reef.types import Batch, Sample
from tests.training.rank_bytes import measure, measure_network

pytestmark = pytest.mark.slow  # whole workers, measured

ROOT = Path(__file__).resolve().parents[2]

LARGER = {"vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 14}
LARGER |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}


def config_of(dtype: str = "float32", tokens: int = 4096, context: int = 128, **training: Any) -> Config:
    return Config.model_validate(
        {
            "inference": {"context-length": context},
            "recipe": {"config": {"group-size": 4, "batch-size": 4}},
            "training": {"dtype": dtype, "micro-batch-tokens": tokens, **training},
        }
    )


def computed(path: Path, config: Config, stage: int = 0) -> TrainerMemory:
    return trainer_memory(read_architecture(path), config, stage, on_gpu=False)


@pytest.fixture
def started(make_worker: Callable[..., MegatronWorker]) -> Iterator[Callable[[Path, Config], MegatronWorker]]:
    """Starts a worker as a configuration says; it ends with the test."""
    made: list[MegatronWorker] = []

    def start(path: Path, config: Config) -> MegatronWorker:
        made.append(make_worker(path, **settings(config)))
        return made[-1]

    yield start
    for worker in made:
        worker.close()
    made.clear()
    gc.collect()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["starter", "qwen2", "llama", "qwen3_moe"])
def test_weights_gradients_and_optimizer_are_counted_to_the_byte(
    started: Any, make_model: Any, starter: Path, model: str, dtype: str
) -> None:
    path = starter if model == "starter" else make_model(model, tied=model == "qwen2")
    config = config_of(dtype)
    need = computed(path, config)
    assert (need.weights, need.gradients, need.optimizer) == tuple(measure(started(path, config)).values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("freeze", ["none", "attention"])
@pytest.mark.parametrize("model", ["starter", "llama", "qwen3_moe"])
def test_those_of_a_critic_and_a_reference_beside_it_too(
    started: Any, make_model: Any, starter: Path, model: str, freeze: str, dtype: str
) -> None:
    path = starter if model == "starter" else make_model(model, tied=False)
    recipe = {"implementation": "sao", "config": {"critic-freeze": freeze, "kl": "loss", "kl-coef": 0.1}}
    config = Config.model_validate({"recipe": recipe, "training": {"dtype": dtype}})
    learner = started(path, config)._learner
    beside = sum(measure_network(learner.critic).values())
    beside += sum(p.numel() * p.element_size() for p in learner.reference.module.parameters())
    assert computed(path, config).beside == beside


def test_those_of_a_model_of_50_million_parameters_too(started: Any, make_model: Any) -> None:
    path = make_model("qwen3", tied=False, dtype="bfloat16", **LARGER)
    config = config_of("bfloat16")
    need = computed(path, config)
    assert need.weights > 2 * 50e6
    assert (need.weights, need.gradients, need.optimizer) == tuple(measure(started(path, config)).values())
    files = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert files == pytest.approx(2 * of_model(read_architecture(path)), rel=0.01)


def test_the_files_of_the_starter_hold_the_parameters_that_are_counted(starter: Path) -> None:
    numbers = 0
    for file in starter.glob("*.safetensors"):
        with safe_open(file, framework="np") as opened:
            numbers += sum(int(np.prod(opened.get_slice(name).get_shape())) for name in opened.keys())  # noqa: SIM118
    assert numbers == of_model(read_architecture(starter))


def batch_of(config: Config, vocab_size: int, length: int) -> Batch:
    """One microbatch of four samples of `length` tokens."""
    rng = np.random.default_rng(0)
    mask = np.arange(length) >= 5
    samples = [
        Sample(
            f"r{i}",
            f"c{i}",
            "g",
            float(i % 2),
            rng.integers(0, vocab_size, length).astype(np.int32),
            mask,
            np.where(mask, -4.0, 0.0).astype(np.float32),
            1.0,
        )
        for i in range(4)
    ]
    microbatches = split([length] * 4, 4 * length, 1)
    assert len(microbatches) == 1
    return Batch("b", "s", 1, 1, "r0", tuple(samples), microbatches, settings(config))


def peak_bytes(step: Callable[[], Any]) -> int:
    """Bytes that a step allocates at its largest, above what was there before it."""
    step()  # what is made once and stays
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    now = peak = 0
    events = (event for event in found.profiler.kineto_results.events() if event.name() == "[memory]")
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


WIDE = {"vocab_size": 128, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "head_dim": 32}
WORDY = {"vocab_size": 32768, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
FULL = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("model", "sizes", "options"),
    [
        ("qwen3", WIDE, {}),
        ("llama", WIDE, {}),
        ("qwen3", WORDY, {}),
        ("qwen3", WIDE, FULL),
        ("qwen3_moe", WIDE | EXPERTS, {}),
    ],
    ids=["activations", "no norms of heads", "logits", "computed again", "experts"],
)
def test_what_a_step_allocates_is_activations_and_logits(
    started: Any, make_model: Any, model: str, sizes: dict[str, int], options: dict[str, Any], dtype: str
) -> None:
    path = make_model(model, **sizes)
    config = config_of(dtype, tokens=1024, context=1024, options=options)
    worker, batch = started(path, config), batch_of(config, sizes["vocab_size"], 256)
    need = computed(path, config)
    found = peak_bytes(lambda: worker.step(batch))
    print(f"{model} {dtype} ratio {(need.activations + need.logits) / found:.3f}")
    assert 0.99 * found < need.activations + need.logits < 1.2 * found


def test_a_checkpoint_weighs_what_is_counted(started: Any, make_model: Any, tmp_path: Path) -> None:
    path = make_model("qwen3", tied=False, **WIDE)
    for dtype in ("float32", "bfloat16"):
        config = config_of(dtype)
        worker = started(path, config)
        worker.save(tmp_path / dtype)
        worker.close()
        size = sum(file.stat().st_size for file in (tmp_path / dtype).rglob("*") if file.is_file())
        assert checkpoint_bytes(read_architecture(path), config) == pytest.approx(size, rel=0.05)


SHARDED = {"use-distributed-optimizer": True}
SMALL = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "head_dim": 32}
LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tensor": ("qwen3", {"tensor": 2, "sequence-parallel": True}, {}),
    "pipeline": ("qwen3", {"pipeline": 2}, {}),
    "data": ("qwen3", {"data": 2}, {}),
    "data, distributed optimizer": ("qwen3", {"data": 2}, SHARDED),
    "expert": ("qwen3_moe", {"data": 2, "expert": 2}, SHARDED),
    "experts over tensor": ("qwen3_moe", {"tensor": 2, "sequence-parallel": True}, SHARDED),
    "tensor and expert": ("qwen3_moe", {"tensor": 2, "sequence-parallel": True, "expert": 2}, {}),
}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_each_of_two_ranks_holds_what_is_counted_under_every_layout(make_model: Any, tmp_path: Path) -> None:
    cases = [(name, dtype) for name in LAYOUTS for dtype in ("float32", "bfloat16")]
    configs = [config_of(dtype, layout=LAYOUTS[name][1], options=LAYOUTS[name][2]) for name, dtype in cases]
    models = [LAYOUTS[name][0] for name, _ in cases]
    paths = [make_model(model, **SMALL | (EXPERTS if model == "qwen3_moe" else {})) for model in models]
    specs = [
        {"model_path": str(path), "rendezvous": str(tmp_path / str(number)), "settings": settings(config)}
        for number, (path, config) in enumerate(zip(paths, configs, strict=True))
    ]
    command = [sys.executable, "-m", "tests.training.rank_bytes"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank), json.dumps(specs)], cwd=ROOT, env=environment, stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        answers = [json.loads(rank.communicate(timeout=150)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for number, case in enumerate(cases):
        for rank in range(2):
            stage = rank if configs[number].training.layout.pipeline > 1 else 0
            need, found = computed(paths[number], configs[number], stage), answers[rank][number]
            assert need.weights == found["weights"], (case, rank)
            # The distributed optimizer pads what it divides, so that each rank's share is as long and begins evenly.
            assert need.gradients == pytest.approx(found["gradients"], rel=0.01), (case, rank)
            assert need.optimizer == pytest.approx(found["optimizer"], rel=0.01), (case, rank)
