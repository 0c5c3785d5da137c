"""The trainer's weights over a process group: what comes is what the files hold, and nobody waits without end."""

import multiprocessing
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from reef.engines.embedded.architecture import read_architecture
from reef.engines.embedded.errors import ModelError
from reef.engines.embedded.receive import Receiver
from reef.engines.embedded.weights import Weights, load_weights
from reef.engines.group import Group, find_store
from reef.errors import EngineError
from reef.training.buckets import buckets
from reef.training.send import Sender
from reef.training.worker import MegatronWorker
from reef.types import Batch, Bucket

MakeModel = Callable[..., Path]
MakeBatch = Callable[..., Batch]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

HOST = "127.0.0.1"
LARGE = Bucket(("large",), ("float32",), ((8 * 2**20,),))  # more than sockets hold on their way


class Engine:
    """An engine's end, without a server: it receives in a thread of its own."""

    def __init__(self, model: Path) -> None:
        self.arch = read_architecture(model)
        self.receiver = Receiver(self.arch, torch.float32)
        self._thread = ThreadPoolExecutor(1)

    def join(self, port: int, name: str = "group", rank: int = 1, world_size: int = 2) -> "Future[None]":
        return self._thread.submit(self.receiver.join, name, HOST, port, rank, world_size, "gloo")

    def receive(self, plan: tuple[Bucket, ...], name: str = "group") -> "Future[Weights | None]":
        def work() -> Weights | None:
            self.receiver.begin()
            for bucket in plan:
                self.receiver.receive(name, bucket.names, bucket.dtypes, bucket.shapes)
            return self.receiver.take()

        return self._thread.submit(work)


def same(a: Weights, b: Weights) -> None:
    """Bit for bit."""
    layers = zip(a.layers, b.layers, strict=True)
    pairs = [(a.embedding, b.embedding), (a.norm, b.norm), (a.head, b.head)]
    for left, right in layers:
        pairs += [(getattr(left, name), getattr(right, name)) for name in type(left).__slots__]
    for left, right in pairs:
        assert (left is None) == (right is None)
        assert left is None or torch.equal(left, right)


def meet(worker: MegatronWorker, engine: Engine, timeout_s: float = 60) -> None:
    found = worker.listen("engine-0", HOST)
    assert found is not None
    host, port, backend = found
    assert (host, backend) == (HOST, "gloo")
    joined = engine.join(port)
    worker.join("engine-0", "group", 2, timeout_s)
    joined.result(60)


