"""What the embedded engine promises beyond the contract: strictness, bounds, seeds, its process."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from concurrent.futures import wait

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load, save_file

from reef.engines.answers import Chunk
from reef.engines.client import EngineClient
from reef.types import Generation, Request, Sampling

pytestmark = pytest.mark.slow  # servers of its own

PROMPT = [40, 50, 60, 70]


def asked_for(ids: list[int], max_tokens: int, top_logprobs: int) -> Request:
    """A greedy request, so that it can be made twice."""
    return Request(
        id="req_1", scenario="s", api="completions", prompt_ids=np.array(ids, dtype=np.int32),
        sampling=Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True), n=1, body=b"{}", created_at=0.0,
        top_logprobs=top_logprobs,
    )  # fmt: skip


async def both_ways(url: str, asked: Request) -> tuple[Generation, list[Chunk]]:
    """The same request, whole and streamed, through Reef's client."""
    client = EngineClient(url, 60.0)
    try:
        (whole,) = await client.generate(asked)
        return whole, [chunk async for chunk in client.stream(asked)]
    finally:
        await client.close()


@pytest.fixture(scope="module")
def small(start_embedded, model_dir, tmp_path_factory):
    """A server with tight bounds, without a tokenizer, and with incremental streams."""
    return start_embedded(
        model_dir("qwen2"), "--max-running-requests", "4", "--max-queued-requests", "8", "--max-total-tokens", "1600",
        "--skip-tokenizer-init", "--incremental-streaming-output", "--random-seed", "1", "--weight-version", "v0",
    )  # fmt: skip


# --- strictness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"input_idz": [1]}, "input_idz"),
        ({"text": "hello"}, "text"),
        ({"lora_path": "x"}, "lora_path"),
        ({"return_logprob": "yes"}, "return_logprob"),
        ({"input_ids": [1, True]}, "input_ids"),
        ({"input_ids": [1, 300]}, "input_ids"),
        ({"input_ids": [[1], []]}, "input_ids"),
        ({"input_ids": [[1], [2]], "rid": ["a"]}, "rid"),
        ({"logprob_start_len": 9, "return_logprob": True}, "logprob_start_len"),
        ({"sampling_params": {"regex": "a+"}}, "regex"),
        ({"sampling_params": {"json_schema": "{}"}}, "json_schema"),
        ({"sampling_params": {"ebnf": "root"}}, "ebnf"),
        ({"sampling_params": {"top_pp": 1}}, "top_pp"),
        ({"sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"sampling_params": {"n": 0}}, "n must"),
        ({"sampling_params": {"stop": ["x"]}}, "stop strings need a tokenizer"),
        ({"sampling_params": {"stop_token_ids": [-1]}}, "stop_token_ids"),
    ],
)
def test_what_is_unknown_or_unsupported_is_refused_by_name(small, body, named) -> None:
    response = small.post("/generate", **({"input_ids": PROMPT} | body))
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]


def test_neutral_values_of_unsupported_fields_pass(small) -> None:
    neutral = {"lora_path": None, "return_hidden_states": False, "image_data": [], "session_id": "s"}
    sampling = {"max_new_tokens": 1, "regex": None, "beam_width": None, "spaces_between_special_tokens": True}
    assert small.post("/generate", input_ids=PROMPT, sampling_params=sampling, **neutral).status_code == 200


def test_a_body_that_is_not_json_is_refused(small) -> None:
    response = small.client.post(small.url + "/generate", content=b"{")
    assert response.status_code == 400
    assert small.client.post(small.url + "/pause_generation", json={"mode": "sideways"}).status_code == 400
    assert small.post("/update_weights_from_disk", model_path="x", speed=3).status_code == 400


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_a_request_that_can_never_fit_the_cache_is_refused(small) -> None:
    assert "--max-total-tokens" in str(small.generate(PROMPT, 1700, expect=400))
    assert len(small.generate(PROMPT, 1500)["output_ids"]) == 1500


def test_no_bound_of_its_own_means_what_the_cache_leaves(small) -> None:
    answer = small.generate(PROMPT, None)
    assert len(answer["output_ids"]) == 1600 - len(PROMPT)


def test_a_full_queue_answers_503_and_takes_requests_again_later(small) -> None:
    small.post("/pause_generation", mode="retract")
    held = [small.pool.submit(small.generate, PROMPT, 2) for _ in range(8)]
    deadline = time.monotonic() + 60
    while small.get("/server_info").json()["internal_states"][0]["num_waiting_requests"] < 8:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    full = small.post("/generate", **small.body(PROMPT, 2))
    assert full.status_code == 503
    assert full.json() == {
        "object": "error", "message": "The request queue is full.", "type": "503", "param": None, "code": 503,
    }  # fmt: skip
    small.post("/continue_generation")
    assert len(wait(held, 60).done) == 8
    assert small.generate(PROMPT, 2)["output_ids"]


# --- streams and clients ----------------------------------------------------------------------------------------------


