"""POST /v1/completions over text and over ids, and GET /v1/models."""

from __future__ import annotations

import shutil

import pytest

COMPLETIONS = "/v1/completions"
GREEDY = {"temperature": 0, "return_token_ids": True}


def joined(chunks, choice=0):
    """Text, ids and finish reasons of one choice of a stream."""
    parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice]
    ids = [token for part in parts for token in part.get("token_ids", [])]
    reasons = [part["finish_reason"] for part in parts if part["finish_reason"]]
    return "".join(part["text"] for part in parts), ids, reasons


def test_a_completion_has_openais_shape_and_a_receipt(recorder) -> None:
    response = recorder.complete("1+1=", seed=1)
    answer = response.json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    (choice,) = answer["choices"]
    assert isinstance(choice["text"], str)
    assert choice["logprobs"] is None
    assert choice["finish_reason"] in ("stop", "length")
    receipt = recorder.receipt(response.headers["x-reef-agent-record-id"])
    assert receipt["agent_record_id"] == choice["reef_agent_record_id"]
    assert receipt["text"] == choice["text"]
    assert receipt["prompt_text"] == "1+1="
    assert receipt["template_digest"] is None  # nothing was rendered
    assert receipt["tokenizer_digest"]


def test_ids_are_taken_as_they_are_and_text_is_encoded_with_nothing_added(recorder) -> None:
    as_text = recorder.complete("12+7=", **GREEDY).json()
    ids = as_text["prompt_token_ids"]
    as_ids = recorder.complete(ids, **GREEDY).json()
    assert as_ids["prompt_token_ids"] == ids
    assert as_ids["choices"][0]["token_ids"] == as_text["choices"][0]["token_ids"]
    # Ids that no tokenizer would give for their own text stay as they are: nothing is tokenized again.
    split = [ids[0], 0, 2, *ids[1:]]
    answer = recorder.complete(split, **GREEDY).json()
    assert answer["prompt_token_ids"] == split
    assert recorder.receipt(answer["choices"][0]["reef_agent_record_id"])["prompt_token_ids"] == split


def test_a_chat_is_the_completion_of_its_rendered_ids(recorder) -> None:
    chat = recorder.chat("31+4=", **GREEDY).json()
    completion = recorder.complete(chat["prompt_token_ids"], **GREEDY).json()
    assert completion["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]
    assert completion["choices"][0]["text"] == chat["choices"][0]["message"]["content"]


def test_log_probabilities_have_the_shape_of_completions(recorder) -> None:
    answer = recorder.complete("12+7=", logprobs=2, seed=3, return_token_ids=True).json()
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(choice["token_ids"])
    assert len(logprobs["top_logprobs"]) == len(choice["token_ids"])
    receipt = recorder.receipt(choice["reef_agent_record_id"])
    assert logprobs["token_logprobs"] == pytest.approx(receipt["logprobs"], rel=1e-6)
    for top, value in zip(logprobs["top_logprobs"], logprobs["token_logprobs"], strict=True):
        assert 1 <= len(top) <= 2
        assert value <= max(top.values()) + 1e-5


@pytest.mark.parametrize("logprobs", [None, 0])
def test_no_top_log_probabilities_unless_asked(recorder, logprobs) -> None:
    shown = recorder.complete("1+1=", logprobs=logprobs, max_tokens=2).json()["choices"][0]["logprobs"]
    assert shown is None if logprobs is None else set(map(len, shown["top_logprobs"])) == {0}


@pytest.mark.parametrize("fields", [{"seed": 5}, {"seed": 6, "temperature": 3, "ignore_eos": True, "logprobs": 1}])
def test_a_streamed_completion_is_the_whole_one_in_pieces(recorder, fields) -> None:
    asked = {"prompt": "17+5=", "max_tokens": 20, "return_token_ids": True, **fields}
    (choice,) = recorder.post(COMPLETIONS, asked).json()["choices"]
    chunks = recorder.stream(COMPLETIONS, stream_options={"include_usage": True}, **asked)
    assert joined(chunks) == (choice["text"], choice["token_ids"], [choice["finish_reason"]])
    *_, receipt, usage = chunks
    assert recorder.receipt(receipt["reef"]["agent_record_id"])["token_ids"] == choice["token_ids"]
    assert receipt["prompt_token_ids"]
    assert usage["usage"]["completion_tokens"] == len(choice["token_ids"])
    assert not any("role" in part for chunk in chunks for part in chunk["choices"])


def test_n_completions_have_n_receipts(recorder) -> None:
    choices = recorder.complete("1+1=", n=4, temperature=2).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert len({choice["reef_agent_record_id"] for choice in choices}) == 4


def test_a_stop_id_ends_the_answer_and_the_receipt_names_it(recorder) -> None:
    free = recorder.complete("12+7=", ignore_eos=True, **GREEDY).json()["choices"][0]["token_ids"]
    stopped = recorder.complete("12+7=", stop_token_ids=[free[2]], **GREEDY).json()["choices"][0]
    end = free.index(free[2])
    assert stopped["token_ids"] == free[: end + 1]
    assert stopped["finish_reason"] == "stop"
    assert recorder.receipt(stopped["reef_agent_record_id"])["matched"] == free[2]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"prompt": ""}, None, "the prompt has no tokens"),
        ({"prompt": []}, None, "the prompt has no tokens"),
        ({"prompt": None}, "prompt", "None"),
        ({"prompt": [1, "x"]}, "prompt.1", "integer"),
        ({"prompt": [1, True]}, "prompt.1", "integer"),
        ({"prompt": [[1]]}, "prompt.0", "integer"),
        ({"prompt": ["text"]}, "prompt.0", "integer"),
        ({"prompt": [1, -1]}, "prompt.1", "greater than or equal to 0"),
        ({"prompt": [1, 300]}, "prompt", "0..299"),
        ({"prompt": [10**30]}, "prompt.0", ""),
        ({"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
        ({"prompt": "x", "best_of": 2}, "best_of", "2 with n 1 is not supported"),
        ({"prompt": "x", "logprobs": True}, "logprobs", "integer"),
        ({"prompt": "x", "logprobs": 21}, "logprobs", "20"),
        ({}, "prompt", "missing"),
        ({"prompt": [5] * 512}, None, "the prompt has 512 tokens, the model's context is 512"),
    ],
)
def test_a_wrong_field_is_named(recorder, is_error, fields, param, says) -> None:
    is_error(recorder.post(COMPLETIONS, {"max_tokens": 4, **fields}), 400, param=param, says=says)


