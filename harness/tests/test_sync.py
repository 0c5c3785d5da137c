"""The client without asyncio: the same methods and results, from threads, under a running loop, and closed."""

import asyncio
import gc
import inspect
import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
            client.wait_for_release(poll_s=0.01)
        except e.Closed as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not service.requests:
        time.sleep(0.01)
    client.close()
    client.close()
    waiting.join(60)
    assert len(caught) == 1
    assert "was closed meanwhile" in str(caught[0])
    with pytest.raises(e.Closed, match="is closed"):
        client.status()
    with pytest.raises(e.Closed, match="is closed"):
        next(iter(client.stream("hi")))
    assert {thread for thread in threading.enumerate() if thread.name.startswith("reef client")} <= before


def test_closed_beside_threads_that_ask_all_the_time_every_one_of_them_ends(service: Any) -> None:
    for _ in range(10):
        client = SyncClient(service.url, scenario="sums", retry=QUICK)
        ends: list[BaseException] = []

        def ask(client: SyncClient = client, ends: list[BaseException] = ends) -> None:
            try:
                while True:
                    client.scenarios()
            except e.Closed as error:
                ends.append(error)

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.02)
        client.close()
        for thread in threads:
            thread.join(60)
        assert [thread for thread in threads if thread.is_alive()] == []
        assert len(ends) == 4


def test_closed_while_connections_are_made_no_step_of_them_is_left_unawaited(service: Any) -> None:
    """Warnings are errors here: what anyio has begun for a connection is anyio's to end."""
    for round_ in range(40):
        client = SyncClient(service.url, scenario="sums", retry=QUICK)

        def ask(client: SyncClient = client) -> None:
            with suppress(e.Closed):
                client.scenarios()

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(6)]
        for thread in threads:
            thread.start()
        time.sleep(round_ % 8 / 1000)
        client.close()
        for thread in threads:
            thread.join(60)
        assert [thread for thread in threads if thread.is_alive()] == []
    gc.collect()


def test_what_is_asked_once_closing_has_begun_is_refused_at_once(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the last look at what waits and the end of the loop nothing more may be begun."""
    client = SyncClient(service.url, scenario="sums", retry=QUICK)
    real, closing, go_on = client._client.close, threading.Event(), threading.Event()

    async def slow() -> None:
        closing.set()
        await asyncio.to_thread(go_on.wait, 60)
        await real()

    monkeypatch.setattr(client._client, "close", slow)
    ends: list[BaseException] = []

    def ask() -> None:
        try:
            client.scenarios()
        except e.Closed as error:
            ends.append(error)

    closer, asker = threading.Thread(target=client.close), threading.Thread(target=ask, daemon=True)
    closer.start()
    assert closing.wait(60)
    asker.start()
    asker.join(60)
    assert len(ends) == 1
    go_on.set()
    closer.join(60)
    assert not closer.is_alive()


def test_in_a_forked_process_every_call_says_that_the_client_is_of_another(service: Any) -> None:
    def child() -> None:
        for call in (client.ready, lambda: client.chat("hi"), client.close, lambda: next(iter(client.stream("hi")))):
            try:
                call()
            except e.Closed as error:
                assert f"was made in another process, {parent}" in str(error)
            else:
                raise AssertionError(call)

    parent = os.getpid()
    with SyncClient(service.url, scenario="sums") as client:
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(60)
        if process.is_alive():
            process.kill()
        assert process.exitcode == 0
        assert client.ready()[0]  # here it goes on


def interrupt_once(begun: threading.Event) -> threading.Thread:
    """Interrupt the main thread once it waits for an answer that has begun."""
    main = threading.main_thread().ident or 0

    def send() -> None:
        begun.wait(60)
        while sys._current_frames()[main].f_code is not threading.Condition.wait.__code__:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_within_a_stream_is_a_keyboard_interrupt_and_the_stream_is_over(service: Any) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def events(whole: Any, release: str) -> Any:
        begun.set()
        go_on.wait(60)
        return iter(())

    service.events = events
    with SyncClient(service.url, max_connections=1) as client:
        sender = interrupt_once(begun)
        with pytest.raises(KeyboardInterrupt):
            list(client.stream("hi"))
        sender.join()
        go_on.set()
        assert client.ready()[0]  # the one connection is free


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_while_an_engine_starts_gives_it_back(service: Any) -> None:
    service.release_names = ["r0", "r1"]
    begun, go_on = threading.Event(), threading.Event()
    real = service.handle

    def handle(http: Any) -> None:
        if http.command == "POST":
            send = http.send_response
            http.send_response = lambda status: (begun.set(), go_on.wait(60), send(status))
        real(http)

    service.handle = handle
    with SyncClient(service.url, scenario="sums", retry=QUICK) as client:
        sender = interrupt_once(begun)
        with pytest.raises(KeyboardInterrupt), client.engine_for("r0"):
            raise AssertionError("the block must not begin")
        sender.join()
    assert service.engines == []
    go_on.set()


def test_an_engine_lent_to_one_thread_is_given_back_when_another_closes_the_client(service: Any) -> None:
    service.release_names = ["r0", "r1"]
    client = SyncClient(service.url, scenario="sums", retry=QUICK)
    with pytest.raises(KeyError, match="mine"), client.engine_for("r0"):
        closer = threading.Thread(target=client.close)
        closer.start()
        closer.join(60)
        assert service.engines == []
        raise KeyError("mine")
