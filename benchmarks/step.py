"""One optimizer step through Megatron against a plain PyTorch one: `python -m benchmarks.step`.

Both train the same random Qwen3 on the same batch with the same loss, in this process, with the same threads, in turn.
The plain step is a transformers model, GRPO's loss and torch's AdamW. Writes work/bench/step.json.
"""

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import transformers

from reef.config import Config
from reef.methods.base import build
from reef.training.actor import WorkerSpec
from reef.training.packing import split
from reef.training.padding import collate
from reef.training.settings import settings
from reef.types import Batch, Sample


@dataclass(frozen=True, slots=True)
class Case:
    """A model's size and a batch's."""

    name: str
    model: dict[str, int]
    num_samples: int
    lengths: tuple[int, int]  # tokens of a sample: at least, at most
    repetitions: int


CASES = (
    Case(
        "starter: 0.36M parameters, 64 x 38-56 tokens",
        {
            "vocab_size": 300,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
        },
        64,
        (38, 56),
        20,
    ),
    Case(
        "20M parameters, 4 x 512 tokens",
        {
            "vocab_size": 8192,
            "hidden_size": 384,
            "intermediate_size": 1408,
            "num_hidden_layers": 8,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 64,
        },
        4,
        (512, 512),
        5,
    ),
)


@dataclass(frozen=True, slots=True)
class Timing:
    """Median seconds of one case, and the shares of the Megatron step."""

    case: str
    parameters: int
    threads: int
    plain_step_s: float
    megatron_step_s: float
    forward_backward_s: float
    optimizer_s: float
    ratio: float  # megatron / plain
    loss_gap: float  # between the two at the first step


def make_batch(case: Case, config: Config) -> Batch:
    """Random tokens, rewards 0 and 1 in turn, and log-probabilities near those of an untrained model."""
    rng = np.random.default_rng(0)
    samples = []
    for i in range(case.num_samples):
        size = int(rng.integers(case.lengths[0], case.lengths[1] + 1))
        mask = np.arange(size) >= size * 2 // 5
        logprobs = np.where(mask, -np.log(case.model["vocab_size"]), 0.0).astype(np.float32)
        tokens = rng.integers(0, case.model["vocab_size"], size).astype(np.int32)
        samples.append(Sample(f"r{i}", f"c{i}", f"g{i // 2}", float(i % 2), tokens, mask, logprobs, 1.0))
    microbatches = split([len(s.tokens) for s in samples], config.training.micro_batch_tokens)
    return Batch("b", "bench", 1, 1, "r0", tuple(samples), microbatches, settings(config))


def plain_step(model: torch.nn.Module, batch: Batch) -> Callable[[], float]:
    """A step as one would write it without Megatron, over the same padded microbatches."""
    method = build(batch.settings["method"])
    options = batch.settings["optimizer"]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options["lr"], betas=(options["adam_beta1"], options["adam_beta2"]), weight_decay=0.0
    )
    advantages, weights = method.advantages(batch.samples), method.token_weights(batch.samples)

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for positions in batch.microbatches:
            padded = collate(
                [batch.samples[i] for i in positions],
                [advantages[i] for i in positions],
                [weights[i] for i in positions],
                torch.device("cpu"),
            )
            logits = model(input_ids=padded.ids, use_cache=False).logits / padded.temperature[..., None]
            logprobs = logits.log_softmax(-1).gather(-1, padded.targets[..., None])[..., 0]
            losses, _ = method.token_loss(logprobs, padded.old_logprobs, padded.advantages, padded.mask)
            loss = (losses * padded.weights).sum()
            torch.autograd.backward(loss)
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options["clip_grad"])
        optimizer.step()
        return total

    return step


def measure(case: Case, threads: int, directory: Path) -> Timing:
    """Time both steps in turn."""
    from reef.training.worker import MegatronWorker

    config = Config.model_validate({"training": {"threads": threads}})
    torch.manual_seed(0)
    model_config = transformers.Qwen3Config(max_position_embeddings=1024, tie_word_embeddings=True, **case.model)
    model = transformers.Qwen3ForCausalLM(model_config)
    model.save_pretrained(directory)
    model = transformers.Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    batch = make_batch(case, config)
    plain = plain_step(model, batch)
    worker = MegatronWorker(WorkerSpec(0, 1, directory, directory / "ranks", batch.settings, 4096))
    try:
        gap = abs(plain() - worker.step(batch).metrics["loss"])
        plain_s: list[float] = []
        megatron_s: list[dict[str, float]] = []
        for _ in range(case.repetitions):
            started = time.perf_counter()
            plain()
            plain_s.append(time.perf_counter() - started)
            megatron_s.append(dict(worker.step(batch).seconds))
    finally:
        worker.close()
    phases = {name: statistics.median(s[name] for s in megatron_s) for name in megatron_s[0]}
    return Timing(
        case=case.name,
        parameters=model.num_parameters(),
        threads=threads,
        plain_step_s=statistics.median(plain_s),
        megatron_step_s=phases["total"],
        forward_backward_s=phases["forward_backward"],
        optimizer_s=phases["optimizer"],
        ratio=phases["total"] / statistics.median(plain_s),
        loss_gap=gap,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("work/bench/step.json"))
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    timings = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as directory:
            timings.append(measure(case, args.threads, Path(directory)))
    print(f"{'case':46} {'plain':>9} {'megatron':>9} {'fwd+bwd':>9} {'optimizer':>9} {'ratio':>6}")
    for t in timings:
        seconds = (t.plain_step_s, t.megatron_step_s, t.forward_backward_s, t.optimizer_s)
        print(f"{t.case:46} " + " ".join(f"{s * 1e3:6.1f} ms" for s in seconds) + f" {t.ratio:6.2f}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps([asdict(t) for t in timings], indent=2) + "\n")


if __name__ == "__main__":
    main()
