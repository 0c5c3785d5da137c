"""The one client of engines: what it takes for a record, and what it refuses as the engine's fault."""

from __future__ import annotations

import asyncio
import math
import socket
import threading

import numpy as np
import pytest
from aiohttp import web

import reef.engines.client as module
from reef.engines.client import EngineClient, wait_healthy
from reef.errors import BadRequestError, EngineError
from reef.types import FinishReason, Request, Sampling, Span
from tests.engines.conftest import pass_time

IDS = [5, 6, 2]


def request(n: int = 1, top_logprobs: int = 0, **sampling) -> Request:
    return Request(
        id="req_1",
        scenario="s",
        api="chat",
        prompt_ids=np.array([1, 2, 3], dtype=np.int32),
        sampling=Sampling(max_tokens=8, **sampling),
        n=n,
        body=b"{}",
        created_at=0.0,
        top_logprobs=top_logprobs,
    )


def with_client(url, work, timeout_s=60.0):
    """Run `work(client)` in a loop of its own."""

    async def run():
        client = EngineClient(url, timeout_s)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(run())


def generate(engine, asked=None, timeout_s=60.0):
    return with_client(engine.url, lambda client: client.generate(asked or request()), timeout_s)


async def chunks_of(client, asked=None):
    return [chunk async for chunk in client.stream(asked or request())]


def stream(engine, asked=None, timeout_s=60.0):
    return with_client(engine.url, lambda client: chunks_of(client, asked), timeout_s)


async def too_long(engine, answer, after_s):
    """What comes of an answer that has not come so long after the engine was asked."""
    asking = asyncio.create_task(answer)
    while not engine.calls:
        await asyncio.sleep(0.01)
    pass_time(after_s)
    return await asking


def answering(engine, content):
    """The engine gives this answer to every generation, whole or as the last event of a stream."""
    engine.answers["/generate"] = lambda http, body: engine.events(content)(http, body) if body["stream"] else content


# --- what a good answer becomes ---------------------------------------------------------------------------------------


def test_a_whole_answer_becomes_a_generation_with_the_engines_ids_and_log_probabilities(fake_engine) -> None:
    (made,) = generate(fake_engine)
    assert made.output_ids.tolist() == IDS
    assert made.output_ids.dtype == np.int32
    assert made.logprobs.tolist() == [-0.5, -1.5, -2.5]
    assert made.finish_reason is FinishReason.STOP
    assert made.matched == 2
    assert made.spans == (Span(0, 3, "v0"),)
    assert made.top_logprobs == ()


def test_only_what_differs_from_neutral_is_sent(fake_engine) -> None:
    generate(fake_engine)
    _, body = fake_engine.calls[-1]
    assert body == {
        "rid": "req_1",
        "input_ids": [1, 2, 3],
        "sampling_params": {"max_new_tokens": 8, "temperature": 1.0},
        "return_logprob": True,
        "stream": False,
    }


def test_every_sampling_field_is_sent_under_the_engines_name(fake_engine) -> None:
    stream_ends = {**fake_engine.generation(IDS), "index": 0}, {**fake_engine.generation(IDS), "index": 1}
    fake_engine.answers["/generate"] = fake_engine.events(*stream_ends)
    stream(
        fake_engine,
        request(
            n=2, top_logprobs=3, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, presence_penalty=0.2,
            frequency_penalty=0.3, repetition_penalty=1.1, min_tokens=2, stop=("x",), stop_token_ids=(7,),
            ignore_eos=True, seed=0,
        ),
    )  # fmt: skip
    _, body = fake_engine.calls[-1]
    assert body["top_logprobs_num"] == 3
    assert body["sampling_params"] == {
        "max_new_tokens": 8, "temperature": 0.5, "n": 2, "top_p": 0.9, "top_k": 4, "min_p": 0.1,
        "presence_penalty": 0.2, "frequency_penalty": 0.3, "repetition_penalty": 1.1, "min_new_tokens": 2,
        "stop": ["x"], "stop_token_ids": [7], "ignore_eos": True, "sampling_seed": 0,
    }  # fmt: skip


