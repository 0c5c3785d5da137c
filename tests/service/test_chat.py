"""POST /v1/chat/completions, whole and streamed, over the real service."""

from __future__ import annotations

import json
import math
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

CHAT = "/v1/chat/completions"


CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def messages(text):
    return [{"role": "user", "content": text}]


def joined(chunks, choice=0):
    """Text, ids, log-probabilities, roles and finish reasons of one choice of a stream."""
    text, ids, logprobs, roles, reasons = "", [], [], [], []
    for chunk in chunks:
        for part in chunk["choices"]:
            if part["index"] != choice:
                continue
            text += part["delta"].get("content") or ""
            ids += part.get("token_ids", [])
            logprobs += (part.get("logprobs") or {}).get("content", [])
            roles += [part["delta"]["role"]] if "role" in part["delta"] else []
            reasons += [part["finish_reason"]] if part["finish_reason"] else []
    return text, ids, logprobs, roles, reasons


# --- whole answers ----------------------------------------------------------------------------------------------------


def test_an_answer_has_openais_shape_and_a_receipt(recorder) -> None:
    response = recorder.chat("12+7=", seed=1)
    assert response.status_code == 200
    answer = response.json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert isinstance(answer["created"], int)
    assert answer["model"] == "starter"
    (choice,) = answer["choices"]
    assert choice["index"] == 0
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in ("stop", "length")
    assert choice["logprobs"] is None
    assert "token_ids" not in choice
    assert "prompt_token_ids" not in answer
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert response.headers["x-reef-agent-record-id"] == choice["reef_agent_record_id"]
    assert response.headers["x-reef-release-id"] == recorder.status()["engines"][0]["release_id"]
    assert response.headers["x-request-id"]


def test_the_receipt_holds_exactly_what_was_answered(recorder, scenario) -> None:
    headers = {"x-reef-scenario": scenario}
    response = recorder.chat(
        "31+4=", headers=headers, logprobs=True, return_token_ids=True, temperature=0.7, seed=3, n=3
    )
    answer = response.json()
    assert len({choice["reef_agent_record_id"] for choice in answer["choices"]}) == 3
    for index, choice in enumerate(answer["choices"]):
        receipt = recorder.receipt(choice["reef_agent_record_id"])
        assert receipt["choice"] == choice["index"] == index
        assert receipt["prompt_token_ids"] == answer["prompt_token_ids"]
        assert receipt["token_ids"] == choice["token_ids"]
        said = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        assert receipt["logprobs"] == pytest.approx(said, rel=1e-6)
        assert receipt["text"] == choice["message"]["content"]
        assert receipt["finish_reason"] == choice["finish_reason"]
        assert receipt["scenario"] == scenario
        assert receipt["purpose"] == "train"
        assert receipt["request"]["messages"] == messages("31+4=")
        assert receipt["sampling"]["temperature"] == 0.7
        assert receipt["sampling"]["seed"] == 3
        assert (receipt["exact"], receipt["inexact_reason"]) == (True, None)
        release = response.headers["x-reef-release-id"]
        assert receipt["spans"] == [{"start": 0, "end": len(choice["token_ids"]), "release_id": release}]
        assert len(receipt["digest"]) == len(receipt["template_digest"]) == len(receipt["tokenizer_digest"]) == 64
        assert receipt["engine_build"].startswith("reef-embedded")
        assert receipt["reports"] == []
    num_sampled = sum(len(choice["token_ids"]) for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == num_sampled
    assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])


def test_the_same_seed_gives_the_same_answer_and_another_seed_another(recorder) -> None:
    first, second, other = (
        recorder.chat("9+9=", seed=seed, temperature=3, return_token_ids=True, ignore_eos=True).json()
        for seed in (5, 5, 6)
    )
    assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]
    assert first["choices"][0]["token_ids"] != other["choices"][0]["token_ids"]


def test_log_probabilities_come_per_sampled_token_and_the_likeliest_beside_each(recorder) -> None:
    answer = recorder.chat("9+9=", logprobs=True, top_logprobs=3, return_token_ids=True, seed=2).json()
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"]) == answer["usage"]["completion_tokens"]
    for entry in content:
        assert entry.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        assert entry["logprob"] <= 0
        assert bytes(entry["bytes"]).decode() == entry["token"]
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(tops) == 3
        assert tops == sorted(tops, reverse=True)
        assert entry["logprob"] <= tops[0] + 1e-5


