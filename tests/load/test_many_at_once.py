"""512 chats at once, of which many lose their clients; 64 large bodies at once: what is stored, and what stays in work.

The engine is a stub in a process of its own (`stub_engine.py`), slow at random; everything else is real.
"""

from __future__ import annotations

import asyncio
import json
import random
import uuid

import httpx
import pytest

from tests.load.clients import Answer, ask, ask_and_vanish, request
from tests.load.looks import look, metrics_of, receipts_of, rows_of, tasks_at_rest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
NUM_CHATS = 512
NUM_BODIES = 64
BODY_BYTES = 500_000


class Storm:
    """The clients: half of them stream, some vanish before the first token, some while tokens come."""

    def __init__(self, url: str, engine, seed: int) -> None:
        self._url = url
        self._engine = engine
        self._dice = random.Random(seed)
        self._all_in = asyncio.Event()
        self._opened = asyncio.Event()

    async def rage(self) -> tuple[list[Answer], list[int]]:
        """What was read to the end, and the bytes that each vanished client had got."""
        patient, vanishing = [], []
        for index in range(NUM_CHATS):
            stream, n = index % 2 == 0, 2 if index % 16 < 2 else 1
            if index % 4 < 2:
                asked = request(self._dice, stream=stream, n=n)
                patient.append(asyncio.create_task(ask(self._url, *asked)))
            else:
                asked = request(self._dice, stream=stream, n=n, endless=True)
                event, longest_s = (self._all_in, 1.0) if index % 8 < 4 else (self._opened, 4.0)
                moment = _after(event, self._dice.uniform(0, longest_s))
                begun = stream and event is self._opened  # however long it takes until all have a token
                gone = ask_and_vanish(self._url, *asked, moment, reset=self._dice.random() < 0.5, begun=begun)
                vanishing.append(asyncio.create_task(gone))
        await self._until(lambda seen: seen["in_work"] == NUM_CHATS)
        self._all_in.set()
        await asyncio.sleep(1.0)
        await asyncio.to_thread(self._engine.gate, True)
        self._opened.set()
        return await asyncio.gather(*patient), await asyncio.gather(*vanishing)

    async def _until(self, condition) -> None:
        async with asyncio.timeout(120):
            while not condition(await asyncio.to_thread(self._engine.seen)):
                await asyncio.sleep(0.05)


async def _after(event: asyncio.Event, delay_s: float) -> None:
    await event.wait()
    await asyncio.sleep(delay_s)


def test_of_512_chats_at_once_every_answer_has_its_receipts_and_no_vanished_one_stays_in_work(
    loaded, engine, eventually
) -> None:
    tasks, old = tasks_at_rest(loaded, engine.url), receipts_of(loaded)
    engine.gate(False)
    answers, received = asyncio.run(Storm(loaded.url, engine, seed=1).rage())

    eventually(lambda: engine.seen()["in_work"] == 0, "every request of a vanished client was aborted")
    eventually(lambda: loaded.status()["in_flight"] == 0, "nothing is in work in the service")
    eventually(lambda: look(loaded, engine.url).tasks == tasks, "no task is left")
    seen, receipts = engine.seen(), dict(receipts_of(loaded).items() - old.items())
    assert seen["most"] == NUM_CHATS
    assert seen["twice"] == []
    assert len(seen["fates"]) == NUM_CHATS

    # Who waited got an answer, and each of its choices is in the ledger, finished.
    assert {answer.status for answer in answers} == {200}
    told = [receipt for answer in answers for receipt in answer.receipt_ids]
    assert len(told) == len(set(told)) == sum(len(answer.texts) for answer in answers) > NUM_CHATS / 2
    assert all(text for answer in answers for text in answer.texts)
    assert {receipts[id][1] for id in told} == {"length"}
    finished = {rid for rid, fate in seen["fates"].items() if fate == "finished"}
    assert {receipts[id][0] for id in told} == finished
    assert len(finished) == NUM_CHATS / 2

    # Who vanished is in the ledger with what had come by then, as aborted, or not at all.
    others = {id: receipt for id, receipt in receipts.items() if id not in told}
    aborted = {rid for rid, fate in seen["fates"].items() if fate == "aborted"}
    assert len(aborted) == NUM_CHATS / 2
    assert {reason for _, reason in others.values()} == {"abort"}
    assert {rid for rid, _ in others.values()} <= aborted
    assert len({rid for rid, _ in others.values()}) > 40  # streams that had begun
    assert sum(num_bytes > 0 for num_bytes in received) > 40
    assert sum(num_bytes == 0 for num_bytes in received) > 100

    assert loaded.status()["engines"][0]["in_flight"] == 0
    assert metrics_of(loaded)["reef_in_flight"] == 0
    eventually(lambda: look(loaded, engine.url).clients == 0, "all connections of clients are closed")
    assert "Traceback" not in loaded.log_tail(10_000)
    assert "ERROR" not in loaded.log_tail(10_000)