def test_weight_spans_and_top_log_probabilities_are_kept(fake_engine) -> None:
    versions = [
        {"start": 0, "end": 2, "version": "a"},
        {"start": 2, "end": 2, "version": "nothing was sampled under it"},
        {"start": 2, "end": 3, "version": "b"},
    ]
    tops = [[[-0.1, 9, None], [None, 8, None]]] * 3
    answering(fake_engine, fake_engine.generation(IDS, weight_versions=versions, output_top_logprobs=tops))
    for made in (generate(fake_engine)[0], stream(fake_engine)[-1].generation):
        assert made.spans == (Span(0, 2, "a"), Span(2, 3, "b"))
        assert made.top_logprobs[0] == ((-0.1, 9), (float("-inf"), 8))
        assert len(made.top_logprobs) == 3


def test_a_log_probability_that_json_cannot_hold_is_minus_infinity(fake_engine) -> None:
    entries = [[-0.5, 5, None], [None, 6, None], [-1.0, 2, None]]
    answering(fake_engine, fake_engine.generation(IDS, output_token_logprobs=entries))
    (made,) = generate(fake_engine)
    assert made.logprobs.tolist() == [-0.5, -math.inf, -1.0]
    assert [lp for chunk in stream(fake_engine) for lp in chunk.logprobs] == [-0.5, -math.inf, -1.0]


def test_an_answer_without_tokens_has_no_spans(fake_engine) -> None:
    answering(fake_engine, fake_engine.generation([], finish_reason={"type": "abort", "message": "x"}))
    (made,) = generate(fake_engine)
    assert made.finish_reason is FinishReason.ABORT
    assert made.output_ids.tolist() == []
    assert made.spans == ()


def test_cumulative_events_become_exact_increments(fake_engine) -> None:
    ids = [10, 11, 12, 13, 14]
    events = [fake_engine.generation(ids[:k], finish_reason=None) for k in (1, 1, 3)]
    last = fake_engine.generation(ids, finish_reason={"type": "length", "length": 5})
    fake_engine.answers["/generate"] = fake_engine.events(b": a comment\n\n", *events, last)
    chunks = stream(fake_engine)
    assert [list(chunk.ids) for chunk in chunks] == [[10], [], [11, 12], [13, 14]]
    assert [list(chunk.logprobs) for chunk in chunks] == [[-0.5], [], [-1.5, -2.5], [-3.5, -4.5]]
    assert [chunk.spans[-1].end for chunk in chunks] == [1, 1, 3, 5]
    assert [chunk.generation is not None for chunk in chunks] == [False, False, False, True]
    assert chunks[-1].generation.output_ids.tolist() == ids
    assert chunks[-1].generation.finish_reason is FinishReason.LENGTH


def test_choices_of_one_stream_are_kept_apart(fake_engine) -> None:
    part = {"finish_reason": None}
    events = [
        {**fake_engine.generation([20], **part), "index": 1},
        {**fake_engine.generation([10], **part), "index": 0},
        {**fake_engine.generation([20, 21]), "index": 1},
        {**fake_engine.generation([10, 11]), "index": 0},
    ]
    fake_engine.answers["/generate"] = fake_engine.events(*events)
    chunks = stream(fake_engine, request(n=2))
    assert [(chunk.choice, list(chunk.ids)) for chunk in chunks] == [(1, [20]), (0, [10]), (1, [21]), (0, [11])]


def test_an_event_longer_than_a_read_buffer_arrives_whole(fake_engine) -> None:
    ids = list(range(20_000))
    answering(fake_engine, fake_engine.generation(ids))
    assert stream(fake_engine)[-1].generation.output_ids.tolist() == ids


def test_a_given_sequence_is_scored_from_its_second_token(fake_engine) -> None:
    scored = with_client(fake_engine.url, lambda client: client.score([4, 5, 6]))
    assert scored.tolist() == [-1.0, -1.0]
    assert fake_engine.calls[-1][1]["logprob_start_len"] == 0


# --- answers that cannot be a record ----------------------------------------------------------------------------------