@pytest.mark.parametrize("fields", [{}, {"top_logprobs": None}, {"top_logprobs": 0}])
def test_top_logprobs_null_or_none_asked_for_is_as_if_absent(recorder, fields) -> None:
    response = recorder.chat("1+1=", logprobs=True, **fields)
    assert response.status_code == 200
    assert all(entry["top_logprobs"] == [] for entry in response.json()["choices"][0]["logprobs"]["content"])


def test_an_answer_cut_by_max_tokens_says_length_and_invents_no_end(recorder) -> None:
    answer = recorder.chat("1+1=", max_tokens=3, ignore_eos=True, return_token_ids=True).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == 3
    receipt = recorder.receipt(choice["reef_agent_record_id"])
    assert receipt["finish_reason"] == "length"
    assert receipt["token_ids"] == choice["token_ids"]


def test_max_completion_tokens_is_max_tokens(recorder) -> None:
    body = {"messages": messages("1+1="), "max_completion_tokens": 2, "ignore_eos": True}
    assert recorder.post(CHAT, body).json()["usage"]["completion_tokens"] == 2


def test_no_limit_means_what_the_context_leaves(recorder) -> None:
    body = {"messages": messages("1+1="), "ignore_eos": True}
    usage = recorder.post(CHAT, body).json()["usage"]
    assert usage["total_tokens"] == 512


def test_an_answer_ends_before_its_stop_string_and_the_receipt_says_which(recorder) -> None:
    asked = {"seed": 1, "temperature": 0, "return_token_ids": True}
    free = recorder.chat("12+7=", **asked).json()["choices"][0]
    text = free["message"]["content"]
    stop = text[3:5]
    answer = recorder.chat("12+7=", stop=["nowhere", stop], **asked).json()["choices"][0]
    assert answer["message"]["content"] == text[: text.find(stop)]
    assert answer["finish_reason"] == "stop"
    receipt = recorder.receipt(answer["reef_agent_record_id"])
    assert receipt["matched"] == stop
    assert receipt["token_ids"] == free["token_ids"][: len(receipt["token_ids"])]
    as_text = recorder.chat("12+7=", stop=stop, **asked).json()["choices"][0]
    assert as_text["message"]["content"] == answer["message"]["content"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"temperature": 0}, "greedy"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1, "presence_penalty": 0.5}, "min_p,presence_penalty"),
        ({"temperature": 0.7, "top_p": 1, "top_k": -1, "frequency_penalty": 0}, None),
    ],
)
def test_a_receipt_says_whether_its_log_probabilities_are_exact_and_why_not(recorder, fields, reason) -> None:
    answer = recorder.chat("1+1=", **fields).json()
    receipt = recorder.receipt(answer["choices"][0]["reef_agent_record_id"])
    assert (receipt["exact"], receipt["inexact_reason"]) == (reason is None, reason)


def test_headers_say_purpose_session_and_tags(recorder, scenario) -> None:
    headers = {
        "x-reef-scenario": scenario,
        "x-reef-purpose": "eval",
        "x-reef-session": "s1",
        "x-reef-tag-task": "sums",
        "X-Reef-Tag-Attempt": "2",
        "x-request-id": "mine",
    }
    response = recorder.chat("1+1=", headers=headers)
    assert response.headers["x-request-id"] == "mine"
    receipt = recorder.receipt(response.headers["x-reef-agent-record-id"])
    assert receipt["purpose"] == "eval"
    assert receipt["session"] == "s1"
    assert receipt["tags"] == {"task": "sums", "attempt": "2"}
    harbor = recorder.chat("1+1=", headers={"x-session-id": "trial__agent"})
    assert recorder.receipt(harbor.headers["x-reef-agent-record-id"])["session"] == "trial__agent"


def test_a_sessions_name_has_a_bound(recorder, is_error) -> None:
    assert recorder.chat("1+1=", headers={"x-reef-session": "s" * 256}).status_code == 200
    is_error(recorder.chat("1+1=", headers={"x-session-id": "s" * 257}), 400, param="x-session-id", says="256")


def test_content_in_parts_and_a_name_are_rendered_like_text(recorder) -> None:
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
    body = {"messages": [{"role": "user", "content": parts, "name": "ann"}], "return_token_ids": True, "max_tokens": 1}
    plain = recorder.chat("1+1=", return_token_ids=True, max_tokens=1).json()
    assert recorder.post(CHAT, body).json()["prompt_token_ids"] == plain["prompt_token_ids"]


