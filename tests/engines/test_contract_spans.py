"""Requests that live through loads, on both servers: which weights made which token, and what of that can be vouched.

The replica loads as it does in the service, into a server that is started already.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from reef.engines.client import EngineClient
from reef.engines.replica import Replica
from reef.errors import LoadFailedError
from reef.observe import Metrics
from reef.types import Generation, Probe, Published, Request, Span
from tests.engines.test_contract_client import PROMPT, TOLERANCE, assert_matches, request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the first test of each server starts it

NUM_TOKENS = 1000
BETWEEN = 60  # tokens that a test waits for before a load; others may be on their way
OTHER = [(11 * i) % 250 + 4 for i in range(30)]

Work = Callable[[Replica, EngineClient], Awaitable[Any]]
Run = Callable[..., Any]


@pytest.fixture
def release(model_dir, published, reference) -> Callable[[str, str], Published]:
    """`release("v1", "qwen3-b")`: weights with the probe that a trainer of a float32 forward would give."""

    def make(release_id: str, name: str) -> Published:
        path = model_dir(name)
        table = reference(path, OTHER)
        logprobs = tuple(table[i, token].item() for i, token in enumerate(OTHER[1:]))
        return published(release_id, path, Probe(tuple(OTHER), logprobs))

    return make


@pytest.fixture
def with_replica(server, config, release, tmp_path) -> Run:
    """`with_replica(work, pause_mode)` runs `work(replica, client)` on a replica with release v0 in rotation."""

    def run(work: Work, pause_mode: str = "retract") -> Any:
        settings = config(tmp_path, "--inference.url", server.url, "--inference.pause-mode", pause_mode)

        async def inside() -> Any:
            replica = Replica("engine-0", settings, Metrics(), None)
            try:
                await replica.start(release("v0", "qwen3-a"))
                with replica.use() as client:
                    return await work(replica, client)
            finally:
                await replica.stop()

        return asyncio.run(inside())

    return run


async def live_through(replica: Replica, client: EngineClient, asked: Request, loads: Sequence[Published]) -> Any:
    """What a streamed request ends with; each load begins BETWEEN tokens after the one before it."""
    waiting, num_tokens, due = list(loads), 0, BETWEEN
    async for chunk in client.stream(asked):
        num_tokens += len(chunk.ids)
        if waiting and num_tokens >= due:
            await replica.load(waiting.pop(0))
            due = num_tokens + BETWEEN
        if chunk.generation is not None:
            return chunk.generation
    raise AssertionError("the stream had no end")


def assert_vouched(made: Generation, weights: dict[str, Path], reference: Any) -> None:
    """Spans cover every token once, in the order of the releases, and each is its release's float32 forward."""
    assert len(made.output_ids) == len(made.logprobs) == NUM_TOKENS
    assert [span.release_id for span in made.spans] == list(weights)
    edges = [0, *(span.end for span in made.spans)]
    assert [span.start for span in made.spans] == edges[:-1]
    assert edges[-1] == NUM_TOKENS
    ids = PROMPT + made.output_ids.tolist()
    for span in made.spans:
        table = reference(weights[span.release_id], ids)
        at = range(span.start, span.end)
        expected = [table[len(PROMPT) + i - 1, made.output_ids[i]].item() for i in at]
        assert made.logprobs[list(at)].tolist() == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("names", [["qwen3-b"], ["qwen3-b", "qwen3-c"]], ids=["one load", "two loads"])
def test_each_span_of_a_request_that_lives_through_loads_is_its_releases_own(
    with_replica, release, model_dir, reference, names
) -> None:
    releases = [release(f"v{i}", name) for i, name in enumerate(names, 1)]

    async def work(replica: Replica, client: EngineClient) -> Generation:
        return await live_through(replica, client, request(max_tokens=NUM_TOKENS), releases)

    made = with_replica(work)
    weights = {"v0": model_dir("qwen3-a"), **{one.release_id: Path(one.path) for one in releases}}
    assert_vouched(made, weights, reference)
    assert made.reproducible


