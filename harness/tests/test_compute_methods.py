"""Methods of test-time compute over the wire, with scripted answers: what is asked, what is counted, what is chosen."""

import asyncio
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from reef_harness import Client, FinalGrader, Item, Retry
from reef_harness.cli import main
from reef_harness.compute import (
    Asker,
    Beam,
    Budget,
    Outcome,
    Partial,
    Sample,
    beam_search,
    best_of,
    by_judge,
    by_logprob_mean,
    by_logprob_sum,
    by_verifier,
    revise,
    route,
    run_each,
    self_consistency,
    summarize,
)
from reef_harness.compute.scores import Scorer
from reef_harness.errors import BadRequest, HarnessError, UnexpectedAnswer
from reef_harness.graders import Grader, Verdict

Json = dict[str, Any]
GRADER = FinalGrader()
ITEM = Item.from_text("one", "What is one?", "1")
END = 0  # the id of the token that ends a turn


class Scripted:
    """Answers with texts in order, over the wire. A token is a character; one more ends the turn, if it fits.

    ``wrong_usage`` replaces the count of sampled tokens.
    """

    def __init__(self, service: Any, *texts: str, wrong_usage: int | None = None) -> None:
        self.texts: Iterator[str] = iter(texts)
        self.service, self.wrong_usage = service, wrong_usage
        service.chat = self.chat

    def chat(self, body: Json, prompt: str, headers: dict[str, str], kind: str) -> Json:
        choices = [self._choice(index, next(self.texts), body, kind) for index in range(body.get("n", 1))]
        headers["x-reef-release-id"] = "r0"
        headers["x-reef-agent-record-id"] = "c0"
        ids = body["prompt"] if kind == "text" else [ord(character) for character in prompt]
        sampled = sum(choice.pop("count") for choice in choices)
        usage = {"prompt_tokens": len(ids), "completion_tokens": self.wrong_usage or sampled}
        return {"choices": choices, "usage": usage, "prompt_token_ids": ids}

    def _choice(self, index: int, text: str, body: Json, kind: str) -> Json:
        tokens, reason = [*text, "<end>"], "stop"
        for stop in body.get("stop", ()):
            if stop in text:
                tokens = [*text[: text.index(stop) + len(stop)]]
                text = text[: text.index(stop)]
        if len(tokens) > body["max_tokens"]:
            tokens, reason = tokens[: body["max_tokens"]], "length"
            text = "".join(tokens)
        said: Json = {"message": {"role": "assistant", "content": text}} if kind == "message" else {"text": text}
        values = [-0.5] * len(tokens)
        logprobs = (
            {"content": [{"token": t, "logprob": v} for t, v in zip(tokens, values, strict=True)]}
            if kind == "message"
            else {"tokens": tokens, "token_logprobs": values}
        )
        ids = [END if token == "<end>" else ord(token) for token in tokens]
        return {
            "index": index,
            "finish_reason": reason,
            "reef_agent_record_id": f"c{index}",
            "token_ids": ids,
            "count": len(ids),
            **({"logprobs": logprobs} if body.get("logprobs") is not None else {}),
            **said,
        }


def asked(service: Any) -> list[Json]:
    return [body for _, path, _, body in service.requests if path.startswith("/v1/")]


def use(service: Any, method: Callable[[Asker], Awaitable[Any]], budget: Budget | None = None, **settings: Any) -> Any:
    async def call() -> Any:
        async with Client(service.url, scenario="sums", retry=Retry(total_s=0)) as client:
            return await method(Asker(client, budget or Budget(), **{"max_tokens": 40, "seed": 100, **settings}))

    return asyncio.run(call())


def final(value: int) -> str:
    return f"<final>{value}</final>"  # 16 characters: 17 tokens


# ---- the budget


def test_the_last_request_is_cut_to_what_is_left_and_the_next_is_not_sent(service: Any) -> None:
    Scripted(service, "abc", "abcdef", "abcdef")

    async def method(asker: Asker) -> tuple[list[tuple[Sample, ...]], Any]:
        return [await asker.chat(ITEM.messages) for _ in range(4)], asker.spent

    found, spent = use(service, method, Budget(sampled_tokens=12), max_tokens=7)
    assert [body["max_tokens"] for body in asked(service)] == [7, 7, 1]  # 4 + 7 + 1 = 12
    assert [samples[0].finish_reason for samples in found[:3]] == ["stop", "stop", "length"]
    assert found[3] == ()
    assert (spent.requests, spent.samples, spent.sampled_tokens, spent.prompt_tokens) == (3, 3, 12, 36)
    assert [body["seed"] for body in asked(service)] == [100, 101, 102]
    assert all(headers["x-reef-purpose"] == "eval" for _, path, headers, _ in service.requests if path[:3] == "/v1")


