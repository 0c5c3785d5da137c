"""The client without asyncio: the same methods and results, from threads, under a running loop, and closed."""

import asyncio
import inspect
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from reef_harness import Client, Completion, Retry, SyncClient
from reef_harness import errors as e
from reef_harness.types import TextDelta

QUICK = Retry(first_s=0.01, longest_s=0.02, total_s=0.3)


def public(kind: type) -> dict[str, str]:
    """Public methods and their parameters."""
    methods = {name: value for name, value in vars(kind).items() if not name.startswith("_") and callable(value)}
    return {name: str(inspect.signature(value)).partition(" ->")[0] for name, value in methods.items()}


def test_both_clients_have_the_same_methods_with_the_same_arguments() -> None:
    assert public(SyncClient) == public(Client)
    assert inspect.signature(SyncClient) == inspect.signature(Client)


def test_it_asks_reports_and_follows(service: Any) -> None:
    service.batch_size = 1
    service.release_names = ["r0", "r1"]
    with SyncClient(service.url, scenario="sums", retry=QUICK) as client:
        answer = client.chat("hi")
        state = client.report(answer.receipt, 1.0)
        assert (state.state, state.release) == ("trained", "r2")
        assert client.why(state.id).lineage == {"release_id": "r2", "samples": [{"report_id": state.id}]}
        assert client.completions([1, 2], token_ids=True).choices[0].token_ids == (10, 20)
        assert [release.id for release in client.releases(limit=1)] == ["r2"]
        assert client.current_release().id == client.wait_for_release(after="r1").id == "r2"
        with client.engine_for("r0") as role:
            assert (role, service.engines) == ("evaluation", ["r0"])
        assert service.engines == []
        with pytest.raises(KeyError), client.engine_for("r0"):
            raise KeyError
        assert service.engines == []
        with pytest.raises(e.NotFound):
            client.why("nothing")
        with pytest.raises(TimeoutError):
            client.wait_for_release(timeout_s=0.05, poll_s=0.01)
        assert client.ready() == (True, '{"ready": true}')
        assert (client.url, client.scenario) == (service.url, "sums")


def test_a_stream_is_a_plain_iterator_and_may_be_left(service: Any) -> None:
    with SyncClient(service.url, max_connections=1) as client:
        *deltas, last = client.stream("hi")
        assert isinstance(last, Completion)
        assert "".join(delta.text for delta in deltas) == last.text
        for event in client.stream("hi"):
            assert event == TextDelta(0, "1+1=2.")
            break
        assert client.chat("hi").receipt == "c2"
        service.stream_fault = "cut"
        with pytest.raises(e.BrokenStream):
            list(client.stream("hi"))


def test_many_threads_share_one_client(service: Any) -> None:
    with SyncClient(service.url) as client, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: client.chat(f"p{i}"), range(40)))
    assert {answer.receipt for answer in answers} == {f"c{i}" for i in range(40)}


def test_it_works_where_a_loop_runs_already_as_in_a_notebook(service: Any) -> None:
    async def cell() -> str:
        with SyncClient(service.url) as client:
            return client.chat("hi").receipt

    assert asyncio.run(cell()) == "c0"


def test_closed_it_says_so_leaves_no_thread_and_ends_who_waits(service: Any) -> None:
    before = set(threading.enumerate())
    client = SyncClient(service.url, scenario="sums")
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            client.wait_for_release(timeout_s=30.0, poll_s=0.01)
        except e.Closed as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not service.requests:
        time.sleep(0.01)
    client.close()
    client.close()
    waiting.join(5)
    assert len(caught) == 1
    assert "was closed meanwhile" in str(caught[0])
    with pytest.raises(e.Closed, match="is closed"):
        client.status()
    with pytest.raises(e.Closed, match="is closed"):
        next(iter(client.stream("hi")))
    assert {thread for thread in threading.enumerate() if thread.name.startswith("reef client")} <= before