BROKEN = {
    "one log-probability too many": (
        {"output_token_logprobs": [[-1.0, t, None] for t in [*IDS, 7]]},
        {},
        "3 ids and 4 log-probabilities",
    ),
    "no log-probabilities": ({"output_token_logprobs": None}, {}, "3 ids and 0 log-probabilities"),
    "log-probabilities of other ids": (
        {"output_token_logprobs": [[-1.0, t, None] for t in [5, 7, 2]]},
        {},
        "belong to other ids",
    ),
    "no token ids": ({}, {"output_ids": None}, "no token ids"),
    "text instead of ids": ({}, {"output_ids": "5 6 2"}, "no token ids"),
    "fewer ids than it counted": ({"completion_tokens": 9}, {}, "3 of 9 ids"),
    "a gap between spans": (
        {"weight_versions": [{"start": 0, "end": 1, "version": "a"}, {"start": 2, "end": 3, "version": "b"}]},
        {},
        "do not cover its 3 tokens",
    ),
    "spans that overlap": (
        {"weight_versions": [{"start": 0, "end": 2, "version": "a"}, {"start": 1, "end": 3, "version": "b"}]},
        {},
        "do not cover its 3 tokens",
    ),
    "spans that end early": (
        {"weight_versions": [{"start": 0, "end": 2, "version": "a"}]},
        {},
        "do not cover its 3 tokens",
    ),
    "no weight version": ({"weight_version": None}, {}, "which weights"),
    "an unknown finish reason": ({"finish_reason": {"type": "tired"}}, {}, "finish reason"),
    "a finish reason of another shape": ({"finish_reason": "stop"}, {}, "expected shape"),
    "too few top log-probabilities": ({"output_top_logprobs": [[[-1.0, 5, None]]]}, {}, "3 ids and 1 lists"),
    "no meta_info": ({}, {"meta_info": None}, "expected shape"),
    "log-probabilities of another shape": ({"output_token_logprobs": [-1.0, -1.0, -1.0]}, {}, "expected shape"),
    "a log-probability that is text": ({"output_token_logprobs": [["x", t, None] for t in IDS]}, {}, "expected shape"),
    "spans of another shape": ({"weight_versions": ["a"]}, {}, "expected shape"),
}


@pytest.mark.parametrize("ask", [generate, stream], ids=["whole", "streamed"])
@pytest.mark.parametrize(("meta", "top", "named"), BROKEN.values(), ids=BROKEN)
def test_an_answer_that_cannot_be_a_record_is_the_engines_fault(fake_engine, ask, meta, top, named) -> None:
    answering(fake_engine, {**fake_engine.generation(IDS, **meta), **top})
    with pytest.raises(EngineError, match=named) as refused:
        ask(fake_engine)
    assert refused.value.status == 502


@pytest.mark.parametrize("ask", [generate, stream], ids=["whole", "streamed"])
@pytest.mark.parametrize("read", [0, 2, 4])
def test_an_engine_that_read_another_prompt_than_it_was_sent_is_refused(fake_engine, ask, read) -> None:
    """NeMo 3763, and what an engine does that may cut a prompt or begin it with a token of its own."""
    answering(fake_engine, fake_engine.generation(IDS, prompt_tokens=3))
    ask(fake_engine)
    answering(fake_engine, fake_engine.generation(IDS, prompt_tokens=read))
    with pytest.raises(EngineError, match=f"read {read} prompt tokens, it was sent 3"):
        ask(fake_engine)


def test_ids_that_are_not_whole_numbers_are_refused(fake_engine) -> None:
    entries = [[-1.0, 5.5, None]]
    answering(fake_engine, fake_engine.generation([5.5], output_token_logprobs=entries))
    with pytest.raises(EngineError, match="other ids"):
        generate(fake_engine)


def test_whole_choices_are_asked_for_as_a_stream_of_few_events_and_come_in_order(fake_engine) -> None:
    events = [{**fake_engine.generation([20 + choice]), "index": choice} for choice in (1, 0)]
    fake_engine.answers["/generate"] = fake_engine.events(*events)
    made = generate(fake_engine, request(n=2))
    assert [generation.output_ids.tolist() for generation in made] == [[20], [21]]
    _, body = fake_engine.calls[-1]
    assert body["stream"] is True
    assert body["sampling_params"]["stream_interval"] >= 1024


@pytest.mark.parametrize(("choices", "named"), [([0], "before its last token"), ([0, 1, 2], "choice 2")])
def test_another_number_of_choices_than_asked_for_is_refused(fake_engine, choices, named) -> None:
    events = [{**fake_engine.generation(IDS), "index": choice} for choice in choices]
    fake_engine.answers["/generate"] = fake_engine.events(*events)
    with pytest.raises(EngineError, match=named):
        generate(fake_engine, request(n=2))