def test_fields_that_openais_clients_send_are_taken(recorder) -> None:
    fields = {"user": "u", "metadata": {"a": "b"}, "model": "any/name", "n": 1, "stream": False, "stop": None}
    response = recorder.chat("1+1=", **fields)
    assert response.status_code == 200
    assert response.json()["model"] == "any/name"


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 2.5, "ignore_eos": True}, {"logprobs": True, "top_logprobs": 2}]
)
def test_a_streamed_answer_is_the_whole_answer_in_pieces(recorder, fields) -> None:
    asked = {"messages": messages("17+5="), "seed": 11, "max_tokens": 24, "return_token_ids": True, **fields}
    whole = recorder.post(CHAT, asked).json()
    chunks = recorder.stream(CHAT, **asked)
    text, ids, logprobs, roles, reasons = joined(chunks)
    (choice,) = whole["choices"]
    assert text == choice["message"]["content"]
    assert ids == choice["token_ids"]
    assert roles == ["assistant"]
    assert reasons == [choice["finish_reason"]]
    if "logprobs" in fields:
        expected = choice["logprobs"]["content"]
        assert [entry["token"] for entry in logprobs] == [entry["token"] for entry in expected]
        for got, want in zip(logprobs, expected, strict=True):
            assert got["logprob"] == pytest.approx(want["logprob"], abs=1e-4)
            assert len(got["top_logprobs"]) == 2
    else:
        assert logprobs == []
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


def test_the_receipt_comes_before_the_usage_and_the_usage_last(recorder) -> None:
    chunks = recorder.stream(CHAT, messages=messages("2+2="), stream_options={"include_usage": True}, max_tokens=8)
    *_, receipt, usage = chunks
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert receipt["choices"] == usage["choices"] == []
    assert receipt["reef"]["agent_record_ids"] == [receipt["reef"]["agent_record_id"]]
    assert receipt["reef"]["release_id"] == recorder.status()["engines"][0]["release_id"]
    assert "usage" not in receipt
    stored = recorder.receipt(receipt["reef"]["agent_record_id"])
    assert usage["usage"]["completion_tokens"] == len(stored["token_ids"])
    assert usage["usage"]["prompt_tokens"] == len(stored["prompt_token_ids"])
    assert not any("usage" in chunk for chunk in chunks[:-1])


def test_without_include_usage_the_receipt_is_last(recorder) -> None:
    chunks = recorder.stream(CHAT, messages=messages("2+2="), max_tokens=8)
    assert "reef" in chunks[-1]
    assert not any("usage" in chunk for chunk in chunks)


def test_the_receipt_is_stored_when_its_chunk_arrives(recorder) -> None:
    with recorder.streaming(CHAT, messages=messages("2+2="), max_tokens=8) as chunks:
        for chunk in chunks:
            if "reef" in chunk:
                receipt_id = chunk["reef"]["agent_record_id"]
                with httpx.Client(timeout=60) as other:  # at once, while the stream is still open
                    assert other.get(f"{recorder.url}/reef/receipts/{receipt_id}").status_code == 200
                break
        else:
            pytest.fail("no receipt came")


def test_choices_of_one_stream_are_told_apart_and_each_has_its_receipt(recorder) -> None:
    asked = {"messages": messages("8+5="), "n": 3, "seed": 4, "temperature": 2, "return_token_ids": True}
    chunks = recorder.stream(CHAT, max_tokens=12, **asked)
    whole = recorder.post(CHAT, {"max_tokens": 12, **asked}).json()
    ids = next(chunk["reef"]["agent_record_ids"] for chunk in chunks if "reef" in chunk)
    assert len(set(ids)) == 3
    for index, receipt_id in enumerate(ids):
        text, tokens, _, roles, reasons = joined(chunks, index)
        receipt = recorder.receipt(receipt_id)
        assert receipt["token_ids"] == tokens == whole["choices"][index]["token_ids"]
        assert receipt["choice"] == index
        assert text == receipt["text"]
        assert (roles, len(reasons)) == (["assistant"], 1)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_stop_string_is_never_streamed(recorder, length) -> None:
    asked = {"messages": messages("12+7="), "temperature": 0, "max_tokens": 24}
    text = recorder.post(CHAT, asked).json()["choices"][0]["message"]["content"]
    for start in range(len(text) - length + 1):
        stop = text[start : start + length]
        chunks = recorder.stream(CHAT, stop=[stop], **asked)
        assert joined(chunks)[0] == text[: text.find(stop)]
        assert joined(chunks)[4] == ["stop"]