def test_incremental_streams_send_each_token_once(small) -> None:
    whole = small.generate(PROMPT, 9, sampling_seed=4)
    events = list(small.stream(PROMPT, 9, sampling_seed=4))
    assert [token for event in events for token in event["output_ids"]] == whole["output_ids"]
    entries = [entry for event in events for entry in event["meta_info"]["output_token_logprobs"]]
    assert entries == whole["meta_info"]["output_token_logprobs"]
    assert events[-1]["meta_info"]["completion_tokens"] == 9


@pytest.fixture(scope="module")
def repeating(start_embedded, model_dir):
    """A server as SGLang is without options: each event of a stream repeats all before it."""
    return start_embedded(model_dir("qwen2"), "--weight-version", "v0")


def test_streams_repeat_what_they_have_unless_told_otherwise(repeating) -> None:
    whole = repeating.generate(PROMPT, 12, temperature=0)
    events = list(repeating.stream(PROMPT, 12, temperature=0))
    for before, after in itertools.pairwise(events):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert after["text"].startswith(before["text"])
    for name in ("output_ids", "text"):
        assert events[-1][name] == whole[name]


@pytest.mark.parametrize("kind", ["small", "repeating"])
def test_the_client_reads_either_kind_of_stream(request, kind) -> None:
    server = request.getfixturevalue(kind)
    asked = asked_for(PROMPT, 40, top_logprobs=2)
    whole, chunks = asyncio.run(both_ways(server.url, asked))
    made = chunks[-1].generation
    assert len(chunks) > 2
    assert [token for chunk in chunks for token in chunk.ids] == made.output_ids.tolist() == whole.output_ids.tolist()
    assert [value for chunk in chunks for value in chunk.logprobs] == pytest.approx(made.logprobs.tolist())
    assert made.logprobs.tolist() == pytest.approx(whole.logprobs.tolist(), abs=1e-5)
    assert len(made.top_logprobs) == 40


def test_a_long_stream_brings_the_text_of_the_whole_answer(start_embedded, model_dir) -> None:
    """Bytes that form no character, characters over several tokens, special tokens: whatever a model may draw."""
    server = start_embedded(model_dir("qwen2"), "--incremental-streaming-output", "--weight-version", "v0")
    for seed in range(3):
        whole = server.generate(PROMPT, 300, sampling_seed=seed)
        events = list(server.stream(PROMPT, 300, sampling_seed=seed))
        assert "".join(event["text"] for event in events) == whole["text"]
        assert len(events) > 100


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_row_even_while_paused(small, stream) -> None:
    def running() -> int:
        return int(small.get("/server_info").json()["internal_states"][0]["num_running_requests"])

    def until(count: int) -> None:
        deadline = time.monotonic() + 60
        while running() != count:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    with httpx.Client() as client:
        body = small.body(PROMPT, 1500, stream=stream)
        request = client.build_request("POST", small.url + "/generate", json=body)
        if stream:
            response = client.send(request, stream=True)
            until(1)
            small.post("/pause_generation", mode="in_place")
            assert running() == 1
            response.close()
        else:
            with socket.create_connection(("127.0.0.1", int(small.url.rsplit(":", 1)[1]))) as raw:
                content = json.dumps(body).encode()
                head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
                raw.sendall(head.encode() + content)
                until(1)
                small.post("/pause_generation", mode="in_place")
                assert running() == 1
    until(0)
    small.post("/continue_generation")


def test_clients_that_leave_at_once_leave_nothing_behind(small) -> None:
    for attempt in range(10):
        content = json.dumps(small.body(PROMPT, 1500, stream=attempt % 2 == 0, rid="early")).encode()
        head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", int(small.url.rsplit(":", 1)[1]))) as raw:
            raw.sendall(head.encode() + content)
    deadline = time.monotonic() + 60
    while small.post("/generate", **small.body(PROMPT, 1, rid="early")).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    small.await_in_work(lambda num: num == 0, 60)  # the last of them may have been heard after that request


# --- sampling ---------------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_tokens_alone_and_in_company(contract_server) -> None:
    if contract_server.kind == "sglang":
        pytest.skip("SGLang heeds seeds only where it is told to be deterministic, which it cannot be on a CPU")
    alone = contract_server.generate(PROMPT, 32, sampling_seed=9)["output_ids"]
    jobs = [contract_server.pool.submit(contract_server.generate, [i + 5] * i, 20 + i) for i in range(1, 12)]
    crowded = contract_server.generate(PROMPT, 32, sampling_seed=9)["output_ids"]
    wait(jobs, 60)
    assert crowded == alone
    assert contract_server.generate(PROMPT, 32, sampling_seed=10)["output_ids"] != alone
    assert contract_server.generate(PROMPT, 32)["output_ids"] != contract_server.generate(PROMPT, 32)["output_ids"]


def test_sampled_first_tokens_follow_the_model_s_softmax(contract_server, reference) -> None:
    answers = contract_server.generate(PROMPT, 1, n=1000, sampling_seed=5, temperature=0.8)
    probs = reference(contract_server.path, PROMPT, 0.8)[-1].exp().double().numpy()
    counts = np.bincount([answer["output_ids"][0] for answer in answers], minlength=len(probs))
    likely = np.argsort(-probs)[: int((probs * 1000 > 10).sum())]
    observed = np.append(counts[likely], 1000 - counts[likely].sum())
    expected = np.append(probs[likely], 1 - probs[likely].sum()) * 1000
    freedom = len(likely)
    # Wilson and Hilferty's normal approximation of chi-square; 3.3 standard deviations is p = 0.0005.
    statistic = ((observed - expected) ** 2 / expected).sum()
    assert ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5 < 3.3