def test_whole_answers_and_choices_live_through_a_load_too(server, with_replica, release, model_dir, reference) -> None:
    async def work(replica: Replica, client: EngineClient) -> list[tuple[Generation, ...]]:
        asking = [asyncio.create_task(client.generate(request(max_tokens=NUM_TOKENS, n=n))) for n in (1, 2)]
        await asyncio.to_thread(server.await_in_work, lambda num: num == 3, 60, waiting=False)
        await asyncio.sleep(0.05)
        await replica.load(release("v1", "qwen3-b"))
        return [await task for task in asking]

    weights = {"v0": model_dir("qwen3-a"), "v1": model_dir("qwen3-b")}
    for choices in with_replica(work):
        for made in choices:
            assert_vouched(made, weights, reference)
            assert made.reproducible


def test_in_place_is_not_vouched_for_and_its_spans_cover_every_token_all_the_same(
    with_replica, release, model_dir, reference
) -> None:
    async def work(replica: Replica, client: EngineClient) -> tuple[Generation, Generation]:
        through = await live_through(
            replica, client, request(max_tokens=NUM_TOKENS), [release("v1", "qwen3-b"), release("v2", "qwen3-c")]
        )
        (fresh,) = await client.generate(request(OTHER[::-1]))
        return through, fresh

    through, fresh = with_replica(work, "in_place")
    assert [span.release_id for span in through.spans] == ["v0", "v1", "v2"]
    assert [span.start for span in through.spans] == [0, *(span.end for span in through.spans[:-1])]
    assert through.spans[-1].end == NUM_TOKENS
    assert not through.reproducible
    # A prompt that is new to the engine has nothing of the older weights in it.
    assert fresh.reproducible
    assert_matches(fresh, reference(model_dir("qwen3-c"), OTHER[::-1] + fresh.output_ids.tolist()), OTHER[::-1])


def test_abort_ends_what_runs_with_what_it_has(with_replica, release, model_dir, reference) -> None:
    async def work(replica: Replica, client: EngineClient) -> tuple[Generation, str | None]:
        return await live_through(replica, client, request(max_tokens=1900), [release("v1", "qwen3-b")]), replica.served

    made, served = with_replica(work, "abort")
    assert served == "v1"
    assert made.finish_reason == "abort"
    assert made.spans == (Span(0, len(made.output_ids), "v0"),)
    assert BETWEEN <= len(made.output_ids) < 1900
    assert_matches(made, reference(model_dir("qwen3-a"), PROMPT + made.output_ids.tolist()))


def test_until_a_stream_ends_its_spans_name_no_weights_that_did_not_make_the_tokens(with_replica, release) -> None:
    """What is kept of a stream whose client leaves."""
    seen: list[tuple[Span, ...]] = []

    async def work(replica: Replica, client: EngineClient) -> Generation:
        waiting = [release("v1", "qwen3-b")]
        async for chunk in client.stream(request(max_tokens=NUM_TOKENS)):
            seen.append(chunk.spans)
            if waiting and len(seen) >= BETWEEN:
                await replica.load(waiting.pop())
            if chunk.generation is not None:
                return chunk.generation
        raise AssertionError("the stream had no end")

    made = with_replica(work)
    assert [span.release_id for span in made.spans] == ["v0", "v1"]
    for spans in seen:
        assert spans
        for known, true in zip(spans, made.spans, strict=False):
            assert (known.start, known.release_id) == (true.start, true.release_id)
            assert known.end <= true.end


def test_a_release_that_lacks_a_tensor_is_not_served(with_replica, release, tmp_path) -> None:
    """SGLang calls such a load a success: it keeps what the tensor was before. The probe finds it out."""
    good = release("v1", "qwen3-b")
    damaged = Path(shutil.copytree(good.path, tmp_path / "damaged"))
    tensors = load_file(damaged / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    bad = Published("v1", str(damaged), good.content_id, good.size_bytes, good.probe)

    async def work(replica: Replica, client: EngineClient) -> Any:
        with pytest.raises(LoadFailedError):
            await replica.load(bad)
        failed = replica.ready, replica.state
        await replica.load(release("v2", "qwen3-a"))
        return failed, replica.ready, replica.served

    assert with_replica(work) == ((False, "failed"), True, "v2")
