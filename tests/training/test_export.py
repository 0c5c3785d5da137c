"""Weights into two ranks and out of them again, in two processes over gloo: equal bits, and a share in memory."""

import multiprocessing
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reef.config import Layout
from reef.errors import UnavailableError
from reef.training import publish as publishing
from reef.training.actor import WorkerSpec
from reef.training.manifest import content_id_of
from reef.training.settings import settings
from reef.training.weights import open_weights
from reef.training.worker import MegatronWorker
from tests.training.test_worker import reference_logprobs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MakeModel = Callable[..., Path]
IDS = np.arange(20, dtype=np.int32) * 3
LAYOUTS: dict[str, dict[str, Any]] = {"tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}}
MODELS = [(architecture, tied) for architecture in ("qwen3", "qwen2", "llama") for tied in (True, False)]
LARGE = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "head_dim": 64,
}
MIB = 2**20
PART_BYTES = 8 * MIB


def run_rank(specs: list[tuple[str, WorkerSpec]], directory: Path, answers: Any) -> None:
    """Build each model in each layout in turn; one pair of processes serves them all."""
    for name, spec in specs:
        worker = MegatronWorker(spec)
        if name.startswith("large"):
            answers.put((name, spec.rank, memory(worker, directory)))
        elif name.startswith("refused"):
            (directory / "file").touch()
            with pytest.raises(UnavailableError, match="cannot write"):
                worker.publish("r", directory / "file")
            answers.put((name, spec.rank, None))
        else:
            scored = worker.logprobs([IDS], 1.0)
            hashed = worker.publish(name, directory, False)
            assert not (directory / name).exists()
            answers.put((name, spec.rank, (scored, hashed, worker.publish(name, directory))))
        worker.close()


def memory(worker: MegatronWorker, directory: Path) -> dict[str, float]:
    """MiB by which the largest use of memory lies above the use before: while weights come, and while they go."""
    found = {}
    worker.publish("warm", directory)  # buffers that gloo keeps
    for name, action in {
        "load": worker.reset,
        "publish": lambda: publishing.publish(
            worker._policy, worker._weights, None, "r", directory, part_bytes=PART_BYTES
        ),
    }.items():
        before = _status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # forget the largest use so far
        action()
        found[name] = (_status("VmHWM") - before) / 1024
    return found


def _status(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


@pytest.fixture(scope="module")
def models(make_model: MakeModel) -> dict[str, Path]:
    found = {f"{architecture}-{tied}": make_model(architecture, tied=tied) for architecture, tied in MODELS}
    found["large"] = make_model(tied=False, shard="20MB", **LARGE)
    found["refused"] = make_model()
    return found


@pytest.fixture(scope="module")
def answers(
    models: dict[str, Path], config: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, dict[int, Any]]]:
    """What both ranks found, by model and layout."""
    directory = tmp_path_factory.mktemp("releases")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = []
    for rank in range(2):
        specs = []
        for model, path in models.items():
            for layout, sizes in LAYOUTS.items():
                base = settings(config) | {"layout": Layout.model_validate(sizes).model_dump()}
                name = f"{model}-{layout}"
                specs.append((name, WorkerSpec(rank, 2, path, directory / f"{name}.store", base, 4096)))
        processes.append(context.Process(target=run_rank, args=(specs, directory, queue), daemon=True))
        processes[-1].start()
    found: dict[str, dict[int, Any]] = {}
    for _ in range(2 * len(specs)):
        name, rank, answer = queue.get(timeout=150)
        found.setdefault(name, {})[rank] = answer
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    yield found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("architecture", "tied"), MODELS)
def test_two_ranks_compute_the_same_and_give_back_the_same_bits(
    models: dict[str, Path], answers: dict[str, dict[int, Any]], architecture: str, tied: bool, layout: str
) -> None:
    path = models[f"{architecture}-{tied}"]
    ranks = answers[f"{architecture}-{tied}-{layout}"]
    scored = next(answer[0] for answer in ranks.values() if answer[0] is not None)
    np.testing.assert_allclose(scored[0], reference_logprobs(path, IDS, 1.0).detach(), atol=1e-4)
    _, hashed, published = ranks[0]
    assert ranks[1][1:] == (None, None)  # rank 0 answers for all
    assert published.content_id == hashed.content_id == content_id_of(path)
    assert (published.on_disk, hashed.on_disk) == (True, False)
    assert published.size_bytes == hashed.size_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rank_holds_more_than_its_share_and_one_tensor(
    models: dict[str, Path], answers: dict[str, dict[int, Any]], layout: str
) -> None:
    base = open_weights(models["large"])
    whole = sum(base.size_bytes(name) for name in base.files) / MIB
    largest = max(base.size_bytes(name) for name in base.files) / MIB
    assert len(base.headers) > 4
    assert whole > 12 * largest
    for rank, peaks in answers[f"large-{layout}"].items():
        assert peaks["load"] < largest + 4, (rank, peaks)
        # The part itself, and the pieces that one tensor of it is joined of.
        assert peaks["publish"] < PART_BYTES / MIB + 2 * largest + 4, (rank, peaks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_the_disk_refuses_every_rank_learns(answers: dict[str, dict[int, Any]], layout: str) -> None:
    assert answers[f"refused-{layout}"].keys() == {0, 1}