def test_several_answers_at_once_share_what_is_left(service: Any) -> None:
    Scripted(service, *["abcdefghij"] * 9)

    async def method(asker: Asker) -> list[int]:
        return [len(await asker.chat(ITEM.messages, n=4)) for _ in range(3)]

    assert use(service, method, Budget(sampled_tokens=30, samples=6, least=5), max_tokens=6) == [4, 1, 0]
    assert [(body["n"], body["max_tokens"]) for body in asked(service)] == [(4, 6), (1, 6)]  # 24, then 6: one of 5


def test_no_answer_is_asked_for_that_would_be_cut_for_certain(service: Any) -> None:
    Scripted(service, "abcdefg")

    async def method(asker: Asker) -> list[int]:
        return [len(await asker.chat(ITEM.messages)) for _ in range(2)]

    assert use(service, method, Budget(sampled_tokens=10, least=4)) == [1, 0]  # 8 used, 2 left


def test_the_number_of_samples_is_kept(service: Any) -> None:
    Scripted(service, "a", "a")

    async def method(asker: Asker) -> list[int]:
        return [len(await asker.chat(ITEM.messages)) for _ in range(3)]

    assert use(service, method, Budget(samples=2)) == [1, 1, 0]


def test_a_failed_request_is_counted_and_gives_its_reservation_back(service: Any) -> None:
    Scripted(service, "abc")
    service.faults.append(400)

    async def method(asker: Asker) -> Any:
        with pytest.raises(BadRequest):
            await asker.chat(ITEM.messages)
        assert asker.tokens_left == 5
        return await asker.chat(ITEM.messages), asker.spent

    samples, spent = use(service, method, Budget(sampled_tokens=5))
    assert samples[0].text == "abc"
    assert (spent.requests, spent.failed, spent.samples, spent.sampled_tokens) == (2, 1, 1, 4)


@pytest.mark.parametrize(("usage", "words"), [(41, "at most 40 tokens were asked for, 41 came")])
def test_a_service_whose_counts_cannot_be_trusted_is_an_error(service: Any, usage: int, words: str) -> None:
    Scripted(service, "abc", wrong_usage=usage)
    with pytest.raises(UnexpectedAnswer, match=words):
        use(service, lambda asker: asker.chat(ITEM.messages), Budget(sampled_tokens=50))


def test_impossible_budgets_are_refused() -> None:
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        Budget(samples=0)


# ---- self-consistency


def test_a_vote_stops_as_soon_as_the_rest_cannot_change_it(service: Any) -> None:
    Scripted(service, final(2), final(1), final(1), final(1), final(1))
    outcome = use(service, lambda asker: self_consistency(asker, ITEM, GRADER.read, 6))
    assert (outcome.answer, outcome.stopped_by, outcome.spent.samples) == ("1", "decided", 5)  # 4 : 1, one to come
    assert outcome.text == final(1)
    assert outcome.spent.sampled_tokens == 5 * 17


def test_the_whole_vote_draws_all_and_decides_the_same(service: Any) -> None:
    Scripted(service, final(2), *[final(1)] * 5)
    outcome = use(service, lambda asker: self_consistency(asker, ITEM, GRADER.read, 6, early_stop=False))
    assert (outcome.answer, outcome.stopped_by, outcome.spent.samples) == ("1", "samples", 6)


def test_a_tie_stays_a_tie(service: Any) -> None:
    Scripted(service, final(2), final(1), "I do not know", final(1), final(2))
    outcome = use(service, lambda asker: self_consistency(asker, ITEM, GRADER.read, 5))
    assert (outcome.answer, outcome.text) == (None, None)
    assert [candidate.answer for candidate in outcome.chosen] == ["2", "1"]
    row = asyncio.run(summarize("vote", [ITEM], [outcome], GRADER))
    assert row.accuracy is not None
    assert (row.accuracy.value, row.ties) == (0.5, 1)  # a random one of two


