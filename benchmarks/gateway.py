"""The gateway beside a stub engine that answers at once: requests/s and added latency, with durable receipts.

    load -> stub engine                                  the reference for what a request takes
    load -> skeleton -> stub engine                      the reference for what a gateway takes (benchmarks/skeleton.py)
    load -> reef (record only) -> stub engine

Four processes share the machine. Rounds are interleaved, so that noise hits all three alike; requests/s are the median
over rounds, latencies come from the requests of all rounds, and the share of the skeleton from pairs of one round.
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from benchmarks.common import ROOT, STARTER, service, table, write
from benchmarks.load import NUMBER
from benchmarks.stub import NUM_TOKENS

CLIENTS = (1, 32, 128)
NAMES = ("stub", "skeleton", "reef")
ROUNDS = 7
SECONDS = 1.5  # of each measurement
GENERATE = {
    "input_ids": [5] * 24,
    "sampling_params": {"max_new_tokens": NUM_TOKENS, "temperature": 1.0},
    "return_logprob": True,
}
CHAT = {
    "messages": [{"role": "user", "content": f"{NUMBER.decode()}: start at 9. Subtract 4. Add 3. Add 5."}],
    "max_tokens": NUM_TOKENS,
}


@dataclass(slots=True)
class Measured:
    """One target at one number of clients; a number for each round, latencies of all of them in seconds."""

    requests_per_s: list[float] = field(default_factory=list)
    latencies: "array[float]" = field(default_factory=lambda: array("d"))

    @property
    def median_requests_per_s(self) -> float:
        return statistics.median(self.requests_per_s)

    def percentile_ms(self, percent: int) -> float:
        return statistics.quantiles(self.latencies, n=100)[percent - 1] * 1000


Found = dict[str, dict[int, Measured]]


@contextlib.contextmanager
def server(module: str, *arguments: str) -> Iterator[str]:
    """A server of this directory as a process of its own; its URL."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        if not url:
            raise RuntimeError(f"{module} ended with status {process.wait()}")
        yield url
    finally:
        process.terminate()
        process.wait()


def load(url: str, body: Any, num_clients: int, seconds: float) -> "array[float]":
    """Latencies that a load generator of its own process sees, in seconds."""
    command = [sys.executable, "-m", "benchmarks.load", url, str(num_clients), str(seconds)]
    answer = subprocess.run(command, cwd=ROOT, input=orjson.dumps(body), stdout=subprocess.PIPE, check=True)
    latencies = array("d")
    latencies.frombytes(answer.stdout)
    return latencies


def measure(clients: Sequence[int], rounds: int, seconds: float) -> Found:
    """All three, one after the other in each round."""
    found: Found = {name: {num_clients: Measured() for num_clients in clients} for name in NAMES}
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reef-bench-")))
        engine = stack.enter_context(server("stub"))
        skeleton = stack.enter_context(server("skeleton", engine, str(directory / "skeleton.sqlite")))
        reef = stack.enter_context(service(["--training.backend", "none", "--inference.url", engine]))
        targets = {
            "stub": (f"{engine}/generate", GENERATE),
            "skeleton": (f"{skeleton}/v1/chat/completions", CHAT),
            "reef": (f"{reef.url}/v1/chat/completions", CHAT),
        }
        for num_clients in clients:
            for _ in range(rounds):
                for name, (url, body) in targets.items():
                    latencies = load(url, body, num_clients, seconds)
                    found[name][num_clients].requests_per_s.append(len(latencies) / seconds)
                    found[name][num_clients].latencies.extend(latencies)
    return found


def share(found: Found, num_clients: int) -> float:
    """Reef's requests/s as a share of the skeleton's: the median over rounds."""
    reef, skeleton = (found[name][num_clients].requests_per_s for name in ("reef", "skeleton"))
    return statistics.median(mine / other for mine, other in zip(reef, skeleton, strict=True))


def added_ms(found: Found, name: str, num_clients: int, percent: int) -> float:
    """What a gateway adds to the stub's latency at a percentile."""
    return found[name][num_clients].percentile_ms(percent) - found["stub"][num_clients].percentile_ms(percent)


def summary_of(found: Found, clients: Sequence[int]) -> dict[str, Any]:
    """What is kept: Reef's figures under plain names, the references' under their own."""
    summary: dict[str, Any] = {}
    for name in NAMES:
        prefix = "" if name == "reef" else f"{name}_"
        for num_clients in clients:
            measured = found[name][num_clients]
            summary[f"{prefix}rps_{num_clients}"] = round(measured.median_requests_per_s, 1)
            if name == "stub":
                summary[f"stub_p50_ms_{num_clients}"] = round(measured.percentile_ms(50), 3)
                summary[f"stub_p99_ms_{num_clients}"] = round(measured.percentile_ms(99), 3)
                continue
            for percent in (50, 99):
                added = added_ms(found, name, num_clients, percent)
                summary[f"{prefix}added_p{percent}_ms_{num_clients}"] = round(added, 3)
    for num_clients in clients:
        summary[f"share_{num_clients}"] = round(share(found, num_clients), 3)
    return summary


def report(summary: dict[str, Any], clients: Sequence[int]) -> str:
    """The summary as a table."""
    head = ["clients", "stub req/s", "skeleton req/s", "reef req/s", "share of skeleton"]
    head += ["skeleton added p50 ms", "reef added p50 ms", "reef added p99 ms"]
    names = ["stub_rps", "skeleton_rps", "rps", "share", "skeleton_added_p50_ms", "added_p50_ms", "added_p99_ms"]
    return table(head, [[str(n), *(f"{summary[f'{name}_{n}']:g}" for name in names)] for n in clients])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each measurement")
    args = parser.parse_args()
    summary = summary_of(measure(args.clients, args.rounds, args.seconds), args.clients)
    print("Gateway: every answer has a durable receipt, so requests/s are receipts/s")
    print(report(summary, args.clients))
    if tuple(args.clients) == CLIENTS:
        settings = {"rounds": args.rounds, "seconds_per_round": args.seconds, "model": STARTER.name}
        write("gateway", {**settings, **summary})


if __name__ == "__main__":
    main()
