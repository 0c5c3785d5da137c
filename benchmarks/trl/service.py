"""Reef's side: `reef serve -c serve.yaml`, whole, driven by the harness as the demo does, without a stop to measure.

serve -> GroupsDriver until N releases -> the releases' times from the chain, their weights from the disk
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from reef_harness import Client, FinalGrader, GroupsDriver, Progress, Release

from benchmarks.common import OPEN, ROOT
from benchmarks.loop import phase_sums, processes
from benchmarks.trl.curve import Snapshot
from recipes.arithmetic.demo import SCENARIO, STEPS, items
from recipes.arithmetic.service import running_service
from recipes.arithmetic.task import train_stream

NUM_CONNECTIONS = 16  # httpx looks through all of them for every request
# TRL's way: every batch is eight groups, tied or not, and one formula for the advantages.
AS_TRL = (
    *("--recipe.config.filter-tied", "false"),
    *("--recipe.config.std", "unbiased", "--recipe.config.std-eps", "1e-4"),
)


@dataclass(frozen=True, slots=True)
class Run:
    """What the service did. `phases` are seconds a release, `cpu_s` processor seconds of the whole run by process."""

    steps: int
    seconds: float
    snapshots: tuple[Snapshot, ...]
    phases: dict[str, float]
    cpu_s: dict[str, float]


def run(model: Path, out: Path, seed: int, releases: int, every: int, ahead: int, flags: Sequence[str]) -> Run:
    """Serve, train, end; the weights of every few releases stay below `out`."""
    keep = ("--storage.keep", str(releases + ahead + 8), "--inference.model-path", str(model))
    run_dir = out / "run"
    with running_service(ROOT / "serve.yaml", run_dir, [*OPEN, *AS_TRL, *keep, *flags], say=lambda _: None) as url:
        return asyncio.run(_drive(url, model, run_dir, seed, releases, every, ahead))


async def _drive(url: str, model: Path, run_dir: Path, seed: int, releases: int, every: int, ahead: int) -> Run:
    counts: list[tuple[float, int]] = []  # time, rollouts by then

    def count(progress: Progress) -> None:
        counts.append((time.time(), progress.rollouts))

    service = json.loads((run_dir / "service.json").read_text())["pid"]
    async with Client(url, scenario=SCENARIO, max_connections=NUM_CONNECTIONS) as client:
        await client.create_scenario(SCENARIO)
        problems = items(train_stream(STEPS, seed))
        cpu, sums, began = cpu_seconds(service), await phase_sums(url), time.time()
        with GroupsDriver(client, problems, FinalGrader(), max_ahead=ahead, progress=count) as driver:
            await driver.run(releases=releases)
        used = {name: seconds - cpu.get(name, 0.0) for name, seconds in cpu_seconds(service).items()}
        after = await phase_sums(url)
        chain = [release for release in reversed(await client.releases()) if release.operation == "train"][:releases]
    snapshots = tuple(
        Snapshot(
            release.step,
            float(release.created_at) - began,
            max((rollouts for at, rollouts in counts if at <= float(release.created_at)), default=0),
            run_dir / "releases" / release.id,
        )
        for release in chain
        if release.step % every == 0
    )
    phases = {name: (after[name] - sums.get(name, 0.0)) / len(chain) for name in after} | _worker(chain)
    return Run(len(chain), float(chain[-1].created_at) - began, snapshots, phases, used)


def _worker(chain: Sequence[Release]) -> dict[str, float]:
    """Mean seconds of a release by phase, as its row has them."""
    names = {name for release in chain for name in release.metrics if name.startswith("seconds/")}
    return {name: fmean(release.metrics.get(name, 0.0) for release in chain) for name in sorted(names)}


def cpu_seconds(pid: int) -> dict[str, float]:
    """Processor seconds so far: of the service's processes by name, and of this one, the client."""
    found = {"client": time.process_time()}
    for name, process in processes(pid):
        times = process.cpu_times()
        found[name] = found.get(name, 0.0) + times.user + times.system
    return found