def test_random_text_streams_as_it_is(recorder) -> None:
    for seed in range(6):
        asked = {"messages": messages("x"), "temperature": 50, "seed": seed, "max_tokens": 80, "ignore_eos": True}
        whole = recorder.post(CHAT, asked).json()["choices"][0]["message"]["content"]
        assert joined(recorder.stream(CHAT, **asked))[0] == whole


def test_a_client_that_leaves_a_stream_frees_the_engine_and_its_receipt_is_kept_as_aborted(
    recorder, stored, eventually
) -> None:
    asked = {"messages": messages("1+1="), "max_tokens": 400, "ignore_eos": True, "return_token_ids": True, "seed": 1}
    for _ in range(20):  # a client that was held up leaves after the end
        with recorder.streaming(CHAT, **asked) as chunks:
            seen = [next(chunks) for _ in range(5)]
            request_id = "req_" + seen[0]["id"].removeprefix("chatcmpl-")
        rows = eventually(lambda id=request_id: stored(recorder, "SELECT id FROM receipts WHERE request_id = ?", id))
        receipt = recorder.receipt(rows[0][0])
        if receipt["finish_reason"] == "abort":
            break
    assert receipt["finish_reason"] == "abort"
    ids = joined(seen)[1]
    assert receipt["token_ids"][: len(ids)] == ids
    assert len(receipt["token_ids"]) < 400
    assert len(receipt["logprobs"]) == len(receipt["token_ids"]) == receipt["spans"][-1]["end"]
    eventually(lambda: recorder.status()["engines"][0]["in_flight"] == 0)
    eventually(lambda: recorder.status()["in_flight"] == 0)
    report = {"references": [receipt["agent_record_id"]], "score": 0}
    assert recorder.post("/reef/report", report).json()["reason"] == "not_training"


# --- many at once -----------------------------------------------------------------------------------------------------


def test_64_requests_at_once_are_all_answered_and_all_recorded(recorder, scenario, stored) -> None:
    def ask(i):
        return recorder.chat(f"{i}+{i}=", headers={"x-reef-scenario": scenario}, seed=i)

    with ThreadPoolExecutor(64) as threads:
        answers = list(threads.map(ask, range(64)))
    assert [answer.status_code for answer in answers] == [200] * 64
    sql = "SELECT receipts.id FROM receipts JOIN requests ON requests.id = request_id WHERE scenario = ?"
    recorded = {row[0] for row in stored(recorder, sql, scenario)}
    assert recorded == {answer.headers["x-reef-agent-record-id"] for answer in answers}
    assert len(recorded) == 64