@pytest.mark.parametrize("answer", [[1], ["x"], [None]])
def test_choices_that_are_no_objects_are_refused(fake_engine, answer) -> None:
    fake_engine.answers["/generate"] = lambda http, body: answer
    with pytest.raises(EngineError, match="expected shape"):
        generate(fake_engine)


def only_new(fake_engine, ids: list[int], total: int, **meta):
    """An event of an engine with `--incremental-streaming-output`: `total` tokens so far, of which `ids` are new."""
    return fake_engine.generation(ids, completion_tokens=total, **meta)


def test_a_stream_that_brings_each_token_once_gives_the_same_as_one_that_repeats_them(fake_engine) -> None:
    tops = [[[-0.1 * n, n, None]] for n in (1, 2, 3, 4)]
    repeating = [
        fake_engine.generation([5, 6], finish_reason=None, output_top_logprobs=tops[:2]),
        fake_engine.generation([5, 6, 7], finish_reason=None, output_top_logprobs=tops[:3]),
        fake_engine.generation([5, 6, 7, 2], output_top_logprobs=tops),
    ]
    entries = repeating[-1]["meta_info"]["output_token_logprobs"]
    once = [
        only_new(fake_engine, [5, 6], 2, finish_reason=None, output_top_logprobs=tops[:2]),
        only_new(fake_engine, [7], 3, finish_reason=None, output_top_logprobs=tops[2:3]),
        only_new(fake_engine, [2], 4, output_top_logprobs=tops[3:]),
    ]
    for event, of_it in zip(once, (entries[:2], entries[2:3], entries[3:]), strict=True):
        event["meta_info"]["output_token_logprobs"] = of_it
    found = []
    for events in (repeating, once):
        fake_engine.answers["/generate"] = fake_engine.events(*events)
        found.append(stream(fake_engine))
    for one, other in zip(*found, strict=True):
        assert (one.ids, one.logprobs, one.top_logprobs) == (other.ids, other.logprobs, other.top_logprobs)
        assert one.spans == other.spans
    one, other = (chunks[-1].generation for chunks in found)
    assert one.output_ids.tolist() == other.output_ids.tolist() == [5, 6, 7, 2]
    assert one.logprobs.tolist() == other.logprobs.tolist() == [-0.5, -1.5, -2.5, -3.5]
    assert one.top_logprobs == other.top_logprobs
    assert len(one.top_logprobs) == 4


def test_the_end_of_a_stream_may_bring_no_new_token(fake_engine) -> None:
    fake_engine.answers["/generate"] = fake_engine.events(
        only_new(fake_engine, [5, 6], 2, finish_reason=None), only_new(fake_engine, [], 2)
    )
    chunks = stream(fake_engine)
    assert [chunk.ids for chunk in chunks] == [[5, 6], []]
    assert chunks[-1].generation.output_ids.tolist() == [5, 6]


def test_an_aborted_stream_that_repeats_its_last_token_does_not_have_it_twice(fake_engine) -> None:
    """SGLang 0.5.23 does so with a request that was put back into its queue and is aborted there."""
    end = only_new(fake_engine, [6], 2, finish_reason={"type": "abort", "message": "Abort in waiting queue"})
    end["meta_info"]["output_token_logprobs"] = fake_engine.generation([5, 6])["meta_info"]["output_token_logprobs"]
    fake_engine.answers["/generate"] = fake_engine.events(
        only_new(fake_engine, [5, 6], 2, finish_reason=None, output_top_logprobs=None), end
    )
    made = stream(fake_engine)[-1].generation
    assert made.output_ids.tolist() == [5, 6]
    assert made.finish_reason is FinishReason.ABORT


@pytest.mark.parametrize("total", [2, 4], ids=["a token twice", "a token missing"])
def test_a_stream_that_brings_a_token_twice_or_not_at_all_is_refused(fake_engine, total) -> None:
    events = only_new(fake_engine, [5, 6], 2, finish_reason=None), only_new(fake_engine, [7], total)
    fake_engine.answers["/generate"] = fake_engine.events(*events)
    with pytest.raises(EngineError, match=f"1 of {total} ids, after 2"):
        stream(fake_engine)


@pytest.mark.parametrize("whole", [[5, 7, 8], [5]])
def test_a_whole_that_does_not_begin_with_what_was_streamed_is_refused(fake_engine, whole) -> None:
    events = fake_engine.generation([5, 6], finish_reason=None), fake_engine.generation(whole)
    fake_engine.answers["/generate"] = fake_engine.events(*events)
    with pytest.raises(EngineError, match="do not begin with them"):
        stream(fake_engine)


