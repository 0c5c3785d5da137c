"""Tokens a second of the embedded engine over HTTP, beside transformers' `generate` on a fixed batch of the same size.

    python benchmarks/engine.py [--model-path DIR] [--concurrency 1 16 32 64] [--num-threads 2]

The engine runs as its own process and is asked by that many clients at once, each sending its next request when the
last is answered. `generate` runs in this process, without HTTP, on one batch without padding that starts and ends
together: the best case for it.
Prints a table and writes `work/bench/engine.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

STARTER = Path("recipes/arithmetic/starter")
OUTPUT = Path("work/bench/engine.json")
START_TIMEOUT_S = 120
PROMPT_TOKENS = 24


Generator = Any
"""A transformers causal model."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; rates are new tokens a second, the best of the rounds."""

    concurrency: int
    engine: float
    generate: float


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", type=Path, help=f"default: {STARTER}, else a random model of that size")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 32, 64])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="the best one counts: the machine may be busy")
    parser.add_argument("--num-threads", type=int, default=2, help="of transformers; one thread is tried too")
    parser.add_argument("--engine-args", nargs=argparse.REMAINDER, default=[], help="further arguments of the engine")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = args.model_path or (STARTER if STARTER.exists() else _random_model(Path(scratch) / "model"))
        model = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
        process, url = _start(path, Path(scratch), args.engine_args)
        try:
            rows = [_measure(model, url, concurrency, args) for concurrency in args.concurrency]
        finally:
            process.terminate()
            process.wait()
    _report(rows, path, args)


def _measure(model: Generator, url: str, concurrency: int, args: argparse.Namespace) -> Row:
    """Rounds of both in turn, so that a busy machine is busy for both; an idle engine uses no processor time."""
    asyncio.run(_engine_rate(url, concurrency, 1, args.new_tokens))  # connections, caches
    engine = generate = 0.0
    for _ in range(args.rounds):
        calls = max(4, 128 // concurrency) if concurrency > 1 else 16
        engine = max(engine, asyncio.run(_engine_rate(url, concurrency, calls, args.new_tokens)))
        for threads in sorted({1, args.num_threads}):  # small models and busy machines are faster with one
            torch.set_num_threads(threads)
            generate = max(generate, _generate_rate(model, concurrency, args.new_tokens))
    return Row(concurrency, engine, generate)


def _random_model(path: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=300, hidden_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=256, tie_word_embeddings=True, max_position_embeddings=512, bos_token_id=None, eos_token_id=2,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def _start(path: Path, scratch: Path, extra: list[str]) -> tuple[subprocess.Popen[bytes], str]:
    port_file = scratch / "port"
    command = [sys.executable, "-m", "reef.engines.embedded", "--model-path", str(path), "--port", "0"]
    command += ["--port-file", str(port_file), "--parent-pid", str(os.getpid()), "--log-level", "warning"]
    process = subprocess.Popen([*command, *extra])
    deadline = time.monotonic() + START_TIMEOUT_S
    while not port_file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the engine did not start")
        time.sleep(0.05)
    return process, f"http://127.0.0.1:{port_file.read_text().strip()}"


async def _engine_rate(url: str, concurrency: int, calls_each: int, new_tokens: int) -> float:
    """New tokens a second with `concurrency` clients that each make `calls_each` calls, one after the other."""
    prompt = list(range(3, 3 + PROMPT_TOKENS))
    sampling = {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}

    async def client(session: aiohttp.ClientSession) -> None:
        for _ in range(calls_each):
            async with session.post(f"{url}/generate", json=body) as response:
                response.raise_for_status()
                await response.read()

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=concurrency)) as session:
        start = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(concurrency)))
        return concurrency * calls_each * new_tokens / (time.perf_counter() - start)


def _generate_rate(model: Generator, batch: int, new_tokens: int) -> float:
    ids = torch.arange(3, 3 + PROMPT_TOKENS).repeat(batch, 1)
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": True, "top_k": 0}
    start = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
    return batch * new_tokens / (time.perf_counter() - start)


def _report(rows: list[Row], path: Path, args: argparse.Namespace) -> None:
    print(f"{'concurrency':>11} {'engine over HTTP':>17} {'generate':>10} {'ratio':>6}   (new tokens/s)")
    for row in rows:
        print(f"{row.concurrency:>11} {row.engine:>17,.0f} {row.generate:>10,.0f} {row.engine / row.generate:>6.2f}")
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    machine = {"cores": os.cpu_count(), "torch": torch.__version__, "load_average": os.getloadavg()}
    report = {"model": str(path), "options": options, "machine": machine, "rows": [asdict(row) for row in rows]}
    OUTPUT.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {OUTPUT}")


if __name__ == "__main__":
    main()
