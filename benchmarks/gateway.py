"""The gateway beside a stub engine that answers at once: requests/s, added latency, durable receipts/s.

    load generator -> stub engine                      the reference
    load generator -> reef (record only) -> stub engine

The stub speaks SGLang's native protocol and answers 32 fixed tokens; both runs send the same number of requests.
"""

import asyncio
import statistics
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from benchmarks.common import STARTER, in_thread, service, table, write

CONCURRENCY = (1, 32, 128)
SECONDS = 4.0  # per measurement
NUM_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Measured:
    requests_per_s: float
    p50_ms: float
    p99_ms: float


def stub_app() -> web.Application:
    """An engine without a model."""
    ids = [5] * NUM_TOKENS
    answer = orjson.dumps(
        {
            "text": "",
            "output_ids": ids,
            "meta_info": {
                "id": "stub",
                "finish_reason": {"type": "length", "length": NUM_TOKENS},
                "weight_version": "stub",
                "output_token_logprobs": [[-0.5, token, None] for token in ids],
            },
        }
    )
    version = ["default"]

    async def generate(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=answer, content_type="application/json")

    async def load(request: web.Request) -> web.Response:
        version[0] = orjson.loads(await request.read())["weight_version"]
        return web.json_response({"success": True, "message": ""})

    async def info(_request: web.Request) -> web.Response:
        return web.json_response({"weight_version": version[0], "context_length": 512, "version": "stub"})

    async def health(_request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_post("/update_weights_from_disk", load)
    app.router.add_get("/model_info", info)
    app.router.add_get("/server_info", info)
    app.router.add_get("/health", health)
    return app


async def load_test(url: str, body: dict[str, Any], concurrency: int) -> Measured:
    """Closed loop: `concurrency` clients, each sends its next request when the last was answered."""
    payload = orjson.dumps(body)
    latencies: list[float] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:

        async def client(until: float) -> None:
            while (started := time.perf_counter()) < until:
                async with session.post(url, data=payload, headers={"content-type": "application/json"}) as response:
                    await response.read()
                    if response.status != 200:
                        raise RuntimeError(f"{url} answered {response.status}")
                latencies.append(time.perf_counter() - started)

        await asyncio.gather(*(client(time.perf_counter() + 0.5) for _ in range(concurrency)))  # warm up
        latencies.clear()
        started = time.perf_counter()
        await asyncio.gather(*(client(started + SECONDS) for _ in range(concurrency)))
        seconds = time.perf_counter() - started
    cuts = statistics.quantiles(latencies, n=100)
    return Measured(len(latencies) / seconds, cuts[49] * 1000, cuts[98] * 1000)


async def measure() -> dict[str, dict[int, Measured]]:
    """Both, one after the other, at each concurrency."""
    runner = web.AppRunner(stub_app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    stub_url = f"http://127.0.0.1:{port}"
    generate = {
        "input_ids": [5] * 24,
        "sampling_params": {"max_new_tokens": NUM_TOKENS, "temperature": 1.0},
        "return_logprob": True,
    }
    chat = {
        "messages": [{"role": "user", "content": "Start at 9. Subtract 4. Add 3. Add 5. Subtract 8."}],
        "max_tokens": NUM_TOKENS,
    }
    found: dict[str, dict[int, Measured]] = {"stub": {}, "reef": {}}
    flags = ["--training.backend", "none", "--inference.url", stub_url]
    try:
        async with in_thread(service(flags)) as reef:
            for concurrency in CONCURRENCY:
                found["stub"][concurrency] = await load_test(f"{stub_url}/generate", generate, concurrency)
                found["reef"][concurrency] = await load_test(f"{reef.url}/v1/chat/completions", chat, concurrency)
    finally:
        await runner.cleanup()
    return found


def main() -> None:
    found = asyncio.run(measure())
    rows = []
    summary: dict[str, Any] = {"seconds_per_point": SECONDS, "model": STARTER.name}
    for concurrency in CONCURRENCY:
        stub, reef = found["stub"][concurrency], found["reef"][concurrency]
        added_p50, added_p99 = reef.p50_ms - stub.p50_ms, reef.p99_ms - stub.p99_ms
        rows.append(
            [
                str(concurrency),
                f"{stub.requests_per_s:.0f}",
                f"{reef.requests_per_s:.0f}",
                f"{reef.requests_per_s / stub.requests_per_s:.2f}",
                f"{added_p50:.2f}",
                f"{added_p99:.2f}",
            ]
        )
        summary[f"rps_{concurrency}"] = round(reef.requests_per_s, 1)
        summary[f"stub_rps_{concurrency}"] = round(stub.requests_per_s, 1)
        summary[f"added_p50_ms_{concurrency}"] = round(added_p50, 3)
        summary[f"added_p99_ms_{concurrency}"] = round(added_p99, 3)
    print("Gateway: every answer has a durable receipt, so requests/s are receipts/s")
    print(table(["clients", "stub req/s", "reef req/s", "share", "added p50 ms", "added p99 ms"], rows))
    write("gateway", summary)


if __name__ == "__main__":
    main()
