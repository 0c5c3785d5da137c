"""20,000 requests in sessions that nobody ends, some without the client that asked: what stays behind is flat."""

from __future__ import annotations

import asyncio
import random
import uuid
from typing import Any

import aiohttp
import pytest
import uvloop

from tests.load.clients import ask_and_vanish, request
from tests.load.looks import Held, look, metrics_of, receipts_of, rows_of, tasks_at_rest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NUM_REQUESTS = 20_000
NUM_ROUNDS = 5  # with a look after each
WARM_UP = 2_000  # until the caches, which have a bound, are full
NUM_CLIENTS = 96
FEW = 4
# Of Python's memory, from the first round to the last. One block for each of 16,000 requests would be more; idle
# connections to the engine take about 100 each, and there are now more of them, now fewer.
MAX_GROWN_BLOCKS = 12_000
MAX_GROWN_BYTES = 4 * 2**20  # of all memory, in the same 16,000 requests


class Client:
    """Asks one request after the other on a connection that it keeps.

    One in 16 it leaves before it is answered, one in 8 is a second turn of a conversation.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, seed: int) -> None:
        self._url = url
        self._session = session
        self._dice = random.Random(seed)
        self.told: list[str] = []  # receipts
        self.num_left = 0

    async def ask(self, num_requests: int) -> None:
        said: dict[str, Any] | None = None
        for _ in range(num_requests):
            kind = self._dice.random()
            if kind < 1 / 16:
                self.num_left += 1
                asked = request(self._dice, stream=self._dice.random() < 0.5, endless=True)
                moment = asyncio.sleep(self._dice.uniform(0, 0.1))
                await ask_and_vanish(self._url, *asked, moment, reset=self._dice.random() < 0.5)
            elif kind < 3 / 16 and said is not None:
                said = await self._ask("/v1/chat/completions", said)
            else:
                route, body = request(self._dice, stream=self._dice.random() < 0.5)
                said = await self._ask(route, body) or said

    async def _ask(self, route: str, body: dict[str, Any]) -> dict[str, Any] | None:
        """What the next turn of this chat would ask; None where it has none."""
        headers = {"x-reef-session": uuid.uuid4().hex}
        async with self._session.post(self._url + route, json=body, headers=headers) as response:
            content = await response.read()
            assert response.status == 200, content
        if body["stream"]:
            assert content.endswith(b"data: [DONE]\n\n"), content[-300:]
            _, found, rest = content.partition(b'"agent_record_id":"')
            assert found, content
            self.told.append(rest.partition(b'"')[0].decode())
            return None
        self.told.append(response.headers["x-reef-agent-record-id"])
        if route != "/v1/chat/completions" or len(body["messages"]) > 4:
            return None
        (choice,) = (await response.json())["choices"]
        turn = {"role": "assistant", "content": choice["message"]["content"]}
        return {**body, "messages": [*body["messages"], turn, {"role": "user", "content": "and then?"}]}


async def traffic(url: str, num_requests: int, seed: int) -> list[Client]:
    """The clients, once each has asked its share."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        clients = [Client(url, session, seed * NUM_CLIENTS + index) for index in range(NUM_CLIENTS)]
        shares = [num_requests // NUM_CLIENTS + (index < num_requests % NUM_CLIENTS) for index in range(NUM_CLIENTS)]
        await asyncio.gather(*(client.ask(share) for client, share in zip(clients, shares, strict=True)))
    return clients


def test_nothing_grows_over_20000_requests_in_sessions_that_never_end(loaded, engine, eventually) -> None:
    tasks = tasks_at_rest(loaded, engine.url)

    def quiet() -> Held:
        eventually(lambda: engine.seen()["in_work"] == 0, "the engine is idle")
        eventually(lambda: loaded.status()["in_flight"] == 0, "the service is idle")
        eventually(lambda: look(loaded, engine.url).clients == 0, "all connections of clients are closed")
        return eventually(lambda: (held := look(loaded, engine.url)).tasks == tasks and held, "no task is left")

    old = receipts_of(loaded)
    clients = uvloop.run(traffic(loaded.url, WARM_UP, 0))
    looks = [quiet()]
    for number in range(1, NUM_ROUNDS + 1):
        clients += uvloop.run(traffic(loaded.url, NUM_REQUESTS // NUM_ROUNDS, number))
        looks.append(quiet())
    print("\n".join(map(str, looks)))

    first, last = looks[1], looks[-1]
    for held in looks:
        assert held.tasks == first.tasks
        assert held.threads <= first.threads + FEW  # pools make their last threads late
        assert held.other_fds <= first.other_fds + FEW  # a reader of the ledger has two files
        assert held.to_engine <= 2 * NUM_CLIENTS  # kept for the next requests; each may have been told an abort as well
    assert last.blocks - first.blocks < MAX_GROWN_BLOCKS
    assert last.rss_bytes - first.rss_bytes < MAX_GROWN_BYTES
    metrics = metrics_of(loaded)
    assert metrics["reef_asyncio_tasks"] == first.tasks
    assert metrics["reef_in_flight"] == 0
    assert metrics["process_open_fds"] <= first.other_fds + 2 * NUM_CLIENTS + FEW

    # And what must stay has stayed.
    told = [id for client in clients for id in client.told]
    num_left = sum(client.num_left for client in clients)
    receipts, fates = dict(receipts_of(loaded).items() - old.items()), engine.seen()["fates"]
    assert len(told) == len(set(told)) == WARM_UP + NUM_REQUESTS - num_left
    assert {receipts[id] for id in told} == {(rid, "length") for rid, fate in fates.items() if fate == "finished"}
    others = [receipt for id, receipt in receipts.items() if id not in set(told)]
    assert {(fates[rid], reason) for rid, reason in others} == {("aborted", "abort")}
    assert len(others) <= sum(fate == "aborted" for fate in fates.values()) <= num_left
    # A client may vanish so early that the engine is told before the request itself has come.
    assert sum(fate == "noticed" for fate in fates.values()) < num_left / 20
    ((num_sessions,),) = rows_of(loaded, "SELECT count(DISTINCT session) FROM requests")
    assert num_sessions >= len(told) > 10_000
    ((num_continued,),) = rows_of(loaded, "SELECT count(*) FROM requests WHERE continued_by = 'messages'")
    assert num_continued > 1_000
