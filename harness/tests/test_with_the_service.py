"""The client and the drivers against the real service, which only records: streams, turns, engines, reports."""

import asyncio
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from reef_harness import Client, Completion, Conversation, FinalGrader, GroupsDriver, Item, StreamDriver, SyncClient
from reef_harness import errors as e
from reef_harness.drivers import read_rollouts
from reef_harness.types import TextDelta

from recipes.arithmetic.service import ROOT, running_service
from recipes.arithmetic.task import train_stream

pytestmark = pytest.mark.slow
PROMPT = "Start at 9. Subtract 4. Add 3. Add 5."


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    run_dir = tmp_path_factory.mktemp("reef") / "run"
    flags = ("--training.backend", "none", "--reef.access", "open")
    program = (sys.executable, "-m", "reef")
    with running_service(ROOT / "serve.yaml", run_dir, flags, program=program, say=lambda _line: None) as url:
        yield url


def problems(count: int) -> Iterator[Item]:
    stream = itertools.islice(train_stream(4, 0), count)
    return (Item.from_text(f"p{i}", problem.text, str(problem.answer)) for i, problem in enumerate(stream))


def test_a_greedy_stream_adds_up_to_the_whole_answer_and_to_its_receipt(url: str) -> None:
    with SyncClient(url, scenario="arithmetic") as client:
        asked = {"temperature": 0.0, "max_tokens": 48, "n": 2, "logprobs": True, "token_ids": True}
        whole = client.chat(PROMPT, **asked)
        *deltas, last = client.stream(PROMPT, **asked)
        assert isinstance(last, Completion)
        for ours, theirs in zip(last.choices, whole.choices, strict=True):
            assert (ours.text, ours.token_ids) == (theirs.text, theirs.token_ids)
            assert ours.finish_reason == theirs.finish_reason
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
            assert ours.text == "".join(d.text for d in deltas if isinstance(d, TextDelta) and d.choice == ours.index)
            receipt = client.receipt(ours.receipt)
            assert receipt["token_ids"] == list(ours.token_ids)
            assert receipt["logprobs"] == pytest.approx(ours.logprobs, abs=1e-6)
            assert receipt["prompt_token_ids"] == list(last.prompt_token_ids)
        assert last.release == whole.release == client.current_release().id
        assert (last.prompt_tokens, last.completion_tokens) == (whole.prompt_tokens, whole.completion_tokens)
        assert len(last.choices[0].token_ids) * 2 == last.completion_tokens


def test_a_completion_from_ids_gives_ids_and_log_probabilities(url: str) -> None:
    with SyncClient(url, scenario="arithmetic") as client:
        answer = client.completions([3, 4, 5], max_tokens=5, logprobs=True, token_ids=True)
        assert answer.prompt_token_ids == (3, 4, 5)
        receipt = client.receipt(answer.receipt)
        assert receipt["token_ids"] == list(answer.choices[0].token_ids)
        assert receipt["logprobs"] == pytest.approx(answer.choices[0].logprobs, abs=1e-6)


def test_the_turns_of_a_conversation_continue_one_another(url: str) -> None:
    async def talk() -> None:
        async with Client(url, scenario="arithmetic") as client:
            conversation = Conversation(client, max_tokens=48)
            await conversation.say(PROMPT)
            second = await conversation.say("And now add 1.")
            first_id, second_id = conversation.receipts
            first, receipt = await client.receipt(first_id), await client.receipt(second_id)
            assert (receipt["parent"], receipt["continued_by"]) == (first_id, "explicit")
            both = first["prompt_token_ids"] + first["token_ids"]
            assert receipt["prompt_token_ids"][: len(both)] == both
            assert second.prompt_tokens == len(receipt["prompt_token_ids"])
            with pytest.raises(e.Conflict, match="does not continue"):
                await client.chat("Something else.", parent=first_id, max_tokens=4)
            with pytest.raises(e.NotFound):
                await client.chat(PROMPT, parent="rcp_nobody", max_tokens=4)

    asyncio.run(talk())