def test_echo_with_log_probabilities_and_top_k_is_never_a_fault_of_ours(recorder, is_error) -> None:
    is_error(recorder.complete("x", echo=True, logprobs=1, top_k=1), 400, param="logprobs", says="with echo")
    assert recorder.complete("x", logprobs=1, top_k=1).status_code == 200


@pytest.mark.parametrize("prompt", ["2+2=", [53, 46, 53, 64]])
def test_echo_puts_the_prompt_before_the_answer_whole_and_streamed(recorder, prompt) -> None:
    asked = {"seed": 3, "max_tokens": 6, "n": 2}
    plain = [choice["text"] for choice in recorder.complete(prompt, **asked).json()["choices"]]
    echoed = [choice["text"] for choice in recorder.complete(prompt, echo=True, **asked).json()["choices"]]
    prefix = echoed[0].removesuffix(plain[0])
    assert prefix and echoed == [prefix + text for text in plain]
    assert not isinstance(prompt, str) or prefix == prompt
    streamed = ["", ""]
    for chunk in recorder.stream(COMPLETIONS, prompt=prompt, echo=True, **asked):
        for choice in chunk["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == echoed


def test_the_model_that_is_served_is_listed(recorder) -> None:
    (model,) = recorder.get("/v1/models").json()["data"]
    assert model["id"] == "starter"
    assert model["object"] == "model"
    assert isinstance(model["created"], int)


@pytest.mark.slow
def test_a_model_without_a_chat_template_completes_text_and_says_what_chat_needs(
    make_service, starter, tmp_path, is_error
) -> None:
    model = shutil.copytree(starter, tmp_path / "plain model")
    (model / "chat_template.jinja").unlink()
    service = make_service("--training.backend", "none", model=model).start()
    assert service.complete("1+1=").status_code == 200
    assert len(service.stream(COMPLETIONS, prompt="1+1=", max_tokens=4)) > 1
    for stream in (False, True):
        is_error(service.chat("1+1=", stream=stream), 400, code="no_chat_template", says="chat_template.jinja")
    assert service.get("/v1/models").json()["data"][0]["id"] == "plain model"
    assert service.stop() == 0