def test_an_answer_that_the_budget_cut_does_not_vote(service: Any) -> None:
    Scripted(service, final(1), final(2))
    outcome = use(service, lambda asker: self_consistency(asker, ITEM, GRADER.read, 4), Budget(sampled_tokens=17 + 16))
    assert (outcome.answer, outcome.stopped_by) == ("1", "budget")
    assert [(each.answer, each.finish_reason) for each in outcome.trace] == [("1", "stop"), (None, "length")]


# ---- best of n


@pytest.mark.parametrize(("score", "chosen"), [(by_logprob_sum, "2"), (by_logprob_mean, "1")])
def test_the_sum_of_log_probabilities_prefers_short_answers_and_the_mean_does_not(
    service: Any, score: Scorer, chosen: str
) -> None:
    Scripted(service, "because " + final(1), final(2))  # -0.5 a token: -12.5 and -8.5, both -0.5 in the mean
    outcome = use(service, lambda asker: best_of(asker, ITEM, GRADER.read, score, 2), logprobs=True)
    assert outcome.answer == chosen  # of equal means the first
    assert [each.score for each in outcome.trace] in ([-12.5, -8.5], [-0.5, -0.5])


def test_a_score_by_log_probability_without_them_is_an_error(service: Any) -> None:
    Scripted(service, final(1))
    with pytest.raises(HarnessError, match="logprobs=True"):
        use(service, lambda asker: best_of(asker, ITEM, GRADER.read, by_logprob_sum, 1))


def test_an_accepted_answer_ends_the_search(service: Any) -> None:
    Scripted(service, final(3), final(1))
    right = by_verifier(lambda item, sample: float("1" in sample.text))
    outcome = use(service, lambda asker: best_of(asker, ITEM, GRADER.read, right, 8, accept=1.0))
    assert (outcome.answer, outcome.stopped_by, outcome.spent.samples) == ("1", "accepted", 2)


class Judge(Grader):
    """Likes long answers, and leaves those that begin with a question mark to a person."""

    id, version = "long", "1"

    async def judge(self, item: Item, text: str, finish_reason: str) -> Verdict:
        assert item.gold is None  # it would be told what is right
        return self.grade(text, "", finish_reason)

    def grade(self, text: str, gold: str, finish_reason: str) -> Verdict:
        return self.review("unsure") if text.startswith("?") else self.decided(len(text) > 16, "length")


def test_what_a_judge_leaves_open_cannot_be_chosen(service: Any) -> None:
    Scripted(service, "?" * 30, final(2), "so: " + final(1))
    outcome = use(service, lambda asker: best_of(asker, ITEM, GRADER.read, by_judge(Judge()), 3))
    assert [each.score for each in outcome.trace] == [None, 0.0, 1.0]
    assert outcome.answer == "1"
    Scripted(service, "???")
    with pytest.raises(HarnessError, match="none of 1 answers to item 'one' could be scored"):
        use(service, lambda asker: best_of(asker, ITEM, GRADER.read, by_judge(Judge()), 1))


def test_a_grader_that_needs_the_right_answer_cannot_score(service: Any) -> None:
    Scripted(service, final(1))
    with pytest.raises(HarnessError, match="could be scored"):
        use(service, lambda asker: best_of(asker, ITEM, GRADER.read, by_judge(GRADER), 1))


def test_where_every_answer_was_cut_nothing_is_chosen(service: Any) -> None:
    Scripted(service, final(1))
    right = by_verifier(lambda item, sample: 1.0)
    outcome = use(service, lambda asker: best_of(asker, ITEM, GRADER.read, right, 8), Budget(sampled_tokens=9))
    assert (outcome.chosen, outcome.stopped_by, outcome.spent.samples) == ((), "budget", 1)


# ---- beam search


def starts_like(*wanted: str) -> Callable[[Item, Partial], float]:
    return lambda item, partial: float(any(text.startswith(partial.text) for text in wanted))


