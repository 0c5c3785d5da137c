"""One answer to each item, over the wire."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from reef_harness import Client, Evaluation, FinalGrader, Item, Retry, evaluate, wilson
from reef_harness.errors import HarnessError
from reef_harness.evaluation.evaluate import Answer
from reef_harness.evaluation.plot import learning_curve

ITEMS = [Item.from_text(f"item{i}", f"{i}", str(i)) for i in range(20)]


def run(service: Any, items: list[Item]) -> Evaluation:
    async def call() -> Evaluation:
        async with Client(service.url, scenario="sums", retry=Retry(total_s=0.2)) as client:
            return await evaluate(client, items, FinalGrader(), seed=100, concurrency=4)

    return asyncio.run(call())


def test_every_item_is_answered_once_as_evaluation_traffic(service: Any) -> None:
    service.answer = lambda prompt, index: f"<final>{prompt}</final>" if int(prompt) < 15 else f"it is {prompt}"
    result = run(service, ITEMS)
    assert (result.correct, result.graded, result.errors) == (15, 20, 0)
    assert (result.accuracy, result.format_valid, result.mean_tokens, result.release) == (0.75, 0.75, 7.0, "r0")
    assert (result.low, result.high) == wilson(15, 20)
    assert result.summary()["accuracy"] == 0.75
    assert [answer.item.id for answer in result.answers] == [item.id for item in ITEMS]
    assert all(headers["x-reef-purpose"] == "eval" for _, _, headers, _ in service.requests)
    assert sorted(body["seed"] for _, _, _, body in service.requests) == list(range(100, 120))
    assert service.reports == {}


def test_failed_requests_are_counted_and_left_out_of_the_shares(service: Any) -> None:
    service.answer = lambda prompt, index: f"<final>{prompt}</final>"
    service.faults.extend([400, "drop"])
    result = run(service, ITEMS)
    assert (result.graded, result.errors, result.accuracy) == (18, 2, 1.0)
    assert sum(answer.error is not None for answer in result.answers) == 2


def test_answers_of_two_releases_are_counted_apart_and_give_no_summary(service: Any) -> None:
    def answer(prompt: str, index: int) -> str:
        if len(service.receipts) == 15:
            service.release_names.append("r1")
        return f"<final>{prompt}</final>"

    service.answer = answer
    result = run(service, ITEMS)
    assert (sum(result.releases.values()), sorted(result.releases)) == (20, ["r0", "r1"])
    assert result.releases["r0"] > result.releases["r1"] and result.release == "r0"
    with pytest.raises(HarnessError, match=r"of 2 releases \(r0: \d+, r1: \d+\), so they measure none of them"):
        result.summary()


def test_a_progress_that_raises_ends_the_evaluation_and_no_request_comes_after_it(service: Any) -> None:
    """The other three workers would take the items that are left, one after the other, while their loop lives on."""

    told: list[Answer] = []

    async def call() -> None:
        def progress(answer: Answer) -> None:
            told.append(answer)
            if len(told) == 3:
                raise OSError("no space left")

        async with Client(service.url, scenario="sums", retry=Retry(total_s=0.2)) as client:
            with pytest.raises(OSError, match="no space left"):
                await evaluate(client, ITEMS, FinalGrader(), concurrency=4, progress=progress)
            assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(call())
    assert 3 <= len(told) <= len(service.requests) < len(ITEMS)


def test_an_evaluation_of_nothing_is_an_error(service: Any) -> None:
    with pytest.raises(HarnessError, match="there were no items"):
        run(service, [])
    service.faults.extend([400] * 20)
    with pytest.raises(HarnessError, match=r"none of 20 items .* told to answer 400"):
        run(service, ITEMS)


def test_the_learning_curve_is_drawn(tmp_path: Path) -> None:
    learning_curve(tmp_path / "c.png", [(0, 0.4), (1, 0.5)], [(0, 0.4, 0.3, 0.5), (2, 0.6, 0.5, 0.7)], "A title")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