@pytest.mark.parametrize("index", [-1, 1, "x"])
def test_a_streamed_choice_that_was_not_asked_for_is_refused(fake_engine, index) -> None:
    fake_engine.answers["/generate"] = fake_engine.events({**fake_engine.generation(IDS), "index": index})
    with pytest.raises(EngineError):
        stream(fake_engine)


def test_a_choice_that_ends_twice_is_refused(fake_engine) -> None:
    fake_engine.answers["/generate"] = fake_engine.events(fake_engine.generation(IDS), fake_engine.generation(IDS))
    with pytest.raises(EngineError, match="had ended"):
        stream(fake_engine)


def test_until_the_end_of_a_stream_its_spans_go_only_as_far_as_is_certain(fake_engine) -> None:
    """SGLang lists spans at the end; until then it names the weights of now, though older ones made the tokens."""
    listed = [{"start": 0, "end": 3, "version": "v0"}, {"start": 3, "end": 4, "version": "v1"}]
    events = [
        fake_engine.generation([5, 6], finish_reason=None),
        fake_engine.generation([5, 6, 7], finish_reason=None, weight_version="v1"),
        fake_engine.generation([5, 6, 7, 8], finish_reason=None, weight_version="v1"),
        fake_engine.generation([5, 6, 7, 8], weight_version="v1", weight_versions=listed),
    ]
    fake_engine.answers["/generate"] = fake_engine.events(*events)
    certain = (Span(0, 2, "v0"),)
    assert [chunk.spans for chunk in stream(fake_engine)[:-1]] == [certain] * 3
    assert stream(fake_engine)[-1].spans == (Span(0, 3, "v0"), Span(3, 4, "v1"))


@pytest.mark.parametrize("listed", [True, False])
def test_an_answer_that_a_load_may_have_interrupted_must_say_which_weights_made_what(fake_engine, listed) -> None:
    """An engine that names one version alone names the one of now."""
    more = {"weight_versions": [{"start": 0, "end": 3, "version": "v0"}]} if listed else {}
    go_on = threading.Event()

    async def answer(http, body):
        await asyncio.to_thread(go_on.wait, 60)
        return fake_engine.generation(IDS, **more)

    async def work(client):
        asking = asyncio.create_task(client.generate(request()))
        while not fake_engine.calls:
            await asyncio.sleep(0.01)
        await client.pause("retract")
        go_on.set()
        return await asking

    fake_engine.answers["/generate"] = answer
    if listed:
        assert with_client(fake_engine.url, work)[0].spans == (Span(0, 3, "v0"),)
    else:
        with pytest.raises(EngineError, match="which weights"):
            with_client(fake_engine.url, work)


def test_a_stream_that_ends_before_its_last_token_is_refused(fake_engine) -> None:
    fake_engine.answers["/generate"] = fake_engine.events(fake_engine.generation([5], finish_reason=None))
    with pytest.raises(EngineError, match="before its last token") as refused:
        stream(fake_engine)
    assert refused.value.code == "engine_stream_cut"


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (b"data: {broken\n\n", "broken JSON"),
        (b"data: 5\n\n", "expected shape"),
        (b'data: {"error": {"message": "out of memory"}}\n\n', "out of memory"),
        (b'data: {"error": "out of memory"}\n\n', "out of memory"),
    ],
)
def test_a_broken_event_ends_the_stream_as_the_engines_fault(fake_engine, line, named) -> None:
    fake_engine.answers["/generate"] = fake_engine.events(line)
    with pytest.raises(EngineError, match=named):
        stream(fake_engine)


@pytest.mark.parametrize("entries", [[], [[None, 4, None], [-1.0, 5, None]], [[None, 4, None]] * 3, [None] * 3])
def test_a_probe_that_was_not_scored_whole_is_refused(fake_engine, entries) -> None:
    fake_engine.answers["/generate"] = lambda http, body: fake_engine.generation([], input_token_logprobs=entries)
    with pytest.raises(EngineError):
        with_client(fake_engine.url, lambda client: client.score([4, 5, 6]))


# --- engines that fail ------------------------------------------------------------------------------------------------

