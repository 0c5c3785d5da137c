"""Lanes: no request that is cancelled, fails or is left early costs the others their connection."""

import asyncio
import threading
from contextlib import aclosing
from typing import Any

import httpx
import pytest
from reef_harness import Client, Retry
from reef_harness.errors import Closed
from reef_harness.lanes import Lanes

QUICK = Retry(first_s=0.01, longest_s=0.02, total_s=0.3)


def through_a_proxy(service: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The service plays the proxy of the environment: it gets whole addresses, which are listed."""
    monkeypatch.setenv("http_proxy", service.url)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    real, asked = service.handle, []

    def proxy(http: Any) -> None:
        asked.append(http.path)
        http.path = http.path.removeprefix("http://reef.example")
        real(http)

    service.handle = proxy
    return asked


@pytest.mark.parametrize("proxied", [False, True])
@pytest.mark.parametrize(
    "moment",
    [
        "connection.connect_tcp.started",
        "connection.connect_tcp.complete",
        "http11.send_request_headers.complete",
        "http11.receive_response_headers.started",
        "http11.receive_response_headers.complete",
        "http11.receive_response_body.complete",
        "http11.response_closed.started",
        "http11.response_closed.complete",
    ],
)
def test_whenever_a_request_is_cancelled_the_next_one_goes_on(
    service: Any, monkeypatch: pytest.MonkeyPatch, moment: str, proxied: bool
) -> None:
    """Cancelled just after connecting, httpcore 1.0.9 keeps a connection that it neither uses again nor drops."""
    if proxied:
        through_a_proxy(service, monkeypatch)

    async def run() -> tuple[bool, int]:
        url = "http://reef.example" if proxied else service.url
        async with Client(url, scenario="sums", max_connections=1, retry=QUICK) as client:
            seen = asyncio.Event()

            async def cancel(event: str, info: Any) -> None:
                if event == moment and not seen.is_set():
                    seen.set()
                    task.cancel()  # comes at the next await that waits, which is httpcore's

            task = asyncio.create_task(client._http.get("/readyz", extensions={"trace": cancel}))
            await asyncio.gather(task, return_exceptions=True)
            async with asyncio.timeout(60):
                answers = [await client.chat("hi") for _ in range(3)]
            return seen.is_set(), len(answers)

    assert asyncio.run(run()) == (True, 3)


def test_a_lane_is_used_again_after_whole_answers_only(service: Any) -> None:
    made = []

    def make() -> httpx.AsyncHTTPTransport:
        made.append(httpx.AsyncHTTPTransport())
        return made[-1]

    async def run() -> list[int]:
        counts = []
        async with httpx.AsyncClient(transport=Lanes(make, 1), base_url=service.url) as http:
            for _ in range(3):
                await http.get("/readyz")
            counts.append(len(made))
            async with http.stream("GET", "/readyz"):
                pass  # left before its body
            service.faults.append("drop")
            with pytest.raises(httpx.RemoteProtocolError):
                await http.get("/readyz")
            await http.get("/readyz")
            counts.append(len(made))
        return counts

    assert asyncio.run(run()) == [1, 3]


def test_lanes_that_cannot_be_opened_leave_room_for_others() -> None:
    async def run() -> None:
        lanes = Lanes(lambda: (_ for _ in ()).throw(OSError("no more")), 1)
        for _ in range(2):
            async with asyncio.timeout(60):
                with pytest.raises(OSError, match="no more"):
                    await lanes.handle_async_request(httpx.Request("GET", "http://127.0.0.1"))

    asyncio.run(run())


def test_closed_whoever_asks_or_waits_for_a_lane_is_told_so_and_no_connection_is_opened_any_more(service: Any) -> None:
    begun, go_on = threading.Event(), threading.Event()
    service.answer = lambda prompt, index: (begun.set(), go_on.wait(60), "late")[2]

    async def run() -> tuple[list[type], int]:
        client = Client(service.url, scenario="sums", max_connections=1, retry=QUICK)
        asked = [asyncio.create_task(client.chat(f"p{i}")) for i in range(3)]
        await asyncio.to_thread(begun.wait, 60)
        await client.close()
        ends = await asyncio.gather(*asked, return_exceptions=True)
        return [type(end) for end in ends], len(client._http._transport._all)  # type: ignore[attr-defined]

    try:
        ends = asyncio.run(run())
    finally:
        go_on.set()
    assert ends == ([Closed, Closed, Closed], 0)
    assert len(service.paths("/v1/")) == 1


def test_closed_within_a_stream_that_holds_the_only_lane_both_it_and_who_waits_are_told_so(service: Any) -> None:
    go_on = threading.Event()
    real = service.events

    def slow(whole: Any, release: str) -> Any:
        events = real(whole, release)
        yield from (next(events), next(events))
        go_on.wait(60)

    service.events = slow

    async def run() -> None:
        client = Client(service.url, scenario="sums", max_connections=1, retry=QUICK)
        async with aclosing(client.stream("hi")) as events:
            await anext(events)
            waiting = asyncio.create_task(client.chat("hi"))
            await asyncio.sleep(0)
            await client.close()
            with pytest.raises(Closed):
                await waiting
            with pytest.raises(Closed):
                await anext(events)

    try:
        asyncio.run(run())
    finally:
        go_on.set()


def test_a_lane_that_was_connecting_when_all_were_closed_gives_no_answer() -> None:
    """httpcore 1.0.9 goes on with a connection that it was opening, though its pool was closed."""
    closed = []

    class Connecting(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            await lanes.aclose()
            return httpx.Response(200, stream=httpx.ByteStream(b"late"))

        async def aclose(self) -> None:
            closed.append(self)

    async def run() -> None:
        with pytest.raises(Closed, match="was closed meanwhile"):
            await lanes.handle_async_request(httpx.Request("GET", "http://127.0.0.1/x"))

    lanes = Lanes(Connecting, 1)
    asyncio.run(run())
    assert len(closed) >= 1


def test_a_service_elsewhere_is_asked_through_the_proxy_of_the_environment(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = through_a_proxy(service, monkeypatch)

    async def run() -> int:
        async with Client("http://reef.example", scenario="sums", max_connections=2, retry=QUICK) as client:
            return len(await asyncio.gather(*(client.chat("hi") for _ in range(6))))

    assert asyncio.run(run()) == 6
    assert asked == ["http://reef.example/v1/chat/completions"] * 6
