"""The generation thread: what happens when it cannot go on."""

from __future__ import annotations

import asyncio
import pathlib

import pytest
import torch

from reef.engines.embedded.architecture import read_architecture
from reef.engines.embedded.engine import Engine, Limits
from reef.engines.embedded.errors import EngineStoppedError
from reef.engines.embedded.model import Model
from reef.engines.embedded.weights import load_weights

LIMITS = Limits(context_length=64, max_running_requests=2, max_queued_requests=4, max_total_tokens=256)


@pytest.fixture
def engine(model_dir) -> Engine:
    path: pathlib.Path = model_dir("qwen3-a")
    arch = read_architecture(path)
    return Engine(Model(arch, load_weights(path, arch, torch.float32)), torch.float32, LIMITS, "v0", path, 1)


def test_a_thread_that_dies_says_so_and_takes_nothing_more(engine, monkeypatch, caplog) -> None:
    def fail() -> bool:
        raise RuntimeError("corrupt queue")

    async def scenario() -> None:
        ended = asyncio.Event()
        engine.start(asyncio.get_running_loop(), ended.set)
        assert engine.alive
        monkeypatch.setattr(engine._scheduler, "step", fail)
        await engine.pause("retract")
        await asyncio.wait_for(ended.wait(), 60)
        assert engine.stop(60)
        assert not engine.alive
        with pytest.raises(EngineStoppedError):
            await engine.resume()

    asyncio.run(scenario())
    assert str(engine.failure) == "corrupt queue"
    assert "corrupt queue" in caplog.text


def test_commands_run_on_the_thread_until_it_is_stopped(engine, model_dir) -> None:
    async def scenario() -> None:
        engine.start(asyncio.get_running_loop(), lambda: None)
        await engine.rename("v1")
        assert engine.version == "v1"
        loaded = await engine.load(model_dir("qwen3-b"), "v2", True)
        assert (loaded.success, engine.version, engine.model_path) == (True, "v2", str(model_dir("qwen3-b")))
        assert engine.stop(60)
        assert engine.failure is None

    asyncio.run(scenario())