def test_beams_are_continued_by_their_own_ids_and_the_best_whole_answer_is_chosen(service: Any) -> None:
    whole = f"a, b {final(1)}"
    Scripted(service, "x, y", "a, z", f" c {final(3)}", f" b {final(1)}")
    outcome = use(
        service,
        lambda asker: beam_search(asker, ITEM, GRADER.read, starts_like(whole), Beam(",", 1, 2)),
        logprobs=True,
    )
    first, second = asked(service)
    assert first["stop"] == second["stop"] == [","]
    assert second["prompt"] == [ord(character) for character in ITEM.question + "a,"]
    assert (outcome.text, outcome.answer, outcome.stopped_by) == (whole, "1", "complete")
    assert [(each.text, each.score) for each in outcome.trace] == [(f"a, c {final(3)}", 0.0), (whole, 1.0)]
    assert outcome.spent.sampled_tokens == 2 + 2 + 20 + 20
    assert outcome.chosen[0].num_tokens == 2 + 20
    assert (outcome.chosen[0].receipts, outcome.chosen[0].releases) == (("c1", "c1"), ("r0", "r0"))  # of both parts


def test_a_floor_drops_what_is_wrong_and_begins_again_when_it_is_stuck(service: Any) -> None:
    whole = f"a, {final(1)}"
    wrong = f" {final(2)}"
    Scripted(service, "a,", wrong, wrong, "b,", "a,", f" {final(1)}")
    how = Beam(",", 1, 1, floor=1.0, accept=1.0, patience=2)
    outcome = use(service, lambda asker: beam_search(asker, ITEM, GRADER.read, starts_like(whole), how), logprobs=True)
    assert [path for _, path, _, _ in service.requests] == [
        "/v1/chat/completions",  # a,
        "/v1/completions",  # wrong
        "/v1/completions",  # wrong again: begin again
        "/v1/chat/completions",  # b, is wrong
        "/v1/chat/completions",  # a,
        "/v1/completions",
    ]
    assert (outcome.text, outcome.stopped_by) == (whole, "accepted")


def test_a_search_whose_budget_ends_keeps_the_best_whole_answer_it_has(service: Any) -> None:
    """Two at once have 20 tokens each: 17 and 2. Of the 21 left each gets 10 and is cut, and the last one 1."""
    Scripted(service, final(2), "a,", "b" * 20, "b" * 20, "c")
    how = Beam(",", 1, 2, floor=0.0)
    outcome = use(
        service,
        lambda asker: beam_search(asker, ITEM, GRADER.read, lambda item, partial: 0.0, how),
        Budget(sampled_tokens=40),
        logprobs=True,
    )
    assert (outcome.answer, outcome.stopped_by, outcome.spent.sampled_tokens) == ("2", "budget", 40)


def test_an_answer_below_the_floor_is_never_chosen(service: Any) -> None:
    Scripted(service, final(2), "abc")
    how = Beam(",", 1, 1, floor=0.5)
    outcome = use(
        service,
        lambda asker: beam_search(asker, ITEM, GRADER.read, lambda item, partial: 0.1, how),
        Budget(sampled_tokens=19),
        logprobs=True,
    )
    assert [(each.answer, each.score) for each in outcome.trace] == [("2", 0.1)]
    assert (outcome.chosen, outcome.stopped_by) == ((), "budget")
    with pytest.raises(ValueError, match=r"accept 0\.4 is below floor 0\.5"):
        Beam(",", floor=0.5, accept=0.4)


def test_a_score_that_is_no_number_is_refused(service: Any) -> None:
    """NaN is neither above nor below another score: the first answer with it would win over all that come later."""
    message = "an answer to item 'one' got the score nan"
    Scripted(service, final(3), final(1))
    strange = by_verifier(lambda item, sample: 1.0 if "1" in sample.text else math.nan)
    with pytest.raises(HarnessError, match=message):
        use(service, lambda asker: best_of(asker, ITEM, GRADER.read, strange, 2))
    Scripted(service, final(3), final(1))
    with pytest.raises(HarnessError, match=message):
        use(
            service,
            lambda asker: beam_search(asker, ITEM, GRADER.read, lambda item, partial: math.nan, Beam(",", 1, 2)),
            logprobs=True,
        )


def test_beams_of_the_same_content_are_one(service: Any) -> None:
    Scripted(service, "a,", "a,", "b,", "b,", *[final(1)] * 4)
    use(
        service,
        lambda asker: beam_search(asker, ITEM, GRADER.read, lambda item, partial: 0.5, Beam(",", 2, 2)),
        logprobs=True,
    )
    assert [body["prompt"][-2:] for body in asked(service)[1:]] == [[97, 44], [98, 44]]


# ---- revision


