"""How long training stands still for a checkpoint: `python -m benchmarks.checkpoint`.

One Megatron worker on the 20M model of `benchmarks.step`, whose checkpoint is written in three ways in turn: begun and
finished in one (training stands still for all of it: the reference), begun alone, and begun with steps while it is
written. Writes work/bench/checkpoint.json.
"""

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers

from benchmarks.common import table, write
from benchmarks.step import CASES, make_batch
from reef.config import Config
from reef.training.actor import WorkerSpec


@dataclass(frozen=True, slots=True)
class Timing:
    """Median seconds."""

    parameters: int
    checkpoint_bytes: int
    whole_s: float  # the reference
    begin_s: float  # training stands still for this
    finish_s: float  # and, between two steps, for this
    step_s: float
    step_meanwhile_s: float  # of a step while it is written


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(repetitions: int, directory: Path) -> Timing:
    """Time each way in turn."""
    from reef.training.worker import MegatronWorker

    case = CASES[1]
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(max_position_embeddings=1024, tie_word_embeddings=True, **case.model)
    )
    model.save_pretrained(directory)
    batch = make_batch(case, Config.model_validate({"training": {"threads": 1}}))
    worker = MegatronWorker(WorkerSpec(0, 1, directory, directory / "ranks", batch.settings, 4096))
    path = directory / "checkpoint"
    found: dict[str, list[float]] = {name: [] for name in ("whole", "begin", "finish", "step", "meanwhile")}
    try:
        for _ in range(repetitions):
            shutil.rmtree(path, ignore_errors=True)
            found["whole"].append(seconds(lambda: worker.save(path)))
            found["step"].append(seconds(lambda: worker.step(batch)))
            shutil.rmtree(path)
            found["begin"].append(seconds(lambda: worker.save_begin(path)))
            while not worker.save_done():
                found["meanwhile"].append(seconds(lambda: worker.step(batch)))
            found["finish"].append(seconds(worker.save_finish))
        size = sum(file.stat().st_size for file in path.iterdir())
    finally:
        worker.close()
    medians = {f"{name}_s": statistics.median(values) for name, values in found.items() if name != "meanwhile"}
    return Timing(
        parameters=model.num_parameters(),
        checkpoint_bytes=size,
        step_meanwhile_s=statistics.median(found["meanwhile"]),
        **medians,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        timing = measure(args.repetitions, Path(directory))
    values = asdict(timing)
    print(f"{values.pop('parameters') / 1e6:.0f}M parameters, {values.pop('checkpoint_bytes') / 1e6:.0f} MB")
    print(table(list(values), [[f"{value:.3f}" for value in values.values()]]))
    write("checkpoint", asdict(timing))


if __name__ == "__main__":
    main()
