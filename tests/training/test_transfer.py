"""From the trainer's ranks into a running engine without a disk: two ranks, real Ray, the embedded server over HTTP."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from reef.config import Config
from reef.engines import transfer as transfers
from reef.engines.client import EngineClient
from reef.engines.embedded.architecture import read_architecture
from reef.engines.embedded.receive import Receiver
from reef.engines.embedded.weights import load_weights
from reef.engines.transfer import transfer_weights
from reef.errors import EngineError, WorkersLostError
from reef.training.actor import WorkerSpec
from reef.training.buckets import buckets
from reef.training.cluster import Trainer
from reef.training.settings import settings
from reef.training.transfer import TrainerTransfer
from reef.types import Batch, Published

MakeModel = Callable[..., Path]
MakeBatch = Callable[..., Batch]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

LAYOUTS = {
    "tensor, tied": ({"tensor": 2}, True),
    "pipeline, untied": ({"pipeline": 2}, False),
}
BUCKET_BYTES = 7000  # several buckets, and tensors larger than one


# --- two ranks, and a receiver without a server -----------------------------------------------------------------------


def run_rank(rank: int, specs: list[WorkerSpec], batch: Batch, directory: Path, pipe: Any) -> None:
    """In each layout in turn: step, send to whoever joins, write the same release."""
    from reef.training.worker import MegatronWorker

    for spec in specs:
        worker = MegatronWorker(spec)
        name = spec.rendezvous.stem
        worker.step(batch)
        found = worker.listen("engine-0", "127.0.0.1")
        pipe.send((name, found))
        worker.join("engine-0", name, 2, 30)
        for bucket in buckets(spec.model_path, BUCKET_BYTES):
            worker.send("engine-0", bucket)
        worker.publish(name, directory)
        worker.close()
        pipe.send((name, "done"))


def test_two_ranks_send_what_they_would_write(
    make_model: MakeModel, make_batch: MakeBatch, config: Config, tmp_path: Path
) -> None:
    base = settings(config)

    def spec(rank: int, name: str) -> WorkerSpec:
        layout, tied = LAYOUTS[name]
        changed = base | {"layout": dict(base["layout"]) | layout}
        return WorkerSpec(rank, 2, make_model(tied=tied), tmp_path / f"{name}.store", changed, 4096)

    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        arguments = (rank, [spec(rank, name) for name in LAYOUTS], make_batch(), tmp_path, theirs)
        process = context.Process(target=run_rank, args=arguments, daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    for name, (_, tied) in LAYOUTS.items():
        model = make_model(tied=tied)
        receiver = Receiver(read_architecture(model), torch.float32)
        (said, found), (_, nothing) = [pipe.recv() for pipe in pipes]
        assert (said, nothing) == (name, None)
        receiver.join(name, found[0], found[1], 1, 2, found[2])
        receiver.begin()
        for bucket in buckets(model, BUCKET_BYTES):
            receiver.receive(name, bucket.names, bucket.dtypes, bucket.shapes)
        weights = receiver.take()
        assert [pipe.recv() for pipe in pipes] == [(name, "done")] * 2
        written = load_weights(tmp_path / name, read_architecture(model), torch.float32)
        before = load_weights(model, read_architecture(model), torch.float32)
        assert weights is not None
        assert torch.equal(weights.embedding, written.embedding)
        assert torch.equal(weights.head, written.head)
        assert not torch.equal(weights.embedding, before.embedding)  # it has learned
        for ours_, theirs_ in zip(weights.layers, written.layers, strict=True):
            for field in ("attention_norm", "qkv", "qk_norm", "out", "mlp_norm", "gate_up", "down"):
                assert torch.equal(getattr(ours_, field), getattr(theirs_, field)), (name, field)
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


# --- a trainer under Ray, and the embedded server ---------------------------------------------------------------------


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str


@pytest.fixture
def start_engine(make_model: MakeModel, tmp_path: Path) -> Iterator[Callable[[], Server]]:
    servers: list[Server] = []

    def start() -> Server:
        port_file = tmp_path / f"port-{len(servers)}"
        command = [sys.executable, "-m", "reef.engines.embedded", "--model-path", str(make_model())]
        command += ["--port", "0", "--port-file", str(port_file), "--parent-pid", str(os.getpid())]
        process = subprocess.Popen(
            [*command, "--log-level", "warning", "--weight-version", "base", "--skip-tokenizer-init"]
        )
        deadline = time.monotonic() + 60
        while not port_file.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        servers.append(Server(process, f"http://127.0.0.1:{int(port_file.read_text())}"))
        return servers[-1]

    yield start
    for server in servers:
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="module")
def trainer(config: Config, make_model: MakeModel) -> Iterator[Trainer]:
    """Two tensor ranks."""
    changed = config.model_dump(mode="json", by_alias=True)
    changed["training"]["layout"]["tensor"] = 2
    made = Trainer(Config.model_validate(changed), make_model())
    made.start()
    yield made
    made.stop()


@pytest.fixture
def transfer(trainer: Trainer, make_model: MakeModel) -> TrainerTransfer:
    trainer.reset()
    return TrainerTransfer(trainer, make_model(), BUCKET_BYTES)


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


async def put(client: EngineClient, transfer: Any, published: Published, timeout_s: float = 30) -> None:
    """As a replica does it."""
    await client.pause("retract")
    try:
        await transfer_weights(client, "engine-0", 1, transfer, published, True, timeout_s)
    finally:
        await client.resume()


async def holds(client: EngineClient, published: Published) -> bool:
    assert published.probe is not None
    gap = np.abs(await client.score(published.probe.ids) - np.array(published.probe.logprobs, np.float32)).max()
    return bool(gap < 1e-4) and (await client.model_info())["weight_version"] == published.release_id


def step_and_name(trainer: Trainer, make_batch: MakeBatch, release_id: str, tmp_path: Path) -> Published:
    trainer.step(make_batch(seed=len(release_id)))
    published = trainer.publish(release_id, tmp_path, on_disk=False)
    assert not published.on_disk
    assert not (tmp_path / release_id).exists()
    return published


def test_release_after_release_arrives_over_one_group(
    trainer: Trainer, transfer: TrainerTransfer, start_engine: Any, make_batch: MakeBatch, tmp_path: Path
) -> None:
    async def work() -> None:
        client = EngineClient(start_engine().url, 30)
        base = trainer.publish("base", tmp_path, on_disk=False)
        assert await holds(client, base)
        groups = set()
        for release_id in ("r1", "r2"):
            published = step_and_name(trainer, make_batch, release_id, tmp_path)
            assert not await holds(client, published)
            await put(client, transfer, published)
            assert await holds(client, published)
            groups.add(client.group)
        assert len(groups) == 1
        assert None not in groups
        await client.close()

    run(work)


def test_an_engine_killed_during_a_transfer_costs_the_trainer_nothing(
    trainer: Trainer, transfer: TrainerTransfer, start_engine: Any, make_batch: MakeBatch, tmp_path: Path
) -> None:
    victim = start_engine()

    class Killing(TrainerTransfer):
        async def send(self, engine: str, number: int) -> None:
            if number == 3:
                victim.process.kill()
                victim.process.wait()
            await super().send(engine, number)

    killing = Killing(trainer, trainer._model_path, BUCKET_BYTES)

    async def work() -> None:
        pids = trainer.worker_pids()
        published = step_and_name(trainer, make_batch, "r1", tmp_path)
        client = EngineClient(victim.url, 30)
        began = time.monotonic()
        await client.pause("retract")
        with pytest.raises(EngineError):
            await transfer_weights(client, "engine-0", 1, killing, published, True, 90)
        assert time.monotonic() - began < 80
        assert client.group is None
        await client.close()
        published = step_and_name(trainer, make_batch, "r2", tmp_path)  # the workers go on
        assert trainer.worker_pids() == pids
        client = EngineClient(start_engine().url, 30)
        await put(client, transfer, published)
        assert await holds(client, published)
        await client.close()

    run(work)


def test_an_engine_that_stands_still_is_given_up_in_bounded_time(
    trainer: Trainer,
    transfer: TrainerTransfer,
    start_engine: Any,
    make_batch: MakeBatch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transfers, "GIVE_UP_TIMEOUT_S", 0.5)
    server = start_engine()

    async def work() -> None:
        published = step_and_name(trainer, make_batch, "r1", tmp_path)
        client = EngineClient(server.url, 30)
        await put(client, transfer, published)
        server.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"engine-0 did not receive r1 in 2 s|did not answer"):
            await transfer_weights(client, "engine-0", 1, transfer, published, True, 2)
        assert time.monotonic() - began < 80
        server.process.send_signal(signal.SIGCONT)
        trainer.ping()
        published = step_and_name(trainer, make_batch, "r2", tmp_path)
        await put(client, transfer, published)
        assert await holds(client, published)
        await client.close()

    run(work)


def test_a_transfer_that_breaks_off_leaves_the_weights_before(
    trainer: Trainer, transfer: TrainerTransfer, start_engine: Any, make_batch: MakeBatch, tmp_path: Path
) -> None:
    class Breaking(TrainerTransfer):
        async def send(self, engine: str, number: int) -> None:
            if number == len(self.buckets) - 1:
                await self.listen(engine)  # the group is no more
            await super().send(engine, number)

    async def work() -> None:
        client = EngineClient(start_engine().url, 30)
        before = step_and_name(trainer, make_batch, "r1", tmp_path)
        await put(client, transfer, before)
        after = step_and_name(trainer, make_batch, "r2", tmp_path)
        breaking = Breaking(trainer, trainer._model_path, BUCKET_BYTES)
        with pytest.raises(EngineError, match=r"engine-0|Failed to update weights"):
            await put(client, breaking, after)
        assert await holds(client, before)
        await put(client, transfer, after)
        assert await holds(client, after)
        await client.close()

    run(work)


def test_a_call_of_the_trainer_that_is_cancelled_ends_before_the_next_begins(
    trainer: Trainer, transfer: TrainerTransfer, make_batch: MakeBatch
) -> None:
    async def work() -> None:
        await transfer.listen("engine-0")
        began = time.monotonic()
        waits = asyncio.create_task(transfer.join("engine-0", 2, 3))  # for an engine that never comes
        await asyncio.sleep(0.5)
        waits.cancel()
        await transfer.listen("engine-1")
        assert time.monotonic() - began >= 2.5
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert not transfer.joined("engine-0")

    run(work)
    trainer.step(make_batch())


def test_after_a_restart_of_the_workers_a_second_group_takes_the_first_ones_place(
    trainer: Trainer, transfer: TrainerTransfer, start_engine: Any, make_batch: MakeBatch, tmp_path: Path
) -> None:
    async def work() -> None:
        client = EngineClient(start_engine().url, 30)
        await put(client, transfer, step_and_name(trainer, make_batch, "r1", tmp_path))
        first = client.group
        assert transfer.joined("engine-0")
        os.kill(trainer.worker_pids()[1], signal.SIGKILL)
        with pytest.raises(WorkersLostError):
            trainer.step(make_batch())
        assert not transfer.joined("engine-0")
        trainer.restart()
        published = step_and_name(trainer, make_batch, "r2", tmp_path)
        await put(client, transfer, published)
        assert await holds(client, published)
        assert client.group not in (None, first)
        await client.close()

    run(work)