def test_256_whole_and_streamed_requests_at_once_are_what_they_are_alone(recorder, scenario, stored) -> None:
    def body(i):
        return {"messages": messages(f"{i % 16}+1="), "max_tokens": 8, "temperature": 0, "return_token_ids": True}

    alone = [recorder.post(CHAT, body(i)).json()["choices"][0] for i in range(16)]

    def ask(i):
        asked = {"json": {**body(i), "stream": i % 2 == 0}, "headers": {"x-reef-scenario": scenario}}
        if i % 2:
            choice = recorder.client.post(recorder.url + CHAT, **asked).json()["choices"][0]
            return choice["token_ids"], choice["message"]["content"], choice["reef_agent_record_id"]
        with recorder.client.stream("POST", recorder.url + CHAT, **asked) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines[-1] == "[DONE]"
        chunks = [json.loads(line) for line in lines[:-1]]
        text, ids, *_ = joined(chunks)
        return ids, text, chunks[-1]["reef"]["agent_record_id"]

    order = list(range(256))
    random.Random(0).shuffle(order)
    with ThreadPoolExecutor(64) as threads:
        answers = dict(zip(order, threads.map(ask, order), strict=True))
    for i, (ids, text, _) in answers.items():
        assert ids == alone[i % 16]["token_ids"]
        assert text == alone[i % 16]["message"]["content"]
    sql = "SELECT count(*) FROM receipts JOIN requests ON requests.id = request_id WHERE scenario = ?"
    assert stored(recorder, sql, scenario) == [(256,)]
    assert len({receipt_id for *_, receipt_id in answers.values()}) == 256


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "list"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "expected text or parts of text, got None"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "'robot'"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "None"),
        ({"messages": [{"role": "user", "content": "x", "sound": 1}]}, "messages.0.sound", "unknown field"),
        ({"messages": [{"role": "user", "content": "x", "audio": {"id": "a"}}]}, "messages.0.audio", "None"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.tool_call_id", "whose result"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages.0.tool_calls", "assistant"),
        ({"messages": [{"role": "user", "content": "x", "reasoning": "y"}]}, "messages.0.reasoning", "assistant"),
        ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "type": "custom"}]}]}, None, "'function'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", "not supp"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, None, "input_audio is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages.0.content.0.type", "'text'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", "missing"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1, got 0"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"max_tokens": "5"}, "max_tokens", "integer"),
        ({"max_tokens": 5.5}, "max_tokens", "integer"),
        ({"max_tokens": 10**30}, "max_tokens", ""),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": True}, "temperature", "number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_k": 10**30}, "top_k", ""),
        ({"min_tokens": 10**30}, "min_tokens", ""),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 1000}, "n", "less than or equal to 128"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"seed": 2**70}, "seed", ""),
        ({"stop": [""]}, "stop", "not empty"),
        ({"stop": ["a"] * 17}, "stop", "16"),
        ({"stop": 5}, "stop", "string"),
        ({"stop_token_ids": [10**30]}, "stop_token_ids.0", ""),
        ({"stop_token_ids": [5, 300], "min_tokens": 2}, "stop_token_ids", "0..299"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "boolean"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'function'"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "missing"),
        ({"tools": [TOOL]}, "tools", "chat template shows it none"),
        ({"tools": [TOOL, TOOL]}, "tools.1", "add is there twice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0", "'a b'"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "required is not supported"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice", "named"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls", "false is not supported"),
        ({"functions": []}, "functions", "not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"audio": {"voice": "x"}}, "audio", "not supported"),
        ({"modalities": ["audio"]}, "modalities.0", "'text'"),
        ({"prediction": {"type": "content"}}, "prediction", "not supported"),
        ({"web_search_options": {}}, "web_search_options", "not supported"),
        ({"service_tier": "flex"}, "service_tier", "'auto'"),
        ({"verbosity": "low"}, "verbosity", "'medium'"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs it"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'text'"),
        ({"max_toknes": 5}, "max_toknes", "unknown field max_toknes"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs", "not a variable"),
    ],
)
def test_a_wrong_field_is_named_with_what_was_expected(recorder, is_error, fields, param, says) -> None:
    body = {"messages": messages("1+1="), "max_tokens": 4, **fields}
    is_error(recorder.post(CHAT, body), 400, param=param, says=says, type="invalid_request_error")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_temperature_that_is_not_finite_is_refused(recorder, is_error, number) -> None:
    body = '{"messages": [{"role": "user", "content": "x"}], "temperature": NUMBER}'.replace("NUMBER", number)
    is_error(recorder.client.post(recorder.url + CHAT, content=body), 400, param="temperature", says="finite")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nothing", b'{"messages": [}', b"\xff\xfe", b'{"messages": [{"role": "user", "content": "\\ud800"}]}'],
)
def test_a_body_that_is_not_json_is_refused(recorder, is_error, body) -> None:
    response = recorder.client.post(recorder.url + CHAT, content=body)
    is_error(response, 400, code="invalid_json" if body else "missing_field")


@pytest.mark.parametrize("body", [b"[]", b"5", b'"text"', b"null"])
def test_a_body_that_is_no_object_is_refused(recorder, is_error, body) -> None:
    is_error(recorder.client.post(recorder.url + CHAT, content=body), 400, says="expected a JSON object")


def test_a_number_no_json_has_is_refused_where_no_field_checks_it_too(recorder, is_error) -> None:
    body = '{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": NaN}}'
    is_error(recorder.client.post(recorder.url + CHAT, content=body), 400, code="invalid_json")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_longer_than_the_context_is_refused_with_the_numbers(recorder, is_error, scenario, stream) -> None:
    body = {"messages": messages("7" * 600), "stream": stream}
    response = recorder.post(CHAT, body, headers={"x-reef-scenario": scenario})
    error = is_error(response, 400, code="context_length_exceeded", says="the model's context is 512")
    assert "the prompt has 6" in error["message"]
    names = [item["name"] for item in recorder.get("/reef/scenarios").json()["scenarios"]]
    assert scenario not in names  # nothing half done


