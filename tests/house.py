"""One service's loop without its processes: a real ledger and real directories, a fake trainer and fake engines."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reef.config import load
from reef.dispatcher import Dispatcher
from reef.errors import LoadFailedError
from reef.ledger import batches, receipts, releases, reports, scenarios
from reef.ledger.ledger import Ledger
from reef.observe import Metrics
from reef.storage import Storage
from reef.types import (
    Batch,
    FinishReason,
    Generation,
    Operation,
    Probe,
    Published,
    Release,
    Report,
    Request,
    Sampling,
    Span,
    StepResult,
)

SCENARIO = "house"
SETTINGS = ("--recipe.config.group-size", "2", "--recipe.config.batch-size", "2", "--training.checkpoint-every", "2")


class Crash(BaseException):
    """The process ends here."""


class Faults:
    """What goes wrong where: an exception is raised each time its point is passed, as often as it is listed."""

    def __init__(self) -> None:
        self.planned: dict[str, list[BaseException]] = {}
        self.passed: list[str] = []

    def at(self, point: str, *errors: BaseException) -> None:
        self.planned[point] = list(errors)

    def point(self, name: str) -> None:
        self.passed.append(name)
        if self.planned.get(name):
            raise self.planned[name].pop(0)


class FakeTrainer:
    """Its weights are the numbers of the batches it has trained on, in their order."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.state: list[int] = []
        self.running = False
        self.num_steps = 0
        self.saving: tuple[Path, list[int]] | None = None  # where, and what was copied
        self.looks = 0
        self.looks_a_save_takes = 1  # `save_done` says no so often

    def start(self) -> None:
        self.running = True

    def restart(self) -> None:
        self.state = []
        self.saving = None
        self.faults.point("restart")
        self.running = True

    def ping(self) -> None:
        self.faults.point("ping")

    def reset(self) -> None:
        self.state = []
        self.faults.point("reset")

    def load_weights(self, directory: Path) -> None:
        self.state = json.loads((directory / "state").read_text())

    def stop(self) -> None:
        self.running = False

    def probe(self) -> Probe:
        return Probe((1, 2), (-0.5,))

    def step(self, batch: Batch) -> StepResult:
        self.faults.point("step")
        self.num_steps += 1
        self.state.append(batch.number)
        self.faults.point("stepped")
        return StepResult(len(self.state), {"num_samples": float(len(batch.samples))}, {})

    def content(self) -> str:
        return f"sha256:{self.state}"

    def publish(self, release_id: str, directory: Path, on_disk: bool = True) -> Published:
        self.faults.point("publish")
        path = directory / release_id
        if not on_disk:
            self.faults.point("published")
            return Published(release_id, str(path), self.content(), 0, self.probe(), on_disk=False)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        (path / "state").write_text(json.dumps(self.state))
        published = Published(release_id, str(path), self.content(), 0, self.probe())
        values = {"release_id": release_id, "content_id": published.content_id, "size_bytes": 0, "files": {}}
        (path / "manifest.json").write_text(json.dumps({**values, "probe": None}))
        self.faults.point("published")
        return published

    def save_begin(self, directory: Path) -> None:
        assert self.saving is None
        self.faults.point("copy")
        self.saving = (directory, list(self.state))
        self.looks = 0

    def save_done(self) -> bool:
        self.faults.point("save_done")
        self.looks += 1
        return self.looks > self.looks_a_save_takes

    def save_finish(self) -> None:
        assert self.saving is not None
        directory, state = self.saving
        self.faults.point("save")
        directory.mkdir(exist_ok=True)
        (directory / "state").write_text(json.dumps(state))
        (directory / "COMPLETE").touch()
        self.saving = None
        self.faults.point("saved")

    def restore(self, directory: Path) -> int:
        self.faults.point("restore")
        if not (directory / "COMPLETE").is_file():
            raise LoadFailedError(f"{directory} is not complete")
        self.state = json.loads((directory / "state").read_text())
        return len(self.state)