def test_the_second_turn_says_what_the_checker_found(service: Any) -> None:
    Scripted(service, final(2), final(1))
    outcome = use(
        service,
        lambda asker: revise(
            asker, ITEM, GRADER.read, lambda item, sample: "Not 2." if "2" in sample.text else None, rounds=3
        ),
    )
    assert (outcome.answer, outcome.stopped_by) == ("1", "accepted")
    assert [each.note for each in outcome.trace] == ["Not 2.", ""]
    assert asked(service)[1]["messages"] == [
        {"role": "user", "content": "What is one?"},
        {"role": "assistant", "content": final(2)},
        {"role": "user", "content": "Not 2."},
    ]


def test_a_checker_that_is_wrong_turns_right_into_wrong(service: Any) -> None:
    Scripted(service, final(1), final(7), "what?")
    outcome = use(service, lambda asker: revise(asker, ITEM, GRADER.read, lambda item, sample: "No.", rounds=2))
    assert (outcome.trace[0].answer, outcome.answer, outcome.stopped_by) == ("1", "7", "rounds")  # the last readable


def test_what_the_checker_accepts_is_chosen_though_the_grader_cannot_read_it(service: Any) -> None:
    Scripted(service, final(2), "it is one")
    outcome = use(
        service,
        lambda asker: revise(
            asker, ITEM, GRADER.read, lambda item, sample: "Not 2." if "2" in sample.text else None, rounds=3
        ),
    )
    assert (outcome.text, outcome.answer, outcome.stopped_by) == ("it is one", None, "accepted")


# ---- routing


def test_tokens_go_where_the_first_answers_disagree(service: Any) -> None:
    answers = {"sure": [1, 1], "unsure": [1, 2, 2, 2]}
    drawn = {name: iter(values) for name, values in answers.items()}

    class ByPrompt(Scripted):
        def chat(self, body: Json, prompt: str, headers: dict[str, str], kind: str) -> Json:
            self.texts = iter([final(next(drawn[prompt]))])
            return super().chat(body, prompt, headers, kind)

    ByPrompt(service)
    items = [Item.from_text(name, name, "2") for name in answers]

    async def call() -> list[Outcome]:
        async with Client(service.url, scenario="sums") as client:
            askers = [Asker(client, Budget()) for _ in items]
            return await route(askers, items, GRADER.read, tokens=2 * 51, first=2, most=4, least=17)

    sure, unsure = asyncio.run(call())
    assert (sure.answer, sure.stopped_by, sure.spent.samples) == ("1", "agreed", 2)
    assert (unsure.answer, unsure.stopped_by, unsure.spent.samples) == (
        "2",
        "samples",
        4,
    )  # its share of 3 answers, and that of the other's third
    assert sure.spent.sampled_tokens + unsure.spent.sampled_tokens == 2 * 51


def test_fewer_first_answers_than_were_asked_for_have_not_agreed(service: Any) -> None:
    """An answer has 17 tokens: of a share of 20, three answers are the first, one is drawn, and 3 tokens are left."""
    Scripted(service, final(1), final(1))
    items = [Item.from_text(name, name, "1") for name in ("one", "other")]

    async def call() -> list[Outcome]:
        async with Client(service.url, scenario="sums") as client:
            askers = [Asker(client, Budget()) for _ in items]
            return await route(askers, items, GRADER.read, tokens=2 * 20, first=3, most=4, least=17)

    for found in asyncio.run(call()):
        assert (found.answer, found.stopped_by, found.spent.samples) == ("1", "budget", 1)


# ---- over many items


def test_an_item_that_fails_is_an_error_and_the_others_go_on(service: Any) -> None:
    Scripted(service, *[final(1)] * 3)
    service.faults.append(400)
    items = [Item.from_text(f"i{number}", "?", "1") for number in range(4)]

    async def call() -> Any:
        async with Client(service.url, scenario="sums", retry=Retry(total_s=0)) as client:
            outcomes = await run_each(
                items,
                lambda item: Asker(client, Budget()),
                lambda asker, item: self_consistency(asker, item, GRADER.read, 1),
                concurrency=1,
            )
            return outcomes, await summarize("vote", items, outcomes, GRADER)

    outcomes, row = asyncio.run(call())
    assert outcomes[0].error.startswith("BadRequest")
    assert (row.accuracy.value, row.accuracy.items, row.errors, row.spent.requests) == (1.0, 3, 1, 4)
    with pytest.raises(HarnessError, match="none of 1 items could be answered; the first: BadRequest"):
        asyncio.run(summarize("vote", items[:1], outcomes[:1], GRADER))