def test_clients_that_vanish_before_their_request_is_whole_leave_nothing(loaded, engine, eventually) -> None:
    tasks, old = tasks_at_rest(loaded, engine.url), receipts_of(loaded)
    dice = random.Random(2)

    async def storm() -> None:
        asked = [request(dice, stream=index % 2 == 0, endless=True) for index in range(256)]
        parts = [dice.uniform(0, 1) if index % 4 else 1.0 for index in range(256)]
        gone = [
            ask_and_vanish(
                loaded.url, *asked[i], asyncio.sleep(dice.uniform(0, 0.2)), reset=dice.random() < 0.5, sent=parts[i]
            )
            for i in range(256)
        ]
        await asyncio.gather(*gone)

    asyncio.run(storm())
    eventually(lambda: loaded.status()["in_flight"] == 0, "nothing is in work in the service")
    eventually(lambda: engine.seen()["in_work"] == 0, "every request that had begun was aborted")
    eventually(lambda: look(loaded, engine.url).tasks == tasks, "no task is left")
    assert set(engine.seen()["fates"].values()) <= {"aborted", "noticed"}
    assert {reason for _, reason in dict(receipts_of(loaded).items() - old.items()).values()} <= {"abort"}
    eventually(lambda: look(loaded, engine.url).clients == 0, "all connections of clients are closed")
    assert "Traceback" not in loaded.log_tail(10_000)
    assert "ERROR" not in loaded.log_tail(10_000)


def test_64_bodies_of_500_kb_that_come_at_once_are_all_stored_whole(loaded, engine) -> None:
    dice = random.Random(3)
    prompts = [[dice.randint(100, 299) for _ in range(BODY_BYTES // 5)] for _ in range(NUM_BODIES)]

    async def storm() -> list:
        bodies = [{"prompt": prompt, "max_tokens": 4, "stream": index % 2 == 0} for index, prompt in enumerate(prompts)]
        return await asyncio.gather(*(ask(loaded.url, "/v1/completions", body) for body in bodies))

    answers = asyncio.run(storm())
    assert [answer.status for answer in answers] == [200] * NUM_BODIES
    for prompt, answer in zip(prompts, answers, strict=True):
        (receipt_id,) = answer.receipt_ids
        receipt = loaded.receipt(receipt_id)
        assert receipt["prompt_token_ids"] == prompt
        assert receipt["request"]["prompt"] == prompt


def test_64_reports_of_500_kb_that_come_at_once_are_all_stored_whole(loaded) -> None:
    (receipt_id,) = asyncio.run(ask(loaded.url, "/v1/completions", {"prompt": "1+1=", "max_tokens": 2})).receipt_ids
    texts = {f"rep_{uuid.uuid4().hex}": chr(97 + index % 26) * BODY_BYTES for index in range(NUM_BODIES)}

    async def storm() -> list[int]:
        limits = httpx.Limits(max_connections=NUM_BODIES)
        async with httpx.AsyncClient(base_url=loaded.url, timeout=120, limits=limits) as http:
            bodies = [
                {"agent_record_id": id, "references": [receipt_id], "feedback": text} for id, text in texts.items()
            ]
            answers = await asyncio.gather(*(http.post("/reef/report", json=body) for body in bodies))
        return [answer.status_code for answer in answers]

    assert asyncio.run(storm()) == [200] * NUM_BODIES
    stored = dict(rows_of(loaded, f"SELECT id, body FROM reports WHERE id IN {tuple(texts)}"))
    assert {id: json.loads(body)["feedback"] for id, body in stored.items()} == texts
