"""What Reef's engine client relies on, of any server that speaks SGLang's native API."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.conftest import added_up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # the first test of each server starts it

PROMPTS = [[(7 * i + 3 * j) % 250 + 4 for j in range(3 + 5 * i)] for i in range(8)]
TOLERANCE = 1e-4


def logprobs_of(answer: dict[str, Any]) -> list[float]:
    entries = answer["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in entries] == answer["output_ids"]
    return [entry[0] for entry in entries]


def assert_matches(
    table: torch.Tensor, prompt: list[int], answer: dict[str, Any], start: int = 0, end: int | None = None
) -> None:
    """Output log-probabilities [start, end) are those of the reference table over prompt + output."""
    ids, logprobs = answer["output_ids"], logprobs_of(answer)
    for i in range(start, len(ids) if end is None else end):
        assert logprobs[i] == pytest.approx(table[len(prompt) + i - 1, ids[i]].item(), abs=TOLERANCE)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_a_float32_forward_at_the_temperature(server, reference, temperature) -> None:
    for prompt in PROMPTS:
        answer = server.generate(prompt, 16, temperature=temperature, logprob_start_len=0)
        table = reference(server.path, prompt + answer["output_ids"], temperature)
        assert_matches(table, prompt, answer)


def test_prompt_log_probabilities_are_unscaled_and_start_where_asked(server, reference) -> None:
    prompt = PROMPTS[3]
    table = reference(server.path, prompt)
    for start in (0, 5, len(prompt) - 1):
        answer = server.generate(prompt, 2, temperature=0.5, logprob_start_len=start)
        entries = answer["meta_info"]["input_token_logprobs"]
        assert [entry[1] for entry in entries] == prompt[start:]
        assert entries[0][0] is None
        for i, entry in enumerate(entries[1:], start + 1):
            assert entry[0] == pytest.approx(table[i - 1, prompt[i]].item(), abs=TOLERANCE)


def test_no_prompt_log_probabilities_unless_asked(server) -> None:
    assert server.generate(PROMPTS[1], 2)["meta_info"]["input_token_logprobs"] == []


def test_a_request_for_no_tokens_scores_its_prompt(server, reference) -> None:
    prompt = PROMPTS[4]
    answer = server.generate(prompt, 0, logprob_start_len=0)
    table = reference(server.path, prompt)
    assert answer["output_ids"] == []
    assert answer["meta_info"]["completion_tokens"] == 0
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    scores = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]
    expected = [table[i, token].item() for i, token in enumerate(prompt[1:])]
    assert scores == pytest.approx(expected, abs=TOLERANCE)


def test_temperature_zero_takes_the_likeliest_token(server, reference) -> None:
    prompt = PROMPTS[2]
    answer = server.generate(prompt, 24, temperature=0)
    table = reference(server.path, prompt + answer["output_ids"])
    expected = [int(table[len(prompt) + i - 1].argmax()) for i in range(24)]
    assert answer["output_ids"] == expected
    assert_matches(table, prompt, answer)


def test_top_log_probabilities_come_likeliest_first(server, reference) -> None:
    prompt = PROMPTS[2]
    answer = server.generate(prompt, 4, temperature=0, top_logprobs_num=3)
    table = reference(server.path, prompt + answer["output_ids"])
    for i, top in enumerate(answer["meta_info"]["output_top_logprobs"]):
        values, ids = table[len(prompt) + i - 1].topk(3)
        assert [entry[1] for entry in top] == ids.tolist()
        assert [entry[0] for entry in top] == pytest.approx(values.tolist(), abs=TOLERANCE)


def test_answers_carry_counts_ids_and_the_weight_version(server) -> None:
    answer = server.generate(PROMPTS[1], 5, rid="my-request")
    meta = answer["meta_info"]
    assert meta["id"] == "my-request"
    assert meta["prompt_tokens"] == len(PROMPTS[1])
    assert meta["completion_tokens"] == 5
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert meta["weight_version"] == "v0"
    assert meta["weight_versions"] == [{"version": "v0", "start": 0, "end": 5}]
    assert meta["e2e_latency"] > 0


def test_n_choices_of_each_prompt_come_in_prompt_order(server, reference) -> None:
    prompts = PROMPTS[:2]
    answers = server.generate(prompts, 12, n=3)
    assert len(answers) == 6
    for i, answer in enumerate(answers):
        prompt = prompts[i // 3]
        assert answer["meta_info"]["prompt_tokens"] == len(prompt)
        assert_matches(reference(server.path, prompt + answer["output_ids"]), prompt, answer)
    assert len({tuple(answer["output_ids"]) for answer in answers[:3]}) == 3


def test_a_list_of_one_prompt_is_answered_by_a_list(server) -> None:
    assert len(server.generate([PROMPTS[0]], 2)) == 1


def test_a_stream_brings_each_token_once_and_adds_up_to_the_whole_answer(server) -> None:
    whole = server.generate(PROMPTS[3], 200, temperature=0, top_logprobs_num=2)
    events = list(server.stream(PROMPTS[3], 200, temperature=0, top_logprobs_num=2))
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert len(events) > 2
    answer = added_up(events)
    assert answer["output_ids"] == whole["output_ids"]
    assert answer["text"] == whole["text"]
    assert logprobs_of(answer) == pytest.approx(logprobs_of(whole), abs=TOLERANCE)
    assert len(answer["meta_info"]["output_top_logprobs"]) == 200
    assert answer["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


def test_streams_of_choices_say_which_choice_each_event_is(server) -> None:
    events = list(server.stream(PROMPTS[0], 4, n=2))
    final = [event for event in events if event["meta_info"]["finish_reason"]]
    assert sorted(event["index"] for event in final) == [0, 1]
    for choice in range(2):
        assert len(added_up([event for event in events if event["index"] == choice])["output_ids"]) == 4


def test_a_stop_token_ends_the_answer_and_stays_in_the_ids(server) -> None:
    free = server.generate(PROMPTS[5], 20, temperature=0)["output_ids"]
    stop = free[6]
    answer = server.generate(PROMPTS[5], 20, temperature=0, stop_token_ids=[stop], ignore_eos=False)
    end = free.index(stop) + 1
    assert answer["output_ids"] == free[:end]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_the_model_s_own_end_token_ends_the_answer(server) -> None:
    bias = {"2": 100.0}
    answer = server.generate(PROMPTS[0], 20, ignore_eos=False, logit_bias=bias)
    assert answer["output_ids"] == [2]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}


def test_a_stop_string_ends_the_answer_and_is_cut_from_the_text(server) -> None:
    free = server.generate(PROMPTS[5], 60, temperature=0, logit_bias={str(i): 5.0 for i in range(70, 90)})
    text = free["text"]
    stop = text[3:5]
    answer = server.generate(
        PROMPTS[5], 60, temperature=0, stop=[stop], logit_bias={str(i): 5.0 for i in range(70, 90)}
    )
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"] == text[: text.index(stop)]
    assert answer["output_ids"] == free["output_ids"][: text.index(stop) + 2]  # a byte a token


def test_a_stream_never_shows_a_part_of_its_stop_string(server) -> None:
    options: dict[str, Any] = {"temperature": 0, "logit_bias": {str(i): 5.0 for i in range(70, 90)}}
    text = server.generate(PROMPTS[5], 60, **options)["text"]
    stop = text[4:8]
    kept = text[: text.index(stop)]
    events = list(server.stream(PROMPTS[5], 60, stop=[stop], **options))
    assert added_up(events)["text"] == kept


def test_min_new_tokens_holds_the_end_back(server) -> None:
    answer = server.generate(PROMPTS[0], 20, ignore_eos=False, logit_bias={"2": 50.0}, min_new_tokens=5)
    assert len(answer["output_ids"]) == 6
    assert answer["output_ids"][-1] == 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
        ({"min_new_tokens": 9}, "min_new_tokens"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"logit_bias": {"9999": 1.0}}, "logit_bias"),
    ],
)
def test_a_wrong_sampling_parameter_is_refused_by_name(server, options, reason) -> None:
    error = server.generate(PROMPTS[0], **options, expect=400)
    assert reason in str(error)


def test_a_prompt_longer_than_the_context_is_refused(server) -> None:
    assert "2048" in str(server.generate([5] * 3000, 4, expect=400))
    assert "2048" in str(server.generate([5] * 2000, 100, expect=400))
    assert server.generate(PROMPTS[0], 2)["output_ids"]


def test_an_empty_prompt_is_refused(server) -> None:
    server.generate([], 4, expect=400)


def test_many_concurrent_requests_all_get_their_own_log_probabilities(server, reference) -> None:
    jobs = [(PROMPTS[i % 8], 8 + i) for i in range(32)]
    answers = list(server.pool.map(lambda job: server.generate(*job), jobs))
    for (prompt, length), answer in zip(jobs, answers, strict=True):
        assert len(answer["output_ids"]) == length
        assert_matches(reference(server.path, prompt + answer["output_ids"]), prompt, answer)


def test_an_aborted_request_answers_with_what_it_has(server) -> None:
    running = server.started(PROMPTS[0], 1900, rid="to-abort")
    assert server.post("/abort_request", rid="to-abort").status_code == 200
    answer = running.result(60)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) < 1900
    assert len(logprobs_of(answer)) == len(answer["output_ids"])


def test_a_request_that_is_aborted_before_its_turn_answers_without_tokens(server) -> None:
    prompts = [[40 + i, 50] for i in range(24)]  # as many as run at once: NUM_ROWS
    running = server.pool.submit(server.generate, prompts, 1900)
    server.await_in_work(lambda num: num == 24, 60)
    queued = server.pool.submit(server.generate, PROMPTS[1], 4, rid="queued")
    server.await_in_work(lambda num: num == 25, 60)
    server.post("/abort_request", rid="queued")
    answer = queued.result(60)
    assert answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert not running.done()
    server.post("/abort_request", abort_all=True)
    assert {one["meta_info"]["finish_reason"]["type"] for one in running.result(60)} == {"abort"}


def test_abort_all_ends_everything(server) -> None:
    running = [server.started(PROMPTS[i], 1800) for i in range(3)]
    server.post("/abort_request", abort_all=True)
    assert {job.result(60)["meta_info"]["finish_reason"]["type"] for job in running} == {"abort"}


def test_aborting_an_unknown_request_changes_nothing(server) -> None:
    assert server.post("/abort_request", rid="nobody").status_code == 200


def test_a_load_changes_answers_and_the_version(server, model_dir, reference) -> None:
    other = model_dir("qwen3-b")
    before = server.generate(PROMPTS[4], 12, temperature=0)
    loaded = server.load(other, "v1")
    assert loaded.status_code == 200
    assert loaded.json()["success"] is True
    after = server.generate(PROMPTS[4], 12, temperature=0)
    assert after["output_ids"] != before["output_ids"]
    assert after["meta_info"]["weight_version"] == "v1"
    # The same prompt as before: a stale prefix cache would show here.
    assert_matches(reference(other, PROMPTS[4] + after["output_ids"]), PROMPTS[4], after)
    info = server.get("/model_info").json()
    assert (info["weight_version"], info["model_path"]) == ("v1", str(other))


def test_loading_the_same_weights_changes_no_greedy_token(server, reference) -> None:
    before = server.generate(PROMPTS[6], 24, temperature=0)
    assert server.load(server.path, "v0-again").status_code == 200
    after = server.generate(PROMPTS[6], 24, temperature=0)
    assert after["output_ids"] == before["output_ids"]
    assert logprobs_of(after) == pytest.approx(logprobs_of(before), abs=TOLERANCE)


def test_a_load_of_a_missing_directory_fails_and_the_server_lives(server) -> None:
    before = server.generate(PROMPTS[1], 8, temperature=0)["output_ids"]
    failed = server.load(Path("/nonexistent/weights"), "broken")
    assert failed.status_code == 400
    assert failed.json()["success"] is False
    answer = server.generate(PROMPTS[1], 8, temperature=0)
    assert answer["output_ids"] == before
    assert answer["meta_info"]["weight_version"] == "v0"


def test_retract_recomputes_the_cache_so_each_span_matches_its_own_weights(server, model_dir, reference) -> None:
    other, prompt = model_dir("qwen3-b"), PROMPTS[3]
    running = server.started(prompt, 800)
    assert server.post("/pause_generation", mode="retract").status_code == 200
    assert server.load(other, "v1", flush_cache=True).status_code == 200
    time.sleep(0.1)
    assert not running.done()
    assert server.post("/continue_generation").status_code == 200
    answer = running.result(60)
    assert len(answer["output_ids"]) == 800
    old, new = answer["meta_info"]["weight_versions"]
    assert (old["version"], old["start"], new["version"], new["end"]) == ("v0", 0, "v1", 800)
    assert 0 < old["end"] == new["start"] < 800
    ids = prompt + answer["output_ids"]
    assert_matches(reference(server.path, ids), prompt, answer, 0, old["end"])
    assert_matches(reference(other, ids), prompt, answer, new["start"])


def test_in_place_keeps_the_cache_and_still_names_each_span(server, model_dir, reference) -> None:
    other, prompt = model_dir("qwen3-b"), PROMPTS[3]
    running = server.started(prompt, 800)
    server.post("/pause_generation", mode="in_place")
    assert server.load(other, "v1", flush_cache=False).status_code == 200
    server.post("/continue_generation")
    answer = running.result(60)
    old, new = answer["meta_info"]["weight_versions"]
    assert (old["version"], new["version"]) == ("v0", "v1")
    ids = prompt + answer["output_ids"]
    assert_matches(reference(server.path, ids), prompt, answer, 0, old["end"])
    with pytest.raises(AssertionError):  # old keys and values
        assert_matches(reference(other, ids), prompt, answer, new["start"])


def test_a_flush_while_requests_run_in_place_is_refused(server) -> None:
    running = server.started(PROMPTS[0], 800)
    server.post("/pause_generation", mode="in_place")
    assert server.get("/flush_cache").status_code == 400
    server.post("/continue_generation")
    assert len(running.result(60)["output_ids"]) == 800


def test_pause_abort_ends_what_runs_and_holds_what_comes(server) -> None:
    running = server.started(PROMPTS[0], 1800)
    server.post("/pause_generation")
    assert running.result(60)["meta_info"]["finish_reason"]["type"] == "abort"
    held = server.pool.submit(server.generate, PROMPTS[1], 4)
    time.sleep(0.2)
    assert not held.done()
    server.post("/continue_generation")
    assert len(held.result(60)["output_ids"]) == 4


def test_paused_with_one_running_and_one_queued_both_finish_after_a_flush(server) -> None:
    running = server.started(PROMPTS[0], 500)
    server.post("/pause_generation", mode="retract")
    queued = server.pool.submit(server.generate, PROMPTS[1], 8)
    time.sleep(0.1)
    assert server.post("/flush_cache").status_code == 200
    server.post("/continue_generation")
    assert len(running.result(60)["output_ids"]) == 500
    assert len(queued.result(60)["output_ids"]) == 8


def test_a_load_without_a_pause_waits_for_the_requests_before_it(server, model_dir, reference) -> None:
    other = model_dir("qwen3-b")
    running = server.started(PROMPTS[0], 500)
    loading = server.pool.submit(server.load, other, "v1")
    answer = running.result(60)
    assert loading.result(60).status_code == 200
    assert answer["meta_info"]["weight_versions"] == [{"version": "v0", "start": 0, "end": 500}]
    assert server.generate(PROMPTS[0], 2)["meta_info"]["weight_version"] == "v1"


def test_the_version_can_be_renamed(server) -> None:
    assert server.post("/update_weight_version", new_version="v7").json()["success"] is True
    assert server.generate(PROMPTS[0], 2)["meta_info"]["weight_version"] == "v7"


def test_health_routes_answer(server) -> None:
    for route in ("/health", "/health_generate", "/model_info", "/get_model_info", "/server_info"):
        assert server.get(route).status_code == 200, route


def test_a_duplicate_request_id_is_refused(server) -> None:
    running = server.started(PROMPTS[0], 800, rid="twice")
    server.generate(PROMPTS[1], 2, rid="twice", expect=400)
    server.post("/abort_request", rid="twice")
    running.result(60)
    assert server.generate(PROMPTS[1], 2, rid="twice")["meta_info"]["id"] == "twice"
