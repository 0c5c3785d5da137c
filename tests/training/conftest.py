"""Small models, batches and one-process workers. Shape letters: T tokens of a sequence."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

with warnings.catch_warnings():  # Megatron says at import that it has no Transformer Engine and no Apex
    warnings.simplefilter("ignore")
    import torch
    import transformers

    from reef.training.worker import MegatronWorker

from reef.config import Config
from reef.training.actor import WorkerSpec
from reef.training.packing import split
from reef.training.settings import settings
from reef.types import Batch, Floats, Ids, Sample

VOCAB_SIZE = 96
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
THIRD_PARTY_WARNINGS = (
    "ignore:.*Apex (is|are) not installed",
    "ignore:MLP requires ffn_hidden_size",
    "ignore:.*tp_group is None",
    "ignore:full scope is deprecated",
    "ignore:.load_state_dict. is deprecated:FutureWarning",
    "ignore:Please use DTensor instead:FutureWarning",
    "ignore:.torch.distributed.(reduce_scatter|all_gather).* is deprecated:FutureWarning",
    # Megatron's distributed optimizer gives each share of a float32 weight its gradient by hand.
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)

MakeModel = Callable[..., Path]
MakeBatch = Callable[..., Batch]


def pytest_configure(config: pytest.Config) -> None:
    for line in THIRD_PARTY_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Makes (once each) a model directory: architecture, tied or not, dtype, several files or one, other settings."""

    def make(
        architecture: str = "qwen3", *, tied: bool = True, dtype: str = "float32", shard: str = "1GB", **more: object
    ) -> Path:
        name = "-".join(str(part) for part in (architecture, tied, dtype, shard, *more.items()))
        path = tmp_path_factory.getbasetemp() / "".join(char if char.isalnum() else "-" for char in name)
        if path.exists():
            return path
        sizes = {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "tie_word_embeddings": tied,
        }
        if architecture.startswith("qwen3"):
            sizes["head_dim"] = 16
        if architecture == "qwen3_moe":
            sizes |= EXPERTS
        config = transformers.AutoConfig.for_model(architecture, **sizes | more)
        generator = torch.Generator().manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                mean = 1.0 if "norm" in name else 0.0
                parameter.copy_(mean + 0.15 * torch.randn(parameter.shape, generator=generator))
        model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=shard)
        (path / "tokenizer.json").write_text("{}")
        return path

    return make


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return Config.model_validate(
        {
            "reef": {"run-dir": tmp_path_factory.mktemp("run")},
            "recipe": {"config": {"group-size": 4, "batch-size": 8}},
            "training": {"options": {"lr": 1e-3, "weight-decay": 0.1, "clip-grad": 0.5}, "step-timeout-s": 30},
        }
    )


@pytest.fixture(scope="session")
def make_batch(config: Config) -> MakeBatch:
    """Makes a batch of two groups of four with rewards that differ, from a seed."""

    def make(
        score: Callable[[Sequence[Ids], float], Sequence[Floats] | None] | None = None,
        *,
        seed: int = 0,
        num_samples: int = 8,
        temperature: float = 1.0,
        budget_tokens: int = 4096,
        data_ranks: int = 1,
        noise: float = 0.0,
        **changes: object,
    ) -> Batch:
        rng = np.random.default_rng(seed)
        sequences = [rng.integers(0, VOCAB_SIZE, rng.integers(9, 24)).astype(np.int32) for _ in range(num_samples)]
        scored = score(sequences, temperature) if score is not None else None
        samples = []
        for i, tokens in enumerate(sequences):
            mask = np.arange(len(tokens)) >= 5
            logprobs = np.zeros(len(tokens), np.float32)
            logprobs[1:] = scored[i] if scored is not None else -4.0
            logprobs[1:] += noise * rng.standard_normal(len(tokens) - 1).astype(np.float32)
            logprobs[~mask] = 0
            reward = float(i % 3 == 0) + 0.25 * (i % 2)
            samples.append(
                Sample(f"report-{i}", f"receipt-{i}", f"g{i // 4}", reward, tokens, mask, logprobs, temperature)
            )
        return Batch(
            id="batch-1",
            scenario="s",
            number=1,
            attempt=1,
            base_release="r0",
            samples=tuple(samples),
            microbatches=split([len(s) for s in sequences], budget_tokens, data_ranks),
            settings=settings(config) | changes,
        )

    return make


@pytest.fixture(scope="session")
def make_worker(tmp_path_factory: pytest.TempPathFactory, config: Config) -> Callable[..., MegatronWorker]:
    """Makes a worker of one rank in this process; close one before the next is made."""

    def make(model_path: Path, **changes: object) -> MegatronWorker:
        return MegatronWorker(
            WorkerSpec(
                rank=0,
                world_size=1,
                model_path=model_path,
                rendezvous=tmp_path_factory.mktemp("ranks") / "store",
                settings=settings(config) | changes,
                micro_batch_tokens=4096,
            )
        )

    return make


@pytest.fixture(scope="module")
def worker(make_model: MakeModel, make_worker: Callable[..., MegatronWorker]) -> Iterator[MegatronWorker]:
    """A worker on the tied Qwen3, shared by a module's tests."""
    made = make_worker(make_model())
    yield made
    made.close()