def test_a_prompt_and_a_limit_that_do_not_fit_together_are_refused_with_what_would(recorder, is_error) -> None:
    error = is_error(
        recorder.chat("1+1=", max_tokens=505), 400, param="max_tokens", code="context_length_exceeded", says="505"
    )
    num_free = int(error["message"].rsplit("at most ", 1)[1].split()[0])
    assert recorder.chat("1+1=", max_tokens=num_free, seed=1).status_code == 200
    assert recorder.chat("1+1=", max_tokens=num_free + 1).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_refused_with_its_words_and_a_status(recorder, is_error, stream) -> None:
    response = recorder.chat("1+1=", max_tokens=2, min_tokens=5, stream=stream)
    is_error(response, 400, code="engine_refused", says="min_new_tokens")


def test_an_unknown_purpose_is_refused(recorder, is_error) -> None:
    response = recorder.chat("1+1=", headers={"x-reef-purpose": "test"})
    is_error(response, 400, param="x-reef-purpose", says="'test'")


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_may_name_the_release_that_must_answer(recorder, is_error, stream) -> None:
    served = recorder.status()["engines"][0]["release_id"]
    assert recorder.chat("1+1=", headers={"x-reef-release": served}, stream=stream).status_code == 200
    response = recorder.chat("1+1=", headers={"x-reef-release": "another"}, stream=stream)
    is_error(response, 409, param="x-reef-release", code="release_not_served", says=f"{served} is served")


def test_a_recipe_that_the_service_does_not_run_is_a_conflict(recorder, is_error, scenario) -> None:
    headers = {"x-reef-scenario": scenario, "x-reef-recipe": "grpo"}
    assert recorder.chat("1+1=", headers=headers).status_code == 200
    assert recorder.chat("1+1=", headers=headers).status_code == 200
    is_error(recorder.chat("1+1=", headers={**headers, "x-reef-recipe": "sao"}), 409, says="grpo")
    fresh = {"x-reef-scenario": f"{scenario}-new", "x-reef-recipe": "sao"}
    is_error(recorder.chat("1+1=", headers=fresh), 409, says="sao")


@pytest.mark.parametrize("name", ["a b", "-x", "x" * 65, "a/b", "ümlaut"])
def test_a_scenario_name_that_cannot_be_one_is_refused(recorder, is_error, name) -> None:
    response = recorder.chat("1+1=", headers={"x-reef-scenario": name.encode()})
    is_error(response, 400, says="1-64 letters")


# --- what an engine may do to us --------------------------------------------------------------------------------------


def test_a_log_probability_of_minus_infinity_is_valid_json_and_makes_the_receipt_inexact(
    attached_recorder, broken_engine
) -> None:
    engine = broken_engine
    entries = [[-0.5, 5, None], [None, 6, None], [-1.0, 2, None]]
    engine.answers["/generate"] = lambda http, body: engine.generation([5, 6, 2], output_token_logprobs=entries)
    response = attached_recorder.chat("1+1=", logprobs=True)
    values = [entry["logprob"] for entry in response.json()["choices"][0]["logprobs"]["content"]]
    assert values[0] == -0.5
    assert math.isfinite(values[1]) and values[1] < -1e38
    receipt = attached_recorder.receipt(response.headers["x-reef-agent-record-id"])
    assert receipt["logprobs"] == [-0.5, None, -1.0]
    assert (receipt["exact"], receipt["inexact_reason"]) == (False, "logprob_not_finite")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"output_ids": None}, "no token ids"),
        ({"output_ids": [5, 6, 2, 2]}, "4 ids and 3 log-probabilities"),
        ({"meta_info": None}, "expected shape"),
    ],
)
def test_an_engine_answer_that_cannot_be_a_record_is_502_and_leaves_no_receipt(
    attached_recorder, broken_engine, is_error, stored, stream, change, says
) -> None:
    engine = broken_engine
    content = {**engine.generation([5, 6, 2], completion_tokens=4 if change.get("output_ids") else 3), **change}
    engine.answers["/generate"] = lambda http, body: engine.events(content)(http, body) if stream else content
    count = "SELECT count(*) FROM receipts"
    before = stored(attached_recorder, count)
    response = attached_recorder.chat("1+1=", stream=stream)
    is_error(response, 502, type="engine_error", says=says)
    assert stored(attached_recorder, count) == before


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_frees_the_engine(
    attached_recorder, broken_engine, stored, eventually, ask_and_leave, stream
) -> None:
    broken_engine.answers["/generate"] = broken_engine.never
    broken_engine.cancelled.clear()
    num_calls = len(broken_engine.calls)
    count = "SELECT count(*) FROM receipts"
    before = stored(attached_recorder, count)
    asked = {"messages": messages("1"), "stream": stream}
    ask_and_leave(
        attached_recorder, CHAT, asked, lambda: "/generate" in [route for route, _ in broken_engine.calls[num_calls:]]
    )
    assert broken_engine.cancelled.wait(60)
    eventually(lambda: attached_recorder.status()["in_flight"] == 0)
    assert attached_recorder.status()["engines"][0]["in_flight"] == 0
    assert stored(attached_recorder, count) == before  # nothing was sampled