ERRORS = [
    ({"error": {"message": "too long"}}, "too long"),
    ({"object": "error", "message": "too long", "code": 400}, "too long"),
    ({"error": "too long"}, "too long"),
    (["too long"], "too long"),
]


@pytest.mark.parametrize("ask", [generate, stream], ids=["whole", "streamed"])
@pytest.mark.parametrize(("body", "named"), ERRORS)
def test_a_refusal_by_the_engine_is_the_clients_fault_and_says_why(fake_engine, ask, body, named) -> None:
    fake_engine.answers["/generate"] = lambda http, asked: web.json_response(body, status=400)
    with pytest.raises(BadRequestError, match=named) as refused:
        ask(fake_engine)
    assert refused.value.code == "engine_refused"


def test_a_refusal_in_the_first_event_of_a_stream_is_the_clients_fault_too(fake_engine) -> None:
    error = {"message": "too long", "type": "invalid_request_error", "code": 400, "retryable": False}
    fake_engine.answers["/generate"] = fake_engine.events({"error": error})
    with pytest.raises(BadRequestError, match="too long") as refused:
        stream(fake_engine)
    assert refused.value.code == "engine_refused"
    with pytest.raises(BadRequestError, match="too long"):
        generate(fake_engine, request(n=2))


@pytest.mark.parametrize("ask", [generate, stream], ids=["whole", "streamed"])
@pytest.mark.parametrize("status", [401, 404, 500, 503])
def test_any_other_status_is_the_engines_fault(fake_engine, ask, status) -> None:
    fake_engine.answers["/generate"] = lambda http, body: web.Response(status=status, text="<html>no</html>" * 100)
    with pytest.raises(EngineError, match=f"answered {status}: <html>no") as refused:
        ask(fake_engine)
    assert len(refused.value.message) < 600


@pytest.mark.parametrize("body", [b"not json", b'{"output_ids": [', b'{"output_ids": NaN}', b"\xff\xfe", b""])
def test_a_body_that_is_not_json_is_the_engines_fault(fake_engine, body) -> None:
    fake_engine.answers["/generate"] = lambda http, asked: web.Response(body=body, content_type="application/json")
    with pytest.raises(EngineError):
        generate(fake_engine)


@pytest.mark.parametrize("ask", [generate, stream], ids=["whole", "streamed"])
def test_an_engine_that_does_not_answer_in_time_is_named_with_the_route(fake_engine, ask) -> None:
    async def work(client):
        await too_long(fake_engine, client.generate(request()) if ask is generate else chunks_of(client), 61)

    fake_engine.answers["/generate"] = fake_engine.never
    with pytest.raises(EngineError, match=f"{fake_engine.url} did not answer /generate in time"):
        with_client(fake_engine.url, work)
    assert fake_engine.cancelled.wait(60)


def test_a_stream_that_stops_moving_is_ended_at_the_limit(fake_engine) -> None:
    first = fake_engine.generation([5], finish_reason=None)

    async def answer(http, body):
        response = await fake_engine.events(first, done=False)(http, body)
        await asyncio.sleep(3600)
        return response

    fake_engine.answers["/generate"] = answer
    with pytest.raises(EngineError, match="in time"):
        stream(fake_engine, timeout_s=0.3)


@pytest.mark.parametrize("ask", ["generate", "score", "model_info", "load"])
def test_an_engine_that_is_not_there_is_an_engine_error(ask) -> None:
    with socket.socket() as taken:  # bound and not listening: nobody else gets the port, and it refuses
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        calls = {
            "generate": lambda client: client.generate(request()),
            "score": lambda client: client.score([1, 2]),
            "model_info": lambda client: client.model_info(),
            "load": lambda client: client.load("/x", "v1", True, 5),
        }
        with pytest.raises(EngineError, match=url):
            with_client(url, calls[ask])
        assert with_client(url, lambda client: client.healthy()) is False


def test_an_engine_that_hangs_up_is_an_engine_error(fake_engine) -> None:
    async def hang_up(http, body):
        http.transport.close()
        await asyncio.sleep(1)

    fake_engine.answers["/generate"] = hang_up
    with pytest.raises(EngineError):
        generate(fake_engine)
    with pytest.raises(EngineError):
        stream(fake_engine)


