"""Tokens a second of both engines over HTTP, beside transformers' `generate` on a fixed batch of the same size.

    python -m benchmarks.engine [--model-path DIR] [--concurrency 1 16 64] [--engines embedded sglang]

The engines run as Reef starts them, each as its own process, and are asked in turn, by that many clients at once, each
sending its next request when the last is answered. `generate` runs in this process, without HTTP, on one batch without
padding that starts and ends together: the best case for it.
Prints a table and writes `work/bench/engine.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import STARTER, table, write
from reef.config import load
from reef.engines.host import EngineHost

ENGINES = ("embedded", "sglang")
START_TIMEOUT_S = 300
PROMPT_TOKENS = 24

Model = Any
"""A transformers causal model."""

Row = dict[str, float]
"""Concurrency, and new tokens a second of each engine and of `generate`: the best of the rounds."""


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", type=Path, default=STARTER)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="the best one counts: the machine may be busy")
    parser.add_argument("--num-threads", type=int, default=2, help="of transformers; one thread is tried too")
    args = parser.parse_args()
    if "sglang" in args.engines and find_spec("sglang") is None:
        raise SystemExit(
            "SGLang is not installed here: `make sglang-cpu` installs it on a machine without a GPU, "
            "`--engines embedded` measures without it"
        )
    model = AutoModelForCausalLM.from_pretrained(str(args.model_path), dtype=torch.float32)
    rows = asyncio.run(_measure(model, args))
    _report(rows, args)


async def _measure(model: Model, args: argparse.Namespace) -> list[Row]:
    async with contextlib.AsyncExitStack() as stack:
        urls = {name: await stack.enter_async_context(_running(name, args.model_path)) for name in args.engines}
        return [await _row(model, urls, concurrency, args) for concurrency in args.concurrency]


@contextlib.asynccontextmanager
async def _running(name: str, model_path: Path) -> AsyncIterator[str]:
    """The URL of an engine, started as Reef starts it."""
    with tempfile.TemporaryDirectory(prefix="reef-bench-") as directory:
        settings = ["--reef.run-dir", directory, "--inference.backend", name, "--training.backend", "none"]
        config = load(None, settings, environ={})
        config.logs_dir.mkdir(parents=True)
        host = EngineHost(config, "engine-0")
        try:
            yield await host.start(str(model_path.absolute()), "measured", START_TIMEOUT_S)
        finally:
            await host.stop()


async def _row(model: Model, urls: dict[str, str], concurrency: int, args: argparse.Namespace) -> Row:
    """Rounds of all in turn, so that a busy machine is busy for each; an idle engine uses no processor time."""
    for url in urls.values():
        await _engine_rate(url, concurrency, 1, args.new_tokens)  # connections, caches
    best: Row = dict.fromkeys([*urls, "generate"], 0.0)
    calls = max(4, 128 // concurrency) if concurrency > 1 else 16
    for _ in range(args.rounds):
        for name, url in urls.items():
            best[name] = max(best[name], await _engine_rate(url, concurrency, calls, args.new_tokens))
        for threads in sorted({1, args.num_threads}):  # small models and busy machines are faster with one
            torch.set_num_threads(threads)
            best["generate"] = max(best["generate"], _generate_rate(model, concurrency, args.new_tokens))
    return {"concurrency": concurrency, **best}


async def _engine_rate(url: str, concurrency: int, calls_each: int, new_tokens: int) -> float:
    """New tokens a second with `concurrency` clients that each make `calls_each` calls, one after the other."""
    prompt = list(range(3, 3 + PROMPT_TOKENS))
    sampling = {"max_new_tokens": new_tokens, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}

    async def client(session: aiohttp.ClientSession) -> int:
        num_tokens = 0
        for _ in range(calls_each):
            async with session.post(f"{url}/generate", json=body) as response:
                response.raise_for_status()
                num_tokens += len((await response.json())["output_ids"])
        return num_tokens

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=concurrency)) as session:
        start = time.perf_counter()
        num_tokens = sum(await asyncio.gather(*(client(session) for _ in range(concurrency))))
        return num_tokens / (time.perf_counter() - start)


def _generate_rate(model: Model, batch: int, new_tokens: int) -> float:
    ids = torch.arange(3, 3 + PROMPT_TOKENS).repeat(batch, 1)
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": True, "top_k": 0}
    start = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
    return batch * new_tokens / (time.perf_counter() - start)


def _report(rows: Sequence[Row], args: argparse.Namespace) -> None:
    ratios = [{f"{name} / generate": row[name] / row["generate"] for name in args.engines} for row in rows]
    head = [*rows[0], *ratios[0]]
    lines = [
        [*(f"{value:,.0f}" for value in row.values()), *(f"{value:.2f}" for value in ratio.values())]
        for row, ratio in zip(rows, ratios, strict=True)
    ]
    print(f"New tokens/s\n{table(head, lines)}")
    versions = {"torch": torch.__version__, "load_average": os.getloadavg()}
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    write("engine", {"versions": versions, "options": options, "rows": list(rows)})


if __name__ == "__main__":
    main()