@pytest.fixture(scope="session")
def tied_with_head(make_model: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model whose file holds its output layer nevertheless, as some writers leave it."""
    path = tmp_path_factory.mktemp("models") / "tied-with-head"
    shutil.copytree(make_model(), path)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture
def model(request: pytest.FixtureRequest, make_model: MakeModel, tied_with_head: Path) -> Path:
    if request.param == "tied-with-head":
        return tied_with_head
    architecture, tied, dtype, shard = request.param
    return make_model(architecture, tied=tied, dtype=dtype, shard=shard)


@pytest.mark.parametrize("bucket_bytes", [1, 7000, 2**30])
@pytest.mark.parametrize(
    "model",
    [("qwen3", True, "float32", "1GB"), ("qwen2", False, "bfloat16", "20KB"), "tied-with-head"],
    ids=["tied", "untied, several files", "tied with its output layer"],
    indirect=True,
)
def test_an_engine_gets_what_the_releases_files_hold(
    model: Path, bucket_bytes: int, make_worker: Callable[..., MegatronWorker], make_batch: MakeBatch, tmp_path: Path
) -> None:
    plan = buckets(model, bucket_bytes)
    engine = Engine(model)
    worker = make_worker(model)
    try:
        meet(worker, engine)
        for number in (1, 2):  # the group serves again
            worker.step(make_batch(seed=number))
            received = engine.receive(plan)
            for bucket in plan:
                worker.send("engine-0", bucket)
            weights = received.result(60)
            assert weights is not None
            worker.publish(f"r{number}", tmp_path)
            same(weights, load_weights(tmp_path / f"r{number}", engine.arch, torch.float32))
    finally:
        worker.close()


def test_a_release_without_files_has_the_same_id_and_size(worker: MegatronWorker, tmp_path: Path) -> None:
    worker.reset()
    nowhere = worker.publish("r1", tmp_path, on_disk=False)
    assert not list(tmp_path.iterdir())
    written = worker.publish("r1", tmp_path)
    assert nowhere is not None
    assert written is not None
    assert not nowhere.on_disk
    assert (nowhere.content_id, nowhere.size_bytes, nowhere.path, nowhere.probe) == (
        written.content_id,
        written.size_bytes,
        written.path,
        written.probe,
    )


# --- what goes wrong: the sender alone --------------------------------------------------------------------------------


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender()
    yield made
    made.close()


@pytest.fixture
def engine(make_model: MakeModel) -> Engine:
    return Engine(make_model())


def join(sender: Sender, engine: Engine, timeout_s: float, name: str = "group") -> None:
    _, port = sender.listen("engine-0", HOST)
    joined = engine.join(port, name)
    sender.join("engine-0", name, 2, timeout_s)
    joined.result(60)


def large() -> dict[str, torch.Tensor]:
    return {"large": torch.zeros(LARGE.shapes[0])}


def ports() -> set[Any]:
    """Where this process listens."""
    return {c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}


def test_the_store_listens_on_the_address_named_alone_until_the_group_ends(sender: Sender, engine: Engine) -> None:
    before = ports()
    join(sender, engine, 20)
    opened = ports() - before
    assert opened
    assert {address.ip for address in opened} == {HOST}
    sender.leave("engine-0")
    engine.receiver.leave("group")
    deadline = time.monotonic() + 60
    while ports() - before:
        assert time.monotonic() < deadline, f"still listening: {ports() - before}"
        time.sleep(0.05)


def test_an_address_of_another_machine_is_refused(sender: Sender) -> None:
    with pytest.raises(EngineError, match=r"cannot listen on 192\.0\.2\.1 for engines"):
        sender.listen("engine-0", "192.0.2.1")


def test_an_engine_that_never_joins_is_not_waited_for(sender: Sender) -> None:
    sender.listen("engine-0", HOST)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"the 2 ranks of group group did not meet in 0\.5 s"):
        sender.join("engine-0", "group", 2, 0.5)
    assert time.monotonic() - began < 60
    with pytest.raises(EngineError, match="does not listen for engine-0"):
        sender.join("engine-0", "group", 2, 0.5)


def test_an_engine_that_joined_and_takes_nothing_is_not_waited_for(sender: Sender, engine: Engine) -> None:
    join(sender, engine, 8)
    began = time.monotonic()
    with pytest.raises(EngineError, match="group group"):
        sender.send("engine-0", LARGE, large())
    assert time.monotonic() - began < 60
    with pytest.raises(EngineError, match="no group with engine-0"):
        sender.send("engine-0", LARGE, large())
    join(sender, engine, 20, "another")


def test_an_engine_that_leaves_while_it_is_sent_to_is_an_error_at_once(sender: Sender, engine: Engine) -> None:
    join(sender, engine, 50)
    leave = threading.Timer(0.5, engine.receiver.leave, ["group"])
    leave.start()
    began = time.monotonic()
    with pytest.raises(EngineError, match="group group failed"):
        sender.send("engine-0", LARGE, large())
    assert time.monotonic() - began < 20
    leave.join()


def test_a_trainer_that_gives_up_is_seen_by_the_engine_at_once(
    sender: Sender, engine: Engine, make_model: MakeModel
) -> None:
    join(sender, engine, 20)
    received = engine.receive(buckets(make_model(), 2**30))
    time.sleep(0.2)
    sender.leave("engine-0")
    with pytest.raises(ModelError, match="group group failed"):
        received.result(60)


def test_a_new_group_replaces_the_older_one_of_that_engine(
    sender: Sender, engine: Engine, make_model: MakeModel
) -> None:
    plan = buckets(make_model(), 2**30)
    tensors = load_file(make_model() / "model.safetensors")
    join(sender, engine, 20, "first")
    received = engine.receive(plan, "first")
    time.sleep(0.2)
    _, port = sender.listen("engine-0", HOST)
    with pytest.raises(ModelError, match="group first failed"):
        received.result(60)
    with pytest.raises(EngineError, match="no group with engine-0"):
        sender.send("engine-0", plan[0], tensors)
    assert engine.receiver.take() is None  # ends the session
    joined = engine.join(port, "second")
    sender.join("engine-0", "second", 2, 20)
    joined.result(60)
    received = engine.receive(plan, "second")
    for bucket in plan:
        sender.send("engine-0", bucket, tensors)
    weights = received.result(60)
    assert weights is not None
    same(weights, load_weights(make_model(), engine.arch, torch.float32))


def test_groups_of_two_engines_do_not_share_a_fate(sender: Sender, engine: Engine, make_model: MakeModel) -> None:
    other = Engine(make_model())
    join(sender, engine, 20)
    _, port = sender.listen("engine-1", HOST)
    joined = other.join(port, "other")
    sender.join("engine-1", "other", 2, 20)
    joined.result(60)
    engine.receiver.leave("group")
    with pytest.raises(EngineError):
        sender.send("engine-0", LARGE, large())
    plan = buckets(make_model(), 2**30)
    received = other.receive(plan, "other")
    sender.send("engine-1", plan[0], load_file(make_model() / "model.safetensors"))
    assert received.result(60) is not None


def test_every_rank_of_an_engine_receives(sender: Sender, make_model: MakeModel) -> None:
    ranks = [Engine(make_model()) for _ in range(2)]
    plan = buckets(make_model(), 7000)
    _, port = sender.listen("engine-0", HOST)
    joined = [engine.join(port, "group", 1 + number, 3) for number, engine in enumerate(ranks)]
    sender.join("engine-0", "group", 3, 20)
    for each in joined:
        each.result(60)
    received = [engine.receive(plan) for engine in ranks]
    for bucket in plan:
        sender.send("engine-0", bucket, load_file(make_model() / "model.safetensors"))
    expected = load_weights(make_model(), ranks[0].arch, torch.float32)
    for each in received:
        weights = each.result(60)
        assert weights is not None
        same(weights, expected)


# --- two GPUs ---------------------------------------------------------------------------------------------------------


def receive_over_nccl(port: int, answers: Any) -> None:
    """Rank 1, on the second GPU, for one bucket."""
    torch.cuda.set_device(1)
    group = Group(find_store(HOST, port, 20), "group", 1, 2, "nccl", 20)
    tensor = torch.empty(LARGE.shapes[0], dtype=torch.bfloat16, device="cuda")
    group.broadcast([tensor])
    answers.put(tensor.float().sum().item())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_over_nccl_a_bucket_arrives_and_an_engine_that_died_is_an_error_in_bounded_time(sender: Sender) -> None:
    """Written where there is no GPU, and never run yet."""
    _, port = sender.listen("engine-0", HOST)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=receive_over_nccl, args=(port, answers), daemon=True)
    process.start()
    sender.join("engine-0", "group", 2, 10)
    bucket = Bucket(LARGE.names, ("bfloat16",), LARGE.shapes)
    ones = {"large": torch.ones(LARGE.shapes[0], device="cuda")}
    sender.send("engine-0", bucket, ones)
    assert answers.get(timeout=20) == LARGE.shapes[0][0]
    process.kill()
    process.join()
    began = time.monotonic()
    with pytest.raises(EngineError, match="group group"):
        sender.send("engine-0", bucket, ones)
    assert time.monotonic() - began < 30
    assert torch.ones(2, device="cuda").sum().item() == 2  # this process and its GPU go on