def test_a_stream_cut_in_the_middle_of_a_line_is_an_engine_error(fake_engine) -> None:
    first = fake_engine.generation([5], finish_reason=None)

    async def cut(http, body):
        response = await fake_engine.events(first, b'data: {"output_', done=False)(http, body)
        http.transport.close()
        return response

    fake_engine.answers["/generate"] = cut
    with pytest.raises(EngineError):
        stream(fake_engine)


def test_leaving_a_stream_early_closes_the_connection_so_that_the_engine_can_abort(fake_engine) -> None:
    first = fake_engine.generation([5], finish_reason=None)

    async def answer(http, body):
        await fake_engine.events(first, done=False)(http, body)
        return await fake_engine.never(http, body)

    fake_engine.answers["/generate"] = answer

    async def work(client):
        chunks = client.stream(request())
        await anext(chunks)
        await chunks.aclose()
        return await asyncio.to_thread(fake_engine.cancelled.wait, 60)

    assert with_client(fake_engine.url, work)


def test_cancelling_a_whole_request_closes_the_connection_too(fake_engine) -> None:
    fake_engine.answers["/generate"] = fake_engine.never

    async def work(client):
        task = asyncio.create_task(client.generate(request()))
        while not fake_engine.calls:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await asyncio.to_thread(fake_engine.cancelled.wait, 60)

    assert with_client(fake_engine.url, work)


def test_cancelling_a_whole_request_also_tells_the_engine(fake_engine, monkeypatch) -> None:
    monkeypatch.setattr(module, "ABORT_TIMEOUT_S", 60)
    fake_engine.answers["/generate"] = fake_engine.never

    async def work(client):
        task = asyncio.create_task(client.generate(request()))
        while not fake_engine.calls:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with_client(fake_engine.url, work)  # closing it waits for the engine to be told
    assert fake_engine.calls[1:] == [("/abort_request", {"rid": "req_1"})]


def test_an_engine_that_cannot_be_told_of_an_abort_holds_nobody_up(fake_engine, monkeypatch) -> None:
    fake_engine.answers["/generate"] = fake_engine.never
    fake_engine.answers["/abort_request"] = lambda http, body: web.Response(status=500)
    monkeypatch.setattr(module, "ABORT_TIMEOUT_S", 60)
    with pytest.raises(EngineError, match="in time"):
        with_client(fake_engine.url, lambda client: too_long(fake_engine, client.generate(request()), 61))
    assert fake_engine.calls[-1][0] == "/abort_request"


def test_a_client_that_was_closed_says_so(fake_engine) -> None:
    async def work(client):
        await client.close()
        for call in (client.generate(request()), client.model_info(), anext(client.stream(request()))):
            with pytest.raises(EngineError, match="was replaced"):
                await call

    with_client(fake_engine.url, work)


# --- loads ------------------------------------------------------------------------------------------------------------


def load(engine):
    return with_client(engine.url, lambda client: client.load("/weights/r1", "r1", True, 60))


def test_a_load_names_the_directory_and_the_release(fake_engine) -> None:
    load(fake_engine)
    body = {"model_path": "/weights/r1", "weight_version": "r1", "flush_cache": True}
    assert fake_engine.calls == [("/update_weights_from_disk", body)]


@pytest.mark.parametrize("answer", [{"success": False, "message": "no such file"}, ["no such file"]])
def test_a_load_that_the_engine_does_not_call_a_success_has_failed(fake_engine, answer) -> None:
    fake_engine.answers["/update_weights_from_disk"] = lambda http, body: answer
    with pytest.raises(EngineError, match=r"did not load /weights/r1: .*no such file"):
        load(fake_engine)


@pytest.mark.parametrize("status", [400, 500])
def test_a_load_that_is_answered_with_an_error_has_failed(fake_engine, status) -> None:
    fake_engine.answers["/update_weights_from_disk"] = lambda http, body: web.json_response(
        {"success": False, "message": "out of memory"}, status=status
    )
    with pytest.raises((EngineError, BadRequestError), match="out of memory"):
        load(fake_engine)


def test_an_empty_answer_to_a_load_is_no_success(fake_engine) -> None:
    fake_engine.answers["/update_weights_from_disk"] = lambda http, body: web.Response()
    with pytest.raises(EngineError, match="did not load"):
        load(fake_engine)