def test_top_k_top_p_and_min_p_restrict_the_tokens(contract_server, reference) -> None:
    probs = reference(contract_server.path, PROMPT)[-1].exp()
    order = probs.argsort(descending=True)
    nucleus = order[: int((probs[order].cumsum(0) < 0.5).sum()) + 1].tolist()
    likely = torch.nonzero(probs >= 0.5 * probs.max()).flatten().tolist()
    for options, allowed in (
        ({"top_k": 4}, order[:4].tolist()),
        ({"top_p": 0.5}, nucleus),
        ({"min_p": 0.5}, likely),
    ):
        answers = contract_server.generate(PROMPT, 1, n=200, **options)
        assert {answer["output_ids"][0] for answer in answers} <= set(allowed)


# --- loads ------------------------------------------------------------------------------------------------------------


def test_a_half_written_or_foreign_directory_is_refused_and_changes_nothing(small, copy_model, model_dir) -> None:
    before = small.generate(PROMPT, 12, temperature=0)["output_ids"]
    path = copy_model("qwen2")
    file = path / "model.safetensors"
    whole = file.read_bytes()
    tensors = load(whole)  # a copy: load_file maps the file that is damaged below
    changed = {name: tensor + 1 for name, tensor in tensors.items()}
    changed.pop("model.norm.weight")

    def refused(directory, said: str) -> None:
        response = small.load(directory, "half")
        assert response.status_code == 400
        assert response.json()["success"] is False
        assert said in response.json()["message"]

    file.write_bytes(whole[:-100])
    refused(path, "cannot read")
    save_file(changed, file)
    refused(path, "model.norm.weight")
    refused(model_dir("llama"), "architecture")
    answer = small.generate(PROMPT, 12, temperature=0)
    assert answer["output_ids"] == before
    assert answer["meta_info"]["weight_version"] == "v0"


def test_health_answers_while_a_load_takes_its_time(small, copy_model) -> None:
    path = copy_model("qwen2")
    content = json.dumps({"weight_map": {"model.norm.weight": "model.safetensors"}}).encode()
    file = path / "model.safetensors.index.json"
    os.mkfifo(file)  # a read of it blocks until someone writes
    loading = small.pool.submit(small.load, path, "slow")
    with file.open("wb") as pipe:
        waiting = small.pool.submit(small.generate, PROMPT, 2)
        for route in ("/health", "/model_info", "/server_info"):
            assert small.get(route).status_code == 200
        assert not loading.done()
        pipe.write(content)
    assert loading.result(60).json()["success"] is True
    assert waiting.result(60)["meta_info"]["weight_version"] == "slow"
    assert small.load(small.path, "v0").status_code == 200


# --- the process ------------------------------------------------------------------------------------------------------


def _run(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "reef.engines.embedded", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.slow
def test_a_bad_directory_a_taken_port_and_an_open_host_end_with_2_and_a_reason(tmp_path, small) -> None:
    bad = _run("--model-path", str(tmp_path), "--port", "0")
    assert (bad.returncode, "config.json" in bad.stderr) == (2, True)
    port = small.url.rsplit(":", 1)[1]
    taken = _run("--model-path", str(small.path), "--port", port)
    assert (taken.returncode, port in taken.stderr) == (2, True)
    exposed = _run("--model-path", str(small.path), "--host", "0.0.0.0")
    assert (exposed.returncode, "--api-key" in exposed.stderr) == (2, True)


@pytest.mark.slow
def test_sigterm_ends_it_cleanly_with_requests_in_flight_and_keys_are_asked_for(start_embedded, model_dir) -> None:
    server = start_embedded(model_dir("qwen2"), "--api-key", "secret")
    assert server.get("/health").status_code == 200
    assert server.get("/model_info").status_code == 401
    server.client.headers["authorization"] = "Bearer secret"
    assert "secret" not in server.get("/server_info").text
    running = server.started(PROMPT, 2000)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert running.result(60)["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.slow
def test_it_ends_when_its_parent_is_killed(model_dir, tmp_path) -> None:
    port_file = tmp_path / "port"
    script = textwrap.dedent(
        f"""
        import os, subprocess, sys, time
        subprocess.Popen([sys.executable, "-m", "reef.engines.embedded", "--model-path", {str(model_dir("qwen2"))!r},
            "--skip-tokenizer-init", "--port", "0", "--port-file", {str(port_file)!r},
            "--parent-pid", str(os.getpid())])
        time.sleep(600)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not port_file.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    url = f"http://127.0.0.1:{port_file.read_text().strip()}/health"
    deadline = time.monotonic() + 60
    with pytest.raises(httpx.TransportError):
        while time.monotonic() < deadline:
            httpx.get(url, timeout=2)
            time.sleep(0.05)
