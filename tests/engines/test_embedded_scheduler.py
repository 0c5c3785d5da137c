"""The scheduler without its thread: order, bounds, failures, loads."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

from reef.engines.embedded.architecture import read_architecture
from reef.engines.embedded.cache import KVCache
from reef.engines.embedded.errors import ModelError
from reef.engines.embedded.model import Model
from reef.engines.embedded.params import SamplingParams
from reef.engines.embedded.request import Request, Snapshot, VersionSpan, version_spans
from reef.engines.embedded.sampling import random_key
from reef.engines.embedded.scheduler import MAX_PREFILL_TOKENS, Scheduler
from reef.engines.embedded.weights import load_weights


class House:
    """A scheduler over a real tiny model that can be told to fail; runs on the test's own thread."""

    def __init__(self, path: pathlib.Path, max_rows: int = 8, max_tokens: int = 4096) -> None:
        arch = read_architecture(path)
        self.model = Model(arch, load_weights(path, arch, torch.float32))
        self.finished: list[Request] = []
        self.outputs: dict[str, Snapshot] = {}
        self.load_error: ModelError | None = None
        self.prefilled: list[tuple[int, int]] = []
        prefill = self.model.prefill

        def counted(ids: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            self.prefilled.append(tuple(ids.shape))
            return prefill(ids, *rest)

        self.model.prefill = counted  # type: ignore[method-assign]
        cache = KVCache(arch, torch.float32, max_rows, max_tokens)
        self.scheduler = Scheduler(self.model, cache, max_rows, "v0", self._load, self._send)

    def _load(self, _: pathlib.Path) -> None:
        if self.load_error:
            raise self.load_error

    def _send(self, request: Request, snapshot: Snapshot) -> None:
        self.outputs[request.rid] = snapshot
        if snapshot.finish:
            self.finished.append(request)

    def ask(self, rid: str, prompt: list[int], max_new: int, **changes: object) -> Request:
        params = SamplingParams(max_new_tokens=max_new)
        request = Request(
            rid=rid, call_rid=rid, prompt=np.array(prompt), params=params, max_new_tokens=max_new,
            random_key=random_key(len(prompt), 0), end_ids=frozenset(), return_logprob=True,
            logprob_start=len(prompt), num_top_logprobs=0, stream=False, sink=self._send,
        )  # fmt: skip
        for name, value in changes.items():
            setattr(request, name, value)
        self.scheduler.add(request)
        return request

    @torch.inference_mode()
    def run(self, steps: int = 1000) -> None:
        while steps and self.scheduler.has_work:
            self.scheduler.step()
            steps -= 1


@pytest.fixture
def house(model_dir) -> Callable[..., House]:
    return lambda **bounds: House(model_dir("qwen3-a"), **bounds)


def test_requests_are_admitted_in_order_of_arrival_within_the_rows(house) -> None:
    h = house(max_rows=2)
    for i in range(5):
        h.ask(f"r{i}", [5 + i, 6], 3)
    h.run(1)
    assert [r.rid for r in h.scheduler.rows.requests] == ["r0", "r1"]
    h.run()
    assert [r.rid for r in sorted(h.finished, key=lambda r: r.arrival)] == ["r0", "r1", "r2", "r3", "r4"]
    assert all(len(h.outputs[f"r{i}"].output_ids) == 3 for i in range(5))


@pytest.mark.slow
def test_a_long_request_waits_for_room_and_is_not_overtaken(house) -> None:
    h = house(max_rows=8, max_tokens=1024)
    h.ask("short", [5] * 10, 5)
    h.ask("long", [6] * 10, 900)  # the whole cache
    h.ask("after", [7] * 10, 5)
    h.run(1)
    assert [r.rid for r in h.scheduler.rows.requests] == ["short"]
    h.run()
    assert [r.rid for r in h.finished] == ["short", "long", "after"]


def test_one_step_prefills_a_bounded_number_of_tokens(house) -> None:
    h = house(max_rows=8, max_tokens=32768)
    for i in range(8):
        h.ask(f"r{i}", [i + 3] * 2000, 2)
    h.run(1)
    assert sum(rows * length for rows, length in h.prefilled) <= MAX_PREFILL_TOKENS
    h.run()
    assert len(h.finished) == 8


def test_equal_prompts_are_prefilled_once(house) -> None:
    h = house()
    for i in range(6):
        h.ask(f"r{i}", [9, 8, 7], 4, random_key=random_key(1, i))
    h.run()
    assert h.prefilled == [(1, 3)]
    assert len({tuple(h.outputs[f"r{i}"].output_ids) for i in range(6)}) > 1


def test_company_does_not_change_a_seeded_request(house) -> None:
    alone, crowded = house(), house()
    alone.ask("mine", [5, 6, 7], 40)
    alone.run()
    for i in range(3):
        crowded.ask(f"before{i}", [20 + i] * (5 + i), 7 + 9 * i)
    crowded.run(2)
    crowded.ask("mine", [5, 6, 7], 40)
    crowded.ask("behind", [30] * 50, 25)
    crowded.run()
    assert crowded.outputs["mine"].output_ids.tolist() == alone.outputs["mine"].output_ids.tolist()
    assert np.allclose(crowded.outputs["mine"].output_logprobs, alone.outputs["mine"].output_logprobs, atol=1e-4)


def test_retraction_keeps_tokens_and_order_and_changes_no_result(house) -> None:
    calm, disturbed = house(), house()
    for h in (calm, disturbed):
        for i in range(4):
            h.ask(f"r{i}", [5 + i] * (3 + i), 6 + 5 * i)
    calm.run()
    disturbed.run(9)  # r0 is done, and the last row has taken its place
    disturbed.scheduler.pause("retract")
    assert [r.rid for r in disturbed.scheduler.waiting] == ["r1", "r2", "r3"]
    assert not disturbed.scheduler.has_work
    disturbed.scheduler.resume()
    disturbed.run()
    for rid in calm.outputs:
        assert disturbed.outputs[rid].output_ids.tolist() == calm.outputs[rid].output_ids.tolist()
    assert {r.rid: r.num_retractions for r in disturbed.finished} == {"r0": 0, "r1": 1, "r2": 1, "r3": 1}


def test_a_failing_forward_pass_fails_its_requests_and_nothing_else(house, caplog) -> None:
    h = house()
    h.ask("hit", [5, 6], 10)
    h.run(3)
    decode = h.model.decode

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("no memory left")

    h.model.decode = broken
    h.run(1)
    finish = h.outputs["hit"].finish
    assert finish["status_code"] == 500
    assert "no memory left" in finish["message"]
    assert "forward pass failed" in caplog.text
    h.model.decode = decode
    h.ask("next", [5, 6], 10)
    h.run()
    assert h.outputs["next"].finish == {"type": "length", "length": 10}


def test_a_failing_prefill_spares_what_runs(house, caplog) -> None:
    h = house()
    h.ask("running", [5, 6], 10)
    h.run(2)
    prefill = h.model.prefill

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("bad prompt")

    h.model.prefill = broken
    h.ask("hit", [7, 8], 10)
    h.run(2)
    h.model.prefill = prefill
    h.run()
    assert h.outputs["hit"].finish["status_code"] == 500
    assert h.outputs["running"].finish == {"type": "length", "length": 10}


def test_logits_that_are_not_finite_end_their_request_only(house) -> None:
    h = house()
    h.ask("good", [5, 6], 6)
    h.ask("bad", [7, 8], 6)
    decode = h.model.decode

    def half_broken(*inputs: torch.Tensor) -> torch.Tensor:
        logits = decode(*inputs)
        if len(logits) == 2:
            logits[1] = float("nan")
        return logits

    h.model.decode = half_broken
    h.run()
    assert h.outputs["bad"].finish["status_code"] == 500
    assert h.outputs["good"].finish == {"type": "length", "length": 6}


def test_what_a_broken_request_leaves_in_the_cache_harms_nobody(house) -> None:
    clean, h = house(), house()
    clean.ask("next", [5, 6], 30)
    clean.run()
    h.model.weights.norm.fill_(float("nan"))
    h.model.weights.layers[0].attention_norm.fill_(float("nan"))  # keys and values become NaN too
    h.ask("bad", [9] * 40, 6)
    h.run()
    assert h.outputs["bad"].finish["status_code"] == 500
    h.model.weights = clean.model.weights
    h.ask("next", [5, 6], 30)
    h.ask("longer", [8] * 60, 30)  # makes "next" read columns that "bad" wrote
    h.run()
    assert h.outputs["next"].output_ids.tolist() == clean.outputs["next"].output_ids.tolist()


def test_a_load_waits_for_those_before_it_and_holds_those_after_it(house) -> None:
    h, replies = house(), []
    h.ask("before", [5, 6], 5)
    h.scheduler.request_load(pathlib.Path("w"), "v1", True, lambda *reply: replies.append(reply))
    h.ask("after", [5, 6], 5)
    h.run(2)
    assert replies == []
    assert [r.rid for r in h.scheduler.rows.requests] == ["before"]
    h.run()
    assert replies[0][0] is True
    assert h.outputs["before"].spans == (VersionSpan("v0", 0, 5),)
    assert h.outputs["after"].spans == (VersionSpan("v1", 0, 5),)


def test_a_failed_load_leaves_version_and_requests_alone(house, caplog) -> None:
    h, replies = house(), []
    h.load_error = ModelError("half written")
    h.ask("r", [5, 6], 5)
    h.run(2)
    h.scheduler.pause("in_place")
    h.scheduler.request_load(pathlib.Path("w"), "v1", False, lambda *reply: replies.append(reply))
    h.run(1)
    assert replies[0][0] is False
    assert "half written" in replies[0][1]
    h.scheduler.resume()
    h.run()
    assert h.outputs["r"].spans == (VersionSpan("v0", 0, 5),)


def test_a_load_that_would_flush_running_requests_is_refused_before_it_loads(house) -> None:
    h, replies = house(), []
    h.ask("r", [5, 6], 50)
    h.run(2)
    h.scheduler.pause("in_place")
    h.scheduler.request_load(pathlib.Path("w"), "v1", True, lambda *reply: replies.append(reply))
    h.run(1)
    assert replies[0][0] is False
    assert h.scheduler.version == "v0"


def test_three_versions_give_three_spans(house) -> None:
    h = house()
    h.ask("r", [5, 6], 9)
    for version in ("v1", "v2"):
        h.run(3 if version == "v1" else 2)
        h.scheduler.pause("retract")
        h.scheduler.request_load(pathlib.Path("w"), version, True, lambda *_: None)
        h.run(1)
        h.scheduler.resume()
    h.run()
    spans = h.outputs["r"].spans
    assert [span.version for span in spans] == ["v0", "v1", "v2"]
    assert spans[0].start == 0
    assert [span.end for span in spans[:-1]] == [span.start for span in spans[1:]]
    assert spans[-1].end == 9


def test_versions_that_sampled_nothing_have_no_span() -> None:
    assert version_spans([("a", 3), ("b", 3), ("c", 5)], 5) == (VersionSpan("a", 0, 3), VersionSpan("c", 3, 5))
    assert version_spans([("a", 3), ("a", 5)], 5) == (VersionSpan("a", 0, 5),)
    assert version_spans([("a", 0)], 0) == (VersionSpan("a", 0, 0),)


def test_close_answers_everything(house) -> None:
    h, replies = house(), []
    h.ask("running", [5, 6], 50)
    h.run(2)
    h.scheduler.request_load(pathlib.Path("w"), "v1", True, lambda *reply: replies.append(reply))
    h.ask("waiting", [5, 6], 50)
    h.scheduler.close()
    assert h.outputs["running"].finish["type"] == h.outputs["waiting"].finish["type"] == "abort"
    assert replies[0][0] is False