def test_the_command_prints_a_table_and_writes_every_outcome(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Scripted(service, *[final(1)] * 3)
    rows = [{"id": "a", "prompt": "?", "gold": "1"}, {"id": "b", "prompt": "??", "gold": "1"}]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["compute", "vote", "--url", service.url, "--items", str(tmp_path / "items.jsonl"), "--grader", "final"]
    out = tmp_path / "out.jsonl"
    assert main([*arguments, "--samples", "2", "--limit", "1", "--out", str(out)]) == 0
    told = capsys.readouterr()
    assert "| vote   | 1.000 [" in told.out
    assert "vote: 100%|" in told.err
    assert "1/1 [" in told.err
    (line,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert (line["item"], line["answer"], line["spent"]["samples"]) == ("a", "1", 2)
    assert [(each["releases"], each["receipts"]) for each in line["trace"]] == [(["r0"], ["c0"])] * 2
    assert main([*arguments, "--out", str(out)]) == 1  # it cost tokens: it is not written over
    assert f"{out} holds outcomes already" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["vote", "coverage"])
def test_items_that_cannot_be_judged_are_named_once_for_each_reason(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    Scripted(service, *[final(1)] * 5)
    rows = [{"id": f"i{number}", "prompt": "?"} for number in range(4)] + [{"id": "good", "prompt": "?", "gold": "1"}]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ["--url", service.url, "--items", str(tmp_path / "items.jsonl"), "--grader", "final", "--samples", "1"]
    assert main(["compute", method, *common]) == 0
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "judged" in line] == ["no_gold: 4 items could not be judged: i0, i1, i2, …"]


def two_items(tmp_path: Path, service: Any) -> list[str]:
    """The options for two items that ask "?" and "??"; the right answer is 1."""
    rows = [{"id": "a", "prompt": "?", "gold": "1"}, {"id": "b", "prompt": "??", "gold": "1"}]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--url", service.url, "--items", str(tmp_path / "items.jsonl"), "--grader", "final"]


@pytest.mark.parametrize("method", [["vote", "--samples", "1"], ["route", "--first", "1", "--budget", "17"]])
def test_outcomes_are_there_as_soon_as_they_end(service: Any, tmp_path: Path, method: list[str]) -> None:
    """When the second item is asked for, the outcome of the first is in the file."""
    there: list[int] = []
    out = tmp_path / "out.jsonl"

    class Watching(Scripted):
        def chat(self, body: Json, prompt: str, headers: dict[str, str], kind: str) -> Json:
            there.append(len(out.read_text().splitlines()))
            return super().chat(body, prompt, headers, kind)

    Watching(service, final(1), final(1))
    command = ["compute", *method, *two_items(tmp_path, service), "--concurrency", "1", "--out", str(out)]
    assert main(command) == 0
    assert there == ([0, 1] if method[0] == "vote" else [0, 0])  # routing decides when all have their first answers
    assert sorted(json.loads(line)["item"] for line in out.read_text().splitlines()) == ["a", "b"]


def test_routing_asks_for_no_more_items_at_a_time_than_it_is_told(service: Any, tmp_path: Path) -> None:
    """Items draw their two answers one item after the other: their prompts do not alternate."""
    Scripted(service, *[final(1)] * 4)
    common = [*two_items(tmp_path, service), "--budget", "34", "--first", "2", "--concurrency", "1"]
    assert main(["compute", "route", *common]) == 0
    assert [body["messages"][0]["content"] for body in asked(service)] == ["?", "?", "??", "??"]


def test_the_command_says_that_several_releases_answered(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Renewed(Scripted):
        def chat(self, body: Json, prompt: str, headers: dict[str, str], kind: str) -> Json:
            answer = super().chat(body, prompt, headers, kind)
            headers["x-reef-release-id"] = "r0" if prompt == "?" else "r1"
            return answer

    Renewed(service, *[final(1)] * 4)
    command = ["compute", "vote", *two_items(tmp_path, service), "--samples", "2", "--all", "--concurrency", "1"]
    assert main(command) == 0
    assert "The answers are of 2 releases (r0: 2, r1: 2)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("beam", ["--verifier", "m:f", "--boundary", ",", "--samples", "4"]),
        ("revise", ["--checker", "m:f", "--samples", "4"]),
        ("coverage", ["--budget", "100"]),
    ],
)
def test_options_that_mean_nothing_for_a_method_are_refused(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, options: list[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["compute", method, *two_items(tmp_path, service), *options])
    assert f"unrecognized arguments: {' '.join(options[-2:])}" in capsys.readouterr().err
    assert service.requests == []


@pytest.mark.parametrize("options", [["--concurrency", "0"], ["--least", "5"], ["--limit", "-1"]])
def test_settings_that_mean_nothing_are_refused_before_a_request(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert main(["compute", "vote", *two_items(tmp_path, service), *options]) == 1
    assert options[0].removeprefix("--") in capsys.readouterr().err
    assert service.requests == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["vote", "--samples", "0"], "a budget's samples must be at least 1, got 0"),
        (["vote", "--max-tokens", "0"], "max_tokens must be at least 1, got 0"),
        (["vote", "--budget", "0"], "a budget's sampled_tokens must be at least 1, got 0"),
        (["revise", "--checker", "os:getcwd", "--rounds", "-1"], "rounds must be at least 0, got -1"),
        (["beam", "--verifier", "math:sqrt", "--boundary", ",", "--width", "0"], "numbers of at least 1"),
    ],
)
def test_numbers_that_mean_nothing_are_a_message_before_any_answer_is_asked_for(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["compute", options[0], *two_items(tmp_path, service), *options[1:]]) == 1
    assert words in capsys.readouterr().err
    assert service.paths("/v1/") == []