def test_of_a_stream_that_its_client_leaves_after_a_load_only_what_is_certain_is_kept(
    attached_recorder, broken_engine, stored, eventually
) -> None:
    """SGLang says only at the end of a stream which weights made which token."""
    engine = broken_engine

    async def answer(http, body):
        first = engine.generation([74, 75], finish_reason=None)
        later = engine.generation([74, 75, 76, 77], finish_reason=None, weight_version="the next one")
        await engine.events(first, later, done=False)(http, body)
        return await engine.never(http, body)

    engine.answers["/generate"] = answer
    with attached_recorder.streaming(CHAT, messages=messages("1+1="), return_token_ids=True) as chunks:
        seen = [next(chunks)]
        while len(joined(seen)[1]) < 4:
            seen.append(next(chunks))
        request_id = "req_" + seen[0]["id"].removeprefix("chatcmpl-")
    query = "SELECT id FROM receipts WHERE request_id = ?"
    receipt = attached_recorder.receipt(eventually(lambda: stored(attached_recorder, query, request_id))[0][0])
    assert receipt["token_ids"] == [74, 75]
    assert [span["end"] for span in receipt["spans"]] == [2]


def test_an_engine_that_fails_in_the_middle_of_a_stream_ends_it_with_an_error_event_and_no_receipt(
    attached_recorder, broken_engine
) -> None:
    engine = broken_engine
    first = engine.generation([74], finish_reason=None)
    engine.answers["/generate"] = engine.events(first, {"error": {"message": "out of memory"}})
    chunks = attached_recorder.stream(CHAT, messages=messages("1+1="))
    assert chunks[-1]["error"]["type"] == "engine_error"
    assert "out of memory" in chunks[-1]["error"]["message"]
    assert not any("reef" in chunk for chunk in chunks)


def test_of_half_a_character_no_bytes_are_claimed(attached_recorder, broken_engine) -> None:
    """OpenAI's `bytes` may be null; those of U+FFFD, put together, would be another text."""
    engine = broken_engine
    ids = attached_recorder.complete("a🦀", return_token_ids=True).json()["prompt_token_ids"]
    engine.answers["/generate"] = lambda http, body: engine.generation([*ids, 2])
    (choice,) = attached_recorder.chat("1+1=", logprobs=True).json()["choices"]
    assert [entry["bytes"] for entry in choice["logprobs"]["content"]] == [[97], *[None] * 4, list(b"<|im_end|>")]


def test_a_character_of_four_tokens_is_held_back_until_it_is_whole(attached_recorder, broken_engine) -> None:
    engine = broken_engine
    ids = attached_recorder.complete("🦀", return_token_ids=True).json()["prompt_token_ids"]
    assert len(ids) == 4
    parts = [engine.generation(ids[:k], finish_reason=None) for k in range(1, 5)]
    engine.answers["/generate"] = engine.events(*parts, engine.generation([*ids, 2]))
    chunks = attached_recorder.stream(CHAT, messages=messages("1+1="), return_token_ids=True)
    deltas = [part["delta"].get("content") for chunk in chunks for part in chunk["choices"]]
    assert [delta for delta in deltas if delta] == ["🦀"]
    assert joined(chunks)[1] == [*ids, 2]