def test_a_load_that_never_answers_ends_at_its_own_limit_and_names_the_engine(fake_engine) -> None:
    async def work(client):
        await too_long(fake_engine, client.load("/weights/r1", "r1", True, 600), 601)

    fake_engine.answers["/update_weights_from_disk"] = fake_engine.never
    with pytest.raises(EngineError, match=f"{fake_engine.url} did not answer /update_weights_from_disk in time"):
        with_client(fake_engine.url, work, timeout_s=3600)


def test_pause_and_resume_take_an_answer_without_json(fake_engine) -> None:
    fake_engine.answers["/pause_generation"] = lambda http, body: web.Response(text="paused\n")
    fake_engine.answers["/continue_generation"] = lambda http, body: web.Response()

    async def work(client):
        await client.pause("retract")
        await client.resume()

    with_client(fake_engine.url, work)
    assert fake_engine.calls == [("/pause_generation", {"mode": "retract"}), ("/continue_generation", {})]


@pytest.mark.parametrize("ask", [generate, stream], ids=["whole", "streamed"])
def test_what_a_pause_in_place_touches_is_not_reproducible(fake_engine, ask) -> None:
    """SGLang keeps the keys and values of the older weights, for what it interrupts and for prompts to come."""

    def answer(http, body):
        spans = [{"start": 0, "end": 3, "version": "v0"}]
        content = fake_engine.generation(IDS, cached_tokens=cached, weight_versions=spans)
        return fake_engine.events(content)(http, body) if body["stream"] else content

    async def reproducible(client):
        if ask is generate:
            return [made.reproducible for made in await client.generate(request())]
        return [chunk.generation.reproducible async for chunk in client.stream(request())]

    async def work(client):
        nonlocal cached
        await client.pause("retract")
        assert await reproducible(client) == [True]
        await client.pause("in_place")
        assert await reproducible(client) == [False]  # its prompt begins with what older weights computed
        cached = 0
        assert await reproducible(client) == [True]
        asking = asyncio.create_task(reproducible(client))
        while not held:
            await asyncio.sleep(0.01)
        await client.pause("in_place")
        go_on.set()
        assert await asking == [False]

    async def hold_from_the_fourth_on(http, body):
        if sum(route == "/generate" for route, _ in fake_engine.calls) == 4:
            held.append(True)
            await asyncio.to_thread(go_on.wait, 60)
        content = answer(http, body)
        return await content if asyncio.iscoroutine(content) else content

    cached, held, go_on = 3, [], threading.Event()
    fake_engine.answers["/generate"] = hold_from_the_fourth_on
    with_client(fake_engine.url, work)


def context_length(engine):
    return with_client(engine.url, lambda client: client.context_length())


def test_the_context_length_is_what_the_engine_was_told_or_else_what_it_took_from_the_model(fake_engine) -> None:
    assert context_length(fake_engine) == 512
    fake_engine.answers["/model_info"] = lambda http, body: {"weight_version": "v0"}
    fake_engine.answers["/v1/models"] = lambda http, body: {"data": [{"id": "m", "max_model_len": 2048}]}
    assert context_length(fake_engine) == 2048
    fake_engine.answers["/server_info"] = lambda http, body: {"context_length": 1024}
    assert context_length(fake_engine) == 1024


def test_an_engine_may_not_know_its_context_length(fake_engine) -> None:
    fake_engine.answers["/model_info"] = lambda http, body: {"weight_version": "v0"}
    assert context_length(fake_engine) is None
    fake_engine.answers["/v1/models"] = lambda http, body: {"data": ["m"]}
    with pytest.raises(EngineError, match="expected shape"):
        context_length(fake_engine)


@pytest.mark.parametrize("answer", [[], "ready", 5, None])
def test_server_state_of_another_shape_is_an_engine_error(fake_engine, answer) -> None:
    fake_engine.answers["/model_info"] = lambda http, body: web.json_response(answer)
    with pytest.raises(EngineError, match="/model_info"):
        with_client(fake_engine.url, lambda client: client.model_info())


def test_healthy_means_200_and_waiting_ends_with_it(fake_engine) -> None:
    asked = []

    def health(http, body):
        asked.append(http.path)
        return web.Response(status=200 if len(asked) > 2 else 503)

    fake_engine.answers["/health"] = health

    async def work(client):
        assert not await client.healthy()
        async with asyncio.timeout(60):
            await wait_healthy(client, poll_s=0.01)

    with_client(fake_engine.url, work)
    assert len(asked) == 3