def test_what_a_function_of_the_users_raises_is_raised_as_it_is(service: Any) -> None:
    """By each of the items that are asked at once: no group of errors, which no ``except ValueError`` takes."""
    Scripted(service, *[final(1)] * 3)

    def check(item: Item, sample: Sample) -> None:
        raise ValueError("it cannot be read")

    async def run() -> None:
        async with Client(service.url, scenario="sums") as client:
            items = [Item.from_text(f"item{i}", "?", "1") for i in range(3)]
            await run_each(
                items, lambda item: Asker(client, Budget()), lambda asker, item: revise(asker, item, str, check, 1)
            )

    with pytest.raises(ValueError, match=r"^it cannot be read$"):
        asyncio.run(run())


FUNCTIONS = """
import math
from fractions import Fraction
from reef_harness import FinalGrader

def fails(item, given):
    if item.id == "a":
        raise KeyError("boom")
    return Fraction(1, 2)

def says(item, given):
    return "yes" if item.id == "a" else 1

def nothing(item, given):
    return math.nan if item.id == "a" else 1

def no_beam(item, partial):
    return None

def doubts(item, sample):
    return False if item.id == "a" else None

class Reads(FinalGrader):
    def read(self, text):
        return 1 / 0

class Lists(FinalGrader):
    def read(self, text):
        return [text]
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of a user's, found from the current directory."""
    name = f"functions_of_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    return name


BEAM, BEST, REVISE = ["beam", "--boundary", ",", "--verifier"], ["best-of", "--samples", "1", "--scorer"], ["--checker"]


