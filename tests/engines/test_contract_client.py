"""Reef's engine client against both servers: what it asks of them, and that what it says of them is so."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from reef.engines.answers import Chunk
from reef.engines.client import EngineClient
from reef.errors import BadRequestError, EngineError
from reef.types import FinishReason, Generation, Request, Sampling, Span

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the first test of each server starts it

PROMPT = [(7 * i) % 250 + 4 for i in range(40)]
TOLERANCE = 1e-4
LONG = 1900  # tokens: more than a server makes of 16 sequences while a test waits
PATIENCE_S = 60.0
numbers = itertools.count()


def request(
    ids: list[int] = PROMPT, n: int = 1, top_logprobs: int = 0, max_tokens: int = 12, **sampling: Any
) -> Request:
    return Request(
        id=f"req_{next(numbers):06}",
        scenario="s",
        api="completions",
        prompt_ids=np.array(ids, dtype=np.int32),
        sampling=Sampling(max_tokens=max_tokens, **{"ignore_eos": True, **sampling}),
        n=n,
        body=b"{}",
        created_at=0.0,
        top_logprobs=top_logprobs,
    )


def with_client(server: Any, work: Callable[[EngineClient], Awaitable[Any]]) -> Any:
    """Run `work(client)` in a loop of its own."""

    async def run() -> Any:
        client = EngineClient(server.url, 60.0)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(run())


def generate(server: Any, asked: Request) -> tuple[Generation, ...]:
    return with_client(server, lambda client: client.generate(asked))


def stream(server: Any, asked: Request) -> list[Chunk]:
    async def work(client: EngineClient) -> list[Chunk]:
        return [chunk async for chunk in client.stream(asked)]

    return with_client(server, work)


def assert_matches(made: Generation, table: Any, prompt: list[int] = PROMPT) -> None:
    """Its log-probabilities are those of the reference table over prompt + output."""
    expected = [table[len(prompt) + i - 1, token].item() for i, token in enumerate(made.output_ids)]
    assert made.logprobs.tolist() == pytest.approx(expected, abs=TOLERANCE)


def reference_of(made: Generation, reference: Any, path: Any, temperature: float = 1.0) -> Any:
    return reference(path, PROMPT + made.output_ids.tolist(), temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_generation_holds_the_log_probabilities_of_the_distribution_drawn_from(
    server, reference, temperature
) -> None:
    (made,) = generate(server, request(temperature=temperature))
    assert made.finish_reason is FinishReason.LENGTH
    assert made.spans == (Span(0, 12, "v0"),)
    assert made.reproducible
    assert_matches(made, reference_of(made, reference, server.path, temperature))


@pytest.mark.parametrize("ask", ["whole", "streamed"])
def test_choices_differ_and_each_has_its_own_log_probabilities(server, reference, ask) -> None:
    asked = request(n=3)
    if ask == "whole":
        choices = generate(server, asked)
    else:
        choices = tuple(chunk.generation for chunk in stream(server, asked) if chunk.generation is not None)
    assert len({tuple(made.output_ids) for made in choices}) == 3
    for made in choices:
        assert len(made.output_ids) == 12
        assert_matches(made, reference_of(made, reference, server.path))


def test_what_a_stream_adds_up_to_is_the_whole(server) -> None:
    chunks = stream(server, request(max_tokens=30, n=2, top_logprobs=2))
    for choice in range(2):
        own = [chunk for chunk in chunks if chunk.choice == choice]
        whole = own[-1].generation
        assert whole is not None
        assert [chunk.generation for chunk in own[:-1]] == [None] * (len(own) - 1)
        assert [token for chunk in own for token in chunk.ids] == whole.output_ids.tolist()
        logprobs = [value for chunk in own for value in chunk.logprobs]
        assert logprobs == pytest.approx(whole.logprobs.tolist())
        assert tuple(top for chunk in own for top in chunk.top_logprobs) == whole.top_logprobs
        assert own[-1].spans == whole.spans == (Span(0, 30, "v0"),)
        assert len(own) > 2


def test_the_likeliest_tokens_come_with_their_log_probabilities(server, reference) -> None:
    (made,) = generate(server, request(top_logprobs=3, max_tokens=4))
    table = reference_of(made, reference, server.path)
    for i, top in enumerate(made.top_logprobs):
        values, ids = table[len(PROMPT) + i - 1].topk(3)
        assert [token for _, token in top] == ids.tolist()
        assert [logprob for logprob, _ in top] == pytest.approx(values.tolist(), abs=TOLERANCE)
    assert len(made.top_logprobs) == 4


def test_what_ended_an_answer_is_named(server) -> None:
    (free,) = generate(server, request(temperature=0.0, max_tokens=20))
    stop = int(free.output_ids[7])
    end = free.output_ids.tolist().index(stop) + 1
    (made,) = generate(server, request(temperature=0.0, max_tokens=20, stop_token_ids=(stop,), ignore_eos=False))
    assert (made.finish_reason, made.matched) == (FinishReason.STOP, stop)
    assert made.output_ids.tolist() == free.output_ids[:end].tolist()


def test_a_score_is_a_float32_forward_of_the_weights_that_are_loaded(server, model_dir, reference) -> None:
    """Also where a pause in place has left the prefix cache of older weights: a release is verified by it."""
    other = model_dir("qwen3-b")

    async def work(client: EngineClient) -> Any:
        before = await client.score(PROMPT)
        await client.generate(request(max_tokens=2))
        await client.pause("in_place")
        await client.load(str(other), "v1", False, 30.0)
        await client.resume()
        return before, await client.score(PROMPT)

    for scored, path in zip(with_client(server, work), (server.path, other), strict=True):
        table = reference(path, PROMPT)
        expected = [table[i, token].item() for i, token in enumerate(PROMPT[1:])]
        assert scored.tolist() == pytest.approx(expected, abs=TOLERANCE)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", [generate, stream], ids=["whole", "streamed"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("ids", "max_tokens"), [([5] * 3000, 4), ([5] * 2000, 100)], ids=["its prompt", "prompt and answer"]
)
def test_what_exceeds_the_context_is_the_clients_fault(server, ask, n, ids, max_tokens) -> None:
    with pytest.raises(BadRequestError, match="2048") as refused:
        ask(server, request(ids, n=n, max_tokens=max_tokens))
    assert refused.value.code == "engine_refused"


@pytest.mark.parametrize("ask", [generate, stream], ids=["whole", "streamed"])
def test_a_wrong_sampling_field_is_the_clients_fault(server, ask) -> None:
    with pytest.raises(BadRequestError, match="temperature"):
        ask(server, request(temperature=-1.0))


def test_an_unknown_pause_mode_is_refused(server) -> None:
    with pytest.raises(BadRequestError):
        with_client(server, lambda client: client.pause("sideways"))
    assert generate(server, request(max_tokens=2))[0].finish_reason is FinishReason.LENGTH


def test_a_directory_without_weights_is_not_loaded(server, tmp_path) -> None:
    with pytest.raises((EngineError, BadRequestError), match=str(tmp_path)):
        with_client(server, lambda client: client.load(str(tmp_path), "broken", True, 30.0))
    assert with_client(server, lambda client: client.model_info())["weight_version"] == "v0"
    assert generate(server, request(max_tokens=2))[0].spans == (Span(0, 2, "v0"),)


# --- state ------------------------------------------------------------------------------------------------------------


def test_a_server_says_what_it_holds_and_how_long_a_sequence_may_be(server) -> None:
    async def work(client: EngineClient) -> Any:
        return await client.healthy(), await client.model_info(), await client.context_length()

    healthy, info, context_length = with_client(server, work)
    assert healthy
    assert (info["weight_version"], info["model_path"]) == ("v0", str(server.path))
    assert context_length == 2048


def test_sglang_lists_its_context_length_for_the_clients_of_openai(server) -> None:
    """Where it was not told one, this is where the client finds it: of a server that somebody else started."""
    if server.kind != "sglang":
        pytest.skip("the embedded engine always says it in /model_info")
    assert server.get("/v1/models").json()["data"][0]["max_model_len"] == 2048


# --- clients that go --------------------------------------------------------------------------------------------------


def end_before_one_that_goes_on(server: Any, work: Callable[[EngineClient], Awaitable[None]]) -> None:
    """What `work` began ends before a request that is as long and began earlier: by no token limit of its own."""
    witness = server.started(PROMPT, LONG, rid="witness")
    with_client(server, work)
    server.await_in_work(lambda num: num <= 1, PATIENCE_S)
    assert not witness.done()
    server.post("/abort_request", rid="witness")
    assert witness.result(PATIENCE_S)["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("n", [1, 16])
def test_leaving_a_stream_early_ends_its_work_on_the_engine(server, n) -> None:
    async def work(client: EngineClient) -> None:
        chunks = [client.stream(request(max_tokens=LONG, n=n)) for _ in range(16 // n)]
        for one in chunks:
            await anext(one)
        await asyncio.to_thread(server.await_in_work, lambda num: num == 17, PATIENCE_S)
        for one in chunks:
            await one.aclose()

    end_before_one_that_goes_on(server, work)


@pytest.mark.parametrize("n", [1, 16])
def test_cancelling_a_whole_request_ends_its_work_on_the_engine(server, n) -> None:
    async def work(client: EngineClient) -> None:
        asking = [asyncio.create_task(client.generate(request(max_tokens=LONG, n=n))) for _ in range(16 // n)]
        await asyncio.to_thread(server.await_in_work, lambda num: num == 17, PATIENCE_S)
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
        assert all(task.cancelled() for task in asking)

    end_before_one_that_goes_on(server, work)
