"""The whole loop at 64 samples a release, phase by phase, and what the service is like meanwhile.

    sample -> grade -> report -> reserve -> step -> publish -> commit -> load (pause, load, verify)

The client sends one batch, waits for the release that it makes, and sends the next. A prober asks /healthz all the
time: its latencies during steps and loads stand beside those of the idle service in the same run.
"""

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from reef_harness import Client, FinalGrader

from benchmarks.common import Running, in_thread, service, table, write
from recipes.arithmetic.task import Problem, train_stream

NUM_RELEASES = 12
WARM_UP = 2  # releases that are not counted
GROUPS, GROUP_SIZE = 8, 8
IDLE_S = 5.0
PROBE_EVERY_S = 0.01
FLAGS = ("--recipe.config.filter-tied", "false")  # every batch makes its release, so each phase is one batch's


@dataclass(slots=True)
class Seconds:
    """By phase, one value a release."""

    by_phase: dict[str, list[float]] = field(default_factory=dict)

    def add(self, phase: str, value: float) -> None:
        self.by_phase.setdefault(phase, []).append(value)


async def one_release(client: Client, problems: list[Problem], seconds: Seconds) -> None:
    """Sample, grade and report a batch, and wait until its release answers."""
    before = (await client.status())["scenario"]["served"]
    started = time.perf_counter()
    answers = await asyncio.gather(
        *(
            client.chat([{"role": "user", "content": problem.text}], n=GROUP_SIZE, temperature=1.0, max_tokens=64)
            for problem in problems
        )
    )
    sampled = time.perf_counter()
    grader = FinalGrader()
    grades = [
        (choice, grader.grade(choice.text, str(problem.answer), choice.finish_reason), f"{before}/{index}")
        for index, (problem, answer) in enumerate(zip(problems, answers, strict=True))
        for choice in answer.choices
    ]
    graded = time.perf_counter()
    await asyncio.gather(
        *(client.report(choice.receipt, verdict.score, group=group) for choice, verdict, group in grades)
    )
    reported = time.perf_counter()
    while (status := await client.status())["scenario"]["served"] == before:
        await asyncio.sleep(0.005)
    served = time.perf_counter()
    for phase, value in (
        ("sample", sampled - started),
        ("grade", graded - sampled),
        ("report", reported - graded),
        ("train and load", served - reported),
        ("whole", served - started),
    ):
        seconds.add(phase, value)
    load = status["engines"][0]["last_load"]
    for phase in ("pause", "transfer", "verify"):
        seconds.add(phase, load[f"{phase}_s"])
    seconds.add("gate closed", load["total_s"])


async def probe(url: str, latencies: list[float], is_over: Callable[[], bool]) -> None:
    """Ask /healthz until it is over."""
    async with httpx.AsyncClient(base_url=url) as http:
        while not is_over():
            started = time.perf_counter()
            (await http.get("/healthz")).raise_for_status()
            latencies.append((time.perf_counter() - started) * 1000)
            await asyncio.sleep(PROBE_EVERY_S)


async def phase_sums(url: str) -> dict[str, float]:
    """Seconds that the service spent so far, by phase of a step."""
    async with httpx.AsyncClient(base_url=url) as http:
        text = (await http.get("/metrics")).text
    return {
        sample.labels["phase"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "reef_step_seconds_sum"
    }


def processes(pid: int) -> Iterator[tuple[str, psutil.Process]]:
    """The service's processes, each with a name for people."""
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        command = " ".join(process.cmdline())
        name = "reef serve" if process.pid == pid else process.name()
        if "reef.engines.embedded" in command:
            name = "embedded engine"
        elif "WorkerActor" in command:
            name = "Megatron worker"
        elif "ray" in command:
            name = "Ray's own processes"
        yield name, process


def memory(pid: int) -> dict[str, float]:
    """Resident MiB of each process of the service, by name; shared pages count in each."""
    found: dict[str, float] = {}
    for name, process in processes(pid):
        found[name] = found.get(name, 0.0) + process.memory_info().rss / 2**20
    return found


async def measure(reef: Running) -> dict[str, Any]:
    """The idle service, then the loop."""
    idle: list[float] = []
    busy: list[float] = []
    until = time.perf_counter() + IDLE_S
    await probe(reef.url, idle, lambda: time.perf_counter() > until)
    seconds = Seconds()
    stream = train_stream(4, seed=0)
    over = False
    async with Client(reef.url, scenario="arithmetic") as client:
        for _ in range(WARM_UP):
            await one_release(client, [next(stream) for _ in range(GROUPS)], Seconds())
        sums = await phase_sums(reef.url)
        prober = asyncio.create_task(probe(reef.url, busy, lambda: over))
        for _ in range(NUM_RELEASES):
            await one_release(client, [next(stream) for _ in range(GROUPS)], seconds)
        over = True
        await prober
        chain = (await client.releases())[:NUM_RELEASES]
    after = await phase_sums(reef.url)
    for phase, total in after.items():
        seconds.add(phase, (total - sums[phase]) / NUM_RELEASES)
    for phase in ("forward_backward", "optimizer"):
        seconds.add(f"{phase} in the worker", statistics.mean(r.metrics[f"seconds/{phase}"] for r in chain))
    return {
        "releases": NUM_RELEASES,
        "samples_per_release": GROUPS * GROUP_SIZE,
        "seconds": {phase: round(statistics.median(values), 4) for phase, values in seconds.by_phase.items()},
        "healthz_idle_p99_ms": round(statistics.quantiles(idle, n=100)[98], 2),
        "healthz_busy_p99_ms": round(statistics.quantiles(busy, n=100)[98], 2),
        "healthz_busy_max_ms": round(max(busy), 2),
        "rss_mib": {name: round(size) for name, size in sorted(memory(reef.pid).items())},
        "ready_in_s": round(reef.ready_in_s, 1),
    }


async def run() -> dict[str, Any]:
    async with in_thread(service(FLAGS)) as reef:
        return await measure(reef)


def main() -> None:
    found = asyncio.run(run())
    print(f"Whole loop: median seconds of {found['releases']} releases of {found['samples_per_release']} samples")
    print(table(["phase", "seconds"], [[phase, f"{value:.4f}"] for phase, value in found["seconds"].items()]))
    print("/healthz p99: ", f"{found['healthz_idle_p99_ms']} ms idle, {found['healthz_busy_p99_ms']} ms in the loop")
    print(table(["process", "resident MiB"], [[name, str(size)] for name, size in found["rss_mib"].items()]))
    write("loop", found)


if __name__ == "__main__":
    main()