class FakeEngines:
    """Serves what it was told to load last."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.served: str | None = None
        self.candidate: str | None = None
        self.lent: str | None = None
        self.loads: list[str] = []
        self.also_called: list[str] = []
        self.lack_files = False
        self.closed_s = 0.0
        self.load_takes_s = 0.0
        self.need_files: Callable[[], None] = lambda: None

    async def load(self, published: Published, transfer: Any = None) -> None:
        assert published.on_disk or transfer is not None
        self.loads.append(published.release_id)
        self.faults.point("load" if transfer is None else "transfer")
        self.closed_s += self.load_takes_s
        await asyncio.sleep(self.load_takes_s)
        self.served = published.release_id
        self.faults.point("loaded")

    async def start_candidate(self, published: Published, share: float) -> None:
        self.faults.point("start_candidate")
        self.candidate, self.share = published.release_id, share

    def provide(self, published: Published) -> None:
        assert published.on_disk
        self.lack_files = False

    def call_also(self, release_id: str) -> None:
        self.also_called.append(release_id)

    def end_trial(self) -> None:
        self.candidate = None


class FaultyLedger:
    """The real ledger; a write passes the point of its name before it begins."""

    def __init__(self, ledger: Ledger, faults: Faults) -> None:
        self.ledger = ledger
        self.faults = faults
        self.run_id = ledger.run_id
        self.shared = False

    async def write_owned(self, op: Callable[..., Any], *args: Any) -> Any:
        return await self.write(op, *args)

    async def write(self, op: Callable[..., Any], *args: Any) -> Any:
        self.faults.point(op.__name__)
        done = await self.ledger.write(op, *args)
        if op is batches.commit:
            self.faults.point("committed")
        return done

    async def read(self, op: Callable[..., Any], *args: Any) -> Any:
        self.faults.point("read")
        return await self.ledger.read(op, *args)


def read_manifest_of(storage: Storage) -> Callable[[Release], None]:
    """Fake weights have no bytes to check, but they are there or not."""
    return lambda release: storage.published(release) and None


class House:
    """One owner of a run directory after the other."""

    def __init__(self, directory: Path, *flags: str, settings: tuple[str, ...] = SETTINGS) -> None:
        self.config = load(None, ["--reef.run-dir", str(directory), *settings, *flags], {})
        self.names = (f"answer-{number}" for number in itertools.count(1))
        self.trainer_class = FakeTrainer
        self.base = directory / "base"
        self.base.mkdir(parents=True)

    async def open(self) -> None:
        """What `reef serve` does before the loop runs."""
        self.faults = Faults()
        self.ledger = Ledger.open(self.config.ledger_url)
        self.metrics = Metrics()
        base = Published(f"{self.ledger.run_id}-000000", str(self.base), "sha256:[]", 0, None)
        faulty: Any = FaultyLedger(self.ledger, self.faults)
        self.storage = Storage(self.config, faulty, base)
        self.storage.check_bytes = read_manifest_of(self.storage)  # type: ignore[method-assign]
        if await self.ledger.read(scenarios.find, SCENARIO) is None:
            await self.ledger.write(scenarios.create, SCENARIO, "grpo", 1.0)
            await self.ledger.write(releases.append, self.storage.base_release(SCENARIO))
        await self.storage.clean(SCENARIO)
        self.trainer, self.engines = self.trainer_class(self.faults), FakeEngines(self.faults)
        served = await self.ledger.read(releases.served, SCENARIO)
        self.engines.served = served.id
        parts: list[Any] = [faulty, self.engines, self.trainer, self.storage, self.metrics]
        self.dispatcher = Dispatcher(self.config, *parts)
        await self.dispatcher.start()
        await self.dispatcher.recover()

    def run(self) -> None:
        self.loop = asyncio.create_task(self.dispatcher.run())

    async def stop(self) -> None:
        """Ctrl-C."""
        self.dispatcher.stop()
        await self.loop
        await self.dispatcher.close()
        self.ledger.close()

    async def crash(self) -> None:
        """The process has ended inside `run`; nothing of it goes on."""
        with pytest.raises(Crash):
            await self.loop
        self.ledger.close()

    async def grade(
        self, scores: tuple[float, ...] = (0.0, 1.0), group: str | None = None, release: str | None = None
    ) -> list[str]:
        """One group of graded answers from `release`, else the one that is served; the names of the reports."""
        names = [next(self.names) for _ in scores]
        group = group or names[0]
        for score, name in zip(scores, names, strict=True):
            request = Request(
                id=f"req-{name}",
                scenario=SCENARIO,
                api="completions",
                prompt_ids=np.array([1, 2], np.int32),
                sampling=Sampling(max_tokens=4),
                n=1,
                body=b"{}",
                created_at=0.0,
            )
            spans = (Span(0, 1, release or str(self.engines.served)),)
            ids, logprobs = np.array([3], np.int32), np.array([-0.5], np.float32)
            generation = Generation(ids, logprobs, FinishReason.STOP, spans)
            receipt = receipts.make(request, 0, generation, "fake", name, 0.0)
            await self.ledger.write(receipts.record, request, [receipt])
            body = {"references": [name], "score": score, "group": group}
            report = Report(name, SCENARIO, (name,), body, score, group=group)
            await self.ledger.write(reports.accept, report, True, time.time())
        self.dispatcher.notify()
        return names

    async def grade_and_wait(self, scores: tuple[float, ...] = (0.0, 1.0), group: str | None = None) -> list[str]:
        names = await self.grade(scores, group)
        await self.waits()
        return names

    async def chain(self) -> list[Release]:
        """Oldest first."""
        found: list[Release] = await self.ledger.read(releases.chain, SCENARIO)
        return found[::-1]

    async def state(self, name: str) -> tuple[str, str | None]:
        view = await self.ledger.read(reports.view, name)
        return view["state"], view["reason"]

    async def until(self, true: Callable[[], Any]) -> None:
        async with asyncio.timeout(60):
            while not true():
                assert not self.loop.done(), self.loop.exception()
                await asyncio.sleep(0.005)

    async def waits(self) -> None:
        """Until the loop has nothing to do."""
        await self.until(lambda: self.dispatcher.progress.phase == "waiting" and not self.dispatcher._wake.is_set())

    async def trained_once(self, names: list[str]) -> None:
        """Every report in one committed batch, an unbroken chain, and trainer and engine at its head."""
        chain = await self.chain()
        assert [release.parent for release in chain] == [None, *(release.id for release in chain[:-1])]
        assert [release.number for release in chain] == list(range(len(chain)))
        members = []
        for release in [link for link in chain if link.operation is Operation.TRAIN]:
            lineage = await self.ledger.read(releases.lineage, SCENARIO, release.id)
            members += [sample["report_id"] for sample in lineage["samples"]]
        assert sorted(members) == sorted(names)
        assert {await self.state(name) for name in names} == {("trained", None)}
        assert chain[-1].content_id == f"sha256:{self.trainer.state}"
        assert self.engines.served == chain[-1].id
        assert chain[-1].verified_at is not None