@pytest.mark.parametrize(
    ("method", "name", "said"),
    [
        (BEAM, "fails", "KeyError: 'boom'"),
        (BEAM, "says", "expected a finite number, got 'yes'"),
        (BEAM, "nothing", "expected a finite number, got nan"),
        (BEST, "fails", "KeyError: 'boom'"),
        (BEST, "says", "expected a finite number or None, got 'yes'"),
        (["revise", "--rounds", "0", *REVISE], "doubts", "expected text or None, got False"),
    ],
)
def test_an_item_that_a_users_function_fails_at_is_an_error_and_the_others_go_on(
    service: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    functions: str,
    method: list[str],
    name: str,
    said: str,
) -> None:
    Scripted(service, *[final(1)] * 8)
    out, function = tmp_path / "out.jsonl", f"{functions}:{name}"
    assert main(["compute", *method, function, *two_items(tmp_path, service), "--out", str(out)]) == 0
    told = capsys.readouterr()
    assert f"a: HarnessError: {function}: item 'a': {said}" in told.err.splitlines()
    assert [line.split("|")[-2].strip() for line in told.out.splitlines() if "1.000" in line] == ["1"]  # errors
    lines = {line["item"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert [(lines[id]["stopped_by"] == "error", lines[id]["answer"]) for id in ("a", "b")] == [
        (True, None),
        (False, "1"),
    ]


def test_where_a_users_function_fails_at_every_item_the_command_fails(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], functions: str
) -> None:
    Scripted(service, *[final(1)] * 8)
    assert main(["compute", *BEAM, f"{functions}:no_beam", *two_items(tmp_path, service)]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        "reef-harness compute: beam: none of 2 items could be answered; the first: "
        f"HarnessError: {functions}:no_beam: item 'a': expected a finite number, got None"
    )


@pytest.mark.parametrize(
    ("grader", "said"), [("Reads", "ZeroDivisionError: division by zero"), ("Lists", "expected text or None, got [")]
)
@pytest.mark.parametrize("method", [["vote", "--samples", "1"], ["route", "--first", "1", "--budget", "17"]])
def test_a_users_grader_that_fails_to_read_is_a_message(
    service: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    functions: str,
    method: list[str],
    grader: str,
    said: str,
) -> None:
    Scripted(service, *[final(1)] * 2)
    name = f"{functions}:{grader}"
    assert main(["compute", *method, *two_items(tmp_path, service), "--grader", name]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line[0] for line in lines if line[1:].startswith(f": HarnessError: {name}: {said}")] == ["a", "b"]


def test_a_module_that_fails_is_a_message_before_any_answer_is_asked_for(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], functions: str
) -> None:
    (tmp_path / f"{functions}.py").write_text("def f(:")
    assert main(["compute", *BEAM, f"{functions}:f", *two_items(tmp_path, service)]) == 1
    assert f"reef-harness compute: {functions}:f: SyntaxError: " in capsys.readouterr().err
    assert service.requests == []


@pytest.mark.usefixtures("interruptible")
def test_interrupted_it_says_what_is_kept_and_how_to_go_on(
    service: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At its second item."""
    go_on = threading.Event()

    class Interrupting(Scripted):
        def chat(self, body: Json, prompt: str, headers: dict[str, str], kind: str) -> Json:
            if prompt == "??":
                os.kill(os.getpid(), signal.SIGINT)
                go_on.wait(60)
            return super().chat(body, prompt, headers, kind)

    Interrupting(service, *[final(1)] * 4)
    out = tmp_path / "out.jsonl"
    command = ["compute", "vote", *two_items(tmp_path, service), "--samples", "1", "--concurrency", "1", "--out"]
    try:
        assert main([*command, str(out)]) == 130
    finally:
        go_on.set()
    assert capsys.readouterr().err.endswith(
        f"what was answered is kept in {out}: the same command with another --out begins anew\nstopped\n"
    )
    assert [json.loads(line)["item"] for line in out.read_text().splitlines()] == ["a"]
    Scripted(service, *[final(1)] * 2)
    assert main([*command, str(tmp_path / "another.jsonl")]) == 0


def test_the_command_has_the_release_that_it_names_answer(service: Any, tmp_path: Path) -> None:
    Scripted(service, final(1))
    service.release_names.append("r1")  # it is served, and r0 needs an engine of its own
    (tmp_path / "items.jsonl").write_text('{"id": "a", "prompt": "?", "gold": "1"}\n')
    common = ["--url", service.url, "--items", str(tmp_path / "items.jsonl"), "--grader", "final"]
    assert main(["compute", "vote", *common, "--samples", "1", "--release", "r0"]) == 0
    paths = [(method, path.partition("?")[0]) for method, path, _, _ in service.requests if "/engine" in path]
    assert paths == [(method, "/reef/scenarios/sums/releases/r0/engine") for method in ("POST", "DELETE")]
    assert [headers["x-reef-release"] for _, path, headers, _ in service.requests if path[:3] == "/v1"] == ["r0"]


def test_the_command_says_what_it_does_not_know_before_it_looks_for_a_service(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "items.jsonl").write_text('{"id": "a", "prompt": "?", "gold": "1"}\n')
    common = ["--url", "http://127.0.0.1:9", "--items", str(tmp_path / "items.jsonl"), "--grader", "final"]
    assert main(["compute", "best-of", *common, "--scorer", "nonsense"]) == 1
    assert "expected MODULE:NAME, got 'nonsense'" in capsys.readouterr().err
    assert main(["compute", "best-of", *common, "--scorer", "no.such.module:f"]) == 1
    assert "No module named 'no'" in capsys.readouterr().err
    assert main(["compute", "route", *common]) == 1
    assert "--budget TOKENS" in capsys.readouterr().err
