"""From the trainer to an engine that answers: `python -m benchmarks.publish`.

A random Qwen3 of 200M parameters in float32. One Megatron worker writes it as a release, and a replica (the embedded
server, then SGLang where that is installed) loads it: from its files, and sent by the trainer. The reference is the
time to read the release's files into memory, in turn in the same run. Writes work/bench/publish.json.
"""

import argparse
import asyncio
import importlib.util
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from benchmarks.common import STARTER, table, write
from reef.config import Config
from reef.engines.host import EngineHost
from reef.engines.replica import Replica
from reef.observe import Metrics
from reef.training.cluster import Trainer
from reef.training.transfer import TrainerTransfer
from reef.types import Published

MODEL = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class Load:
    """Medians of one way into one server, in seconds."""

    server: str
    transport: str
    pause_s: float
    transfer_s: float
    verify_s: float
    read_s: float  # the release's files into memory
    ratio: float  # pause / read


def make_model(path: Path) -> int:
    """A model directory with the starter's tokenizer; the number of parameters."""
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**MODEL))
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((STARTER / name).read_bytes())
    return int(model.num_parameters())


def read_s(published: Published) -> float:
    """Seconds to read the release's weights into memory, warm."""
    started = time.perf_counter()
    for path in Path(published.path).glob("*.safetensors"):
        path.read_bytes()
    return time.perf_counter() - started


@contextmanager
def trainer_of(config: Config) -> Iterator[Trainer]:
    """Ray and its worker, for as long as the context lasts."""
    trainer = Trainer(config, config.inference.model_path)
    trainer.start()
    try:
        yield trainer
    finally:
        trainer.stop()


async def measure(config: Config, trainer: Trainer, repetitions: int) -> tuple[list[float], list[Load]]:
    """Publish, and load both ways in turn; seconds of each publication, and the medians of the loads."""
    server = config.inference.backend
    replica = Replica("engine-0", config, Metrics(), EngineHost(config, "engine-0"))
    transfer = TrainerTransfer(trainer, config.inference.model_path, config.training.sync.bucket_bytes)
    loads: dict[str, list[dict[str, float]]] = {"disk": [], "distributed": []}
    reads, publications = [], []
    base = await asyncio.to_thread(trainer.publish, "r0", config.releases_dir)
    try:
        await replica.start(base)
        for number in range(1, repetitions + 1):
            started = time.perf_counter()
            published = await asyncio.to_thread(trainer.publish, f"r{number}", config.releases_dir)
            publications.append(time.perf_counter() - started)
            reads.append(read_s(published))
            await replica.load(published)
            loads["disk"].append(dict(replica.last_load))
            await replica.load(published, transfer)
            loads["distributed"].append(dict(replica.last_load))
    finally:
        await replica.stop()
    read = statistics.median(reads)
    found = []
    for transport, rows in loads.items():
        pause, sent, verify = (
            statistics.median(row[f"{name}_s"] for row in rows) for name in ("pause", "transfer", "verify")
        )
        found.append(Load(server, transport, pause, sent, verify, read, pause / read))
    return publications, found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    servers = ["embedded", *(["sglang"] if importlib.util.find_spec("sglang") else [])]
    with tempfile.TemporaryDirectory(prefix="reef-bench-") as directory:
        root = Path(directory)
        parameters = make_model(root / "model")
        values = {
            "reef": {"run-dir": root / "run"},
            "inference": {"model-path": root / "model", "load-timeout-s": 300},
            "training": {"threads": 2},
        }
        (root / "run" / "logs").mkdir(parents=True)
        publications, loads = [], []
        with trainer_of(Config.model_validate(values)) as trainer:
            for server in servers:
                config = Config.model_validate({**values, "inference": {**values["inference"], "backend": server}})
                published, found = asyncio.run(measure(config, trainer, args.repetitions))
                publications += published
                loads += found
        size = sum(path.stat().st_size for path in (root / "model").glob("*.safetensors"))
    head = ["server", "transport", "pause s", "transfer s", "verify s", "read s", "pause / read"]
    lines = [
        [
            row.server,
            row.transport,
            *(f"{v:.3f}" for v in (row.pause_s, row.transfer_s, row.verify_s, row.read_s, row.ratio)),
        ]
        for row in loads
    ]
    print(
        f"{parameters / 1e6:.0f}M parameters, {size / 1e6:.0f} MB; published in {statistics.median(publications):.2f} s"
    )
    print(table(head, lines))
    summary = {"parameters": parameters, "size_bytes": size, "publish_s": statistics.median(publications)}
    write("publish", {**summary, "loads": [asdict(row) for row in loads]})


if __name__ == "__main__":
    main()