def test_a_stream_that_is_left_ends_on_the_engine(url: str) -> None:
    with SyncClient(url, scenario="arithmetic") as client:
        for _event in client.stream(PROMPT, max_tokens=256, extra={"ignore_eos": True}, session="left"):
            break
        while client.status()["in_flight"]:
            time.sleep(0.01)
        assert client.chat(PROMPT, max_tokens=4).receipt


def test_errors_come_with_the_services_words_and_text_goes_through_headers(url: str) -> None:
    with SyncClient(url, scenario="arithmetic") as client:
        with pytest.raises(e.BadRequest, match="unknown field nonsense") as caught:
            client.chat(PROMPT, extra={"nonsense": 1})
        assert caught.value.param == "nonsense"
        with pytest.raises(e.BadRequest, match="at most"):
            list(client.stream(PROMPT, max_tokens=10_000))
        with pytest.raises(e.Conflict) as conflict:
            client.chat(PROMPT, release="nobody")
        assert conflict.value.code == "release_not_served"
        with pytest.raises(e.NotFound):
            client.report("rcp_nobody", 1.0)
        receipt = client.chat(PROMPT, max_tokens=4, tags={"who": "Ä·雪"}, session="séance").receipt
        kept = client.receipt(receipt)
        assert (kept["tags"], kept["session"]) == ({"who": "Ä·雪"}, "séance")
        client.report(receipt, 1.0, report_id="mine")
        with pytest.raises(e.Conflict) as reused:
            client.report(receipt, 0.0, report_id="mine")
        assert reused.value.code == "id_reused"
        assert client.report(receipt, 1.0, report_id="mine").id == "mine"
        with pytest.raises(e.BadRequest, match="reference_scores: expected one per reference"):
            client.report(receipt, 1.0, reference_scores=[1.0, 0.0])


def test_why_knows_the_story_and_the_chain_can_be_paged(url: str) -> None:
    with SyncClient(url, scenario="arithmetic") as client:
        state = client.report(client.chat(PROMPT, max_tokens=4).receipt, 1.0)
        explained = client.why(state.id)
        assert explained.report is not None
        assert (explained.report.state, explained.report.reason) == ("recorded", "not_training")
        assert [event["event"] for event in explained.history][-1] == "recorded"
        (base,) = client.releases(limit=None)
        assert (base.number, base.operation, base.current, base.state) == (0, "base", True, "released")
        assert client.releases(before=0) == []
        assert client.release(base.id) == base


def test_an_engine_answers_for_the_release_that_is_asked_for(url: str) -> None:
    with SyncClient(url, scenario="arithmetic") as client:
        head = client.current_release().id
        with client.engine_for(head) as role:
            assert role == "serving"  # it only records, so what it serves stays
            assert client.chat(PROMPT, max_tokens=4, release=head, purpose="eval").release == head
        with pytest.raises(e.NotFound), client.engine_for("nobody"):
            raise AssertionError("the block must not begin")


@pytest.mark.parametrize(("kind", "per_item"), [(StreamDriver, 1), (GroupsDriver, 8)])
def test_a_driver_ends_once_all_is_recorded_and_a_second_life_adds_nothing(
    url: str, tmp_path: Path, kind: type[StreamDriver] | type[GroupsDriver], per_item: int
) -> None:
    path = tmp_path / "rollouts.jsonl"

    async def drive() -> int:
        async with Client(url, scenario="arithmetic") as client:
            with kind(client, problems(24), FinalGrader(), in_flight=8, records=path) as driver:
                end = await driver.run()
        assert (end.rollouts, end.failed, end.waiting, end.releases) == (24 * per_item, 0, 0, 0)
        return end.units

    assert asyncio.run(drive()) == 24
    rows = read_rollouts(path)
    assert {row.outcome for row in rows} == {"correct", "incorrect"}
    with SyncClient(url, scenario="arithmetic") as client:
        for row in rows[::11]:
            state = client.report_state(row.report or "")
            assert (state.state, state.raw["references"], state.raw["score"]) == ("recorded", [row.receipt], row.score)
            assert state.raw["group"] == row.group
    assert asyncio.run(drive()) == 0
    assert read_rollouts(path) == rows
